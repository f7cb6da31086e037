"""Base against head of two ladders: the same calls, step by step. `workbench.diff` calls it and judges its questions.

Main questions are vLLM's graph and all variants (or the only one) on every call that both sides ran; the other steps
are details.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.capturable import GRAPH, Case, Column, Ladder
from workbench.diff import FailureDiff, Metric, ParityDiff, TimingDiff, incomparable, statistics
from workbench.doubts import environment_doubts, ladder_differences, made_doubts
from workbench.evidence import Question
from workbench.ladder import FAR, caveats, last_step, title

SOURCE = "outputs of the ladder's steps against eager"


@dataclass(frozen=True)
class LadderDiff:
    """What two ladders say beside each other, before the timings are judged."""

    timings: list[tuple[TimingDiff, Question | None]]
    metrics: list[Metric]
    parity: list[ParityDiff]
    failures: list[FailureDiff]
    doubts: list[str]
    differences: list[str]
    notes: list[str]


class _Step(NamedTuple):
    """One column on both sides, of the base's call `call`, which is `head_call` of the head."""

    call: int
    head_call: int
    cases: tuple[Case, Case]
    columns: tuple[Column, Column]

    @property
    def name(self) -> str:
        """What `--fail-if` calls it: "all variants[64 tokens]"."""
        return f"{self.columns[0].name}[{self.cases[0].name}]"


def compare_ladders(base: Ladder, head: Ladder) -> LadderDiff:
    """Compare what both ladders ran; what only one has becomes a note."""
    pairs = _common_cases(base, head)
    steps = list(_common_steps(base, head, pairs))
    timings, notes = _timings(base, head, steps)
    sides = (("base", base), ("head", head))
    return LadderDiff(
        timings=timings,
        metrics=[*_counts(steps), *_pools(base, head)],
        parity=_parity(steps),
        failures=_failures(steps),
        doubts=environment_doubts(base.environment, head.environment)
        + made_doubts(base, head)
        + [f"{side}: {caveat}" for side, ladder in sides for caveat in caveats(ladder)],
        differences=ladder_differences(base, head),
        notes=[*notes, *_lonely(base, head, pairs)],
    )


def moved_graph(timings: Iterable[TimingDiff], base: Ladder, head: Ladder) -> list[str]:
    """vLLM's own graph does not depend on the variants: if it moved while only they changed, the machine did."""
    same = (base.budgets, base.max_items, base.max_frames) == (head.budgets, head.max_items, head.max_frames)
    if not same or base.environment.vllm != head.environment.vllm:
        return []
    graphs = [timing.changes[0] for timing in timings if timing.name.startswith(f"{GRAPH}[") and timing.changes]
    moved = [change.ratio - 1 for change in graphs if change.ratio and change.verdict in ("faster", "slower")]
    if not moved:
        return []
    return [
        f"vLLM's own graph changed by {min(moved):+.1%} to {max(moved):+.1%} on {len(moved)} of {len(graphs)} calls "
        "although no variant touches it: the machine differs by about as much"
    ]


def _common_cases(base: Ladder, head: Ladder) -> list[tuple[int, int]]:
    """Numbers of the calls that encode the same, in the base's order."""
    waiting: dict[object, list[int]] = defaultdict(list)
    for number, case in enumerate(head.cases):
        waiting[_key(case)].append(number)
    return [(number, waiting[_key(case)].pop(0)) for number, case in enumerate(base.cases) if waiting[_key(case)]]


def _key(case: Case) -> object:
    return case.modality, tuple(case.grids), case.beside_videos


def _common_steps(base: Ladder, head: Ladder, pairs: Sequence[tuple[int, int]]) -> Iterator[_Step]:
    for left, right in pairs:
        cases = (base.cases[left], head.cases[right])
        others = {column.name: column for column in cases[1].columns}
        for column in cases[0].columns:
            if column.name in others:
                yield _Step(left, right, cases, (column, others[column.name]))


def _lonely(base: Ladder, head: Ladder, pairs: Sequence[tuple[int, int]]) -> list[str]:
    """What was run on one side only."""
    told = []
    for side, ladder, common in (("base", base, {a for a, _ in pairs}), ("head", head, {b for _, b in pairs})):
        missing = [case.name for number, case in enumerate(ladder.cases) if number not in common]
        if missing:
            told.append(f"calls of the {side} alone: {', '.join(missing[:20])}")
    left, right = ({column.name for case in side.cases for column in case.columns} for side in (base, head))
    for side, names in (("base", left - right), ("head", right - left)):
        if names:
            told.append(f"steps of the {side} alone: {', '.join(map(title, sorted(names)[:20]))}")
    return told


