"""Where the time of a window goes on the GPU: busy, and idle by cause.

A *window* is a `user_annotation` on the host: one row per occurrence and device. On each device

    wall = busy + lead + launch gaps + queue gaps + intra-graph gaps + tail

holds exactly, in integer nanoseconds:

* *busy*: measure of the union of kernels, copies and memsets, clipped to the window. Touching ops
  leave no gap.
* *lead*, *tail*: idle before the first and after the last busy instant in the window. A window
  without GPU work is all lead.
* *intra-graph gap*: idle between nodes of one replay.
* *launch gap*: any other idle whose next op's launch call began after the previous op had ended, so
  the GPU waited for the host. *Queue gap*: the rest: the launch was already queued.

An op belongs to the window it starts in. A *launch* is a distinct (rank, correlation), so all nodes
of a replay are one; `spilled_ops` were launched inside the window and started after it. A *sync* is
a blocking call that began in the window (see `workbench.launches`).
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.kernels import family, short_name
from workbench.launches import NO_CALL, Launches, Syncs, launches, syncs
from workbench.phases import PhaseRow, ReplayRow, Replays, find_replays, phase_ledger, replay_rows
from workbench.trace import Category, Copy, Ints, Trace

WHOLE = "whole"
TIMES = ("wall", "busy", "idle", "lead", "launch_gap", "queue_gap", "intra_graph_gap", "tail")
COUNTS = (
    "gpu_ops", "kernels", "memcpy_h2d", "memcpy_d2h", "memset", "launches", "graph_launches", "syncs",
    "spilled_ops",
)  # fmt: skip


class GapKind(IntEnum):
    """Cause of an idle interval between GPU ops."""

    LAUNCH = 0
    QUEUE = 1
    INTRA_GRAPH = 2


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


class WindowRow(msgspec.Struct, frozen=True, kw_only=True):
    """One occurrence of a window on one device."""

    name: str
    device: int
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

    `window` indexes `Analysis.windows`; `before` and `after` index the trace's names.
    """

    window: Ints
    kind: NDArray[np.uint8]
    start_ns: Ints
    duration_ns: Ints
    before: Ints
    after: Ints

    def microseconds(self, kind: GapKind) -> NDArray[np.float64]:
        """Durations of the gaps of one kind, in microseconds."""
        return np.asarray(self.duration_ns[self.kind == kind] / 1000)


@dataclass(frozen=True)
class Analysis:
    """Everything this module says about one trace.

    Attributes:
        windows: rows in time order, then by device; the same numbers exactly in `ns`.
        ns: int64 columns by name (`TIMES` in nanoseconds, then `COUNTS`), one value per row.
        total: sums over the rows.
        kernels, families: ops belonging to the windows, longest total first.
        phases: launches, copies and waits by innermost annotation; replays: one row per graph launch.
    """

    source: str
    rank: int | None
    windows: list[WindowRow]
    ns: dict[str, Ints]
    total: Parts
    gaps: Gaps
    kernels: list[KernelRow]
    families: list[FamilyRow]
    phases: list[PhaseRow]
    replays: list[ReplayRow]
    warnings: list[str]


@dataclass(frozen=True)
class _Windows:
    """Occurrences in time order."""

    names: list[str]
    start: Ints
    end: Ints


@dataclass(frozen=True)
class _Timeline:
    """One device: its ops in start order, the busy segments of their union and what parts them.

    `first` and `last` are positions, among the device's ops, of the op that opens a segment and of
    the one that closes it. Gap k lies between segments k and k + 1. `since` is the busy time before
    each segment and after all of them.
    """

    device: int
    begin: int  # position of the device's ops in `Launches`
    start: Ints
    segment_start: Ints
    segment_end: Ints
    since: Ints
    first: Ints
    last: Ints
    kind: NDArray[np.uint8]
    unknown: NDArray[np.bool_]


