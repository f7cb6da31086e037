"""Several ranks' traces on one clock, joined by their collectives, and how long each rank waited in them.

    from workbench.collectives import join_ranks
    from workbench.trace import read_traces

    ranks = join_ranks(read_traces([Path("rank0/trace.json.gz"), Path("rank1/trace.json.gz")]))

The n-th collective of a name on one rank is the n-th of that name on every other. A collective cannot end on one rank
before it has begun on all, so each one bounds by how much another rank's clock is ahead of the first rank's:

    start(other) - end(first) <= ahead <= end(other) - start(first)

Within the bounds of all of them the estimate is the median difference of the ends, as ranks leave a collective
together. With the clocks so aligned, a rank *waits* in a collective from its own start until the last rank's, at most
for its own duration: the rest of the duration is the exchange itself.

Collectives are the GPU's where a trace has GPU work, else those of vLLM's CPU communicator and of gloo. Those in which
a rank may leave before another comes (broadcast, send and receive) bound nothing and are left out.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from workbench.errors import WorkbenchError
from workbench.kernels import family, short_name
from workbench.trace import Category, Ints, Trace
from workbench.windows import find_windows

_TOGETHER = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce|multimem_all", re.IGNORECASE)
_ON_CPU = re.compile(r"gloo:|_C::shm_")


class RankClock(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's clock against the first rank's, and its collectives in sum.

    Attributes:
        ahead_us: by how much its clock is ahead; `lowest_us` and `highest_us`: what the collectives allow.
        spread_us: the largest distance of one collective's ends from that, so how far single rows can be trusted.
        total_us: all its collectives; `waited_us`: of that, waiting for the last rank to begin.
    """

    rank: int
    collectives: int
    ahead_us: float
    lowest_us: float
    highest_us: float
    spread_us: float
    total_us: float
    waited_us: float


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One collective on one rank.

    Attributes:
        index: the same for all ranks that took part, in order of time.
        window: of the first rank's annotation that it began in; empty outside.
        start_us: on the first rank's clock, from the start of the first collective.
    """

    rank: int
    index: int
    name: str
    window: str
    start_us: float
    duration_us: float
    waited_us: float


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Several ranks on one clock: a row per rank, and a row per collective and rank."""

    clocks: list[RankClock]
    collectives: list[CollectiveRow]


@dataclass(frozen=True)
class _Matched:
    """Collectives that all ranks have, in order of the first rank's starts; times [ranks, collectives] in ns."""

    ranks: list[int]
    names: list[str]
    start: Ints
    end: Ints


def join_ranks(traces: Sequence[Trace], window: str | None = None) -> Ranks:
    """Align the clocks of `traces`, one per rank, on their collectives.

    Args:
        window: annotations of the first rank, as `windows.find_windows` takes them, to name in the rows.

    Raises:
        WorkbenchError: fewer than two ranks, a rank twice, no collective, ranks with other collectives, or clocks that
            no constant shift aligns.
    """
    matched = _match(traces)
    ahead, low, high = _shifts(matched)
    start, end = matched.start - ahead[:, None], matched.end - ahead[:, None]
    waited = np.minimum(start.max(axis=0) - start, end - start)
    spread = np.abs(end - end[0]).max(axis=1)
    clocks = [
        RankClock(
            rank=rank,
            collectives=len(matched.names),
            ahead_us=int(ahead[i]) / 1000,
            lowest_us=int(low[i]) / 1000,
            highest_us=int(high[i]) / 1000,
            spread_us=int(spread[i]) / 1000,
            total_us=int((end[i] - start[i]).sum()) / 1000,
            waited_us=int(waited[i].sum()) / 1000,
        )
        for i, rank in enumerate(matched.ranks)
    ]
    windows = _window_names(traces[0], matched.start[0], window)
    rows = [
        CollectiveRow(
            rank=rank,
            index=index,
            name=short_name(name),
            window=windows[index],
            start_us=int(start[i, index] - start.min()) / 1000,
            duration_us=int(end[i, index] - start[i, index]) / 1000,
            waited_us=int(waited[i, index]) / 1000,
        )
        for index, name in enumerate(matched.names)
        for i, rank in enumerate(matched.ranks)
    ]
    return Ranks(clocks=clocks, collectives=rows)


