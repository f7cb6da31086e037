"""Figures and tables of notebook 03: pure functions from stored parity results to plotly figures and pandas tables."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.decision import BenchmarkDelta, Interval, ProxyFlips
from workbench.parity import (
    STATUS_WORDS,
    STATUSES,
    SUSPECTS,
    Bisection,
    Campaign,
    Change,
    FaultResult,
    Finding,
    Noise,
    Parity,
    Status,
    fault_rows,
)
from workbench.views.theme import BLACK, BLUE, GREEN, GRID, MUTED, ORANGE, PAPER, PURPLE, SKY, VERMILION

STATUS_COLORS: dict[Status, str] = {
    "error": PURPLE,
    "mismatch": VERMILION,
    "hazard": ORANGE,
    "within_noise": SKY,
    "equal": GREEN,
    "not_tested": GRID,
}
_FAULT_COLORS = {"caught": GREEN, "misnamed": ORANGE, "missed": VERMILION, "not_tested": GRID}
_SPANNING = "all"


# The matrix --------------------------------------------------------------------------------------------------------


def matrix(parity: Parity) -> go.Figure:
    """Scenario by budget, coloured by status; a number is the worst distance over its limit."""
    budgets = [*sorted({cell.budget for cell in parity.cells if cell.budget is not None}), None]
    names = list(dict.fromkeys(cell.scenario for cell in parity.cells if cell.status != "not_tested"))
    cells = {(cell.scenario, cell.budget): cell for cell in parity.cells}
    grid = [[cells.get((name, budget)) for budget in budgets] for name in names]
    return _heatmap(
        title=f"{parity.name}: does the graph change what the model sees?",
        columns=[_SPANNING if budget is None else str(budget) for budget in budgets],
        rows=names,
        codes=[[None if cell is None else STATUSES.index(cell.status) for cell in row] for row in grid],
        texts=[["" if cell is None else _cell_text(cell.status, cell.ratio) for cell in row] for row in grid],
        colors=[STATUS_COLORS[status] for status in STATUSES],
        column_title="token budget (all: the scenario spans budgets)",
    )


def _cell_text(status: Status, ratio: float | None) -> str:
    return f"{STATUS_WORDS[status]} {ratio:.2g}" if ratio and status != "equal" else STATUS_WORDS[status]


def _heatmap(
    *,
    title: str,
    columns: list[str],
    rows: list[str],
    codes: Sequence[Sequence[int | None]],
    texts: Sequence[Sequence[str]],
    colors: list[str],
    column_title: str,
) -> go.Figure:
    """Cells of `colors[code]`; None is left empty."""
    steps = [(i / len(colors), color) for i, color in enumerate(colors)]
    ends = [((i + 1) / len(colors), color) for i, color in enumerate(colors)]
    figure = go.Figure(
        go.Heatmap(
            z=codes,
            x=columns,
            y=rows,
            text=texts,
            texttemplate="%{text}",
            hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
            colorscale=[point for pair in zip(steps, ends, strict=True) for point in pair],
            zmin=-0.5,
            zmax=len(colors) - 0.5,
            showscale=False,
            xgap=2,
            ygap=2,
        )
    )
    figure.update_layout(title=title, height=120 + 26 * len(rows), plot_bgcolor=PAPER)
    figure.update_xaxes(type="category", title=column_title, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def matrix_table(parity: Parity) -> pd.DataFrame:
    """One row per tested cell; of a session with variants, also how many items have the bits of vLLM's own graph."""
    table = pd.DataFrame(
        {
            "scenario": cell.scenario,
            "budget": cell.budget,
            "status": STATUS_WORDS[cell.status],
            "calls": cell.calls,
            "items": cell.items,
            "bit-equal": cell.bit_equal,
            "replayed by vLLM's graph": cell.graph_items,
            "with its bits": cell.graph_equal,
            "worst relative RMS": cell.worst.relative_rms if cell.worst else None,
            "worst over limit": cell.ratio,
            "reason": cell.reason,
        }
        for cell in parity.cells
        if cell.status != "not_tested"
    ).astype({"budget": "Int64"})
    return table if parity.variants else table.drop(columns=["replayed by vLLM's graph", "with its bits"])


