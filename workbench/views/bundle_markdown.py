"""A bundle or a comparison as Markdown that pastes into a pull request."""

import re
from collections.abc import Sequence

from workbench.archive import printable
from workbench.bundle import Content
from workbench.conditions import Answer
from workbench.diff import Diff, PairDiff, Statistics, TimingDiff
from workbench.ingest import External
from workbench.parity import verdict as parity_verdict
from workbench.review import Review, review
from workbench.run import Run
from workbench.views.words import (
    DASH,
    change_text,
    headline,
    one_pass_text,
    quantity,
    rms,
    run_verdicts,
    share_of,
    timing_title,
    verdicts,
)

_MOST_METRICS = 20


def plain(text: object) -> str:
    """Text for Markdown: no markup, link, mention, table or code mark survives, and one line."""
    line = re.sub(r"\s+", " ", printable(str(text)))[:300]
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_{}\[\]()#!|~])", r"\\\1", line)
    return re.sub(r"(?<=[@:/.])(?=\w)", "\N{ZERO WIDTH NON-JOINER}", line) if re.search(r"@|://|www\.", line) else line


def diff_markdown(diff: Diff, answers: Sequence[Answer] = ()) -> str:
    """The comparison as Markdown that pastes into a pull request."""
    lines = [f"### {plain(diff.base)} → {plain(diff.head)}", ""]
    lines += [f"- **{plain(text)}**" if verdict else f"- {plain(text)}" for text, verdict in verdicts(diff)]
    for pair in diff.pairs:
        lines += ["", *_pair_markdown(pair, named=len(diff.pairs) > 1)]
    if answers:
        lines += ["", "| condition | result | values |", "| --- | --- | --- |"]
        lines += [
            f"| {plain(answer.condition)} | {'**fails**' if answer.hit else 'passes'} | {plain(answer.reason)} |"
            for answer in answers
        ]
    return "\n".join(lines) + "\n"


def _pair_markdown(pair: PairDiff, named: bool) -> list[str]:
    lines = [f"#### {plain(pair.name)}", ""] if named else []
    lines += [f"> doubtful: {plain(doubt)}" for doubt in pair.doubts[:20]]
    if pair.doubts:
        lines.append("")
    timings = headline(pair)
    if timings:
        lines += [f"**{plain(timing_title(pair))}**", ""]
        lines += ["| timing | | mean | median | std | P99 |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for timing in timings:
        lines += _timing_markdown(timing)
    lines += _metrics_markdown(pair)
    parity = [
        f"| {plain(row.source)} | {share_of(row.base_equal, row.base_total)} | "
        f"{share_of(row.head_equal, row.head_total)} | {rms(row.head_worst)} |"
        for row in pair.parity
    ]
    if parity:
        lines += ["", "| parity | base | head | worst relative RMS |", "| --- | --- | --- | --- |", *parity]
    if pair.accuracy:
        lines += ["", "| benchmark | base | head | Δ |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {plain(d.task)} {plain(d.metric)} | {d.a:.4f} ± {d.stderr_a:.4f} | {d.b:.4f} ± {d.stderr_b:.4f} | "
            f"{d.sigma:.1f}σ |"
            for d in pair.accuracy
        ]
    return lines


def _metrics_markdown(pair: PairDiff) -> list[str]:
    changed = [metric for metric in pair.metrics if metric.base != metric.head][:_MOST_METRICS]
    rows = [
        f"| {plain(metric.name)} | {quantity(metric.base, metric.unit)} | {quantity(metric.head, metric.unit)} |"
        for metric in changed
    ]
    return ["", "| changed | base | head |", "| --- | ---: | ---: |", *rows] if rows else []


def _timing_markdown(timing: TimingDiff) -> list[str]:
    name = plain(timing.name)
    lines = []
    for side, found in (("base", timing.base), ("head", timing.head)):
        if found is not None:
            lines.append(f"| {name} | {side} | {_statistics_cells(found, timing.unit)} |")
    changes = [timing.change("mean"), timing.change("median"), None, timing.change("p99")]
    cells = [DASH if change is None else f"{change_text(change)} {change.verdict}" for change in changes]
    lines.append(f"| {name} | change | {' | '.join(cells)} |")
    return lines


def _statistics_cells(found: Statistics, unit: str) -> str:
    return " | ".join(quantity(value, unit) for value in (found.mean, found.median, found.std, found.p99))


def bundle_markdown(contents: Sequence[Content], digest: str | None = None) -> str:
    """The runs of a bundle as Markdown that pastes into a pull request."""
    lines: list[str] = []
    for content in contents:
        lines += [f"### {plain(content.entry.name)}", ""]
        found = review(content)
        if found is not None and content.run is not None:
            lines += _run_markdown(found, content.run)
        if content.ladder is not None:
            from workbench.views.bundle_ladder import ladder_markdown  # its tables are pandas', slow to import

            lines += ladder_markdown(content.ladder, plain)
        if content.external is not None:
            lines += _external_markdown(content.external)
        if content.parity is not None:
            told = "; ".join(map(plain, parity_verdict(content.parity).split("; ")))  # longer than one `plain` keeps
            lines += [f"Parity session: {told}", ""]
    if digest:
        lines.append(f"Bundle digest `{digest}`")
    return "\n".join(lines) + "\n"


def _run_markdown(found: Review, run: Run) -> list[str]:
    machine = run.environment.gpus[0].name if run.environment.gpus else run.environment.cpu
    facts = (run.model.architecture, run.model.dtype, run.model.weights, machine, f"vLLM {run.environment.vllm}")
    lines = [", ".join(map(plain, facts)), ""]
    lines += [f"- {plain(text)}" for text, _ in run_verdicts(found, run)]
    lines += [f"- {plain(note)}" for note in found.notes]
    shown = [row for row in found.timings if row.clock == "wall" and (row.call is None or len(run.calls) == 1)]
    what = "wall" if len(run.calls) == 1 else f"wall, {one_pass_text(run)}"
    lines += ["", f"| {plain(what)} | Mean | Median | Std | P99 | n |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [f"| {row.arm} | {_statistics_cells(row.statistics, 'us')} | {row.statistics.n} |" for row in shown]
    for speed in found.speed_ups:
        if speed.call is None or len(run.calls) == 1:
            tail = DASH if speed.p99 is None else f"{speed.p99:.2f}×"
            lines.append(
                f"| speed-up over {speed.baseline} | {speed.value:.2f}× ({speed.low:.2f} … {speed.high:.2f}) | "
                f"{speed.median:.2f}× | {DASH} | {tail} | |"
            )
    return [*lines, ""]


def _external_markdown(external: External) -> list[str]:
    lines = [f"{external.source}, {plain(external.model or 'no model named')}", ""]
    if external.measures:
        lines += ["| measure | Mean | Median | Std | P99 |", "| --- | ---: | ---: | ---: | ---: |"]
    for measure in external.measures[:60]:
        values = (measure.mean, measure.median, measure.std, measure.percentiles.get("99"))
        lines.append(f"| {plain(measure.name)} | {' | '.join(quantity(value, measure.unit) for value in values)} |")
    for row in external.accuracies[:60]:
        error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
        lines.append(f"- {plain(row.task)} {plain(row.metric)}: {row.value:.4f}{error}")
    return [*lines, ""]
