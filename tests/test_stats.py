"""Statistics agree with independent formulas, and refuse what has no answer."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.stats import ratio, summary

samples = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60)


def percentile(values: list[float], p: float) -> float:
    """Linear interpolation between order statistics, written out."""
    ordered = sorted(values)
    rank = p / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@settings(max_examples=60, deadline=None)
@given(samples)
def test_summary_equals_written_out_formulas(values: list[float]) -> None:
    got = summary(values)
    assert got.n == len(values)
    assert got.mean == pytest.approx(statistics.fmean(values))
    assert got.median == pytest.approx(statistics.median(values))
    assert got.std == pytest.approx(statistics.pstdev(values), abs=1e-6 * max(values))
    assert got.p99 == pytest.approx(percentile(values, 99))
    assert (got.minimum, got.maximum) == (min(values), max(values))


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_samples_without_an_answer_are_refused(bad: list[float]) -> None:
    with pytest.raises(WorkbenchError):
        summary(bad)
    with pytest.raises(WorkbenchError):
        ratio(bad, [1.0])


def test_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    covered = 0
    for trial in range(200):
        got = ratio(random.normal(30, 3, 40), random.normal(10, 1, 40), draws=400, seed=trial)
        covered += got.low <= 3.0 <= got.high
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize("statistic", ["mean", "median", "p99"])
def test_ratio_is_deterministic_and_inside_its_interval(statistic: str) -> None:
    top, bottom = [20.0, 21.0, 22.0, 30.0], [5.0, 5.1, 5.2, 5.3]
    first = ratio(top, bottom, statistic)  # type: ignore[arg-type]
    assert first == ratio(top, bottom, statistic)  # type: ignore[arg-type]
    assert first.low <= first.value <= first.high
    assert first.resampled


def test_one_sample_gives_no_interval() -> None:
    got = ratio([10.0], [5.0, 5.0])
    assert (got.value, got.low, got.high, got.resampled) == (2.0, 2.0, 2.0, False)


def test_zero_denominator_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="zero"):
        ratio([1.0, 2.0], [0.0, 0.0])
