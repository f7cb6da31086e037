"""Find the cheapest configuration for the calls of a workload: exact programming, then local search.

A configuration here is (budgets, max items): budgets ascending and distinct, each a multiple of max items, which
keeps vLLM's captured buffers exactly as large as the budget (defect D3 otherwise), and each among the budgets that
the cost profile measured.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench import search_loops as loops
from workbench.costs import Objective
from workbench.errors import WorkbenchError
from workbench.progress import Progress, silent
from workbench.search_loops import Queues, Tables

# Item counts that are tried, besides the most items of any call; vLLM takes any number.
ITEMS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SEARCHED_ITEMS = 20_000  # items of the calls that local search prices; its best answers are priced on all
EVALUATIONS = 6_000  # configurations that local search prices at most
CANDIDATES = 384  # budgets that programming chooses from, when calls hold several items
STARTS = 8  # configurations that local search starts from
SHAKES = 40  # times that the best one is changed at random and improved again
FINALISTS = 8  # configurations of the local search that are priced on all calls
FEW = 1_000  # configurations of one max items that are all priced
SMALLER_ENDS = 4  # sizes below the largest item at which budgets may end, where limits bind
REPACKED = 3  # times that programming follows the packing its own budgets change

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Point = tuple[tuple[int, ...], int]  # budgets, max items
# What is compared: the objective, then the mean, then fewer graphs, then smaller ones.
Score = tuple[float, float, int, int]


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        queues: the distinct calls, all of them.
        tables: costs, those of the objective.
        objective: see `workbench.advisor.OBJECTIVES`.
        max_graphs: most budgets.
        affordable: whether budgets meet the other constraints.
        covers: every item must fit a budget.
        least_items: fewest max items.
        widest: most tokens of a budget per item, where a model's position table sets a limit (D7).
    """

    queues: Queues
    tables: Tables
    objective: Objective
    max_graphs: int
    affordable: Callable[[tuple[int, ...]], bool]
    covers: bool
    least_items: int = 1
    widest: int | None = None

    @property
    def largest_item(self) -> int:
        """Tokens of the largest item."""
        return int(self.queues.tokens.max())

    @property
    def single(self) -> bool:
        """Whether every call holds one item."""
        return len(self.queues.tokens) == len(self.queues)

    def value(self, costs: Floats, queues: Queues) -> float:
        """The objective, from the costs of each distinct call."""
        if self.objective == "p99":
            return loops.weighted_percentile(costs, queues.weight, 99)
        return float(np.average(costs, weights=queues.weight))

    def bound(self) -> float:
        """A value of the objective that no configuration goes below; see `search_loops.bound`.

        Every call costs at least its own bound, so the mean and any percentile do too.
        """
        return self.value(loops.bound(self.queues, self.tables), self.queues)

    def score(self, point: Point, queues: Queues) -> Score:
        """Price a configuration on some of the calls; inf where vLLM would crash."""
        budgets, max_items = point
        costs = loops.price(queues, self.tables, np.array(budgets, np.int64), max_items)
        mean = float(np.average(costs, weights=queues.weight))
        value = mean if self.objective != "p99" or not np.isfinite(mean) else self.value(costs, queues)
        # Rounded, so that a tie is a tie on every machine, whatever the order of its sums.
        return round(value, 6), round(mean, 6), len(budgets), sum(budgets)

    def allowed(self, point: Point) -> bool:
        """Whether a configuration is within the constraints and the measured budgets, and vLLM takes it."""
        budgets, max_items = point
        if not budgets or len(budgets) > self.max_graphs or budgets[0] < max(max_items, self.tables.low):
            return False
        if max_items < self.least_items or (self.widest and budgets[-1] // max_items > self.widest):
            return False
        if budgets[-1] > self.tables.high or (self.covers and budgets[-1] < self.largest_item):
            return False
        return self.affordable(budgets)


@dataclass(frozen=True)
class Found:
    """The best configuration seen; `exact`: none within the constraints is better, by the cost model."""

    budgets: tuple[int, ...]
    max_items: int
    exact: bool
    evaluations: int


def find(space: Space, starts: list[Point], *, seed: int = 0, progress: Progress = silent) -> Found:
    """Return the cheapest configuration.

    Args:
        space: what is searched.
        starts: configurations to begin from, besides those that programming finds; those not allowed are ignored.
        seed: of the calls that local search prices when there are many.
        progress: told what is going on.

    Raises:
        WorkbenchError: no configuration meets the constraints.
    """
    chosen = one_item_choices(space) if space.single and space.least_items == 1 else []
    if chosen and space.objective != "p99":
        best = min(chosen, key=lambda point: space.score(point, space.queues))
        if space.allowed(best):
            return Found(*best, exact=True, evaluations=len(chosen))
    walk = _Walk(space, loops.sample(space.queues, SEARCHED_ITEMS, seed), progress, seed)
    best = walk.best([*chosen, *starts])
    return Found(*best, exact=False, evaluations=walk.evaluations)


def one_item_choices(space: Space) -> list[Point]:
    """Return the cheapest mean for each number of budgets when every call holds one item, by programming.

    Where a replay never gets cheaper by a larger budget, the best budgets are token counts of items: lowering a
    budget to the largest item it holds changes no assignment and no cost upwards. Otherwise every whole number is a
    candidate.
    """
    tables, queues = space.tables, space.queues
    top = min(tables.high, max(space.largest_item, tables.low))
    measured = np.arange(tables.low, tables.high + 1)
    monotone = (np.diff(tables.base[measured]) >= 0).all() and (np.diff(tables.slope[measured]) >= 0).all()
    candidates = measured
    if monotone:
        candidates = np.unique(np.clip(queues.tokens, tables.low, top))
    chosen = loops.choose_budgets(
        queues.tokens,
        queues.squares,
        queues.weight,
        candidates,
        tables,
        space.max_graphs,
        open_end=not space.covers,
    )
    return [(tuple(budgets.tolist()), 1) for budgets in chosen]


def best_by_size(space: Space, items: Iterable[int], *, seed: int = 0) -> dict[tuple[int, int], Point]:
    """Return the best configuration that programming finds for each (number of graphs at most, max items).

    No local search, so that a whole map of them takes seconds; `find` gets a little lower.

    Args:
        items: max items to try.
    """
    walk = _Walk(space, loops.sample(space.queues, SEARCHED_ITEMS, seed), silent, seed)
    best: dict[tuple[int, int], Point] = {}
    for max_items in sorted(set(items)):
        for point in filter(space.allowed, walk.fitted(max_items)):
            for graphs in range(len(point[0]), space.max_graphs + 1):
                known = best.get((graphs, max_items))
                if known is None or walk.score(point) < walk.score(known):
                    best[graphs, max_items] = point
    return best


class _Walk:
    """Local search over (budgets, max items) on some of the calls."""

    def __init__(self, space: Space, queues: Queues, progress: Progress, seed: int) -> None:
        self.space = space
        self.queues = queues
        self.progress = progress
        self.random = np.random.default_rng(seed)
        self.seen: dict[Point, Score] = {}
        self.leader: Point | None = None  # the best one seen that is allowed
        self.runs: dict[int, Ints] = {}
        most = int(np.diff(space.queues.first).max())
        # One of them above the most items of a call, where it divides budgets that the most does not.
        above = next((n for n in ITEMS if n >= most), most)
        tried = {n for n in ITEMS if n < most} | {most, above}
        least = space.least_items
        if space.widest and least * space.widest < space.largest_item:
            least = -(-space.largest_item // space.widest)
        if least > 1:
            tried = {n for n in tried if n > least} | {least, *[n for n in ITEMS if n > least][:2]}
        self.items = sorted(n for n in tried if n <= space.tables.high)

    @property
    def evaluations(self) -> int:
        """Configurations priced so far."""
        return len(self.seen)

    def score(self, point: Point) -> Score:
        """Price a configuration, once."""
        if point not in self.seen:
            self.seen[point] = self.space.score(point, self.queues)
            leads = self.leader is None or self.seen[point] < self.seen[self.leader]
            if leads and self.space.allowed(point):
                self.leader = point
        return self.seen[point]

    def best(self, starts: list[Point]) -> Point:
        """Search from the best of the starts, and of what programming finds; compare the best ones on all calls."""
        pool = {self._repaired(point) for point in starts}
        for done, max_items in enumerate(self.items):
            self.progress(f"choosing budgets for {max_items} items", 0.4 * done / len(self.items))
            pool.update(self.fitted(max_items))
            pool.update(self._every(max_items))
        if not self.space.covers and not all(self.space.affordable(budgets) for budgets, _ in pool):
            # Limits that bind may leave the largest items to eager, and all of these starts hold them.
            for max_items in self.items:
                pool.update(self.fitted(max_items, self._smaller_ends()))
        allowed = sorted(filter(self.space.allowed, pool), key=self.score)
        if not allowed:
            held = f" holds the largest item, {self.space.largest_item:,} tokens," if self.space.covers else " is"
            raise WorkbenchError(
                f"no configuration of up to {self.space.max_graphs} graphs{held} within the limits on memory and "
                "capture time; allow more"
            )
        chosen = _spread_over_items(allowed, STARTS)
        for done, point in enumerate(chosen):
            self.progress(f"improving start {done + 1} of {len(chosen)}", 0.4 + 0.3 * done / len(chosen))
            self._improve(point, EVALUATIONS * (done + 1) // len(chosen) // 2)
        for done in range(SHAKES):
            self.progress("shaking the best one", 0.7 + 0.2 * done / SHAKES)
            assert self.leader is not None  # the starts are allowed
            shaken = self._shaken(self.leader)
            if self.space.allowed(shaken):
                self._improve(shaken, EVALUATIONS)
        finalists = sorted(filter(self.space.allowed, self.seen), key=self.seen.__getitem__)[:FINALISTS]
        return min(finalists, key=lambda point: self.space.score(point, self.space.queues))

    # --- starts

    def _repaired(self, point: Point) -> Point:
        """The nearest configuration of this form: multiples of max items, measured, the largest item held."""
        budgets, max_items = point
        max_items = max(self.items[0], min(max_items, self.items[-1]))
        largest = self.space.largest_item if self.space.covers else budgets[-1]
        return self._rounded([*budgets, max(budgets[-1], largest)], max_items), max_items

    def _rounded(self, budgets: "list[int] | Ints", max_items: int) -> tuple[int, ...]:
        """Round up to multiples of `max_items` between the smallest and the largest measured budget."""
        tables = self.space.tables
        low = -(-max(tables.low, max_items) // max_items) * max_items
        high = tables.high // max_items * max_items
        up = -(-np.asarray(budgets, np.int64) // max_items) * max_items
        return tuple(sorted(set(np.clip(up, low, high).tolist())))

    def fitted(self, max_items: int, ends: "list[int] | None" = None) -> Iterator[Point]:
        """Configurations by programming on the batches of a packing without padding, then of its own packing.

        Args:
            max_items: of all of them.
            ends: where their budgets may end; None: where they hold every item.
        """
        for largest in self._largest_budgets(max_items) if ends is None else ends:
            dense = self._rounded(list(range(1, largest + 1)), max_items)
            for budgets in self._chosen(dense, max_items):
                point = (budgets, max_items)
                yield point
                for _ in range(REPACKED):
                    again = self._chosen(point[0], max_items, exactly=len(budgets))
                    if not again or (again[-1], max_items) == point:
                        break
                    point = (again[-1], max_items)
                    yield point

    def _every(self, max_items: int) -> Iterator[Point]:
        """All configurations whose budgets are runs of items, where they are few: a walk may not reach the best."""
        runs = self._rounded(self._runs(max_items), max_items)
        counts = range(1, self.space.max_graphs + 1)
        if sum(math.comb(len(runs), count) for count in counts) <= FEW:
            for count in counts:
                yield from ((chosen, max_items) for chosen in itertools.combinations(runs, count))

    def _largest_budgets(self, max_items: int) -> list[int]:
        """Where the budgets may end: the largest item, the largest run of items, and one between."""
        runs = self._runs(max_items)
        least = min(max(self.space.largest_item, self.space.tables.low), self.space.tables.high)
        most = max(int(runs[-1]) if len(runs) else least, least)
        return sorted({least, (least + most) // 2, most})

    def _smaller_ends(self) -> list[int]:
        """Where the budgets may end below the largest item: sizes of items, spread over them."""
        smaller = np.unique(np.maximum(self.queues.tokens, self.space.tables.low))[:-1]
        return [int(size) for size in _spread(smaller, SMALLER_ENDS)]

    def _chosen(self, budgets: tuple[int, ...], max_items: int, exactly: int | None = None) -> list[tuple[int, ...]]:
        """Budgets by programming, for the batches that `budgets` make; for every count, or one."""
        sums, _, areas, weights = loops.batches(self.queues, np.array(budgets, np.int64), max_items)
        if not len(sums):
            return []
        up = np.array(self._rounded(np.unique(sums), max_items), np.int64)
        candidates = _thinned(up, sums, weights)
        most = self.space.max_graphs if exactly is None else exactly
        chosen = loops.choose_budgets(sums, areas, weights, candidates, self.space.tables, most, open_end=False)
        found = [tuple(choice.tolist()) for choice in chosen]
        if self.space.covers:
            found = [self._repaired((choice, max_items))[0] for choice in found]
        return found if exactly is None else found[-1:]

    # --- moves

    def _shaken(self, point: Point) -> Point:
        """Replace up to half of the budgets at random, and sometimes max items, to leave a local optimum."""
        budgets, max_items = point
        if self.random.random() < 0.5:
            max_items = int(self.random.choice(self.items))
        kept = [budget for budget in budgets[:-1] if self.random.random() < 0.5]
        runs = self._runs(max_items)
        added = self.random.choice(runs, self.space.max_graphs - 1 - len(kept)) if len(runs) else np.zeros(0, np.int64)
        return self._repaired(((*sorted([*kept, *added.tolist()]), budgets[-1]), max_items))

    def _improve(self, point: Point, until: int) -> None:
        """Take the best neighbour until none is better, or `until` configurations have been priced."""
        while self.evaluations < until:
            better = point
            for moves in (self._tighter, self._shifted, self._fewer, self._more, self._exchanged, self._other_items):
                for neighbour in moves(better):
                    if self.space.allowed(neighbour) and self.score(neighbour) < self.score(better):
                        better = neighbour
            if better == point:
                return
            point = better

    def _tighter(self, point: Point) -> Iterator[Point]:
        """Lower every budget to the largest batch it holds, all at once, or choose them anew for their batches."""
        budgets, max_items = point
        sums, index, _, _ = loops.batches(self.queues, np.array(budgets, np.int64), max_items)
        largest = np.zeros(len(budgets), np.int64)
        np.maximum.at(largest, index, sums)
        yield self._repaired((tuple(largest[largest > 0].tolist()), max_items)) if largest.any() else point
        for choice in self._chosen(budgets, max_items, exactly=len(budgets)):
            yield choice, max_items

    def _cuts(self, point: Point, position: int, count: int) -> list[int]:
        """Token counts at which a budget could be, between its neighbours.

        Of its batches and the next one's, of runs of items that could be batches, and steps beside where it is.
        """
        budgets, max_items = point
        sums, index, _, _ = loops.batches(self.queues, np.array(budgets, np.int64), max_items)
        below, here = (budgets[position - 1] if position else 0), budgets[position]
        above = budgets[position + 1] if position + 1 < len(budgets) else self.space.tables.high
        runs = self._runs(max_items)
        first, at, last = np.searchsorted(runs, (below, here, above)).tolist()
        picked = [
            _spread(np.unique(sums[(index == position) | (index == position + 1)]), count),
            _spread(runs[first:last], count),
            runs[max(at - 2, 0) : at + 3],
            np.array([(below + here) // 2, here - max_items, here + max_items]),
        ]
        return list(self._rounded(np.concatenate(picked), max_items))

    def _runs(self, max_items: int) -> Ints:
        """Tokens of runs of items that one replay can hold."""
        if max_items not in self.runs:
            self.runs[max_items] = loops.run_sums(self.queues, max_items, self.space.tables.high)
        return self.runs[max_items]

    def _shifted(self, point: Point) -> Iterator[Point]:
        """Move one budget."""
        budgets, max_items = point
        for position in range(len(budgets)):
            for cut in self._cuts(point, position, 8):
                yield tuple(sorted({*budgets[:position], cut, *budgets[position + 1 :]})), max_items

    def _fewer(self, point: Point) -> Iterator[Point]:
        """Leave one budget out."""
        budgets, max_items = point
        for position in range(len(budgets)):
            yield (*budgets[:position], *budgets[position + 1 :]), max_items

    def _more(self, point: Point) -> Iterator[Point]:
        """Add one budget."""
        budgets, max_items = point
        if len(budgets) < self.space.max_graphs:
            for position in range(len(budgets)):
                for cut in self._cuts(point, position, 4):
                    yield tuple(sorted({*budgets, cut})), max_items

    def _exchanged(self, point: Point) -> Iterator[Point]:
        """Leave out the budget that is missed least, and add one elsewhere."""
        fewer = [near for near in self._fewer(point) if near[0] and self.space.allowed(near)]
        for near in sorted(fewer, key=self.score)[:2]:
            yield from self._more(near)

    def _other_items(self, point: Point) -> Iterator[Point]:
        """Change max items."""
        budgets, max_items = point
        for other in self.items:
            if other != max_items:
                yield self._repaired((budgets, other))


def _thinned(candidates: Ints, sums: Ints, weights: Ints) -> Ints:
    """At most CANDIDATES of the candidates, spread over the batches; the last one always."""
    if len(candidates) <= CANDIDATES:
        return candidates
    order = np.argsort(sums, kind="stable")
    load = np.cumsum(weights[order], dtype=np.float64)
    at = np.searchsorted(load, np.linspace(0, load[-1], CANDIDATES))
    picked = np.searchsorted(candidates, sums[order][np.clip(at, 0, len(sums) - 1)])
    kept: Ints = np.unique([*np.clip(picked, 0, len(candidates) - 1).tolist(), len(candidates) - 1])
    return candidates[kept]


def _spread(values: Ints, count: int) -> Ints:
    """At most `count` of the values, evenly spread in rank, both ends among them."""
    if len(values) <= count:
        return values
    kept: Ints = values[np.linspace(0, len(values) - 1, count).astype(np.int64)]
    return kept


def _spread_over_items(points: list[Point], count: int) -> list[Point]:
    """The best points, no max items more than twice, so that starts differ."""
    kept: list[Point] = []
    for point in points:
        if sum(point[1] == other[1] for other in kept) < 2:
            kept.append(point)
        if len(kept) == count:
            break
    return kept
