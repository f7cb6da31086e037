"""The advisor's compiled loops: prices of whole workloads, a bound below every configuration, exact programming.

Imported only by `workbench.search`, because numba is slow to import. Every loop works on queues as
`workbench.planner.arrange` makes them, and on tables indexed by whole tokens, so that nothing is interpolated inside:

* `base[t]`, `slope[t]`: GPU microseconds of a replay of budget t, base + slope * squares (inf where not measured);
* `tail[t]`: microseconds that follow a replay holding t tokens;
* `eager[t]`: microseconds of an item of t tokens that no budget holds; inf where vLLM would crash.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.compiled import compiled
from workbench.packing import _next_batch
from workbench.planner import Arrangement

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tables:
    """Costs by whole tokens (see the module), and the host's terms, in microseconds.

    Attributes:
        low, high: the smallest and largest budget that was measured.
    """

    base: Floats
    slope: Floats
    tail: Floats
    eager: Floats
    call_us: float
    batch_us: float
    item_us: float
    low: int
    high: int


@dataclass(frozen=True)
class Queues:
    """The distinct calls of a workload, in packing order.

    Attributes:
        tokens, squares: [N] of each item; `squares` is its sum of squared sequence lengths in patches.
        first: [C + 1] where each call starts.
        weight: [C] how many calls are like it.
    """

    tokens: Ints
    squares: Floats
    first: Ints
    weight: Ints

    def __len__(self) -> int:
        """Number of distinct calls."""
        return len(self.weight)


def distinct(arrangement: Arrangement, squares: Floats) -> Queues:
    """Return the distinct calls that hold items, in order of first appearance."""
    first = arrangement.first
    keys: dict[bytes, int] = {}
    starts: list[int] = []
    stops: list[int] = []
    weight: list[int] = []
    rows = np.column_stack([arrangement.tokens, squares.view(np.int64)])
    content = rows.tobytes()
    width = rows.shape[1] * rows.itemsize
    for start, stop in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        if start == stop:
            continue
        key = content[start * width : stop * width]
        index = keys.setdefault(key, len(keys))
        if index == len(weight):
            starts.append(start)
            stops.append(stop)
            weight.append(0)
        weight[index] += 1
    counts = np.array(stops, np.int64) - np.array(starts, np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    picked = np.repeat(np.array(starts, np.int64) - offsets[:-1], counts) + np.arange(offsets[-1])
    return Queues(arrangement.tokens[picked], squares[picked], offsets, np.array(weight, np.int64))


def sample(queues: Queues, items: int, seed: int) -> Queues:
    """Return whole calls drawn without replacement until `items` items are reached; all of them if fewer."""
    if len(queues.tokens) <= items:
        return queues
    order = np.random.default_rng(seed).permutation(len(queues))
    counts = np.diff(queues.first)
    kept = np.sort(order[: max(1, int(np.searchsorted(np.cumsum(counts[order]), items)))])
    offsets = np.concatenate([[0], np.cumsum(counts[kept])]).astype(np.int64)
    picked = np.repeat(queues.first[kept] - offsets[:-1], counts[kept]) + np.arange(offsets[-1])
    return Queues(queues.tokens[picked], queues.squares[picked], offsets, queues.weight[kept])


def price(queues: Queues, tables: Tables, budgets: Ints, max_items: int) -> Floats:
    """[C] microseconds of each distinct call under vLLM's packing; inf where it would crash."""
    costs = np.empty(len(queues))
    host = np.array([tables.call_us, tables.batch_us, tables.item_us])
    _price(
        queues.tokens,
        queues.squares,
        queues.first,
        budgets,
        max_items,
        tables.base[budgets],
        tables.slope[budgets],
        tables.tail,
        tables.eager,
        host,
        costs,
    )
    return costs


