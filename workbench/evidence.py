"""Did a quantity change between two sets of samples? Tests, intervals and one verdict.

* Typical value: two-sided Mann-Whitney test on the ranks, ties corrected; by permutation where samples
  are few, by the normal limit otherwise.
* Samples of one run follow each other, and a machine's mood lasts: n samples say as much as n / t
  independent ones, t the integrated autocorrelation time of their ranks (Geyer's pairs of lags,
  Statistical Science 7, 1992, summed up to the first that is within two standard errors of 0). The test
  statistic is shrunk and the intervals are widened by sqrt(t).
* P99: permutation test of the difference of the two P99. Below 100 samples a side it is refused (the P99
  would be the largest sample), and where t is above 2 (permuting would break the dependence).
* Several questions at once: p values are adjusted by Holm's method within the main questions and within
  the details, the level split four to one, so a comparison of two equal runs raises any alarm in at
  most 5 % of cases.
* Intervals: bootstrap (`workbench.stats.ratio`), widened as said, unadjusted.
* A change below 1 % is never called one: repeats within a run do not see what differs between runs
  (clocks, memory layout, neighbours), and that is of this size.
* Nor is a change smaller than the *drift* of a side: how far the medians of the first and the second half
  of its samples, in order of time, lie apart, if that is no accident. What the machine did to one run
  it may have done to the other, and what it did to one main question it may have done to all.
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
_MAIN_SHARE = 0.8  # of the level, where there are both main questions and details
_DRIFT_LEVEL = 0.01
_MOST_DEPENDENCE = 2.0
_TYPICAL: tuple[Statistic, Statistic] = ("mean", "median")
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
    """Two sets of samples to compare; `words` are the verdicts for lower and for higher.

    Main questions are adjusted among themselves at four fifths of the level, the details at the rest: a
    hundred calls looked at one by one do not hide a change of the whole.
    """

    base: Sequence[float]
    head: Sequence[float]
    words: tuple[Verdict, Verdict] = ("faster", "slower")
    main: bool = True
    independent: bool = False  # each sample is a run of its own


def mann_whitney_p(base: Sequence[float] | Floats, head: Sequence[float] | Floats, *, seed: int = 0) -> float:
    """Two-sided p value of the hypothesis that both sides come from one distribution.

    See the module for the correction of serial dependence. 1.0 when all values are equal.
    """
    a, b = np.asarray(base, float), np.asarray(head, float)
    return rank_p(a, b, max(dependence(a), dependence(b)), seed=seed)


def rank_p(a: Floats, b: Floats, dependent: float, *, seed: int = 0) -> float:
    """`mann_whitney_p` where `dependent` samples count as one."""
    n, m = a.size, b.size
    ranks, tied = _ranks(np.concatenate([a, b]))
    total = n + m
    variance = n * m / 12 * (total + 1 - tied / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    shift = abs(float(ranks[n:].sum()) - m * (total + 1) / 2) / math.sqrt(dependent)
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


def drift(samples: Sequence[float] | Floats) -> float:
    """Median of the later half over that of the earlier half, minus 1; 0 where the halves do not differ.

    `samples` in order of time.
    """
    values = np.asarray(samples, float)
    earlier, later = values[: values.size // 2], values[values.size // 2 :]
    if earlier.size < FEWEST_SAMPLES or rank_p(earlier, later, 1.0) >= _DRIFT_LEVEL:
        return 0.0
    before, after = float(np.median(earlier)), float(np.median(later))
    return after / before - 1 if before > 0 else 0.0


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

    The mean and the median share the test of the typical value. Tests are adjusted as `Question.main`
    says. `draws` are those of the intervals; no verdict depends on them.

    Raises:
        WorkbenchError: a side without samples, or with one that is not finite.
    """
    adjusted: dict[tuple[int, str], float] = {}
    for main in (True, False):
        tests = {
            (index, kind): p
            for index, question in enumerate(questions)
            if question.main is main
            for kind, p in _tests(question).items()
        }
        both = len({question.main for question in questions}) == 2
        share = (_MAIN_SHARE if main else 1 - _MAIN_SHARE) if both else 1.0
        for key, p in zip(tests, holm(list(tests.values())), strict=True):
            adjusted[key] = min(1.0, p / share)
    unsteady = max((_wander(question) for question in questions if question.main), default=0.0)
    return [
        _changes(question, adjusted.get((index, "typical")), adjusted.get((index, "tail")), unsteady, draws)
        for index, question in enumerate(questions)
    ]


def _wander(question: Question) -> float:
    """The larger drift of the two sides; samples of runs of their own have none."""
    return 0.0 if question.independent else max(abs(drift(question.base)), abs(drift(question.head)))


