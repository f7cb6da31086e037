"""What encoder calls cost: a measured profile of one GPU and model, and predictions from it.

The model is additive, every term measured on its own (`workbench.encoder.calibrate`):

    call = call_us + sum over batches (batch_us + item_us * items + replay(budget, q) + tail(tokens))

* `replay(budget, q)` is the GPU time of one graph replay. A graph always computes every row of its budget, so
  all layers but attention cost the same at any fill; attention runs over the valid sequences only and grows with
  q, the sum of squared sequence lengths in patches (of a video, each frame is a sequence): replay = base(budget) +
  slope(budget) * q. Between measured budgets both are interpolated linearly; outside them the model refuses. Where
  max items or max frames make a graph compute more tokens than its budget says, those count (`computed`).
* `tail(tokens)` is what follows a replay eagerly (Ernie's resampler), host and GPU, interpolated in tokens.
* `call_us`, `batch_us`, `item_us` are host costs, fitted to whole calls by least absolute deviations. They absorb
  overlaps of host and GPU, so `batch_us` may be negative, where a replay hides the launches of what follows it; the
  others are not.
* An item that no budget holds runs eagerly, alone; its cost is interpolated in tokens and reported apart.

The interval of a prediction is the spread of the relative residuals of the calibration calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from workbench.errors import WorkbenchError
from workbench.files import read_versioned
from workbench.models import MODELS, ModelFacts
from workbench.planner import FALLBACK, PATCHES_PER_TOKEN, Arrangement, Plan
from workbench.run import ARMS, RECORDINGS, Arm, Environment, ModelRecord, Record, Replay
from workbench.shapes import captured_shapes

SCHEMA_VERSION = 1
REWEIGHTED = 60  # steps of the fit by least absolute deviations
INTERVAL = (0.05, 0.95)  # quantiles of the calibration residuals that a prediction's interval spans

# Where a profile that ships with the workbench lies, by model, if there is one; `scripts/h200_costs.sh` makes them.
SHIPPED = {model: RECORDINGS / f"costs_h200_{model}" / "profile.json" for model in MODELS}

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Objective = Literal["mean", "p99", "gpu"]


class ReplayPoint(Record, frozen=True):
    """GPU time of one graph replay: samples at one composition (sequence lengths in patches)."""

    budget: int
    sequences: list[int]
    gpu_us: list[float]


class TailPoint(Record, frozen=True):
    """Wall and GPU time of what follows a replay, with a synchronise at both ends."""

    tokens: int
    wall_us: list[float]


class EagerPoint(Record, frozen=True):
    """Wall time of an eager arm on one item."""

    arm: Arm
    tokens: int
    wall_us: list[float]


class BatchShape(Record, frozen=True):
    """What the cost of one replay depends on.

    `budget` is the tokens that its graph computes, `squares` the sum of squared sequence lengths in patches.
    """

    budget: int
    items: int
    tokens: int
    squares: int


class CallPoint(Record, frozen=True):
    """One calibration call that only replays: until its outputs are there, and until vLLM's function returns."""

    batches: list[BatchShape]
    wall_us: list[float]
    host_us: list[float]


class MemoryPoint(Record, frozen=True):
    """Memory (None without CUDA) and time of one capture; `first` of its pool, which holds the activations."""

    budget: int
    first: bool
    seconds: float
    bytes: int | None


class FramesPoint(Record, frozen=True):
    """What max frames does to a graph of videos, captured alone: its size, its capture, one replay of a full video.

    Attributes:
        budget, max_items, max_frames: of the graph.
        computed: tokens that it computes, whatever it holds.
        sequences: of the video, in patches: one a frame.
        seconds, bytes: of the capture; no memory without CUDA.
        gpu_us: samples of the replay.
    """

    budget: int
    max_items: int
    max_frames: int
    computed: int
    sequences: list[int]
    seconds: float
    bytes: int | None
    gpu_us: list[float]


@dataclass(frozen=True)
class HostCosts:
    """Fitted host terms in microseconds and the relative residuals (measured / predicted - 1) of the fit."""

    call_us: float
    batch_us: float
    item_us: float
    residual_low: float
    residual_high: float
    residual_median: float


class CostProfile(Record, frozen=True):
    """Everything measured in one `workbench calibrate`; `CostModel` fits its coefficients to it."""

    schema_version: int
    workbench: str
    created: str
    replay_kind: Replay
    environment: Environment
    model: ModelRecord
    replays: list[ReplayPoint]
    tails: list[TailPoint]
    eager: list[EagerPoint]
    calls: list[CallPoint]
    captures: list[MemoryPoint]
    seed: int
    frames: list[FramesPoint] = []  # of a model with graphs for videos

    @property
    def title(self) -> str:
        """Model and GPU in words."""
        gpu = self.environment.gpus[0].name if self.environment.gpus else self.environment.cpu
        return f"{self.model.key} on {gpu}"


