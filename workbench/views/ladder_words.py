"""What the tables of `workbench.ladder` show, in a sentence or two each."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from workbench.capturable import ALL, GRAPH, SERVED
from workbench.ladder import BASELINES, COMBINED, FAR, HEAVY, OUTSIDE_MODULES, STEPS_OF_A_BLOCK, last_step, title

_GRAPH, _ALL = title(GRAPH), title(ALL)
_VS_GRAPH = f"vs {_GRAPH}"
Row = dict[Any, Any]
_DISTORTS = 1.2  # traced over un-profiled time, from which on a trace's idle time needs a word


def _rows(table: pd.DataFrame, with_number: str = "") -> list[Row]:
    """Return the rows in which a column holds a value; all where none is named."""
    if with_number and with_number not in table:
        return []
    found: list[Row] = table[table[with_number].notna()].to_dict("records") if with_number else table.to_dict("records")
    return found


def boundaries(table: pd.DataFrame, why_not: pd.DataFrame) -> str:
    """From `ladder.boundaries` and `ladder.obstacles`: what captures, what does not and why, the shortest call."""
    rows = _rows(table)
    captured = [row for row in rows if row["captures"] == "yes"]
    if all(row["captures"] == "not tried" for row in rows):
        said = [f"Nothing was captured here; {len(rows)} candidates were watched for host syncs."]
    else:
        said = [f"{len(captured)} of {len(rows)} candidates capture."]
    for name, met in why_not.groupby("the graph would hold", sort=False):
        first, more = _rows(met)[0], len(met) - 1
        said.append(
            f"*{name}*: {first['what']} at `{first['at']}`, `{first['line']}`{f', and {more} more' if more else ''}."
        )
    timed = _rows(table, "call us")
    if timed:
        vllm, best = timed[0], min(timed, key=lambda row: float(row["call us"]))
        told = f"**{best['the graph would hold']}** makes the shortest call, {_inside(best)}"
        said.append(f"{told}." if best is vllm else f"{told}; *{vllm['the graph would hold']}* takes {_inside(vllm)}.")
    return " ".join(said)


def _inside(row: Row) -> str:
    return f"{row['inside us'] / 1e3:.2f} ms inside and {row['outside us'] / 1e3:.2f} ms outside"


def graphs(table: pd.DataFrame) -> str:
    """From `ladder.graphs`: nodes, time and glue of each graph that has a map, and what no family is known of."""
    known = _rows(table, "us")
    if not known:
        return f"No graph of this ladder has a map: {table['not mapped'].iloc[0] if len(table) else 'it needs CUDA'}."
    told = (
        f"*{row['graph']}* replays {row['nodes']:.0f} nodes in {row['us']:,.0f} us, of which glue is "
        f"{row['glue us'] / row['us']:.0%}{_unnamed(row)}"
        for row in known
    )
    return f"{'; '.join(told)}. Click a module to enter it."


def _unnamed(row: Row) -> str:
    share = float(row.get("unnamed us") or 0.0) / float(row["us"])
    return f" and {share:.0%} kernels of no known family" if share >= 0.005 else ""


def roofline(tables: Sequence[pd.DataFrame]) -> str:
    """From `ladder.modules` of each graph: the distance of the whole, and the module that is farthest above its own."""
    told = []
    for table in tables:
        us, floor = float(table["us"].sum()), float(table["roofline us"].sum())
        if not floor:
            told.append(f"*{table['graph'].iloc[0]}* takes {us:,.0f} us, on a GPU whose roofline is not known")
            continue
        whole = f"*{table['graph'].iloc[0]}* takes {us / floor:.1f} times its roofline of {floor:,.0f} us"
        known = _rows(table, "times roofline")
        if known:
            far = max(known, key=lambda row: float(row["us"] - row["roofline us"]))
            whole += (
                f", farthest above its own `{far['module']}` with {far['us']:,.0f} us for {far['roofline us']:,.0f}"
            )
        loose = sum(row["us"] for row in _rows(table) if row["module"] == OUTSIDE_MODULES)
        if loose >= HEAVY * us:
            whole += f"; {loose:,.0f} us run outside any module, in kernels that no module of vLLM calls"
        told.append(whole)
    return f"{'. '.join(told)}."


def steps(table: pd.DataFrame) -> str:
    """From `ladder.steps`: all variants against both baselines, and the single variant that saves most."""
    timed = {row["step"]: row for row in _rows(table, "median ms")}
    last = last_step(table["step"])
    if last is None or not {last, _GRAPH, SERVED} <= timed.keys():
        return "Not every step could be timed on this call; the table says why."
    whole = timed[last]
    text = (
        f"With {last} the call takes {whole['median ms']:.2f} ms, P99 {whole['P99 ms']:.2f}: "
        f"**{whole['vs served']:.1f} times as fast as eager as served and {whole[_VS_GRAPH]:.2f} times as fast as "
        f"vLLM's graph** (medians, n = {whole['n']:.0f})."
    )
    alone = [row for step, row in timed.items() if step not in (*BASELINES, last) and COMBINED not in step]
    if alone:
        best = min(alone, key=lambda row: float(row["median ms"]))
        saved = timed[_GRAPH]["median ms"] - best["median ms"]
        text += f" Of the single variants *{best['step']}* saves most, {saved:.2f} ms."
    return text


def inside_the_call(table: pd.DataFrame) -> str:
    """From `ladder.steps`: GPU busy and idle, and nodes, of vLLM's graph and of all variants."""
    rows = {row["step"]: row for row in _rows(table, "busy ms")}
    last = last_step(table["step"])
    if last is None or last not in rows or _GRAPH not in rows:
        return "Not every step could be traced on this call."
    before, after = rows[_GRAPH], rows[last]
    idle = f"{before['idle ms']:.2f}", f"{after['idle ms']:.2f}"
    waiting = f"its waiting inside the call from {idle[0]} to {idle[1]} ms"
    text = (
        f"From vLLM's graph to {last} the GPU's work goes from {before['busy ms']:.2f} to {after['busy ms']:.2f} ms, "
    )
    text += f"its waiting inside the call stays at {idle[0]} ms" if idle[0] == idle[1] else waiting
    if pd.isna(before["nodes"]) or pd.isna(after["nodes"]):
        text += "."
    elif before["nodes"] == after["nodes"]:
        text += f", and the graph keeps its {before['nodes']} nodes."
    else:
        text += f", and the nodes of the graph from {before['nodes']} to {after['nodes']}."
    return text + _distorted(before, after)