def annotations(trace: Trace) -> dict[str, int]:
    """Names of the host's annotations and how often each occurs."""
    rows = trace.rows(Category.USER_ANNOTATION)
    counts = np.bincount(trace.name[rows], minlength=len(trace.names))
    return {trace.names[i]: int(counts[i]) for i in np.flatnonzero(counts)}


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
    if joined.ops.size == 0:
        raise WorkbenchError(
            f"{trace.source} has no GPU work (kernels, copies, memsets), so there is no busy or idle time to "
            "find; capture on a GPU with ProfilerActivity.CUDA"
        )
    windows = _find_windows(trace, joined, window)
    waits = syncs(trace, joined)
    replays = find_replays(trace, joined)
    timelines = _timelines(trace, joined, replays)
    columns = [_device_columns(trace, joined, waits, line, windows) for line in timelines]
    rows = np.argsort(np.tile(np.arange(len(windows.names)), len(timelines)), kind="stable")
    ns = {key: np.concatenate([part[key] for part in columns])[rows] for key in (*TIMES, *COUNTS)}
    inside = _inside(trace.start_ns[joined.ops], windows)
    members = joined.ops[inside]
    kernel_rows = _kernel_rows(trace, members)
    in_window = waits.rows[_inside(trace.start_ns[waits.rows], windows)]
    return Analysis(
        source=trace.source,
        rank=trace.info.rank,
        windows=_window_rows(windows, [line.device for line in timelines], ns),
        ns=ns,
        total=msgspec.convert(_values({key: column.sum() for key, column in ns.items()}), Parts),
        gaps=_gaps(trace, joined, timelines, windows),
        kernels=kernel_rows,
        families=_family_rows(kernel_rows),
        phases=phase_ledger(trace, joined, inside, in_window),
        replays=replay_rows(trace, joined, replays, waits, inside, _gap_totals(timelines)),
        warnings=_warnings(trace, joined, timelines, windows, ns, replays),
    )


def report(analyses: Sequence[Analysis], details: bool = False) -> dict[str, object]:
    """The JSON object of `workbench analyze --json`: windows, total and warnings.

    Rows carry their rank when there are several traces. `details` adds the other tables.
    """
    several = len(analyses) > 1
    rows: list[dict[str, object]] = []
    for analysis in analyses:
        rank = {"rank": analysis.rank} if several else {}
        rows += [{**rank, **msgspec.to_builtins(row)} for row in analysis.windows]
    total = {key: sum(int(analysis.ns[key].sum()) for analysis in analyses) for key in (*TIMES, *COUNTS)}
    result: dict[str, object] = {
        "windows": rows,
        "total": _values(total),
        "warnings": [text for analysis in analyses for text in analysis.warnings],
    }
    if details:
        for key in ("kernels", "families", "phases", "replays"):
            result[key] = [
                {**({"rank": a.rank} if several else {}), **msgspec.to_builtins(row)}
                for a in analyses
                for row in getattr(a, key)
            ]
    return result


def _values(columns: dict[str, int]) -> dict[str, float | int]:
    """Integers to what is shown: times as microseconds under `*_us`, counts as they are."""
    times = {f"{key}_us": int(columns[key]) / 1000 for key in TIMES}
    return {**times, **{key: int(columns[key]) for key in COUNTS}}


def _window_rows(windows: _Windows, devices: list[int], ns: dict[str, Ints]) -> list[WindowRow]:
    fields = {f"{key}_us": (ns[key] / 1000).tolist() for key in TIMES}
    fields |= {key: ns[key].tolist() for key in COUNTS}
    fields["name"] = [name for name in windows.names for _ in devices]
    fields["device"] = devices * len(windows.names)
    keys = WindowRow.__struct_fields__
    return [WindowRow(**dict(zip(keys, row, strict=True))) for row in zip(*(fields[key] for key in keys), strict=True)]


def _find_windows(trace: Trace, joined: Launches, pattern: str | None) -> _Windows:
    if pattern is None:
        start = trace.start_ns[joined.ops].min()
        end = trace.end_ns[joined.ops].max()
        return _Windows([WHOLE], np.array([start]), np.array([end]))
    rows = trace.rows(Category.USER_ANNOTATION)
    matches = np.array([name == pattern or fnmatch.fnmatchcase(name, pattern) for name in trace.names], np.bool_)
    rows = rows[matches[trace.name[rows]]]
    if rows.size == 0:
        there = list(annotations(trace))
        listed = ", ".join(repr(name[:60]) for name in there[:20]) + (", ..." if len(there) > 20 else "")
        raise WorkbenchError(
            f"no annotation of {trace.source} matches {pattern!r}; "
            + (f"it has {listed}" if there else "it has none, so leave --window out")
        )
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    start = trace.start_ns[rows]
    return _Windows([trace.names[i] for i in trace.name[rows]], start, start + trace.duration_ns[rows])


def _inside(times: Ints, windows: _Windows) -> NDArray[np.bool_]:
    """Which `times` lie in at least one window (start included, end not; `whole` has every op)."""
    reach = np.maximum.accumulate(windows.end)
    place = np.searchsorted(windows.start, times, "right") - 1
    return np.asarray((place >= 0) & (times < reach[np.maximum(place, 0)] + (windows.names == [WHOLE])))


