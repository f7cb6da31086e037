"""Which replays vLLM makes of a workload: its packing, item for item, and the ledger of every batch.

The rules are those of `EncoderCudaGraphManager._execute_local` and `_dp_shard` in vLLM 0.33.0 (0.32.0 has
the same). A call's items are sorted by output tokens, ascending and stable, and packed greedily: a batch is
closed when it has `max_items`, when the next item would exceed the largest budget, or when a batch of its own
for the next item costs fewer budget tokens than one for both. A batch replays the smallest budget that holds
it. An item above the largest budget runs alone and eagerly. The packer never looks at frames; the ledger
counts them.

Two steps, so that a sweep over configurations pays for the sorting once:

    arrangement = arrange(tokens, offsets)         # sorted queues; knows no configuration
    ledger = pack(arrangement, resolved)           # every batch, as columns
    totals = plan_totals(arrangement, resolved)    # sums and one row per call, several times faster
    map_totals(arrangement, many, reduce)          # the same for many configurations, on all cores

The loops are compiled (`workbench.packing`); their memory is linear in the items.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.budgets import MAX_TOKENS, Resolved
from workbench.errors import WorkbenchError
from workbench.files import read_json

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
T = TypeVar("T")

# Patches of a vision encoder per output token (2 x 2 merge) when no input sizes are given.
PATCHES_PER_TOKEN = 4
FALLBACK = -1
# A file of calls may be this large; 1 GiB is about 200 million items.
CALLS_BYTES = 2**30


@dataclass(frozen=True)
class Arrangement:
    """Items in the order in which vLLM packs them: one queue per call and data-parallel rank.

    Queue q is `item[first[q]:first[q + 1]]`; with `dp` ranks, call c has queues c * dp to c * dp + dp - 1.

    Attributes:
        item: [N] index of each item in the workload's columns.
        tokens: [N] output tokens, ascending within a queue.
        frames: [N] attention sequences of each item (1 for an image, the grid's t for a video); None: 1 each.
        first: [queues + 1] where each queue starts.
        offsets: [calls + 1] where each call starts in the workload's columns (and in these).
        dp: data-parallel ranks.
    """

    item: Ints
    tokens: Ints
    frames: Ints | None
    first: Ints
    offsets: Ints
    dp: int

    @property
    def calls(self) -> int:
        """Number of calls, empty ones included."""
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Plan:
    """Every batch of a workload under one configuration, in execution order (call by call, rank by rank).

    Batch b holds the items `arrangement.item[first[b]:first[b + 1]]`.

    Attributes:
        arrangement: the items in packing order.
        resolved: the configuration.
        first: [B + 1] where each batch starts in the packing order.
        call, rank: [B] whose batch it is.
        budget_index: [B] index into `resolved.budgets`, FALLBACK (-1) for an eager fallback.
        tokens: [B] output tokens.
    """

    arrangement: Arrangement
    resolved: Resolved
    first: Ints
    call: Ints
    rank: Ints
    budget_index: Ints
    tokens: Ints

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.call)

    @property
    def items(self) -> Ints:
        """[B] items in each batch."""
        return np.diff(self.first)

    @property
    def fallback(self) -> npt.NDArray[np.bool_]:
        """[B] whether the batch runs eagerly."""
        return np.equal(self.budget_index, FALLBACK)

    @property
    def budget(self) -> Ints:
        """[B] budget that the batch replays, FALLBACK (-1) for an eager fallback."""
        return np.array([*self.resolved.budgets, FALLBACK], np.int64)[self.budget_index]

    @property
    def fill(self) -> Floats:
        """[B] tokens / budget of each replay, NaN for an eager fallback."""
        return np.where(self.fallback, np.nan, self.tokens / np.where(self.fallback, 1, self.budget))

    @property
    def frames(self) -> Ints:
        """[B] attention sequences in each batch."""
        frames = self.arrangement.frames
        return self.items if frames is None else self.sum_per_batch(frames)

    @property
    def over_frames(self) -> npt.NDArray[np.bool_]:
        """[B] replays with more sequences than the captured `cu_seqlens` holds: vLLM's copy raises (D4)."""
        return np.logical_not(self.fallback) & (self.frames > self.resolved.sequence_slots)

    def sum_per_batch(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return [B] sums over each batch of `values`, [N] in packing order (`column[arrangement.item]`)."""
        if len(self) == 0:
            return np.zeros(0, values.dtype)
        return np.add.reduceat(values, self.first[:-1])

    def reason(self, batch: int) -> str | None:
        """Return why a batch runs eagerly; None for a replay."""
        if self.budget_index[batch] != FALLBACK:
            return None
        return f"{self.tokens[batch]} tokens exceed the largest budget, {self.resolved.budgets[-1]}"

    def record(self, *, ranked: bool | None = None) -> dict[str, Any]:
        """Return the plan as plain data, the JSON of `workbench plan`; batches have frames where items have.

        Args:
            ranked: name each batch's rank; None: when there are several.
        """
        ranked = self.arrangement.dp > 1 if ranked is None else ranked
        calls: list[dict[str, Any]] = [{"batches": []} for _ in range(self.arrangement.calls)]
        in_call = self.arrangement.item - np.repeat(self.arrangement.offsets[:-1], np.diff(self.arrangement.offsets))
        columns = (
            self.call,
            self.rank,
            self.first[:-1],
            self.first[1:],
            self.tokens,
            self.budget,
            self.frames,
            self.over_frames,
        )
        for index, (call, rank, first, end, tokens, budget, frames, over) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            batch: dict[str, Any] = {"rank": rank} if ranked else {}
            batch |= {"items": in_call[first:end].tolist(), "tokens": tokens}
            batch["budget"] = None if budget == FALLBACK else budget
            if self.arrangement.frames is not None:
                batch["frames"] = frames
            if budget == FALLBACK:
                batch["reason"] = self.reason(index)
            if over:
                batch["over_frames"] = True
            calls[call]["batches"].append(batch)
        return {
            "budgets": list(self.resolved.budgets),
            "max_items": self.resolved.max_items,
            "max_frames": self.resolved.max_frames,
            "calls": calls,
            "totals": plan_totals(self.arrangement, self.resolved).record(),
        }


@dataclass(frozen=True)
class PlanTotals:
    """Sums of a plan, without its batches. Tokens and waste cover replays only.

    Attributes:
        budgets: the resolved budgets; of a repeated one the first is used.
        replays_per_budget, items_per_budget, tokens_per_budget: [budgets].
        call_replays, call_fallbacks: [calls] batches of each call (of all ranks).
        call_budget_tokens: [calls] sum of the budgets replayed.
        call_fallback_tokens: [calls] tokens of the items that ran eagerly.
        over_frames: replays with more sequences than the captured buffer holds (D4).
    """

    budgets: tuple[int, ...]
    replays_per_budget: Ints
    items_per_budget: Ints
    tokens_per_budget: Ints
    call_replays: Ints
    call_fallbacks: Ints
    call_budget_tokens: Ints
    call_fallback_tokens: Ints
    over_frames: int

    @property
    def replays(self) -> int:
        """Batches that replay a graph."""
        return int(self.replays_per_budget.sum())

    @property
    def fallbacks(self) -> int:
        """Batches that run eagerly; each holds one item."""
        return int(self.call_fallbacks.sum())

    @property
    def tokens(self) -> int:
        """Valid tokens in replays."""
        return int(self.tokens_per_budget.sum())

    @property
    def budget_tokens(self) -> int:
        """Sum of the budgets replayed."""
        return int(self.call_budget_tokens.sum())

    @property
    def fallback_tokens(self) -> int:
        """Tokens of the items that ran eagerly."""
        return int(self.call_fallback_tokens.sum())

    @property
    def waste(self) -> float | None:
        """Padding waste, sum(budget - tokens) / sum(budget) over replays; None without a replay."""
        budget_tokens = self.budget_tokens
        return (budget_tokens - self.tokens) / budget_tokens if budget_tokens else None

    def record(self) -> dict[str, Any]:
        """Return the sums as plain data."""
        return {
            "replays": self.replays,
            "fallbacks": self.fallbacks,
            "fallback_items": self.fallbacks,
            "fallback_tokens": self.fallback_tokens,
            "tokens": self.tokens,
            "budget_tokens": self.budget_tokens,
            "waste": self.waste,
            "over_frames": self.over_frames,
        }


def arrange(
    tokens: npt.ArrayLike,
    offsets: npt.ArrayLike,
    frames: npt.ArrayLike | None = None,
    dp: int = 1,
    input_sizes: npt.ArrayLike | None = None,
) -> Arrangement:
    """Return the items in packing order; no configuration enters.

    Args:
        tokens: [N] output tokens of each item, call after call.
        offsets: [calls + 1] where each call starts in `tokens`; the last entry is N.
        frames: [N] attention sequences of each item; None: 1 each, as for images.
        dp: data-parallel ranks (`mm_encoder_tp_mode="data"` with this tensor-parallel size).
        input_sizes: [N] patches of each item, by which ranks are balanced; None: 4 per token.

    Raises:
        WorkbenchError: a count that is not positive, columns of different lengths, or no call.
    """
    from workbench import packing

    starts = _column(offsets, "offsets")
    counts = _column(tokens, "tokens")
    if len(starts) < 2:
        raise WorkbenchError("the workload has no encoder call; give at least one")
    if starts[0] != 0 or starts[-1] != len(counts) or (starts[1:] < starts[:-1]).any():
        raise WorkbenchError(f"the calls' offsets do not ascend from 0 to the number of items, {len(counts)}")
    _check_counts(counts, starts, "tokens")
    sequences = None if frames is None else _matching(frames, counts, starts, "frames")
    if dp < 1:
        raise WorkbenchError(f"{dp} data-parallel ranks cannot share a call; use 1 or more")
    sorted_tokens, item = np.empty_like(counts), np.empty_like(counts)
    if dp == 1:
        first = starts
        packing.sort_calls(counts, starts, sorted_tokens, item)
    else:
        first = np.empty((len(starts) - 1) * dp + 1, np.int64)
        sizes = (
            counts * PATCHES_PER_TOKEN if input_sizes is None else _matching(input_sizes, counts, starts, "input size")
        )
        packing.share_calls(counts, sizes, starts, dp, sorted_tokens, item, first)
    return Arrangement(item, sorted_tokens, None if sequences is None else sequences[item], first, starts, dp)


def pack(arrangement: Arrangement, resolved: Resolved) -> Plan:
    """Return every batch that vLLM makes of `arrangement` under `resolved`."""
    from workbench import packing

    size = len(arrangement.tokens)
    columns = (np.empty(size + 1, np.int64), *(np.empty(size, np.int64) for _ in range(4)))
    batches = packing.pack_queues(
        arrangement.tokens,
        arrangement.first,
        arrangement.dp,
        np.array(resolved.budgets, np.int64),
        resolved.max_items,
        *columns,
    )
    first, call, rank, budget_index, tokens = (
        # A copy gives the unused rows back.
        column[:rows].copy() if 2 * rows < size else column[:rows]
        for column, rows in zip(columns, (batches + 1, *(batches,) * 4), strict=True)
    )
    return Plan(arrangement, resolved, first, call, rank, budget_index, tokens)


def plan(
    tokens: npt.ArrayLike,
    offsets: npt.ArrayLike,
    resolved: Resolved,
    frames: npt.ArrayLike | None = None,
    dp: int = 1,
    input_sizes: npt.ArrayLike | None = None,
) -> Plan:
    """Arrange and pack in one step; arguments and errors as in `arrange`."""
    return pack(arrange(tokens, offsets, frames, dp, input_sizes), resolved)


def plan_totals(arrangement: Arrangement, resolved: Resolved) -> PlanTotals:
    """Return the sums of `pack(arrangement, resolved)` without making its batches."""
    from workbench import packing

    per_budget = np.zeros((len(resolved.budgets), 3), np.int64)
    per_call = np.zeros((arrangement.calls, 4), np.int64)
    frames = arrangement.frames
    over = packing.sum_queues(
        arrangement.tokens,
        np.zeros(0, np.int64) if frames is None else frames,
        arrangement.first,
        arrangement.dp,
        np.array(resolved.budgets, np.int64),
        resolved.max_items,
        resolved.sequence_slots,
        per_budget,
        per_call,
    )
    return PlanTotals(
        budgets=resolved.budgets,
        replays_per_budget=per_budget[:, 0],
        items_per_budget=per_budget[:, 1],
        tokens_per_budget=per_budget[:, 2],
        call_replays=per_call[:, 0],
        call_fallbacks=per_call[:, 1],
        call_budget_tokens=per_call[:, 2],
        call_fallback_tokens=per_call[:, 3],
        over_frames=over,
    )


def map_totals(
    arrangement: Arrangement,
    configurations: Sequence[Resolved],
    reduce: Callable[[PlanTotals], T],
    workers: int | None = None,
) -> list[T]:
    """Return `reduce(plan_totals(arrangement, configuration))` of every configuration, in order.

    The compiled loop runs free of the interpreter's lock, one configuration per core. `reduce` keeps what is wanted:
    the rows per call of 500 configurations of ten million calls would take 160 GB.

    Args:
        workers: how many at once; None: as many as there are cores for this process. Each needs 32 bytes a call.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux: what a container or taskset leaves
    with ThreadPoolExecutor(workers or (len(affinity(0)) if affinity else os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda one: reduce(plan_totals(arrangement, one)), configurations))


def _column(values: npt.ArrayLike, name: str) -> Ints:
    column = np.asarray(values)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise WorkbenchError(f"{name} must be a list of whole numbers")
    return np.ascontiguousarray(column, np.int64)


def _check_counts(counts: Ints, starts: Ints, name: str) -> None:
    if counts.size and not 0 < counts.min() <= counts.max() <= MAX_TOKENS:
        index = int(((counts <= 0) | (counts > MAX_TOKENS)).argmax())
        call = int(np.searchsorted(starts, index, "right")) - 1
        raise WorkbenchError(
            f"item {index - starts[call]} of call {call} has {counts[index]} {name}; "
            f"give numbers from 1 to {MAX_TOKENS}"
        )


def _matching(values: npt.ArrayLike, counts: Ints, starts: Ints, name: str) -> Ints:
    column = _column(values, name)
    if len(column) != len(counts):
        raise WorkbenchError(f"there are {len(column)} {name} for {len(counts)} items; give one for each item")
    _check_counts(column, starts, name)
    return column


def read_calls(path: Path) -> tuple[Ints, Ints]:
    """Read a JSON list of calls, each a list of output-token counts, as (tokens, offsets) for `plan`.

    Raises:
        WorkbenchError: the file is missing, no such JSON, or a number has more than 64 bits.
    """
    calls = read_json(path, list[list[int]], limit=CALLS_BYTES)
    offsets = np.zeros(len(calls) + 1, np.int64)
    np.cumsum([len(call) for call in calls], out=offsets[1:])
    try:
        tokens = np.fromiter(itertools.chain.from_iterable(calls), np.int64, int(offsets[-1]))
    except OverflowError:
        raise WorkbenchError(f"{path} has a number of more than 64 bits; counts go up to {MAX_TOKENS}") from None
    return tokens, offsets


def read_like(path: Path, offsets: Ints) -> Ints:
    """Read a file of the same shape as the calls: one number for each item.

    Raises:
        WorkbenchError: as `read_calls`, or calls of other lengths.
    """
    values, starts = read_calls(path)
    if not np.array_equal(starts, offsets):
        raise WorkbenchError(f"{path} does not have the calls' lengths; give one number for each item of each call")
    return values
