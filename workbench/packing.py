"""The planner's compiled loops. Imported only when something is planned, because numba is slow to import.

Arrays are int64 and contiguous; a *queue* is a slice of the items in packing order (see `workbench.planner`).
"""

import numpy as np
import numpy.typing as npt

from workbench.compiled import compiled

Ints = npt.NDArray[np.int64]

# Below this many items an insertion sort beats a radix sort, whose histogram has 256 counters.
_SHORT = 32
_DIGIT_BITS = 8


@compiled
def _sort_short(keys: Ints, items: Ints, start: int, stop: int) -> None:
    for i in range(start + 1, stop):
        key = keys[i]
        item = items[i]
        j = i - 1
        while j >= start and keys[j] > key:
            keys[j + 1] = keys[j]
            items[j + 1] = items[j]
            j -= 1
        keys[j + 1] = key
        items[j + 1] = item


@compiled
def _largest_unless_sorted(keys: Ints, start: int, stop: int) -> int:
    """Return the largest key, or -1 when the keys are in order already."""
    largest = keys[start]
    in_order = True
    for i in range(start + 1, stop):
        if keys[i] < keys[i - 1]:
            in_order = False
        largest = max(largest, keys[i])
    return -1 if in_order else largest


@compiled
def _sort(keys: Ints, items: Ints, start: int, stop: int, spare_keys: Ints, spare_items: Ints) -> None:
    """Sort `keys[start:stop]` (not negative) ascending and stable, in place, `items` along with them.

    A radix sort from the least significant digit; the spare arrays are as long as the longest slice.
    """
    if stop - start <= _SHORT:
        _sort_short(keys, items, start, stop)
        return
    largest = _largest_unless_sorted(keys, start, stop)
    if largest < 0:
        return
    count = stop - start
    starts = np.empty(1 << _DIGIT_BITS, np.int64)
    shift = 0
    while largest >> shift:
        starts[:] = 0
        for i in range(start, stop):
            starts[(keys[i] >> shift) & 255] += 1
        position = 0
        for digit in range(256):
            position, starts[digit] = position + starts[digit], position
        for i in range(start, stop):
            digit = (keys[i] >> shift) & 255
            place = starts[digit]
            starts[digit] += 1
            spare_keys[place] = keys[i]
            spare_items[place] = items[i]
        keys[start:stop] = spare_keys[:count]
        items[start:stop] = spare_items[:count]
        shift += _DIGIT_BITS


@compiled
def _longest(offsets: Ints) -> int:
    longest = 0
    for call in range(len(offsets) - 1):
        longest = max(longest, offsets[call + 1] - offsets[call])
    return longest


@compiled
def sort_calls(tokens: Ints, offsets: Ints, sorted_tokens: Ints, items: Ints) -> None:
    """Fill `sorted_tokens` and `items` (workload indices) call by call: ascending, stable."""
    longest = _longest(offsets)
    spare_keys, spare_items = np.empty(longest, np.int64), np.empty(longest, np.int64)
    for call in range(len(offsets) - 1):
        start, stop = offsets[call], offsets[call + 1]
        for i in range(start, stop):
            sorted_tokens[i] = tokens[i]
            items[i] = i
        if stop - start > 1:
            _sort(sorted_tokens, items, start, stop, spare_keys, spare_items)


@compiled
def _deal(sizes: Ints, dealt: Ints, load: Ints, fill: Ints, owner: Ints) -> None:
    """Give each item of `dealt`, in order, to the rank with the least load, the lowest among equals.

    `owner` is filled per position of `dealt`; `fill[r + 1]` becomes the number of items of ranks 0 ... r.
    """
    load[:] = 0
    fill[:] = 0
    for i in range(len(dealt)):
        rank = 0
        for other in range(1, len(load)):
            if load[other] < load[rank]:
                rank = other
        owner[i] = rank
        load[rank] += sizes[dealt[i]]
        fill[rank + 1] += 1
    for rank in range(len(load)):
        fill[rank + 1] += fill[rank]


