"""Figures of notebook 01: pure functions from the tables of `workbench.explain` to plotly figures."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.detail import level_of_detail
from workbench.run import ARM_TITLES
from workbench.views.theme import (
    ARM_COLORS,
    BLACK,
    BLUE,
    FAMILY_COLORS,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
)

_ARM_COLORS = {ARM_TITLES[arm]: color for arm, color in ARM_COLORS.items()}
_PARTS = {
    "busy us": ("GPU busy", GREEN),
    "launch gaps us": ("waiting for a launch", VERMILION),
    "queue gaps us": ("between queued ops", ORANGE),
    "intra-graph gaps us": ("between graph nodes", PURPLE),
    "lead us": ("before the first op", SKY),
    "tail us": ("after the last op", MUTED),
}
_GROUP_COLORS = {
    **FAMILY_COLORS,
    "kernel launch": VERMILION,
    "graph launch": GREEN,
    "copy": PURPLE,
    "wait": BLACK,
    "replay": GREEN,
    "postprocess": VERMILION,
    "replay_buffers": ORANGE,
    "buffer_copies": SKY,
    "select_items": BLUE,
    "clone": PURPLE,
    "item_specs": MUTED,
}
_MOST_SPANS, _PIXELS = 20_000, 1500  # of one arm; a figure is hardly wider
_LANES = ("GPU", "CUDA calls", "host")
_BELOW = {"orientation": "h", "x": 0, "y": -0.28, "yanchor": "top"}  # a legend of several rows would hide the title


def speed(table: pd.DataFrame, call: int = 0) -> go.Figure:
    """Median time of each arm on one call, with a mark at the P99; `table` from `explain.speed`."""
    rows = table[(table["call"] == call) & table["median ms"].notna()]
    figure = go.Figure()
    figure.add_bar(
        y=rows["arm"],
        x=rows["median ms"],
        orientation="h",
        marker_color=[_ARM_COLORS[arm] for arm in rows["arm"]],
        text=[f"{value:.2f} ms" for value in rows["median ms"]],
        textposition="inside",
        name="median",
    )
    figure.add_scatter(
        y=rows["arm"],
        x=rows["P99 ms"],
        mode="markers",
        marker={"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": BLACK}},
        name="P99",
    )
    figure.update_layout(
        title="Time of one encoder call", xaxis_title="ms, host time between two synchronises", height=280
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def where_time_goes(table: pd.DataFrame) -> go.Figure:
    """The window of one call split into busy and idle by cause; `table` from `explain.where_time_goes`."""
    figure = go.Figure()
    for column, (title, color) in _PARTS.items():
        figure.add_bar(y=table["arm"], x=table[column] / 1e3, orientation="h", name=title, marker_color=color)
    figure.update_layout(
        barmode="stack",
        title="Where the time of a call goes on the GPU",
        xaxis_title="ms (traced)",
        height=360,
        legend=_BELOW,
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def timelines(tables: dict[str, pd.DataFrame]) -> go.Figure:
    """Host phases, CUDA calls and GPU ops of one call per arm, on one time axis.

    Args:
        tables: from `explain.timeline`, by the arm's title. One of more than `_MOST_SPANS` is drawn at the detail
            that `_PIXELS` across the window can show.
    """
    figure = make_subplots(
        rows=len(tables), cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=list(tables)
    )
    shown: set[str] = set()
    for number, whole in enumerate(tables.values(), 1):
        table = level_of_detail(whole, _PIXELS) if len(whole) > _MOST_SPANS else whole
        for group, rows in table.groupby("group", sort=False):
            figure.add_bar(
                y=rows["lane"],
                x=rows["duration_us"] / 1e3,
                base=rows["start_us"] / 1e3,
                orientation="h",
                marker={"color": _GROUP_COLORS.get(str(group), MUTED), "line": {"width": 0}},
                name=str(group),
                legendgroup=str(group),
                showlegend=group not in shown,
                customdata=rows["name"],
                hovertemplate="%{customdata}<br>from %{base:.3f} ms, %{x:.4f} ms<extra></extra>",
                row=number,
                col=1,
            )
            shown.add(str(group))
    figure.update_yaxes(categoryorder="array", categoryarray=_LANES)
    figure.update_xaxes(title_text="ms from the start of the call (traced)", row=len(tables), col=1)
    figure.update_layout(
        barmode="overlay",
        bargap=0.35,
        height=190 * len(tables) + 150,
        title="One call of each arm",
        legend={"y": -0.16, "yanchor": "top"},
    )
    return figure


def gap_distribution(gaps: pd.DataFrame) -> go.Figure:
    """Share of idle intervals up to a length, by arm and kind, logarithmic; `gaps` from `explain.gap_lengths`."""
    figure = go.Figure()
    dashes = {"launch gap": "solid", "queue gap": "dot", "intra-graph gap": "dash"}
    for (arm, kind), rows in gaps.groupby(["arm", "kind"], sort=False):
        lengths = rows["gap us"].sort_values()
        shares = [(index + 1) / len(lengths) for index in range(len(lengths))]
        figure.add_scatter(
            x=lengths,
            y=shares,
            mode="lines",
            line={"shape": "hv", "color": _ARM_COLORS[str(arm)], "dash": dashes[str(kind)]},
            name=f"{arm}: {kind} ({len(lengths):,})",
        )
    figure.update_xaxes(type="log", title="length of the idle interval, us")
    figure.update_yaxes(title="share of intervals up to it", tickformat=".0%")
    figure.update_layout(title="How long the GPU waits between two ops", height=480, legend=_BELOW)
    return figure


def boundary(table: pd.DataFrame) -> go.Figure:
    """Timed share of each phase of `execute()`, inside and outside the graph; `table` from `explain.graph_boundary`."""
    figure = go.Figure()
    for inside, title, color in ((True, "in the graph", GREEN), (False, "outside", VERMILION)):
        rows = table[table["in the graph"] == inside]
        figure.add_bar(
            y=rows["phase"],
            x=rows["timed ms"],
            orientation="h",
            name=title,
            marker_color=color,
            text=[f"{share:.1%}" for share in rows["share"]],
            textposition="auto",
        )
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(table["phase"]))
    figure.update_layout(title="Phases of execute()", xaxis_title="ms, a synchronise at both ends (timed)", height=380)
    return figure


def families(table: pd.DataFrame) -> go.Figure:
    """GPU time of a call by kernel family, per arm; `table` from `explain.families`."""
    figure = go.Figure()
    for name, rows in table.groupby("family", sort=False):
        figure.add_bar(
            x=rows["arm"],
            y=rows["GPU us per call"] / 1e3,
            name=str(name),
            marker_color=_GROUP_COLORS.get(str(name), MUTED),
        )
    figure.update_layout(barmode="stack", title="GPU time of a call by kernel family", yaxis_title="ms", height=400)
    return figure


def syncs(table: pd.DataFrame) -> go.Figure:
    """Waits of the host per call, by arm and place; `table` from `explain.sync_ledger`."""
    figure = go.Figure()
    for arm, rows in table.groupby("arm", sort=False):
        figure.add_bar(
            y=rows["where"], x=rows["syncs"], orientation="h", name=str(arm), marker_color=_ARM_COLORS[str(arm)]
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(rangemode="tozero")
    figure.update_layout(title="Where the host waits for the GPU", xaxis_title="blocking calls per call", height=360)
    return figure


def distortion(table: pd.DataFrame, call: int = 0) -> go.Figure:
    """How much longer a call takes under the profiler, per arm and activities; from `explain.profiler_effect`."""
    rows = table[table["call"] == call]
    figure = go.Figure()
    for activities, part in rows.groupby("activities", sort=False):
        figure.add_bar(
            x=part["arm"],
            y=part["distortion"],
            name=str(activities),
            text=[f"{value:.2f}x" for value in part["distortion"]],
        )
    figure.add_hline(y=1, line_dash="dot", line_color=MUTED)
    figure.update_layout(
        barmode="group", title="What the profiler itself costs", yaxis_title="profiled / un-profiled time", height=340
    )
    return figure


def by_call(table: pd.DataFrame) -> go.Figure:
    """Median time of eager as served and graph on every call, by tokens; `table` from `explain.speed`."""
    figure = go.Figure()
    for arm in ("eager as served", "graph"):
        rows = table[(table["arm"] == arm) & table["median ms"].notna()].sort_values("tokens")
        figure.add_scatter(
            x=rows["tokens"],
            y=rows["median ms"],
            mode="markers+lines",
            name=arm,
            marker={"color": _ARM_COLORS[arm], "size": 9},
            line={"width": 1},
            customdata=rows["items"],
            hovertemplate="%{x} tokens in %{customdata} items: %{y:.1f} ms<extra></extra>",
        )
    figure.update_layout(
        title="Time of a call by its tokens",
        xaxis_title="output tokens in the call",
        yaxis={"title": "ms, median", "rangemode": "tozero"},
        height=380,
    )
    return figure
