"""A run folder: what one capture measured, and everything needed to judge it.

    RUN/run.json          this schema
    RUN/traces/*.json.gz  Kineto traces, one per arm and set of activities

Times are microseconds as floats, memory is bytes. Samples are stored, statistics are computed from
them (`workbench.stats`), so nothing is summarised twice.
"""

import os
from pathlib import Path
from typing import Literal

import msgspec

from workbench.errors import WorkbenchError
from workbench.files import read_versioned

SCHEMA_VERSION = 1
RUN_FILE = "run.json"

# eager_served: embed_multimodal, what the server runs with graphs off.
# eager_fallback: encoder_eager_forward, what the manager runs for an item above the largest budget.
# graph: EncoderCudaGraphManager.execute.
Arm = Literal["eager_served", "eager_fallback", "graph"]
ARMS: tuple[Arm, ...] = ("eager_served", "eager_fallback", "graph")
ARM_TITLES: dict[Arm, str] = {
    "eager_served": "eager as served",
    "eager_fallback": "eager fallback",
    "graph": "graph",
}
Replay = Literal["cuda_graph", "static_replay"]
UNNAMED_PHASE = "between phases"
RECORDINGS = Path(__file__).parent / "recordings"
# The variable that names the folder which notebook 01 explains, and its word for what ships.
SOURCE_VARIABLE, RECORDED = "WORKBENCH_RUN", "recording"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything stored: immutable, keyword-only, strict about unknown fields."""


class GpuState(Record, frozen=True):
    """One GPU as it was at the start of the run; None where the driver does not say."""

    name: str
    index: int = 0
    driver: str | None = None
    cuda_driver: str | None = None
    compute_capability: str | None = None
    memory_bytes: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    other_processes: int | None = None


class Environment(Record, frozen=True):
    """The machine and the software; no user, host or path."""

    python: str
    system: str
    cpu: str
    cpu_count: int
    torch: str | None = None
    cuda_runtime: str | None = None
    vllm: str | None = None
    vllm_distribution: str | None = None
    vllm_commit: str | None = None
    packages: dict[str, str] = {}
    gpus: list[GpuState] = []


class ModelRecord(Record, frozen=True):
    """Which encoder ran. `key` is the registry's; depth and width tell reduced models apart."""

    key: str
    architecture: str
    depth: int
    width: int
    dtype: str
    attention_backend: str
    weights: str  # "dummy seed 0" or "checkpoint"
    weights_fingerprint: str
    out_width: int


class ConfigRecord(Record, frozen=True):
    """The budget configuration as asked (`requested_*`) and as vLLM resolved it."""

    requested_budgets: list[int]
    requested_max_items: int
    requested_max_frames: int | None
    budgets: list[int]
    max_items: int
    max_frames: int
    min_budget: int | None = None
    max_model_len: int = 0
    max_num_batched_tokens: int = 0


class Call(Record, frozen=True):
    """One encoder call. `sizes` are (width, height, frames) in pixels; `grids` (t, h, w) in patches."""

    modality: Literal["image", "video"]
    sizes: list[tuple[int, int, int]]
    grids: list[tuple[int, int, int]]
    tokens: list[int]
    count: int = 1  # how many calls of the workload are like this one


class Batch(Record, frozen=True):
    """One replay or fallback inside a call, in execution order; `items` index into the call."""

    call: int
    items: list[int]
    tokens: int
    budget: int | None


class CaptureCost(Record, frozen=True):
    """What capturing one budget took. Memory fields are None on the CPU."""

    budget: int
    seconds: float
    pool_bytes: int | None = None  # growth of the reserved pool
    allocated_bytes: int | None = None
    nodes: int | None = None


class Timing(Record, frozen=True):
    """Un-profiled samples of one arm on one call.

    `wall_us`: host time between two synchronises around the call. `gpu_us`: CUDA events around it,
    empty without CUDA. `order` is the position of each sample in the ABBA sequence.
    """

    arm: Arm
    call: int
    wall_us: list[float]
    gpu_us: list[float] = []
    order: list[int] = []


