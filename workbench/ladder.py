"""What a ladder shows, as tables: the capture boundary, a graph by module, the variants step by step.

    from workbench.capturable import find_ladder

    ladder = find_ladder("ernie45_vl")
    steps(ladder.cases[0])      # eager, vLLM's graph, each variant and all of them on one call
    modules(ladder.maps[0])     # nodes, time and roofline of each module of a graph, blocks taken together

Hardware counters have a table here too, since they answer the same question: how far from what the device can do.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from workbench.capturable import (
    ALL,
    FALLBACK,
    GRAPH,
    SERVED,
    Boundary,
    Case,
    Column,
    Ladder,
    MappedModule,
    ModuleMap,
    Steps,
)
from workbench.models import ModelFacts, model_facts
from workbench.run import ARM_TITLES
from workbench.stats import ratio, summary

if TYPE_CHECKING:
    from workbench.encoder.counters import Counters

OUTSIDE_MODULES = "outside any module"
ALL_BLOCKS = "blocks.*"
COMBINED = " + "  # between the variants of one column
FAR = 3  # noise floors: the limit of a mismatch, as in the parity lab
HEAVY = 0.02  # a module of a smaller share of the graph is not worth a name
_SWUNG, _FEWEST_TO_SWING = 1.5, 50  # see `unsteady`; samples of eager as served
_BLOCK = re.compile(r"\bblocks\.\d+")
# What the ladder calls vLLM's own graph, told apart from a variant's for people.
_TITLES = {GRAPH: "vLLM's graph"}
BASELINES = (SERVED, FALLBACK, _TITLES[GRAPH])


def title(column: str) -> str:
    """Name a column for people: "vLLM's graph", "resampler + one_pass"."""
    return _TITLES.get(column, column.replace("+", COMBINED))


def last_step(steps: Iterable[str]) -> str | None:
    """Return the step with every variant of a model: "all variants", else the only variant that there is."""
    names = list(dict.fromkeys(steps))
    if title(ALL) in names:
        return title(ALL)
    alone = [name for name in names if name not in BASELINES and COMBINED not in name]
    return alone[0] if len(alone) == 1 else None


def source(ladder: Ladder) -> tuple[Literal["recorded", "static_replay"], str, dict[str, float]]:
    """Return where a ladder comes from, and its headline numbers, for `note_source`."""
    machine = ladder.environment
    where = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or machine.cpu
    text = f"the variants' ladder, {where}, vLLM {machine.vllm}, {ladder.created[:10]}"
    case = one_image(ladder)
    if ladder.replay != "cuda_graph":
        return "static_replay", text, {}
    timed = {title(column.name): column.wall_us for column in case.columns if column.wall_us} if case else {}
    return "recorded", text, {
        f"{name}, {case.name}, median ms": summary(timed[name]).median / 1e3
        for name in (SERVED, title(GRAPH), last_step(timed))
        if case and name in timed
    }  # fmt: skip


def caveats(ladder: Ladder) -> list[str]:
    """What keeps a ladder from being taken at its word, in sentences."""
    told = []
    if ladder.replay != "cuda_graph":
        told.append("static replay: Python runs again over fixed buffers, so its times say nothing about CUDA graphs")
    if ladder.notes or not ladder.complete:
        told.append(f"the ladder is not whole: {'; '.join(ladder.notes) or 'its session did not come to its end'}")
    if ladder.replay == "cuda_graph" and (swung := unsteady(ladder)):
        call, times = max(swung.items(), key=lambda pair: pair[1])
        told.append(
            f"the host was unsteady on {', '.join(swung)}: on {call} eager as served took {times:.1f} times as long in "
            "one tenth of the samples as in another; all steps had the same host, so ratios say more than milliseconds"
        )
    return told


def unsteady(ladder: Ladder) -> dict[str, float]:
    """Calls during which the host's speed swung, as where others share it: call -> how far.

    Eager as served waits for the host most. Its samples are cut into tenths in the order they were taken; how far is
    the largest of their medians over the smallest, of calls where that is more than `_SWUNG`.
    """
    found = {}
    for case in ladder.cases:
        times = next((column.wall_us for column in case.columns if column.name == SERVED), [])
        if len(times) >= _FEWEST_TO_SWING:
            medians = [float(np.median(tenth)) for tenth in np.array_split(np.asarray(times), 10)]
            found[case.name] = max(medians) / min(medians)
    return {call: swing for call, swing in found.items() if swing > _SWUNG}


def missing(facts: ModelFacts) -> str:
    """Say in a sentence that there is no ladder of a model, and how to make one."""
    return (
        f"No ladder of {facts.title} is recorded here: `bash scripts/h200_variants.sh {facts.key}` makes it on an H200."
    )


# The boundary -----------------------------------------------------------------------------------------------------


def boundaries(found: Sequence[Boundary]) -> pd.DataFrame:
    """One row per candidate: whether it captures, its nodes, times in microseconds, syncs seen.

    `call us` is inside + outside; `gain us` what the capture saves against running the region eagerly. Columns that no
    row fills are left out: on a CPU nothing is captured and timed. `not watched`: why no syncs could be looked for.
    """
    captures = {None: "not tried", True: "yes", False: "no"}
    table = pd.DataFrame(
        [
            {
                "the graph would hold": _short(one),
                "captures": captures[one.captured],
                "nodes": one.nodes,
                "inside us": one.inside_us,
                "outside us": one.outside_us,
                "call us": _sum(one.inside_us, one.outside_us),
                "region eagerly us": one.eager_us,
                "gain us": one.gain_us,
                "host syncs": None if one.unwatched else sum(sync.count for sync in one.syncs),
                "not watched": one.unwatched,
                "obstacle": one.obstacle.error if one.obstacle else None,
            }
            for one in found
        ]
    )
    return _whole(table.dropna(axis="columns", how="all"))


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """Make counts of some rows whole numbers; a missing one would make all of them floats."""
    counts = [name for name in ("nodes", "GPU ops", "host syncs") if name in table]
    return table.astype(dict.fromkeys(counts, "Int64"))


def _short(one: Boundary) -> str:
    """Return the candidate's title without the idea behind a variant."""
    return one.title.partition(":")[0]


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def obstacles(found: Sequence[Boundary]) -> pd.DataFrame:
    """What stands in the way of each candidate: CUDA's refusal, and host syncs, each with its source line."""
    rows: list[dict[str, object]] = []
    for one in found:
        if one.obstacle is not None:
            said = f"{one.obstacle.error}: {one.obstacle.message}"
            rows.append(_obstacle(one, "CUDA refuses", said, one.obstacle.place, one.obstacle.source, 1))
        for sync in one.syncs:
            kind = "copies from host memory" if sync.host_copy else "reads on the host"
            rows.append(_obstacle(one, kind, sync.call, sync.place, sync.source, sync.count))
    columns = ["the graph would hold", "what", "call", "at", "line", "times"]
    return pd.DataFrame(rows, columns=columns)