def _distorted(*rows: Row) -> str:
    """Say how much longer the traced calls took than those un-profiled, where that is more than they vary."""
    times = [row["traced ms"] / row["median ms"] for row in rows]
    if max(times) < _DISTORTS:
        return ""
    said = " and ".join(f"{value:.2f}" for value in times)
    return f" Tracing lengthens the waiting: these calls took {said} times as long as un-profiled."


def recipes(table: pd.DataFrame, schedules: Sequence[str]) -> str:
    """From `ladder.recipes` and `ladder.schedules`: where a block is computed otherwise than by vLLM."""
    steps = table[list(STEPS_OF_A_BLOCK)]
    other = table[(steps != "vLLM's").any(axis="columns")]
    text = "Before it captures a graph of a size, *fused* measures how this GPU computes each step of a block fastest."
    if not len(other):
        text += " Here that is vLLM's way everywhere."
    elif len(other) == len(table):
        text += " At every budget some steps are computed in another way than vLLM's."
    else:
        text += f" At {_budgets(other)} some steps are computed in another way than vLLM's."
    unlike = table[steps.apply(lambda column: column.str.contains(" or ")).any(axis="columns")]
    if len(unlike):
        text += f" At {_budgets(unlike)} not all captures chose the same."
    return f"{text} Attention is planned {' or '.join(schedules)}." if schedules else text


def _budgets(table: pd.DataFrame) -> str:
    return f"budget {', '.join(map('{:,}'.format, table['budget']))}"


