"""Base against head: what changed, how sure that is, and what makes the comparison doubtful.

Runs are paired by name, calls by what they encode, traces by arm and activities, GPU operations by their
order. A change of timings carries a verdict (`workbench.evidence`); counts and sizes are compared as they
are. Times are microseconds, memory is bytes.
"""

import glob
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

import workbench
from workbench.alignment import align
from workbench.bundle import Content, Entry, Kind, opened
from workbench.capturable import Ladder
from workbench.decision import BenchmarkDelta, benchmark_delta
from workbench.doubts import differences, environment_doubts, made_doubts
from workbench.errors import WorkbenchError
from workbench.evidence import Change, Question, Verdict, drift, judge
from workbench.ingest import External, Measure
from workbench.kernels import family, short_name
from workbench.parity import Change as CellChange
from workbench.parity import changes as parity_changes
from workbench.run import ARMS, Arm, Record, Run
from workbench.stats import Statistic, Summary, summary

SCHEMA_VERSION = 1
Clock = Literal["wall", "gpu"]
Unit = Literal["us", "bytes", "s", "count", "share", "per_second"]
Better = Literal["lower", "higher", "neither"]

KERNEL_TOLERANCE = 0.05  # share by which a kernel's time per call may differ
KERNEL_FLOOR_US = 1.0
NOTABLE_DRIFT = 0.02  # of a run's second half against its first
MOST_CALLS = 100  # with a row of their own; all count in the pass over the workload
_MEASURED = ("launches", "syncs", "kernels", "memcpy_h2d", "memcpy_d2h", "memset")
_SPANS = ("wall", "busy", "idle", "launch_gap", "queue_gap", "intra_graph_gap")


class Statistics(Record, frozen=True):
    """One side's samples, summarised."""

    mean: float
    median: float
    std: float
    p99: float
    n: int


class TimingDiff(Record, frozen=True):
    """One timing on both sides. `call` is the base's index; None is one pass over all common calls, or a main question.

    `name` is what `--fail-if` calls it: "graph", "graph.gpu", "graph[2]", "all variants[64 tokens]" of a ladder, or a
    foreign measure's name.
    """

    name: str
    unit: Unit
    base: Statistics | None
    head: Statistics | None
    changes: list[Change]
    arm: Arm | None = None
    call: int | None = None
    clock: Clock | None = None

    def change(self, statistic: str) -> Change | None:
        """The change of one statistic."""
        return next((change for change in self.changes if change.statistic == statistic), None)


class Metric(Record, frozen=True):
    """A count or size on both sides; None where a side does not have it."""

    name: str
    unit: Unit
    base: float | None
    head: float | None
    better: Better

    @property
    def verdict(self) -> Verdict | None:
        """Better or worse, where that can be said."""
        if self.base is None or self.head is None or self.better == "neither" or self.base == self.head:
            return None
        return "better" if (self.head < self.base) == (self.better == "lower") else "worse"


class KernelDiff(Record, frozen=True):
    """GPU operations of one name, per call of the arm; `moved` stand at another place in order."""

    arm: str
    name: str
    short: str
    family: str
    status: Literal["added", "removed", "changed count", "changed time", "moved"]
    base_count: float
    head_count: float
    base_us: float
    head_us: float
    moved: int


class ParityDiff(Record, frozen=True):
    """Agreement of graph and eager on each side: calls with equal bits, and the worst relative RMS."""

    source: str
    base_equal: int
    base_total: int
    head_equal: int
    head_total: int
    base_worst: float | None
    head_worst: float | None
    new_findings: list[str] = []
    gone_findings: list[str] = []


class FailureDiff(Record, frozen=True):
    """Calls on which an arm could not run, on each side; `cause` is a known defect such as "D1".

    `only_base` and `only_head` are that side's numbers of the calls that do not fail so on the other side.
    """

    arm: str
    error: str
    cause: str
    base: int
    head: int
    only_base: list[int] = []
    only_head: list[int] = []

    @property
    def verdict(self) -> Verdict | None:
        """Worse when any call fails only in the head."""
        return "worse" if self.only_head else "better" if self.only_base else None


class PairDiff(Record, frozen=True):
    """One run (or ladder, parity session, foreign result) of each side.

    `common_calls` encode the same on both sides; the passes of all arms are over `pass_calls` (the base's
    numbers): those of them that every compared arm finished on both sides.
    """

    name: str
    kind: Kind
    model: str | None
    baseline: str
    doubts: list[str]
    differences: list[str]
    timings: list[TimingDiff]
    metrics: list[Metric]
    kernels: list[KernelDiff]
    parity: list[ParityDiff]
    accuracy: list[BenchmarkDelta]
    failures: list[FailureDiff]
    notes: list[str]
    pass_calls: list[int] = []
    common_calls: int = 0


