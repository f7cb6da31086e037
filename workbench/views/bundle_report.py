"""A bundle or a comparison as one HTML file.

The HTML holds no script and its content security policy allows nothing to be loaded, so it opens
offline, prints, and text from a bundle stays text.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from workbench.bundle import Bundle, Content
from workbench.conditions import Answer
from workbench.diff import Diff, Metric, PairDiff, TimingDiff
from workbench.ingest import External
from workbench.kernels import family, short_name
from workbench.parity import verdict as parity_verdict
from workbench.review import ArmTiming, Review, review
from workbench.run import Environment, Run
from workbench.views.markup import Markup, bullets, element, foldout, join, page, table
from workbench.views.words import (
    DASH,
    MOST_DIFFERENCES,
    change_text,
    headline,
    p_text,
    quantity,
    rms,
    run_verdicts,
    share_of,
    timing_title,
    tone,
    us,
    verdicts,
)

LARGEST_REPORT = 6_000_000  # bytes
_MOST_ROWS = 60
_LONGEST_DOCUMENT = 20_000

STYLE = """
:root{color-scheme:light;--ink:#1b1f24;--muted:#5b6470;--line:#d8dde3;--good:#0a6b3d;--bad:#b3261e;--warn:#7a4d00}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);margin:2rem auto;max-width:70rem;
padding:0 1rem}h1{font-size:1.5rem;margin:0 0 .25rem}h2{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid
var(--line)}h3{font-size:1rem;margin:1.2rem 0 .3rem}.muted,caption{color:var(--muted)}.good{color:var(--good)}
.bad{color:var(--bad)}.verdict{font-size:1.05rem;border-left:4px solid var(--line);padding:.1rem 0 .1rem .8rem;
margin:.4rem 0}.verdict.good{border-color:var(--good)}.verdict.bad{border-color:var(--bad)}
.doubts{background:#fff6e0;border:1px solid #e7cf94;padding:.5rem 1rem;color:var(--warn)}table{border-collapse:collapse;
font-size:.87rem;margin:.4rem 0}th,td{border-bottom:1px solid var(--line);padding:.18rem .6rem;text-align:left;
vertical-align:top}th{color:var(--muted);font-weight:600}.n{text-align:right;font-variant-numeric:tabular-nums;
white-space:nowrap}th.n{white-space:normal;vertical-align:bottom}.wide{overflow-x:auto}
pre{background:#f5f6f8;padding:.7rem;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.85rem}td{overflow-wrap:break-word}td:first-child{min-width:6rem}
summary{cursor:pointer;color:var(--muted)}svg{max-width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}code{font-size:.9em}
@media print{body{margin:0;max-width:none;font-size:11px}details{display:block}h2{break-after:avoid}
tr{break-inside:avoid}.wide{overflow:visible}}
"""


# --- a comparison ----------------------------------------------------------------------------------


def _colored(verdict: str | None) -> Markup | str:
    return element("span", verdict, class_=tone(verdict)) if verdict else DASH


def diff_html(diff: Diff, answers: Sequence[Answer] = ()) -> str:
    """The comparison as one HTML file."""
    body: list[object] = [
        element("h1", f"{diff.base} → {diff.head}"),
        element("p", "base → head; a change is of head over base, with a 95 % interval", class_="muted"),
        [element("p", text, class_=f"verdict {tone(verdict) or ''}") for text, verdict in verdicts(diff)],
        _answers(answers),
        [_pair(pair) for pair in diff.pairs],
        _lonely(diff),
        _definitions(),
    ]
    return page(f"{diff.base} → {diff.head}", body, STYLE)


def _answers(answers: Sequence[Answer]) -> Markup | None:
    if not answers:
        return None
    failed = element("span", "fails", class_="bad")
    rows = [
        (
            answer.condition,
            answer.pair,
            failed if answer.hit else "passes",
            answer.reason,
        )
        for answer in answers
    ]
    return join([element("h2", "Conditions"), table(("condition", "run", "", "values"), rows, text_columns=4)])


def _pair(pair: PairDiff) -> Markup:
    return join(
        [
            element("h2", pair.name),
            bullets("What makes the comparison doubtful", pair.doubts, class_="doubts"),
            bullets("What else was changed", pair.differences[MOST_DIFFERENCES:]),
            _timing_table(timing_title(pair), headline(pair)),
            forest(headline(pair)),
            foldout("Timings by call and by GPU clock", _timing_table("", _others(pair))),
            _metrics(pair.metrics),
            _kernels(pair),
            _parity(pair),
            bullets("Notes", pair.notes),
        ]
    )


def _others(pair: PairDiff) -> list[TimingDiff]:
    shown = {timing.name for timing in headline(pair)}
    return [timing for timing in pair.timings if timing.name not in shown]


def _timing_table(title: str, timings: Sequence[TimingDiff]) -> Markup | None:
    if not timings:
        return None
    rows: list[Sequence[object]] = []
    for timing in timings[:400]:
        for change in timing.changes:
            verdict = element("span", _colored(change.verdict), title=change.reason or None)
            rows.append(
                (
                    timing.name,
                    change.statistic,
                    quantity(change.base, timing.unit),
                    quantity(change.head, timing.unit),
                    change_text(change),
                    p_text(change),
                    verdict,
                )
            )
        if timing.base and timing.head:
            spread = [quantity(side.std, timing.unit) for side in (timing.base, timing.head)]
            rows.append((timing.name, f"std (n = {timing.base.n}, {timing.head.n})", *spread, "", "", ""))
    head = ("timing", "statistic", "base", "head", "change", "p", "verdict")
    return join([element("h3", title) if title else None, table(head, rows, text_columns=2)])


def forest(timings: Sequence[TimingDiff], width: int = 760) -> Markup | None:
    """Changes of the mean with their intervals, on one axis."""
    shown = [
        (timing.name, change)
        for timing in timings[:40]
        for change in timing.changes
        if change.statistic == "mean" and change.ratio is not None
    ]
    if not shown:
        return None
    ends = [end for _, c in shown for end in (c.low or c.ratio or 1.0, c.high or c.ratio or 1.0)]
    low, high = min(0.98, *ends), max(1.02, *ends)
    left, row = 210, 22

    def x(value: float) -> float:
        return round(left + (value - low) / (high - low) * (width - left - 20), 1)

    height = row * len(shown) + 30
    parts = [element("line", x1=x(1), x2=x(1), y1=4, y2=height - 22, stroke="#8a93a0", stroke_dasharray="3 3")]
    for place, (name, change) in enumerate(shown):
        y, value = 14 + row * place, change.ratio or 1.0
        color = {"good": "#0a6b3d", "bad": "#b3261e"}.get(tone(change.verdict) or "", "#5b6470")
        parts += [
            element("text", name[:30], x=left - 10, y=y + 4, text_anchor="end"),
            element("line", x1=x(change.low or value), x2=x(change.high or value), y1=y, y2=y, stroke=color,
                    stroke_width=3),
            element("circle", cx=x(value), cy=y, r=4, fill=color),
        ]  # fmt: skip
    for value in (low, 1.0, high):
        parts.append(element("text", f"{value - 1:+.1%}", x=x(value), y=height - 6, text_anchor="middle"))
    label = "change of the mean, head over base, with 95 % intervals"
    return element("svg", parts, viewBox=f"0 0 {width} {height}", width=width, role="img", aria_label=label)


def _metrics(metrics: Sequence[Metric]) -> Markup | None:
    if not metrics:
        return None
    changed = [metric for metric in metrics if metric.base != metric.head]
    same = [metric for metric in metrics if metric.base == metric.head]
    return join(
        [
            element("h3", "Counts, sizes and traced time, per call where they name an arm"),
            _metric_table(changed) if changed else element("p", "none changed", class_="muted"),
            foldout(f"{len(same)} that did not change", _metric_table(same)),
        ]
    )


def _metric_table(metrics: Sequence[Metric]) -> Markup:
    rows = []
    for metric in metrics:
        change = ""
        if metric.base and metric.head is not None:
            change = f"{metric.head / metric.base - 1:+.1%}"
        base, head = quantity(metric.base, metric.unit), quantity(metric.head, metric.unit)
        rows.append((metric.name, base, head, change, _colored(metric.verdict)))
    return table(("quantity", "base", "head", "change", ""), rows)


def _kernels(pair: PairDiff) -> Markup | None:
    if not pair.kernels:
        return None
    rows = [
        (
            row.arm,
            element("span", row.short, title=row.name[:2000]),
            row.family,
            row.status,
            f"{row.base_count:.6g} → {row.head_count:.6g}",
            str(row.moved or ""),
            us(row.base_us),
            us(row.head_us),
            us(row.head_us - row.base_us),
        )
        for row in pair.kernels[:500]
    ]
    head = ("arm", "GPU operation", "family", "status", "number", "moved", "base", "head", "difference")
    return join(
        [
            element("h3", "GPU operations that differ, per call"),
            table(head, rows[:_MOST_ROWS], text_columns=4),
            foldout(f"{len(rows) - _MOST_ROWS} more", table(head, rows[_MOST_ROWS:], text_columns=4)),
        ]
        if len(rows) > _MOST_ROWS
        else [element("h3", "GPU operations that differ, per call"), table(head, rows, text_columns=4)]
    )


def _parity(pair: PairDiff) -> Markup | None:
    parts: list[object] = []
    for row in pair.parity:
        base, head = (
            share_of(row.base_equal, row.base_total),
            share_of(row.head_equal, row.head_total),
        )
        cells = [("equal bits", base, head), ("worst relative RMS", rms(row.base_worst), rms(row.head_worst))]
        parts += [element("h3", f"Parity: {row.source}"), table(("", "base", "head"), cells)]
        parts += [bullets("New findings", row.new_findings), bullets("Findings that are gone", row.gone_findings)]
    if pair.accuracy:
        accuracies = [
            (d.task, d.metric, f"{d.a:.4f} ± {d.stderr_a:.4f}", f"{d.b:.4f} ± {d.stderr_b:.4f}", f"{d.sigma:.2f}σ",
             f"{d.p_value:.2g}", f"{d.detectable_delta:.4f}")
            for d in pair.accuracy
        ]  # fmt: skip
        parts += [
            element("h3", "Accuracy"),
            table(("task", "metric", "base", "head", "Δ", "p", "detectable Δ"), accuracies, text_columns=2),
        ]
    return join(parts) if parts else None


def _lonely(diff: Diff) -> Markup | None:
    lonely = [f"only in {diff.base}: {name}" for name in diff.only_base]
    lonely += [f"only in {diff.head}: {name}" for name in diff.only_head]
    return bullets("Not compared", lonely)


# --- one bundle ------------------------------------------------------------------------------------


def bundle_html(bundle: Bundle, contents: Sequence[Content]) -> str:
    """One bundle as one HTML file; `contents` are the bundle's own."""
    note = bundle.note()
    body: list[object] = [
        element("h1", bundle.path.name),
        element("p", f"review bundle, made by {bundle.manifest.creator}; digest ", element("code", bundle.digest)),
        [_entry(content) for content in contents],
        [element("h2", "Note"), element("pre", note)] if note else None,
        _members(bundle),
        _definitions(),
    ]
    return page(bundle.path.name, body, STYLE)


def contents_html(contents: Sequence[Content], name: str) -> str:
    """A folder of measurements or foreign result as one HTML file."""
    return page(name, [element("h1", name), [_entry(content) for content in contents], _definitions()], STYLE)


def _entry(content: Content) -> Markup:
    found = review(content)
    parts: list[object] = [element("h2", content.entry.name)]
    if found is not None and content.run is not None:
        parts += _review(found, content.run)
    if content.ladder is not None:
        # Its tables are pandas', which takes longer to import than a report of a run to write.
        from workbench.views.bundle_ladder import ladder_section

        parts.append(ladder_section(content.ladder))
        parts += [_environment(content.ladder.environment)] if content.run is None else []
    if content.parity is not None:
        parts.append(_parity_session(content))
    if content.external is not None:
        parts.append(_external(content.external))
    if content.note:
        parts += [element("h3", "Note"), element("pre", content.note)]
    for name, document in content.findings.items():
        if name == "lint.json":
            parts.append(_lint(document))
        text = msgspec.json.format(msgspec.json.encode(document), indent=1).decode()
        cut = text[:_LONGEST_DOCUMENT] + ("\n…" if len(text) > _LONGEST_DOCUMENT else "")
        parts.append(foldout(name, element("pre", cut)))
    return join(parts)


def _review(found: Review, run: Run) -> list[object]:
    whole = [row for row in found.timings if row.call is None or len(run.calls) == 1]
    shown = whole or found.timings
    rest = [row for row in found.timings if row not in shown]
    return [
        [element("p", text, class_=f"verdict {tone(verdict) or ''}") for text, verdict in run_verdicts(found, run)],
        bullets("Read this with the numbers", found.notes, class_="doubts"),
        element("h3", "Timings, without a profiler"),
        _arm_table(shown),
        strips(shown),
        foldout("Timings by call", _arm_table(rest[:400])) if rest else None,
        element("h3", "Configuration and its bill"),
        _configuration(run, found),
        _trace_tables(found),
        _environment(run.environment),
    ]


def _arm_table(rows: Iterable[ArmTiming]) -> Markup:
    cells = [
        (
            row.arm,
            "pass" if row.call is None else f"call {row.call}",
            row.clock,
            us(row.statistics.mean),
            us(row.statistics.median),
            us(row.statistics.std),
            us(row.statistics.p99),
            str(row.statistics.n),
        )
        for row in rows
    ]
    return table(("arm", "what", "clock", "mean", "median", "std", "P99", "n"), cells, text_columns=3)


def strips(rows: Sequence[ArmTiming], width: int = 760) -> Markup | None:
    """Every sample as a tick, one strip an arm, on one axis from 0."""
    shown = [row for row in rows if row.clock == "wall"][:12]
    if not shown:
        return None
    largest = max(max(row.samples) for row in shown) or 1.0
    left, line = 150, 26

    def x(value: float) -> float:
        return round(left + value / largest * (width - left - 20), 1)

    parts = []
    for place, row in enumerate(shown):
        y = 12 + line * place
        name = row.arm if row.call is None else f"{row.arm} {row.call}"
        parts.append(element("text", name, x=left - 10, y=y + 5, text_anchor="end"))
        parts += [
            element("line", x1=position, x2=position, y1=y - 6, y2=y + 6, stroke="#2f5d8a", stroke_opacity=0.35)
            for position in sorted({x(value) for value in row.samples})
        ]
    height = line * len(shown) + 24
    parts += [
        element("text", us(value), x=x(value), y=height - 6, text_anchor="end" if value else "middle")
        for value in (0.0, largest)
    ]
    return element("svg", parts, viewBox=f"0 0 {width} {height}", width=width, role="img", aria_label="samples")


def _configuration(run: Run, found: Review) -> Markup:
    config, model = run.config, run.model
    rows = [
        ("model", f"{model.architecture}, depth {model.depth}, width {model.width}, {model.dtype}"),
        ("attention", model.attention_backend),
        ("weights", f"{model.weights}, {model.weights_fingerprint[:16]}"),
        ("replay", run.replay),
        ("budgets", ", ".join(map(str, config.budgets))),
        ("asked for", ", ".join(map(str, config.requested_budgets)) or "vLLM's own"),
        ("items, frames a replay", f"{config.max_items}, {config.max_frames}"),
        ("workload", f"{run.workload}; {len(run.calls)} distinct calls"),
        *((name, quantity(value, _UNITS.get(name, "count"))) for name, value in found.totals.items()),
    ]
    bill = [
        (str(cost.budget), f"{cost.seconds:.3f} s", quantity(cost.pool_bytes, "bytes"),
         quantity(cost.allocated_bytes, "bytes"), str(cost.nodes or DASH))
        for cost in run.capture
    ]  # fmt: skip
    return join(
        [
            table(("", ""), rows, text_columns=2),
            foldout("Capture, budget by budget", table(("budget", "time", "pool", "allocated", "nodes"), bill)),
        ]
    )


_UNITS = {"padding": "share", "capture.seconds": "s", "memory.pool": "bytes", "memory.allocated": "bytes"}


def _trace_tables(found: Review) -> Markup | None:
    if not found.traces:
        return None
    counts = [
        (trace.arm, trace.file, *(us(trace.spans_us[key]) for key in ("wall", "busy", "idle", "launch_gap")),
         *(quantity(trace.counts[key], "count") for key in ("launches", "syncs", "kernels")))
        for trace in found.traces
    ]  # fmt: skip
    head = ("arm", "trace", "wall", "busy", "idle", "launch gaps", "launches", "syncs", "kernels")
    parts: list[object] = [element("h3", "Traces, per call"), table(head, counts, text_columns=2)]
    for trace in found.traces:
        rows = [
            (element("span", short_name(name), title=name[:2000]), family(name), f"{count:.6g}", us(total))
            for name, count, total in trace.kernels[:_MOST_ROWS]
        ]
        title = f"{trace.arm}: GPU operations, largest first ({len(trace.kernels)} names)"
        parts.append(foldout(title, table(("operation", "family", "number", "time"), rows, text_columns=2)))
        parts.append(bullets("Warnings", trace.warnings))
    return join(parts)


def _environment(environment: Environment) -> Markup:
    rows: list[tuple[str, object]] = [
        ("system", f"{environment.system}, Python {environment.python}"),
        ("CPU", f"{environment.cpu} × {environment.cpu_count}"),
        ("vLLM, torch, CUDA", f"{environment.vllm}, {environment.torch}, {environment.cuda_runtime}"),
    ]
    for gpu in environment.gpus:
        told = f"{gpu.name}, driver {gpu.driver}, {gpu.sm_clock_mhz} MHz, {gpu.power_limit_w} W, {gpu.temperature_c} °C"
        rows.append((f"GPU {gpu.index}", told))
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    return join(
        [
            element("h3", "Environment"),
            table(("", ""), rows, text_columns=2),
            foldout("Packages", element("p", packages)) if packages else None,
        ]
    )


def _parity_session(content: Content) -> Markup | None:
    parity = content.parity
    if parity is None:
        return None
    cells = [
        (cell.scenario, str(cell.budget or "all"), cell.status, f"{cell.bit_equal}/{cell.items}", rms(cell.ratio),
         cell.reason)
        for cell in parity.cells[:400]
    ]  # fmt: skip
    findings = [f"{finding.severity}, {finding.suspect}: {finding.message}" for finding in parity.findings]
    head = ("scenario", "budget", "status", "equal bits", "worst / limit", "reason")
    bad = "bad" if parity.mismatched else ""
    first = element("p", parity_verdict(parity), class_=f"verdict {bad}")
    return join(
        [element("h3", "Parity session"), first, bullets("Findings", findings), table(head, cells, text_columns=3)]
    )


def _lint(document: Any) -> Markup | None:
    """Lint findings as a table; whatever has another shape stays in the raw document below."""
    findings = document.get("findings") if isinstance(document, dict) else None
    keys = ("severity", "rule", "budget", "message", "remedy")
    rows = [
        [str(row.get(key, ""))[:500] for key in keys]
        for row in (findings if isinstance(findings, list) else [])[:200]
        if isinstance(row, dict)
    ]
    return join([element("h3", "Lint findings"), table(keys, rows, text_columns=len(keys))]) if rows else None


def _external(external: External) -> Markup:
    measures = [
        (measure.name, quantity(measure.mean, measure.unit), quantity(measure.median, measure.unit),
         quantity(measure.std, measure.unit), quantity(measure.percentiles.get("99"), measure.unit),
         str(len(measure.samples) or DASH))
        for measure in external.measures[:400]
    ]  # fmt: skip
    accuracies = [
        (row.task, row.metric, f"{row.value:.4f}", DASH if row.stderr is None else f"{row.stderr:.4f}")
        for row in external.accuracies[:400]
    ]
    kernels = [
        (element("span", short_name(row.name), title=row.name[:2000]), family(row.name), str(row.count),
         us(row.total_us))
        for row in external.kernels[:_MOST_ROWS]
    ]  # fmt: skip
    return join(
        [
            element("p", f"{external.source}, {external.model or 'no model named'} {external.created}", class_="muted"),
            bullets("Read this with the numbers", external.notes, class_="doubts"),
            table(("measure", "mean", "median", "std", "P99", "samples"), measures) if measures else None,
            table(("task", "metric", "value", "standard error"), accuracies, text_columns=2) if accuracies else None,
            table(("operation", "family", "number", "time"), kernels, text_columns=2) if kernels else None,
            foldout("Configuration", table(("", ""), list(external.configuration.items())[:200], text_columns=2)),
        ]
    )


def _members(bundle: Bundle) -> Markup:
    rows = [(member.path, f"{member.bytes:,}", member.sha256) for member in bundle.manifest.members]
    redactions = bundle.manifest.redactions
    told = "not redacted" if redactions is None else "redacted: " + (
        ", ".join(f"{count} × {rule}" for rule, count in redactions.items()) or "nothing was found"
    )  # fmt: skip
    return join(
        [
            element("h2", "Members"),
            element("p", told),
            bullets("Warnings", bundle.manifest.warnings),
            foldout(f"{len(rows)} members with SHA-256", table(("member", "bytes", "SHA-256"), rows)),
            element(
                "p",
                "To open a trace: run ",
                element("code", f"workbench bundle extract {bundle.path.name} FOLDER"),
                ", then drop a file of FOLDER/runs/*/traces/ into Perfetto's page (ui.perfetto.dev, Open trace file).",
            ),
        ]
    )


def _definitions() -> Markup:
    rows = [
        ("wall, gpu", "host time between two synchronises around a call; CUDA events around it"),
        (
            "pass",
            "all calls of the workload (in a comparison those that the heading names) together, each as often as it "
            "occurs, repeat by repeat",
        ),
        ("p", "Mann-Whitney test (mean, median) or permutation test (P99), adjusted by Holm's method"),
        ("no evidence", "p is 0.05 or more, or the change is below 1 %"),
        ("padding", "budget minus tokens, over budget, summed over replays"),
        ("launch gap", "idle whose next operation was launched after the previous one had ended"),
        (
            "step of a ladder",
            "one way to run a call: eager, vLLM's graph, a variant, several; all in one process, in ABBA order",
        ),
        ("parity over noise", "worst item's distance to eager as served, over what rounding does to eager itself"),
        ("σ", "difference of two accuracies in standard errors of the difference"),
    ]
    return foldout("What the words mean", table(("", ""), rows, text_columns=2))
