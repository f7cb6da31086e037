"""What a call over several GPUs gave, in stored form, and its tables; `encoder.parallel` makes it.

from workbench.parallel import find_parallel, read_parallel, shares, times

folder = find_parallel("glm4_1v")
run = read_parallel(folder)
times(run)                          # median and P99 of every call in four arms
shares(run)                         # which rank had what, padding of the gather, waits, distance of the outputs
ranks, doubts = trace_ranks(folder, run)
exchanges(run, ranks)               # what each rank spent in collectives, and what of it was waiting
"""

import re
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from workbench.errors import WorkbenchError
from workbench.files import read_versioned
from workbench.models import model_facts
from workbench.published import TWO_GPUS
from workbench.run import RECORDINGS, Batch, ConfigRecord, Environment, ModelRecord, Record, Replay
from workbench.stats import summary

if TYPE_CHECKING:
    from workbench.collectives import Ranks

SCHEMA_VERSION = 1
RESULT_FILE = "parallel.json"
Grid = tuple[int, int, int]
ParallelArm = Literal["graph_ranks", "graph_one", "eager_ranks", "eager_one"]
ARMS: tuple[ParallelArm, ...] = ("graph_ranks", "graph_one", "eager_ranks", "eager_one")
ONE_GPU: tuple[ParallelArm, ...] = ("graph_one", "eager_one")
# Relative RMS up to which ranks agree with one GPU: several times what rounding does to a whole
# encoder with dummy weights (0.02 to 0.04 in bf16), a quarter of what a missing layer does; see encoder/weights.py.
ROUNDING = {"bfloat16": 0.1, "float16": 0.1, "float32": 1e-3}


class RankCall(Record, frozen=True):
    """One rank's share of one call.

    Attributes:
        items: its items, indices into the call; all of them where ranks share weights.
        patches, tokens: of its items.
        gathered_rows: output rows that every rank sends; `tokens` of them are real. 0 where ranks share weights.
        batches: its replays.
        equal: the outputs have the bits of this rank's own manager that runs the whole call alone.
        max_abs: largest difference of the two; None: not finite.
        relative_rms: RMS of that difference over the RMS of the outputs; None: not finite.
        eager_rms: the same between the eager arms, which no graph can have changed.
        wall_us: samples per arm, a barrier before each.
        gather_us: samples of the gather alone, waiting for the slowest rank included.
    """

    items: list[int]
    patches: int
    tokens: int
    gathered_rows: int
    batches: list[Batch]
    equal: bool
    max_abs: float | None
    relative_rms: float | None
    eager_rms: float | None
    wall_us: dict[ParallelArm, list[float]]
    gather_us: list[float]


class Rank(Record, frozen=True):
    """What one rank measured; `trace` is the name of its Kineto trace."""

    rank: int
    model: ModelRecord
    config: ConfigRecord
    calls: list[RankCall]
    trace: str


class ParallelRun(Record, frozen=True):
    """What all ranks measured on the same calls.

    Attributes:
        tp_mode: vLLM's `mm_encoder_tp_mode`.
        custom_all_reduce: vLLM was allowed its own all-reduce; whether it used it, the traces' kernels tell.
    """

    schema_version: int
    workbench: str
    environment: Environment
    replay: Replay
    tp_mode: Literal["data", "weights"]
    custom_all_reduce: bool
    modality: Literal["image", "video"]
    calls: list[list[Grid]]
    ranks: list[Rank]


class Balance(Record, frozen=True):
    """How evenly one call was shared.

    Attributes:
        patches: per rank. `imbalance`: the largest share over the mean, 1 is even.
        padded: share of the gathered rows that are padding.
        waiting_us: per rank, the median gather minus the shortest rank's: time spent waiting for others.
    """

    call: int
    items: list[int]
    patches: list[int]
    imbalance: float
    padded: float
    waiting_us: list[float]


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank's measurements and trace lie."""
    return folder / f"rank{rank}"


