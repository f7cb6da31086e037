"""Decision parity: did the answers change, and could this many samples have shown a change?

Pure statistics on counts, values and arrays; reading of files is in `workbench.answers`. Intervals and
tests are exact where a closed form exists (binomial tails are summed, not approximated); sample sizes use
the normal approximation and say so.

Formulas: Clopper and Pearson, Biometrika 26 (1934) for the binomial interval; McNemar, Psychometrika 12
(1947), in its exact form for paired changes; Connor, Biometrics 43 (1987) for the paired sample size.
"""

import math
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.run import Record

Floats = NDArray[np.floating]

# Two steps of a bf16 logit between 16 and 32 (8 bits of precision: one step is 0.125). Two tokens
# closer than this may change places by rounding alone.
NEAR_TIE_NATS = 0.25


class FirstDifference(Record, frozen=True):
    """Where one sample's two answers part.

    Attributes:
        position: index of the first token (or character) that differs; the shorter length when one
            answer is a prefix of the other.
        a, b: what each arm has there, "" past the end.
        margin_a, margin_b: logprob of an arm's own choice minus its logprob of the other arm's choice,
            in nats; None without logprobs of both choices.
        near_tie: both known margins are at most the limit; None when no margin is known.
    """

    sample: str
    position: int
    unit: Literal["token", "character"]
    a: str
    b: str
    margin_a: float | None = None
    margin_b: float | None = None
    near_tie: bool | None = None


class Interval(Record, frozen=True):
    """A two-sided confidence interval of a share in 0..1."""

    low: float
    high: float
    confidence: float


class Agreement(Record, frozen=True):
    """Two sets of answers to the same samples.

    Attributes:
        identical_interval: exact binomial interval of the share of identical answers.
        near_ties, decided, unknown: the differing samples split by `FirstDifference.near_tie` (True, False,
            None).
    """

    samples: int
    identical: int
    identical_share: float
    identical_interval: Interval
    near_tie_nats: float
    near_ties: int
    decided: int
    unknown: int
    differences: list[FirstDifference]

    @property
    def changed(self) -> bool:
        """Some difference is not explained by a near tie."""
        return self.decided + self.unknown > 0


class PairedAccuracy(Record, frozen=True):
    """Right and wrong answers of two arms on the same samples.

    Attributes:
        only_a, only_b: samples that one arm alone answers rightly (the discordant pairs).
        delta: accuracy of b minus accuracy of a.
        delta_low, delta_high: interval of `delta` given the number of discordant pairs (conditional exact).
        p_value: two-sided exact McNemar.
        samples_needed: pairs that would show a change of `target_delta` at this discordance; None when no
            pair is discordant, since then the data says nothing about the discordance.
    """

    samples: int
    both: int
    only_a: int
    only_b: int
    neither: int
    accuracy_a: float
    accuracy_b: float
    delta: float
    delta_low: float
    delta_high: float
    confidence: float
    p_value: float
    target_delta: float
    samples_needed: int | None


class BenchmarkDelta(Record, frozen=True):
    """One metric of one benchmark in two arms, from value and standard error.

    Attributes:
        sigma: |b - a| in standard errors of the difference, arms taken as independent. The arms saw the same
            questions, so the true error of the difference is smaller: per-sample answers and McNemar see
            more.
        detectable_delta: smallest true difference that these standard errors show with 80 % power at 5 %.
        samples_needed: independent samples per arm that would show `target_delta`; None when the metric is
            not a share.
    """

    task: str
    metric: str
    a: float
    stderr_a: float
    b: float
    stderr_b: float
    delta: float
    sigma: float
    p_value: float
    samples: int | None
    detectable_delta: float
    target_delta: float
    samples_needed: int | None


class ProxyFlips(Record, frozen=True):
    """Decisions of a seeded random linear head: a proxy for a language model, not one.

    Attributes:
        decisions: rows compared, one argmax over `classes` each.
        flips: rows whose argmax differs.
        flip_margins: for each flip, the reference's gap between its first choice and the other arm's choice,
            over the standard deviation of that row's scores.
        median_margin: the same gap between first and second choice over all rows, for comparison.
    """

    decisions: int
    classes: int
    seed: int
    flips: int
    flip_margins: list[float]
    median_margin: float


