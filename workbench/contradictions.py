"""What no schema can say of a stored file: indices that point nowhere, times no clock gives, lists without end.

    wrong_run(run), wrong_ladder(ladder)      # "" when all is well, else what is wrong, as the end of a sentence

A bundle is made of files that pass, and one is read only where all of them do: what comes after may trust numbers,
lengths and names.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from workbench.capturable import Boundary, Case, Column, Ladder, ModuleMap, Steps
from workbench.ingest import External
from workbench.run import Run

DEEPEST_JSON = 64
LONGEST_US = 365 * 86_400 * 1e6
SHORTEST_US = 1e-3  # of a sample of a ladder, whose ratios are taken: no clock is finer than a nanosecond
MOST_SAMPLES = 100_000  # of one timing; the bootstrap's work grows with them
MOST_IN_ALL = 500_000  # samples of a ladder, whose columns are all compared; made are about ten thousand
MOST_ROWS = 500  # calls, columns of a call, candidates, maps and captures of a ladder; made are about a dozen
MOST_MODULES = 20_000
LARGEST_COUNT = 10**12
LONGEST_NAME = 400
LONGEST_TEXT = 64 << 10
_TIME = "a time is negative or longer than a year"


def wrong_run(run: Run) -> str:
    """Say what contradicts itself in a run."""
    calls = len(run.calls)
    rows: list[Any] = [*run.batches, *run.timings, *run.phases, *run.equality, *run.failures]
    if any(not 0 <= row.call < calls for row in rows):
        return f"it names a call beyond its {calls}"
    if any(not 0 <= item < len(run.calls[batch.call].tokens) for batch in run.batches for item in batch.items):
        return "a batch names an item its call does not have"
    return _wrong_samples(values for timing in run.timings for values in (timing.wall_us, timing.gpu_us))


def wrong_external(external: External) -> str:
    """Say what contradicts itself in a result of another tool."""
    if any(not 0 <= index < len(external.kernels) for index in external.sequence):
        return "its sequence names an operation that it does not list"
    if any(not 0 <= kernel.total_us <= LONGEST_US for kernel in external.kernels):
        return _TIME
    return _wrong_samples(measure.samples for measure in external.measures)


def wrong_ladder(ladder: Ladder) -> str:
    """Say what contradicts itself in a ladder, or is of a size that none has."""
    rows = (ladder.cases, ladder.boundaries, ladder.maps, ladder.captured)
    if any(len(some) > MOST_ROWS for some in rows):
        return f"it has more than {MOST_ROWS} calls, candidates, maps or captures"
    if sum(len(column.wall_us) for case in ladder.cases for column in case.columns) > MOST_IN_ALL:
        return f"its columns have more than {MOST_IN_ALL:,} samples together"
    found = (
        *(_wrong_case(case) for case in ladder.cases),
        *(_wrong_boundary(one) for one in ladder.boundaries),
        *(_wrong_map(one) for one in ladder.maps),
        _wrong_names(one.column for one in ladder.captured),
        _wrong_recipes([steps for one in ladder.captured for steps in one.recipes]),
        _wrong_plain(msgspec.to_builtins(ladder)),
    )
    return next(filter(None, found), "")


def _wrong_case(case: Case) -> str:
    names = [column.name for column in case.columns]
    if not 0 < len(names) <= MOST_ROWS or len(set(names)) != len(names):
        return "a call has no column, too many, or two of one name"
    if not case.grids or len(case.tokens) != len(case.grids):
        return "a call has not as many token counts as items"
    found = (
        _wrong_names([case.name, *names]),
        _wrong_counts([*case.tokens, *(size for grid in case.grids for size in grid)]),
        *(_wrong_column(column, len(case.grids)) for column in case.columns),
    )
    return next(filter(None, found), "")


def _wrong_column(column: Column, items: int) -> str:
    order = column.order
    if order and (len(order) != len(column.wall_us) or any(a >= b for a, b in pairwise(order))):
        return "the order of a column's samples does not rise, or is not that of as many samples"
    if any(len(found) not in (0, items) for found in (column.parity, column.against_graph)):
        return "a column compares another number of items than its call has"
    if any(value < SHORTEST_US for value in column.wall_us):
        return "a call took less than a nanosecond"
    return (
        _wrong_samples((column.wall_us, column.gpu_us))
        or _wrong_times((column.busy_us, column.idle_us, column.traced_us))
        or _wrong_counts((column.ops, column.nodes, *column.budgets))
        or _wrong_names(column.variants)
    )


def _wrong_recipes(recipes: Sequence[Steps]) -> str:
    if len(recipes) > MOST_ROWS:
        return f"its graphs compute their steps in more than {MOST_ROWS} ways"
    ways = (way for one in recipes for way in (one.attention, one.qkv, one.proj, one.fc1, one.fc2))
    return _wrong_names(ways) or _wrong_counts(one.rows for one in recipes)


def _wrong_boundary(one: Boundary) -> str:
    return (
        _wrong_names((one.name, one.title))
        or _wrong_times((one.inside_us, one.eager_us, one.outside_us))
        or _wrong_counts((one.nodes, *(sync.count for sync in one.syncs)))
    )


def _wrong_map(mapped: ModuleMap) -> str:
    if len(mapped.modules) > MOST_MODULES:
        return f"a graph has more than {MOST_MODULES:,} modules"
    families = [family for one in mapped.modules for family in one.families.items()]
    modules = mapped.modules
    return (
        _wrong_names([mapped.name, *(one.module or "-" for one in modules), *(name for name, _ in families)])
        or _wrong_times([us for one in modules for us in (one.us, one.roofline_us)] + [us for _, (_, us) in families])
        or _wrong_counts([mapped.nodes, mapped.budget, *(one.nodes for one in modules), *(n for _, (n, _) in families)])
    )


def _wrong_samples(columns: Iterable[Sequence[float]]) -> str:
    for values in columns:
        if len(values) > MOST_SAMPLES:
            return f"a timing has more than {MOST_SAMPLES:,} samples"
        if wrong := _wrong_times(values):
            return wrong
    return ""


def _wrong_times(values: Iterable[float | None]) -> str:
    return _TIME if any(value is not None and not 0 <= value <= LONGEST_US for value in values) else ""


def _wrong_counts(values: Iterable[int | None]) -> str:
    wrong = any(value is not None and not 0 <= value <= LARGEST_COUNT for value in values)
    return f"a count is negative or above {LARGEST_COUNT:,}" if wrong else ""


def _wrong_names(names: Iterable[str]) -> str:
    return (
        f"a name is empty or longer than {LONGEST_NAME}" if any(not 0 < len(n) <= LONGEST_NAME for n in names) else ""
    )


def _wrong_plain(value: Any) -> str:
    """The same of all that lies in plain data: no endless text, no endless list."""
    for item in _nested(value):
        if isinstance(item, str) and len(item) > LONGEST_TEXT:
            return f"a text is longer than {LONGEST_TEXT:,} characters"
        if isinstance(item, list) and len(item) > MOST_SAMPLES:
            return f"a list is longer than {MOST_SAMPLES:,}"
    return ""


def _nested(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item


def check_plain(value: Any) -> None:
    """Refuse nesting beyond `DEEPEST_JSON` and integers beyond 64 bits, on which arithmetic would fail.

    Raises:
        ValueError: one of these.
    """
    level = [value]
    for _ in range(DEEPEST_JSON):
        if any(isinstance(item, int) and abs(item) >= 1 << 63 for item in level):
            raise ValueError("an integer beyond 64 bits")
        level = [
            item
            for parent in level
            if isinstance(parent, dict | list)
            for item in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEEPEST_JSON} levels")