@compiled
def _price(
    tokens: Ints,
    squares: Floats,
    first: Ints,
    budgets: Ints,
    max_items: int,
    base: Floats,
    slope: Floats,
    tail: Floats,
    eager: Floats,
    host: Floats,
    costs: Floats,
) -> None:
    for queue in range(len(first) - 1):
        start, stop = first[queue], first[queue + 1]
        cost = host[0]
        while start < stop:
            end, total, index = _next_batch(tokens, start, stop, budgets, max_items)
            if index < len(budgets):
                area = 0.0
                for i in range(start, end):
                    area += squares[i]
                cost += host[1] + host[2] * (end - start) + base[index] + slope[index] * area + tail[total]
            else:
                cost += eager[total]
            start = end
        costs[queue] = cost


def batches(queues: Queues, budgets: Ints, max_items: int) -> tuple[Ints, Ints, Floats, Ints]:
    """Return the replayed batches as (tokens, budget index, squares, weight), fallbacks left out."""
    size = len(queues.tokens)
    tokens, index, weight = (np.empty(size, np.int64) for _ in range(3))
    area = np.empty(size)
    count = _batches(
        queues.tokens, queues.squares, queues.first, queues.weight, budgets, max_items, tokens, index, area, weight
    )
    return tokens[:count], index[:count], area[:count], weight[:count]


@compiled
def _batches(
    tokens: Ints,
    squares: Floats,
    first: Ints,
    weights: Ints,
    budgets: Ints,
    max_items: int,
    batch_tokens: Ints,
    batch_index: Ints,
    batch_area: Floats,
    batch_weight: Ints,
) -> int:
    count = 0
    for queue in range(len(first) - 1):
        start, stop = first[queue], first[queue + 1]
        while start < stop:
            end, total, index = _next_batch(tokens, start, stop, budgets, max_items)
            if index < len(budgets):
                batch_tokens[count] = total
                batch_index[count] = index
                batch_area[count] = squares[start:end].sum()
                batch_weight[count] = weights[queue]
                count += 1
            start = end
    return count


def bound(queues: Queues, tables: Tables) -> Floats:
    """[C] microseconds that no configuration of measured budgets can go below, call by call.

    vLLM packs runs of a call's items sorted by tokens, whatever the budgets are. A run of T tokens replays a budget
    of at least T, which costs at least the cheapest base and the cheapest slope among measured budgets of T or more.
    So a call costs at least the cheapest way to cut its sorted items into runs that fit the largest measured budget,
    each replayed without padding. An item may run eagerly instead where vLLM survives that.
    """
    costs = np.empty(len(queues))
    host = np.array([tables.call_us, tables.batch_us, tables.item_us])
    size = tables.high + 1
    base, slope = (_cheapest_from(table[:size]) for table in (tables.base, tables.slope))
    _bound(queues.tokens, queues.squares, queues.first, base, slope, tables.tail, tables.eager, host, costs)
    return costs


def _cheapest_from(table: Floats) -> Floats:
    """Minimum of the table at and above each index."""
    return np.minimum.accumulate(table[::-1])[::-1]


@compiled
def _bound(
    tokens: Ints,
    squares: Floats,
    first: Ints,
    base: Floats,
    slope: Floats,
    tail: Floats,
    eager: Floats,
    host: Floats,
    costs: Floats,
) -> None:
    high = len(base) - 1
    longest = 0
    for queue in range(len(first) - 1):
        longest = max(longest, first[queue + 1] - first[queue])
    best = np.empty(longest + 1)
    for queue in range(len(first) - 1):
        start, count = first[queue], first[queue + 1] - first[queue]
        best[0] = 0.0
        for end in range(1, count + 1):
            item = start + end - 1
            cheapest = best[end - 1] + eager[tokens[item]]
            total, area = 0, 0.0
            for begin in range(end - 1, -1, -1):
                total += tokens[start + begin]
                if total > high:
                    break
                area += squares[start + begin]
                run = host[1] + host[2] * (end - begin) + base[total] + slope[total] * area + tail[total]
                cheapest = min(cheapest, best[begin] + run)
            best[end] = cheapest
        costs[queue] = host[0] + best[count]


