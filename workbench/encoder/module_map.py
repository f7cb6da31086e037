"""Which module of the encoder every node of a captured graph belongs to, and how far each is from the roofline.

While a region is captured, hooks note how many nodes the graph has whenever a module begins and ends: on one stream
nodes are appended in order, so the numbers between are the module's. A traced replay gives the nodes' times in the
same order. Where the counts differ, nothing is joined: a shifted join would be wrong everywhere.

    spans, total = node_spans(capture)         # on CUDA, see `map_graph`
    rows = join(spans, total, ops)             # ops: (kernel name, microseconds) in the order of a replay
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.capturable import MappedModule, ModuleMap
from workbench.encoder.instruments import captured_nodes
from workbench.encoder.registry import builder
from workbench.errors import WorkbenchError
from workbench.kernels import family
from workbench.models import ModelFacts
from workbench.roofline import Device
from workbench.trace import Trace, read_trace

Op = tuple[str, float]


@dataclass(frozen=True)
class NodeSpan:
    """Nodes `first` to `last` (not included) of a graph were captured inside `module`."""

    module: str
    first: int
    last: int


@dataclass(frozen=True)
class Work:
    """What a module must do at least: floating-point operations, and weights read once."""

    flops: int
    weight_bytes: int

    def roofline_us(self, device: Device) -> float:
        """Return the least microseconds: operations and weights overlap perfectly, activations are free."""
        return 1e6 * max(self.flops / device.flops, self.weight_bytes / device.bytes_per_second)


def owners(spans: Sequence[NodeSpan], total: int) -> list[str]:
    """Return the innermost module of each node, "" where there is none.

    Raises:
        WorkbenchError: spans that lie outside the graph, end before they begin, or cross one another.
    """
    found = [""] * total
    ordered = sorted(spans, key=lambda span: (span.first, -span.last, span.module.count(".")))
    open_ends: list[int] = []
    for span in ordered:
        while open_ends and open_ends[-1] <= span.first:
            open_ends.pop()
        crosses = bool(open_ends) and span.last > open_ends[-1]
        if not 0 <= span.first <= span.last <= total or crosses:
            raise WorkbenchError(
                f"module {span.module} has nodes {span.first} to {span.last} of {total}, which overlap another's; the "
                "capture used more than one stream, so nodes cannot be told apart by their order"
            )
        if span.first < span.last:
            open_ends.append(span.last)
            found[span.first : span.last] = [span.module] * (span.last - span.first)
    return found


def join(spans: Sequence[NodeSpan], total: int, ops: Sequence[Op]) -> list[MappedModule]:
    """Return one row per module that owns nodes, in the order of its first node; work and roofline are zero.

    Raises:
        WorkbenchError: the replay has another number of ops than the graph has nodes; see `owners`.
    """
    if len(ops) != total:
        raise WorkbenchError(
            f"the graph has {total} nodes and its replay shows {len(ops)} ops, so they cannot be joined by order"
        )
    nodes: dict[str, list[Op]] = {}
    for module, op in zip(owners(spans, total), ops, strict=True):
        nodes.setdefault(module, []).append(op)
    return [
        MappedModule(module=module, nodes=len(own), us=sum(us for _, us in own), families=_families(own))
        for module, own in nodes.items()
    ]


def _families(ops: Sequence[Op]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for name, us in ops:
        count, spent = found.get(family(name), (0, 0.0))
        found[family(name)] = (count + 1, spent + us)
    return found


# The least work ---------------------------------------------------------------------------------------------------


def linear_work(module: torch.nn.Module, rows: int) -> Work:
    """Return the work of a module's own weights that make `rows` rows: 2 operations per row and entry of a matrix.

    A convolution whose kernels do not overlap, as of patches, is such a matrix.
    """
    own = list(module.parameters(recurse=False))
    flops = sum(2 * rows * weight.numel() for weight in own if weight.ndim >= 2)
    return Work(flops, sum(weight.nbytes for weight in own))


def attention_work(lengths: Sequence[int], width: int) -> Work:
    """Return the work of attention: q k and the weighting of v, 2 width operations each per pair of rows."""
    return Work(4 * width * sum(length * length for length in lengths), 0)


def sequence_lengths(facts: ModelFacts, grids: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the patches of each attention sequence of a call: an item's, or each frame's."""
    if facts.sequences == "item":
        return [t * h * w for t, h, w in grids]
    return [h * w for t, h, w in grids for _ in range(t)]


