"""A workload: the images and videos a server gets, and how they meet in encoder calls.

Everything is a column, so that a million items plan and predict at numpy's speed. Where workloads come from
is in `workbench.sources`, how a size becomes a grid in `workbench.grids`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.errors import WorkbenchError, check_seed
from workbench.grids import check_sizes, largest_image, to_grids
from workbench.models import ModelFacts, model_facts

Ints = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Workload:
    """N items in C groups. A group is a request as loaded, an encoder call after `group`.

    Attributes:
        name: short name for tables, such as a preset's or a file's.
        model: key of the registry entry whose rule made the grids.
        source: where the sizes come from, in words a reviewer can check.
        sizes: int32 [N, 3], (width, height, frames) in pixels; frames 1 is an image, more is a video.
        grids: int32 [N, 3], (t, h, w) in patches before the spatial merge.
        tokens: int64 [N], output tokens of each item, the unit of vLLM's budgets.
        offsets: int64 [C + 1], ascending from 0 to N: group c is items `offsets[c]:offsets[c + 1]`. Groups
            may be empty (a request without an image) until `group` drops them.
        notes: what happened to the data on the way, one sentence each (items skipped, clamped, lost).
    """

    name: str
    model: str
    source: str
    sizes: Sizes = field(repr=False)
    grids: Sizes = field(repr=False)
    tokens: Ints = field(repr=False)
    offsets: Ints = field(repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.offsets) - 1

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.tokens)

    def calls(self) -> list[list[int]]:
        """Return the items' tokens group by group, as `workbench plan --calls` reads them."""
        return [part.tolist() for part in np.split(self.tokens, self.offsets[1:-1])]

    @cached_property
    def frames(self) -> Ints:
        """int64 [N], attention sequences of each item in a captured `cu_seqlens`: grid t, or 1 for a whole item."""
        if model_facts(self.model).sequences == "item":
            return np.ones(self.items, np.int64)
        return self.grids[:, 0].astype(np.int64)

    @cached_property
    def is_video(self) -> npt.NDArray[np.bool_]:
        """bool [N], True for an item of more than one frame (the rule of vLLM's random-mm data set)."""
        return self.sizes[:, 2] > 1

    @cached_property
    def counts(self) -> Ints:
        """int64 [C], items per group."""
        return np.diff(self.offsets)


def make_workload(
    sizes: npt.NDArray[np.generic],
    offsets: Ints,
    facts: ModelFacts,
    *,
    name: str,
    source: str,
    where: Callable[[int], str] = "item {}".format,
    notes: tuple[str, ...] = (),
    clamp: bool = False,
    skip_bad: bool = False,
) -> Workload:
    """Turn sizes into a workload by the model's own resize rule.

    Args:
        sizes: [N, 3] numbers, (width, height, frames).
        offsets: int64 [C + 1], where each request's items start.
        where: names item i for a message.
        notes: kept in front of this function's own.
        clamp: take vLLM's own clamped size where the Hugging Face processor refuses the aspect ratio
            (ERNIE-4.5-VL; the other models' rules have none).
        skip_bad: leave refused items out, and say so in the notes, instead of raising.

    Raises:
        WorkbenchError: no items, a value that is no size, an item that the model's processor refuses.
    """
    if not len(sizes):
        raise WorkbenchError(f"the workload {source} is empty: it has no image or video; give at least one")
    checked = check_sizes(sizes, where)
    made = to_grids(checked, facts)
    clamped = made.refused & ~made.failed if clamp and facts.key == "ernie45_vl" else np.zeros_like(made.refused)
    bad = (made.refused & ~clamped) | made.failed
    if clamped.any():
        notes += (f"{int(clamped.sum()):,} items clamped to an aspect ratio of 200 as vLLM's resize does",)
    if bad.any():
        reason = _refusal(checked, bad, made.refused, facts, where)
        if not skip_bad or bad.all():
            raise WorkbenchError(f"{reason}; leave it out, or pass --skip-bad")
        notes += (f"{int(bad.sum()):,} items left out, the first: {reason}",)
    keep = ~bad
    before = np.concatenate([[0], np.cumsum(keep)])  # kept items before each item
    return Workload(
        name=name,
        model=facts.key,
        source=source,
        sizes=checked[keep],
        grids=made.grids[keep],
        tokens=made.tokens[keep],
        offsets=before[offsets].astype(np.int64),
        notes=notes,
    )


