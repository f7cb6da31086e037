"""What the host did by phase. A *phase* is the innermost `user_annotation` open on a thread."""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from workbench.launches import NO_CALL, Launches
from workbench.trace import Category, Copy, Ints, Trace
from workbench.windows import Windows

OUTSIDE = "(outside)"


class PhaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One phase, summed over the windows.

    Attributes:
        host_us: time for which this annotation is the innermost, over all threads.
        launches, graph_launches: distinct correlations of the ops launched in this phase.
        fan_out: GPU ops per launch, 0 without any.
        gpu_us: sum of the ops' durations.
        blocked_us: the host's time inside blocking calls.
    """

    phase: str
    host_us: float
    launches: int
    graph_launches: int
    gpu_ops: int
    fan_out: float
    gpu_us: float
    memcpy_h2d: int
    memcpy_d2h: int
    syncs: int
    blocked_us: float


@dataclass(frozen=True)
class Phases:
    """The boundaries of all annotations in order of thread and time.

    From a boundary to the next of its thread, `name` is the innermost annotation's (an index into the
    trace's names) and `outer` the row of the outermost one; -1 for none.
    """

    trace: Trace
    pid: Ints
    tid: Ints
    time_ns: Ints
    name: Ints
    outer: Ints

    def text(self, number: int) -> str:
        """The phase's name."""
        return OUTSIDE if number < 0 else self.trace.names[number]

    def at(self, rows: Ints) -> Ints:
        """Phase number on each row's thread at its start."""
        return self._value_at(rows, self.name)

    def outermost(self, rows: Ints) -> Ints:
        """Trace row of the outermost annotation on each row's thread at its start; -1 for none."""
        return self._value_at(rows, self.outer)

    def _value_at(self, rows: Ints, values: Ints) -> Ints:
        trace, count = self.trace, self.time_ns.size
        if count == 0:
            return np.full(rows.size, -1, np.int64)
        pid = np.concatenate([self.pid, trace.pid[rows]])
        tid = np.concatenate([self.tid, trace.tid[rows]])
        time = np.concatenate([self.time_ns, trace.start_ns[rows]])
        # Boundaries come first in `time`, and the sort is stable: at one instant they precede rows.
        order = np.lexsort((time, tid, pid))
        position = np.maximum.accumulate(np.where(order < count, np.arange(order.size), -1))
        found = np.where(position < 0, 0, order[np.maximum(position, 0)])
        good = (position >= 0) & (pid[found] == pid[order]) & (tid[found] == tid[order])
        answer = np.empty(order.size, np.int64)
        answer[order] = np.where(good, values[found], -1)
        return answer[count:]

    def of_ops(self, joined: Launches) -> Ints:
        """Phase number of the launch call of every GPU op; -1 without a call or an annotation."""
        known = joined.call != NO_CALL
        phase = np.full(joined.ops.size, -1, np.int64)
        calls, where = np.unique(joined.call[known], return_inverse=True)
        phase[known] = self.at(calls)[where]
        return phase

    def host_ns(self, windows: Windows) -> Ints:
        """Per name of the trace: time within the windows for which it is the innermost."""
        if self.time_ns.size == 0:
            return np.zeros(len(self.trace.names), np.int64)
        covered = windows.covered(self.time_ns)
        same = (self.pid[1:] == self.pid[:-1]) & (self.tid[1:] == self.tid[:-1]) & (self.name[:-1] >= 0)
        return _sums(self.name[:-1][same], (covered[1:] - covered[:-1])[same], len(self.trace.names))


def find_phases(trace: Trace) -> Phases:
    """Nest the annotations of every thread.

    Between two boundaries of a thread the innermost annotation is the last one opened at the current
    depth, so one sort by time and one by depth find it, without a loop over events.
    """
    spans = trace.rows(Category.USER_ANNOTATION)
    spans = spans[trace.duration_ns[spans] > 0]
    both = np.concatenate([spans, spans])
    step = np.repeat(np.array([1, -1]), spans.size)
    length = trace.duration_ns[both]
    time = trace.start_ns[both] + np.where(step > 0, 0, length)
    # At one instant: close before opening, inner before outer when closing, outer before inner when opening.
    order = np.lexsort((-step * length, step, time, trace.tid[both], trace.pid[both]))
    both, step = both[order], step[order]
    depth = np.cumsum(step)
    by_depth = np.argsort(depth, kind="stable")
    offset = depth[by_depth] * step.size  # keeps the running maximum inside one depth
    opened = np.where(step > 0, np.arange(step.size), -1)[by_depth] + offset
    current = np.empty(step.size, np.int64)
    current[by_depth] = np.maximum.accumulate(opened) - offset
    name = np.where((depth > 0) & (current >= 0), trace.name[both[np.maximum(current, 0)]], -1)
    opened_first = np.maximum.accumulate(np.where((step > 0) & (depth == 1), np.arange(step.size), -1))
    outer = np.where((depth > 0) & (opened_first >= 0), both[np.maximum(opened_first, 0)], -1)
    return Phases(trace, trace.pid[both], trace.tid[both], time[order], name, outer)


def phase_ledger(
    phases: Phases, joined: Launches, op_phase: Ints, inside: NDArray[np.bool_], waits: Ints, windows: Windows
) -> list[PhaseRow]:
    """One row for each phase with host time, launches or waits in the windows, longest first.

    Args:
        op_phase: phase number of every op of `joined`.
        inside: which ops belong to a window.
        waits: trace rows of the blocking calls begun in a window.
    """
    trace = phases.trace
    ops, phase = joined.ops[inside], op_phase[inside] + 1
    copies = trace.copies()[ops]
    _, opens = np.unique(joined.launch[inside], return_index=True)
    graph = joined.graph[inside][opens]
    wait_phase = phases.at(waits) + 1
    size = len(trace.names) + 1
    columns = {
        "host_us": np.append(0, phases.host_ns(windows)),
        "launches": np.bincount(phase[opens], minlength=size),
        "graph_launches": np.bincount(phase[opens][graph], minlength=size),
        "gpu_ops": np.bincount(phase, minlength=size),
        "gpu_us": _sums(phase, trace.duration_ns[ops], size),
        "memcpy_h2d": np.bincount(phase[copies == Copy.HTOD], minlength=size),
        "memcpy_d2h": np.bincount(phase[copies == Copy.DTOH], minlength=size),
        "syncs": np.bincount(wait_phase, minlength=size),
        "blocked_us": _sums(wait_phase, trace.duration_ns[waits], size),
    }
    some = columns["host_us"] + columns["gpu_ops"] + columns["syncs"] > 0
    order = np.flatnonzero(some)[np.argsort(-columns["host_us"][some], kind="stable")]
    return [_row(phases.text(int(i) - 1), {key: int(value[i]) for key, value in columns.items()}) for i in order]


def _row(phase: str, values: dict[str, int]) -> PhaseRow:
    fields = {key: value / 1000 if key.endswith("_us") else value for key, value in values.items()}
    return msgspec.convert(
        {"phase": phase, "fan_out": values["gpu_ops"] / max(values["launches"], 1), **fields}, PhaseRow
    )


def _sums(groups: Ints, values: Ints, size: int) -> Ints:
    """Exact sums of `values` by group number."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, groups, values)
    return sums
