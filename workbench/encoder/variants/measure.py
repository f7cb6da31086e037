"""The variants' ladder: eager, vLLM's graph, each variant and all together, on the same calls in one process.

    from workbench.encoder.variants.measure import Effort, cases_for, measure

    budgets = (64, 128, 256, 512, 1024, 2048)
    ladder = measure(SessionOptions(), budgets, cases_for(model_facts("ernie45_vl"), max(budgets)), Effort())

Samples are un-profiled, host time between two synchronises, in ABBA order over all columns. Busy and idle time come
from one traced call per column, when all cases of all sessions are timed: after a first trace CUPTI slows every launch
of the process. Parity is against eager as served, beside what float32 makes of the same inputs. The result is handed on
after every case, so that a session that is cut short leaves what it has.

Import this module only after `engine.require_vllm`.
"""

import dataclasses
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from workbench import roofline
from workbench.budgets import Configuration
from workbench.capturable import (
    ALL,
    FALLBACK,
    GRAPH,
    SCHEMA_VERSION,
    SERVED,
    Captured,
    Case,
    Column,
    Ladder,
    ModuleMap,
    Steps,
)
from workbench.encoder import registry
from workbench.encoder.boundary import probe
from workbench.encoder.module_map import encoder_work, map_graph, sequence_lengths
from workbench.encoder.parity.lab import ENCODER_ERRORS
from workbench.encoder.parity.metrics import compare
from workbench.encoder.session import EncoderInputs, EncoderSession, Grid, SessionOptions, open_session
from workbench.encoder.variants import VARIANTS, chosen, names_for
from workbench.environment import environment
from workbench.errors import WorkbenchError
from workbench.gaps import analyze
from workbench.models import Modality, ModelFacts, model_facts
from workbench.profiler import recording, timed
from workbench.progress import Progress, silent
from workbench.trace import read_trace

Calls = dict[str, list[Grid]]

# In the order of their weight, should time run out: what the upstream pull request names first.
IMAGE_CASES: Calls = {
    "64 tokens": [(1, 16, 16)],
    "391 tokens": [(1, 46, 34)],
    "2048 tokens": [(1, 64, 128)],
    "4 x 64 tokens": [(1, 16, 16)] * 4,
    "mixed": [(1, 16, 16), (1, 46, 34), (1, 32, 32), (1, 64, 32), (1, 24, 28)],
    "128 tokens": [(1, 16, 32)],
    "1024 tokens": [(1, 64, 64)],
}
VIDEO_CASES: tuple[list[Grid], ...] = ([(4, 16, 16)],)
# Where vLLM's own graph packs videos.
PACKED_VIDEOS: tuple[list[Grid], ...] = ([(4, 16, 16), (2, 16, 16)],)
_SMALL_IMAGES: Calls = {"16 tokens": [(1, 8, 8)], "small mixed": [(1, 4, 4), (1, 8, 8), (1, 2, 6)]}
# Frames of a replay, for each item: what videos of these cases need, and a multiple, so that budgets divide (D3).
_FRAMES_PER_ITEM = 4
# From vLLM's graph to all variants, one idea after the other.
STEPS = (["resampler", "metadata_cache"], ["resampler", "metadata_cache", "one_pass"])
# What vLLM, Triton and CUDA raise on what they cannot run.
_NOT_RUN = (WorkbenchError, *ENCODER_ERRORS)


@dataclass(frozen=True)
class Cases:
    """Calls by name.

    Attributes:
        images: of a server that allows no videos.
        videos: of one that allows them.
        beside: images of that one, whose graphs have more sequence slots than an image needs (D6).
    """

    images: Calls = field(default_factory=dict)
    videos: Calls = field(default_factory=dict)
    beside: Calls = field(default_factory=dict)