def _refusal(
    sizes: Sizes,
    bad: npt.NDArray[np.bool_],
    refused: npt.NDArray[np.bool_],
    facts: ModelFacts,
    where: Callable[[int], str],
) -> str:
    """Say why the first bad item is bad."""
    item = int(bad.argmax())
    width, height = (int(side) for side in sizes[item, :2])
    more = f" ({int(bad.sum()) - 1:,} more)" if bad.sum() > 1 else ""
    if not refused[item]:
        return f"{where(item)}, {width} x {height}: {facts.title}'s resize rule finds no size within its limits{more}"
    says = (
        f"{where(item)}, {width} x {height}: the Hugging Face processor of {facts.title} refuses an aspect ratio "
        f"above {facts.limits['image'].max_aspect or 0:g}{more}"
    )
    if facts.key == "ernie45_vl":
        made = to_grids(sizes[item : item + 1], facts).grids[0] * facts.patch
        says += f", where vLLM's own resize would clamp it to {made[2]} x {made[1]} (--clamp)"
    return says


@dataclass(frozen=True)
class RequestPerCall:
    """Every request's items are one encoder call: a server with one user at a time."""


@dataclass(frozen=True)
class ItemsPerCall:
    """Calls of `items` items in order of arrival, whichever request they came with; the last may be shorter."""

    items: int


@dataclass(frozen=True)
class Scheduler:
    """A simple model of vLLM's scheduler, step by step.

    What it models: requests arrive by a Poisson process and wait in order. A step hands out `batched_tokens`:
    first one token to each request that is decoding, then prompt tokens (the text, then the items, each as
    many tokens as it makes) of the waiting requests in order, in chunks where they do not fit, while at most
    `running` requests run. An item is encoded in the step that reaches its first token, as long as the step's
    items stay within the encoder budget. A request's last prompt step makes its first output token, each
    later step one. Items of one step and one modality are one call.

    What it leaves out: prefix and encoder caches (every item is new), preemption, a step's time depending on
    its content, and requests that overtake one whose item does not fit the encoder budget.

    Attributes:
        rate: requests per second; None is offline, all at the start (`vllm bench mm-processor`).
        step_ms: duration of a step, which decides how many requests arrive in it; of no effect offline.
        text_tokens: prompt tokens beside the items (vLLM's random-mm: 1024 by default).
        output_tokens: tokens generated per request (random-mm: 128 by default).
        batched_tokens: `max_num_batched_tokens`; vLLM's offline default on an H100 or H200 is 16384, of its
            server 8192.
        running: `max_num_seqs`; vLLM's default on an H100 or H200 is 1024.
        encoder_budget: tokens the encoder may make in a step; None is vLLM's rule, the larger of
            `max_num_encoder_input_tokens` (equal to `batched_tokens`) and the largest possible item, here the
            larger of the model's largest image and the workload's largest item.
        seed: of the arrivals.
    """

    rate: float | None = None
    step_ms: float = 30.0
    text_tokens: int = 1024
    output_tokens: int = 128
    batched_tokens: int = 16_384
    running: int = 1024
    encoder_budget: int | None = None
    seed: int = 0


Policy = RequestPerCall | ItemsPerCall | Scheduler


def apart(workload: Workload) -> Workload:
    """Split the calls that hold images and videos, as `group` does, because vLLM encodes one modality at a time.

    The source stays: it is no other workload.
    """
    return replace(group(workload, RequestPerCall()), source=workload.source)