def read_profile(path: Path, model: str | None = None, gpu: str | None = None) -> CostProfile:
    """Read a profile; refuse one of another model or GPU when those are given.

    Raises:
        WorkbenchError: not a profile, another schema version, or measured on something else.
    """
    profile = read_versioned(path, CostProfile, SCHEMA_VERSION, "so calibrate again")
    if model is not None and profile.model.key != model:
        raise WorkbenchError(
            f"{path} was measured for {profile.model.key}, not {model}; calibrate for {model} (only `workbench "
            "advise` takes it all the same, with --any-profile)"
        )
    measured = profile.environment.gpus[0].name if profile.environment.gpus else None
    if gpu is not None and measured != gpu:
        raise WorkbenchError(
            f"{path} was measured on {measured or 'a machine without a GPU'}, not {gpu}; calibrate here, or pass "
            "--any-profile"
        )
    return profile


def default_profile(model: str) -> Path:
    """Return the profile that ships with the workbench for `model`.

    Raises:
        WorkbenchError: none ships for it.
    """
    path = SHIPPED.get(model)
    if path is None or not path.is_file():
        raise WorkbenchError(
            f"no cost profile of {model} ships with the workbench; measure one on the GPU that serves with `workbench "
            f"calibrate --model {model} --out FILE`, and pass it as --profile"
        )
    return path


def choose_profile(model: str, path: Path | None = None, *, any_profile: bool = False) -> CostProfile:
    """Read the profile at `path`, or the one that ships for `model`.

    A profile given by path must be of this machine's GPU, where it has one; the one that ships prices a server,
    wherever it is read.

    Args:
        any_profile: accept a profile of another model or GPU.

    Raises:
        WorkbenchError: as `read_profile` and `default_profile`.
    """
    if any_profile:
        return read_profile(path or default_profile(model))
    if path is None:
        return read_profile(default_profile(model), model)
    from workbench.environment import gpus

    here = {gpu.name for gpu in gpus()}
    return read_profile(path, model, next(iter(here)) if len(here) == 1 else None)


@dataclass(frozen=True)
class ReplayModel:
    """GPU time of a replay, microseconds: base(budget) + slope(budget) * squares.

    Attributes:
        budgets: [K] measured budgets, ascending.
        base: [K] microseconds.
        slope: [K] microseconds per squared patch.
    """

    budgets: Ints
    base: Floats
    slope: Floats

    @classmethod
    def fit(cls, points: list[ReplayPoint]) -> "ReplayModel":
        """Least squares of the medians, budget by budget; one composition alone gives slope 0."""
        budgets = sorted({point.budget for point in points})
        base, slope = [], []
        for budget in budgets:
            here = [point for point in points if point.budget == budget]
            q = np.array([sum(n * n for n in point.sequences) for point in here], dtype=np.float64)
            times = np.array([np.median(point.gpu_us) for point in here])
            if len(set(q)) > 1:
                slope_here, base_here = np.polyfit(q, times, 1)
                slope_here = max(float(slope_here), 0.0)
                base_here = float((times - slope_here * q).mean())
            else:
                slope_here, base_here = 0.0, float(times.mean())
            base.append(base_here)
            slope.append(slope_here)
        return cls(np.array(budgets, dtype=np.int64), significant(base), significant(slope))

    def check(self, budgets: npt.ArrayLike) -> None:
        """Refuse budgets outside the measured range: nothing is extrapolated.

        Raises:
            WorkbenchError: names the budget and the range.
        """
        low, high = int(self.budgets[0]), int(self.budgets[-1])
        outside = [int(b) for b in np.atleast_1d(np.asarray(budgets)) if not low <= b <= high]
        if outside:
            raise WorkbenchError(
                f"the cost profile was measured for budgets {low} to {high}, not {outside[0]}; use budgets in "
                "that range or calibrate with more"
            )

    def time_us(
        self, budgets: npt.ArrayLike, squares: npt.ArrayLike, index: npt.NDArray[np.int64] | None = None
    ) -> Floats:
        """GPU microseconds of replays of `budgets` with `squares` (both broadcast).

        Args:
            index: replays of `budgets[index]` instead: millions of them share a few budgets.
        """
        wanted = np.asarray(budgets, dtype=np.float64)
        base = np.interp(wanted, self.budgets, self.base)
        slope = np.interp(wanted, self.budgets, self.slope)
        if index is not None:
            base, slope = base[index], slope[index]
        return np.asarray(base + slope * np.asarray(squares, dtype=np.float64))