def _tests(question: Question) -> dict[str, float]:
    """Unadjusted p values of what can be tested with this many samples."""
    fewest = min(len(question.base), len(question.head))
    found = {}
    if fewest >= FEWEST_SAMPLES:
        sides = np.asarray(question.base, float), np.asarray(question.head, float)
        found["typical"] = rank_p(*sides, _dependence_of(question))
    if fewest >= FEWEST_FOR_P99 and _dependence_of(question) <= _MOST_DEPENDENCE:
        found["tail"] = p99_p(question.base, question.head)
    return found


def _dependence_of(question: Question) -> float:
    return 1.0 if question.independent else max(dependence(question.base), dependence(question.head))


@dataclass(frozen=True)
class _Sides:
    """A question with what its verdicts need: summaries, dependence, drift."""

    question: Question
    base: Summary
    head: Summary
    dependent: float
    wander: float
    draws: int


def _changes(
    question: Question, typical: float | None, tail: float | None, unsteady: float, draws: int
) -> list[Change]:
    wander = 0.0 if question.independent else max(_wander(question), unsteady)
    base, head = summary(question.base), summary(question.head)
    sides = _Sides(question, base, head, _dependence_of(question), wander, draws)
    few = f"fewer than {FEWEST_SAMPLES} samples a side cannot show a change"
    rare = f"a P99 needs {FEWEST_FOR_P99} samples a side; there are {base.n} and {head.n}"
    if min(base.n, head.n) >= FEWEST_FOR_P99:
        rare = (
            f"the samples depend on each other (about {sides.dependent:.0f} count as one), so their P99 is not tested"
        )
    mean, median = (_change(sides, statistic, typical, few) for statistic in _TYPICAL)
    if {mean.verdict, median.verdict} == set(question.words):
        reason = "mean and median moved in opposite directions: the shape of the distribution changed"
        mean, median = _unjudged(mean, reason), _unjudged(median, reason)
    return [mean, median, _change(sides, "p99", tail, rare)]


def _change(sides: _Sides, statistic: Statistic, p_value: float | None, too_few: str) -> Change:
    left, right = float(getattr(sides.base, statistic)), float(getattr(sides.head, statistic))
    question = sides.question
    known = ratio(question.head, question.base, statistic, draws=sides.draws) if left > 0 else None
    verdict: Verdict = "no evidence"
    reason = ""
    if p_value is None:
        verdict, reason = "not judged", too_few
    elif known is None:
        verdict, reason = "not judged", "the base is 0"
    elif p_value < LEVEL and abs(known.value - 1) < SMALLEST_CHANGE:
        reason = f"differs by less than {SMALLEST_CHANGE:.0%}, the smallest change that is judged"
    elif p_value < LEVEL and abs(known.value - 1) < sides.wander:
        reason = (
            f"the machine drifts by {sides.wander:.1%} within a run, so a change of this size is not told from that"
        )
    elif p_value < LEVEL:
        verdict = question.words[0 if known.value < 1 else 1]
    return Change(
        statistic=statistic,
        base=left,
        head=right,
        ratio=known.value if known else None,
        low=_widened(known.value, known.low, sides.dependent) if known and known.resampled else None,
        high=_widened(known.value, known.high, sides.dependent) if known and known.resampled else None,
        p_value=p_value,
        verdict=verdict,
        reason=reason,
    )


def _widened(value: float, end: float, dependent: float) -> float:
    """Move an interval's end away from `value` by sqrt(`dependent`), on the scale of ratios."""
    return value * (end / value) ** math.sqrt(dependent) if value > 0 and end > 0 else end


def _unjudged(change: Change, reason: str) -> Change:
    fields = {name: getattr(change, name) for name in change.__struct_fields__}
    return Change(**(fields | {"verdict": "no evidence", "reason": reason}))


def _ranks(values: Floats) -> tuple[Floats, float]:
    """Mid-ranks from 1, and the tie term: the sum of t^3 - t over groups of t equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle = ends - (counts - 1) / 2
    return middle[inverse], float((counts.astype(float) ** 3 - counts).sum())


def dependence(samples: Sequence[float] | Floats) -> float:
    """Integrated autocorrelation time of the ranks, at least 1: how many samples count as one.

    `samples` in order of time.
    """
    ranks, _ = _ranks(np.asarray(samples, float))
    centred = ranks - ranks.mean()
    n = centred.size
    power = np.abs(np.fft.rfft(centred, 2 * n)) ** 2
    covariance = np.fft.irfft(power)[:n]
    if n < FEWEST_SAMPLES or covariance[0] <= 0:
        return 1.0
    correlation = covariance / covariance[0]
    pairs = correlation[0 : n - n % 2 : 2] + correlation[1 : n - n % 2 : 2]
    ends = np.flatnonzero(pairs <= 2 * math.sqrt(2 / n))  # two standard errors of a pair of independent samples
    positive = pairs[: ends[0]] if ends.size else pairs
    return float(min(max(1.0, 2 * positive.sum() - 1), n / 2))