def join_or_doubt(traces: Sequence[Trace], window: str | None = None) -> tuple[Ranks | None, list[str]]:
    """`join_ranks` for traces that need not be of one run: None and the reason where they do not join.

    Traces that do not say that they are of several ranks are left apart without a word.
    """
    ranks = {trace.info.rank for trace in traces}
    if len(ranks) < 2 or len(ranks) < len(traces) or None in ranks:
        return None, []
    try:
        return join_ranks(traces, window), []
    except WorkbenchError as error:
        return None, [str(error)]


def _match(traces: Sequence[Trace]) -> _Matched:
    ranks = [position if trace.info.rank is None else trace.info.rank for position, trace in enumerate(traces)]
    if len(traces) < 2 or len(set(ranks)) < len(ranks):
        raise WorkbenchError(
            f"{len(traces)} traces of the ranks {', '.join(map(str, ranks)) or 'none'} cannot be joined; give one "
            "trace per rank, of two ranks or more"
        )
    found = [_collectives(trace) for trace in traces]
    counts = [{name: rows.size for name, rows in each.items()} for each in found]
    if not counts[0]:
        raise WorkbenchError(f"{traces[0].source} has no collective, so nothing joins the ranks; trace a shared call")
    for trace, count in zip(traces, counts, strict=True):
        if count != counts[0]:
            name = min(name for name in count.keys() | counts[0].keys() if count.get(name) != counts[0].get(name))
            raise WorkbenchError(
                f"{trace.source} of one rank has {count.get(name, 0)} collectives {short_name(name)!r} and that of "
                f"another {counts[0].get(name, 0)}; give traces of the same calls"
            )
    names = [name for name, count in counts[0].items() for _ in range(count)]
    rows = [np.concatenate([each[name] for name in counts[0]]) for each in found]
    starts, lengths = (
        np.stack([column[row] for column, row in zip(columns, rows, strict=True)])
        for columns in (
            [trace.start_ns + trace.info.base_ns for trace in traces],
            [trace.duration_ns for trace in traces],
        )
    )
    order = np.argsort(starts[0], kind="stable")
    return _Matched(ranks, [names[i] for i in order], starts[:, order], (starts + lengths)[:, order])


def _collectives(trace: Trace) -> dict[str, Ints]:
    """Rows of the trace's collectives per name, each in order of time."""
    gpu = trace.gpu_rows()
    if gpu.size:
        rows, wanted = gpu, [family(name) == "collective" for name in trace.names]
    else:
        rows = trace.rows(Category.CPU_OP, Category.USER_ANNOTATION)
        wanted = [_ON_CPU.match(name) is not None for name in trace.names]
    wanted = [there and _TOGETHER.search(name) is not None for there, name in zip(wanted, trace.names, strict=True)]
    rows = rows[np.array(wanted or [False], np.bool_)[trace.name[rows]]]
    grouped: dict[str, list[int]] = defaultdict(list)
    for row in rows[np.argsort(trace.start_ns[rows], kind="stable")]:
        grouped[trace.names[trace.name[row]]].append(int(row))
    return {name: np.array(group, np.int64) for name, group in sorted(grouped.items())}


def _shifts(matched: _Matched) -> tuple[Ints, Ints, Ints]:
    """By how many ns each rank's clock is ahead of the first's, and the bounds of that."""
    start, end = matched.start, matched.end
    low = (start - end[0]).max(axis=1)
    high = (end - start[0]).min(axis=1)
    low[0] = high[0] = 0
    for rank, lowest, highest in zip(matched.ranks, low.tolist(), high.tolist(), strict=True):
        if lowest > highest:
            raise WorkbenchError(
                f"no shift of rank {rank}'s clock lets all {len(matched.names)} collectives overlap with rank "
                f"{matched.ranks[0]}'s (at least {lowest / 1000:,.3f} us and at most {highest / 1000:,.3f} us): the "
                "traces are of different runs, or a clock drifts"
            )
    middle = np.rint(np.median(end - end[0], axis=1)).astype(np.int64)
    return np.clip(middle, low, high), low, high


def _window_names(trace: Trace, starts: Ints, window: str | None) -> list[str]:
    """Name of the first matching annotation that each time lies in."""
    if window is None:
        return [""] * starts.size
    windows = find_windows(trace, window)
    place = np.searchsorted(windows.start_ns, starts - trace.info.base_ns, "right") - 1
    inside = (place >= 0) & (starts - trace.info.base_ns < windows.stop_ns[np.maximum(place, 0)])
    return [windows.names[i] if there else "" for i, there in zip(place, inside, strict=True)]