def findings_table(findings: Sequence[Finding]) -> pd.DataFrame:
    """One row per suspect and scenario, with how often and one example."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for finding in findings:
        row = rows.setdefault(
            (finding.suspect, finding.scenario),
            {
                "suspect": finding.suspect,
                "which is": SUSPECTS[finding.suspect],
                "scenario": finding.scenario,
                "severity": finding.severity,
                "defect": finding.defect or "",
                "times": 0,
                "for example": finding.message,
            },
        )
        row["times"] = int(str(row["times"])) + 1
    return pd.DataFrame(list(rows.values()))


def worst_items(parity: Parity, count: int = 10) -> pd.DataFrame:
    """The stored items furthest from eager as served, in the graph and on the padded buffers run eagerly.

    Those of a hazard come last: values that the lab itself poisoned have no distance.
    """
    items = sorted(parity.items, key=lambda item: item.status == "hazard")
    return pd.DataFrame(
        {
            "scenario": item.scenario,
            "budget": item.budget,
            "item (t x h x w)": " x ".join(map(str, item.grid)),
            "tokens": item.graph.tokens,
            "status": STATUS_WORDS[item.status],
            "graph relative RMS": item.graph.relative_rms,
            "graph worst row": item.graph.worst_row,
            "graph max abs": item.graph.max_abs,
            "graph min cosine": item.graph.min_cosine,
            "padded eager relative RMS": item.padded.relative_rms if item.padded else None,
            "finite": item.graph.finite,
        }
        for item in items[:count]
    )


def changes_table(changes: Sequence[Change]) -> pd.DataFrame:
    """One row per condition that is not as it was in an earlier session."""
    return pd.DataFrame(
        {
            "scenario": change.scenario,
            "budget": change.budget,
            "before": STATUS_WORDS[change.before],
            "now": STATUS_WORDS[change.after],
            "worse": change.worse,
        }
        for change in changes
    )


# Noise -------------------------------------------------------------------------------------------------------------


def noise(sessions: Mapping[str, Parity]) -> go.Figure:
    """Per session: the two floors, the limit, the worst agreeing cell, and the two grave faults; log scale."""
    figure = go.Figure()
    marks = {
        "composition of the batch": (BLUE, "circle"),
        "bf16 against float32": (SKY, "circle"),
        "graph against float32": (GREEN, "diamond-open"),
        "limit of a mismatch": (BLACK, "line-ns"),
        "rotary of another grid": (ORANGE, "x"),
        "attention removed": (VERMILION, "x"),
    }
    table = noise_table(sessions)
    for name, (color, symbol) in marks.items():
        figure.add_scatter(
            x=table[name],
            y=table["session"],
            mode="markers",
            name=name,
            marker={"color": color, "symbol": symbol, "size": 13, "line": {"width": 2, "color": color}},
        )
    figure.update_layout(
        title="What rounding does, and what faults do",
        height=220 + 50 * len(table),
        legend={"orientation": "h", "x": 0, "y": -0.35, "yanchor": "top"},
    )
    figure.update_xaxes(type="log", title="relative RMS of the outputs (0 is not drawn)")
    figure.update_yaxes(autorange="reversed")
    return figure


def noise_table(sessions: Mapping[str, Parity]) -> pd.DataFrame:
    """The numbers of `noise`; which variants, where a session has some."""
    table = pd.DataFrame(
        {
            "session": name,
            "variants": ", ".join(parity.variants),
            "items": parity.noise.items,
            "composition of the batch": parity.noise.composition_rms,
            "bf16 against float32": parity.noise.reference_rms,
            "graph against float32": parity.noise.graph_reference_rms,
            "limit of a mismatch": parity.noise.limit_rms,
            "rotary of another grid": parity.visibility.rotary_swapped,
            "attention removed": parity.visibility.attention_removed,
            "attention over floor": parity.visibility.attention_ratio,
            "rotary over floor": parity.visibility.rotary_ratio,
        }
        for name, parity in sessions.items()
    )
    return table if any(parity.variants for parity in sessions.values()) else table.drop(columns="variants")


# Bisection ---------------------------------------------------------------------------------------------------------


def bisection(found: Bisection, floor: Noise) -> go.Figure:
    """Relative RMS of each module's output on the valid rows, with the limit; the first beyond it is marked."""
    table = bisection_table(found)
    values = table["relative RMS"].astype(float)
    lowest = floor.limit_rms / 1e3
    figure = go.Figure()
    figure.add_scatter(
        x=table["module"],
        y=values.fillna(np.inf).clip(lower=lowest, upper=10.0),
        mode="lines+markers",
        name="valid rows (not finite is drawn at 10)",
        marker={
            "size": 10,
            "color": [VERMILION if name == found.first else BLUE for name in table["module"]],
        },
        line={"color": MUTED, "width": 1},
    )
    figure.add_hline(y=floor.limit_rms, line={"color": BLACK, "dash": "dash"}, annotation_text="limit of the outputs")
    figure.update_layout(title=f"Where the arms part: {found.scenario}", height=360, showlegend=False)
    figure.update_yaxes(type="log", title="relative RMS, module by module")
    figure.update_xaxes(type="category", tickangle=-45)
    return figure