def read_parallel(folder: Path) -> ParallelRun:
    """Read `folder`/parallel.json.

    Raises:
        WorkbenchError: no such file, of another schema version, or ranks that do not fit its calls.
    """
    path = folder / RESULT_FILE
    if not path.is_file():
        raise WorkbenchError(f"{folder} has no {RESULT_FILE}; make one with `workbench parallel --out` on several GPUs")
    run = read_versioned(path, ParallelRun, SCHEMA_VERSION)
    if not run.calls or len(run.ranks) < 2 or not all(_whole(run, rank) for rank in run.ranks):
        raise WorkbenchError(
            f"{path} does not hold two ranks or more with every call in every arm, as often on each; measure it again"
        )
    return run


def _whole(run: ParallelRun, rank: Rank) -> bool:
    if len(rank.calls) != len(run.calls) or Path(rank.trace).name != rank.trace or rank.model.dtype not in ROUNDING:
        return False
    for first, share in zip(run.ranks[0].calls, rank.calls, strict=True):
        counts = [(len(first.wall_us.get(arm, ())), len(share.wall_us.get(arm, ()))) for arm in ARMS]
        gathered = share.gathered_rows > 0 or run.tp_mode == "weights"
        own = all(0 <= item < len(share.items) for batch in share.batches for item in batch.items)
        if not gathered or not own or not all(mine == theirs > 0 for mine, theirs in counts):
            return False
    return True


def find_parallel(model: str, run_folder: Path | None = None) -> Path | None:
    """Return a run's own folder if it holds such a result, else the model's shipped recording, else None.

    Raises:
        WorkbenchError: see `read_parallel`.
    """
    folders = [] if run_folder is None else [run_folder]
    folders += sorted(path.parent for path in RECORDINGS.glob(f"*/{RESULT_FILE}"))
    found = (folder for folder in folders if (folder / RESULT_FILE).is_file())
    return next((folder for folder in found if read_parallel(folder).ranks[0].model.key == model), None)


def balance(run: ParallelRun) -> list[Balance]:
    """Return the table of shares, one row a call; empty where ranks share weights and so have equal work."""
    rows: list[Balance] = []
    if run.tp_mode == "weights":
        return rows
    for index in range(len(run.calls)):
        shares = [rank.calls[index] for rank in run.ranks]
        patches = [share.patches for share in shares]
        gathers = [median(share.gather_us) if share.gather_us else 0.0 for share in shares]
        sent = sum(share.gathered_rows for share in shares)
        rows.append(
            Balance(
                call=index,
                items=[len(share.items) for share in shares],
                patches=patches,
                imbalance=max(patches) * len(patches) / sum(patches),
                padded=1 - sum(share.tokens for share in shares) / sent,
                waiting_us=[gather - min(gathers) for gather in gathers],
            )
        )
    return rows


def agrees(run: ParallelRun) -> bool:
    """Whether the ranks give what one GPU gives, up to rounding.

    Shared weights round their partial sums, and a share of the items may replay another budget than the whole call,
    with other kernels.
    """
    most = ROUNDING[run.ranks[0].model.dtype]
    shares = [share for rank in run.ranks for share in rank.calls]
    return all(rms is not None and rms <= most for share in shares for rms in (share.relative_rms, share.eager_rms))


def trace_ranks(folder: Path, run: ParallelRun) -> tuple["Ranks | None", list[str]]:
    """Return what the ranks' traces in `folder` say on one clock, each collective with its call, or why they cannot.

    The traced calls run under a profiler: its waits explain, `RankCall.gather_us` and `wall_us` measure.
    """
    from workbench.collectives import join_or_doubt
    from workbench.trace import read_traces

    paths = [rank_folder(folder, rank.rank) / rank.trace for rank in run.ranks]
    return join_or_doubt(read_traces(paths), "call#*")


def judgement(run: ParallelRun) -> str:
    """Say in a sentence how far the outputs are from one GPU's, and where their bits are the same."""
    rows = shares(run)
    most = ROUNDING[run.ranks[0].model.dtype]
    values = [row[name] for row in rows for name in ("relative RMS", "eager relative RMS")]
    known = [value for value in values if isinstance(value, float)]
    same = sum(bool(row["same bits"]) for row in rows)
    if len(known) < len(values):
        return "The outputs of several GPUs are not finite, or those of one are not."
    text = f"Outputs of {len(run.ranks)} GPUs by graphs have the bits of one GPU's in {same} of {len(rows)} calls"
    if run.tp_mode == "data":
        alike = [bool(row["same bits"]) == row["same replays"] for row in rows]
        text += ", exactly those with one GPU's replays" if all(alike) and same < len(rows) else ""
    verdict = "within" if agrees(run) else "beyond"
    return f"{text}; the largest relative RMS is {max(known):.4f}, {verdict} what rounding may do ({most:g})."