def _obstacle(one: Boundary, what: str, call: str, place: str, line: str, times: int) -> dict[str, object]:
    return {"the graph would hold": _short(one), "what": what, "call": call, "at": place, "line": line, "times": times}


# The graph by module ----------------------------------------------------------------------------------------------


def parts(mapped: ModuleMap) -> pd.DataFrame:
    """One row per module and kernel family of a graph, blocks taken together: nodes and microseconds of a replay.

    Where a module multiplies by its weights, a kernel whose name says nothing is that product.
    """
    rows = [
        {
            "graph": title(mapped.name),
            "module": _rolled(one),
            "family": "gemm" if family == "other" and one.flops and one.weight_bytes else family,
            "nodes": nodes,
            "us": us,
        }
        for one in mapped.modules
        for family, (nodes, us) in one.families.items()
    ]
    table = pd.DataFrame(rows, columns=["graph", "module", "family", "nodes", "us"])
    return table.groupby(["graph", "module", "family"], sort=False, as_index=False).sum()


def modules(mapped: ModuleMap) -> pd.DataFrame:
    """One row per module of a graph, blocks taken together, longest first.

    `roofline us` is the least time for its operations and for reading its weights once, `times roofline` the distance;
    a module without either, such as a copy, has none.
    """
    rows = [
        {
            "graph": title(mapped.name),
            "module": _rolled(one),
            "nodes": one.nodes,
            "us": one.us,
            "glue us": one.families.get("glue", (0, 0.0))[1],
            "roofline us": one.roofline_us,
        }
        for one in mapped.modules
    ]
    table = pd.DataFrame(rows, columns=["graph", "module", "nodes", "us", "glue us", "roofline us"])
    table = table.groupby(["graph", "module"], sort=False, as_index=False).sum()
    table.insert(4, "share", table["us"] / table["us"].sum())
    table["times roofline"] = (table["us"] / table["roofline us"]).where(table["roofline us"] > 0)
    return table.sort_values("us", ascending=False, kind="stable", ignore_index=True)


