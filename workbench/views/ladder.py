"""Figures of what a graph could hold and of the variants, from the tables of `workbench.ladder`."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from workbench.ladder import ALL_BLOCKS, OUTSIDE_MODULES
from workbench.run import ARM_TITLES
from workbench.views.theme import (
    ARM_COLORS,
    BLACK,
    BLUE,
    FAMILY_COLORS,
    GREEN,
    GRID,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILION,
)

_ARM_COLORS = {ARM_TITLES[arm]: color for arm, color in ARM_COLORS.items()}
_BASELINES = {"eager as served": BLUE, "eager fallback": VERMILION, "vLLM's graph": MUTED}
_MARK = {"symbol": "line-ns", "size": 20, "line": {"width": 3, "color": BLACK}}
_MOST_MODULES = 14
_RATIOS = [0.2, 0.5, 0.8, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30]  # ticks of a logarithmic axis
_BELOW = {"y": -0.2, "yanchor": "top"}


def candidates(table: pd.DataFrame) -> go.Figure:
    """Time of a call inside and outside the graph, per candidate; `table` from `ladder.boundaries`."""
    figure = go.Figure()
    inside = table["captures"] == "yes"
    for rows, column, name, color in (
        (table[inside], "inside us", "replay of the graph", GREEN),
        (table[~inside], "inside us", "the region run eagerly: it does not capture", VERMILION),
        (table, "outside us", "outside, run eagerly", ORANGE),
    ):
        figure.add_bar(
            y=_wrapped(rows["the graph would hold"]),
            x=rows[column] / 1e3,
            orientation="h",
            name=name,
            marker_color=color,
            text=[f"{value / 1e3:.2f}" for value in rows[column]],
            textposition="auto",
            textangle=0,
        )
    order = _wrapped(table["the graph would hold"])
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order)
    figure.update_layout(
        barmode="stack",
        title="A call by what the graph holds",
        xaxis_title="ms, median of each part alone, host time between two synchronises",
        height=160 + 42 * len(table),
    )
    return figure


def _wrapped(names: "pd.Series[str] | Sequence[str]", width: int = 42) -> list[str]:
    """Break long names into two lines, at the last space before `width`."""
    found = []
    for name in names:
        cut = name.rfind(" ", 0, width) if len(name) > width else -1
        found.append(name if cut < 0 else f"{name[:cut]}<br>{name[cut + 1 :]}")
    return found


def modules_map(parts: Sequence[pd.DataFrame]) -> go.Figure:
    """Treemaps of graphs side by side: module, then kernel family; all areas in one scale; from `ladder.parts`."""
    figure = go.Figure()
    totals = [float(table["us"].sum()) for table in parts]
    room = 1 - 0.02 * (len(parts) - 1)
    left = 0.0
    for table, total in zip(parts, totals, strict=True):
        right = min(1.0, left + room * total / sum(totals))
        figure.add_trace(_treemap(table, total, (left, right)))
        left = right + 0.02
    figure.update_layout(
        title="A replay by module and kernel family: area is time",
        height=560,
        margin={"l": 8, "r": 8, "b": 8},
        uniformtext={"minsize": 9, "mode": "hide"},
    )
    return figure


def _treemap(table: pd.DataFrame, total: float, across: tuple[float, float]) -> go.Treemap:
    graph = str(table["graph"].iloc[0])
    us: dict[str, float] = {graph: total}
    nodes: dict[str, int] = {graph: int(table["nodes"].sum())}
    label, parent, color = {graph: graph}, {graph: ""}, {graph: PAPER}
    modules = table["module"].tolist()
    for module, family, count, time in table[["module", "family", "nodes", "us"]].itertuples(index=False):
        names = [module] if module == OUTSIDE_MODULES else module.replace(ALL_BLOCKS, "blocks").split(".")
        # A box in a box takes room: a module of one family, with none inside it, is one box.
        alone = modules.count(module) == 1 and not any(other.startswith(f"{module}.") for other in modules)
        # On two lines, so that narrow boxes keep their names.
        path = [graph, *names[:-1], f"{names[-1]}<br>{family}"] if alone else [graph, *names, family]
        for depth in range(1, len(path)):
            key = "/".join(path[: depth + 1])
            leaf = depth == len(path) - 1
            label[key], parent[key] = path[depth], "/".join(path[:depth])
            color[key] = FAMILY_COLORS.get(family, MUTED) if leaf else GRID
            us[key] = us.get(key, 0.0) + time
            nodes[key] = nodes.get(key, 0) + count
    return go.Treemap(
        ids=list(us),
        labels=[label[key] for key in us],
        parents=[parent[key] for key in us],
        values=list(us.values()),
        customdata=[nodes[key] for key in us],
        branchvalues="total",
        marker={"colors": [color[key] for key in us], "line": {"width": 1, "color": PAPER}},
        texttemplate="%{label}<br>%{value:,.0f} us",
        hovertemplate="%{id}<br>%{value:,.1f} us in %{customdata} nodes<extra></extra>",
        tiling={"pad": 1},
        domain={"x": list(across)},
        name=graph,
    )


def roofline(tables: Sequence[pd.DataFrame]) -> go.Figure:
    """Time of each module beside its roofline, per graph; from `ladder.modules`. The smallest modules are left out."""
    figure = go.Figure()
    together = pd.concat(tables)
    largest = together.groupby("module")["us"].max().sort_values(ascending=False).head(_MOST_MODULES)
    shown = list(largest.index)
    for table, color in zip(tables, (MUTED, GREEN, BLUE), strict=False):
        rows = table[table["module"].isin(shown)]
        figure.add_bar(
            y=rows["module"], x=rows["us"], orientation="h", name=str(table["graph"].iloc[0]), marker_color=color
        )
    floors = together[together["module"].isin(shown)].groupby("module")["roofline us"].max()
    floors = floors[floors > 0]
    figure.add_scatter(y=list(floors.index), x=list(floors), mode="markers", marker=_MARK, name="roofline")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=shown)
    figure.update_layout(
        barmode="group",
        title="How far each module is from the roofline",
        xaxis_title="us in one replay, all blocks together",
        height=160 + 30 * len(shown),
    )
    return figure


def steps(table: pd.DataFrame) -> go.Figure:
    """Median of every column on one call, with a mark at the P99; `table` from `ladder.steps`."""
    rows = table[table["median ms"].notna()]
    figure = go.Figure()
    figure.add_bar(
        y=_wrapped(rows["step"], 32),
        x=rows["median ms"],
        orientation="h",
        marker_color=[_step_color(step) for step in rows["step"]],
        name="median",
    )
    # Labels stand behind the P99: the bars of fast steps have no room for them.
    figure.add_scatter(
        y=_wrapped(rows["step"], 32),
        x=rows["P99 ms"],
        mode="markers+text",
        marker=_MARK,
        text=[f"{value:.2f} ms, P99 {p99:.2f}" for value, p99 in zip(rows["median ms"], rows["P99 ms"], strict=True)],
        textposition="middle right",
        name="P99",
        cliponaxis=False,
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(range=[0, 1.3 * float(rows["P99 ms"].max())])
    figure.update_layout(
        title=f"One call of {table['call'].iloc[0]}, step by step",
        xaxis_title="ms, host time between two synchronises, un-profiled",
        height=150 + 34 * len(rows),
        showlegend=False,
    )
    return figure


def _step_color(step: str) -> str:
    return _BASELINES.get(step, GREEN if step.startswith("all") else SKY)


def inside_the_call(table: pd.DataFrame) -> go.Figure:
    """GPU busy and idle in one traced call of every column; `table` from `ladder.steps`."""
    rows = table[table["busy ms"].notna()]
    figure = go.Figure()
    for column, name, color in (
        ("busy ms", "GPU busy", GREEN),
        ("idle ms", "GPU idle between its first and last op", VERMILION),
    ):
        figure.add_bar(y=_wrapped(rows["step"], 32), x=rows[column], orientation="h", name=name, marker_color=color)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="stack",
        title="What the GPU does in such a call",
        xaxis_title="ms (traced)",
        height=150 + 34 * len(rows),
    )
    return figure


def cases(table: pd.DataFrame) -> go.Figure:
    """Speed-up over eager as served of every column on every call; `table` from `ladder.all_steps`."""
    figure = go.Figure()
    calls = list(dict.fromkeys(table["call"]))
    singles = [step for step in dict.fromkeys(table["step"]) if step not in _BASELINES and not step.startswith("all")]
    series = [("vLLM's graph", VERMILION, 13), *[(step, SKY, 7) for step in singles]]
    series += [(step, GREEN, 13) for step in dict.fromkeys(table["step"]) if step.startswith("all")]
    for step, color, size in series:
        rows = table[(table["step"] == step) & table["vs served"].notna()]
        figure.add_scatter(
            y=rows["call"],
            x=rows["vs served"],
            mode="markers",
            marker={"color": color, "size": size},
            name="one or some variants" if size < 10 else step,
            legendgroup=color,
            showlegend=size > 10 or step in singles[:1],
            customdata=rows["step"],
            hovertemplate="%{customdata}, %{y}: %{x:.2f} times as fast as eager as served<extra></extra>",
        )
    figure.add_vline(x=1, line_dash="dot", line_color=BLUE)
    figure.update_yaxes(categoryorder="array", categoryarray=calls[::-1])
    figure.update_xaxes(type="log", tickvals=_RATIOS, title="times as fast as eager as served, medians (logarithmic)")
    figure.update_layout(title="Every call", height=150 + 40 * len(calls))
    return figure


def parity(table: pd.DataFrame) -> go.Figure:
    """Distance of every column to eager as served over the noise floor, a mark per call; from `ladder.all_steps`."""
    figure = go.Figure()
    order = _wrapped(list(dict.fromkeys(table["step"])), 32)
    equal = table["equals the graph"].eq(True)
    for rows, name, color in (
        (table[~equal], "differs from vLLM's graph", PURPLE),
        (table[equal], "equals vLLM's graph bit for bit", GREEN),
    ):
        figure.add_scatter(
            y=_wrapped(rows["step"], 32),
            x=rows["parity over noise"],
            mode="markers",
            marker={"color": color, "size": 9, "opacity": 0.7},
            cliponaxis=False,
            name=name,
            customdata=rows["call"],
            hovertemplate="%{y}, %{customdata}: %{x:.2f} times the noise<extra></extra>",
        )
    figure.add_vline(x=1, line_dash="dot", line_color=MUTED, annotation_text="noise floor")
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order)
    figure.update_xaxes(rangemode="tozero", title="relative RMS against eager as served over the noise floor")
    figure.update_layout(title="Do the outputs agree", height=170 + 30 * len(order), legend=_BELOW)
    return figure


def hardware(table: pd.DataFrame) -> go.Figure:
    """Achieved share of the roofline per kernel family and arm; the longest families; from `ladder.hardware`."""
    figure = go.Figure()
    order = list(table.groupby("family")["us"].max().sort_values(ascending=False).index)
    for arm, rows in table.groupby("arm", sort=False):
        figure.add_bar(
            y=rows["family"],
            x=rows["of the roofline"],
            orientation="h",
            name=str(arm),
            marker_color=_ARM_COLORS[str(arm)],
            customdata=rows["us"],
            text=[
                f"{share:.0%} of {us:,.0f} us" for share, us in zip(rows["of the roofline"], rows["us"], strict=True)
            ],
            hovertemplate="%{y}: %{x:.1%} of the roofline in %{customdata:,.0f} us<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order)
    figure.update_xaxes(
        tickformat=".0%", range=[0, 1], title="of what memory or tensor cores could do, whichever is nearer"
    )
    figure.update_layout(
        barmode="group", title="How much of the hardware each family uses", height=170 + 44 * len(order)
    )
    return figure
