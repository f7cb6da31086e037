"""Where the time of a window goes on the GPU: busy, and idle by cause.

A *window* is a `user_annotation` on the host: one row per occurrence and device. On each device

    wall = busy + lead + launch gaps + queue gaps + intra-graph gaps + tail

holds exactly, in integer nanoseconds:

* *busy*: measure of the union of kernels, copies and memsets, clipped to the window. Touching ops
  leave no gap.
* *lead*, *tail*: idle before the first and after the last busy instant in the window. A window
  without GPU work is all lead.
* *intra-graph gap*: idle between the first and last node of one replay.
* *launch gap*: any other idle whose next op's launch call began after the previous op had ended, so
  the GPU waited for the host. *Queue gap*: the rest, where the launch was already made.

An op belongs to the window it starts in. A *launch* is a distinct (rank, correlation), so all nodes
of a replay are one; `spilled_ops` were launched inside the window and started after it. A *sync* is
a blocking call that began in the window (see `workbench.launches`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.kernels import family, short_name
from workbench.launches import NO_CALL, Launches, Syncs, launches, syncs
from workbench.phases import PhaseRow, find_phases, phase_ledger
from workbench.replays import ReplayRow, disagreements, find_replays, replay_rows
from workbench.timeline import GapKind, Timeline, timelines
from workbench.trace import Category, Copy, Ints, Trace
from workbench.windows import Windows, find_windows

TIMES = ("wall", "busy", "idle", "lead", "launch_gap", "queue_gap", "intra_graph_gap", "tail")
COUNTS = (
    "gpu_ops", "kernels", "memcpy_h2d", "memcpy_d2h", "memset", "launches", "graph_launches", "syncs",
    "spilled_ops",
)  # fmt: skip


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Times in microseconds and counts; `idle_us` is everything but busy."""

    wall_us: float
    busy_us: float
    idle_us: float
    lead_us: float
    launch_gap_us: float
    queue_gap_us: float
    intra_graph_gap_us: float
    tail_us: float
    gpu_ops: int
    kernels: int
    memcpy_h2d: int
    memcpy_d2h: int
    memset: int
    launches: int
    graph_launches: int
    syncs: int
    spilled_ops: int


class WindowRow(Parts, frozen=True, kw_only=True):
    """One occurrence of a window on one device."""

    name: str
    device: int


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """GPU ops of one name in the windows; `share` of the summed op time, not of the wall."""

    name: str
    short: str
    family: str
    count: int
    total_us: float
    share: float


class FamilyRow(msgspec.Struct, frozen=True, kw_only=True):
    """GPU ops of one family in the windows."""

    family: str
    count: int
    total_us: float
    share: float


@dataclass(frozen=True)
class Gaps:
    """Idle intervals between GPU ops inside windows, in order of window and time.

    `window` indexes `Analysis.windows`; `before` and `after`, the ops around it, the trace's names.
    """

    window: Ints
    kind: NDArray[np.uint8]
    start_ns: Ints
    duration_ns: Ints
    before: Ints
    after: Ints

    def microseconds(self, kind: GapKind) -> NDArray[np.float64]:
        """Durations of the gaps of one kind."""
        return np.asarray(self.duration_ns[self.kind == kind] / 1000)


@dataclass(frozen=True)
class Analysis:
    """Everything this module says about one trace.

    Attributes:
        windows: rows in time order, then by device.
        exact: the same numbers as int64 columns by name: `TIMES` in nanoseconds, `COUNTS`.
        total: sums over the rows.
        kernels, families: ops belonging to the windows, longest total first.
        phases: launches, copies and waits by innermost annotation.
        replays: one row per graph launch, in order of device and time.
    """

    source: str
    rank: int | None
    windows: list[WindowRow]
    exact: dict[str, Ints]
    total: Parts
    gaps: Gaps
    kernels: list[KernelRow]
    families: list[FamilyRow]
    phases: list[PhaseRow]
    replays: list[ReplayRow]
    warnings: list[str]


