"""Did a quantity change between two sets of samples? Tests, intervals and one verdict.

* Typical value: two-sided Mann-Whitney test on the ranks, ties corrected; by permutation where samples
  are few, by the normal limit otherwise. Samples of one run follow each other, so the statistic is
  shrunk by sqrt((1 - r) / (1 + r)), r the lag-1 autocorrelation of the ranks (never below 0): n samples
  that drift together say less than n independent ones.
* P99: permutation test of the difference of the two P99. Below 100 samples a side it is refused: the
  P99 would be the largest sample.
* Several questions at once: p values are adjusted by Holm's method, so a comparison of two equal runs
  raises any alarm in at most 5 % of cases.
* Intervals: bootstrap (`workbench.stats.ratio`), unadjusted.
* A change below 1 % is never called one: repeats within a run do not see what differs between runs
  (clocks, memory layout, neighbours), and that is of this size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.run import Record
from workbench.stats import Statistic, Summary, ratio, summary

Verdict = Literal["faster", "slower", "better", "worse", "no evidence", "not judged"]
Floats = NDArray[np.float64]

LEVEL = 0.05
SMALLEST_CHANGE = 0.01
FEWEST_FOR_P99 = 100
FEWEST_SAMPLES = 4  # fewer cannot reach the level
_DRAWS = 9_999
_ENOUGH = 30
_INTERVAL_DRAWS = 1_000
_EXACT_BELOW = 40  # samples of both sides together


class Change(Record, frozen=True):
    """One statistic on both sides.

    Attributes:
        ratio: head over base, with its 95 % bootstrap interval; None where base is 0.
        p_value: adjusted for all questions asked together; None where no test was made.
        reason: why it was not judged, or why a small p is no verdict.
    """

    statistic: Statistic
    base: float
    head: float
    ratio: float | None
    low: float | None
    high: float | None
    p_value: float | None
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class Question:
    """Two sets of samples to compare; `words` are the verdicts for lower and for higher."""

    base: Sequence[float]
    head: Sequence[float]
    words: tuple[Verdict, Verdict] = ("faster", "slower")


def mann_whitney_p(base: Sequence[float] | Floats, head: Sequence[float] | Floats, *, seed: int = 0) -> float:
    """Two-sided p value of the hypothesis that both sides come from one distribution.

    See the module for the correction of serial dependence. 1.0 when all values are equal.
    """
    a, b = np.asarray(base, float), np.asarray(head, float)
    n, m = a.size, b.size
    ranks, tied = _ranks(np.concatenate([a, b]))
    total = n + m
    variance = n * m / 12 * (total + 1 - tied / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    shift = abs(float(ranks[n:].sum()) - m * (total + 1) / 2)
    shift *= math.sqrt(_independence(ranks[:n], ranks[n:]))
    if total < _EXACT_BELOW:
        random = np.random.default_rng(seed)
        drawn = random.permuted(np.tile(ranks, (_DRAWS, 1)), axis=1)[:, n:].sum(axis=1)
        extreme = np.abs(drawn - m * (total + 1) / 2) >= shift - 1e-9
        return float((extreme.sum() + 1) / (_DRAWS + 1))
    z = max(0.0, shift - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def p99_p(base: Sequence[float] | Floats, head: Sequence[float] | Floats, *, seed: int = 0) -> float:
    """Two-sided permutation p value of the difference of the P99s.

    Drawing stops early once enough draws are as extreme (Besag and Clifford, Biometrika 78, 1991): then
    the p value is large, and knowing it better would change nothing.
    """
    a, b = np.asarray(base, float), np.asarray(head, float)
    observed = abs(float(np.percentile(b, 99) - np.percentile(a, 99)))
    pooled, random = np.concatenate([a, b]), np.random.default_rng(seed)
    extreme = drawn = 0
    while drawn < _DRAWS and extreme < _ENOUGH:
        count = min(max(100, drawn), _DRAWS - drawn, max(1, 2_000_000 // pooled.size))
        mixed = random.permuted(np.tile(pooled, (count, 1)), axis=1)
        spread = np.percentile(mixed[:, a.size :], 99, axis=1) - np.percentile(mixed[:, : a.size], 99, axis=1)
        extreme += int((np.abs(spread) >= observed - 1e-9).sum())
        drawn += count
    return (extreme + 1) / (drawn + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment, in the order given: the family-wise error stays below the level."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [1.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - place)))
        adjusted[index] = largest
    return adjusted


def judge(questions: Sequence[Question], *, draws: int = _INTERVAL_DRAWS) -> list[list[Change]]:
    """Compare mean, median and P99 of every question.

    The mean and the median share the test of the typical value. All tests are adjusted together.
    `draws` are those of the intervals; no verdict depends on them.

    Raises:
        WorkbenchError: a side without samples, or with one that is not finite.
    """
    tests: list[float] = []
    places: list[tuple[int | None, int | None]] = []
    for question in questions:
        fewest = min(len(question.base), len(question.head))
        typical = tail = None
        if fewest >= FEWEST_SAMPLES:
            typical = len(tests)
            tests.append(mann_whitney_p(question.base, question.head))
        if fewest >= FEWEST_FOR_P99:
            tail = len(tests)
            tests.append(p99_p(question.base, question.head))
        places.append((typical, tail))
    adjusted = holm(tests)
    return [
        _changes(
            question, None if typical is None else adjusted[typical], None if tail is None else adjusted[tail], draws
        )
        for question, (typical, tail) in zip(questions, places, strict=True)
    ]


def _changes(question: Question, typical: float | None, tail: float | None, draws: int) -> list[Change]:
    base, head = summary(question.base), summary(question.head)
    few = f"fewer than {FEWEST_SAMPLES} samples a side cannot show a change"
    rare = f"a P99 needs {FEWEST_FOR_P99} samples a side; there are {base.n} and {head.n}"
    mean = _change(question, "mean", base, head, typical, few, draws)
    median = _change(question, "median", base, head, typical, few, draws)
    if {mean.verdict, median.verdict} == set(question.words):
        reason = "mean and median moved in opposite directions: the shape of the distribution changed"
        mean, median = _unjudged(mean, reason), _unjudged(median, reason)
    return [mean, median, _change(question, "p99", base, head, tail, rare, draws)]


def _change(
    question: Question,
    statistic: Statistic,
    base: Summary,
    head: Summary,
    p_value: float | None,
    too_few: str,
    draws: int,
) -> Change:
    left, right = float(getattr(base, statistic)), float(getattr(head, statistic))
    known = ratio(question.head, question.base, statistic, draws=draws) if left > 0 else None
    verdict: Verdict = "no evidence"
    reason = ""
    if p_value is None:
        verdict, reason = "not judged", too_few
    elif known is None:
        verdict, reason = "not judged", "the base is 0"
    elif p_value < LEVEL and abs(known.value - 1) < SMALLEST_CHANGE:
        reason = f"differs by less than {SMALLEST_CHANGE:.0%}, the smallest change that is judged"
    elif p_value < LEVEL:
        verdict = question.words[0 if known.value < 1 else 1]
    return Change(
        statistic=statistic,
        base=left,
        head=right,
        ratio=known.value if known else None,
        low=known.low if known and known.resampled else None,
        high=known.high if known and known.resampled else None,
        p_value=p_value,
        verdict=verdict,
        reason=reason,
    )


def _unjudged(change: Change, reason: str) -> Change:
    fields = {name: getattr(change, name) for name in change.__struct_fields__}
    return Change(**(fields | {"verdict": "no evidence", "reason": reason}))


def _ranks(values: Floats) -> tuple[Floats, float]:
    """Mid-ranks from 1, and the tie term: the sum of t^3 - t over groups of t equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle = ends - (counts - 1) / 2
    return middle[inverse], float((counts.astype(float) ** 3 - counts).sum())


def _independence(*sides: Floats) -> float:
    """The share of the samples that counts as independent: (1 - r) / (1 + r), at most 1."""
    products = squares = 0.0
    for side in sides:
        centred = side - side.mean()
        products += float((centred[1:] * centred[:-1]).sum())
        squares += float((centred**2).sum())
    r = min(0.95, max(0.0, products / squares)) if squares > 0 else 0.0
    return (1 - r) / (1 + r)
