"""What the host did by phase, and each graph replay in its parts.

A *phase* is the innermost `user_annotation` open on the calling thread.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from workbench.launches import NO_CALL, Launches, Syncs
from workbench.trace import Category, Copy, Ints, Trace

OUTSIDE = "(outside)"


class PhaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """Launches, copies and waits under one innermost annotation.

    `launches` and `graph_launches` are distinct correlations, `fan_out` GPU ops per launch, `gpu_us`
    the sum of the ops' durations, `blocked_us` the host's time inside blocking calls.
    """

    phase: str
    launches: int
    graph_launches: int
    gpu_ops: int
    fan_out: float
    gpu_us: float
    memcpy_h2d: int
    memcpy_d2h: int
    syncs: int
    blocked_us: float


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One graph launch on one device, in its parts.

    Attributes:
        phase: innermost annotation around the launch call.
        graph: the profiler's graph id, -1 when it wrote none.
        nodes, kernels: GPU ops of the replay, and the kernels among them.
        launch_us: duration of the launch call; None without one in the trace.
        to_first_us: from the start of the launch call to the start of the first node.
        span_us: from the start of the first node to the end of the last.
        intra_graph_gap_us: idle of the device within that span.
        to_sync_us: from the end of the last node to the return of the next blocking call; None
            when none follows.
    """

    phase: str
    device: int
    graph: int
    nodes: int
    kernels: int
    launch_us: float | None
    to_first_us: float | None
    span_us: float
    intra_graph_gap_us: float
    to_sync_us: float | None


@dataclass(frozen=True)
class Replays:
    """Graph replays in order of device and first node; arrays have one value per replay.

    `op` is the position in `Launches` of the first node, `member` the replay number of every op
    (-1: not in a graph).
    """

    op: Ints
    device: Ints
    first_ns: Ints
    last_ns: Ints
    nodes: Ints
    kernels: Ints
    graph: Ints
    member: Ints

    def spanning(self, device: int, start: Ints, end: Ints) -> NDArray[np.bool_]:
        """Which idle intervals lie between the first and last node of a replay on `device`."""
        here = self.device == device
        if not here.any():
            return np.zeros(start.size, np.bool_)
        first = self.first_ns[here]
        reach = np.maximum.accumulate(self.last_ns[here])
        place = np.searchsorted(first, start, "right") - 1
        return np.asarray((place >= 0) & (reach[np.maximum(place, 0)] >= end))

    def disagreements(self, trace: Trace, joined: Launches) -> list[str]:
        """One sentence for every graph whose replays differ in their number of kernels."""
        if self.op.size == 0:
            return []
        phase = phases_of_ops(trace, joined)[self.op]
        texts = []
        keys = np.stack([self.device, self.graph, np.where(self.graph < 0, phase, -1)])
        for key in np.unique(keys, axis=1).T:
            counts = Counter(self.kernels[(keys == key[:, None]).all(axis=0)].tolist())
            if len(counts) == 1:
                continue
            seen = ", ".join(f"{kernels:,} kernels in {times:,}" for kernels, times in counts.most_common())
            if key[1] >= 0:
                texts.append(f"replays of graph {key[1]} on device {key[0]} differ: {seen}")
            else:
                name = phase_name(trace, int(key[2]))
                texts.append(
                    f"graph replays under {name!r} on device {key[0]} differ: {seen}; the trace has no graph "
                    "ids, so these may be different graphs"
                )
        return texts