def bisection_table(found: Bisection) -> pd.DataFrame:
    """One row per module."""
    return pd.DataFrame(
        {
            "module": stage.name,
            "relative RMS": stage.relative_rms,
            "worst row": stage.worst_row,
            "valid rows finite": stage.finite,
            "padded rows max abs": stage.padded_max_abs,
            "padded rows finite": stage.padded_finite,
        }
        for stage in found.stages
    )


# Faults ------------------------------------------------------------------------------------------------------------


def faults(results: Sequence[FaultResult], title: str) -> go.Figure:
    """Fault, with the suspect that was named, by scenario: coloured by outcome where the scenario saw it."""
    tested = [result for result in results if result.status != "not_tested"]
    scenarios = sorted({name for result in tested for name in result.scenarios})
    outcomes = list(_FAULT_COLORS)
    return _heatmap(
        title=title,
        columns=scenarios,
        rows=[f"{result.title} \N{RIGHTWARDS ARROW} {result.suspect or result.status}" for result in tested],
        codes=[
            [outcomes.index(result.status) if name in result.scenarios else None for name in scenarios]
            for result in tested
        ],
        texts=[[""] * len(scenarios) for _ in tested],
        colors=list(_FAULT_COLORS.values()),
        column_title="seen in scenario",
    ).update_xaxes(tickangle=-45)


def fault_table(campaign: Campaign, recordings: Sequence[Parity]) -> pd.DataFrame:
    """One row per fault, live results beside recorded ones."""
    return pd.DataFrame(fault_rows(campaign, list(recordings)))


# Decisions ---------------------------------------------------------------------------------------------------------


def agreement(title: str, share: float, interval: Interval) -> go.Figure:
    """The share of identical answers with its exact interval."""
    figure = go.Figure()
    figure.add_scatter(
        x=[share],
        y=[title],
        error_x={"type": "data", "array": [interval.high - share], "arrayminus": [share - interval.low]},
        mode="markers",
        marker={"size": 12, "color": BLUE},
    )
    figure.update_layout(title="Identical answers with graphs off and on", height=190, showlegend=False)
    figure.update_xaxes(title=f"share of samples, {interval.confidence:.0%} exact interval", range=[0.5, 1.005])
    return figure


def benchmarks(deltas: Sequence[BenchmarkDelta]) -> go.Figure:
    """Score with graphs on minus off, with one standard error of the difference and what could have been detected."""
    table = benchmark_table(deltas)
    figure = go.Figure()
    figure.add_bar(
        y=table["task"],
        x=2 * table["detectable"],
        base=-table["detectable"],
        orientation="h",
        marker_color=GRID,
        name="too small to be seen (80 % power)",
    )
    figure.add_scatter(
        y=table["task"],
        x=table["change"],
        error_x={"type": "data", "array": table["change"].abs() / table["sigma"]},
        mode="markers",
        marker={"size": 11, "color": BLUE},
        name="change, one standard error",
    )
    figure.update_layout(title="Benchmark scores with graphs on minus off", height=260)
    figure.update_xaxes(title="change of the score")
    return figure


def benchmark_table(deltas: Sequence[BenchmarkDelta]) -> pd.DataFrame:
    """One row per benchmark and metric."""
    return pd.DataFrame(
        {
            "task": delta.task,
            "off": delta.a,
            "on": delta.b,
            "change": delta.delta,
            "sigma": delta.sigma,
            "p": delta.p_value,
            "detectable": delta.detectable_delta,
            f"samples per arm to see {delta.target_delta:.0%}": delta.samples_needed,
        }
        for delta in deltas
    )


def proxy_table(sessions: Mapping[str, Parity]) -> pd.DataFrame:
    """Argmax flips of a random linear head per session: a proxy, not a language model."""

    def row(name: str, pair: str, flips: ProxyFlips) -> dict[str, object]:
        return {
            "session": name,
            "pair": pair,
            "decisions": flips.decisions,
            "flips": flips.flips,
            "median margin of flips": float(np.median(flips.flip_margins)) if flips.flip_margins else None,
            "median margin of all": flips.median_margin,
        }

    return pd.DataFrame(
        row(name, pair, flips)
        for name, parity in sessions.items()
        for pair, flips in (
            ("graph and eager", parity.proxy),
            ("eager, items together and alone", parity.proxy_noise),
        )
        if flips is not None
    )