def _timelines(trace: Trace, joined: Launches, replays: Replays) -> list[_Timeline]:
    devices = trace.device[joined.ops]
    bounds = np.flatnonzero(np.diff(devices)) + 1
    starts, stops = np.append(0, bounds), np.append(bounds, devices.size)
    return [_timeline(trace, joined, replays, int(a), int(b)) for a, b in zip(starts, stops, strict=True)]


def _timeline(trace: Trace, joined: Launches, replays: Replays, begin: int, stop: int) -> _Timeline:
    """Merge the device's ops (`Launches` positions begin..stop) and classify the idle between."""
    ops = joined.ops[begin:stop]
    start = trace.start_ns[ops]
    end = start + trace.duration_ns[ops]
    reach = np.maximum.accumulate(end)
    first = np.append(0, np.flatnonzero(start[1:] > reach[:-1]) + 1)
    final = np.append(first[1:], ops.size) - 1
    # The op that reaches furthest: the last one, up to each position, to set the running maximum.
    furthest = np.maximum.accumulate(np.where(end == reach, np.arange(ops.size), 0))
    segment_start, segment_end = start[first], reach[final]
    since = np.append(0, np.cumsum(segment_end - segment_start))
    idle_from, idle_to, after = segment_end[:-1], segment_start[1:], first[1:]
    unknown = joined.call[begin + after] == NO_CALL
    waited = ~unknown & (joined.called_ns[begin + after] > idle_from)
    kind = np.where(waited, GapKind.LAUNCH, GapKind.QUEUE).astype(np.uint8)
    kind[replays.spanning(int(trace.device[ops[0]]), idle_from, idle_to)] = GapKind.INTRA_GRAPH
    unknown &= kind == GapKind.QUEUE
    return _Timeline(
        device=int(trace.device[ops[0]]),
        begin=begin,
        start=start,
        segment_start=segment_start,
        segment_end=segment_end,
        since=since,
        first=first,
        last=furthest[final],
        kind=kind,
        unknown=unknown,
    )


def _segments(line: _Timeline, windows: _Windows) -> tuple[Ints, Ints]:
    """First and last busy segment that overlap each window; last < first when none does."""
    low = np.searchsorted(line.segment_end, windows.start, "right")
    high = np.searchsorted(line.segment_start, windows.end, "left") - 1
    return low, high


def _device_columns(
    trace: Trace, joined: Launches, waits: Syncs, line: _Timeline, windows: _Windows
) -> dict[str, Ints]:
    columns = _time_columns(line, windows)
    return columns | _count_columns(trace, joined, waits, line, windows)


def _time_columns(line: _Timeline, windows: _Windows) -> dict[str, Ints]:
    low, high = _segments(line, windows)
    some = high >= low
    a, b = np.where(some, low, 0), np.where(some, high, 0)
    opened = np.maximum(line.segment_start[a], windows.start)
    closed = np.minimum(line.segment_end[b], windows.end)
    wall = windows.end - windows.start
    outside = (opened - line.segment_start[a]) + (line.segment_end[b] - closed)
    busy = np.where(some, line.since[b + 1] - line.since[a] - outside, 0)
    lead = np.where(some, opened - windows.start, wall)
    tail = np.where(some, windows.end - closed, 0)
    length = line.segment_start[1:] - line.segment_end[:-1]
    gaps = {}
    for kind in GapKind:
        summed = np.append(0, np.cumsum(np.where(line.kind == kind, length, 0)))
        gaps[f"{kind.name.lower()}_gap"] = np.where(some, summed[b] - summed[a], 0)
    return {"wall": wall, "busy": busy, "idle": wall - busy, "lead": lead, "tail": tail, **gaps}


def _count_columns(trace: Trace, joined: Launches, waits: Syncs, line: _Timeline, windows: _Windows) -> dict[str, Ints]:
    here = slice(line.begin, line.begin + line.start.size)
    ops = joined.ops[here]
    category, copies = trace.category[ops], trace.copies()[ops]
    # The last op of `whole` may start where the window ends only if it has no length; it belongs.
    a = np.searchsorted(line.start, windows.start)
    b = np.searchsorted(line.start, windows.end + (windows.names == [WHOLE]))

    def count(flags: NDArray[np.bool_]) -> Ints:
        summed = np.append(0, np.cumsum(flags))
        return np.asarray(summed[b] - summed[a], np.int64)

    owner, position = _ragged(a, b)
    opens = _previous(joined.launch[here])[position] < a[owner]
    graph = joined.graph[here][position]
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
        "syncs": np.searchsorted(wait_start, windows.end) - np.searchsorted(wait_start, windows.start),
        "spilled_ops": _spilled(joined, here, line, windows),
    }