def analyze(trace: Trace, window: str | None = None) -> Analysis:
    """Attribute the time of every window of `trace`.

    Args:
        trace: from `read_trace`.
        window: a shell pattern for annotation names (`*`, `?`, `[...]`; case matters) or an exact
            name. None makes the span from the first GPU op to the last the one window.

    Raises:
        WorkbenchError: the trace has no GPU op, or nothing matches `window`.
    """
    joined = launches(trace)
    if joined.ops.size == 0 and trace.cut:
        raise WorkbenchError(
            f"{trace.source} is cut off before its first GPU work; copy it again from where it was made"
        )
    if joined.ops.size == 0:
        raise WorkbenchError(
            f"{trace.source} has no GPU work (kernels, copies, memsets), so it has no busy or idle time; "
            "capture on a GPU with ProfilerActivity.CUDA"
        )
    windows = find_windows(trace, window)
    waits, replays, phases = syncs(trace, joined), find_replays(trace, joined), find_phases(trace)
    lines = timelines(trace, joined, replays)
    exact = _columns(trace, joined, waits, lines, windows)
    op_phase = phases.of_ops(joined)
    inside = windows.inside(trace.start_ns[joined.ops])
    waits_inside = waits.rows[windows.inside(trace.start_ns[waits.rows])]
    kernels = _kernel_rows(trace, joined.ops[inside])
    return Analysis(
        source=trace.source,
        rank=trace.info.rank,
        windows=_window_rows(windows, lines, exact),
        exact=exact,
        total=msgspec.convert(_shown({key: int(column.sum()) for key, column in exact.items()}), Parts),
        gaps=_gaps(trace, joined, lines, windows),
        kernels=kernels,
        families=_family_rows(kernels),
        phases=phase_ledger(phases, joined, op_phase, inside, waits_inside, windows),
        replays=replay_rows(phases, joined, op_phase, replays, waits, inside, lines),
        warnings=[
            *trace.warnings,
            *_doubts(trace, joined, lines, windows, exact),
            *disagreements(replays, phases, joined),
        ],
    )


def report(analyses: Sequence[Analysis], details: bool = False) -> dict[str, Any]:
    """What `workbench analyze --json` prints: windows, total and warnings.

    Rows carry their rank when there are several traces. `details` adds kernels, families, phases
    and replays.
    """
    tables = ("windows", *(("kernels", "families", "phases", "replays") if details else ()))
    result: dict[str, Any] = {}
    for table in tables:
        result[table] = []
        for analysis in analyses:
            first: dict[str, Any] = {"rank": analysis.rank} if len(analyses) > 1 else {}
            for row in getattr(analysis, table):
                fields = msgspec.to_builtins(row)
                lead = {key: fields[key] for key in ("name", "device") if key in fields}
                result[table].append({**first, **lead, **fields})
    keys = (*TIMES, *COUNTS)
    result["total"] = _shown({key: sum(int(a.exact[key].sum()) for a in analyses) for key in keys})
    result["warnings"] = [text for analysis in analyses for text in analysis.warnings]
    return result


def explain(analysis: Analysis) -> list[str]:
    """What the numbers mean, in sentences computed from them."""
    total = analysis.total
    per_launch = total.gpu_ops / max(total.launches, 1)
    texts = [
        f"The GPU was busy for {total.busy_us / max(total.wall_us, 1e-3):.1%} of {total.wall_us / 1000:,.3f} ms in "
        f"{_counted(len(analysis.windows), 'window')}: {_counted(total.gpu_ops, 'op')} of "
        f"{_counted(total.launches, 'launch', 'launches')}, {per_launch:.1f} each."
    ]
    causes = {
        "before its first work in a window": total.lead_us,
        "for the host to launch the next op": total.launch_gap_us,
        "between ops already launched": total.queue_gap_us,
        "between the nodes of a graph": total.intra_graph_gap_us,
        "after its last work": total.tail_us,
    }
    if total.idle_us > 0:
        cause, longest = max(causes.items(), key=lambda item: item[1])
        texts.append(
            f"It was idle for {total.idle_us / 1000:,.3f} ms, most of it ({longest / total.idle_us:.1%}) {cause}."
        )
    if total.syncs:
        blocked = sum(row.blocked_us for row in analysis.phases) / 1000
        texts.append(f"The host waited in {_counted(total.syncs, 'blocking call')}, for {blocked:,.3f} ms in all.")
    if analysis.families:
        first = analysis.families[0]
        texts.append(f"The largest family of GPU work is {first.family}: {first.share:.1%} of the ops' time.")
    return texts


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _shown(exact: dict[str, int]) -> dict[str, float | int]:
    """Integers to what is shown: times as microseconds under `*_us`, counts as they are."""
    times = {f"{key}_us": exact[key] / 1000 for key in TIMES}
    return {**times, **{key: exact[key] for key in COUNTS}}