@dataclass(frozen=True)
class CallCosts:
    """Prediction of every call of a plan, microseconds of wall time.

    Attributes:
        wall_us: [C] calls in the workload's order; an empty call costs 0.
        gpu_us: [C] replay time alone.
        replays_only: [C] False where a fallback is in it.
    """

    wall_us: Floats
    gpu_us: Floats
    replays_only: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Prediction:
    """Statistics of the predicted calls, microseconds; `low` and `high` bound the mean by the residuals.

    `fallback_calls` counts the calls with an eager fallback; their time is in the statistics when the
    profile knows the eager arm, and is less certain than the interval says.
    """

    calls: int
    mean_us: float
    median_us: float
    p99_us: float
    low_us: float
    high_us: float
    gpu_mean_us: float
    fallback_calls: int


class CostModel:
    """Predicts calls from a profile."""

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self.replay = ReplayModel.fit(profile.replays)
        self._tail_tokens, self._tail_us = _medians(profile.tails)
        self._eager = {arm: _medians([p for p in profile.eager if p.arm == arm]) for arm in ARMS}

    @cached_property
    def host(self) -> HostCosts:
        """The host terms.

        Raises:
            WorkbenchError: the profile's calls cannot tell them apart.
        """
        return fit_host(self.profile.calls, self.profile.replays, self.profile.tails)

    def tail_us(self, tokens: npt.ArrayLike) -> Floats:
        """Wall microseconds of what follows a replay that holds `tokens`; the last slope goes on beyond."""
        return _extended(np.asarray(tokens, dtype=np.float64), self._tail_tokens, self._tail_us)

    def eager_us(self, tokens: npt.ArrayLike, arm: Arm = "eager_fallback") -> Floats:
        """Wall microseconds of an eager arm on one item; the last slope goes on beyond.

        Raises:
            WorkbenchError: the profile measured no eager item.
        """
        known, values = self._eager[arm]
        if not known.size:
            raise WorkbenchError("the cost profile has no eager times, so fallbacks cannot be priced; calibrate again")
        return _extended(np.asarray(tokens, dtype=np.float64), known, values)

    def served_us(self, tokens: npt.ArrayLike, squares: npt.ArrayLike, items: npt.ArrayLike) -> Floats:
        """Wall microseconds of calls that run eagerly as served (arrays broadcast): launches or GPU work, whichever is
        longer.

        Launches are those of the smallest item that was measured, and `item_us` for each further item. GPU work is a
        replay's without padding, and what follows it; beyond the largest budget its base goes on with its last slope.

        Args:
            tokens, squares, items: of each call; squares of sequence lengths in patches.

        Raises:
            WorkbenchError: the profile measured no eager item.
        """
        rows = np.asarray(tokens, dtype=np.float64)
        known, _ = self._eager["eager_served"]
        launches = self.eager_us(known[:1], "eager_served") + self.host.item_us * (np.asarray(items, float) - 1)
        base = _extended(rows, self.replay.budgets.astype(np.float64), self.replay.base)
        slope = np.interp(rows, self.replay.budgets, self.replay.slope)
        return np.maximum(launches, base + slope * np.asarray(squares, dtype=np.float64) + self.tail_us(rows))

    def batch_us(
        self, budget: npt.ArrayLike, items: npt.ArrayLike, tokens: npt.ArrayLike, squares: npt.ArrayLike
    ) -> Floats:
        """Wall microseconds that one replayed batch adds to its call (arrays broadcast)."""
        host = self.host.batch_us + self.host.item_us * np.asarray(items, dtype=np.float64)
        return np.asarray(host + self.replay.time_us(budget, squares) + self.tail_us(tokens))

    def call_costs(self, plan: Plan) -> CallCosts:
        """Price every call of `plan` (one data-parallel rank).

        Raises:
            WorkbenchError: a budget outside the profile, or a plan over several ranks.
        """
        arrangement = plan.arrangement
        if arrangement.dp != 1:
            raise WorkbenchError("costs are predicted for one GPU; plan with --dp 1")
        calls = arrangement.calls
        wall, gpu = np.zeros(calls), np.zeros(calls)
        replays_only = np.ones(calls, dtype=bool)
        if len(plan):
            replayed = plan.budget_index != FALLBACK
            budgets = np.asarray(plan.resolved.budgets, dtype=np.int64)
            used = np.bincount(plan.budget_index[replayed], minlength=len(budgets)) > 0
            self.replay.check(budgets[used])
            squares = np.add.reduceat(sequence_squares(arrangement), plan.first[:-1])
            replay = self.replay.time_us(budgets, squares, plan.budget_index)
            tail = _for_each(self.tail_us, plan.tokens)
            batch = self.host.batch_us + self.host.item_us * plan.items + replay + tail
            if not replayed.all():
                replay = np.where(replayed, replay, 0.0)
                batch = np.where(replayed, batch, self.eager_us(plan.tokens))
                replays_only[plan.call[~replayed]] = False
            wall += np.bincount(plan.call, weights=batch, minlength=calls)
            gpu += np.bincount(plan.call, weights=replay, minlength=calls)
            called = np.zeros(calls, dtype=bool)
            called[plan.call] = True
            wall[called] += self.host.call_us
        return CallCosts(wall, gpu, replays_only)

    def predict(self, plan: Plan, costs: CallCosts | None = None) -> Prediction:
        """Statistics of the calls of `plan`; empty calls are left out.

        Args:
            costs: of its calls, where they are known.

        Raises:
            WorkbenchError: no call holds an item, or a budget is outside the profile.
        """
        costs = costs or self.call_costs(plan)
        busy = np.diff(plan.arrangement.offsets) > 0
        if not busy.any():
            raise WorkbenchError("the workload has no item, so there is nothing to predict; give calls with items")
        wall = costs.wall_us[busy]
        mean = float(wall.mean())
        return Prediction(
            calls=int(busy.sum()),
            mean_us=mean,
            median_us=float(np.median(wall)),
            p99_us=float(np.percentile(wall, 99)),
            low_us=mean * (1 + self.host.residual_low),
            high_us=mean * (1 + self.host.residual_high),
            gpu_mean_us=float(costs.gpu_us[busy].mean()),
            fallback_calls=int((~costs.replays_only[busy]).sum()),
        )

    def capture_seconds(self, budgets: npt.ArrayLike) -> float:
        """Seconds to capture graphs of `budgets`; errors as `seconds_per_capture`."""
        return float(self.seconds_per_capture(budgets).sum())

    def capture_bytes(self, budgets: npt.ArrayLike) -> int:
        """Memory that graphs of `budgets` take; errors as `bytes_per_capture`."""
        return int(self.bytes_per_capture(budgets).sum())

    def seconds_per_capture(self, budgets: npt.ArrayLike) -> Floats:
        """Seconds to capture a graph of each budget, interpolated between the captures measured.

        Raises:
            WorkbenchError: the profile has none.
        """
        points = sorted((p for p in self.profile.captures if not p.first), key=lambda point: point.budget)
        if not points:
            raise WorkbenchError("the cost profile has no capture times; calibrate again")
        known = np.array([p.budget for p in points], dtype=np.float64)
        seconds = np.array([p.seconds for p in points])
        return np.asarray(np.interp(np.asarray(budgets, dtype=np.float64), known, seconds))

    def bytes_per_capture(self, budgets: npt.ArrayLike) -> Floats:
        """Memory that each graph takes: the largest, captured first, holds the activations, the others reuse its pool.

        Raises:
            WorkbenchError: the profile holds no memory (a run without CUDA).
        """
        first, later = (_captured(self.profile.captures, first=which) for which in (True, False))
        if not first[0].size or not later[0].size:
            raise WorkbenchError("the cost profile has no capture memory; calibrate on a GPU")
        wanted = np.asarray(budgets, dtype=np.float64)
        taken = _extended(wanted, *later)
        if wanted.size:
            largest = int(wanted.argmax())
            taken[largest] = _extended(wanted[largest : largest + 1], *first)[0]
        return taken


