"""The ledger a server keeps of its encoder calls: what the file holds, and what can be read from it.

`workbench.encoder.ledger_plugin` writes the file inside vLLM, this module reads it, with neither torch nor
vLLM. One JSON object per line, its kind in the field `kind`. Several processes (data-parallel ranks, servers
one after another) may append to one file. Times are microseconds, `t` is seconds since 1970.
"""

from collections import defaultdict
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from workbench.errors import WorkbenchError
from workbench.models import ModelFacts
from workbench.workload import Workload

SCHEMA_VERSION = 1
LINE_LIMIT = 16 * 2**20  # bytes; a call of 100,000 images is below
ENVIRONMENT_VARIABLE = "WORKBENCH_LEDGER"
LIMIT_VARIABLE = "WORKBENCH_LEDGER_MAX_BYTES"
DEFAULT_MAX_BYTES = 256 * 2**20


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of every line. `pid` tells processes apart that share a file."""

    pid: int


class ProcessLine(Line, frozen=True, kw_only=True, tag="process"):
    """Written once by each process, before its first call."""

    schema_version: int
    t: float
    workbench: str
    vllm: str
    device: str


class ManagerLine(Line, frozen=True, kw_only=True, tag="manager"):
    """The encoder graph manager of the process, as vLLM resolved it; absent with graphs off."""

    model: str
    budgets: list[int]
    max_items: int
    max_frames: int
    data_parallel: bool = False


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One replay, or one eager fallback (`budget` null), inside `EncoderCudaGraphManager.execute`.

    `items` index into the group. `host_us` runs from the selection of the batch's items to the next batch's:
    buffers, replay or eager forward, postprocessing; launches are asynchronous, so it is host time only.
    """

    items: list[int]
    tokens: int
    budget: int | None
    host_us: float


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The items of one modality that vLLM encodes together: one encoder call in the planner's sense.

    `route`: "graph" through the manager, "eager" through `embed_multimodal`. `grids` is null where the model
    keeps them on the GPU (reading would synchronise). `shard`: this rank's items under data parallelism.
    """

    modality: str
    route: Literal["graph", "eager"]
    grids: list[list[int]] | None
    tokens: list[int]
    batches: list[Batch] = []
    shard: list[int] | None = None


class CallLine(Line, frozen=True, kw_only=True, tag="call"):
    """One `_execute_mm_encoder` (runner v1) or `EncoderRunner.execute_mm_encoder` (v2).

    `host_us` is the whole function on the host. With `synchronised` vLLM itself waits for the GPU inside it
    (runner v1 with `enable_mm_processor_stats`), otherwise it ends when all is launched. `gpu_us` is the time
    between two CUDA events around it, null on the CPU. `phase` "profile" is vLLM's own memory profiling.
    """

    rank: int
    t: float
    runner: Literal["v1", "v2"]
    phase: Literal["serve", "profile"] = "serve"
    host_us: float
    gpu_us: float | None = None
    synchronised: bool = False
    groups: list[Group]
    error: str | None = None


class FullLine(Line, frozen=True, kw_only=True, tag="full"):
    """The process stopped recording here, because the file reached its limit."""

    limit_bytes: int


LedgerLine = ProcessLine | ManagerLine | CallLine | FullLine


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """What a ledger file held.

    Attributes:
        path: the file.
        processes, managers, calls, full: its lines by kind, in file order.
        lost: what could not be read, one sentence each; empty when nothing is missing.
    """

    path: str
    processes: list[ProcessLine]
    managers: list[ManagerLine]
    calls: list[CallLine]
    full: list[FullLine]
    lost: list[str]

    def served(self) -> list[CallLine]:
        """Return the calls of requests (not of vLLM's own profiling), each once under data parallelism."""
        served = [call for call in self.calls if call.phase == "serve"]
        first = min((call.rank for call in served), default=0)
        return [call for call in served if call.rank == first]


def is_ledger(path: Path) -> bool:
    """Tell whether the file's first line is a ledger's."""
    try:
        with path.open("rb") as handle:
            return isinstance(_decode(handle.readline(LINE_LIMIT)), ProcessLine)
    except (OSError, msgspec.DecodeError):
        return False


_decoder = msgspec.json.Decoder(LedgerLine)


def _decode(line: bytes) -> LedgerLine:
    return _decoder.decode(line)


def read_ledger(path: Path) -> Ledger:
    """Read a ledger. Lines that were cut (a killed process) are left out and said in `lost`.

    Raises:
        WorkbenchError: unreadable, not a ledger, empty, or of another schema version.
    """
    lines: dict[type, list[LedgerLine]] = defaultdict(list)
    lost: list[str] = []
    cut = first_cut = 0
    try:
        with path.open("rb") as handle:
            for number, raw in enumerate(iter(lambda: handle.readline(LINE_LIMIT), b""), start=1):
                try:
                    line = _decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    cut += 1
                    first_cut = first_cut or number
                else:
                    lines[type(line)].append(line)
    except OSError as error:
        raise WorkbenchError(f"cannot read the ledger {path}: {error.strerror or error}") from error
    processes = [line for line in lines[ProcessLine] if isinstance(line, ProcessLine)]
    if not processes:
        raise WorkbenchError(
            f'{path} is not a ledger: it has no line of kind "process"; record one by starting vLLM with '
            f"{ENVIRONMENT_VARIABLE}={path.name}"
        )
    versions = {line.schema_version for line in processes} - {SCHEMA_VERSION}
    if versions:
        raise WorkbenchError(f"{path} has ledger schema version {max(versions)}; this workbench reads {SCHEMA_VERSION}")
    if cut:
        one = cut == 1
        lost.append(
            f"{cut} line{'' if one else 's'} of {path.name} could not be read ({'' if one else 'the first is '}"
            f"line {first_cut}): cut short or damaged, so {'its call is' if one else 'their calls are'} missing"
        )
    full = [line for line in lines[FullLine] if isinstance(line, FullLine)]
    lost.extend(
        f"process {line.pid} stopped recording at the limit of {line.limit_bytes:,} bytes; later calls are missing"
        for line in full
    )
    return Ledger(
        path=str(path),
        processes=processes,
        managers=[line for line in lines[ManagerLine] if isinstance(line, ManagerLine)],
        calls=[line for line in lines[CallLine] if isinstance(line, CallLine)],
        full=full,
        lost=lost,
    )


def to_workload(ledger: Ledger, facts: ModelFacts) -> Workload:
    """Turn a ledger's calls into a workload whose groups are the server's own encoder calls.

    Sizes are those after the processor's resize (grid x patch), the only ones a server's encoder sees.

    Raises:
        WorkbenchError: no call in it, no grids, or tokens that another model's merge would give.
    """
    grids: list[list[int]] = []
    tokens: list[int] = []
    video: list[bool] = []
    counts: list[int] = []
    for number, call in enumerate(ledger.served(), start=1):
        for group in call.groups:
            if group.grids is None:
                raise WorkbenchError(
                    f"call {number} of {ledger.path} has no grids: this model keeps them on the GPU, so the ledger "
                    "shows its hits but cannot serve as a workload"
                )
            grids.extend(group.grids)
            tokens.extend(group.tokens)
            video.extend([group.modality == "video"] * len(group.grids))
            counts.append(len(group.grids))
    if not grids:
        raise WorkbenchError(f"{ledger.path} holds no served encoder call; send requests with images, then read it")
    columns = np.array(grids, np.int32).reshape(-1, 3)
    made = columns.astype(np.int64).prod(axis=1) // facts.merge**2
    given = np.array(tokens, np.int64)
    if len(given) == len(made) and (given != made).any():
        item = int((given != made).argmax())
        raise WorkbenchError(
            f"{ledger.path} has an item of grid {grids[item]} with {tokens[item]} tokens, where {facts.title} makes "
            f"{made[item]}; name the model that was served"
        )
    frames = np.where(video, columns[:, 0] * facts.temporal_patch, 1)
    sizes = np.stack([columns[:, 2] * facts.patch, columns[:, 1] * facts.patch, frames], axis=1).astype(np.int32)
    return Workload(
        name=Path(ledger.path).stem,
        model=facts.key,
        source=f"ledger {Path(ledger.path).name}: {len(counts)} encoder calls of vLLM {ledger.processes[0].vllm}",
        sizes=sizes,
        grids=columns,
        tokens=made,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        notes=tuple(ledger.lost),
    )


class HitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the hit table.

    Attributes:
        budget: the captured budget; null for a row without a replay.
        route: "graph" a replay, "fallback" the manager's eager path, "eager" graphs not used for the call.
        batches, items, tokens: counts over the row.
        fill: tokens / (batches x budget), null without a budget.
        host_us: median over batches (over groups' calls for "eager").
    """

    route: Literal["graph", "fallback", "eager"]
    budget: int | None
    batches: int
    items: int
    tokens: int
    fill: float | None
    host_us: float


_ROUTES = ("graph", "fallback", "eager")  # the table's order


def hit_table(ledger: Ledger) -> list[HitRow]:
    """Count replays per budget, fallbacks and eager calls: the proof that graphs were hit, and how full."""
    rows: dict[tuple[Literal["graph", "fallback", "eager"], int | None], list[tuple[int, int, float]]]
    rows = defaultdict(list)
    for call in ledger.served():
        for group in call.groups:
            if group.route == "eager":
                rows["eager", None].append((len(group.tokens), sum(group.tokens), call.host_us))
            for batch in group.batches:
                route: Literal["graph", "fallback"] = "fallback" if batch.budget is None else "graph"
                rows[route, batch.budget].append((len(batch.items), batch.tokens, batch.host_us))
    table = []
    for (kind, budget), seen in sorted(rows.items(), key=lambda row: (_ROUTES.index(row[0][0]), row[0][1] or 0)):
        tokens = sum(entry[1] for entry in seen)
        table.append(
            HitRow(
                route=kind,
                budget=budget,
                batches=len(seen),
                items=sum(entry[0] for entry in seen),
                tokens=tokens,
                fill=tokens / (len(seen) * budget) if budget else None,
                host_us=float(np.median([entry[2] for entry in seen])),
            )
        )
    return table


class CallSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a server's images met in encoder calls.

    Attributes:
        calls: groups of one modality, the planner's calls.
        items: images and videos in them.
        items_per_call: how many calls had each number of items.
        hits, misses: items by replay, and by fallback or eager call.
        host_us, gpu_us: median per `CallLine`; gpu_us null without a GPU.
    """

    calls: int
    items: int
    items_per_call: dict[int, int]
    hits: int
    misses: int
    host_us: float | None
    gpu_us: float | None


def summarize(ledger: Ledger) -> CallSummary:
    """Summarise the served calls: the number the benchmark's table hides is items per call."""
    served = ledger.served()
    sizes = [len(group.tokens) for call in served for group in call.groups]
    hits = sum(
        len(batch.items)
        for call in served
        for group in call.groups
        for batch in group.batches
        if batch.budget is not None
    )
    local = sum(len(group.tokens if group.shard is None else group.shard) for call in served for group in call.groups)
    gpu = [call.gpu_us for call in served if call.gpu_us is not None]
    values, counts = np.unique(sizes, return_counts=True)
    return CallSummary(
        calls=len(sizes),
        items=sum(sizes),
        items_per_call={int(value): int(count) for value, count in zip(values, counts, strict=True)},
        hits=hits,
        misses=local - hits,
        host_us=float(np.median([call.host_us for call in served])) if served else None,
        gpu_us=float(np.median(gpu)) if gpu else None,
    )