def _timings(
    base: Ladder, head: Ladder, steps: Sequence[_Step]
) -> tuple[list[tuple[TimingDiff, Question | None]], list[str]]:
    reason = incomparable(base, head, bool(steps))
    if reason:
        return [], [f"timings are not compared: {reason}"]
    last = last_step(title(step.columns[0].name) for step in steps)
    found: list[tuple[TimingDiff, Question | None]] = []
    for step in steps:
        left, right = (column.wall_us for column in step.columns)
        if not left or not right:
            continue
        main = title(step.columns[0].name) in (title(GRAPH), last)
        timing = TimingDiff(
            name=step.name,
            unit="us",
            base=statistics(left),
            head=statistics(right),
            changes=[],
            call=None if main else step.call,
            clock="wall",
        )
        found.append((timing, Question(left, right, main=main)))
    return found, []


def _counts(steps: Sequence[_Step]) -> list[Metric]:
    """GPU ops of a traced call, and nodes of the graphs it replays."""
    found = []
    for step in steps:
        left, right = step.columns
        for name, before, after in (("ops", left.ops, right.ops), ("nodes", left.nodes, right.nodes)):
            if before is not None and after is not None:
                found.append(Metric(name=f"{step.name}.{name}", unit="count", base=before, head=after, better="lower"))
    return found


def _pools(base: Ladder, head: Ladder) -> list[Metric]:
    """Memory of the graph pool that each column's captures took."""
    left, right = (_pool_bytes(side) for side in (base, head))
    return [
        Metric(name=f"{name}.memory.pool", unit="bytes", base=left[name], head=right[name], better="lower")
        for name in left
        if name in right
    ]


def _pool_bytes(ladder: Ladder) -> dict[str, int]:
    found = {}
    for one in ladder.captured:
        taken = [cost.pool_bytes for cost in one.costs if cost.pool_bytes is not None]
        if taken and len(taken) == len(one.costs):
            found[one.column] = sum(taken)
    return found


def _parity(steps: Sequence[_Step]) -> list[ParityDiff]:
    """Items that both sides compared with eager as served; new is what only the head has wrong."""
    compared = [step for step in steps if step.columns[0].parity and step.columns[1].parity]
    if not compared:
        return []
    sides = [[item for step in compared for item in step.columns[side].parity] for side in (0, 1)]
    worst = [max((item.relative_rms for item in side if item.relative_rms is not None), default=None) for side in sides]
    told = [{text for step in compared for text in _faults(step, side)} for side in (0, 1)]
    return [
        ParityDiff(
            source=SOURCE,
            base_equal=sum(item.bit_equal for item in sides[0]),
            base_total=len(sides[0]),
            head_equal=sum(item.bit_equal for item in sides[1]),
            head_total=len(sides[1]),
            base_worst=worst[0],
            head_worst=worst[1],
            new_findings=sorted(told[1] - told[0]),
            gone_findings=sorted(told[0] - told[1]),
        )
    ]


def _faults(step: _Step, side: int) -> Iterator[str]:
    """What is wrong with one step's outputs, worded alike on both sides."""
    column, noise = step.columns[side], step.cases[side].noise_rms
    if any(not item.finite for item in column.parity):
        yield f"{step.name} is not finite"
    if noise and any((item.relative_rms or 0.0) > FAR * noise for item in column.parity):
        yield f"{step.name} lies beyond {FAR} noise floors from eager as served"
    if column.against_graph and not all(item.bit_equal for item in column.against_graph):
        yield f"{step.name} has other bits than vLLM's graph"
    for text in column.findings:
        yield f"{step.name}: {text}"


def _failures(steps: Sequence[_Step]) -> list[FailureDiff]:
    """Calls on which a step failed, by the type of its error: what the text adds may hold an address or a size."""
    found: dict[tuple[str, str], tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for step in steps:
        for side, (column, call) in enumerate(zip(step.columns, (step.call, step.head_call), strict=True)):
            if column.error is not None:
                found[column.name, column.error.partition(":")[0]][side].add(call)
    partners = {step.call: step.head_call for step in steps}
    return [
        FailureDiff(
            arm=name,
            error=error,
            cause="",
            base=len(left),
            head=len(right),
            only_base=sorted(call for call in left if partners[call] not in right),
            only_head=sorted(right - {partners[call] for call in left}),
        )
        for (name, error), (left, right) in found.items()
    ]