def _captured(points: Sequence[MemoryPoint], *, first: bool) -> tuple[Floats, Floats]:
    """Budgets, ascending, and bytes of the captures whose memory is known."""
    known = sorted((p.budget, p.bytes) for p in points if p.first == first and p.bytes is not None)
    return np.array([budget for budget, _ in known], np.float64), np.array([taken for _, taken in known], np.float64)


def sequence_squares(arrangement: Arrangement) -> Floats:
    """[N] sum of squared attention sequence lengths of each item, in patches, in packing order.

    An image is one sequence of 4 patches per token; a video has one sequence per frame: t * (patches / t)^2.
    """
    patches = arrangement.tokens.astype(np.float64) * PATCHES_PER_TOKEN
    squares = patches * patches
    return squares if arrangement.frames is None else np.asarray(squares / np.maximum(arrangement.frames, 1))


def computed(facts: ModelFacts, plan: Plan) -> Plan:
    """The plan with each graph's budget replaced by the tokens that it computes, which is what a replay costs."""
    tokens = tuple(capture.capacity for capture in captured_shapes(facts, plan.resolved))
    return replace(plan, resolved=replace(plan.resolved, budgets=tokens))


def fit_host(calls: list[CallPoint], replays: list[ReplayPoint], tails: list[TailPoint]) -> HostCosts:
    """Fit the host terms to the mean times of whole calls by least absolute relative errors.

    To means, because means are predicted: a busy host makes single samples longer and none shorter, so medians would
    come out a percent or two below.

    Raises:
        WorkbenchError: fewer calls than terms, or calls that cannot tell the terms apart.
    """
    replay = ReplayModel.fit(replays)
    tail_tokens, tail_us = _medians(tails)
    rows, known, measured = [], [], []
    for call in calls:
        rows.append((1.0, float(len(call.batches)), float(sum(batch.items for batch in call.batches))))
        known.append(
            sum(
                float(replay.time_us(batch.budget, batch.squares))
                + float(_extended(np.array([batch.tokens], float), tail_tokens, tail_us)[0])
                for batch in call.batches
            )
        )
        measured.append(float(np.mean(call.wall_us)))
    matrix, target = np.array(rows), np.array(measured)
    if len(calls) < 4 or np.linalg.matrix_rank(matrix) < 3:
        raise WorkbenchError(
            "the calibration calls cannot tell call, batch and item costs apart; calibrate with calls of several "
            "batches and item counts"
        )
    solution = significant(_least_deviations(matrix / target[:, None], (target - np.array(known)) / target, free=1))
    residual = target / (matrix @ solution + np.array(known)) - 1
    low, high = np.quantile(residual, INTERVAL)
    return HostCosts(
        call_us=float(solution[0]),
        batch_us=float(solution[1]),
        item_us=float(solution[2]),
        residual_low=float(low),
        residual_high=float(high),
        residual_median=float(np.median(np.abs(residual))),
    )


