"""Numbers and verdicts in words, the same in HTML, Markdown and the terminal."""

from workbench.diff import Diff, PairDiff, TimingDiff
from workbench.evidence import Change
from workbench.review import Review
from workbench.run import Run

DASH = "–"
MOST_DIFFERENCES = 20
_MOST_NUMBERS = 20


def us(value: float | None) -> str:
    """Microseconds, in milliseconds from one upwards."""
    if value is None:
        return DASH
    return f"{value / 1000:,.3f} ms" if abs(value) >= 1000 else f"{value:,.2f} µs"


def quantity(value: float | None, unit: str) -> str:
    """A value with its unit."""
    if value is None:
        return DASH
    if unit == "us":
        return us(value)
    if unit == "bytes":
        return f"{value / 2**20:,.1f} MiB"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:,.4g}" if value != int(value) else f"{int(value):,}"


def change_text(change: Change | None) -> str:
    """`+5.0 % (+4.1 … +5.9)`: change of head over base with its interval."""
    if change is None or change.ratio is None:
        return DASH
    text = f"{change.ratio - 1:+.1%}"
    if change.low is not None and change.high is not None:
        text += f" ({change.low - 1:+.1%} … {change.high - 1:+.1%})"
    return text


def p_text(change: Change | None) -> str:
    """The adjusted p value."""
    if change is None or change.p_value is None:
        return DASH
    return f"{change.p_value:.2g}" if change.p_value >= 1e-4 else "< 0.0001"


def tone(verdict: str | None) -> str | None:
    """Whether a verdict is "good" or "bad" news; None for neither."""
    return {"faster": "good", "better": "good", "slower": "bad", "worse": "bad"}.get(verdict or "")


def share_of(equal: int, total: int) -> str:
    """`47/50 (94 %)`."""
    return f"{equal}/{total} ({equal / total:.0%})" if total else "none compared"


def rms(value: float | None) -> str:
    """A relative RMS or another small number."""
    return DASH if value is None else f"{value:.3g}"


Sentence = tuple[str, str | None]  # what is said, and the verdict it carries


def verdicts(diff: Diff) -> list[Sentence]:
    """The sentences that come first: calls that fail on one side only, then every pair's other news.

    These are what was changed, headline timings, doubts, failures of both sides, parity and accuracy.
    """
    several = len(diff.pairs) > 1
    first: list[Sentence] = []
    rest: list[Sentence] = []
    for pair in diff.pairs:
        failures = _failure_sentences(pair)
        told = [
            *_difference_sentences(pair),
            *_timing_sentences(pair),
            *(sentence for sentence in failures if sentence[1] is None),
            *_parity_sentences(pair),
        ]
        new = [sentence for sentence in failures if sentence[1] is not None]
        for into, sentences in ((first, new), (rest, told)):
            into += [(f"{pair.name}: {text}" if several else text, verdict) for text, verdict in sentences]
    return sorted(first, key=lambda sentence: sentence[1] != "worse") + rest


def _difference_sentences(pair: PairDiff) -> list[Sentence]:
    shown: list[Sentence] = [(f"changed: {text}", None) for text in pair.differences[:MOST_DIFFERENCES]]
    if more := len(pair.differences) - len(shown):
        shown.append((f"changed: {more} more, listed by --html and --json", None))
    return shown


def _timing_sentences(pair: PairDiff) -> list[Sentence]:
    told = [change for timing in headline(pair) for change in timing.changes]
    clear: list[Sentence] = [
        (f"{timing.name}, {change.statistic}: {change.verdict}, {change_text(change)}", change.verdict)
        for timing in headline(pair)
        for change in _news(timing, brief=pair.kind == "ladder")
    ]
    if told and not clear:
        judged = any(change.verdict != "not judged" for change in told)
        nothing = "no evidence of a difference in the timings" if judged else "the timings cannot be judged"
        part = len(pair.pass_calls) < pair.common_calls
        clear.append((f"{nothing} of {pass_text(pair)}" if part and pair.pass_calls else nothing, None))
    if pair.doubts:
        clear.append((f"doubts about the comparison: {len(pair.doubts)}, see below", None))
    return clear