def _rolled(one: MappedModule) -> str:
    return _BLOCK.sub(ALL_BLOCKS, one.module) or OUTSIDE_MODULES


def graphs(maps: Sequence[ModuleMap]) -> pd.DataFrame:
    """One row per graph: nodes, microseconds of a replay, of them glue, roofline, distance, or why it has no map.

    `unnamed us` is of kernels whose names do not tell their family; no column where every graph tells all.
    """
    rows = []
    for mapped in maps:
        table, families = modules(mapped), parts(mapped)
        us, floor = float(table["us"].sum()), float(table["roofline us"].sum())
        rows.append(
            {
                "graph": title(mapped.name),
                "budget": mapped.budget,
                "nodes": mapped.nodes,
                "us": us or None,
                "glue us": float(table["glue us"].sum()) if us else None,
                "unnamed us": float(families.loc[families["family"] == "other", "us"].sum()) or None,
                "roofline us": floor or None,
                "times roofline": us / floor if floor else None,
                "not mapped": mapped.why_not,
            }
        )
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


# The variants, step by step -----------------------------------------------------------------------------------------


def steps(case: Case) -> pd.DataFrame:
    """One row per column of a case, in the ladder's order: un-profiled times, speed-ups of medians, GPU, parity.

    `busy` and `idle` are of the device in one traced call. `parity over noise` is the worst item's relative RMS against
    eager as served over what rounding does to eager itself; `equals the graph`: bit for bit vLLM's graph; `seen in the
    buffers`: what static replays found wrong there. A column that failed has its error and no numbers.
    """
    samples = {column.name: column.wall_us for column in case.columns if column.wall_us}
    return _whole(pd.DataFrame([_step(case, column, samples) for column in case.columns]))


def _step(case: Case, column: Column, samples: dict[str, list[float]]) -> dict[str, object]:
    row: dict[str, object] = {"call": case.name, "tokens": sum(case.tokens), "step": title(column.name)}
    timed = summary(column.wall_us) if column.wall_us else None
    row["n"] = timed.n if timed else 0
    row |= {"mean ms": timed and timed.mean / 1e3, "median ms": timed and timed.median / 1e3}
    row |= {"P99 ms": timed and timed.p99 / 1e3}
    for base, name in ((SERVED, "vs served"), (GRAPH, "vs vLLM's graph")):
        known = timed is not None and base in samples and column.name != base
        # Without the interval, which a table of steps does not show, one draw is enough.
        row[name] = ratio(samples[base], column.wall_us, "median", draws=1).value if known else None
    row |= {"busy ms": _ms(column.busy_us), "idle ms": _ms(column.idle_us), "traced ms": _ms(column.traced_us)}
    row |= {"GPU ops": column.ops, "nodes": column.nodes}
    row |= {"parity over noise": _over_noise(case, column), "equals the graph": _equals_graph(column)}
    row |= {"seen in the buffers": "; ".join(column.findings) or None, "failed": column.error}
    return row


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _over_noise(case: Case, column: Column) -> float | None:
    worst = [item.relative_rms for item in column.parity]
    known = [value for value in worst if value is not None]
    return max(known) / case.noise_rms if known and len(known) == len(worst) and case.noise_rms else None


