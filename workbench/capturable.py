"""What can be captured: the boundary probe's report, the map of a graph's nodes, the variants' timings, as stored.

    from workbench.capturable import read_ladder

    ladder = read_ladder(Path("workbench/recordings/variants_ernie45_vl"))
    [(case.name, column.name, summary(column.wall_us).mean) for case in ladder.cases for column in case.columns]

`workbench boundary` makes them; see `workbench.encoder.boundary`, `.module_map` and `.variants.measure`. Times are
microseconds.
"""

from pathlib import Path
from typing import Literal

from workbench.errors import WorkbenchError
from workbench.files import read_versioned
from workbench.parity import Difference
from workbench.run import RECORDINGS, CaptureCost, Environment, ModelRecord, Record, Replay, named_folder

SCHEMA_VERSION = 1
LADDER_FILE = "ladder.json"
# Names of the columns that are no single variant.
SERVED, FALLBACK, GRAPH, ALL = "eager as served", "eager fallback", "graph", "all variants"


class HostSync(Record, frozen=True):
    """A place where the host reads from the device, or the device from host memory.

    Attributes:
        call: what was called, such as "Tensor.cpu".
        place: "file:line", relative to where packages are installed.
        source: that line.
        frames: "file:line function", innermost first; torch's own left out.
        count: how often it happened in one run of the region.
        host_copy: data came from host memory: a replay copies what lies there at that time.
    """

    call: str
    place: str
    source: str
    frames: list[str]
    count: int
    host_copy: bool = False


class Obstacle(Record, frozen=True):
    """Why CUDA refused to capture: the exception, and the innermost line outside torch."""

    error: str
    message: str
    place: str
    source: str


class Boundary(Record, frozen=True):
    """One candidate: what a graph would hold, and what stays outside.

    Attributes:
        captured: on CUDA, whether it captured; None on the CPU, where nothing was tried.
        nodes: of the captured graph.
        syncs: seen while the region ran eagerly. unwatched: why none could be looked for.
        inside_us: median wall time of a replay; of an eager run of the region where it does not capture.
        eager_us: median wall time of an eager run of the region.
        outside_us: median wall time of the rest of a call, run eagerly: metadata before, whatever follows behind.
    """

    name: str
    title: str
    captured: bool | None = None
    nodes: int | None = None
    obstacle: Obstacle | None = None
    syncs: list[HostSync] = []
    unwatched: str | None = None
    inside_us: float | None = None
    eager_us: float | None = None
    outside_us: float | None = None

    @property
    def clean(self) -> bool:
        """Nothing was seen that stands in the way of a capture."""
        return not self.syncs and self.unwatched is None and self.captured is not False

    @property
    def gain_us(self) -> float | None:
        """What capturing the region saves against running it eagerly; None where it is not known."""
        if not self.captured or self.eager_us is None or self.inside_us is None:
            return None
        return self.eager_us - self.inside_us


class MappedModule(Record, frozen=True):
    """The nodes of a graph that belong to a module and to no module inside it.

    Attributes:
        module: dotted name; "" is what belongs to none.
        us: of one replay. Where kernels overlap, the later one counts from the end of the one in front.
        families: kernel family -> (nodes, microseconds of `us`).
        flops, weight_bytes: of the module alone, for this graph's rows.
        roofline_us: the least time that the device needs for them; zero for one that is not known.
    """

    module: str
    nodes: int
    us: float
    families: dict[str, tuple[int, float]]
    flops: int = 0
    weight_bytes: int = 0
    roofline_us: float = 0.0

    @property
    def distance(self) -> float | None:
        """Time over the roofline; None where the roofline is zero."""
        return self.us / self.roofline_us if self.roofline_us else None


class ModuleMap(Record, frozen=True):
    """All nodes of one captured graph by module; `why_not` says what kept it from being made."""

    name: str
    budget: int
    nodes: int
    modules: list[MappedModule] = []
    why_not: str | None = None


class BoundaryReport(Record, frozen=True):
    """`workbench boundary`: candidates at one call."""

    schema_version: int
    environment: Environment
    model: ModelRecord
    replay: Replay
    grids: list[tuple[int, int, int]]
    boundaries: list[Boundary]
    maps: list[ModuleMap] = []