class PhaseTiming(Record, frozen=True):
    """Un-profiled host time of one phase of `execute()` per repeat, with a synchronise at both ends.

    The time of a phase inside another belongs to the inner one only, and `UNNAMED_PHASE` holds what no
    phase covers, so the phases of a repeat add up to its `execute()`. The synchronises make it longer
    than the un-split call in `Timing`: compare shares, not sums.
    """

    phase: str
    call: int
    wall_us: list[float]


class TraceFile(Record, frozen=True):
    """One profiled stretch. `window` is the annotation around each call: `{window}#{call}`.

    `activities`: "cpu" (every operator), "ranges" (only the annotations) and "cuda" (runtime calls and
    GPU operations); "ranges" with "cuda" distorts least. `wall_us` and `calls` run in parallel: the
    profiled host time of each window in time order, and which call it was.
    """

    file: str
    arm: Arm
    activities: list[str]
    repeats: int
    window: str
    rank: int = 0
    wall_us: list[float] = []
    calls: list[int] = []


class Equality(Record, frozen=True):
    """Graph against an eager arm on one call, worst item; None where a side is not finite."""

    call: int
    baseline: Arm
    bit_equal: bool
    max_abs: float | None
    relative_rms: float | None
    min_cosine: float | None
    finite: bool


class Failure(Record, frozen=True):
    """An arm that could not run: recorded, never hidden."""

    arm: Arm
    call: int
    error: str
    message: str
    cause: str | None = None  # a defect of docs/defects.md such as "D1"


class Run(Record, frozen=True):
    """One capture: one model, one configuration, one workload, three arms."""

    schema_version: int
    workbench: str
    created: str  # ISO 8601, UTC
    name: str
    replay: Replay
    environment: Environment
    model: ModelRecord
    config: ConfigRecord
    workload: str
    calls: list[Call]
    batches: list[Batch]
    capture: list[CaptureCost]
    timings: list[Timing]
    phases: list[PhaseTiming]
    traces: list[TraceFile]
    equality: list[Equality]
    failures: list[Failure]
    graph_hits: int  # items of `calls` that ran in replays, each call counted once
    graph_misses: int  # and those that ran in eager fallbacks
    warmup: int
    seed: int
    notes: list[str] = []
    gpus_after: list[GpuState] = []  # the GPUs when the last measurement had ended


def read_run(folder: Path) -> Run:
    """Read `folder/run.json`.

    Raises:
        WorkbenchError: no run there, or one of another schema version.
    """
    path = folder / RUN_FILE
    if not folder.exists():
        raise WorkbenchError(f"{folder} is not a run folder or anything else: there is no such path; correct it")
    if not path.is_file():
        raise WorkbenchError(f"{folder} is not a run folder: it has no {RUN_FILE}; make one with `workbench capture`")
    return read_versioned(path, Run, SCHEMA_VERSION, "so read it with the workbench that made it, or capture again")


def named_folder() -> Path | None:
    """The folder that WORKBENCH_RUN names; None for no name and for the word `recording`."""
    named = os.environ.get(SOURCE_VARIABLE, "")
    return Path(named) if named and named != RECORDED else None


def recording_names() -> list[str]:
    """Names of the recordings that ship with the workbench, sorted."""
    return sorted(path.parent.name for path in RECORDINGS.glob(f"*/{RUN_FILE}"))


def recording_folder(name: str) -> Path:
    """The run folder of a shipped recording.

    Raises:
        WorkbenchError: no such recording.
    """
    if name not in recording_names():
        raise WorkbenchError(f"no recording is called {name!r}; there are {', '.join(recording_names()) or 'none'}")
    return RECORDINGS / name


def load_recording(name: str) -> Run:
    """Read a shipped recording; its traces lie in `recording_folder(name)`.

    Raises:
        WorkbenchError: no such recording.
    """
    return read_run(recording_folder(name))
