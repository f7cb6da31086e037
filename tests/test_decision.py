"""Statistics of changed answers, against numbers worked out by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.decision import (
    benchmark_delta,
    binomial_interval,
    first_difference,
    flips,
    mcnemar_p,
    paired_accuracy,
    paired_sample_size,
    proxy_flips,
    sigmas,
    unpaired_sample_size,
)
from workbench.errors import WorkbenchError


def test_pull_request_benchmarks_in_sigma() -> None:
    # The Ernie pull request's AI2D and MMStar: 0.0016 / hypot(0.0086, 0.0085), 0.0043 / hypot(0.0088,
    # 0.0089).
    assert sigmas(0.6548, 0.0086, 0.6564, 0.0085) == pytest.approx(0.1323, abs=5e-5)
    assert sigmas(0.1241, 0.0088, 0.1284, 0.0089) == pytest.approx(0.3436, abs=5e-5)


def test_benchmark_delta_says_what_it_could_have_seen() -> None:
    result = benchmark_delta("ai2d", "exact_match", (0.6548, 0.0086), (0.6564, 0.0085), samples=3088)
    assert result.delta == pytest.approx(0.0016)
    # 2 (1 - Phi(0.1323)) = 0.8947; (1.95996 + 0.84162) * 0.0120917 = 0.03388.
    assert result.p_value == pytest.approx(0.8947, abs=5e-4)
    assert result.detectable_delta == pytest.approx(0.03388, abs=5e-6)
    # AI2D has 3,088 questions; a change of one point needs more than ten times as many.
    assert result.samples_needed is not None
    assert result.samples_needed > 10 * 3088


def test_interval_of_47_of_50() -> None:
    interval = binomial_interval(47, 50)
    assert interval.low == pytest.approx(0.8345, abs=5e-5)
    assert interval.high == pytest.approx(0.9875, abs=5e-5)


def test_interval_of_all_has_its_closed_form() -> None:
    # No failure in n: the lower end is (alpha / 2) ** (1 / n).
    interval = binomial_interval(50, 50)
    assert interval.low == pytest.approx(0.025 ** (1 / 50), abs=1e-9)
    assert interval.high == 1.0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 0.99))
def test_interval_ends_leave_exactly_half_of_alpha(count: tuple[int, int], confidence: float) -> None:
    k, n = count
    interval = binomial_interval(k, n, confidence)
    assert interval.low <= k / n <= interval.high
    tail = (1 - confidence) / 2

    def mass(p: float, ks: range) -> float:
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in ks)

    if k > 0:
        assert mass(interval.low, range(k, n + 1)) == pytest.approx(tail, abs=1e-8)
    if k < n:
        assert mass(interval.high, range(k + 1)) == pytest.approx(tail, abs=1e-8)


@pytest.mark.parametrize(
    ("only_a", "only_b", "expected"),
    [(0, 3, Fraction(1, 4)), (3, 0, Fraction(1, 4)), (1, 9, Fraction(22, 1024)), (0, 0, 1), (5, 5, 1)],
)
def test_mcnemar_exact(only_a: int, only_b: int, expected: Fraction | int) -> None:
    assert mcnemar_p(only_a, only_b) == pytest.approx(float(expected), rel=1e-12)


def test_mcnemar_of_many_pairs_does_not_overflow() -> None:
    assert mcnemar_p(30_000, 30_000) == 1.0
    assert 0 <= mcnemar_p(10_000, 50_000) < 1e-300


def test_paired_accuracy_counts_and_bounds() -> None:
    a = [True] * 40 + [True] * 2 + [False] * 1 + [False] * 7
    b = [True] * 40 + [False] * 2 + [True] * 1 + [False] * 7
    result = paired_accuracy(a, b)
    assert (result.both, result.only_a, result.only_b, result.neither) == (40, 2, 1, 7)
    assert result.delta == pytest.approx(-0.02)
    assert result.p_value == 1.0
    # Three discordant pairs bound the change by 3 of 50 either way; 1 of 3 is in [0.0084, 0.9057].
    assert result.delta_low == pytest.approx((2 * 0.0084 - 1) * 0.06, abs=2e-5)
    assert result.delta_high == pytest.approx((2 * 0.9057 - 1) * 0.06, abs=2e-5)
    assert result.samples_needed == 4707


def test_sample_sizes() -> None:
    # Connor: (1.959964 sqrt(0.06) + 0.841621 sqrt(0.06 - 0.0001))^2 / 0.0001 = 4706.98.
    assert paired_sample_size(0.01, 0.06) == 4707
    # (1.959964 sqrt(2 * 0.655 * 0.345) + 0.841621 sqrt(0.2275 + 0.2244))^2 / 0.0001 = 35,471.
    assert unpaired_sample_size(0.01, 0.65) == pytest.approx(35_471, abs=3)
    assert unpaired_sample_size(0.01, 0.995) == unpaired_sample_size(0.01, 0.005)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_first_difference_is_the_end_of_the_common_prefix(a: list[int], b: list[int]) -> None:
    at = first_difference(a, b)
    if at is None:
        assert a == b
    else:
        assert a[:at] == b[:at]
        assert a[at : at + 1] != b[at : at + 1]


def test_flips_and_margins() -> None:
    reference = np.array([[3.0, 1.0, 0.0], [1.0, 0.9, 0.0]])
    other = np.array([[3.0, 1.0, 0.0], [0.9, 1.0, 0.0]])
    changed, to_chosen, to_second = flips(reference, other)
    assert changed.tolist() == [False, True]
    assert to_chosen == pytest.approx([0.0, 0.1])
    assert to_second == pytest.approx([2.0, 0.1])


def test_proxy_flips_grow_with_the_difference() -> None:
    rng = np.random.default_rng(1)
    embeddings = rng.standard_normal((400, 32))
    noise = rng.standard_normal(embeddings.shape)
    assert proxy_flips(embeddings, embeddings).flips == 0
    small, large = (proxy_flips(embeddings, embeddings + scale * noise) for scale in (0.005, 0.5))
    assert 0 < small.flips < large.flips
    # A small difference moves only decisions that were close.
    assert max(small.flip_margins) < small.median_margin


@pytest.mark.parametrize(
    "call",
    [
        lambda: binomial_interval(5, 4),
        lambda: binomial_interval(0, 0),
        lambda: binomial_interval(1, 2, confidence=1.0),
        lambda: mcnemar_p(-1, 2),
        lambda: sigmas(0.5, math.nan, 0.5, 0.1),
        lambda: sigmas(0.5, 0.0, 0.5, 0.0),
        lambda: paired_accuracy([True], [True, False]),
        lambda: paired_accuracy([], []),
        lambda: paired_sample_size(0.1, 0.05),
        lambda: unpaired_sample_size(0.0, 0.5),
        lambda: flips(np.zeros((2, 5)), np.zeros((2, 6))),
        lambda: flips(np.full((1, 2), np.nan), np.zeros((1, 2))),
        lambda: proxy_flips(np.zeros((2, 5)), np.zeros((3, 5))),
    ],
)
def test_bad_input_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WorkbenchError):
        call()