# The variants' ladder ---------------------------------------------------------------------------------------------


class Column(Record, frozen=True):
    """One way to run one call, un-profiled samples in ABBA order.

    Attributes:
        name: "eager as served", "eager fallback", "graph", a variant, or "all variants".
        variants: that the model had.
        wall_us: host time between two synchronises. gpu_us: CUDA events around the call.
        order: position of each sample in the ABBA sequence.
        ops: GPU ops of one traced call; nodes: nodes of the graphs that its replays launched.
        busy_us, idle_us: of the device in one traced call: with work, and without between its first op and its last.
        traced_us: wall time of that call.
        budgets: of the replays of one call; None is a fallback.
        parity: per item, against eager as served; against_graph: against vLLM's graph at the same budgets.
        findings: what static replays saw to be wrong in vLLM's buffers, such as offsets that fall (D6); empty on CUDA.
        error: "Type: message" where it could not run.
    """

    name: str
    variants: list[str] = []
    wall_us: list[float] = []
    gpu_us: list[float] = []
    order: list[int] = []
    ops: int | None = None
    nodes: int | None = None
    busy_us: float | None = None
    idle_us: float | None = None
    traced_us: float | None = None
    budgets: list[int | None] = []
    parity: list[Difference] = []
    against_graph: list[Difference] = []
    findings: list[str] = []
    error: str | None = None


class Case(Record, frozen=True):
    """One call, run in every column.

    Attributes:
        noise_rms, noise_worst_row: eager as served against float32, worst item.
        beside_videos: an image of a server that allows videos, whose graphs have sequence slots for frames.
    """

    name: str
    modality: Literal["image", "video"]
    grids: list[tuple[int, int, int]]
    tokens: list[int]
    columns: list[Column]
    noise_rms: float | None = None
    noise_worst_row: float | None = None
    beside_videos: bool = False


class Steps(Record, frozen=True):
    """How graphs of so many rows compute the steps of a block, in words; "vLLM's" is vLLM's own way.

    Attributes:
        refused: ways that were offered and could not be tried, and why.
    """

    rows: int
    attention: str
    qkv: str
    proj: str
    fc1: str
    fc2: str
    refused: list[str] = []


class Captured(Record, frozen=True):
    """The graphs of one column.

    Attributes:
        schedules: how attention is planned, see `variants.fused.Fused`.
        recipes: of variants that measure them, see `variants.recipe`.
    """

    column: str
    costs: list[CaptureCost]
    schedules: list[str] = []
    recipes: list[Steps] = []


class Ladder(Record, frozen=True):
    """Eager, vLLM's graph and the variants on the same calls in one process.

    Attributes:
        max_frames: of a replay, where videos are allowed and attention runs over frames; None is vLLM's own.
        complete: false in a file that was written while the session still ran.
    """

    schema_version: int
    created: str
    environment: Environment
    model: ModelRecord
    replay: Replay
    budgets: list[int]
    max_items: int
    repeats: int
    warmup: int
    seed: int
    captured: list[Captured]
    cases: list[Case]
    maps: list[ModuleMap] = []
    boundaries: list[Boundary] = []
    max_frames: int | None = None
    notes: list[str] = []
    complete: bool = False


def read_ladder(folder: Path) -> Ladder:
    """Read `folder/ladder.json`.

    Raises:
        WorkbenchError: no ladder there, or one of another schema version.
    """
    path = folder / LADDER_FILE
    if not path.is_file():
        raise WorkbenchError(f"{folder} has no {LADDER_FILE}; make one with scripts/h200_variants.sh on a GPU")
    return read_versioned(path, Ladder, SCHEMA_VERSION)


def find_ladder(model: str, run_folder: Path | None = None) -> Ladder | None:
    """Return a model's ladder in a run's folder, else in the one WORKBENCH_RUN names, else the shipped one, else None.

    Raises:
        WorkbenchError: see `read_ladder`.
    """
    folders = [folder for folder in (run_folder, named_folder()) if folder is not None]
    folders += sorted(path.parent for path in RECORDINGS.glob(f"*/{LADDER_FILE}"))
    found = (read_ladder(folder) for folder in folders if (folder / LADDER_FILE).is_file())
    return next((ladder for ladder in found if ladder.model.key == model), None)