def calls(table: pd.DataFrame) -> str:
    """From `ladder.all_steps`: all variants on every call, where something is slower, what failed."""
    last = last_step(table["step"])
    whole = [row for row in _rows(table, "vs served") if row["step"] == last]
    if not whole:
        return "All variants together were not timed."
    who = "All variants together are" if last == _ALL else f"*{last}* is"
    text = f"{who} {_range(whole, 'vs served')} times as fast as eager as served on {len(whole)} calls"
    against = [row for row in _rows(table, _VS_GRAPH) if row["step"] == last]
    if against:
        text += f" and {_range(against, _VS_GRAPH)} times as fast as vLLM's graph on the {len(against)} that it runs"
    slower = [
        f"*{row['call']}* ({row[base]:.2f} {base})"
        for base, rows in (("vs served", whole), (_VS_GRAPH, against))
        for row in rows
        if round(row[base], 2) < 1
    ]
    text += f"; slower on {', '.join(slower)}." if slower else "; slower on none."
    failed = pd.DataFrame(_rows(table, "failed"))
    for call, rows in failed.groupby("call", sort=False) if len(failed) else ():
        text += f" On *{call}* {', '.join(rows['step'])} failed: {rows['failed'].iloc[0]}."
    return text


def _range(rows: Iterable[Row], column: str) -> str:
    values = [row[column] for row in rows]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def parity(table: pd.DataFrame) -> str:
    """From `ladder.all_steps`: how many outputs are bit-equal, which is farthest from eager, what the buffers held.

    Calls on which vLLM's own graph is wrong are told apart: there a variant is judged by whether it mends that.
    """
    known = _rows(table, "parity over noise")
    if not known:
        return "The outputs have no distance to eager."
    wrong = {row["call"]: row for row in known if row["step"] == _GRAPH and row["parity over noise"] > FAR}
    text = _sound([row for row in known if row["call"] not in wrong])
    for call, graph in wrong.items():
        text += f" On *{call}* vLLM's graph is wrong, {graph['parity over noise']:.1f} floors from eager: "
        text += _mended([row for row in known if row["call"] == call and row["step"] not in BASELINES])
    seen = pd.DataFrame(_rows(table, "seen in the buffers"))
    for (call, what), rows in seen.groupby(["call", "seen in the buffers"], sort=False) if len(seen) else ():
        text += f" In the buffers of {' and '.join(rows['step'])} on *{call}*: {what}."
    return text


def _sound(known: Sequence[Row]) -> str:
    """Bits and distances of the calls that vLLM's graph has right."""
    ours = [row for row in known if row["step"] not in BASELINES]
    compared = [row for row in ours if isinstance(row["equals the graph"], bool)]
    equal = sum(row["equals the graph"] for row in compared)
    beyond = sum(row["parity over noise"] > 1 for row in ours)
    text = (
        f"{equal} of {len(compared)} variants' calls equal vLLM's graph bit for bit; {beyond or 'none'} of {len(ours)} "
        "lie beyond the noise floor."
    )
    far = max(known, key=lambda row: float(row["parity over noise"]), default=None)
    if far is None or not far["parity over noise"]:
        return text
    text += f" Farthest from eager is {far['step']} on {far['call']}: {far['parity over noise']:.2f} times the floor"
    near = 1 < far["parity over noise"] <= math.sqrt(2)
    return f"{text}, no further than two independent roundings lie apart (√2)." if near else f"{text}."


def _mended(ours: Sequence[Row]) -> str:
    """Which variants leave a fault of vLLM's graph, and which mend it."""
    left = [row["step"] for row in ours if row["parity over noise"] > FAR]
    mended = [row["step"] for row in ours if row["parity over noise"] <= 1]
    told = [f"{' and '.join(left)} leave{'s' * (len(left) == 1)} it so"] if left else []
    told += [f"{' and '.join(mended)} mend{'s' * (len(mended) == 1)} it"] if mended else []
    return f"{', '.join(told) or 'no variant mends it'}."


def hardware(table: pd.DataFrame) -> str:
    """From `ladder.hardware`: kernels' time, traffic and roofline of each arm."""
    told = []
    for arm, rows in table.groupby("arm", sort=False):
        text = f"*{arm}*: {rows['us'].sum():,.0f} us of kernels, {rows['DRAM MB'].sum():,.0f} MB from memory"
        known = _rows(rows, "of the roofline")
        if known:
            reached = sum(row["us"] * row["of the roofline"] for row in known) / sum(row["us"] for row in known)
            text += f", {reached:.0%} of the roofline in the mean over their time"
        told.append(text)
    return f"{'; '.join(told)}."