def encoder_work(model: Any, facts: ModelFacts, lengths: Sequence[int], patches: int) -> dict[str, Work]:
    """Return the work of each of the encoder's modules for a graph of `patches` rows, attention over `lengths`.

    Weights that a CPU backend has packed away count nothing, and attention nothing where some blocks have windows.
    """
    entry = builder(facts.key)
    tokens = patches // facts.merge**2
    work = {
        name: linear_work(module, tokens if _inside(name, entry.merged) else patches)
        for name, module in model.named_modules()
        if not _inside(name, entry.outside)
    }
    for block in range(facts.depth if "window" not in facts.extra else 0):
        work[f"{entry.parts[0]}.blocks.{block}.attn.attn"] = attention_work(lengths, facts.width)
    return work


def _inside(module: str, roots: Sequence[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def with_roofline(rows: Sequence[MappedModule], work: dict[str, Work], device: Device | None) -> list[MappedModule]:
    """Give each row its work and roofline; a module whose inner modules own no nodes does their work too.

    Args:
        device: None is one that is not known: its roofline stays zero.
    """
    listed = {row.module for row in rows}
    given: dict[str, list[Work]] = {row.module: [] for row in rows}
    for module, own in work.items():
        name = module
        while name and name not in listed:
            name = name.rpartition(".")[0]
        if name:  # what no listed module holds is not in this graph
            given[name].append(own)
    return [
        MappedModule(
            module=row.module,
            nodes=row.nodes,
            us=row.us,
            families=row.families,
            flops=sum(one.flops for one in given[row.module]),
            weight_bytes=sum(one.weight_bytes for one in given[row.module]),
            roofline_us=sum(one.roofline_us(device) for one in given[row.module]) if device else 0.0,
        )
        for row in rows
    ]


# On CUDA ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def noting_spans(model: torch.nn.Module, parts: tuple[str, ...]) -> Iterator[list[NodeSpan]]:
    """Yield a list of the node spans of every module that runs while the block lasts and the stream captures.

    Args:
        parts: attributes of `model`; they and all modules inside them, by their dotted names.
    """
    found: list[NodeSpan] = []
    begun: list[int | None] = []

    def before(*_: Any) -> None:
        begun.append(captured_nodes())

    def after(name: str, *_: Any) -> None:
        first, last = begun.pop(), captured_nodes()
        if first is not None and last is not None:
            found.append(NodeSpan(name, first, last))

    with contextlib.ExitStack() as stack:
        for part in parts:
            for name, module in getattr(model, part).named_modules(prefix=part):
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(partial(after, name), always_call=True).remove)
        yield found


def map_graph(
    name: str,
    budget: int,
    model: Any,
    parts: tuple[str, ...],
    forward: Callable[[], torch.Tensor],
    work: dict[str, Work],
    device: Device | None,
) -> ModuleMap:
    """Capture `forward` once more with hooks on its modules, trace a replay, and join the two; see `with_roofline`.

    Nothing is raised for a graph that cannot be mapped: `why_not` holds the reason.
    """
    if captured_nodes_missing():
        return ModuleMap(name=name, budget=budget, nodes=0, why_not="cuda-bindings is not installed")
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with noting_spans(model, parts) as spans, torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        forward()
        total = captured_nodes() or 0
    try:
        rows = with_roofline(join(spans, total, replayed_ops(graph.replay)), work, device)
    except WorkbenchError as error:
        return ModuleMap(name=name, budget=budget, nodes=total, why_not=str(error))
    return ModuleMap(name=name, budget=budget, nodes=total, modules=rows)


def captured_nodes_missing() -> bool:
    """Whether there is no cuda-bindings to count nodes with."""
    try:
        import cuda.bindings.runtime  # noqa: F401 - only whether it imports
    except ImportError:
        return True
    return False


def replayed_ops(replay: Callable[[], None]) -> list[Op]:
    """Trace one replay; its GPU ops in the order they began."""
    from workbench.profiler import recording

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "replay.json.gz")
        with recording(path, ["ranges", "cuda"]) as start:
            replay()
            torch.cuda.synchronize()
            start()
            replay()
            torch.cuda.synchronize()
        return ops_of(read_trace(path))


def ops_of(trace: Trace) -> list[Op]:
    """Return (name, microseconds) of the GPU ops of `trace`, in the order they began.

    A kernel that was launched before the one in front had ended waits for it inside (programmatic dependent launch).
    It counts from that end on, so that the ops' sum is the time in which any was running.
    """
    rows = trace.gpu_rows()
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    begun = trace.start_ns[rows].astype(np.int64)
    ended = np.maximum.accumulate(begun + trace.duration_ns[rows])
    before = np.concatenate([begun[:1], ended[:-1]])
    own = ended - np.maximum(begun, before)
    return [(trace.names[trace.name[row]], float(us) / 1e3) for row, us in zip(rows, own, strict=True)]
