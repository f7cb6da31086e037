"""Which call on the host launched a GPU op, and which calls make the host wait."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.trace import Category, Copy, Ints, Trace

NO_CALL = -1

_SUFFIX = r"(_v\d+|_ptsz|_ptds)*$"  # API versions and per-thread default streams
_GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch" + _SUFFIX)
# The calls whose purpose is to wait. An asynchronous copy to pageable memory waits too, but PyTorch
# follows it with one of these, and each wait counts once.
_SYNC = re.compile(
    r"((cuda|hip)(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize|hipCtxSynchronize)" + _SUFFIX
)
# Copies that return only when done; one to the host makes the host wait for the GPU.
_BLOCKING_COPY = re.compile(r"((cuda|hip)Memcpy(2D|3D)?|hipMemcpyWithStream|(cu|hip)Memcpy(2D|3D|DtoH)?)" + _SUFFIX)


@dataclass(frozen=True)
class Launches:
    """GPU ops in order of device and start, joined to the host.

    Attributes:
        ops: rows of the trace.
        call: row of the launch call of each op, `NO_CALL` when the trace has none.
        called_ns: start of that call; meaningless without one.
        launch: a number per launch, equal for the ops of one (rank, correlation); ops without a
            correlation are launches of their own.
        graph: whether the op is a node of a graph replay.
    """

    ops: Ints
    call: Ints
    called_ns: Ints
    launch: Ints
    graph: NDArray[np.bool_]


@dataclass(frozen=True)
class Syncs:
    """Blocking calls in order of start: trace rows, and the device each waits for.

    The trace does not name the device: it is taken to be the one the same thread last launched on.
    """

    rows: Ints
    device: Ints


def _matching(trace: Trace, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Per name of the trace: does `pattern` match it."""
    return np.array([pattern.match(name) is not None for name in trace.names] or [False], np.bool_)


def _call_of(trace: Trace, ops: Ints) -> Ints:
    """Row of the earliest runtime or driver call with each op's correlation."""
    calls = trace.rows(Category.RUNTIME, Category.DRIVER)
    calls = calls[trace.correlation[calls] > 0]
    if calls.size == 0:
        return np.full(ops.size, NO_CALL, np.int64)
    calls = calls[np.lexsort((trace.start_ns[calls], trace.correlation[calls]))]
    known = trace.correlation[calls]
    wanted = trace.correlation[ops]
    place = np.minimum(np.searchsorted(known, wanted), calls.size - 1)
    return np.where(known[place] == wanted, calls[place], NO_CALL)


def launches(trace: Trace) -> Launches:
    """Join every GPU op of `trace` to its launch call."""
    ops = trace.gpu_rows()
    ops = ops[np.lexsort((trace.start_ns[ops], trace.device[ops]))]
    call = _call_of(trace, ops)
    known = call != NO_CALL
    graph = np.where(known, _matching(trace, _GRAPH_LAUNCH)[trace.name[call]], trace.graph_node[ops] > 0)
    correlation = trace.correlation[ops]
    alone = correlation <= 0
    launch = np.where(alone, -1 - np.arange(ops.size), correlation)
    return Launches(ops, call, trace.start_ns[call], launch, graph.astype(np.bool_))


def syncs(trace: Trace, joined: Launches) -> Syncs:
    """Find the blocking calls of `trace`."""
    calls = trace.rows(Category.RUNTIME, Category.DRIVER)
    blocking = _matching(trace, _SYNC)[trace.name[calls]]
    to_host = joined.call[(trace.copies()[joined.ops] == Copy.DTOH) & (joined.call != NO_CALL)]
    waiting_copies = to_host[_matching(trace, _BLOCKING_COPY)[trace.name[to_host]]]
    rows = np.union1d(calls[blocking], waiting_copies)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    return Syncs(rows, _waited_device(trace, joined, rows))


def _waited_device(trace: Trace, joined: Launches, rows: Ints) -> Ints:
    devices = trace.device[joined.ops].astype(np.int64)
    if devices.size == 0 or devices[0] == devices[-1]:
        return np.full(rows.size, devices[0] if devices.size else 0, np.int64)
    known = joined.call != NO_CALL
    calls, first = np.unique(joined.call[known], return_index=True)
    both = np.concatenate([calls, rows])
    launched_on = np.concatenate([devices[known][first], np.full(rows.size, -1)])
    order = np.lexsort((trace.start_ns[both], trace.tid[both], trace.pid[both]))
    last = np.maximum.accumulate(np.where(launched_on[order] >= 0, np.arange(order.size), -1))
    before = order[np.maximum(last, 0)]
    same_thread = (trace.tid[both[before]] == trace.tid[both[order]]) & (last >= 0)
    found = np.where(same_thread, launched_on[before], devices[0])
    result = np.empty(both.size, np.int64)
    result[order] = found
    return result[calls.size :]