class Diff(Record, frozen=True):
    """The whole comparison. `base` and `head` name the sides (file names), digests where they are bundles."""

    schema_version: int
    workbench: str
    base: str
    head: str
    pairs: list[PairDiff]
    only_base: list[str]
    only_head: list[str]

    def timings(self) -> Iterator[TimingDiff]:
        """All timings of all pairs."""
        for pair in self.pairs:
            yield from pair.timings

    def has_new_failures(self) -> bool:
        """Whether any call fails only in the head."""
        return any(row.only_head for pair in self.pairs for row in pair.failures)


def compare_files(base: Path, head: Path) -> Diff:
    """Compare two bundles, folders of measurements or foreign results.

    Raises:
        WorkbenchError: a side is not readable, or nothing on one side matches the other.
    """
    with opened(base) as left, opened(head) as right:
        return compare(left, right, base.name, head.name)


def compare(base: Sequence[Content], head: Sequence[Content], base_name: str = "base", head_name: str = "head") -> Diff:
    """Compare the contents of two sides.

    Raises:
        WorkbenchError: nothing on one side matches the other.
    """
    pairs, only_base, only_head = _pairs(base, head)
    if not pairs:
        raise WorkbenchError(
            f"{base_name} and {head_name} hold nothing that can be compared ({_named(only_base)} and "
            f"{_named(only_head)}); give two captures of the same kind"
        )
    drafts = [_draft(left, right) for left, right in pairs]
    answers = iter(judge([question for draft in drafts for question in draft.questions()]))
    return Diff(
        schema_version=SCHEMA_VERSION,
        workbench=workbench.__version__,
        base=base_name,
        head=head_name,
        pairs=[draft.finish(answers) for draft in drafts],
        only_base=only_base,
        only_head=only_head,
    )


def _pairs(
    base: Sequence[Content], head: Sequence[Content]
) -> tuple[list[tuple[Content, Content]], list[str], list[str]]:
    """Pair by kind and name, then, what is left of one kind, in order."""
    left, right = list(base), list(head)
    pairs = []
    for same in (_same_name, _same_kind):
        for content in list(left):
            partner = next((other for other in right if same(content.entry, other.entry)), None)
            if partner is not None:
                left.remove(content)
                right.remove(partner)
                pairs.append((content, partner))
    return pairs, [content.entry.name for content in left], [content.entry.name for content in right]


def _same_name(base: Entry, head: Entry) -> bool:
    return (base.kind, base.name) == (head.kind, head.name) and _same_kind(base, head)


def _same_kind(base: Entry, head: Entry) -> bool:
    return base.kind == head.kind and (base.model == head.model or None in (base.model, head.model))