def _spilled(joined: Launches, here: slice, line: _Timeline, windows: _Windows) -> Ints:
    """Ops launched inside each window that start at or after its end."""
    known = joined.call[here] != NO_CALL
    called, start = joined.called_ns[here][known], line.start[known]
    order = np.argsort(called, kind="stable")
    called, start = called[order], start[order]
    if windows.names == [WHOLE]:
        return np.zeros(1, np.int64)
    owner, position = _ragged(np.searchsorted(called, windows.start), np.searchsorted(called, windows.end))
    late = start[position] >= windows.end[owner]
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


def _gaps(trace: Trace, joined: Launches, timelines: list[_Timeline], windows: _Windows) -> Gaps:
    parts: list[tuple[NDArray[np.int64], ...]] = []
    for number, line in enumerate(timelines):
        low, high = _segments(line, windows)
        owner, gap = _ragged(low, high)
        ops = joined.ops[line.begin : line.begin + line.start.size]
        begin = line.segment_end[gap]
        parts.append(
            (
                owner * len(timelines) + number,
                line.kind[gap].astype(np.int64),
                begin,
                line.segment_start[gap + 1] - begin,
                trace.name[ops[line.last[gap]]].astype(np.int64),
                trace.name[ops[line.first[gap + 1]]].astype(np.int64),
            )
        )
    window, kind, start, duration, before, after = (np.concatenate(c) for c in zip(*parts, strict=True))
    order = np.argsort(window, kind="stable")
    return Gaps(window[order], kind[order].astype(np.uint8), start[order], duration[order], before[order], after[order])


def _gap_totals(timelines: list[_Timeline]) -> dict[int, tuple[Ints, Ints, Ints]]:
    """Per device: starts of busy segments, their ends, and busy time before each (and after all)."""
    return {line.device: (line.segment_start, line.segment_end, line.since) for line in timelines}


def _kernel_rows(trace: Trace, ops: Ints) -> list[KernelRow]:
    names, where = np.unique(trace.name[ops], return_inverse=True)
    counts = np.bincount(where, minlength=names.size)
    totals = np.zeros(names.size, np.int64)
    np.add.at(totals, where, trace.duration_ns[ops])
    everything = max(int(totals.sum()), 1)
    rows = []
    for i in np.argsort(-totals, kind="stable"):
        name = trace.names[names[i]]
        rows.append(
            KernelRow(
                name=name,
                short=short_name(name),
                family=family(name),
                count=int(counts[i]),
                total_us=int(totals[i]) / 1000,
                share=int(totals[i]) / everything,
            )
        )
    return rows


def _family_rows(kernels: list[KernelRow]) -> list[FamilyRow]:
    sums: dict[str, list[KernelRow]] = {}
    for row in kernels:
        sums.setdefault(row.family, []).append(row)
    rows = [
        FamilyRow(
            family=name,
            count=sum(row.count for row in members),
            total_us=round(sum(row.total_us for row in members), 3),
            share=sum(row.share for row in members),
        )
        for name, members in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.total_us)


def _warnings(
    trace: Trace,
    joined: Launches,
    timelines: list[_Timeline],
    windows: _Windows,
    ns: dict[str, Ints],
    replays: Replays,
) -> list[str]:
    """What a person must know before trusting the rows."""
    texts = list(trace.warnings)
    unlaunched = int((joined.call == NO_CALL).sum())
    if unlaunched:
        unknown = sum(int(line.unknown.sum()) for line in timelines)
        texts.append(
            f"{unlaunched:,} of {joined.ops.size:,} GPU ops have no launch call in the trace; the {unknown:,} "
            "gaps before them cannot be told apart and count as queue gaps"
        )
    early = int(((trace.start_ns[joined.ops] < joined.called_ns) & (joined.call != NO_CALL)).sum())
    if early:
        texts.append(f"{early:,} GPU ops start before their launch call: the clocks of host and GPU disagree")
    if np.any(windows.start[1:] < np.maximum.accumulate(windows.end)[:-1]):
        texts.append("windows overlap, so the total counts the shared time more than once")
    if spilled := int(ns["spilled_ops"].sum()):
        texts.append(
            f"{spilled:,} GPU ops were launched in a window and started after it; synchronise at its end to "
            "count them there"
        )
    if len(timelines) > 1:
        texts.append("the trace has several devices; a sync counts for the one its thread last launched on")
    flush = trace.rows(Category.OVERHEAD)
    flush = flush[_inside(trace.start_ns[flush], windows)]
    if flush.size:
        texts.append(
            f"the profiler itself was busy {int(trace.duration_ns[flush].sum()) / 1000:,.1f} us in the windows "
            f"({flush.size:,} events); gaps there are partly its own"
        )
    return texts + replays.disagreements(trace, joined)
