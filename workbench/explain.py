"""What a run shows, as tables: the numbers behind notebook 01.

    subject = open_subject(explainable()["ernie45_vl"])
    speed(subject.run)                      # mean, median, std, P99 per arm, speed-ups with their baseline
    explained = traced(subject, "graph")    # the trace with the least distortion, analysed
    timeline(explained)                     # host phases, CUDA calls and GPU ops of one call

Times come from un-profiled runs where a table says "timed", and from a trace where it says "traced".
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from workbench.capturable import LADDER_FILE, read_ladder
from workbench.errors import WorkbenchError
from workbench.gaps import Analysis, analyze
from workbench.kernels import family, short_name
from workbench.models import MODELS
from workbench.phases import OUTSIDE
from workbench.profiler import distortions
from workbench.published import PublishedTable
from workbench.run import (
    ARM_TITLES,
    ARMS,
    RECORDINGS,
    RUN_FILE,
    SOURCE_VARIABLE,
    UNNAMED_PHASE,
    Arm,
    Call,
    Run,
    load_recording,
    named_folder,
    read_run,
    recording_folder,
    recording_names,
)
from workbench.stats import ratio, summary
from workbench.timeline import GapKind
from workbench.trace import Category, Trace, read_trace

# Where notebooks take their run from: `recording` (what ships), or the path of a run folder.
GAP_TITLES = {
    GapKind.LAUNCH: "launch gap",
    GapKind.QUEUE: "queue gap",
    GapKind.INTRA_GRAPH: "intra-graph gap",
}
STAGES = (
    (re.compile(r"vision_model\.blocks\.\d+\.attn.*|visual\.blocks\.\d+\.attn.*"), "blocks: attention"),
    (re.compile(r"(vision_model|visual)\.blocks\.\d+\.mlp.*"), "blocks: MLP"),
    (re.compile(r"(vision_model|visual)\.blocks\.\d+\.norm.*"), "blocks: norms"),
    (re.compile(r"(vision_model|visual)\.blocks\.\d+"), "blocks: residual adds"),
    (re.compile(r"resampler_model.*"), "resampler"),
    (re.compile(r"visual\.(merger|downsample|post_\w+).*"), "merger"),
    (re.compile(r"(vision_model|visual).*"), "before the blocks"),
)


@dataclass(frozen=True)
class Subject:
    """The run that a notebook explains, and where it comes from."""

    run: Run
    folder: Path
    kind: Literal["live", "recorded"]
    text: str


def explainable() -> dict[str, Path]:
    """Return the run folders that a notebook can explain, by their model's key.

    It is the folder that the environment variable WORKBENCH_RUN names; without one, or with the word `recording`, the
    first shipped recording of each model by name that has traces, models in the registry's order. Of a folder that
    holds only a ladder, the recording of its model stands beside it (`workbench.capturable.find_ladder`).

    Raises:
        WorkbenchError: the named folder holds no run, or a ladder of a model of which no run ships.
    """
    named = named_folder()
    if named is not None and ((named / RUN_FILE).is_file() or not (named / LADDER_FILE).is_file()):
        return {read_run(named).model.key: named}
    recorded = _recorded_folders()
    if named is None:
        return recorded
    key = read_ladder(named).model.key
    if key not in recorded:
        raise WorkbenchError(
            f"{named} holds a ladder of {key}, of which no run ships for the rest of the notebook; put {LADDER_FILE} "
            "into a run folder of that model"
        )
    return {key: recorded[key]}


def _recorded_folders() -> dict[str, Path]:
    first: dict[str, Path] = {}
    for name in recording_names():
        run = load_recording(name)
        if run.traces:
            first.setdefault(run.model.key, recording_folder(name))
    return {key: first[key] for key in MODELS if key in first}


def open_subject(folder: Path) -> Subject:
    """Read the run in `folder`, and say what and where it was measured.

    Raises:
        WorkbenchError: no run there, or one of a CPU.
    """
    run = read_run(folder)
    if run.replay == "static_replay":
        raise WorkbenchError(
            f"run {run.name} was captured on a CPU, where graphs are static replays and no trace shows GPU work; set "
            f"{SOURCE_VARIABLE} to a run of a GPU, or to nothing for what ships"
        )
    kind: Literal["live", "recorded"] = "recorded" if folder.parent == RECORDINGS else "live"
    machine = ", ".join(sorted({gpu.name for gpu in run.environment.gpus}))
    text = f"{run.name}, {machine}, vLLM {run.environment.vllm}, torch {run.environment.torch}, {run.created[:10]}"
    return Subject(run, folder, kind, text)


def recorded_runs(model: str) -> list[Run]:
    """Return the shipped recordings of a model, most calls first, then fewest failures."""
    runs = [run for run in map(load_recording, recording_names()) if run.model.key == model]
    return sorted(runs, key=lambda run: (-len(run.calls), len(run.failures)))


def one_image(run: Run) -> int:
    """Return the number of the first call that holds one image; 0 where none does."""
    return next((n for n, call in enumerate(run.calls) if call.modality == "image" and len(call.grids) == 1), 0)


def first_calls(run: Run) -> list[int]:
    """Return the numbers of the first call of one item of each modality."""
    first: dict[str, int] = {}
    for number, call in enumerate(run.calls):
        if len(call.grids) == 1:
            first.setdefault(call.modality, number)
    return list(first.values())


def agreement(run: Run, call: int) -> str:
    """Say in a sentence how far the graph's outputs of a call are from eager as served's."""
    row = next((row for row in run.equality if (row.call, row.baseline) == (call, "eager_served")), None)
    if row is None:
        return "The outputs were not compared."
    if row.bit_equal:
        return "The graph's outputs equal eager's bit for bit."
    if row.relative_rms is None:
        return "**The graph's outputs hold values that are not finite.**"
    return (
        f"The graph's outputs differ from eager's by a relative RMS of {row.relative_rms:.2g}; notebook 03 says "
        "whether that is rounding."
    )


def call_title(call: Call) -> str:
    """Say what a call holds: "one image of 224 x 224", "3 images", "one video of 8 frames of 224 x 224"."""
    if len(call.grids) > 1:
        return f"{len(call.grids)} {call.modality}s"
    width, height, frames = call.sizes[0]
    return f"one {call.modality} of {f'{frames} frames of ' if call.modality == 'video' else ''}{width} x {height}"


def speed(run: Run) -> pd.DataFrame:
    """Statistics of un-profiled wall time per call and arm, milliseconds, with speed-ups against both baselines.

    `vs served` and `vs fallback` are median(baseline) / median(arm); an arm that failed has its cause in
    `failed` and no numbers. Columns that no row fills are left out.
    """
    rows = []
    for number, call in enumerate(run.calls):
        timed = {timing.arm: timing.wall_us for timing in run.timings if timing.call == number}
        failed = {failure.arm: failure.cause or failure.error for failure in run.failures if failure.call == number}
        for arm in ARMS:
            row: dict[str, object] = {"call": number, "items": len(call.tokens), "tokens": sum(call.tokens)}
            row["arm"] = ARM_TITLES[arm]
            if arm in timed:
                found = summary(timed[arm])
                row |= {"n": found.n, "mean ms": found.mean / 1e3, "median ms": found.median / 1e3}
                row |= {"std ms": found.std / 1e3, "P99 ms": found.p99 / 1e3}
                row |= {f"vs {_short(base)}": _speedup(timed, base, arm) for base in ARMS if base != "graph"}
            row["failed"] = failed.get(arm)
            rows.append(row)
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def _short(arm: Arm) -> str:
    return ARM_TITLES[arm].removeprefix("eager ").removeprefix("as ")


def _speedup(timed: dict[Arm, list[float]], base: Arm, arm: Arm) -> float | None:
    if base not in timed or base == arm:
        return None
    return ratio(timed[base], timed[arm], "median").value


def beside_published(run: Run, published: PublishedTable, call: int = 0) -> pd.DataFrame:
    """The published table's rows and this run's, in the same columns, milliseconds.

    The published benchmark is `encoder_forward_ms` of a whole engine, which divides one encoder call's time among the
    requests in it; here a call is measured alone. Compare ratios, not milliseconds.
    """
    first = published.rows[0]
    rows: list[dict[str, object]] = [
        {"source": published.source, "GPU": published.gpu, "arm": row.arm, "mean ms": row.mean}
        | {"median ms": row.median, "std ms": row.std, "P99 ms": row.p99}
        | {"mean speed-up": first.mean / row.mean, "P99 speed-up": first.p99 / row.p99}
        for row in published.rows
    ]
    timed = {timing.arm: summary(timing.wall_us) for timing in run.timings if timing.call == call}
    base = timed["eager_served"]
    gpu = run.environment.gpus[0].name if run.environment.gpus else run.environment.cpu
    for arm, found in timed.items():
        rows.append(
            {"source": f"run {run.name}", "GPU": gpu, "arm": ARM_TITLES[arm], "mean ms": found.mean / 1e3}
            | {"median ms": found.median / 1e3, "std ms": found.std / 1e3, "P99 ms": found.p99 / 1e3}
            | {"mean speed-up": base.mean / found.mean, "P99 speed-up": base.p99 / found.p99}
        )
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Traced:
    """One trace of a run, read and analysed over its call windows."""

    arm: Arm
    activities: tuple[str, ...]
    trace: Trace
    analysis: Analysis


def traced(
    subject: Subject, arm: Arm, activities: Literal["ranges", "cpu"] = "ranges", call: int | None = None
) -> Traced:
    """Read one trace of the run: "ranges" distorts least, "cpu" also has every operator and, in eager, module.

    Args:
        call: whose windows are analysed; None: those of all calls.

    Raises:
        WorkbenchError: the run has no such trace, the trace no such call, or its file is cut off.
    """
    for record in subject.run.traces:
        if record.arm == arm and activities in record.activities:
            trace = read_trace(subject.folder / record.file)
            if trace.cut:
                raise WorkbenchError(
                    f"{record.file} of run {subject.run.name} is cut off before its end, so its counts would be too "
                    "low; copy the run again from where it was made"
                )
            pattern = f"{record.window}#{'*' if call is None else call}"
            return Traced(arm, tuple(record.activities), trace, analyze(trace, pattern))
    raise WorkbenchError(
        f"run {subject.run.name} has no {activities} trace of {ARM_TITLES[arm]}; capture it with --profiled-repeats 1"
    )


def where_time_goes(explained: list[Traced]) -> pd.DataFrame:
    """Mean per window and arm, microseconds: busy and idle by cause (they add up to the window), and counts."""
    rows = []
    for one in explained:
        total, count = one.analysis.total, len(one.analysis.windows)
        rows.append(
            {
                "arm": ARM_TITLES[one.arm],
                "window us": total.wall_us / count,
                "busy us": total.busy_us / count,
                "launch gaps us": total.launch_gap_us / count,
                "queue gaps us": total.queue_gap_us / count,
                "intra-graph gaps us": total.intra_graph_gap_us / count,
                "lead us": total.lead_us / count,
                "tail us": total.tail_us / count,
                "GPU ops": total.gpu_ops / count,
                "launches": total.launches / count,
                "syncs": total.syncs / count,
            }
        )
    return pd.DataFrame(rows)


def timeline(explained: Traced, occurrence: int = 0) -> pd.DataFrame:
    """Spans of one call window: host phases, CUDA calls and GPU ops.

    Columns: lane ("host", "CUDA calls", "GPU"), name, group (phase, kind of call, or kernel family), start_us from the
    start of the window, duration_us.
    """
    trace, (start, stop) = explained.trace, _window(explained, occurrence)
    tables = []
    for lane, categories in (
        ("host", (Category.USER_ANNOTATION,)),
        ("CUDA calls", (Category.RUNTIME, Category.DRIVER)),
        ("GPU", (Category.KERNEL, Category.MEMCPY, Category.MEMSET)),
    ):
        rows = trace.rows(*categories)
        rows = rows[(trace.start_ns[rows] >= start) & (trace.start_ns[rows] < stop)]
        rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
        kinds, kind = np.unique(trace.name[rows], return_inverse=True)
        names = [trace.names[one] for one in kinds.tolist()]
        if lane == "host":  # the window itself, and single modules, are too fine for this picture
            wanted = np.array(["." not in name and "#" not in name for name in names], np.bool_)[kind]
            rows, kind = rows[wanted], kind[wanted]
        groups = [
            name if lane == "host" else _call_group(name) if lane == "CUDA calls" else family(name) for name in names
        ]
        shown = names if lane == "host" else [short_name(name) for name in names]
        tables.append(
            pd.DataFrame(
                {
                    "lane": lane,
                    "name": np.array(shown, object)[kind],
                    "group": np.array(groups, object)[kind],
                    "start_us": (trace.start_ns[rows] - start) / 1e3,
                    "duration_us": trace.duration_ns[rows] / 1e3,
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


def _window(explained: Traced, occurrence: int) -> tuple[int, int]:
    trace = explained.trace
    names = {row.name for row in explained.analysis.windows}
    rows = [row for row in trace.rows(Category.USER_ANNOTATION).tolist() if trace.names[trace.name[row]] in names]
    rows.sort(key=lambda row: int(trace.start_ns[row]))
    if not 0 <= occurrence < len(rows):
        raise WorkbenchError(f"{trace.source} has {len(rows)} calls, so there is no call {occurrence}")
    row = rows[occurrence]
    return int(trace.start_ns[row]), int(trace.start_ns[row] + trace.duration_ns[row])


def _call_group(name: str) -> str:
    for word in ("GraphLaunch", "Synchronize", "Memcpy", "Memset", "Launch"):
        if word in name:
            return {"Synchronize": "wait", "Launch": "kernel launch", "GraphLaunch": "graph launch"}.get(word, "copy")
    return "other call"


def gap_lengths(explained: list[Traced]) -> pd.DataFrame:
    """Every idle interval between GPU ops, microseconds, by arm and kind; one row each."""
    frames = []
    for one in explained:
        gaps = one.analysis.gaps
        frames.append(
            pd.DataFrame(
                {
                    "arm": ARM_TITLES[one.arm],
                    "kind": [GAP_TITLES[GapKind(kind)] for kind in gaps.kind],
                    "gap us": gaps.duration_ns / 1e3,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def gap_summary(gaps: pd.DataFrame, windows: dict[str, int]) -> pd.DataFrame:
    """Gaps per call, and their median, P90, longest and total per call, by arm and kind.

    Args:
        gaps: from `gap_lengths`.
        windows: calls in each arm's trace, by the arm's title.
    """
    rows = []
    for (arm, kind), group in gaps.groupby(["arm", "kind"], sort=False):
        lengths = group["gap us"].to_numpy()
        rows.append(
            {
                "arm": arm,
                "kind": kind,
                "gaps per call": len(lengths) / windows[str(arm)],
                "median us": float(np.median(lengths)),
                "P90 us": float(np.percentile(lengths, 90)),
                "longest us": float(lengths.max()),
                "total us per call": float(lengths.sum()) / windows[str(arm)],
            }
        )
    return pd.DataFrame(rows)


def graph_boundary(run: Run, graph: Traced, call: int = 0) -> pd.DataFrame:
    """One row per phase of `execute()`: where its launches and GPU time are, and its timed host time.

    `timed ms` is the median of the phase un-profiled with a synchronise at both ends, `share` its part of their sum;
    GPU columns are means per traced call.
    """
    count = len(graph.analysis.windows)
    traced_rows = {row.phase: row for row in graph.analysis.phases}
    timed = {phase.phase: summary(phase.wall_us).median for phase in run.phases if phase.call == call}
    total = sum(timed.values())
    rows = []
    for phase, wall in timed.items():
        row = traced_rows.get(phase)
        rows.append(
            {
                "phase": phase,
                "in the graph": phase == "replay",
                "timed ms": wall / 1e3,
                "share": wall / total,
                "GPU us": row.gpu_us / count if row else 0.0,
                "GPU ops": row.gpu_ops / count if row else 0.0,
                "launches": row.launches / count if row else 0.0,
                "copies to host": row.memcpy_d2h / count if row else 0.0,
                "syncs": row.syncs / count if row else 0.0,
            }
        )
    known = [row for row in rows if row["phase"] != UNNAMED_PHASE]
    return pd.DataFrame(known + [row for row in rows if row["phase"] == UNNAMED_PHASE])


def families(explained: list[Traced]) -> pd.DataFrame:
    """GPU time per call by kernel family and arm, microseconds, with counts."""
    return pd.DataFrame(
        [
            {
                "arm": ARM_TITLES[one.arm],
                "family": row.family,
                "GPU us per call": row.total_us / len(one.analysis.windows),
                "ops per call": row.count / len(one.analysis.windows),
                "share": row.share,
            }
            for one in explained
            for row in one.analysis.families
        ]
    )


def sync_ledger(explained: list[Traced]) -> pd.DataFrame:
    """Blocking calls and copies to the host per call, by arm and stage of the encoder or phase of the graph arm.

    Eager stages need a "cpu" trace, which names modules. The workbench's own wait at the end of a call is left out.
    """
    rows: dict[tuple[str, str], list[float]] = {}
    for one in explained:
        count = len(one.analysis.windows)
        for phase in one.analysis.phases:
            if phase.phase == "synchronise":
                continue
            entry = rows.setdefault((ARM_TITLES[one.arm], stage(phase.phase)), [0.0] * 4)
            for index, value in enumerate((phase.syncs, phase.memcpy_d2h, phase.memcpy_h2d, phase.blocked_us)):
                entry[index] += value / count
    columns = ("syncs", "copies to host", "copies to GPU", "blocked us")
    table = pd.DataFrame(
        [
            {"arm": arm, "where": where} | dict(zip(columns, values, strict=True))
            for (arm, where), values in rows.items()
        ]
    )
    moved = table[["syncs", "copies to host", "copies to GPU"]].sum(axis=1) > 0
    return table[moved].reset_index(drop=True)


def stage(phase: str) -> str:
    """Roll a module's or window's annotation up to a stage of the encoder."""
    if phase.startswith("call#") or phase == OUTSIDE:
        return "the call itself"
    for pattern, title in STAGES:
        if pattern.fullmatch(phase):
            return title
    return phase


def replay_kernels(graph: Traced) -> pd.DataFrame:
    """One row per traced replay: kernels and nodes, launch call, first node, span, gaps inside, microseconds."""
    return pd.DataFrame(
        [
            {
                "replay": number,
                "nodes": row.nodes,
                "kernels": row.kernels,
                "launch call us": row.launch_us,
                "launch to first node us": row.to_first_us,
                "nodes us": row.span_us,
                "gaps inside us": row.intra_graph_gap_us,
                "last node to sync us": row.to_sync_us,
            }
            for number, row in enumerate(graph.analysis.replays)
        ]
    )


def captures(run: Run) -> pd.DataFrame:
    """The capture bill: seconds, memory and nodes per budget, in capture order (largest first)."""
    return pd.DataFrame(
        [
            {
                "budget": cost.budget,
                "seconds": cost.seconds,
                "pool growth MiB": None if cost.pool_bytes is None else cost.pool_bytes / 2**20,
                "nodes": cost.nodes,
            }
            for cost in run.capture
        ]
    )


def profiler_effect(run: Run) -> pd.DataFrame:
    """What tracing does to the time of each arm: median profiled over median un-profiled, per activity set."""
    return pd.DataFrame(
        [
            {
                "arm": ARM_TITLES[found.arm],
                "call": found.call,
                "activities": " + ".join(found.activities),
                "un-profiled ms": found.unprofiled_us / 1e3,
                "profiled ms": found.profiled_us / 1e3,
                "distortion": found.ratio,
            }
            for found in distortions(run)
        ]
    )