def choose_budgets(
    sums: Ints, areas: Floats, weights: Ints, candidates: Ints, tables: Tables, count: int, *, open_end: bool
) -> list[Ints]:
    """Choose budgets for batches whose composition is fixed, exactly, by dynamic programming.

    A batch replays the smallest budget that holds its tokens. Cost of a choice: sum over batches of
    base(budget) + slope(budget) * squares. Everything else a batch costs does not depend on the budget.

    Args:
        sums: [B] tokens of each batch; areas: [B] its squares; weights: [B] how often it occurs.
        candidates: ascending budgets to choose from; the last holds the largest batch unless `open_end`.
        count: most budgets to choose.
        open_end: batches above the largest chosen budget are allowed, at the cost of the eager table.

    Returns:
        The cheapest choice of exactly k of the candidates, for k = 1 ... `count` (fewer where candidates run out).
    """
    order = np.argsort(sums, kind="stable")
    ordered = sums[order]
    load = np.concatenate([[0.0], np.cumsum(weights[order], dtype=np.float64)])
    area = np.concatenate([[0.0], np.cumsum(weights[order] * areas[order])])
    held = np.searchsorted(ordered, candidates, side="right")  # batches at or below each candidate
    finite = np.where(np.isfinite(tables.eager[ordered]), tables.eager[ordered], 0.0)
    reach = np.concatenate([[0.0], np.cumsum(weights[order] * finite)])
    crash = np.concatenate([[0], np.cumsum(~np.isfinite(tables.eager[ordered]))])
    tails = np.where(crash[-1] - crash[held] > 0, np.inf, reach[-1] - reach[held])
    if not open_end:
        tails = np.where(held < len(ordered), np.inf, 0.0)
    # What follows a replay and the batch's host time are spared by a batch that runs eagerly instead.
    follows = weights[order] * (tables.tail[ordered] + tables.batch_us + tables.item_us)
    spared = np.concatenate([[0.0], np.cumsum(follows)])
    tails = tails - (spared[-1] - spared[held])
    best, before = _program(load[held], area[held], tables.base[candidates], tables.slope[candidates], count)
    chosen = []
    for k in range(min(count, len(candidates))):
        end = int(np.argmin(best[k] + tails))
        if not np.isfinite(best[k, end] + tails[end]):
            continue
        picked = [end]
        for row in range(k, 0, -1):
            picked.append(int(before[row, picked[-1]]))
        chosen.append(candidates[picked[::-1]])
    return chosen


@compiled
def _program(load: Floats, area: Floats, base: Floats, slope: Floats, count: int) -> tuple[Floats, Ints]:
    """Return [count, M] the least cost of batches up to candidate j with k + 1 budgets, the last j, and its choice."""
    size = len(load)
    best = np.full((count, size), np.inf)
    before = np.full((count, size), -1)
    for j in range(size):
        best[0, j] = base[j] * load[j] + slope[j] * area[j]
    for k in range(1, count):
        for j in range(k, size):
            least, which = np.inf, -1
            for i in range(k - 1, j):
                cost = best[k - 1, i] + base[j] * (load[j] - load[i]) + slope[j] * (area[j] - area[i])
                if cost < least:
                    least, which = cost, i
            best[k, j] = least
            before[k, j] = which
    return best, before


def run_sums(queues: Queues, max_items: int, largest: int) -> Ints:
    """Return the distinct tokens of runs of up to `max_items` sorted items that `largest` holds, ascending."""
    seen = np.zeros(largest + 1, np.bool_)
    _runs(queues.tokens, queues.first, max_items, seen)
    return np.flatnonzero(seen)


@compiled
def _runs(tokens: Ints, first: Ints, max_items: int, seen: npt.NDArray[np.bool_]) -> None:
    for queue in range(len(first) - 1):
        for start in range(first[queue], first[queue + 1]):
            total = 0
            for end in range(start, min(first[queue + 1], start + max_items)):
                total += tokens[end]
                if total >= len(seen):
                    break
                seen[total] = True


def weighted_percentile(values: Floats, weights: Ints, percent: float) -> float:
    """`np.percentile(np.repeat(values, weights), percent)` without the repetition."""
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    position = percent / 100 * (ends[-1] - 1)
    low = int(position)
    ranks = np.array([low, min(low + 1, ends[-1] - 1)])
    below, above = values[order[np.searchsorted(ends, ranks, side="right")]].tolist()
    return float(below + (above - below) * (position - low))