def first_difference(a: list[int] | str, b: list[int] | str) -> int | None:
    """Return the first position where `a` and `b` differ, None when they are equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _log_binomial_terms(n: int, p: float) -> Floats:
    """Log probabilities of 0..n successes; n up to about a million."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    k = np.arange(n + 1)
    terms = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
    result: Floats = terms + k * math.log(p) + (n - k) * math.log1p(-p)
    return result


def binomial_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Return the exact (Clopper-Pearson) interval of a share; never narrower than `confidence`.

    Each end is found by bisection on the exact tail sum, to 1e-12.

    Raises:
        WorkbenchError: counts that cannot be, or a confidence outside 0..1.
    """
    if not 0 <= successes <= n or n == 0:
        raise WorkbenchError(f"{successes} of {n} is not a share; give 0 <= successes <= samples, samples >= 1")
    _check_confidence(confidence)
    tail = (1 - confidence) / 2

    def solve(upper: bool) -> float:
        low, high = 0.0, 1.0
        while high - low > 1e-12:
            p = (low + high) / 2
            terms = np.exp(_log_binomial_terms(n, p))
            # The upper end leaves `tail` at or below the count, the lower end at or above it.
            probability = terms[: successes + 1].sum() if upper else terms[successes:].sum()
            if (probability > tail) == upper:
                low = p
            else:
                high = p
        return (low + high) / 2

    return Interval(
        low=0.0 if successes == 0 else solve(upper=False),
        high=1.0 if successes == n else solve(upper=True),
        confidence=confidence,
    )


def mcnemar_p(only_a: int, only_b: int) -> float:
    """Return the two-sided exact McNemar p-value of the discordant counts, 1.0 when there are none."""
    if min(only_a, only_b) < 0:
        raise WorkbenchError(f"discordant counts {only_a} and {only_b} must not be negative")
    n = only_a + only_b
    if n == 0:
        return 1.0
    lower = np.exp(_log_binomial_terms(n, 0.5)[: min(only_a, only_b) + 1]).sum()
    return min(1.0, 2 * float(lower))


def paired_accuracy(
    right_a: list[bool], right_b: list[bool], *, confidence: float = 0.95, target_delta: float = 0.01
) -> PairedAccuracy:
    """Compare two arms' right and wrong answers, sample by sample in the same order.

    Raises:
        WorkbenchError: no samples, or not as many in one arm as in the other.
    """
    if len(right_a) != len(right_b) or not right_a:
        raise WorkbenchError(
            f"{len(right_a)} and {len(right_b)} judged samples cannot be paired; give the same samples in both arms"
        )
    n = len(right_a)
    both = sum(a and b for a, b in zip(right_a, right_b, strict=True))
    only_a, only_b = sum(right_a) - both, sum(right_b) - both
    discordant = only_a + only_b
    low = high = 0.0
    if discordant:
        share = binomial_interval(only_b, discordant, confidence)
        low, high = ((2 * end - 1) * discordant / n for end in (share.low, share.high))
    needed = None
    # A difference cannot exceed the discordance, so no number of samples shows a larger one.
    if discordant and target_delta < discordant / n:
        needed = paired_sample_size(target_delta, discordant / n)
    return PairedAccuracy(
        samples=n,
        both=both,
        only_a=only_a,
        only_b=only_b,
        neither=n - both - discordant,
        accuracy_a=(both + only_a) / n,
        accuracy_b=(both + only_b) / n,
        delta=(only_b - only_a) / n,
        delta_low=low,
        delta_high=high,
        confidence=confidence,
        p_value=mcnemar_p(only_a, only_b),
        target_delta=target_delta,
        samples_needed=needed,
    )


def sigmas(a: float, stderr_a: float, b: float, stderr_b: float) -> float:
    """Return |b - a| over the standard error of the difference of two independent estimates.

    Raises:
        WorkbenchError: a standard error that is missing, negative or not finite, or both zero.
    """
    if not all(math.isfinite(x) for x in (a, b, stderr_a, stderr_b)) or min(stderr_a, stderr_b) < 0:
        raise WorkbenchError(
            f"{a} ± {stderr_a} and {b} ± {stderr_b} cannot be compared; both need a finite value and a "
            "standard error >= 0"
        )
    error = math.hypot(stderr_a, stderr_b)
    if error == 0:
        raise WorkbenchError("both standard errors are 0, so no difference can be judged; give per-sample answers")
    return abs(b - a) / error


def unpaired_sample_size(delta: float, share: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Return the samples per arm that show a change of a share from `share` by `delta`, independent arms.

    Normal approximation, two-sided level `alpha`. `delta` and `share` in 0..1; where share + delta leaves
    0..1, the change is taken downwards.
    """
    other = share + delta if share + delta < 1 else share - delta
    if not 0 < delta < 1 or not 0 < share < 1 or not 0 < other < 1:
        raise WorkbenchError(
            f"a change of {delta} from {share} is not a change between two shares; both must lie inside 0..1"
        )
    z_alpha, z_power = _quantiles(alpha, power)
    mean = (share + other) / 2
    spread = z_alpha * math.sqrt(2 * mean * (1 - mean)) + z_power * math.sqrt(share * (1 - share) + other * (1 - other))
    return math.ceil((spread / delta) ** 2)