# Tables -----------------------------------------------------------------------------------------------------------


def arm_titles(run: ParallelRun) -> dict[ParallelArm, str]:
    """Name the arms for people: "graph, 2 GPUs", "eager, 1 GPU"."""
    several = f"{len(run.ranks)} GPUs"
    return {arm: f"{arm.partition('_')[0]}, {'1 GPU' if arm in ONE_GPU else several}" for arm in ARMS}


def call_titles(run: ParallelRun) -> list[str]:
    """Write the calls as `workbench parallel --call` takes them: "336x336*8", "224x224,896x896"."""
    facts = model_facts(run.ranks[0].model.key)
    titles = []
    for call in run.calls:
        items = []
        for (t, h, w), same in groupby(call):
            frames = f"x{t * facts.temporal_patch}" if run.modality == "video" else ""
            count = len(list(same))
            items.append(f"{w * facts.patch}x{h * facts.patch}{frames}{f'*{count}' if count > 1 else ''}")
        titles.append(",".join(items))
    return titles


def samples(run: ParallelRun, call: int, arm: ParallelArm) -> list[float]:
    """Microseconds of one call in one arm.

    Over several GPUs a sample is the slowest rank's, as all began together; the ranks' samples on one GPU are as many
    samples of one GPU.
    """
    walls = [rank.calls[call].wall_us[arm] for rank in run.ranks]
    if arm in ONE_GPU:
        return [value for wall in walls for value in wall]
    return [max(together) for together in zip(*walls, strict=True)]


def times(run: ParallelRun) -> list[dict[str, object]]:
    """One row per call and arm: n, median and P99 in milliseconds, times as fast as one GPU in the median."""
    rows: list[dict[str, object]] = []
    titles = arm_titles(run)
    for call, items in enumerate(call_titles(run)):
        found = {arm: summary(samples(run, call, arm)) for arm in ARMS}
        for arm, one in found.items():
            row: dict[str, object] = {"call": call, "items": items, "arm": titles[arm], "n": one.n}
            row |= {"median ms": one.median / 1e3, "P99 ms": one.p99 / 1e3}
            alone = found["graph_one" if arm == "graph_ranks" else "eager_one"]
            rows.append(row | {"vs 1 GPU": None if arm in ONE_GPU else alone.median / one.median})
    return rows


def shares(run: ParallelRun) -> list[dict[str, object]]:
    """One row per call: who has what, the gather's padding and waits, and how far the outputs are from one GPU's.

    `relative RMS` is the worst rank's, by graphs and eagerly, None where one is not finite; `same bits` of the graphs.
    """
    rows = []
    shared = {row.call: row for row in balance(run)}
    replays = same_replays(run)
    for call, items in enumerate(call_titles(run)):
        own = [rank.calls[call] for rank in run.ranks]
        row: dict[str, object] = {"call": call, "items": items}
        if call in shared:
            found = shared[call]
            row |= {"items per rank": _each(found.items), "patches per rank": _each(found.patches)}
            row |= {"imbalance": found.imbalance, "padded": found.padded}
            row |= {"waiting ms per rank": " / ".join(f"{wait / 1e3:.2f}" for wait in found.waiting_us)}
            row |= {"same replays": replays[call]}
        else:
            row["patches"] = own[0].patches
        row |= {"same bits": all(share.equal for share in own)}
        row |= {"relative RMS": _worst([share.relative_rms for share in own])}
        rows.append(row | {"eager relative RMS": _worst([share.eager_rms for share in own])})
    return rows


def _each(values: list[int]) -> str:
    return " / ".join(map(str, values))


