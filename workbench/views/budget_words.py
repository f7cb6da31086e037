"""What the tables of `workbench.outcomes` and `workbench.engine_bench` show, in a sentence or two each."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from workbench.comparison import Comparisons
from workbench.costs import CostProfile

Row = dict[Any, Any]


def advice(workload: str, candidates: pd.DataFrame, bound_ms: float, exact: bool) -> str:
    """From `outcomes.summary`, the answer first: its time, its distance to the bound, the best of the others."""
    times = candidates["mean ms"]
    others = times.iloc[1:].dropna()
    best = "the least possible with these costs" if exact else "the best found"
    above = max(times.iloc[0] / bound_ms - 1, 0.0)  # where both are the same, rounding may put it below
    text = f"*{workload}*: {times.iloc[0]:.2f} ms, {best}, {above:.1%} above the bound; "
    if not len(others):
        return f"{text}none of the others can be served rightly and priced."
    return f"{text}the best of the others takes {others.min() / times.iloc[0]:.3f} times as long."


def graphs_allowed(workload: str, table: pd.DataFrame) -> str:
    """From `outcomes.graphs_allowed`: what more graphs win."""
    known = table[table["of the room"].notna()].to_dict("records")
    if not known:
        return f"*{workload}*: vLLM's own budgets leave nothing to win, or cannot be served."
    each = ", ".join(f"with up to {row['graphs allowed']} graphs {row['of the room']:.0%}" for row in known)
    return f"*{workload}*: of the predicted time between vLLM's own budgets and the bound the advice wins {each}."


def held_out(table: pd.DataFrame) -> str:
    """From `outcomes.held_out`: errors of the predicted means, over all pairs and of each workload."""
    off = table["error"].abs()
    each = ", ".join(
        f"*{name}* {errors.median():.1%} and {errors.max():.1%}" for name, errors in off.groupby(table["workload"])
    )
    return (
        f"Over {len(table)} pairs of configuration and workload, on calls that only replay, the predicted mean is off "
        f"by **{off.median():.1%} in the median and {off.max():.1%} at worst** ({each})."
    )


def validation(profile: CostProfile, compared: Comparisons, table: pd.DataFrame) -> str:
    """From `outcomes.validation`: how far predictions are off, and which configurations are no rivals."""
    off = table["error"].dropna()
    text = (
        "Measured in one process in turn (ABBA order), nothing profiled. "
        f"The costs are those of {_minute(profile.created)}, the comparison of {_minute(compared.created)}, and "
        f"predictions are {off.min():+.0%} to {off.max():+.0%} off: between sessions the host's speed differs, and the "
        "bound, which is predicted, is as far off."
    )
    wrong = table[table["wrong"].notna()] if "wrong" in table else table.iloc[:0]
    for workload, rows in wrong.groupby("workload", sort=False):
        names = " and ".join(rows["configuration"])
        text += (
            f" On *{workload}* {names} {'is' if len(rows) == 1 else 'are'} left out, since images come out wrong (D6)."
        )
    return text


def gains(table: pd.DataFrame) -> str:
    """From `outcomes.won`: a line for each workload."""
    return "\n".join(f"- {gain(row)}" for row in table.to_dict("records"))


def gain(row: Row) -> str:
    """From a row of `outcomes.won`: the advised budgets beside the best of the others."""
    text = (
        f"*{row['workload']}*: advised {row['advised ms']:.2f} ms, {row['best other']} {row['best other ms']:.2f}, "
        f"{row['faster']:.3f} times ({row['low']:.3f} to {row['high']:.3f})"
    )
    if row["low"] <= 1:
        text += ", no difference beyond the noise" if row["high"] >= 1 else ", slower"
    elif pd.notna(row["won"]):
        text += f", {row['won']:.0%} of what the bound leaves to win"
    return f"{text}, with {_graphs(row['graphs'], row['memory MiB'])} instead of " + (
        f"{_graphs(row['best other graphs'], row['best other MiB'])}."
    )


def _graphs(count: float, mib: float | None) -> str:
    """As "1 graph of 28 MiB"; memory where it is known."""
    graphs = f"{count:.0f} graph{'s' * (count != 1)}"
    return f"{graphs} of {mib:,.0f} MiB" if mib is not None and mib == mib else graphs


def frames_measured(table: pd.DataFrame) -> str:
    """From `outcomes.frames_measured`: what the most frames do to the smallest graph."""
    smallest = table[table["budget"] == table["budget"].min()].sort_values("computes tokens")
    least, most = smallest.iloc[0], smallest.iloc[-1]
    return (
        "Measured: graphs captured alone, each replayed with a video that fills its budget. At budget "
        f"{least['budget']:,.0f} a replay takes {least['replay ms']:.1f} ms with {least['max frames']:,.0f} frames and "
        f"{most['replay ms']:.1f} ms with {most['max frames']:,.0f}."
    )


def served(arms: pd.DataFrame, created: str, profile: CostProfile | None) -> str:
    """From `engine_bench.arms_table`: milliseconds a request, items a call, and how far predictions are off.

    Args:
        created: of the latest measurement.
    """
    told: Sequence[str] = [
        f"*{name}*: "
        + ", ".join(f"{row['arm']} {row['mean ms']:.2f}" for row in rows)
        + " ms a request, "
        + ", ".join(f"{row['items a call']:.1f}" for row in rows)
        + " items a call."
        for name, group in arms.groupby("workload", sort=False)
        if (rows := group.to_dict("records"))
    ]
    off = arms["error"].dropna()
    if profile is None or not len(off):
        return " ".join(told)
    return (
        f"{' '.join(told)} Predictions are {off.min():+.0%} to {off.max():+.0%} off: the engine ran until "
        f"{_minute(created)}, the costs are of {_minute(profile.created)}, and calls that launches bound last as long "
        "as the host of the session needs."
    )


def _minute(created: str) -> str:
    return created[:16].replace("T", " ")