def _equals_graph(column: Column) -> bool | None:
    return all(item.bit_equal for item in column.against_graph) if column.against_graph else None


def one_image(ladder: Ladder) -> Case | None:
    """Return the first case of one image, of a server that allows no videos."""
    images = (case for case in ladder.cases if case.modality == "image" and not case.beside_videos)
    return next((case for case in images if len(case.grids) == 1), None)


def in_order(ladder: Ladder) -> list[Case]:
    """Return the cases, images before those beside videos and videos last, each from few tokens to many."""
    return sorted(ladder.cases, key=lambda case: (case.modality, case.beside_videos, sum(case.tokens)))


def all_steps(ladder: Ladder) -> pd.DataFrame:
    """Return `steps` of every case, `in_order`."""
    return pd.concat([steps(case) for case in in_order(ladder)], ignore_index=True)


def overview(every: pd.DataFrame) -> pd.DataFrame:
    """One row per call, from `all_steps`: eager as served, vLLM's graph and all variants; speed-ups of medians.

    `nodes before` are of vLLM's graph; `nodes`, `parity over noise` and `equals the graph` of all variants, or of the
    only one that there is.
    """
    last = last_step(every["step"])
    shown = [step for step in (SERVED, title(GRAPH), last) if step]
    rows = []
    for call, table in every.groupby("call", sort=False):
        steps = {row["step"]: row for row in table.to_dict("records")}
        row: dict[str, object] = {"call": call}
        for step in shown:
            row |= {f"{step}, {name}": steps.get(step, {}).get(name) for name in ("mean ms", "P99 ms")}
        whole = steps.get(last or "", {})
        row |= {name: whole.get(name) for name in ("vs served", f"vs {title(GRAPH)}")}
        row |= {"nodes before": steps.get(title(GRAPH), {}).get("nodes"), "nodes": whole.get("nodes")}
        row |= {name: whole.get(name) for name in ("parity over noise", "equals the graph")}
        rows.append(row)
    return pd.DataFrame(rows).astype({"nodes before": "Int64", "nodes": "Int64"})


STEPS_OF_A_BLOCK = ("qkv", "attention", "proj", "fc1", "fc2")


def recipes(ladder: Ladder) -> pd.DataFrame:
    """One row per size of graph: how variants that measure it compute the steps of a block, in order.

    Columns that share a tower share what was measured (`variants.recipe`); ways that only some chose stand side by
    side, as where graphs for videos have room for more sequences.
    Empty for encoders whose variants measure nothing.
    """
    chosen: dict[int, list[Steps]] = {}
    for one in ladder.captured:
        for steps in one.recipes:
            chosen.setdefault(steps.rows, []).append(steps)
    merge = model_facts(ladder.model.key).merge ** 2
    rows = [
        {"budget": rows // merge, "rows": rows}
        | {step: " or ".join(dict.fromkeys(getattr(steps, step) for steps in found)) for step in STEPS_OF_A_BLOCK}
        for rows, found in sorted(chosen.items())
    ]
    return pd.DataFrame(rows, columns=["budget", "rows", *STEPS_OF_A_BLOCK])


def schedules(ladder: Ladder) -> list[str]:
    """How variants plan attention, each way once: "once per call", or why in every block."""
    return list(dict.fromkeys(schedule for one in ladder.captured for schedule in one.schedules))


# Hardware counters ---------------------------------------------------------------------------------------------------


def hardware(counters: "Counters") -> pd.DataFrame:
    """One row per arm and kernel family: duration, memory traffic, tensor cores, multiprocessors, achieved roofline."""
    return pd.DataFrame(
        [
            {
                "arm": ARM_TITLES[arm.arm],
                "family": row.family,
                "kernels": row.kernels,
                "us": row.duration_us,
                "DRAM MB": row.dram_bytes / 1e6,
                "TB/s": row.bandwidth / 1e12,
                "tensor cores": row.tensor,
                "multiprocessors": row.active,
                "of the roofline": row.roofline,
            }
            for arm in counters.arms
            for row in counters.families(arm)
        ]
    )
