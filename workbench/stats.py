"""Samples to statistics: one rule for everyone, so that two tables never differ by method.

Percentiles are linearly interpolated between order statistics at rank p/100 * (n - 1): numpy's
default, and so what `vllm bench` prints. `std` divides by n, numpy's default too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import WorkbenchError

Statistic = Literal["mean", "median", "p99"]
BOOTSTRAP_DRAWS = 2_000
_CELLS_PER_BLOCK = 4_000_000  # bounds the resampling's memory to about 64 MB


@dataclass(frozen=True)
class Summary:
    """Statistics of `n` samples, in the samples' own unit.

    `p99` of fewer than 100 samples lies between the two largest: read it with `n` beside it.
    """

    mean: float
    median: float
    std: float
    p99: float
    n: int
    minimum: float
    maximum: float


@dataclass(frozen=True)
class Ratio:
    """`statistic(numerator) / statistic(denominator)` with a percentile bootstrap interval.

    `low` and `high` equal `value` when either side has one sample: there is no spread to resample,
    and `resampled` says so.
    """

    value: float
    low: float
    high: float
    confidence: float
    statistic: Statistic
    resampled: bool


def _samples(values: ArrayLike, what: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).ravel()
    if array.size == 0:
        raise WorkbenchError(f"{what} holds no samples; measure at least one repeat")
    if not np.isfinite(array).all():
        raise WorkbenchError(f"{what} holds a sample that is not a finite number; drop the failed repeat")
    return array


def summary(samples: Sequence[float] | NDArray[np.float64]) -> Summary:
    """Summarise one set of samples.

    Raises:
        WorkbenchError: no samples, or one that is NaN or infinite.
    """
    array = _samples(samples, "the timing")
    return Summary(
        mean=float(array.mean()),
        median=float(np.median(array)),
        std=float(array.std()),
        p99=float(np.percentile(array, 99)),
        n=int(array.size),
        minimum=float(array.min()),
        maximum=float(array.max()),
    )


def _statistic(array: NDArray[np.float64], statistic: Statistic) -> NDArray[np.float64]:
    """Apply `statistic` along the last axis."""
    if statistic == "mean":
        return np.asarray(array.mean(axis=-1))
    return np.asarray(np.percentile(array, 50 if statistic == "median" else 99, axis=-1))


def _resampled(
    array: NDArray[np.float64], statistic: Statistic, draws: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """Return `draws` bootstrap values of `statistic`, in blocks of bounded memory."""
    rows = max(1, _CELLS_PER_BLOCK // array.size)
    parts = []
    for start in range(0, draws, rows):
        count = min(rows, draws - start)
        parts.append(_statistic(array[random.integers(0, array.size, (count, array.size))], statistic))
    return np.concatenate(parts)


def ratio(
    numerator: Sequence[float] | NDArray[np.float64],
    denominator: Sequence[float] | NDArray[np.float64],
    statistic: Statistic = "mean",
    *,
    confidence: float = 0.95,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> Ratio:
    """Ratio of two independent samples' statistics with its percentile bootstrap interval.

    A speed-up is `ratio(baseline, candidate)`. The two sides are resampled independently, so pass
    samples of separate repeats, not pairs.

    Raises:
        WorkbenchError: a side is empty or not finite, or the denominator's statistic is zero.
    """
    top, bottom = _samples(numerator, "the numerator"), _samples(denominator, "the denominator")
    base = float(_statistic(bottom, statistic))
    if base == 0:
        raise WorkbenchError(f"the ratio's denominator has a {statistic} of zero; check the timer")
    value = float(_statistic(top, statistic)) / base
    if top.size < 2 or bottom.size < 2:
        return Ratio(value, value, value, confidence, statistic, resampled=False)
    random = np.random.default_rng(seed)
    upper = _resampled(top, statistic, draws, random)
    lower = _resampled(bottom, statistic, draws, random)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = upper / lower
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn[np.isfinite(drawn)], [tail, 1 - tail])
    return Ratio(value, float(low), float(high), confidence, statistic, resampled=True)