def _named(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


class _Draft:
    """A pair's comparison before its timings are judged together with all others."""

    def __init__(self, base: Content, head: Content) -> None:
        self.base, self.head = base, head
        self.timings: list[tuple[TimingDiff, Question | None]] = []
        self.metrics: list[Metric] = []
        self.kernels: list[KernelDiff] = []
        self.parity: list[ParityDiff] = []
        self.accuracy: list[BenchmarkDelta] = []
        self.failures: list[FailureDiff] = []
        self.doubts: list[str] = []
        self.differences: list[str] = []
        self.notes: list[str] = []
        self.common: list[tuple[int, int]] = []  # calls that encode the same: the base's number, the head's
        self.passed: list[tuple[int, int]] = []  # those of them that every compared arm finished

    def questions(self) -> list[Question]:
        """What needs a verdict, in the order `finish` takes the answers."""
        return [question for _, question in self.timings if question is not None]

    def finish(self, answers: Iterator[list[Change]]) -> PairDiff:
        timings = [
            timing if question is None else msgspec.structs.replace(timing, changes=next(answers))
            for timing, question in self.timings
        ]
        name = self.base.entry.name
        if self.head.entry.name != name:
            name = f"{name} → {self.head.entry.name}"
        return PairDiff(
            name=name,
            kind=self.base.entry.kind,
            model=self.head.entry.model,
            baseline="eager_served",
            doubts=self.doubts + self._unsteady() + self._moved(timings),
            differences=self.differences,
            timings=timings,
            metrics=self.metrics,
            kernels=self.kernels,
            parity=self.parity,
            accuracy=self.accuracy,
            failures=self.failures,
            notes=self.notes,
            pass_calls=[call for call, _ in self.passed],
            common_calls=len(self.common),
        )

    def _moved(self, timings: list[TimingDiff]) -> list[str]:
        """Timings that nothing on purpose could have changed, and that changed."""
        found = _moved_controls(timings, self.base.run, self.head.run)
        if self.base.ladder is not None and self.head.ladder is not None:
            from workbench.ladder_diff import moved_graph

            found += moved_graph(timings, self.base.ladder, self.head.ladder)
        return found

    def _unsteady(self) -> list[str]:
        """Main timings whose halves differ within a side."""
        return [
            f"{side}: {timing.name} drifted by {wander:+.0%} between the halves of its run; the machine was not steady"
            for timing, question in self.timings
            if question is not None and question.main and not question.independent
            for side, samples in (("base", question.base), ("head", question.head))
            if abs(wander := drift(samples)) >= NOTABLE_DRIFT
        ]


def _draft(base: Content, head: Content) -> _Draft:
    draft = _Draft(base, head)
    if base.run is not None and head.run is not None:
        _compare_runs(draft, base.run, head.run)
    _compare_ladders(draft, base.ladder, head.ladder)
    if base.external is not None and head.external is not None:
        _compare_external(draft, base.external, head.external)
    _compare_parity_sessions(draft)
    _compare_findings(draft)
    return draft


def _compare_ladders(draft: _Draft, base: Ladder | None, head: Ladder | None) -> None:
    if base is None or head is None:
        if base or head:
            draft.notes.append("a ladder is on one side only")
        return
    from workbench.ladder_diff import compare_ladders  # its tables are pandas', slow to import

    found = compare_ladders(base, head)
    draft.timings += found.timings
    draft.metrics += found.metrics
    draft.parity += found.parity
    draft.failures += found.failures
    # Beside runs of the same machine, the same may have been said already.
    draft.doubts += [text for text in found.doubts if text not in draft.doubts]
    draft.differences += [text for text in found.differences if text not in draft.differences]
    draft.notes += found.notes


def _compare_runs(draft: _Draft, base: Run, head: Run) -> None:
    draft.doubts += environment_doubts(base.environment, head.environment) + made_doubts(base, head)
    draft.differences += differences(base, head)
    draft.common = _common_calls(base, head)
    _compare_timings(draft, base, head)
    draft.metrics += _run_metrics(draft, base, head)
    _compare_traces(draft, base, head)
    if base.equality or head.equality:
        draft.parity.append(_equality(draft.common, base, head))
    draft.failures += _failures(draft.common, base, head)


# --- timings ---------------------------------------------------------------------------------------


def _call_key(run: Run, index: int) -> tuple[Any, ...]:
    call = run.calls[index]
    return call.modality, tuple(call.grids), tuple(call.sizes)


def _common_calls(base: Run, head: Run) -> list[tuple[int, int]]:
    """Indices of calls that encode the same, in the base's order."""
    waiting: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index in range(len(head.calls)):
        waiting[_call_key(head, index)].append(index)
    return [(index, waiting[key].pop(0)) for index in range(len(base.calls)) if waiting[key := _call_key(base, index)]]


def _compare_timings(draft: _Draft, base: Run, head: Run) -> None:
    reason = incomparable(base, head, bool(draft.common))
    if reason:
        draft.notes.append(f"timings are not compared: {reason}")
        return
    common = draft.common
    if len(common) < max(len(base.calls), len(head.calls)):
        draft.notes.append(
            f"calls common to both sides: {len(common)}, of {len(base.calls)} and {len(head.calls)}; the others are "
            "left out"
        )
    clocks: tuple[Clock, ...] = ("wall", "gpu")
    compared: dict[tuple[Arm, Clock], list[_Samples]] = {}
    for arm in ARMS:
        for clock in clocks:
            left, right = arm_samples(base, arm, clock), arm_samples(head, arm, clock)
            shared = [_Samples((a, b), left[a], right[b]) for a, b in common if a in left and b in right]
            if shared:
                compared[arm, clock] = shared
            if clock == "wall" and len(shared) < len(common) and (left or right):
                draft.notes.append(f"{arm}: measured on both sides on {len(shared)} of {len(common)} common calls")
    finished = [{row.calls for row in rows} for rows in compared.values()]
    draft.passed = [calls for calls in common if finished and all(calls in done for done in finished)]
    if compared and not draft.passed:
        draft.notes.append("no call was finished by every arm on both sides, so there is no pass to compare")
    for (arm, clock), rows in compared.items():
        _compare_arm(draft, base, arm, clock, rows)


class _Samples(NamedTuple):
    """An arm's samples of one call on both sides, microseconds."""

    calls: tuple[int, int]
    base: list[float]
    head: list[float]


def _compare_arm(draft: _Draft, run: Run, arm: Arm, clock: Clock, rows: list[_Samples]) -> None:
    """The pass over the calls that all arms finished, then every call of this arm."""
    passed = [row for row in rows if row.calls in draft.passed]
    if len(passed) == 1:
        draft.timings.append(_timing(passed[0].base, passed[0].head, arm, clock, None))
    elif passed:
        counts = [run.calls[row.calls[0]].count for row in passed]
        left = one_pass([(row.base, count) for row, count in zip(passed, counts, strict=True)])
        right = one_pass([(row.head, count) for row, count in zip(passed, counts, strict=True)])
        draft.timings.append(_timing(left, right, arm, clock, None))
    if rows != passed or len(rows) > 1:
        draft.timings += [_timing(row.base, row.head, arm, clock, row.calls[0]) for row in rows[:MOST_CALLS]]


def incomparable(base: Run | Ladder, head: Run | Ladder, common: bool) -> str:
    """Why the timings of two sides are not compared, if so; `common`: some call encodes the same on both."""
    if base.replay != head.replay:
        return "one side replays CUDA graphs, the other re-runs Python over static buffers"
    for field in ("architecture", "depth", "width", "dtype"):
        left, right = getattr(base.model, field), getattr(head.model, field)
        if left != right:
            return f"the models differ in {field} ({left} and {right})"
    return "" if common else "no call of one side encodes what a call of the other does"


def arm_samples(run: Run, arm: Arm, clock: Clock) -> dict[int, list[float]]:
    """Samples of an arm by call, microseconds; calls without samples are left out."""
    found = {
        timing.call: timing.wall_us if clock == "wall" else timing.gpu_us for timing in run.timings if timing.arm == arm
    }
    return {call: samples for call, samples in found.items() if samples and call < len(run.calls)}


def one_pass(columns: Sequence[tuple[list[float], int]]) -> list[float]:
    """Time of all calls together, repeat by repeat, each call as often as the workload has it."""
    repeats = min(len(samples) for samples, _ in columns)
    return [math.fsum(samples[repeat] * count for samples, count in columns) for repeat in range(repeats)]


def _timing(
    base: list[float], head: list[float], arm: Arm, clock: Clock, call: int | None
) -> tuple[TimingDiff, Question]:
    name = arm + ("" if call is None else f"[{call}]") + ("" if clock == "wall" else ".gpu")
    timing = TimingDiff(
        name=name,
        unit="us",
        base=statistics(base),
        head=statistics(head),
        changes=[],
        arm=arm,
        call=call,
        clock=clock,
    )
    return timing, Question(base, head, main=call is None and clock == "wall")


def statistics(samples: Sequence[float]) -> Statistics:
    """Summarise samples (`workbench.stats.summary`) in the stored form."""
    found: Summary = summary(samples)
    return Statistics(mean=found.mean, median=found.median, std=found.std, p99=found.p99, n=found.n)


def _moved_controls(timings: Iterable[TimingDiff], base: Run | None, head: Run | None) -> list[str]:
    """Eager does not depend on the budgets: if it moved while only they changed, the machine did."""
    if base is None or head is None or base.config == head.config or base.environment.vllm != head.environment.vllm:
        return []
    return [
        f"{timing.arm} changed by {change.ratio - 1:+.1%} although the budgets do not touch it: the machine "
        "differs by about as much"
        for timing in timings
        if timing.arm in ("eager_served", "eager_fallback") and timing.call is None and timing.clock == "wall"
        for change in timing.changes[:1]
        if change.ratio is not None and change.verdict in ("faster", "slower")
    ]


# --- counts and sizes ------------------------------------------------------------------------------


def _run_metrics(draft: _Draft, base: Run, head: Run) -> list[Metric]:
    """Totals over the calls of the pass, so that a call which one side could not run counts on neither."""
    failed = [{failure.call for failure in run.failures if failure.arm == "graph"} for run in (base, head)]
    calls = [(a, b) for a, b in draft.passed or draft.common if a not in failed[0] and b not in failed[1]]
    kept = ({a for a, _ in calls}, {b for _, b in calls}) if draft.common else (None, None)
    left, right = run_totals(base, kept[0]), run_totals(head, kept[1])
    return [
        Metric(name=name, unit=unit, base=left.get(name), head=right.get(name), better=better)
        for name, unit, better in _TOTALS
        if name in left or name in right
    ] + _nodes(base, head)


_TOTALS: tuple[tuple[str, Unit, Better], ...] = (
    ("padding", "share", "lower"),
    ("replays", "count", "lower"),
    ("fallbacks", "count", "lower"),
    ("graph.hits", "count", "neither"),
    ("graph.misses", "count", "lower"),
    ("capture.graphs", "count", "neither"),
    ("capture.seconds", "s", "lower"),
    ("memory.pool", "bytes", "lower"),
    ("memory.allocated", "bytes", "lower"),
    ("graph.nodes", "count", "lower"),
)


def run_totals(run: Run, calls: set[int] | None = None) -> dict[str, float]:
    """Counts and sizes of a run by the names of `Metric`; what was not measured is left out.

    `calls` restricts what is counted call by call to these; None means all.
    """
    weights = [call.count for call in run.calls]
    batches = [batch for batch in run.batches if calls is None or batch.call in calls]
    replays = [(batch, weights[batch.call]) for batch in batches if batch.budget]
    budget = sum(batch.budget * weight for batch, weight in replays if batch.budget)
    tokens = sum(batch.tokens * weight for batch, weight in replays)
    found: dict[str, float] = {
        "replays": sum(weight for _, weight in replays),
        "fallbacks": sum(weights[batch.call] for batch in batches if not batch.budget),
        "graph.hits": sum(len(batch.items) for batch in batches if batch.budget),
        "graph.misses": sum(len(batch.items) for batch in batches if not batch.budget),
        "capture.graphs": len(run.capture),
        "capture.seconds": math.fsum(cost.seconds for cost in run.capture),
    }
    if budget:
        found["padding"] = (budget - tokens) / budget
    for name, field in (
        ("memory.pool", "pool_bytes"),
        ("memory.allocated", "allocated_bytes"),
        ("graph.nodes", "nodes"),
    ):
        values = [getattr(cost, field) for cost in run.capture]
        if values and None not in values:
            found[name] = sum(values)
    return found


def _nodes(base: Run, head: Run) -> list[Metric]:
    """Graph nodes per budget, where they differ."""
    left, right = ({cost.budget: cost.nodes for cost in run.capture if cost.nodes} for run in (base, head))
    return [
        Metric(name=f"graph.nodes[{budget}]", unit="count", base=left[budget], head=right[budget], better="lower")
        for budget in sorted(left.keys() & right.keys())
        if left[budget] != right[budget]
    ]


# --- traces ----------------------------------------------------------------------------------------


def _compare_traces(draft: _Draft, base: Run, head: Run) -> None:
    calls = dict(draft.common)
    if len(calls) < max(len(base.calls), len(head.calls)):
        draft.notes.append("traces are not compared: the sides encode different calls")
        return
    for arm in ARMS:
        left, right = _trace_of(base, arm), _trace_of(head, arm)
        shared = left.keys() & right.keys()
        if not shared:
            if left or right:
                draft.notes.append(f"{arm}: no trace with the same activities on both sides")
            continue
        key = min(shared, key=lambda item: (item[0] != 0, "cpu" in item[1]))  # rank 0, least distortion
        try:
            sides = [
                _operations(content, *traces[key]) for content, traces in ((draft.base, left), (draft.head, right))
            ]
        except WorkbenchError as error:
            draft.notes.append(f"{arm}: its traces are not compared: {error}")
            continue
        if cut := [name for name, side in zip(("base", "head"), sides, strict=True) if side.cut]:
            # Events are missing, of any window: counts per call would be too low.
            draft.notes.append(f"{arm}: its traces are not compared: that of {' and '.join(cut)} is cut off")
            continue
        draft.metrics += _trace_metrics(arm, sides[0], sides[1])
        draft.kernels += _kernel_diffs(arm, _renamed(sides[0], calls), sides[1])


def _trace_of(run: Run, arm: Arm) -> dict[tuple[int, tuple[str, ...]], tuple[str, str]]:
    """Traces of an arm that see the GPU: (rank, activities) to (file, window)."""
    return {
        (trace.rank, tuple(sorted(trace.activities))): (trace.file, trace.window)
        for trace in run.traces
        if trace.arm == arm and "cuda" in trace.activities
    }


class _Operations(Record, frozen=True):
    """What one trace says per call: order of the first occurrence, counts and times of all.

    `sequences` maps a call to the names in order; `per_call` a name to (operations, microseconds) a call.
    """

    sequences: dict[str, list[str]]
    per_call: dict[str, tuple[float, float]]
    counts: dict[str, float]
    spans_us: dict[str, float]
    warnings: list[str] = []
    cut: bool = False


def _operations(content: Content, file: str, window: str) -> _Operations:
    from workbench.gaps import analyze
    from workbench.trace import read_trace
    from workbench.windows import find_windows

    with content.open_trace(file) as path:
        trace = read_trace(path)
    pattern = f"{glob.escape(window)}#*"
    analysis = analyze(trace, pattern)
    windows = find_windows(trace, pattern)
    rows = trace.gpu_rows()
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    starts = trace.start_ns[rows]
    sequences: dict[str, list[str]] = {}
    for name, start, stop in zip(windows.names, windows.start_ns, windows.stop_ns, strict=True):
        inside = slice(*np.searchsorted(starts, [start, stop]))
        sequences.setdefault(name.rpartition("#")[2], [trace.names[i] for i in trace.name[rows[inside]]])
    times = len(windows.names)
    total = analysis.total
    return _Operations(
        sequences=sequences,
        per_call={row.name: (row.count / times, row.total_us / times) for row in analysis.kernels},
        counts={key: getattr(total, key) / times for key in _MEASURED},
        spans_us={key: getattr(total, f"{key}_us") / times for key in _SPANS},
        warnings=analysis.warnings,
        cut=trace.cut,
    )


def trace_summary(
    content: Content, file: str, window: str
) -> tuple[dict[str, float], dict[str, float], list[tuple[str, float, float]], list[str]]:
    """Counts, microseconds, GPU operations (name, number, microseconds) per call, and warnings of a trace.

    Raises:
        WorkbenchError: it has no such window or no GPU work.
    """
    found = _operations(content, file, window)
    kernels = sorted(((name, *pair) for name, pair in found.per_call.items()), key=lambda row: -row[2])
    return found.counts, found.spans_us, kernels, found.warnings


def _renamed(side: _Operations, calls: dict[int, int]) -> _Operations:
    """The base's calls under the head's numbers."""
    names = {str(base): str(head) for base, head in calls.items()}
    sequences = {names[call]: names_ for call, names_ in side.sequences.items() if call in names}
    return msgspec.structs.replace(side, sequences=sequences)


def _trace_metrics(arm: str, base: _Operations, head: _Operations) -> list[Metric]:
    counts = [
        Metric(name=f"{arm}.{key}", unit="count", base=base.counts[key], head=head.counts[key], better="lower")
        for key in _MEASURED
    ]
    return counts + [
        Metric(name=f"{arm}.{key}", unit="us", base=base.spans_us[key], head=head.spans_us[key], better="lower")
        for key in _SPANS
        if key != "wall"  # the profiled wall is not what the un-profiled timings say
    ]


def _kernel_diffs(arm: str, base: _Operations, head: _Operations) -> list[KernelDiff]:
    added, removed, moved = Counter[str](), Counter[str](), Counter[str]()
    for call in base.sequences.keys() & head.sequences.keys():
        left, right = base.sequences[call], head.sequences[call]
        found = align(left, right)
        added.update(right[position] for position in found.added)
        removed.update(left[position] for position in found.removed)
        if found.ordered:
            moved.update(left[position] for position, _ in found.moved)
    rows = []
    for name in sorted(base.per_call.keys() | head.per_call.keys()):
        before, after = base.per_call.get(name, (0.0, 0.0)), head.per_call.get(name, (0.0, 0.0))
        status = _status(before, after, added[name] + removed[name], moved[name])
        if status is not None:
            rows.append(
                KernelDiff(
                    arm=arm,
                    name=name,
                    short=short_name(name),
                    family=family(name),
                    status=status,
                    base_count=before[0],
                    head_count=after[0],
                    base_us=before[1],
                    head_us=after[1],
                    moved=moved[name],
                )
            )
    return sorted(rows, key=lambda row: -abs(row.head_us - row.base_us))


def _status(
    base: tuple[float, float], head: tuple[float, float], edits: int, moved: int
) -> Literal["added", "removed", "changed count", "changed time", "moved"] | None:
    if not base[0]:
        return "added"
    if not head[0]:
        return "removed"
    if edits or not math.isclose(base[0], head[0]):
        return "changed count"
    if abs(head[1] - base[1]) > max(KERNEL_FLOOR_US, KERNEL_TOLERANCE * base[1]):
        return "changed time"
    return "moved" if moved else None


# --- parity, findings ------------------------------------------------------------------------------


def _equality(common_calls: Sequence[tuple[int, int]], base: Run, head: Run) -> ParityDiff:
    """Equality on the calls and baselines that both sides compared."""
    calls = dict(common_calls)
    left = {(calls[row.call], row.baseline): row for row in base.equality if row.call in calls}
    right = {(row.call, row.baseline): row for row in head.equality}
    common = [key for key in left if key in right]
    sides = [[side[key] for key in common] for side in (left, right)]
    worst = [max((row.relative_rms for row in side if row.relative_rms is not None), default=None) for side in sides]
    return ParityDiff(
        source="calls compared on both sides, graph against eager",
        base_equal=sum(row.bit_equal for row in sides[0]),
        base_total=len(common),
        head_equal=sum(row.bit_equal for row in sides[1]),
        head_total=len(common),
        base_worst=worst[0],
        head_worst=worst[1],
        new_findings=[
            f"call {after.call} against {after.baseline} is not finite"
            for before, after in zip(*sides, strict=True)
            if before.finite and not after.finite
        ],
    )


def _failures(common_calls: Sequence[tuple[int, int]], base: Run, head: Run) -> list[FailureDiff]:
    """The calls on which each arm failed, by error and known cause."""
    partners = dict(common_calls)
    told = [_failed_calls(run) for run in (base, head)]
    rows = []
    for key in sorted(told[0].keys() | told[1].keys()):
        left, right = (side.get(key, set()) for side in told)
        arm, error, cause = key
        rows.append(
            FailureDiff(
                arm=arm,
                error=error,
                cause=cause,
                base=len(left),
                head=len(right),
                only_base=sorted(call for call in left if partners.get(call) not in right),
                only_head=sorted(right - {partners.get(call) for call in left}),
            )
        )
    return rows


def _failed_calls(run: Run) -> dict[tuple[str, str, str], set[int]]:
    """Calls by (arm, error, known cause)."""
    found: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for failure in run.failures:
        found[failure.arm, failure.error, failure.cause or ""].add(failure.call)
    return found


def _compare_parity_sessions(draft: _Draft) -> None:
    base, head = draft.base.parity, draft.head.parity
    if base is None or head is None:
        if base or head:
            draft.notes.append("a parity session is on one side only")
        return
    told = [{f"{finding.suspect}: {finding.message}" for finding in side.findings} for side in (base, head)]
    try:
        moved = [(_cell_change(change), change.worse) for change in parity_changes(base, head)]
    except WorkbenchError as error:
        moved = []
        draft.doubts.append(f"the parity sessions are not of the same thing: {error}")
    worst = [
        max((item.graph.relative_rms for item in side.items if item.graph.relative_rms is not None), default=None)
        for side in (base, head)
    ]
    draft.parity.append(
        ParityDiff(
            source="items of the parity session",
            base_equal=sum(cell.bit_equal for cell in base.cells),  # `items` are the worst ones only
            base_total=sum(cell.items for cell in base.cells),
            head_equal=sum(cell.bit_equal for cell in head.cells),
            head_total=sum(cell.items for cell in head.cells),
            base_worst=worst[0],
            head_worst=worst[1],
            new_findings=sorted(told[1] - told[0]) + [text for text, worse in moved if worse],
            gone_findings=[text for text, worse in moved if not worse] + sorted(told[0] - told[1]),
        )
    )


def _cell_change(change: CellChange) -> str:
    budget = "" if change.budget is None else f" at budget {change.budget}"
    return f"{change.scenario}{budget}: {change.before} → {change.after}"


def _compare_findings(draft: _Draft) -> None:
    """Lint findings that came or went."""
    told = [_lint_findings(content.findings.get("lint.json")) for content in (draft.base, draft.head)]
    if None in told:
        if told != [None, None]:
            draft.notes.append("lint findings are on one side only")
        return
    before, after = told[0] or set(), told[1] or set()
    draft.notes += [f"lint finding, new: {text}" for text in sorted(after - before)]
    draft.notes += [f"lint finding, gone: {text}" for text in sorted(before - after)]


def _lint_findings(document: Any) -> set[str] | None:
    findings = document.get("findings") if isinstance(document, dict) else None
    if not isinstance(findings, list):
        return None
    rows = [row for row in findings if isinstance(row, dict)]
    return {": ".join(str(row[key])[:300] for key in ("severity", "rule", "message") if key in row) for row in rows}


# --- foreign results -------------------------------------------------------------------------------


def _compare_external(draft: _Draft, base: External, head: External) -> None:
    if base.source != head.source:
        draft.doubts.append(f"made by other tools: {base.source} and {head.source}")
    draft.differences += [
        f"{key}: {base.configuration.get(key, 'absent')} → {head.configuration.get(key, 'absent')}"
        for key in sorted(base.configuration.keys() | head.configuration.keys())
        if base.configuration.get(key) != head.configuration.get(key)
    ]
    others = {measure.name: measure for measure in head.measures}
    for measure in base.measures:
        if measure.name in others:
            draft.timings.append(_foreign_timing(measure, others.pop(measure.name)))
    missing = {m.name for m in base.measures} ^ {m.name for m in head.measures}
    if missing:
        draft.notes.append(f"measured on one side only: {', '.join(sorted(missing))}")
    _compare_accuracies(draft, base, head)
    _compare_foreign_traces(draft, base, head)
    draft.notes += [f"{side.name}: {note}" for side in (base, head) for note in side.notes]


def _foreign_timing(base: Measure, head: Measure) -> tuple[TimingDiff, Question | None]:
    timing = TimingDiff(name=base.name, unit=base.unit, base=_given(base), head=_given(head), changes=[])
    if base.samples and head.samples and base.runs == head.runs:
        words: tuple[Verdict, Verdict] = ("better", "worse") if base.unit == "count" else ("faster", "slower")
        if base.better == "higher":
            words = ("worse", "better")
        return timing, Question(base.samples, head.samples, words, independent=base.runs)
    reason = "the files give statistics without samples, so no test is possible"
    told: tuple[tuple[Statistic, float | None, float | None], ...] = (
        ("mean", base.mean, head.mean),
        ("median", base.median, head.median),
        ("p99", base.percentiles.get("99"), head.percentiles.get("99")),
    )
    changes = [
        Change(
            statistic=statistic,
            base=left,
            head=right,
            ratio=right / left if left else None,
            low=None,
            high=None,
            p_value=None,
            verdict="not judged",
            reason=reason,
        )
        for statistic, left, right in told
        if left is not None and right is not None
    ]
    return msgspec.structs.replace(timing, changes=changes), None


def _given(measure: Measure) -> Statistics | None:
    """Statistics of the samples, or those the file gives where it gives all."""
    if measure.samples:
        return statistics(measure.samples)
    values = (measure.mean, measure.median, measure.std, measure.percentiles.get("99"))
    mean, median, std, p99 = (math.nan if value is None else value for value in values)
    if any(map(math.isnan, (mean, median, std, p99))):
        return None
    return Statistics(mean=mean, median=median, std=std, p99=p99, n=0)


def _compare_accuracies(draft: _Draft, base: External, head: External) -> None:
    others = {(row.task, row.metric): row for row in head.accuracies}
    for row in base.accuracies:
        other = others.get((row.task, row.metric))
        if other is None:
            draft.notes.append(f"{row.task} {row.metric} is on one side only")
        elif row.stderr and other.stderr is not None:
            if row.samples != other.samples:
                draft.doubts.append(f"{row.task} was evaluated on {row.samples} and {other.samples} samples")
            draft.accuracy.append(
                benchmark_delta(
                    row.task, row.metric, (row.value, row.stderr), (other.value, other.stderr), samples=row.samples
                )
            )
        else:
            draft.notes.append(
                f"{row.task} {row.metric}: {row.value:.4f} → {other.value:.4f}, without a standard error that "
                "would tell what this means"
            )


def _compare_foreign_traces(draft: _Draft, base: External, head: External) -> None:
    if not base.kernels or not head.kernels:
        return
    sides = [_foreign_operations(side) for side in (base, head)]
    draft.metrics += _trace_metrics("trace", sides[0], sides[1])
    draft.kernels += _kernel_diffs("trace", sides[0], sides[1])


def _foreign_operations(side: External) -> _Operations:
    names = [kernel.name for kernel in side.kernels]
    return _Operations(
        sequences={"all": [names[index] for index in side.sequence if 0 <= index < len(names)]},
        per_call={kernel.name: (kernel.count, kernel.total_us) for kernel in side.kernels},
        counts={key: side.counts.get(key, 0) for key in _MEASURED},
        spans_us={key: side.times_us.get(key, 0.0) for key in _SPANS},
    )