def paired_sample_size(delta: float, discordance: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Return the pairs that show an accuracy change of `delta` when a share `discordance` of pairs differs.

    Connor's formula for McNemar's test, two-sided level `alpha`.
    """
    if not 0 < delta < discordance <= 1:
        raise WorkbenchError(
            f"a change of {delta} needs more than that share of samples to differ, not {discordance}; "
            "give 0 < delta < discordance <= 1"
        )
    z_alpha, z_power = _quantiles(alpha, power)
    spread = z_alpha * math.sqrt(discordance) + z_power * math.sqrt(discordance - delta**2)
    return math.ceil((spread / delta) ** 2)


def benchmark_delta(
    task: str,
    metric: str,
    a: tuple[float, float],
    b: tuple[float, float],
    *,
    samples: int | None = None,
    target_delta: float = 0.01,
) -> BenchmarkDelta:
    """Compare (value, standard error) of two arms on one metric."""
    sigma = sigmas(*a, *b)
    z_alpha, z_power = _quantiles(0.05, 0.8)
    is_share = 0 < a[0] < 1
    return BenchmarkDelta(
        task=task,
        metric=metric,
        a=a[0],
        stderr_a=a[1],
        b=b[0],
        stderr_b=b[1],
        delta=b[0] - a[0],
        sigma=sigma,
        p_value=math.erfc(sigma / math.sqrt(2)),
        samples=samples,
        detectable_delta=(z_alpha + z_power) * math.hypot(a[1], b[1]),
        target_delta=target_delta,
        samples_needed=unpaired_sample_size(target_delta, a[0]) if is_share else None,
    )


def agreement(
    samples: int, differences: list[FirstDifference], *, confidence: float = 0.95, near_tie_nats: float
) -> Agreement:
    """Summarise the differing samples among `samples`."""
    identical = samples - len(differences)
    return Agreement(
        samples=samples,
        identical=identical,
        identical_share=identical / samples if samples else 0.0,
        identical_interval=binomial_interval(identical, samples, confidence),
        near_tie_nats=near_tie_nats,
        near_ties=sum(d.near_tie is True for d in differences),
        decided=sum(d.near_tie is False for d in differences),
        unknown=sum(d.near_tie is None for d in differences),
        differences=differences,
    )


def flips(reference: Floats, other: Floats) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Return, per row of two (rows, classes) score arrays: argmax differs; the reference's margins.

    The first margin is between the reference's choice and the other arm's choice (0 where equal), the second
    between the reference's first and second choice.

    Raises:
        WorkbenchError: arrays of another shape (logits of another vocabulary), too few classes, or not
            finite.
    """
    if reference.ndim != 2 or reference.shape != other.shape:
        raise WorkbenchError(
            f"scores of shape {reference.shape} and {other.shape} cannot be compared; both arms need the "
            "same rows "
            "and the same vocabulary"
        )
    if reference.shape[1] < 2:
        raise WorkbenchError("a decision needs at least two classes")
    if not (np.isfinite(reference).all() and np.isfinite(other).all()):
        raise WorkbenchError("scores hold NaN or infinity, so no decision can be read; see the parity matrix instead")
    rows = np.arange(reference.shape[0])
    first, chosen = reference.argmax(axis=1), other.argmax(axis=1)
    top = reference[rows, first]
    second = np.partition(reference, -2, axis=1)[:, -2]
    return first != chosen, top - reference[rows, chosen], top - second


def proxy_flips(reference: Floats, other: Floats, *, classes: int = 512, seed: int = 0) -> ProxyFlips:
    """Count argmax flips of a seeded random linear head over (rows, width) embeddings.

    A stand-in for a language model when none is at hand: it shows how many of many decisions sit so near a
    tie that the arms' difference moves them, and says nothing about a trained model's answers.
    """
    if reference.ndim != 2 or reference.shape != other.shape:
        raise WorkbenchError(f"embeddings of shape {reference.shape} and {other.shape} cannot be compared")
    generator = np.random.default_rng(seed)
    head = generator.standard_normal((reference.shape[1], classes)) / math.sqrt(reference.shape[1])
    scores = reference.astype(np.float64) @ head
    changed, gaps, margins = flips(scores, other.astype(np.float64) @ head)
    spread = scores.std(axis=1)
    spread[spread == 0] = 1.0
    return ProxyFlips(
        decisions=int(changed.size),
        classes=classes,
        seed=seed,
        flips=int(changed.sum()),
        flip_margins=[float(x) for x in (gaps / spread)[changed]],
        median_margin=float(np.median(margins / spread)) if changed.size else 0.0,
    )


def agreement_sentence(result: Agreement) -> str:
    """Say what two sets of answers show."""
    interval = result.identical_interval
    share = (
        f"{result.identical} of {result.samples} answers are identical ({result.identical_share:.1%}; "
        f"{interval.confidence:.0%} interval {interval.low:.1%} to {interval.high:.1%})"
    )
    if result.identical == result.samples:
        return f"{share}."
    parts = []
    if result.near_ties:
        parts.append(f"{result.near_ties} part at a near tie (within {result.near_tie_nats:g} nats)")
    if result.decided:
        parts.append(f"{result.decided} where the answer was decided, which rounding does not explain")
    if result.unknown:
        parts.append(f"{result.unknown} without logprobs, so whether they were near ties is unknown")
    return f"{share}. Of those that differ, {'; '.join(parts)}."


def paired_sentence(result: PairedAccuracy) -> str:
    """Say what the same questions, judged in both arms, show."""
    changed = (
        f"Accuracy {result.accuracy_a:.2%} and {result.accuracy_b:.2%} on {result.samples} samples: {result.only_a} "
        "only "
        f"right with the first, {result.only_b} only with the second"
    )
    if not result.only_a + result.only_b:
        return f"{changed}, so nothing changed."
    needed = (
        f"; {result.samples_needed:,} samples would show a change of {result.target_delta:.1%}"
        if result.samples_needed
        else ""
    )
    return (
        f"{changed}; exact McNemar p = {result.p_value:.3g}, change {result.delta_low:+.2%} to "
        f"{result.delta_high:+.2%} "
        f"({result.confidence:.0%}){needed}."
    )


def benchmark_sentence(result: BenchmarkDelta) -> str:
    """Say what one metric with standard errors shows, and what it could have shown."""
    needed = (
        f"; a change of {result.target_delta:.1%} would need {result.samples_needed:,} independent samples per arm"
        if result.samples_needed
        else ""
    )
    count = f" on {result.samples:,} samples" if result.samples else ""
    return (
        f"{result.task} {result.metric}{count}: {result.a:.4f} ± {result.stderr_a:.4f} and "
        f"{result.b:.4f} ± {result.stderr_b:.4f}, {result.sigma:.2f} sigma apart (p = {result.p_value:.2g}). These "
        "errors show "
        f"a true change of {result.detectable_delta:.4f} four times in five{needed}."
    )


def _quantiles(alpha: float, power: float) -> tuple[float, float]:
    _check_confidence(1 - alpha)
    _check_confidence(power)
    normal = NormalDist()
    return normal.inv_cdf(1 - alpha / 2), normal.inv_cdf(power)


def _check_confidence(value: float) -> None:
    if not 0 < value < 1:
        raise WorkbenchError(f"{value} is not a probability between 0 and 1")