def _window_rows(windows: Windows, lines: Sequence[Timeline], exact: dict[str, Ints]) -> list[WindowRow]:
    columns = {f"{key}_us": (exact[key] / 1000).tolist() for key in TIMES}
    columns |= {key: exact[key].tolist() for key in COUNTS}
    columns["name"] = [name for name in windows.names for _ in lines]
    columns["device"] = [line.device for line in lines] * len(windows.names)
    return [WindowRow(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _columns(
    trace: Trace, joined: Launches, waits: Syncs, lines: Sequence[Timeline], windows: Windows
) -> dict[str, Ints]:
    """Exact columns with a row per occurrence and device, occurrence first."""
    parts = [_time_columns(line, windows) | _count_columns(trace, joined, waits, line, windows) for line in lines]
    return {key: np.stack([part[key] for part in parts], axis=1).ravel() for key in (*TIMES, *COUNTS)}


def _time_columns(line: Timeline, windows: Windows) -> dict[str, Ints]:
    low, high = line.overlapping(windows)
    some = high >= low
    a, b = np.where(some, low, 0), np.where(some, high, 0)
    opened = np.maximum(line.segment_start_ns[a], windows.start_ns)
    closed = np.minimum(line.segment_end_ns[b], windows.end_ns)
    wall = windows.end_ns - windows.start_ns
    clipped = (opened - line.segment_start_ns[a]) + (line.segment_end_ns[b] - closed)
    busy = np.where(some, line.busy_before_ns[b + 1] - line.busy_before_ns[a] - clipped, 0)
    columns = {
        "wall": wall,
        "busy": busy,
        "idle": wall - busy,
        "lead": np.where(some, opened - windows.start_ns, wall),
        "tail": np.where(some, windows.end_ns - closed, 0),
    }
    for kind in GapKind:
        before = np.append(0, np.cumsum(np.where(line.kind == kind, line.idle_ns, 0)))
        columns[f"{kind.name.lower()}_gap"] = np.where(some, before[b] - before[a], 0)
    return columns


def _count_columns(trace: Trace, joined: Launches, waits: Syncs, line: Timeline, windows: Windows) -> dict[str, Ints]:
    ops = joined.ops[line.part]
    category, copies = trace.category[ops], trace.copies()[ops]
    a = np.searchsorted(line.start_ns, windows.start_ns)
    b = np.searchsorted(line.start_ns, windows.stop_ns)

    def count(flags: NDArray[np.bool_]) -> Ints:
        before = np.append(0, np.cumsum(flags))
        return np.asarray(before[b] - before[a], np.int64)

    owner, position = _ragged(a, b)
    opens = _previous(joined.launch[line.part])[position] < a[owner]
    graph = joined.graph[line.part][position]
    size = len(windows.names)
    wait_start = trace.start_ns[waits.rows[waits.device == line.device]]
    return {
        "gpu_ops": b - a,
        "kernels": count(category == Category.KERNEL),
        "memcpy_h2d": count(copies == Copy.HTOD),
        "memcpy_d2h": count(copies == Copy.DTOH),
        "memset": count(category == Category.MEMSET),
        "launches": np.bincount(owner[opens], minlength=size),
        "graph_launches": np.bincount(owner[opens & graph], minlength=size),
        "syncs": np.searchsorted(wait_start, windows.stop_ns) - np.searchsorted(wait_start, windows.start_ns),
        "spilled_ops": _spilled(joined, line, windows),
    }


def _spilled(joined: Launches, line: Timeline, windows: Windows) -> Ints:
    """Ops launched inside each window that start after it."""
    known = np.flatnonzero(joined.call[line.part] != NO_CALL)
    called = joined.called_ns[line.part][known]
    order = np.argsort(called, kind="stable")
    called, start = called[order], line.start_ns[known[order]]
    owner, position = _ragged(np.searchsorted(called, windows.start_ns), np.searchsorted(called, windows.stop_ns))
    late = start[position] >= windows.stop_ns[owner]
    return np.bincount(owner[late], minlength=len(windows.names))


def _ragged(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All positions of the ranges starts[i]..stops[i], and which range each belongs to."""
    lengths = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(starts.size), lengths)
    begin = np.cumsum(lengths) - lengths
    return owner, np.arange(owner.size) - begin[owner] + starts[owner]


def _previous(values: Ints) -> Ints:
    """Position of the previous equal value, -1 for the first."""
    order = np.argsort(values, kind="stable")
    previous = np.full(values.size, -1, np.int64)
    same = values[order[1:]] == values[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _gaps(trace: Trace, joined: Launches, lines: Sequence[Timeline], windows: Windows) -> Gaps:
    parts = []
    for number, line in enumerate(lines):
        owner, gap = _ragged(*line.overlapping(windows))
        names = trace.name[joined.ops[line.part]].astype(np.int64)
        parts.append(
            (
                owner * len(lines) + number,
                line.kind[gap].astype(np.int64),
                line.segment_end_ns[gap],
                line.idle_ns[gap],
                names[line.last[gap]],
                names[line.first[gap + 1]],
            )
        )
    window, kind, start, duration, before, after = (np.concatenate(c) for c in zip(*parts, strict=True))
    order = np.argsort(window, kind="stable")
    return Gaps(window[order], kind[order].astype(np.uint8), start[order], duration[order], before[order], after[order])


def _kernel_rows(trace: Trace, ops: Ints) -> list[KernelRow]:
    names, where = np.unique(trace.name[ops], return_inverse=True)
    counts = np.bincount(where, minlength=names.size)
    totals = np.zeros(names.size, np.int64)
    np.add.at(totals, where, trace.duration_ns[ops])
    everything = max(int(totals.sum()), 1)
    return [
        KernelRow(
            name=trace.names[names[i]],
            short=short_name(trace.names[names[i]]),
            family=family(trace.names[names[i]]),
            count=int(counts[i]),
            total_us=int(totals[i]) / 1000,
            share=int(totals[i]) / everything,
        )
        for i in np.argsort(-totals, kind="stable")
    ]


def _family_rows(kernels: Sequence[KernelRow]) -> list[FamilyRow]:
    groups: dict[str, list[KernelRow]] = {}
    for row in kernels:
        groups.setdefault(row.family, []).append(row)
    rows = [
        FamilyRow(
            family=name,
            count=sum(row.count for row in members),
            total_us=round(sum(row.total_us for row in members), 3),
            share=sum(row.share for row in members),
        )
        for name, members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.total_us)


def _doubts(
    trace: Trace, joined: Launches, lines: Sequence[Timeline], windows: Windows, exact: dict[str, Ints]
) -> list[str]:
    """What a person must know before trusting the rows."""
    texts = []
    known = joined.call != NO_CALL
    if not known.all():
        unknown = sum(int(line.unknown.sum()) for line in lines)
        text = f"{int((~known).sum()):,} of {known.size:,} GPU ops have no launch call in the trace"
        if unknown:
            text += f"; gaps before them whose cause is unknown, and which count as queue gaps: {unknown:,}"
        texts.append(text)
    if early := int((known & (trace.start_ns[joined.ops] < joined.called_ns)).sum()):
        texts.append(f"{early:,} GPU ops start before their launch call: the clocks of host and GPU disagree")
    if windows.overlap:
        texts.append("windows overlap, so the total counts the shared time more than once")
    if spilled := int(exact["spilled_ops"].sum()):
        texts.append(
            f"{spilled:,} GPU ops were launched in a window and started after it; synchronise at its end to "
            "count them there"
        )
    if len(lines) > 1:
        texts.append("the trace has several devices; a sync counts for the one its thread last launched on")
    own = trace.rows(Category.OVERHEAD)
    own = own[windows.inside(trace.start_ns[own])]
    if own.size:
        texts.append(
            f"the profiler itself was busy for {int(trace.duration_ns[own].sum()) / 1000:,.1f} us in the windows "
            f"({own.size:,} events); gaps there are partly its own"
        )
    return texts