def find_replays(trace: Trace, joined: Launches) -> Replays:
    """Group the nodes of each graph launch."""
    nodes = np.flatnonzero(joined.graph)
    member = np.full(joined.ops.size, -1, np.int64)
    device = trace.device[joined.ops[nodes]].astype(np.int64)
    keys = np.stack([device, joined.launch[nodes]])
    unique, first, where = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    where = where.reshape(-1)
    order = np.argsort(first, kind="stable")  # by position: device, then start of the first node
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    where, first = rank[where], first[order]
    member[nodes] = where
    rows = joined.ops[nodes]
    size = unique.shape[1]
    last = np.full(size, np.iinfo(np.int64).min)
    np.maximum.at(last, where, trace.start_ns[rows] + trace.duration_ns[rows])
    head = rows[first]
    return Replays(
        op=nodes[first],
        device=device[first],
        first_ns=trace.start_ns[head],
        last_ns=last,
        nodes=np.bincount(where, minlength=size),
        kernels=np.bincount(where[trace.category[rows] == Category.KERNEL], minlength=size),
        graph=_graph_ids(trace, head),
        member=member,
    )


def _graph_ids(trace: Trace, heads: Ints) -> Ints:
    """Graph id of each replay: as written, else the upper half of CUPTI's node id, else -1."""
    written, upper = trace.graph[heads], trace.graph_node[heads] >> 32
    return np.where(written > 0, written, np.where(upper > 0, upper, -1))


def phase_name(trace: Trace, number: int) -> str:
    """Name of a phase number: an index into the trace's names, -1 for none."""
    return OUTSIDE if number < 0 else trace.names[number]


def innermost(trace: Trace, rows: Ints) -> Ints:
    """Name index of the innermost annotation open on each row's thread at its start; -1: none.

    Between two boundaries of a thread's annotations the innermost one is the last opened at the
    current depth. One sort; no loop over events.
    """
    spans = trace.rows(Category.USER_ANNOTATION)
    spans = spans[trace.duration_ns[spans] > 0]
    if spans.size == 0 or rows.size == 0:
        return np.full(rows.size, -1, np.int64)
    boundary = np.concatenate([spans, spans])
    step = np.repeat(np.array([1, -1]), spans.size)
    length = trace.duration_ns[boundary]
    time = trace.start_ns[boundary] + np.where(step > 0, 0, length)
    # At one instant: inner spans close before outer ones, closing before opening, outer opens first.
    tie = np.where(step > 0, -length, length)
    order = np.lexsort((tie, step, time, trace.tid[boundary], trace.pid[boundary]))
    boundary, step, time = boundary[order], step[order], time[order]
    depth = np.cumsum(step)
    by_depth = np.argsort(depth, kind="stable")
    opened = np.where(step > 0, np.arange(step.size), -1)[by_depth] + depth[by_depth] * step.size
    current = np.empty(step.size, np.int64)
    current[by_depth] = np.maximum.accumulate(opened) - depth[by_depth] * step.size
    name = np.where((depth > 0) & (current >= 0), trace.name[boundary[np.maximum(current, 0)]], -1)
    return _last_before(trace, boundary, time, name, rows)


def _last_before(trace: Trace, boundary: Ints, time: Ints, value: Ints, rows: Ints) -> Ints:
    """`value` at the last boundary of the same thread at or before each row's start; -1: none."""
    pids = np.concatenate([trace.pid[boundary], trace.pid[rows]])
    tids = np.concatenate([trace.tid[boundary], trace.tid[rows]])
    times = np.concatenate([time, trace.start_ns[rows]])
    asking = np.repeat(np.array([0, 1]), [boundary.size, rows.size])
    order = np.lexsort((np.arange(times.size), asking, times, tids, pids))
    position = np.maximum.accumulate(np.where(order < boundary.size, np.arange(order.size), -1))
    found = order[np.maximum(position, 0)]
    good = (position >= 0) & (pids[found] == pids[order]) & (tids[found] == tids[order])
    answer = np.full(times.size, -1, np.int64)
    answer[order[good]] = value[np.minimum(found[good], boundary.size - 1)]
    return answer[boundary.size :]


def phases_of_ops(trace: Trace, joined: Launches) -> Ints:
    """Phase number of the launch call of every GPU op; -1 without a call or an annotation."""
    known = joined.call != NO_CALL
    phase = np.full(joined.ops.size, -1, np.int64)
    calls, where = np.unique(joined.call[known], return_inverse=True)
    phase[known] = innermost(trace, calls)[where]
    return phase


