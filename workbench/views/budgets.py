"""Figures of notebook 02: pure functions from the tables of `workbench.outcomes` to plotly figures."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.views.theme import BLACK, BLUE, COLORWAY, GREEN, GRID, MUTED, ORANGE, VERMILION

_BELOW = {"orientation": "h", "x": 0, "y": -0.42, "yanchor": "top"}  # clear of the axis title


def colors(names: list[str]) -> dict[str, str]:
    """One color for each configuration, the same in every figure of a page; the advised one is green."""
    others = [color for color in COLORWAY if color != GREEN]
    plain = [name for name in names if name != "advised"]
    return {name: others[i % len(others)] for i, name in enumerate(plain)} | {"advised": GREEN}


def items(table: pd.DataFrame) -> go.Figure:
    """Share of the items by their tokens, one panel per workload; `table` from `outcomes.items`."""
    groups = list(table.groupby("workload", sort=False))
    figure = make_subplots(
        rows=1, cols=len(groups), subplot_titles=[str(name) for name, _ in groups], shared_yaxes=True
    )
    for column, (_, group) in enumerate(groups, start=1):
        figure.add_bar(
            x=[f"{tokens:,}" for tokens in group["tokens"]],
            y=group["share"],
            marker_color=BLUE,
            showlegend=False,
            row=1,
            col=column,
        )
    figure.update_layout(title="Items of the workloads", height=300)
    figure.update_xaxes(type="category", title="tokens of an item")
    figure.update_yaxes(title="share of items", tickformat=".0%", col=1)
    return figure


def padding(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Tokens and padding that each graph computes, one panel per configuration; tables from `outcomes.per_budget`."""
    figure = make_subplots(rows=1, cols=len(tables), subplot_titles=list(tables), shared_yaxes=True)
    for column, table in enumerate(tables.values(), start=1):
        for name, color in (("tokens", BLUE), ("padding tokens", VERMILION)):
            figure.add_bar(
                x=table["graph"],
                y=table[name] / 1e6,
                name=name,
                marker_color=color,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.update_layout(barmode="stack", title="What replays compute", height=380, legend=_BELOW)
    figure.update_xaxes(type="category", title="graph (budget)")
    figure.update_yaxes(title="million tokens", row=1, col=1)
    return figure


def fill(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Share of the replays by fill, one panel per configuration; tables from `outcomes.fill_histogram`."""
    figure = make_subplots(rows=1, cols=len(tables), subplot_titles=list(tables), shared_yaxes=True)
    shades = colors(list(tables))
    for column, (name, table) in enumerate(tables.items(), start=1):
        figure.add_bar(
            x=(table["from"] + table["to"]) / 2,
            y=table["share"],
            width=table["to"] - table["from"],
            name=name,
            marker_color=shades[name],
            showlegend=False,
            row=1,
            col=column,
        )
    figure.update_layout(title="How full replays are", height=320, bargap=0)
    figure.update_xaxes(title="tokens / budget", range=[0, 1], tickformat=".0%")
    figure.update_yaxes(title="share of replays", tickformat=".0%", row=1, col=1)
    return figure


def fallbacks(table: pd.DataFrame) -> go.Figure:
    """Share of items and tokens that no graph holds; `table` from `outcomes.fallback_share`."""
    figure = go.Figure()
    for name, color in (("items", BLUE), ("tokens", VERMILION), ("calls", ORANGE)):
        figure.add_bar(
            y=table["configuration"],
            x=table[name],
            orientation="h",
            name=name,
            marker_color=color,
        )
    figure.update_layout(
        barmode="group", title="Above the largest budget", height=120 + 60 * len(table), legend=_BELOW | {"y": -0.25}
    )
    figure.update_xaxes(
        tickformat=".0%", range=[0, max(0.1, 1.1 * float(table[["items", "tokens", "calls"]].max().max()))]
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def latency(table: pd.DataFrame) -> go.Figure:
    """Predicted time of a call, share of calls at or below; `table` from `outcomes.latency`."""
    figure = go.Figure()
    groups = list(table.groupby("configuration", sort=False))
    shades = colors([str(name) for name, _ in groups])
    for name, group in groups:
        figure.add_scatter(
            x=[0.0, *group["to ms"]],
            y=[0.0, *group["share"].cumsum()],
            mode="lines",
            line={"shape": "hv", "color": shades[str(name)], "width": 2},
            name=str(name),
        )
    figure.update_layout(title="Predicted time of an encoder call", height=380, legend=_BELOW)
    figure.update_xaxes(title="ms", rangemode="tozero")
    figure.update_yaxes(title="share of calls at or below", tickformat=".0%", range=[0, 1.02])
    return figure


def bill(tables: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Memory and seconds of the captures, stacked by graph, or without costs their buffers; from `outcomes.bill`."""
    priced = all("memory MiB" in table for table in tables.values())
    shown = {"memory MiB": "memory, MiB", "seconds": "capture, s"} if priced else {"buffers MiB": "buffers, MiB"}
    figure = make_subplots(rows=1, cols=len(shown), subplot_titles=list(shown.values()), shared_yaxes=True)
    for name, table in tables.items():
        for column, value in enumerate(shown, start=1):
            figure.add_bar(
                y=[name] * len(table),
                x=table[value],
                orientation="h",
                marker={
                    "color": list(range(len(table))),
                    "colorscale": "Blues",
                    "cmin": -2,
                    "line": {"color": MUTED, "width": 1},
                },
                customdata=table["graph"],
                hovertemplate="budget %{customdata}: %{x:.2f}<extra></extra>",
                showlegend=False,
                row=1,
                col=column,
            )
    figure.update_layout(barmode="stack", title="What capturing takes, graph by graph", height=130 + 50 * len(tables))
    figure.update_yaxes(autorange="reversed")
    return figure


def graphs_by_items(table: pd.DataFrame, objective: str = "mean ms") -> go.Figure:
    """Heat map of the best predicted time by number of graphs and max items; from `outcomes.graphs_by_items`."""
    values = table.pivot(index="graphs", columns="max items", values="ms")
    budgets = table.pivot(index="graphs", columns="max items", values="budgets")
    figure = go.Figure(
        go.Heatmap(
            x=[str(n) for n in values.columns],
            y=[str(n) for n in values.index],
            z=values.to_numpy(),
            text=[[f"{value:.2f}" if value == value else "" for value in row] for row in values.to_numpy()],
            texttemplate="%{text}",
            customdata=budgets.to_numpy(),
            hovertemplate="%{y} graphs, %{x} items: %{z:.3f} ms<br>%{customdata}<extra></extra>",
            zmin=float(table["ms"].min()),
            zmax=1.5 * float(table["ms"].min()),  # beyond, all choices are bad alike
            colorscale="Viridis",
            reversescale=True,
            colorbar={"title": objective},
        )
    )
    figure.update_layout(title="Best time by number of graphs and max items", height=90 + 34 * len(values) + 60)
    figure.update_xaxes(title="max items per replay", type="category", showgrid=False)
    figure.update_yaxes(title="graphs at most", type="category", showgrid=False)
    return figure


def frames_axis(table: pd.DataFrame, chosen: int) -> go.Figure:
    """Computed tokens and buffers by max frames; `table` from `outcomes.frames_axis`, `chosen` is marked."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=["computed / budget", "buffers of all graphs, MiB"])
    kinds = {
        "every batch fits": (table["fails"] == 0, BLUE, "circle"),
        "a batch does not fit: vLLM raises": (table["fails"] > 0, VERMILION, "x"),
        "vLLM's own": (table["vLLM's own"], ORANGE, "diamond"),
        "chosen": (table["max frames"] == chosen, GREEN, "star"),
    }
    for column, value in enumerate(("computed", "buffers MiB"), start=1):
        for name, (rows, color, symbol) in kinds.items():
            figure.add_scatter(
                x=table.loc[rows, "max frames"],
                y=table.loc[rows, value],
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 9 if symbol in ("circle", "x") else 14},
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.update_layout(title="What max frames costs", height=360, legend=_BELOW | {"y": -0.3})
    figure.update_xaxes(title="max frames per replay", type="log", dtick="D2")
    figure.update_yaxes(type="log", nticks=5)
    figure.update_yaxes(dtick="D2", col=1)
    return figure


def replay_costs(table: pd.DataFrame) -> go.Figure:
    """Time of a replay, and per token, by budget; `table` from `outcomes.replay_costs`."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=["ms per replay", "us per token of the budget"])
    for column, name, color, title in (
        (1, "ms", BLUE, "one item fills the budget"),
        (1, "without attention ms", MUTED, "without attention"),
        (2, "us per token", VERMILION, "one item fills the budget"),
    ):
        figure.add_scatter(
            x=table["budget"],
            y=table[name],
            mode="lines+markers",
            marker={"size": 4},
            line={"color": color},
            name=title,
            showlegend=column == 1,
            row=1,
            col=column,
        )
    figure.update_layout(title="What a graph costs on the GPU", height=340, legend=_BELOW | {"y": -0.2})
    powers = [2**n for n in range(4, 15)]
    figure.update_xaxes(title="budget, tokens", type="log", tickvals=powers, ticktext=[f"{n:,}" for n in powers])
    figure.update_yaxes(rangemode="tozero")
    return figure


def configurations(table: pd.DataFrame, bound_ms: float) -> go.Figure:
    """Predicted mean and P99 of configurations, with the bound; `table` from `outcomes.summary`."""
    rows = table[table["mean ms"].notna()]
    shades = colors(list(rows["configuration"]))
    figure = go.Figure()
    figure.add_bar(
        y=rows["configuration"],
        x=rows["mean ms"],
        orientation="h",
        marker_color=[shades[name] for name in rows["configuration"]],
        text=[f"{value:.2f} ms" for value in rows["mean ms"]],
        textposition="inside",
        name="mean",
    )
    figure.add_scatter(
        y=rows["configuration"],
        x=rows["P99 ms"],
        mode="markers",
        marker={"symbol": "line-ns", "size": 18, "line": {"width": 3, "color": BLACK}},
        name="P99",
    )
    # Above the plot: at its usual place the word would lie on the first bar.
    above = {"text": "bound of the mean", "xanchor": "center", "yanchor": "bottom"}
    figure.add_vline(x=bound_ms, line={"dash": "dot", "color": MUTED}, annotation=above, annotation_position="top")
    figure.update_layout(
        title="Predicted time of a call", height=140 + 44 * len(rows), xaxis_title="ms", showlegend=False
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def predicted_beside_measured(table: pd.DataFrame) -> go.Figure:
    """Predicted against measured mean, one mark per configuration and workload; `table` from `outcomes.held_out`."""
    figure = go.Figure()
    least = 0.9 * float(table[["measured ms", "predicted ms"]].min().min())
    most = 1.1 * float(table[["measured ms", "predicted ms"]].max().max())
    figure.add_scatter(
        x=[least, most], y=[least, most], mode="lines", line={"color": MUTED, "dash": "dot"}, name="equal"
    )
    for color, (workload, group) in zip(COLORWAY, table.groupby("workload", sort=False), strict=False):
        figure.add_scatter(
            x=group["measured ms"],
            y=group["predicted ms"],
            mode="markers",
            marker={"color": color, "size": 9},
            name=str(workload),
            customdata=group[["configuration", "budgets", "error"]].to_numpy(),
            hovertemplate="%{customdata[0]}: %{customdata[1]}<br>%{customdata[2]:+.1%}<extra></extra>",
        )
    figure.update_layout(title="Predicted beside measured, mean of a call", height=420, legend=_BELOW | {"y": -0.2})
    figure.update_xaxes(title="measured, ms", type="log")
    figure.update_yaxes(title="predicted, ms", type="log")
    return figure


def validation(table: pd.DataFrame) -> go.Figure:
    """Measured means with predictions and the bound, one panel per workload; `table` from `outcomes.validation`."""
    groups = list(table.groupby("workload", sort=False))
    shades = colors(list(dict.fromkeys(table["configuration"])))
    figure = make_subplots(rows=1, cols=len(groups), subplot_titles=[str(name) for name, _ in groups])
    for column, (_, group) in enumerate(groups, start=1):
        first = column == 1
        figure.add_bar(
            x=group["configuration"],
            y=group["measured mean ms"],
            marker_color=[shades[name] for name in group["configuration"]],
            name="measured mean",
            showlegend=False,
            row=1,
            col=column,
        )
        for name, symbol, color in (("predicted mean ms", "diamond", BLACK), ("measured P99 ms", "line-ew", MUTED)):
            figure.add_scatter(
                x=group["configuration"],
                y=group[name],
                mode="markers",
                marker={"symbol": symbol, "size": 11, "color": color, "line": {"width": 2, "color": color}},
                name=name.removesuffix(" ms"),
                legendgroup=name,
                showlegend=first,
                row=1,
                col=column,
            )
        figure.add_hline(y=float(group["bound ms"].iloc[0]), line={"dash": "dot", "color": MUTED}, row=1, col=column)
    figure.update_layout(title="Measured on the GPU: bars; the dotted line is the bound", height=420, legend=_BELOW)
    figure.update_yaxes(title="ms per call", rangemode="tozero", col=1, gridcolor=GRID)
    return figure


def served(table: pd.DataFrame) -> go.Figure:
    """Encoder time per request in the whole engine, measured and predicted; `table` from `engine_bench.arms_table`."""
    workloads = list(table["workload"].unique())
    figure = make_subplots(rows=1, cols=len(workloads), subplot_titles=workloads)
    for column, (_, group) in enumerate(table.groupby("workload", sort=False), start=1):
        shown = {"showlegend": column == 1, "row": 1, "col": column}
        figure.add_bar(x=group["arm"], y=group["mean ms"], name="measured mean", marker_color=BLUE, **shown)
        figure.add_scatter(
            x=group["arm"],
            y=group["predicted ms"],
            mode="markers",
            marker={"symbol": "line-ew", "size": 26, "line": {"width": 3, "color": VERMILION}},
            name="predicted",
            **shown,
        )
    figure.update_layout(title="Encoder time per request in the whole engine", height=340, legend=_BELOW | {"y": -0.2})
    figure.update_yaxes(title="ms", rangemode="tozero", col=1)
    return figure
