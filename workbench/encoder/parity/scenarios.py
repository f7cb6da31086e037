"""The conditions that break encoder graphs, by name.

A scenario is a function of the lab and a budget that yields observations. It builds its calls from the lab's own
budgets, so it means the same on a tiny encoder and on a full one. Scenarios of one call per budget get `budget`,
those that span budgets get None.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from workbench.budgets import Configuration
from workbench.encoder.parity.tape import captured_budgets
from workbench.models import Modality
from workbench.parity import Finding, Severity

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab, Observation
    from workbench.encoder.session import EncoderInputs, Grid

Run = Callable[["Lab", int | None], Iterator["Observation"]]
POISONS = {"NaN": float("nan"), "infinity": float("inf"), "1e38": 1e38}
SMALL_REQUEST = 1 << 20  # bytes; kSmallSize of torch's CUDACachingAllocator
VIDEO_FRAMES = 8  # frames per item of the manager that the video scenarios capture


class NotTestedError(Exception):
    """Raised by a scenario that has no meaning here; the text is the reason."""


@dataclass(frozen=True)
class Scenario:
    """One condition.

    Attributes:
        spans: it uses several budgets, so it runs once and not per budget.
        modality: "video" needs a model with video graphs, and a manager that allows them.
        needs: "cuda" for what a static replay cannot show.
        child: it may end the process, so the matrix runs it in a child process.
    """

    name: str
    title: str
    run: Run
    spans: bool = False
    modality: Modality = "image"
    needs: Literal["cpu", "cuda"] = "cpu"
    child: bool = False


SCENARIOS: dict[str, Scenario] = {}


def scenario(title: str, **options: Any) -> Callable[[Run], Run]:
    """Register a scenario under the function's name."""

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name=name, title=title, run=run, **options)
        return run

    return register


def near_square(tokens: int, merge: int, frames: int = 1) -> "Grid":
    """Return the grid of `tokens` output tokens per frame whose sides differ least."""
    short = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
    return frames, short * merge, tokens // short * merge


# One call at one budget --------------------------------------------------------------------------------------------


