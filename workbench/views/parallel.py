"""Figures and sentences of calls over several GPUs, from the tables of `workbench.parallel`."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.parallel import ARMS, ParallelArm, ParallelRun, arm_titles, balance
from workbench.views.theme import BLACK, BLUE, GREEN, INK, ORANGE, PAPER, VERMILION

Rows = Sequence[dict[str, Any]]
_LIGHT = {GREEN: "#99d8c5", BLUE: "#99c7e0"}  # the same on one GPU; an opacity would not show in the legend


def times(rows: Rows) -> go.Figure:
    """Median of every call in four arms, with a mark at the P99; rows from `parallel.times`."""
    figure = go.Figure()
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        alone = arm.endswith("1 GPU")
        color = GREEN if arm.startswith("graph") else BLUE
        figure.add_bar(
            y=[_call(row) for row in own],
            x=[row["median ms"] for row in own],
            orientation="h",
            name=arm,
            marker_color=_LIGHT[color] if alone else color,
            error_x={
                "type": "data",
                "array": [row["P99 ms"] - row["median ms"] for row in own],
                "arrayminus": [0.0] * len(own),
                "color": BLACK,
                "thickness": 1,
                "width": 3,
            },
            text=[f"{row['median ms']:.2f}" for row in own],
            textposition="inside",
            insidetextanchor="start",
            insidetextfont={"color": INK if alone else PAPER},
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="group",
        title="A call over several GPUs and on one",
        xaxis_title="ms, median; the line ends at the P99",
        height=170 + 120 * len({row["call"] for row in rows}),
        bargap=0.2,
    )
    return figure


def exchanges(rows: Rows) -> go.Figure:
    """What each rank spends in the collectives of one traced call; rows from `parallel.exchanges`."""
    figure = go.Figure()
    for column, name, color in (
        ("exchange ms", "exchange", ORANGE),
        ("waiting ms", "waiting for the last rank", VERMILION),
    ):
        figure.add_bar(
            y=[f"{_call(row)}, rank {row['rank']}" for row in rows],
            x=[row[column] for row in rows],
            orientation="h",
            name=name,
            marker_color=color,
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="stack",
        title="Inside the collectives",
        xaxis_title="ms in one traced call",
        height=150 + 34 * len(rows),
    )
    return figure


def _call(row: dict[str, Any]) -> str:
    """A call's items in lines of two."""
    items = row["items"].split(",")
    return ",<br>".join(", ".join(items[i : i + 2]) for i in range(0, len(items), 2))


def gain(run: ParallelRun, rows: Rows) -> str:
    """From `parallel.times`: the call that gains most by graphs over several GPUs, and those that lose."""
    several, alone, eager, eager_alone = (_of(run, rows, arm) for arm in ARMS)
    gains = [row["vs 1 GPU"] for row in several]
    lost = [row for row in several if row["vs 1 GPU"] < 1]
    gpus = len(run.ranks)
    if len(lost) == len(several):
        text = (
            f"By graphs {gpus} GPUs are **slower than one on every call**: {_range(gains)} times as fast, and eagerly "
            f"{_range([row['vs 1 GPU'] for row in eager])} times."
        )
    else:
        best = gains.index(max(gains))
        text = (
            f"By graphs `{several[best]['items']}` takes {several[best]['median ms']:.2f} ms over {gpus} GPUs and "
            f"{alone[best]['median ms']:.2f} ms on one: **{gains[best]:.2f} times as fast**; eagerly "
            f"{eager[best]['median ms']:.2f} and {eager_alone[best]['median ms']:.2f} ms."
        )
        if lost:
            told = ", ".join(f"`{row['items']}` ({row['vs 1 GPU']:.2f})" for row in lost)
            text += f" Slower than on one: {told}."
    return f"{text} Medians, n = {several[0]['n']}; over several GPUs a sample is the slowest rank's."


def _of(run: ParallelRun, rows: Rows, arm: ParallelArm) -> list[dict[str, Any]]:
    title = arm_titles(run)[arm]
    return [row for row in rows if row["arm"] == title]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def loads(run: ParallelRun, rows: Rows) -> str:
    """From `parallel.shares`: the call whose shares are most uneven, and which rank waits in it."""
    shared = balance(run)
    if not shared:
        return "Ranks share the weights of every layer and have the same items, so their loads are equal."
    worst = max(shared, key=lambda one: one.imbalance)
    rank = worst.waiting_us.index(max(worst.waiting_us))
    return (
        f"The shares of `{rows[worst.call]['items']}` are most uneven: the largest is {worst.imbalance:.2f} times the "
        f"mean, {worst.padded:.0%} of the gathered rows are padding, and rank {rank}, with {worst.items[rank]} of "
        f"{sum(worst.items)} items, waits {max(worst.waiting_us) / 1e3:.2f} ms at the gather."
    )


def why(run: ParallelRun, timed: Rows, exchanged: Rows) -> str:
    """From `parallel.times` and `parallel.exchanges`: what the exchanges take, and what is left without them."""
    several, alone = (_of(run, timed, arm) for arm in ARMS[:2])
    spent = [max(row["exchange ms"] for row in exchanged if row["call"] == call["call"]) for call in several]
    counts = [(name, [row[name] for row in exchanged]) for name in ("all-reduces", "all-gathers")]
    told = " and ".join(_count(name, found) for name, found in counts if max(found))
    share = [one / call["median ms"] for one, call in zip(spent, several, strict=True)]
    rest = [
        (call["median ms"] - one) / single["median ms"] for one, call, single in zip(spent, several, alone, strict=True)
    ]
    text = (
        f"A traced call has {told} on each rank. Their exchange, without waiting, takes {_range(spent)} ms, "
        f"{min(share):.1%} to {max(share):.1%} of the un-profiled call."
    )
    if run.tp_mode == "weights":
        text += f" What is left takes {_range(rest)} times as long as the whole call on one GPU."
    return text


def _count(name: str, found: Sequence[int]) -> str:
    if max(found) == 1:
        return f"one {name.removesuffix('s')}"
    return f"{min(found)} {name}" if min(found) == max(found) else f"{min(found)} to {max(found)} {name}"


def clock(rows: Rows) -> str:
    """From `parallel.clocks`: how far the ranks' clocks are known."""
    return " ".join(
        f"Rank {row['rank']}'s clock is {row['clock ahead us']:.1f} us ahead of rank {rows[0]['rank']}'s; its "
        f"{row['collectives']} collectives allow {row['at least us']:.1f} to {row['at most us']:.1f}."
        for row in rows[1:]
    )


def published(rows: Rows) -> str:
    """From `parallel.beside_published`: their ratio beside ours."""
    theirs, *ours = rows
    means = [row["eager over graph, mean"] for row in ours]
    return (
        f"{theirs['source']} reports on {theirs['GPUs']}, {theirs['workload']}: eager over graph "
        f"{theirs['eager over graph, mean']:.2f} in the mean and {theirs['at P99']:.2f} at P99. Here it is "
        f"{_range(means)} in the mean on {ours[0]['GPUs']}, over {len(ours)} calls. Its figures are a whole engine's "
        "`encoder_forward_ms`, so ratios compare and milliseconds do not."
    )