def group(workload: Workload, policy: Policy) -> Workload:
    """Form encoder calls from a workload's requests.

    A call holds one modality: a step's images go first, then its videos, as model runner v2 sorts them (v1
    splits at each change of modality instead). Empty requests make no call.

    Raises:
        WorkbenchError: the policy has a value vLLM could not run with.
    """
    if isinstance(policy, RequestPerCall):
        step = np.repeat(np.arange(len(workload), dtype=np.int64), workload.counts)
        how = "one request a call"
    elif isinstance(policy, ItemsPerCall):
        if policy.items < 1:
            raise WorkbenchError(f"{policy.items} items per call is not at least 1; give a positive number")
        step = np.arange(workload.items, dtype=np.int64) // policy.items
        how = f"{policy.items} items a call"
    else:
        step = _schedule(workload, policy)
        rate = "all at once" if policy.rate is None else f"{policy.rate:g} requests/s, seed {policy.seed}"
        how = f"scheduler model ({rate})"
    order = np.lexsort((workload.is_video, step))  # stable: items of a call keep their order
    steps, video = step[order], workload.is_video[order]
    starts = np.flatnonzero((np.diff(steps, prepend=-1) != 0) | (np.diff(video, prepend=False) != 0))
    return Workload(
        name=workload.name,
        model=workload.model,
        source=f"{workload.source}; {how}",
        sizes=workload.sizes[order],
        grids=workload.grids[order],
        tokens=workload.tokens[order],
        offsets=np.append(starts, workload.items).astype(np.int64),
        notes=workload.notes,
    )


def encoder_budget(workload: Workload, policy: Scheduler) -> int:
    """Return the tokens the encoder may make in a step, as `Scheduler.encoder_budget` says."""
    if policy.encoder_budget is not None:
        return policy.encoder_budget
    largest = int(workload.tokens.max()) if workload.items else 0
    return max(policy.batched_tokens, largest_image(model_facts(workload.model)), largest)


def _check_policy(workload: Workload, policy: Scheduler, budget: int) -> None:
    if policy.rate is not None and not policy.rate > 0:
        raise WorkbenchError(f"a rate of {policy.rate:g} requests per second is not positive; leave it out for offline")
    for name, value, least in (
        ("step_ms", policy.step_ms, 1e-3),
        ("text_tokens", policy.text_tokens, 0),
        ("output_tokens", policy.output_tokens, 1),
        ("batched_tokens", policy.batched_tokens, 1),
        ("running", policy.running, 1),
    ):
        if not value >= least:
            raise WorkbenchError(f"{name} of the scheduler model is {value:g}; it must be at least {least:g}")
    if workload.items and int(workload.tokens.max()) > budget:
        raise WorkbenchError(
            f"an item of {int(workload.tokens.max()):,} tokens exceeds the encoder budget of {budget:,}: vLLM would "
            "never schedule it; leave the budget out for vLLM's own rule"
        )


class _Prompts:
    """The waiting requests' prompts in order: text, then items. `request` is the head, `done` its computed tokens."""

    def __init__(self, workload: Workload, text_tokens: int) -> None:
        self.tokens: list[int] = workload.tokens.tolist()
        self.before: list[int] = np.concatenate([[0], np.cumsum(workload.tokens)]).tolist()
        self.offsets: list[int] = workload.offsets.tolist()
        self.text = text_tokens
        self.request = self.item = self.done = 0

    def advance(self, left: int, room: int) -> tuple[int, int, bool]:
        """Compute up to `left` tokens of the head, encoding up to `room`.

        Returns tokens computed, items encoded, and whether the prompt is complete (the next one is then the
        head).
        """
        last = self.offsets[self.request + 1]
        base = self.text - self.before[self.offsets[self.request]]  # prompt position of item i: base + before[i]
        total = base + self.before[last]
        end = min(self.done + left, total)
        item = self.item
        while item < last and base + self.before[item] < end:
            if self.tokens[item] > room:
                end = base + self.before[item]
                break
            room -= self.tokens[item]
            item += 1
        result = end - self.done, item - self.item, end == total
        self.item = item
        self.done = end
        if end == total:
            self.request += 1
            self.done = 0
        return result