@compiled
def share_calls(
    tokens: Ints, sizes: Ints, offsets: Ints, ranks: int, sorted_tokens: Ints, items: Ints, first: Ints
) -> None:
    """Deal each call's items to `ranks` and sort every rank's queue.

    The deal is vLLM's `get_load_balance_assignment`: largest input first, equal ones in call order. A rank then
    packs its own items, whose order before the stable sort by tokens is the order in which they were dealt.
    """
    longest = _longest(offsets)
    keys, dealt, owner = np.empty(longest, np.int64), np.empty(longest, np.int64), np.empty(longest, np.int64)
    spare_keys, spare_items = np.empty(longest, np.int64), np.empty(longest, np.int64)
    load, fill = np.empty(ranks, np.int64), np.empty(ranks + 1, np.int64)
    first[0] = 0
    for call in range(len(offsets) - 1):
        start, count = offsets[call], offsets[call + 1] - offsets[call]
        call_sizes = sizes[start : start + count]
        largest = call_sizes.max() if count else 0
        for i in range(count):
            keys[i] = largest - call_sizes[i]
            dealt[i] = i
        _sort(keys, dealt, 0, count, spare_keys, spare_items)
        _deal(call_sizes, dealt[:count], load, fill, owner)
        first[call * ranks + 1 : (call + 1) * ranks + 1] = start + fill[1:]
        for i in range(count):
            place = start + fill[owner[i]]
            fill[owner[i]] += 1
            items[place] = start + dealt[i]
            sorted_tokens[place] = tokens[start + dealt[i]]
        for queue in range(call * ranks, (call + 1) * ranks):
            _sort(sorted_tokens, items, first[queue], first[queue + 1], spare_keys, spare_items)


@compiled
def _fit(budgets: Ints, low: int, tokens: int) -> int:
    """Return the first index >= `low` whose budget is >= `tokens`, len(budgets) when none is."""
    high = len(budgets)
    while low < high:
        middle = (low + high) >> 1
        if budgets[middle] < tokens:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _next_batch(tokens: Ints, start: int, stop: int, budgets: Ints, max_items: int) -> tuple[int, int, int]:
    """Return (end, tokens, budget index) of the batch from `start`; the index is len(budgets) if none fits.

    vLLM closes a batch before an item when budget(batch) + budget(item) < budget(both) and budget(item) >=
    budget(batch). Both need budget(both) > budget(batch), and the second needs an item above the next smaller
    budget, which spares most look-ups.
    """
    largest = budgets[-1]
    total = tokens[start]
    index = _fit(budgets, 0, total)
    end = start + 1
    limit = min(stop, start + max_items)
    while end < limit:
        item = tokens[end]
        both = total + item
        if both > largest:
            break
        if both > budgets[index]:
            merged = _fit(budgets, index + 1, both)
            if index == 0 or item > budgets[index - 1]:
                alone = budgets[_fit(budgets, index, item)]
                if budgets[index] + alone < budgets[merged] and alone >= budgets[index]:
                    break
            index = merged
        total = both
        end += 1
    return end, total, index


@compiled
def pack_queues(
    tokens: Ints,
    first: Ints,
    ranks: int,
    budgets: Ints,
    max_items: int,
    batch_first: Ints,
    batch_call: Ints,
    batch_rank: Ints,
    batch_budget: Ints,
    batch_tokens: Ints,
) -> int:
    """Fill one row per batch, in order; return the number of batches.

    The arrays hold a row per item at least; `batch_first` has one more, and its last used entry is the end.
    """
    batch = 0
    for queue in range(len(first) - 1):
        start, stop = first[queue], first[queue + 1]
        while start < stop:
            end, total, index = _next_batch(tokens, start, stop, budgets, max_items)
            batch_first[batch] = start
            batch_call[batch] = queue // ranks
            batch_rank[batch] = queue % ranks
            batch_budget[batch] = index if index < len(budgets) else -1
            batch_tokens[batch] = total
            batch += 1
            start = end
    batch_first[batch] = first[-1]
    return batch


@compiled
def sum_queues(
    tokens: Ints,
    frames: Ints,
    first: Ints,
    ranks: int,
    budgets: Ints,
    max_items: int,
    slots: int,
    per_budget: Ints,
    per_call: Ints,
) -> int:
    """Add up batches without storing them; return how many hold more than `slots` frames.

    `per_budget` is [budgets, 3]: replays, items, tokens. `per_call` is [calls, 4]: replays, fallbacks, budget
    tokens of the replays, tokens of the fallbacks. `frames` may be empty: then no batch is counted.
    """
    over = 0
    for queue in range(len(first) - 1):
        call = queue // ranks
        start, stop = first[queue], first[queue + 1]
        while start < stop:
            end, total, index = _next_batch(tokens, start, stop, budgets, max_items)
            if index < len(budgets):
                per_budget[index, 0] += 1
                per_budget[index, 1] += end - start
                per_budget[index, 2] += total
                per_call[call, 0] += 1
                per_call[call, 2] += budgets[index]
                if len(frames) and frames[start:end].sum() > slots:
                    over += 1
            else:
                per_call[call, 1] += 1
                per_call[call, 3] += total
            start = end
    return over