def significant(values: npt.ArrayLike, digits: int = 9) -> Floats:
    """Round to significant digits, so that what follows is equal on machines whose last bits of a fit differ."""
    exact = np.asarray(values, dtype=np.float64)
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(exact), where=exact != 0, out=np.zeros_like(exact))))
    return np.asarray(np.round(exact * scale) / scale)


def _least_deviations(matrix: Floats, target: Floats, free: int) -> Floats:
    """Least absolute deviations, by reweighted least squares; terms but column `free` are not negative.

    A busy host makes single calls slower and none faster, so squares would follow the outliers. A negative term is set
    to 0, the most negative one first.
    """
    kept = list(range(matrix.shape[1]))
    while True:
        weights = np.ones(len(target))
        for _ in range(REWEIGHTED):
            root = np.sqrt(weights)
            found = np.linalg.lstsq(matrix[:, kept] * root[:, None], target * root, rcond=None)[0]
            weights = 1 / np.maximum(np.abs(matrix[:, kept] @ found - target), 1e-4)
        solution = np.zeros(matrix.shape[1])
        solution[kept] = found
        worst = min((term for term in kept if term != free), key=lambda term: solution[term], default=free)
        if worst == free or solution[worst] >= 0:
            return solution
        kept.remove(worst)


def _medians(points: Sequence[TailPoint | EagerPoint]) -> tuple[Floats, Floats]:
    """Tokens, ascending, and the median wall time at each."""
    ordered = sorted(points, key=lambda point: point.tokens)
    tokens = np.array([point.tokens for point in ordered], dtype=np.float64)
    return tokens, np.array([np.median(point.wall_us) for point in ordered])


def _for_each(function: Callable[[Floats], Floats], numbers: npt.NDArray[np.int64]) -> Floats:
    """`function` of whole numbers >= 0, called once for each number up to the largest where that is less work."""
    most = int(numbers.max()) + 1
    wanted = np.arange(most) if most < len(numbers) else numbers
    values = function(wanted.astype(np.float64))
    return values[numbers] if most < len(numbers) else values


def _extended(wanted: Floats, known: Floats, values: Floats) -> Floats:
    """Linear interpolation that goes on with the last segment's slope beyond the last point."""
    if not known.size:
        return np.zeros_like(wanted)
    inside = np.interp(wanted, known, values)
    if known.size < 2:
        return np.asarray(inside)
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    return np.asarray(np.where(wanted > known[-1], values[-1] + slope * (wanted - known[-1]), inside))