def phase_ledger(trace: Trace, joined: Launches, inside: NDArray[np.bool_], waits: Ints) -> list[PhaseRow]:
    """Launches, copies and waits by phase, for the ops in windows and the waits begun in them.

    Args:
        inside: which ops of `joined` belong to a window.
        waits: trace rows of the blocking calls of the windows.
    """
    op_phase = phases_of_ops(trace, joined)[inside]
    ops = joined.ops[inside]
    copies = trace.copies()[ops]
    _, opens = np.unique(joined.launch[inside], return_index=True)
    graph = joined.graph[inside][opens]
    wait_phase = innermost(trace, waits)
    size = len(trace.names) + 1

    def count(phases: Ints) -> Ints:
        return np.bincount(phases + 1, minlength=size)

    def total(phases: Ints, rows: Ints) -> Ints:
        sums = np.zeros(size, np.int64)
        np.add.at(sums, phases + 1, trace.duration_ns[rows])
        return sums

    gpu_ops, launched = count(op_phase), count(op_phase[opens])
    graphs, gpu_ns = count(op_phase[opens][graph]), total(op_phase, ops)
    h2d, d2h = count(op_phase[copies == Copy.HTOD]), count(op_phase[copies == Copy.DTOH])
    waited, blocked = count(wait_phase), total(wait_phase, waits)
    return [
        PhaseRow(
            phase=phase_name(trace, int(i) - 1),
            launches=int(launched[i]),
            graph_launches=int(graphs[i]),
            gpu_ops=int(gpu_ops[i]),
            fan_out=int(gpu_ops[i]) / max(int(launched[i]), 1),
            gpu_us=int(gpu_ns[i]) / 1000,
            memcpy_h2d=int(h2d[i]),
            memcpy_d2h=int(d2h[i]),
            syncs=int(waited[i]),
            blocked_us=int(blocked[i]) / 1000,
        )
        for i in np.flatnonzero((gpu_ops > 0) | (waited > 0))
    ]


def replay_rows(
    trace: Trace,
    joined: Launches,
    replays: Replays,
    waits: Syncs,
    inside: NDArray[np.bool_],
    busy: dict[int, tuple[Ints, Ints, Ints]],
) -> list[ReplayRow]:
    """The replays with a node in a window, in parts.

    Args:
        inside: which ops of `joined` belong to a window.
        busy: per device the starts and ends of busy segments and the busy time before each.
    """
    chosen = np.unique(replays.member[inside & (replays.member >= 0)])
    phase = phases_of_ops(trace, joined)
    wait_end = np.sort(trace.start_ns[waits.rows] + trace.duration_ns[waits.rows])
    next_wait = np.searchsorted(wait_end, replays.last_ns)
    rows = []
    for i in chosen:
        op, device = int(replays.op[i]), int(replays.device[i])
        first, last = int(replays.first_ns[i]), int(replays.last_ns[i])
        starts, _, since = busy[device]
        # First and last node lie in busy segments, so the idle between is span minus busy.
        a = int(np.searchsorted(starts, first, "right")) - 1
        b = int(np.searchsorted(starts, last, "right")) - 1
        working = int(since[b] - since[a]) + (last - int(starts[b])) - (first - int(starts[a]))
        call = int(joined.call[op])
        rows.append(
            ReplayRow(
                phase=phase_name(trace, int(phase[op])),
                device=device,
                graph=int(replays.graph[i]),
                nodes=int(replays.nodes[i]),
                kernels=int(replays.kernels[i]),
                launch_us=None if call == NO_CALL else int(trace.duration_ns[call]) / 1000,
                to_first_us=None if call == NO_CALL else (first - int(trace.start_ns[call])) / 1000,
                span_us=(last - first) / 1000,
                intra_graph_gap_us=(last - first - working) / 1000,
                to_sync_us=(int(wait_end[next_wait[i]]) - last) / 1000 if next_wait[i] < wait_end.size else None,
            )
        )
    return rows