@scenario("one item from 1 token to a full budget")
def fills(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """Every budget at fills 1 token … full; small items of a large budget share it with one that needs it."""
    assert budget is not None
    below = max((b for b in lab.budgets if b < budget), default=0)
    for tokens in sorted({1, budget // 4, budget // 2, budget - 1, budget}):
        if tokens < 1:
            continue
        if tokens > below:
            yield lab.observe([_grid(lab, tokens)], "fills", padded=True)
        elif lab.manager.max_batch_size > 1 and budget - tokens > below:
            # Alone it would go to a smaller budget.
            yield lab.observe([_grid(lab, tokens), _grid(lab, below + 1)], "fills", padded=True)


@scenario("exactly full, one token less, one more")
def exact_fit(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """Items that fill the budget to the last row, and its neighbours."""
    assert budget is not None
    for total in (budget, budget - 1, budget + 1):
        if not 2 <= total <= max(lab.budgets):
            continue
        items = min(2, lab.manager.max_batch_size)
        yield lab.observe([_grid(lab, n) for n in _parts(total, items)], "exact-fit", padded=True)


@scenario("as many items as allowed, and one more")
def max_items(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """Max items fill the budget; one more opens a second replay."""
    assert budget is not None
    items = lab.manager.max_batch_size
    for count in (items, items + 1):
        yield lab.observe([_grid(lab, n) for n in _parts(budget, items)[:1] * count], "max-items", padded=True)
    yield lab.observe([_grid(lab, n) for n in _parts(budget, items)], "max-items", padded=True)


@scenario("the same call three times")
def repeat(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """Replays of the same inputs must give the same bits."""
    call = lab.inputs(_usual(lab, budget))
    first = lab.observe(call, "repeat")
    yield first
    for _ in range(2):
        again = lab.observe(call, "repeat")
        if _fine(first, again) and _bits_differ(first.outputs, again.outputs):
            _add(again, "replay", "the same call gives other bits when it is replayed again", mismatch=False)
        yield again


@scenario("an earlier result while later calls run")
def retained(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """A result that a caller still holds must not change."""
    first = lab.observe(_usual(lab, budget), "retained")
    kept = [output.clone() for output in first.outputs]
    yield first
    for other in (_usual(lab, budget), [_grid(lab, 1)], [_grid(lab, max(lab.budgets))]):
        later = lab.observe(other, "retained")
        if _bits_differ(first.outputs, kept):
            _add(later, "output", "an earlier result changed when this call ran")
            kept = [output.clone() for output in first.outputs]
        yield later


@scenario("all buffers hold NaN, infinity or huge values before")
def poisoned_buffers(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """The manager must overwrite whatever an earlier replay left."""
    for name, value in POISONS.items():
        call = lab.inputs(_usual(lab, budget))
        if "one_pass" in lab.variants:
            _leave_behind(lab, value)
        else:
            _fill_buffers(lab, value)
        seen = lab.observe(call, "poisoned-buffers")
        seen.findings = [
            msgspec.structs.replace(finding, message=f"{finding.message} (poison: {name})") for finding in seen.findings
        ]
        yield seen
    if "one_pass" in lab.variants:
        # What those calls left between the layers is not to reach the scenarios behind this one.
        _leave_behind(lab, 0.0)


@scenario("padded rows hold NaN, infinity or huge values at the replay")
def poisoned_padding(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """What if padding were not zero? Breaks the manager's promise, so what it shows is a hazard."""
    for name, value in POISONS.items():
        call = lab.inputs(_usual(lab, budget))
        rows = sum(prod(grid) for grid in call.grids)
        spoiled: list[torch.Tensor] = []

        def poison(
            captured: Any, rows: int = rows, value: float = value, spoiled: list[torch.Tensor] = spoiled
        ) -> None:
            total = captured.input_buffers["pixel_values"].shape[0]
            for key, buffer in captured.input_buffers.items():
                if buffer is not None and buffer.ndim > 1 and key != "cu_seqlens" and buffer.shape[0] == total:
                    buffer[rows:] = value
                    spoiled.append(buffer[rows:])

        seen = lab.observe(call, "poisoned-padding", before_replay=poison, probe=True)
        with torch.inference_mode():
            for behind in spoiled:
                behind.zero_()  # what the manager left there; variant one_pass relies on it
        # That the padding is not zero, and stays what it was, is this scenario's own doing.
        seen.findings = [f for f in seen.findings if f.suspect != "padding" and "are not finite" not in f.message]
        if "hazard" in seen.item_statuses and not seen.findings:
            message = f"{name} in padded rows reaches valid ones: a kernel reads behind the last sequence"
            _add(seen, "attention", message, mismatch=False)
        yield seen


@scenario("one item in different company, same total")
def company(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """Compositions with the same total tokens: the shared item's output may differ by rounding only."""
    assert budget is not None
    items = lab.manager.max_batch_size
    if items < 2 or budget < 4:
        raise NotTestedError("a replay holds one item here")
    own = max(1, budget // 4)
    kept: torch.Tensor | None = None
    base = lab.inputs([_grid(lab, own)])
    for count in sorted({1, 2, items - 1}):
        if count > items - 1:
            continue
        others = lab.inputs([_grid(lab, n) for n in _parts(budget - own, count)])
        seen = lab.observe(_joined(base, others), "company", padded=True)
        if _fine(seen):
            if kept is not None:
                _check_same(lab, seen, seen.outputs[0], kept)
            kept = seen.outputs[0].clone()
        yield seen


@scenario("one row or one column of tokens")
def aspect(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """Extreme aspect ratios."""
    assert budget is not None
    merge = lab.session.facts.merge
    for grid in ((1, merge, budget * merge), (1, budget * merge, merge)):
        yield lab.observe([grid], "aspect", padded=True)


# Several budgets ---------------------------------------------------------------------------------------------------


@scenario("small, large, small through the shared memory pool", spans=True)
def small_large_small(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """The sequence in which vLLM issue 57136 saw NaN: padded rows of one graph hold what another left."""
    small = lab.inputs([_grid(lab, max(1, min(lab.budgets) // 2))])
    first = lab.observe(small, "small-large-small")
    yield first
    for tokens in (max(lab.budgets), max(1, max(lab.budgets) * 3 // 4)):
        yield lab.observe([_grid(lab, tokens)], "small-large-small")
        again = lab.observe(small, "small-large-small")
        if _fine(first, again) and _bits_differ(first.outputs, again.outputs):
            _add(again, "replay", "the small call gives other bits after a large one", mismatch=False)
        yield again


@scenario("mixed sizes in one call, several replays", spans=True)
def mixed(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """More items than one replay holds, from one token to the largest budget, unsorted."""
    largest, smallest = max(lab.budgets), min(lab.budgets)
    sizes = [largest, 1, smallest, largest // 2, 2, smallest - 1, largest // 2 + 1, smallest // 2]
    yield lab.observe([_grid(lab, max(1, n)) for n in sizes], "mixed", padded=True)
    yield lab.observe([_grid(lab, max(1, n)) for n in reversed(sizes)], "mixed", padded=True)


@scenario("a call without items", spans=True)
def empty(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """An empty call gives an empty list, whatever ran before."""
    before = lab.observe([_grid(lab, 1)], "empty")
    call = lab.part_none(before.call)
    seen = lab.observe(call, "empty")
    if not seen.error and seen.outputs:
        _add(seen, "selection", f"an empty call gives {len(seen.outputs)} outputs", mismatch=True)
    yield seen


@scenario("budgets captured smallest first", spans=True)
def capture_order(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """vLLM captures the largest budget first; the order must not matter to the outputs."""
    manager = lab.new_manager()
    with lab.using(manager):
        lab.capture(manager, lab.budgets)
        for each in reversed(lab.budgets):
            yield lab.observe(_usual(lab, each), "capture-order")
        manager.clear()


@scenario("two managers in one process, alternating", spans=True)
def two_managers(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """A second manager over the same model has its own graphs, buffers and pool."""
    other = lab.new_manager()
    call = lab.inputs(_usual(lab, max(lab.budgets)))
    first = lab.observe(call, "two-managers")
    kept = [output.clone() for output in first.outputs]
    yield first
    with lab.using(other):
        lab.capture(other)
        yield lab.observe(_usual(lab, max(lab.budgets)), "two-managers")
    again = lab.observe(call, "two-managers")
    if _fine(first, again) and (_bits_differ(first.outputs, kept) or _bits_differ(again.outputs, kept)):
        _add(again, "replay", "another manager's replay changed this manager's result")
    yield again
    other.clear()


@scenario("an item above the largest budget", spans=True, child=True)
def oversize(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """The eager fallback, alone and beside items that fit."""
    largest = max(lab.budgets)
    yield lab.observe([_grid(lab, largest + largest // 4)], "oversize")
    yield lab.observe([_grid(lab, 1), _grid(lab, largest + 1)], "oversize")


@scenario("every free block of the graphs' memory pool holds NaN", spans=True, needs="cuda")
def poisoned_pool(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """What a graph reads without having written it, another graph of the pool may have left there."""
    if not lab.bakes:
        raise NotTestedError("a static replay has no shared memory pool")
    poison, mend = pool_filling(lab, float("nan")), pool_filling(lab, 0.0)
    for each in lab.budgets:
        for tokens in sorted({max(1, each // 2 + 1), each}):
            call = lab.inputs([_grid(lab, tokens)])
            yield lab.observe(call, "poisoned-pool", before_replay=lambda _captured: poison.replay())
    mend.replay()  # rows that a kernel never writes would keep the NaN for the scenarios behind this one


# Video -------------------------------------------------------------------------------------------------------------


@scenario("videos of one and more frames", modality="video")
def video(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """One sequence per frame; few long frames, many short ones, several videos."""
    assert budget is not None
    with video_manager(lab, budget):
        limit = lab.manager.max_frames_per_batch
        for frames in sorted({_frames(lab, n) for n in (1, 2, limit // 2, limit)}):
            if frames <= budget:
                yield lab.observe(_video(lab, [(frames, budget // frames)]), "video", padded=True)
        if budget >= 8:
            videos = [(2, budget // 8), (_frames(lab, 3), max(1, budget // 8))]
            yield lab.observe(_video(lab, videos), "video", padded=True)


@scenario("more frames than the captured offsets hold", modality="video", spans=True)
def video_frames_over(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """The packer counts tokens and items, never frames (D4)."""
    budget = max(lab.budgets)
    with video_manager(lab, budget):
        frames = _frames(lab, lab.manager.max_frames_per_batch + 1)
        if frames > budget:
            raise NotTestedError(f"budget {budget} cannot hold {frames} frames")
        yield lab.observe(_video(lab, [(frames, 1)]), "video-frames-over")


@scenario("an image in a manager that also allows video", modality="video")
def image_beside_video(lab: "Lab", budget: int | None) -> Iterator["Observation"]:
    """The captured offsets have an entry per frame, an image fills one, and the rest is zeroed (D6)."""
    assert budget is not None
    with video_manager(lab, budget):
        yield lab.observe([_grid(lab, max(1, budget // 2))], "image-beside-video", padded=True)
        items = min(2, lab.manager.max_batch_size)
        yield lab.observe([_grid(lab, n) for n in _parts(budget, items)], "image-beside-video", padded=True)


@contextmanager
def video_manager(lab: "Lab", budget: int) -> Iterator[None]:
    """Observe a manager of this budget that allows `VIDEO_FRAMES` frames per item."""
    if "video" not in lab.session.facts.graph_modalities:
        raise NotTestedError(f"vLLM captures no video graphs for {lab.session.facts.title}")
    items = lab.manager.max_batch_size
    allowed = lab.session.vllm_config.model_config.multimodal_config
    options = lab.session.options
    # The session was opened for images; the limit is all that a manager and `inputs` read of it.
    before = dict(allowed.limit_per_prompt)
    lab.session.options = replace(options, video_limit=1)
    allowed.limit_per_prompt = {key: value for key, value in before.items() if key != "video"}
    manager = lab.new_manager(Configuration((budget,), items, items * VIDEO_FRAMES))
    try:
        with lab.using(manager):
            lab.capture(manager)
            yield
    finally:
        manager.clear()
        lab.session.options = options
        allowed.limit_per_prompt = before


# Helpers -----------------------------------------------------------------------------------------------------------


def pool_filling(lab: "Lab", value: float) -> Any:
    """Return a captured graph of the manager's pool that writes `value` to every block that is free between replays."""
    pool = lab.manager.graph_pool
    lab.session.synchronize()
    sizes = sorted(
        (
            size
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) == tuple(pool)
            for block in segment["blocks"]
            if block["state"] == "inactive"
            for size in _requests(block["size"], segment["segment_type"])
        ),
        reverse=True,
    )
    if not sizes:
        raise NotTestedError("the graphs leave no free block in their pool")
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        kept = [torch.full((size // 2,), value, dtype=torch.bfloat16, device=lab.session.device) for size in sizes]
        del kept
    return graph


def _requests(free: int, segment_type: str) -> list[int]:
    """Return the sizes in bytes of the requests that take a free block of torch's caching allocator.

    It serves requests of up to `SMALL_REQUEST` from segments of its own, whose free blocks may be larger than that.
    """
    if segment_type != "small":
        return [free]
    return [SMALL_REQUEST] * (free // SMALL_REQUEST) + [free % SMALL_REQUEST] * (free % SMALL_REQUEST > 0)


def _grid(lab: "Lab", tokens: int) -> "Grid":
    return near_square(tokens, lab.session.facts.merge)


def _parts(total: int, count: int) -> list[int]:
    """Split `total` into `count` positive parts as equal as can be; fewer where there are not enough."""
    count = min(count, total)
    return [total // count + (i < total % count) for i in range(count)]


def _usual(lab: "Lab", budget: int | None) -> list["Grid"]:
    """Two items (where a replay holds two) that leave a quarter of `budget` as padding, and fit no smaller one."""
    budget = budget or max(lab.budgets)
    below = max((b for b in lab.budgets if b < budget), default=0)
    total = max(below + 1, budget * 3 // 4, 1)
    return [_grid(lab, n) for n in _parts(total, min(2, lab.manager.max_batch_size))]


def _video(lab: "Lab", videos: list[tuple[int, int]]) -> "EncoderInputs":
    merge = lab.session.facts.merge
    return lab.inputs([near_square(tokens, merge, frames) for frames, tokens in videos], "video")


def _frames(lab: "Lab", at_least: int) -> int:
    """Return the smallest number of frames that the encoder merges without a rest."""
    step = lab.frames_per_step
    return -(-at_least // step) * step


def _joined(a: "EncoderInputs", b: "EncoderInputs") -> "EncoderInputs":
    return replace(
        a,
        grids=a.grids + b.grids,
        tokens=a.tokens + b.tokens,
        pixels=torch.cat([a.pixels, b.pixels]),
        grid=torch.cat([a.grid, b.grid]),
    )


def _fine(*observations: "Observation") -> bool:
    """Nothing is wrong with these by themselves; otherwise comparing them says nothing new."""
    return all(seen.status in ("equal", "within_noise") for seen in observations)


def _bits_differ(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return any(x.shape != y.shape or not torch.equal(x, y) for x, y in zip(a, b, strict=False))


def _check_same(lab: "Lab", seen: "Observation", output: torch.Tensor, kept: torch.Tensor) -> None:
    from workbench.encoder.parity.metrics import compare

    ratio = lab.ratio(compare(output, kept))
    if ratio is None or ratio > 1:
        _add(seen, "cu_seqlens", "an item's output depends on the other items of its replay", mismatch=True)


def _add(seen: "Observation", suspect: str, message: str, *, mismatch: bool = True) -> None:
    severity: Severity = "mismatch" if mismatch else "hazard"
    seen.findings.append(
        Finding(suspect=suspect, severity=severity, scenario=seen.scenario, budget=seen.primary_budget, message=message)
    )


@torch.inference_mode()
def _fill_buffers(lab: "Lab", value: float) -> None:
    for captured in captured_budgets(lab.manager).values():
        for buffer in captured.input_buffers.values():
            if buffer is not None and buffer.ndim and buffer.is_floating_point():
                buffer.fill_(value)
        captured.output_buffer.fill_(value)


def _leave_behind(lab: "Lab", value: float) -> None:
    """Fill the pixel rows of every budget with `value` the only way that variant `one_pass` allows: by a call.

    It notes how many rows a replay leaves behind, so it need not zero what nobody wrote.
    """
    from workbench.encoder.parity.lab import ENCODER_ERRORS

    for budget in lab.budgets:
        call = lab.session.inputs([_grid(lab, budget)])
        with suppress(*ENCODER_ERRORS):  # an observed call says so too
            lab.session.graph(replace(call, pixels=torch.full_like(call.pixels, value)))
