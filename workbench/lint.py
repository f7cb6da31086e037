"""Faults of a budget configuration that show before any GPU time: a table of rules over captured shapes.

`RULES` is the table. A rule looks at a `Subject` (model, configuration, captured shapes, and the plan of a
workload when there is one) and yields what it found. Severities: an *error* stops the server, stops a request or
returns wrong embeddings; a *warning* costs time or memory; an *info* is worth knowing.

D1 to D7 are the defects of vLLM 0.33.0 that `docs/defects.md` describes.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from workbench.budgets import MANY_GRAPHS, Configuration, Limits, Resolved, check_values, resolve
from workbench.errors import WorkbenchError
from workbench.models import ModelFacts
from workbench.planner import Plan, arrange, pack
from workbench.shapes import Capture, captured_shapes

if TYPE_CHECKING:
    from workbench.costs import CostModel

Severity = Literal["error", "warning", "info"]
Ints = npt.NDArray[np.int64]

# A buffer this many times its budget wastes a third of every full replay.
OVERSIZED = 1.5
# One 224 x 224 image through GLM-4.1V's graph took a quarter of the eager time on an H200 (31.4 to 7.8 ms), so a
# buffer four times its budget gives the gain away.
OVERSIZED_BEYOND_GAIN = 4.0
# A baked sequence length this many times the longest real one is called far above.
FAR_ABOVE = 4
LARGE_BUFFERS_BYTES = 2**30


class Traffic(Protocol):
    """The columns of a workload that linting reads (`workbench.workload.Workload` has them)."""

    @property
    def tokens(self) -> Ints:
        """[N] output tokens."""

    @property
    def offsets(self) -> Ints:
        """[calls + 1] where each call starts."""

    @property
    def frames(self) -> Ints:
        """[N] the grid's t."""

    @property
    def is_video(self) -> npt.NDArray[np.bool_]:
        """[N] whether the item is a video."""


@dataclass(frozen=True)
class Finding:
    """One finding: which rule, how bad, on which budget (None: the whole configuration), and what to do."""

    rule: str
    severity: Severity
    budget: int | None
    message: str
    remedy: str
    evidence: dict[str, int | float | list[int]]


