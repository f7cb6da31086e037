"""Graph replays: the GPU ops of one graph launch, and the parts of its time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from workbench.launches import NO_CALL, Launches, Syncs
from workbench.phases import Phases
from workbench.trace import Category, Ints, Trace

if TYPE_CHECKING:
    from workbench.timeline import Timeline

NO_GRAPH = -1
_PROFILER_STEP = "ProfilerStep#"


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One graph launch on one device, in its parts.

    Attributes:
        phase: innermost annotation around the launch call.
        graph: the profiler's graph id, -1 when it wrote none.
        nodes, kernels: GPU ops of the replay, and the kernels among them.
        launch_us: duration of the launch call; None when the trace lacks the call.
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
    """Graph replays in order of device and first node; one value per replay.

    `op` is the position in `Launches` of the first node; `member`, of another length, the replay of
    every op there (-1: not in a graph).
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
        """Which of the intervals lie between the first and last node of a replay on `device`."""
        here = self.device == device
        if not here.any():
            return np.zeros(start.size, np.bool_)
        reach = np.maximum.accumulate(self.last_ns[here])
        place = np.searchsorted(self.first_ns[here], start, "right") - 1
        return np.asarray((place >= 0) & (reach[np.maximum(place, 0)] >= end))


def find_replays(trace: Trace, joined: Launches) -> Replays:
    """Group the nodes of each graph launch."""
    nodes = np.flatnonzero(joined.graph)
    rows = joined.ops[nodes]
    device = trace.device[rows].astype(np.int64)
    order = np.lexsort((joined.launch[nodes], device))  # stable: nodes of a launch stay in time order
    launch = joined.launch[nodes][order]
    opens = np.append(True, (launch[1:] != launch[:-1]) | (device[order][1:] != device[order][:-1]))
    opens = opens[: nodes.size]
    heads = order[opens]  # position in `nodes` of each replay's first node
    by_time = np.argsort(heads, kind="stable")
    rank = np.empty(heads.size, np.int64)
    rank[by_time] = np.arange(heads.size)
    group = np.empty(nodes.size, np.int64)
    group[order] = rank[np.cumsum(opens) - 1]
    heads = heads[by_time]
    last = np.full(heads.size, np.iinfo(np.int64).min)
    np.maximum.at(last, group, trace.start_ns[rows] + trace.duration_ns[rows])
    member = np.full(joined.ops.size, -1, np.int64)
    member[nodes] = group
    return Replays(
        op=nodes[heads],
        device=device[heads],
        first_ns=trace.start_ns[rows[heads]],
        last_ns=last,
        nodes=np.bincount(group, minlength=heads.size),
        kernels=np.bincount(group[trace.category[rows] == Category.KERNEL], minlength=heads.size),
        graph=_graph_ids(trace, rows[heads]),
        member=member,
    )


def _graph_ids(trace: Trace, heads: Ints) -> Ints:
    """Graph id of each replay: as written, else the upper half of CUPTI's 64-bit node id, else none."""
    written, upper = trace.graph[heads], trace.graph_node[heads] >> 32
    return np.where(written > 0, written, np.where(upper > 0, upper, NO_GRAPH))


def disagreements(replays: Replays, phases: Phases, joined: Launches) -> list[str]:
    """One sentence for every graph whose replays differ in their number of kernels.

    torch 2.11 writes no graph ids. Without them the n-th replay under an outermost annotation is compared with
    the n-th under the others of the same name, and the sentence says so.
    """
    if replays.op.size == 0:
        return []
    place, names = _places(replays, phases, joined)
    known = replays.graph != NO_GRAPH
    keys = np.stack([replays.device, replays.graph, *np.where(known, -1, np.stack([names, place]))])
    groups, where = np.unique(keys, axis=1, return_inverse=True)
    pairs, times = np.unique(np.stack([where.reshape(-1), replays.kernels]), axis=1, return_counts=True)
    counts: dict[int, Counter[int]] = {}
    for (group, kernels), number in zip(pairs.T.tolist(), times.tolist(), strict=True):
        counts.setdefault(group, Counter())[kernels] = number
    texts = []
    for group, counter in counts.items():
        if len(counter) == 1:
            continue
        device, graph, name, position = groups[:, group].tolist()
        which = f"graph {graph}"
        doubt = ""
        if graph == NO_GRAPH:
            which = f"graph launch {position + 1} under {phases.text(name)!r}"
            doubt = "; the trace has no graph ids, so these may be different graphs"
        seen = ", ".join(f"{kernels:,} kernels in {times:,}" for kernels, times in counter.most_common())
        texts.append(f"replays of {which} on device {device} differ: {seen}{doubt}")
    return texts


def _places(replays: Replays, phases: Phases, joined: Launches) -> tuple[Ints, Ints]:
    """Per replay: how many precede it under the same outermost annotation, and that one's name.

    The profiler's own steps are numbered; for this purpose they have one name. Without an annotation
    the place is 0 for all, so that they are still compared.
    """
    trace = phases.trace
    call = joined.call[replays.op]
    outer = np.where(call == NO_CALL, -1, phases.outermost(call))
    order = np.lexsort((outer, replays.device))
    changed = np.append(True, (np.diff(outer[order]) != 0) | (np.diff(replays.device[order]) != 0))
    first = np.maximum.accumulate(np.where(changed, np.arange(order.size), 0))
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size) - first
    name = np.where(outer < 0, -1, trace.name[outer])
    steps = [i for i, text in enumerate(trace.names) if text.startswith(_PROFILER_STEP)]
    name[np.isin(name, steps)] = steps[0] if steps else -1
    return np.where(outer < 0, 0, place), name


def replay_rows(
    phases: Phases,
    joined: Launches,
    op_phase: Ints,
    replays: Replays,
    waits: Syncs,
    inside: NDArray[np.bool_],
    lines: Sequence["Timeline"],
) -> list[ReplayRow]:
    """The replays with a node in a window (`inside`, per op of `joined`), in parts."""
    trace = phases.trace
    chosen = np.unique(replays.member[inside & (replays.member >= 0)])
    busy = np.zeros(replays.op.size, np.int64)
    for line in lines:
        here = replays.device == line.device
        busy[here] = line.busy_until(replays.last_ns[here]) - line.busy_until(replays.first_ns[here])
    span = replays.last_ns - replays.first_ns
    wait_end = np.sort(trace.start_ns[waits.rows] + trace.duration_ns[waits.rows])
    wait = np.searchsorted(wait_end, replays.last_ns)
    rows = []
    for i in chosen.tolist():
        op = replays.op[i]
        call = int(joined.call[op])
        rows.append(
            ReplayRow(
                phase=phases.text(int(op_phase[op])),
                device=int(replays.device[i]),
                graph=int(replays.graph[i]),
                nodes=int(replays.nodes[i]),
                kernels=int(replays.kernels[i]),
                launch_us=None if call == NO_CALL else int(trace.duration_ns[call]) / 1000,
                to_first_us=None if call == NO_CALL else int(replays.first_ns[i] - trace.start_ns[call]) / 1000,
                span_us=int(span[i]) / 1000,
                intra_graph_gap_us=int(span[i] - busy[i]) / 1000,
                to_sync_us=int(wait_end[wait[i]] - replays.last_ns[i]) / 1000 if wait[i] < wait_end.size else None,
            )
        )
    return rows