def _worst(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def same_replays(run: ParallelRun) -> list[bool]:
    """Whether the ranks' replays of each call hold the same items in the same budgets as the planner has one GPU do."""
    from workbench.budgets import Resolved
    from workbench.planner import plan

    facts, config = model_facts(run.ranks[0].model.key), run.ranks[0].config
    resolved = Resolved(tuple(config.budgets), config.max_items, config.max_frames)
    found = []
    for number, call in enumerate(run.calls):
        frames = [grid[0] for grid in call] if facts.sequences == "frame" else None
        alone = plan([facts.tokens(grid) for grid in call], [0, len(call)], resolved, frames).record()
        wanted = {(frozenset(batch["items"]), batch["budget"]) for batch in alone["calls"][0]["batches"]}
        own = [rank.calls[number] for rank in run.ranks]
        # A replay's items count within the rank's share.
        ours = {(frozenset(one.items[i] for i in batch.items), batch.budget) for one in own for batch in one.batches}
        found.append(ours == wanted)
    return found


def exchanges(run: ParallelRun, ranks: "Ranks") -> list[dict[str, object]]:
    """One row per traced call and rank: its collectives, milliseconds of exchange and of waiting for the last rank."""
    titles = call_titles(run)
    rows: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in ranks.collectives:
        window = re.match(r"call#(\d+)", one.window)
        if window is None or int(window[1]) >= len(titles):
            continue
        row = rows[int(window[1]), one.rank]
        row["all-gathers" if "gather" in one.name.lower() else "all-reduces"] += 1
        row["exchange ms"] += (one.duration_us - one.waited_us) / 1e3
        row["waiting ms"] += one.waited_us / 1e3
        row["longest wait ms"] = max(row["longest wait ms"], one.waited_us / 1e3)
    return [
        {"call": call, "items": titles[call], "rank": rank}
        | {name: int(row[name]) for name in ("all-reduces", "all-gathers")}
        | {name: row[name] for name in ("exchange ms", "waiting ms", "longest wait ms")}
        for (call, rank), row in sorted(rows.items())
    ]


def clocks(ranks: "Ranks") -> list[dict[str, object]]:
    """One row per rank: its clock against the first rank's and what the collectives allow, microseconds."""
    rows: list[dict[str, object]] = []
    for clock in ranks.clocks:
        row: dict[str, object] = {"rank": clock.rank, "collectives": clock.collectives}
        row |= {"clock ahead us": clock.ahead_us, "at least us": clock.lowest_us, "at most us": clock.highest_us}
        rows.append(row | {"spread us": clock.spread_us})
    return rows


def beside_published(run: ParallelRun) -> list[dict[str, object]]:
    """Eager over graph on several GPUs, means and P99: the published row of this model, then one per call of this run.

    Empty where nothing was published. That benchmark is a whole engine's, of another GPU: only ratios compare.
    """
    published = TWO_GPUS.get((run.ranks[0].model.key, run.modality)) if run.tp_mode == "data" else None
    if published is None:
        return []
    off, on = published.rows
    rows: list[dict[str, object]] = [
        {"source": published.source, "GPUs": published.gpu, "workload": published.workload}
        | {"eager over graph, mean": off.mean / on.mean, "at P99": off.p99 / on.p99}
    ]
    for call, items in enumerate(call_titles(run)):
        eager, graph = (summary(samples(run, call, arm)) for arm in ("eager_ranks", "graph_ranks"))
        row: dict[str, object] = {"source": "here", "GPUs": gpu_names(run), "workload": f"one call of {items}"}
        rows.append(row | {"eager over graph, mean": eager.mean / graph.mean, "at P99": eager.p99 / graph.p99})
    return rows


def gpu_names(run: ParallelRun) -> str:
    """Name what it ran on: "2 NVIDIA H200"."""
    machine = run.environment
    return f"{len(run.ranks)} {machine.gpus[0].name if machine.gpus else machine.cpu}"


_FORMATS = {"padded": ".0%", "us": ".1f", "ms": ".2f", "RMS": ".4f"}  # by the last word of a heading


def shown(heading: str, value: object) -> str:
    """Write a cell of these tables, with the decimals that its heading's unit deserves."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "not finite"
    return format(value, _FORMATS.get(heading.split()[-1], ".2f")) if isinstance(value, float) else str(value)