@dataclass(frozen=True)
class Found:
    """What a rule yields; the rule's id is added by `lint`. `severity` None is the rule's own."""

    message: str
    remedy: str
    budget: int | None = None
    severity: Severity | None = None
    evidence: dict[str, int | float | list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """What the rules look at.

    Attributes:
        facts, configuration, limits: the question.
        resolved: the configuration as vLLM runs it; None when vLLM refuses it.
        captures: one per resolved budget, ascending; empty when vLLM refuses the configuration.
        plan: the workload's batches; None without a workload or without an item that graphs serve.
        video: [items of the plan, packing order] whether the item is a video.
        ungraphed: items of the workload whose modality has no graphs.
    """

    facts: ModelFacts
    configuration: Configuration
    limits: Limits
    resolved: Resolved | None
    captures: tuple[Capture, ...]
    plan: Plan | None
    video: npt.NDArray[np.bool_]
    ungraphed: int

    @cached_property
    def largest_item(self) -> int:
        """Most output tokens that an item of a modality with graphs can have.

        An image of another shape can have more than the square one that vLLM profiles (6,177 tokens, not 6,084, for
        Ernie-4.5-VL), so this is the pixel limit itself.
        """
        facts = self.facts
        token_pixels = (facts.patch * facts.merge) ** 2
        largest = max(
            limits.max_pixels // (token_pixels * (facts.temporal_patch if limits.counts_frames else 1))
            for modality, limits in facts.limits.items()
            if modality in facts.graph_modalities and (modality == "image" or self.videos_allowed)
        )
        longest = self.limits.max_model_len
        return largest if longest is None else min(largest, longest)

    @property
    def videos_allowed(self) -> bool:
        """Whether the manager may get videos."""
        return "video" in self.facts.graph_modalities and self.limits.video_limit > 0

    @cached_property
    def longest_sequence(self) -> dict[int, int]:
        """Budget → longest attention sequence, in patches, of the replays that the workload makes of it."""
        plan = self.plan
        if plan is None or len(plan) == 0:
            return {}
        patches = plan.arrangement.tokens * self.facts.merge**2
        if self.facts.sequences == "frame" and plan.arrangement.frames is not None:
            patches = patches // plan.arrangement.frames
        longest = np.maximum.reduceat(patches, plan.first[:-1])
        budgets = plan.budget
        return {
            budget: int(longest[budgets == budget].max())
            for budget in self.budgets_in_order
            if (budgets == budget).any()
        }

    @property
    def budgets_in_order(self) -> list[int]:
        """Resolved budgets, ascending, each once."""
        return sorted(set(self.resolved.budgets)) if self.resolved else []


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    id: str
    severity: Severity
    summary: str
    check: Callable[[Subject], Iterator[Found]]


RULES: list[Rule] = []


def _rule(id_: str, severity: Severity, summary: str) -> Callable[[Callable[[Subject], Iterator[Found]]], None]:
    def add(check: Callable[[Subject], Iterator[Found]]) -> None:
        RULES.append(Rule(id_, severity, summary, check))

    return add


# The configuration itself ---------------------------------------------------------------------------------------


@_rule("items-above-smallest-budget", "error", "more items per replay than the smallest budget has tokens")
def _items_above_smallest(subject: Subject) -> Iterator[Found]:
    asked = subject.configuration
    smallest = min(asked.budgets) if asked.budgets else min(subject.budgets_in_order)
    if asked.max_items <= smallest:
        return
    evidence: dict[str, int | float | list[int]] = {"max_items": asked.max_items, "smallest_budget": smallest}
    if asked.budgets:
        yield Found(
            f"max items {asked.max_items:,} is above the smallest budget {smallest:,}: vLLM refuses to start",
            f"set max items to {smallest} or less, or raise the smallest budget",
            smallest,
            evidence=evidence,
        )
    else:
        yield Found(
            f"max items {asked.max_items:,} is above the largest inferred budget {smallest:,}: vLLM starts with this "
            "one graph, which cannot hold so many items",
            f"set max items to {subject.limits.min_budget} or less to get smaller graphs as well",
            smallest,
            "warning",
            evidence,
        )


@_rule("unsorted-budgets", "warning", "budgets out of order")
def _unsorted(subject: Subject) -> Iterator[Found]:
    budgets = list(subject.configuration.budgets)
    if budgets != sorted(budgets):
        yield Found(
            f"budgets {budgets} are not in ascending order; vLLM sorts them",
            f"write them as {','.join(map(str, sorted(budgets)))}",
            evidence={"budgets": budgets},
        )


@_rule("repeated-budget", "warning", "a budget given twice")
def _repeated(subject: Subject) -> Iterator[Found]:
    budgets = subject.configuration.budgets
    for budget in sorted(set(budgets)):
        times = budgets.count(budget)
        if times > 1:
            yield Found(
                f"budget {budget:,} is given {times} times: vLLM captures it {times} times at start-up and keeps one",
                "give it once",
                budget,
                evidence={"times": times},
            )


@_rule("many-graphs", "warning", "more graphs than vLLM captures without a warning")
def _many_graphs(subject: Subject) -> Iterator[Found]:
    count = len(subject.captures)
    if count > MANY_GRAPHS:
        yield Found(
            f"{count} graphs would be captured; vLLM itself warns above {MANY_GRAPHS}, each costs start-up time and "
            "memory",
            "drop budgets that serve few replays; `workbench advise` chooses a number of graphs you name",
            evidence={"graphs": count},
        )


# Captured shapes ------------------------------------------------------------------------------------------------


@_rule("oversized-buffer", "warning", "a buffer far larger than its budget")
def _oversized(subject: Subject) -> Iterator[Found]:
    for capture in subject.captures:
        ratio = capture.capacity / capture.budget
        if ratio < OVERSIZED:
            continue
        frames = capture.grid[0] > 1
        yield Found(
            f"the graph of budget {capture.budget:,} computes {capture.patches:,} patches, {ratio:.4g} times what the "
            f"budget needs ({capture.items} items of {'x'.join(map(str, capture.grid))} patches)",
            "set the video limit to 0 when you serve no video, or give max frames per batch"
            if frames
            else "lower max items, or make the budget a multiple of it",
            capture.budget,
            "error" if ratio >= OVERSIZED_BEYOND_GAIN else "warning",
            {"ratio": ratio, "patches": capture.patches, "grid": list(capture.grid), "items": capture.items},
        )


@_rule("undersized-buffer", "error", "a buffer smaller than its budget (D3)")
def _undersized(subject: Subject) -> Iterator[Found]:
    for capture in subject.captures:
        if capture.capacity < capture.budget:
            yield Found(
                f"the graph of budget {capture.budget:,} holds {capture.capacity:,} tokens, because {capture.budget:,} "
                f"is not divisible by max items {capture.items}; a fuller batch raises at the copy",
                f"use a multiple of {capture.items}, such as {-(-capture.budget // capture.items) * capture.items}",
                capture.budget,
                evidence={"capacity": capture.capacity, "items": capture.items},
            )


@_rule("rotary-table-overrun", "error", "a dummy item wider than the rotary table (D7)")
def _rotary(subject: Subject) -> Iterator[Found]:
    positions = subject.facts.extra.get("rotary_positions")
    for capture in subject.captures:
        if positions is not None and max(capture.grid[1:]) > positions:
            yield Found(
                f"the dummy item of budget {capture.budget:,} is {capture.grid[2]:,} patches wide, and the rotary "
                f"table has {positions:,} positions: the capture raises at start-up",
                f"keep budget / max items at {int(positions) // subject.facts.merge:,} or less",
                capture.budget,
                evidence={"width": capture.grid[2], "positions": positions},
            )


@_rule("dominated-budget", "warning", "a budget whose graph costs as much as a larger one's")
def _dominated(subject: Subject) -> Iterator[Found]:
    for index, capture in enumerate(subject.captures):
        better = [
            other
            for other in subject.captures[index + 1 :]
            if other.budget > capture.budget and other.patches <= capture.patches
        ]
        if better:
            yield Found(
                f"the graph of budget {capture.budget:,} computes {capture.patches:,} patches, no fewer than that of "
                f"budget {better[-1].budget:,} ({better[-1].patches:,}), and holds less",
                f"drop budget {capture.budget}",
                capture.budget,
                evidence={
                    "patches": capture.patches,
                    "by": better[-1].budget,
                    "by_patches": better[-1].patches,
                },
            )


@_rule("buffer-memory", "warning", "buffers that take much memory")
def _memory(subject: Subject) -> Iterator[Found]:
    total = sum(capture.bytes for capture in subject.captures)
    if total >= LARGE_BUFFERS_BYTES:
        largest = max(reversed(subject.captures), key=lambda capture: capture.bytes)
        yield Found(
            f"the fixed buffers of {len(subject.captures)} graphs take {total / 2**20:,.0f} MiB, "
            f"{largest.bytes / 2**20:,.0f} MiB of it for budget {largest.budget:,}; activations come on top",
            "use fewer or smaller budgets" + (", or fewer frames per batch" if largest.grid[0] > 1 else ""),
            largest.budget,
            evidence={"buffer_bytes": total, "graphs": len(subject.captures), "largest_bytes": largest.bytes},
        )


@_rule("baked-max-seqlen", "info", "a baked sequence length far above any real sequence")
def _max_seqlen(subject: Subject) -> Iterator[Found]:
    possible = subject.largest_item * subject.facts.merge**2
    for capture in subject.captures:
        if subject.plan is None:
            longest, whose = possible, "that an item can have"
        elif capture.budget in subject.longest_sequence:
            longest, whose = subject.longest_sequence[capture.budget], "in the workload's replays of it"
        else:
            continue
        if capture.max_seqlen >= FAR_ABOVE * longest:
            yield Found(
                f"the graph of budget {capture.budget:,} is captured with sequences of {capture.max_seqlen:,} patches; "
                f"the longest {whose} is {longest:,}",
                "FlashAttention 3 on an H200 showed no cost; on another backend, compare replays with `workbench "
                "capture`",
                capture.budget,
                evidence={"max_seqlen": capture.max_seqlen, "longest": longest},
            )


# Video frames ---------------------------------------------------------------------------------------------------


@_rule("zeroed-sequence-tail", "error", "replays whose sequence buffer is zeroed at the tail (D6)")
def _zeroed_tail(subject: Subject) -> Iterator[Found]:
    resolved = subject.resolved
    if resolved is None or subject.facts.sequences != "frame" or subject.facts.extra.get("repeats_last_offset"):
        return
    items, frames = resolved.max_items, resolved.max_frames
    evidence: dict[str, int | float | list[int]] = {"max_items": items, "max_frames": frames}
    images = subject.plan is None or not subject.video.all()
    if frames > items and images:
        yield Found(
            f"the sequence buffer is captured with {frames + 1:,} offsets and an image replay writes {items + 1}: vLLM "
            f"zeroes the other {frames - items:,}, and attention over them gives wrong embeddings",
            "serve only images with --limit-mm-per-prompt '{\"video\": 0}', or set max frames per batch to max items",
            evidence=evidence | {"zeroed": frames - items},
        )
    videos = subject.videos_allowed and (subject.plan is None or bool(subject.video.any()))
    fewest = max(frames, 1)  # offsets after the first that a replay of one frame writes
    if fewest < items and videos:
        yield Found(
            f"the sequence buffer is captured with {items + 1} offsets and a replay of videos with fewer than {items} "
            f"frames in all writes as few as {fewest + 1}: vLLM zeroes the rest, and attention over them gives wrong "
            "embeddings",
            "set max frames per batch to max items",
            evidence=evidence | {"zeroed": items - fewest},
        )


@_rule("frames-above-capacity", "error", "more frames than the captured sequence buffer holds (D4)")
def _frames(subject: Subject) -> Iterator[Found]:
    resolved = subject.resolved
    if resolved is None or subject.facts.sequences != "frame" or not subject.videos_allowed:
        return
    slots = resolved.sequence_slots
    if subject.plan is not None:
        over = subject.plan.over_frames
        if over.any():
            worst = int(subject.plan.frames[over].max())
            yield Found(
                f"{int(over.sum()):,} of the workload's replays hold more frames than the {slots:,} captured, up to "
                f"{worst:,}: vLLM does not count frames when it packs, and the copy raises",
                f"set max frames per batch to {worst} or more, or lower max items",
                evidence={"batches": int(over.sum()), "slots": slots, "most_frames": worst},
            )
        return
    longest = -(-subject.facts.max_frames_per_video // subject.facts.temporal_patch)
    if longest > slots:
        yield Found(
            f"one video can have {longest:,} frames after temporal merging and the sequence buffer holds {slots:,}: "
            "such a replay raises at the copy",
            f"set max frames per batch to {longest} or more, or limit the frames the server samples per video",
            severity="warning",
            evidence={"slots": slots, "most_frames": longest},
        )


# What the workload makes of it ----------------------------------------------------------------------------------


@_rule("item-above-largest-budget", "warning", "items that no graph holds (D1 for Ernie-4.5-VL)")
def _above_largest(subject: Subject) -> Iterator[Found]:
    if subject.resolved is None:
        return
    largest = subject.resolved.budgets[-1]
    crash = bool(subject.facts.extra.get("fallback_crashes"))
    effect = "vLLM 0.33.0 applies the resampler twice and the engine dies" if crash else "it runs eagerly"
    if subject.plan is None:
        if subject.largest_item > largest:
            yield Found(
                f"an item can have {subject.largest_item:,} tokens and the largest budget is {largest:,}: {effect}",
                f"add a budget of {subject.largest_item}, or limit max_pixels of the image processor",
                largest,
                "warning" if crash else "info",
                {"largest_item": subject.largest_item},
            )
        return
    above = subject.plan.tokens[subject.plan.fallback]
    if above.size:
        yield Found(
            f"{above.size:,} of the workload's {len(subject.video):,} items exceed the largest budget {largest:,}, up "
            f"to {int(above.max()):,} tokens: {effect}",
            f"add a budget of {int(above.max())}, or limit max_pixels of the image processor",
            largest,
            "error" if crash else "warning",
            {"items": int(above.size), "largest_item": int(above.max())},
        )


@_rule("unreachable-budget", "warning", "a budget that no replay uses")
def _unreachable(subject: Subject) -> Iterator[Found]:
    resolved = subject.resolved
    if resolved is None:
        return
    if subject.plan is not None:
        used = set(subject.plan.budget.tolist())
        for budget in subject.budgets_in_order:
            if budget not in used:
                yield Found(
                    f"no replay of the workload uses budget {budget:,}",
                    f"drop budget {budget}",
                    budget,
                    evidence={"calls": subject.plan.arrangement.calls},
                )
        return
    most = resolved.max_items * subject.largest_item
    if subject.limits.max_num_batched_tokens is not None:
        # The scheduler's encoder budget bounds what one step, and so one call, can hold.
        most = min(most, max(subject.limits.max_num_batched_tokens, subject.largest_item))
    for smaller, budget in zip(subject.budgets_in_order, subject.budgets_in_order[1:], strict=False):
        if smaller >= most:
            yield Found(
                f"no replay can need budget {budget:,}: {resolved.max_items} items of at most "
                f"{subject.largest_item:,} tokens fit budget {smaller:,}",
                f"drop budget {budget}",
                budget,
                evidence={"most_tokens": most, "smaller": smaller},
            )


@_rule("one-item-replays", "warning", "every item is replayed alone")
def _one_item(subject: Subject) -> Iterator[Found]:
    if subject.resolved is None or subject.resolved.max_items > 1:
        return
    evidence: dict[str, int | float | list[int]] = {"max_items": 1}
    several = "a call of several images"
    if subject.plan is not None:
        counts = np.diff(subject.plan.arrangement.offsets)
        if counts.max() == 1:
            return
        several = f"each of the workload's {int((counts > 1).sum()):,} calls of several items"
        evidence |= {"calls": int((counts > 1).sum()), "most_items": int(counts.max())}
    yield Found(
        f"max items 1 makes {several} one replay per item",
        "raise max items; `workbench advise` weighs it against padding",
        evidence=evidence,
    )


@_rule("no-graph-for-modality", "info", "items of a modality that has no graphs")
def _no_graph(subject: Subject) -> Iterator[Found]:
    if subject.ungraphed:
        yield Found(
            f"{subject.ungraphed:,} videos of the workload never reach the graphs: {subject.facts.title} has graphs "
            f"for {' and '.join(subject.facts.graph_modalities)} only",
            "judge the configuration by the rest of the workload",
            evidence={"items": subject.ungraphed},
        )


# The report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Findings, and the captured shapes they were made from."""

    facts: ModelFacts
    resolved: Resolved | None
    captures: tuple[Capture, ...]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether a finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)

    def record(self, costs: "CostModel | None" = None) -> dict[str, Any]:
        """Return the report as plain data, the JSON of `workbench lint`; `costs` as in `memory`."""
        resolved = self.resolved
        return {
            "model": self.facts.key,
            "budgets": list(resolved.budgets) if resolved else None,
            "max_items": resolved.max_items if resolved else None,
            "max_frames": resolved.max_frames if resolved else None,
            "findings": [asdict(finding) for finding in self.findings],
            "rules": [{"rule": rule.id, "severity": rule.severity, "summary": rule.summary} for rule in RULES],
            "captures": [_capture_record(capture) for capture in self.captures],
            "memory": memory(self.captures, costs),
        }


def memory(captures: tuple[Capture, ...], costs: "CostModel | None" = None) -> dict[str, Any]:
    """Return the memory of all graphs: buffers from their shapes, activations only from measurements.

    Args:
        captures: the captured shapes.
        costs: a measured profile of the model; None: the activations are left out, with the reason.
    """
    known: dict[str, Any] = {
        "graphs": len(captures),
        "buffer_bytes": sum(capture.bytes for capture in captures),
        "buffer_basis": "sum of the captured input and output tensors, from their shapes; the allocator rounds up",
        "capture_bytes": None,
        "capture_seconds": None,
        "capture_basis": "not estimated: activations share one pool whose size depends on kernels and allocator; give "
        "a cost profile, which `workbench calibrate` measures on a GPU",
    }
    if costs is not None and captures:
        # Captures cost by the rows they compute, which for a missized buffer is not the budget.
        rows = [capture.capacity for capture in captures]
        known["capture_bytes"] = costs.capture_bytes(rows)
        known["capture_seconds"] = costs.capture_seconds(rows)
        known["capture_basis"] = f"interpolated between captures measured for {costs.profile.title}, buffers included"
    return known


def _capture_record(capture: Capture) -> dict[str, Any]:
    buffers = {
        buffer.name: {"shape": list(buffer.shape), "dtype": buffer.dtype, "bytes": buffer.bytes}
        for buffer in (*capture.inputs, capture.output)
    }
    return {
        "budget": capture.budget,
        "items": capture.items,
        "grid": list(capture.grid),
        "patches": capture.patches,
        "capacity": capture.capacity,
        "sequence_slots": capture.sequence_slots,
        "max_seqlen": capture.max_seqlen,
        "bytes": capture.bytes,
        "buffers": buffers,
    }


_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


def lint(
    facts: ModelFacts,
    configuration: Configuration,
    limits: Limits | None = None,
    traffic: Traffic | None = None,
) -> Report:
    """Return what is wrong with `configuration` for `facts`, errors first.

    Args:
        facts: the model.
        configuration: budgets, max items, max frames, as a person gives them.
        limits: of the server; None: `Limits.of(facts)`.
        traffic: a workload grouped into encoder calls; None: rules look at what is possible, not at what comes.

    Raises:
        WorkbenchError: the configuration cannot be resolved, except for max items above the smallest budget, which
            is a finding; or the workload is not one.
    """
    limits = limits or Limits.of(facts)
    check_values(configuration, limits)
    refused = bool(configuration.budgets) and configuration.max_items > min(configuration.budgets)
    resolved = None if refused else resolve(configuration, limits)
    captures = () if resolved is None else captured_shapes(facts, resolved)
    plan, video, ungraphed = _planned(facts, resolved, traffic)
    subject = Subject(facts, configuration, limits, resolved, captures, plan, video, ungraphed)
    findings = [
        Finding(rule.id, found.severity or rule.severity, found.budget, found.message, found.remedy, found.evidence)
        for rule in RULES
        for found in rule.check(subject)
    ]
    findings.sort(key=lambda finding: _ORDER[finding.severity])
    return Report(facts, resolved, captures, tuple(findings))


def _planned(
    facts: ModelFacts, resolved: Resolved | None, traffic: Traffic | None
) -> tuple[Plan | None, npt.NDArray[np.bool_], int]:
    """Plan the calls that the manager gets: one modality each, and only modalities that have graphs."""
    nothing = np.zeros(0, np.bool_)
    if traffic is None:
        return None, nothing, 0
    if len(traffic.tokens) == 0:
        raise WorkbenchError("the workload has no item; give at least one image or video")
    call = np.repeat(np.arange(len(traffic.offsets) - 1), np.diff(traffic.offsets))
    served = np.array(["image" in facts.graph_modalities, "video" in facts.graph_modalities])
    kept = np.flatnonzero(served[traffic.is_video.astype(np.int64)])
    ungraphed = len(call) - len(kept)
    if resolved is None or len(kept) == 0:
        return None, nothing, ungraphed
    # vLLM groups what it encodes by modality, so a call of both becomes two.
    key = call[kept] * 2 + traffic.is_video[kept]
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    kept = kept[order]
    arrangement = arrange(traffic.tokens[kept], np.append(starts, len(kept)), traffic.frames[kept])
    return pack(arrangement, resolved), traffic.is_video[kept][arrangement.item], ungraphed