def _schedule(workload: Workload, policy: Scheduler) -> Ints:
    """Return the step in which each item is encoded, int64 [N]."""
    budget = encoder_budget(workload, policy)
    _check_policy(workload, policy, budget)
    count = len(workload)
    arrivals = np.zeros(count)  # in steps
    if policy.rate is not None:
        check_seed(policy.seed)
        gaps = np.random.default_rng(policy.seed).exponential(1 / policy.rate, count)
        arrivals = np.cumsum(gaps) * 1e3 / policy.step_ms
    ready: list[int] = np.ceil(arrivals).astype(np.int64).tolist()
    prompts = _Prompts(workload, policy.text_tokens)
    steps: list[int] = []
    decoding: deque[tuple[int, int]] = deque()  # (last step, requests whose prompts ended together)
    decoders = now = 0
    while prompts.request < count:
        if prompts.done == 0:
            now = max(now, ready[prompts.request])
        while decoding and decoding[0][0] < now:
            decoders -= decoding.popleft()[1]
        left, room, finished = policy.batched_tokens - decoders, budget, 0
        while prompts.request < count and left > 0 and ready[prompts.request] <= now:
            if prompts.done == 0 and decoders + finished >= policy.running:
                break
            first = prompts.item
            taken, encoded, complete = prompts.advance(left, room)
            steps.extend([now] * encoded)
            left -= taken
            room -= prompts.before[first + encoded] - prompts.before[first]
            finished += complete
            if not complete:
                break
        if finished:
            decoding.append((now + policy.output_tokens - 1, finished))  # this step makes the first token
            decoders += finished
        now += 1
    return np.array(steps, np.int64)


@dataclass(frozen=True)
class Summary:
    """What a workload holds, for a table.

    Attributes:
        groups: requests or calls, empty ones included.
        empty: groups without an item.
        images, videos: items by modality.
        tokens: smallest, median, 90th and 99th percentile, largest, and sum of the items' output tokens.
        items_per_group, tokens_per_group: the same five figures over groups that hold something.
        shapes: the commonest (width, height, frames) with their tokens and how many items have them.
    """

    name: str
    model: str
    source: str
    groups: int
    empty: int
    images: int
    videos: int
    tokens: dict[str, float]
    items_per_group: dict[str, float]
    tokens_per_group: dict[str, float]
    shapes: list[dict[str, int]]
    notes: tuple[str, ...]


def summarize(workload: Workload, shapes: int = 12) -> Summary:
    """Summarise a workload, with its `shapes` commonest sizes."""
    counts = workload.counts
    sums = np.add.reduceat(np.append(workload.tokens, 0), workload.offsets[:-1])[counts > 0]
    columns = np.column_stack([workload.sizes.astype(np.int64), workload.tokens])
    unique, number = np.unique(columns, axis=0, return_counts=True)
    common = np.argsort(-number, kind="stable")[:shapes]
    names = ("width", "height", "frames", "tokens")
    return Summary(
        name=workload.name,
        model=workload.model,
        source=workload.source,
        groups=len(workload),
        empty=int((counts == 0).sum()),
        images=int((~workload.is_video).sum()),
        videos=int(workload.is_video.sum()),
        tokens=_spread(workload.tokens) | {"sum": int(workload.tokens.sum())},
        items_per_group=_spread(counts[counts > 0]),
        tokens_per_group=_spread(sums),
        shapes=[dict(zip(names, map(int, unique[row]), strict=True)) | {"items": int(number[row])} for row in common],
        notes=workload.notes,
    )


def _spread(values: Ints) -> dict[str, float]:
    if not len(values):
        return {}
    points = np.percentile(values, [0, 50, 90, 99, 100])
    return dict(zip(("min", "median", "p90", "p99", "max"), map(float, points), strict=True))