def _news(timing: TimingDiff, brief: bool) -> list[Change]:
    """The changes that are good or bad news; `brief`, for many timings: of each verdict the first."""
    news = [change for change in timing.changes if tone(change.verdict)]
    return list({change.verdict: change for change in reversed(news)}.values())[::-1] if brief else news


def _failure_sentences(pair: PairDiff) -> list[Sentence]:
    sentences: list[Sentence] = []
    for row in pair.failures:
        cause = f", {row.cause}" if row.cause else ""
        text = f"calls on which {row.arm} failed ({row.error}{cause}): {row.base} → {row.head}"
        for side, calls in (("head", row.only_head), ("base", row.only_base)):
            if calls:
                more = f" and {len(calls) - _MOST_NUMBERS} more" if len(calls) > _MOST_NUMBERS else ""
                text += f"; only in the {side}: {', '.join(map(str, calls[:_MOST_NUMBERS]))}{more}"
        sentences.append((f"{row.verdict}: {text}" if row.verdict else text, row.verdict))
    return sentences


def _parity_sentences(pair: PairDiff) -> list[Sentence]:
    sentences: list[Sentence] = []
    for row in pair.parity:
        sentences += [(f"parity, new finding: {finding}", "worse") for finding in row.new_findings]
        if row.gone_findings:
            more = f", and {len(row.gone_findings) - 1} more" if len(row.gone_findings) > 1 else ""
            sentences.append((f"parity, gone: {row.gone_findings[0]}{more}", None))
        if row.base_equal * row.head_total > row.head_equal * row.base_total:
            before, after = share_of(row.base_equal, row.base_total), share_of(row.head_equal, row.head_total)
            sentences.append((f"fewer outputs with equal bits: {before} → {after}", "worse"))
    for delta in pair.accuracy:
        text = f"{delta.task} {delta.metric}: {delta.a:.4f} → {delta.b:.4f}, {delta.sigma:.1f}σ"
        sentences.append((text, "worse" if delta.sigma > 2 and delta.delta < 0 else None))
    return sentences


def headline(pair: PairDiff) -> list[TimingDiff]:
    """One timing per arm: the pass over the workload, else its only call; wall clock first."""
    whole = [timing for timing in pair.timings if timing.call is None]
    return [timing for timing in whole if timing.clock != "gpu"] or whole


def pass_text(pair: PairDiff) -> str:
    """Over which calls the headline timings are."""
    passed = len(pair.pass_calls)
    if passed < pair.common_calls:
        return f"{passed} of the {pair.common_calls} common calls, those that every arm finished on both sides"
    return "the common call" if passed == 1 else f"all {passed} common calls"


def timing_title(pair: PairDiff) -> str:
    """The heading of the table of headline timings: of which calls, and each as often as the workload has it."""
    if not pair.pass_calls:
        return "Timings of vLLM's graph and of all variants, call by call" if pair.kind == "ladder" else "Timings"
    return f"Timings of {'' if len(pair.pass_calls) == 1 else 'one pass over '}{pass_text(pair)}"


def one_pass_text(run: Run) -> str:
    """What the times of a pass add up."""
    calls = sum(call.count for call in run.calls)
    return f"one pass over the workload's {calls:,} calls"


def run_verdicts(found: Review, run: Run) -> list[tuple[str, str | None]]:
    """The sentences that come first for one run."""
    sentences: list[tuple[str, str | None]] = []
    for speed in found.speed_ups:
        if speed.call is None or len(run.calls) == 1:
            what = one_pass_text(run) if speed.call is None else "the call"
            sentences.append(
                (
                    f"graph against {speed.baseline}, {what}: {speed.value:.2f}× on the mean "
                    f"({speed.low:.2f} … {speed.high:.2f}), {speed.median:.2f}× on the median",
                    "faster" if speed.low > 1 else "slower" if speed.high < 1 else None,
                )
            )
    if found.compared:
        finite = "" if found.all_finite else "; some outputs are not finite"
        sentences.append(
            (
                f"graph and eager: {share_of(found.equal, found.compared)} calls with equal bits, worst relative "
                f"RMS {rms(found.worst_rms)}{finite}",
                None if found.all_finite else "worse",
            )
        )
    for failure in run.failures:
        cause = f" ({failure.cause})" if failure.cause else ""
        sentences.append((f"{failure.arm} failed on call {failure.call}: {failure.error}{cause}", "worse"))
    return sentences