def cases_for(facts: ModelFacts, largest: int) -> Cases:
    """Return the cases of which every item fits into budget `largest`, and an image above it, which comes last.

    Small budgets, as on a CPU, get small cases of the same kinds.
    """

    def fitting(calls: Calls) -> Calls:
        return {name: grids for name, grids in calls.items() if all(4 * largest >= t * h * w for t, h, w in grids)}

    packs = "video" in facts.graph_modalities
    videos = [*VIDEO_CASES, *(PACKED_VIDEOS if packs else ())]
    small = [[(t, 4, 4) for t, _, _ in grids] for grids in videos]
    images = fitting(IMAGE_CASES)
    if len(images) < 3:
        images, videos = images | _SMALL_IMAGES, small
    first = next(iter(images))
    above: Calls = {"above the largest budget": [(1, 64, 2 * (largest // 32 + 2))]}
    return Cases(
        images | above,
        fitting({_video_name(grids, facts): grids for grids in videos}),
        {f"{first}, videos allowed": images[first]} if packs else {},
    )


def _video_name(grids: Sequence[Grid], facts: ModelFacts) -> str:
    """Name a call by the frames of its videos in pixels, which the encoder takes in temporal patches."""
    frames = [str(t * facts.temporal_patch) for t, _, _ in grids]
    return f"video of {frames[0]} frames" if len(frames) == 1 else f"videos of {' and '.join(frames)} frames"


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        repeats: samples per column and case; P99 wants 100.
        warmup: runs of each column before.
        seconds: after which no case begins and none goes on; it keeps the samples it has. `Ladder.notes` says so.
        case_seconds: after which a case takes no more samples than two of each column; the next one begins.
        seed: of weights and inputs.
    """

    repeats: int = 100
    warmup: int = 8
    seconds: float = 240.0
    case_seconds: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.warmup < 0 or not (self.seconds > 0 and self.case_seconds > 0):
            raise WorkbenchError(
                f"{self.repeats} repeats after {self.warmup} in {self.seconds} s, or {self.case_seconds} s a case, "
                "measure nothing; give at least one repeat and some seconds"
            )


@dataclass
class _Way:
    """One column: how it runs a call, and the session whose graphs it replays."""

    name: str
    run: Callable[[EncoderInputs], list[torch.Tensor]]
    modalities: tuple[Modality, ...]
    graphs: EncoderSession | None = None
    variants: tuple[str, ...] = ()


@dataclass
class _Part:
    """What one session serves, and its columns."""

    session: EncoderSession
    ways: Sequence[_Way]
    calls: dict[Modality, Calls]

    def inputs(self, modality: Modality, grids: Sequence[Grid], seed: int) -> EncoderInputs:
        """Return the same inputs for the same arguments."""
        with _taking(self.session, modality) as maker:
            return maker.inputs(grids, modality, seed)


@dataclass
class _Run:
    """The measurement so far."""

    effort: Effort
    on_case: Callable[[Ladder], None]
    started: float = field(default_factory=time.monotonic)
    ladder: Ladder | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.effort.seconds - (time.monotonic() - self.started)

    def add(self, **changes: Any) -> None:
        """Extend the ladder's lists, and hand it on."""
        assert self.ladder is not None
        grown = {name: [*getattr(self.ladder, name), *more] for name, more in changes.items()}
        self.ladder = msgspec.structs.replace(self.ladder, **grown)
        self.on_case(self.ladder)

    def change(self, case: Case) -> None:
        """Put a case in the place of the one of the same name, and hand the ladder on."""
        assert self.ladder is not None
        cases = [case if one.name == case.name else one for one in self.ladder.cases]
        self.ladder = msgspec.structs.replace(self.ladder, cases=cases)
        self.on_case(self.ladder)


def measure(
    options: SessionOptions,
    budgets: Sequence[int],
    cases: Cases,
    effort: Effort,
    *,
    max_items: int = 4,
    variants: Sequence[str] | None = None,
    on_case: Callable[[Ladder], None] | None = None,
    progress: Progress = silent,
) -> Ladder:
    """Measure every case in every column. The sessions of videos and of images stay open until both are traced.

    Args:
        options: of the encoder; `video_limit` is set here, 0 for images and 1 for videos and the images beside them.
        budgets: token budgets of all graphs.
        variants: None is every one of the encoder.
        on_case: called with the ladder so far, after every part.

    Raises:
        WorkbenchError: see `open_session`; a case whose grids the encoder cannot take.
    """
    names = names_for(options.model) if variants is None else tuple(variants)
    if names:
        chosen(options.model, names)
    run = _Run(effort, on_case or (lambda _: None))
    options = dataclasses.replace(options, seed=effort.seed)
    plain = Configuration(tuple(budgets), max_items)
    framed = dataclasses.replace(plain, max_frames=_frames(model_facts(options.model), max_items))
    # Videos first: they are few, and where they are served too, images have more sequence slots than they need.
    parts: tuple[tuple[int, Configuration, dict[Modality, Calls]], ...] = (
        (1, framed, {"video": cases.videos, "image": cases.beside}),
        (0, plain, {"image": cases.images}),
    )
    with ExitStack() as sessions:
        opened: dict[int, _Part] = {}  # by video limit
        with ExitStack() as graphs:
            for video_limit, configuration, calls in parts:
                if not any(calls.values()):
                    continue
                served = dataclasses.replace(options, video_limit=video_limit)
                session = sessions.enter_context(open_session(served, configuration))
                if run.ladder is None:
                    run.ladder = _empty(session, budgets, max_items, framed.max_frames, effort)
                    exact = _float32(session, cases, effort)
                wanted = [modality for modality in calls if calls[modality]]
                ways = graphs.enter_context(_columns(session, names, wanted, run))
                opened[video_limit] = _Part(session, ways, calls)
                with _frozen_heap():
                    _cases(run, opened[video_limit], exact, progress)
            for part in opened.values():
                _traces(run, part)
            if images := opened.get(0):
                _maps(run, images)
        if images:
            _boundaries(run, images.session, cases.images, names)
    if run.ladder is None:
        raise WorkbenchError("a ladder without a case measures nothing; give one")
    run.ladder = msgspec.structs.replace(run.ladder, complete=not run.ladder.notes)
    run.on_case(run.ladder)
    return run.ladder


def _frames(facts: ModelFacts, max_items: int) -> int | None:
    """Return max frames where videos are served; vLLM's own for GLM-4.1V are 600 an item (D2)."""
    return _FRAMES_PER_ITEM * max_items if "video" in facts.graph_modalities else None


def _empty(
    session: EncoderSession, budgets: Sequence[int], max_items: int, max_frames: int | None, effort: Effort
) -> Ladder:
    return Ladder(
        schema_version=SCHEMA_VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(),
        model=session.model_record,
        replay=session.replay,
        budgets=list(budgets),
        max_items=max_items,
        max_frames=max_frames,
        repeats=effort.repeats,
        warmup=effort.warmup,
        seed=effort.seed,
        captured=[],
        cases=[],
    )


# Columns ------------------------------------------------------------------------------------------------------------


@contextmanager
def _columns(
    session: EncoderSession, names: Sequence[str], modalities: Sequence[Modality], run: _Run
) -> Iterator[list[_Way]]:
    """Capture the graphs of every column that takes one of `modalities`; they last as long as the block."""
    own = session.facts.graph_modalities
    sets = [[name] for name in names] + [step for step in STEPS if set(step) < set(names)]
    sets += [list(names)] if len(names) > 1 else []
    with ExitStack() as stack:
        ways = [_Way(SERVED, session.eager_served, ("image", "video"))]
        captured = []
        if set(own) & set(modalities):
            captured.append(Captured(column=GRAPH, costs=session.capture()))
            ways += [_Way(FALLBACK, session.eager_fallback, own), _Way(GRAPH, session.graph, own, session)]
        for wanted in sets:
            title = ALL if len(wanted) == len(names) > 1 else "+".join(wanted)
            variants = chosen(session.facts.key, wanted)
            takes = tuple({*own, *(modality for variant in variants for modality in variant.modalities)})
            if not set(takes) & set(modalities):
                continue
            changed = stack.enter_context(session.with_variants(wanted))
            try:
                costs = changed.capture()
            except _NOT_RUN as error:  # the other columns are still worth having
                run.add(notes=[f"{title} could not be captured: {type(error).__name__}: {error}"[:400]])
                continue
            schedules = getattr(changed.model, "schedules", {})
            recipes = sorted(getattr(changed.model, "recipes", {}).items())
            captured.append(
                Captured(
                    column=title,
                    costs=costs,
                    schedules=sorted(set(schedules.values())),
                    recipes=[_steps(key[0], recipe) for key, recipe in recipes],
                )
            )
            ways.append(_Way(title, changed.graph, takes, changed, tuple(variant.name for variant in variants)))
        run.add(captured=captured)
        yield ways


def _steps(rows: int, recipe: Any) -> Steps:
    """Put a recipe of variant `fused` on record; that module is imported only where it is attached."""
    return Steps(rows=rows, **recipe.words(), refused=list(recipe.refused))


@contextmanager
def _taking(session: EncoderSession, modality: Modality) -> Iterator[EncoderSession]:
    """Yield a session over the same weights that makes inputs of `modality`, which may be a variant's to take."""
    more = [one.name for one in VARIANTS if one.model == session.facts.key and modality in one.modalities]
    if modality in session.facts.graph_modalities or not more:
        yield session
        return
    with session.with_variants(more) as changed:
        yield changed


def _float32(session: EncoderSession, cases: Cases, effort: Effort) -> dict[str, list[torch.Tensor]]:
    """Return what the same encoder in float32 makes of each call, on the CPU."""
    options = dataclasses.replace(session.float32_options, video_limit=1)
    outputs = {}
    calls: tuple[tuple[Modality, Calls], ...] = (("image", cases.images | cases.beside), ("video", cases.videos))
    with open_session(options, session.configuration) as reference:
        for modality, named in calls:
            with _taking(reference, modality) as maker:
                for name, grids in named.items():
                    inputs = maker.inputs(grids, modality, effort.seed)
                    rounded = dataclasses.replace(inputs, pixels=inputs.pixels.to(session.dtype).to(torch.float32))
                    outputs[name] = [item.cpu() for item in reference.eager_served(rounded)]
    return outputs


# Cases --------------------------------------------------------------------------------------------------------------


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector from what is there already, as vLLM's engine does once it has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _cases(run: _Run, part: _Part, exact: dict[str, list[torch.Tensor]], progress: Progress) -> None:
    for modality, calls in part.calls.items():
        fit = [way for way in part.ways if modality in way.modalities]
        for number, (name, grids) in enumerate(calls.items()):
            progress(name, number / len(calls))
            if run.left <= 0:
                run.add(notes=[f"time ran out before {name}"])
                continue
            inputs = part.inputs(modality, grids, run.effort.seed)
            run.add(cases=[_case(run, part.session, fit, name, inputs, exact[name])])


def _case(
    run: _Run,
    session: EncoderSession,
    ways: Sequence[_Way],
    name: str,
    inputs: EncoderInputs,
    exact: Sequence[torch.Tensor],
) -> Case:
    columns = {way.name: _first(way, inputs) for way in ways}
    outputs = {title: out for title, (_, out) in columns.items() if out is not None}
    working = [way for way in ways if way.name in outputs]
    served, graph = outputs[SERVED], outputs.get(GRAPH)
    noise = [compare(a.cpu(), b) for a, b in zip(served, exact, strict=True)]
    samples = _samples(run, session, working, inputs)
    costs = {captured.column: captured.costs for captured in run.ladder.captured} if run.ladder else {}
    found = []
    for way in ways:
        column, out = columns[way.name]
        nodes = {cost.budget: cost.nodes for cost in costs.get(way.name, [])}
        launched = [nodes.get(budget) for budget in column.budgets if budget is not None]
        known = [count for count in launched if count is not None]
        extra: dict[str, Any] = dict(samples.get(way.name, {}))
        if out is not None:
            extra["parity"] = [compare(a, b) for a, b in zip(out, served, strict=True)]
            if graph is not None:
                extra["against_graph"] = [compare(a, b) for a, b in zip(out, graph, strict=True)]
        if known and len(known) == len(launched):
            extra["nodes"] = sum(known)
        found.append(msgspec.structs.replace(column, **extra) if out is not None else column)
    rms, rows = [d.relative_rms for d in noise], [d.worst_row for d in noise]
    return Case(
        name=name,
        modality=inputs.modality,
        grids=list(inputs.grids),
        tokens=list(inputs.tokens),
        columns=found,
        noise_rms=None if None in rms else max(value or 0.0 for value in rms),
        noise_worst_row=None if None in rows else max(value or 0.0 for value in rows),
        beside_videos=inputs.modality == "image" and session.options.video_limit != 0,
    )


def _first(way: _Way, inputs: EncoderInputs) -> tuple[Column, list[torch.Tensor] | None]:
    """Run a column once: its outputs, replays and what these saw, or its error."""
    variants = list(way.variants)
    try:
        if way.graphs is None:
            return Column(name=way.name, variants=variants), [x.clone() for x in way.run(inputs)]
        way.graphs.forget_findings()
        with way.graphs.watch() as batches:
            outputs = [x.clone() for x in way.run(inputs)]
        budgets = [batch.budget for batch in batches]
        findings = [f"{finding.defect}: {finding.message}" for finding in way.graphs.findings]
        return Column(name=way.name, variants=variants, budgets=budgets, findings=findings), outputs
    except _NOT_RUN as error:
        text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
        return Column(name=way.name, variants=variants, error=text), None


def _samples(
    run: _Run, session: EncoderSession, ways: Sequence[_Way], inputs: EncoderInputs
) -> dict[str, dict[str, list[Any]]]:
    """Time the columns forwards, then backwards; stop after a pair when time runs out, or the case has had its own."""
    for way in ways:
        for _ in range(run.effort.warmup):
            way.run(inputs)
    samples: dict[str, dict[str, list[Any]]] = {way.name: {"wall_us": [], "gpu_us": [], "order": []} for way in ways}
    position = 0
    begun = time.monotonic()
    for repeat in range(run.effort.repeats):
        if repeat >= 2 and repeat % 2 == 0:
            if run.left <= 0:
                run.add(notes=[f"time ran out after {repeat} repeats of a call of {sum(inputs.tokens)} tokens"])
                break
            if time.monotonic() - begun >= run.effort.case_seconds:
                break
        for way in ways if repeat % 2 == 0 else list(reversed(ways)):
            wall, gpu = timed(session, partial(way.run, inputs))
            mine = samples[way.name]
            mine["wall_us"].append(wall)
            mine["order"].append(position)
            if gpu is not None:
                mine["gpu_us"].append(gpu)
            position += 1
    return samples


# Traces, maps and boundaries ----------------------------------------------------------------------------------------


def _traces(run: _Run, part: _Part) -> None:
    """Add what a trace says to every column that could run."""
    assert run.ladder is not None
    if part.session.device.type != "cuda":
        return
    names = {name for calls in part.calls.values() for name in calls}
    for case in [case for case in run.ladder.cases if case.name in names]:
        ran = {column.name for column in case.columns if column.error is None}
        ways = [way for way in part.ways if way.name in ran]
        try:
            traced = _traced(part.session, ways, part.inputs(case.modality, case.grids, run.effort.seed))
        except (WorkbenchError, RuntimeError) as error:
            run.add(notes=[f"{case.name} could not be traced: {error}"[:400]])
            continue
        columns = [msgspec.structs.replace(column, **traced.get(column.name, {})) for column in case.columns]
        run.change(msgspec.structs.replace(case, columns=columns))


def _traced(session: EncoderSession, ways: Sequence[_Way], inputs: EncoderInputs) -> dict[str, dict[str, float | int]]:
    """Trace one call per column; its GPU ops, busy time, and idle time between its first op and its last."""

    def call(number: int) -> None:
        session.synchronize()
        with torch.profiler.record_function(f"column#{number}"):
            ways[number].run(inputs)
            session.synchronize()

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "columns.json.gz")
        with recording(path, ["ranges", "cuda"]) as start:
            for number in range(len(ways)):
                call(number)  # buffers and caches then hold this call, as in the samples
            start()
            for number in range(len(ways)):
                call(number)
        rows = {row.name: row for row in analyze(read_trace(path), "column#*").windows}
    found: dict[str, dict[str, float | int]] = {}
    for number, way in enumerate(ways):
        row = rows.get(f"column#{number}")
        if row is not None:
            idle = row.launch_gap_us + row.queue_gap_us + row.intra_graph_gap_us
            found[way.name] = {
                "ops": row.gpu_ops, "busy_us": row.busy_us, "idle_us": idle, "traced_us": row.wall_us,
            }  # fmt: skip
    return found


def _maps(run: _Run, part: _Part) -> None:
    """Map the graph of the first case in vLLM's form, with the resampler inside, and with all variants."""
    session = part.session
    if session.device.type != "cuda":
        return
    grids = next(iter(part.calls["image"].values()))
    lengths = sequence_lengths(session.facts, grids)
    patches = session.facts.merge**2  # of a token
    budget = min((b for b in session.manager.token_budgets if patches * b >= sum(lengths)), default=None)
    if budget is None:
        run.add(notes=["no graph was mapped: no budget holds the first case"])
        return
    maps: list[ModuleMap] = []
    gpu = roofline.device(torch.cuda.get_device_name(session.device))
    inputs = session.inputs(grids, seed=run.effort.seed)
    for way in part.ways:
        if way.graphs is None or way.name not in (GRAPH, "resampler", "fused", ALL):
            continue
        if way.name != GRAPH and _captures(way.graphs.model) is _captures(session.model):
            continue  # its variants change nothing inside the graph
        way.run(inputs)  # leaves the buffers filled with the case
        model, values = way.graphs.model, way.graphs.manager.budget_graphs["default"][budget].input_buffers
        parts = registry.builder(session.facts.key).parts
        work = encoder_work(model, session.facts, lengths, int(values["pixel_values"].shape[0]))

        forward = partial(_forward, model, values)
        try:
            with torch.inference_mode():
                maps.append(map_graph(way.name, budget, model, parts, forward, work, gpu))
        except _NOT_RUN as error:
            maps.append(ModuleMap(name=way.name, budget=budget, nodes=0, why_not=f"{type(error).__name__}: {error}"))
    run.add(maps=maps)


def _captures(model: Any) -> Any:
    return type(model).encoder_cudagraph_forward


def _forward(model: Any, values: dict[str, torch.Tensor]) -> torch.Tensor:
    output: torch.Tensor = model.encoder_cudagraph_forward(dict(values))  # the models pop from it
    return output


def _boundaries(run: _Run, session: EncoderSession, calls: Calls, names: Sequence[str]) -> None:
    """Probe the capture boundary at the first case; last, because a refused capture may leave the device in error.

    So its times are those of a process that has traced.
    """
    try:
        report = probe(session, next(iter(calls.values())), names)
    except _NOT_RUN as error:
        run.add(notes=[f"the boundary probe failed: {type(error).__name__}: {error}"[:300]])
        return
    run.add(boundaries=report.boundaries)
