"""How variant `fused` computes the steps of a block: of several ways the one that this GPU takes least time for.

A graph of few rows has products that cannot fill the GPU. Cut along their inner dimension, into parts that the next
kernel adds up, they can; and for short sequences one small attention kernel is faster than FlashAttention. In larger
graphs the activation costs less inside its product, and attention less where the head size is not padded. Which way
wins depends on rows and GPU, and on the kernels in front and behind, which may overlap. So each way is measured inside
its block, all blocks one after the other, once for every shape of graph and before its first capture.

Import this module only after `engine.require_vllm`.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

from workbench.encoder.variants import dataflow, gemm
from workbench.encoder.variants.attention import Attend, Flash4, Tile
from workbench.encoder.variants.gemm import Gemm, Multiply

# Above so many rows no product was faster in parts, and no attention by the short kernel, on an H200.
MOST_ROWS = 2048
_PARTS = (0, 1, 2, 4)
# Up to so many rows kernels overlap enough for a choice to depend on the others: they are made twice.
_TWICE_UP_TO = 1024
_ROUNDS = 5
# Relative RMS in units of the last place, of attention and of products. In 16 bits, two attention kernels that round
# differently lie a quarter of one apart; in float32, sums in another order lie a few. A product in TF32 is thousands
# away, so models of that dtype keep vLLM's.
_APART_ULPS = {16: 1.25, 32: 16.0, 64: 16.0}

# A block's linear layers.
LAYERS = {"qkv": "attn.qkv", "proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}

# Parts of a product, 0 for the layer's own way; or another library's or kernel's.
Product = int | Gemm
Attention = Tile | Flash4


@dataclass(frozen=True)
class Recipe:
    """One way.

    Attributes:
        qkv: how the layer's product is made, whole and with its bias.
        proj, fc1, fc2: the same, or in parts, or the bias left behind; quack's of `fc1` has the activation inside.
        attention: None is vLLM's.
        refused: ways that could not be tried, and why.
    """

    qkv: Product = 0
    proj: Product = 0
    fc1: Product = 0
    fc2: Product = 0
    attention: Attention | None = None
    refused: tuple[str, ...] = field(default=(), compare=False)

    def words(self) -> dict[str, str]:
        """Return each step in words, for the record of a capture."""
        products = {name: _said(getattr(self, name)) for name in LAYERS}
        return {"attention": "vLLM's" if self.attention is None else str(self.attention)} | products


def _said(way: Product | Attention) -> str:
    if not isinstance(way, int):
        return str(way)
    return ("vLLM's", "bias behind")[way] if way < 2 else f"{way} parts"


def product(
    layer: Any, x: torch.Tensor, way: Product, activation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a linear layer's product of [rows, inner], and the bias that is still to be added.

    Args:
        activation: quack's name of one that goes into the product, if `way` is quack's.

    Returns:
        [rows, outer] with its bias, and None, where `way` is 0 or a whole `Gemm`; [rows, outer] and the bias where it
        is 1; else [parts, rows, outer] and the bias.
    """
    if way == 0:
        return layer(x)[0], None
    behind = None if isinstance(way, Gemm) and not _in_parts(way) else layer.bias
    if isinstance(way, int):
        forward = partial(_sums, weight=layer.weight, parts=way)
    else:
        inside = layer.bias if behind is None else None
        forward = partial(gemm.linear, weight=layer.weight, bias=inside, gemm=way, activation=activation)
    # In the layer's place, so that hooks on modules see the product as the layer's.
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        return layer(x), behind
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def _in_parts(way: Product) -> bool:
    return isinstance(way, Multiply) and way.parts > 1


def activated(kernels: Any, layer: Any, x: torch.Tensor, way: Product) -> torch.Tensor:
    """Return quick GELU of a layer's product of [rows, inner]: [rows, outer]."""
    if not isinstance(way, int):
        return product(layer, x, way, "quick_gelu")[0]
    result: torch.Tensor = kernels.quick_gelu(*product(layer, x, way))
    return result


def _sums(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    if parts == 1:
        return x @ weight.t()
    rows, inner = x.shape
    left = x.view(rows, parts, inner // parts).transpose(0, 1)
    return torch.bmm(left, weight.view(-1, parts, inner // parts).permute(1, 2, 0))


def can_be_cut(layer: Any, parts: int, dtype: torch.dtype) -> bool:
    """Tell whether `product` takes the layer's weight in so many parts, each aligned for tensor cores."""
    weight = getattr(layer, "weight", None)  # some quantised layers have none of that name
    if weight is None or layer.bias is None:
        return False
    plain = weight.dim() == 2 and weight.dtype == dtype and weight.is_contiguous()
    return bool(plain and weight.shape[1] % (8 * max(parts, 1)) == 0)


@dataclass
class Stream:
    """What the blocks of a call work on.

    Attributes:
        hidden: [rows, width], which every block adds to.
        normed: the norm of it, in front of the next block.
        cos, sin: [rows, head size / 2] float32.
        context: [rows, heads, head size], for the result of attention.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    context: torch.Tensor


def run_block(kernels: Any, block: Any, following: Any, stream: Stream, attend: Attend, recipe: Recipe) -> None:
    """Run a block.

    Args:
        following: the norm of whatever comes next.
    """
    rows, heads, size = stream.context.shape
    qkv = product(block.attn.qkv, stream.normed, recipe.qkv)[0].view(-1, 3 * heads, size)
    kernels.rotate(qkv[:, : 2 * heads], stream.cos, stream.sin)
    attended = attend(block.attn.attn, qkv, stream.context)
    update = product(block.attn.proj, attended.reshape(rows, heads * size), recipe.proj)
    normed = kernels.add_norm(stream.hidden, *update, block.norm2)
    wide = activated(kernels, block.mlp.fc1, normed, recipe.fc1)
    stream.normed = kernels.add_norm(stream.hidden, *product(block.mlp.fc2, wide, recipe.fc2), following)


def choose(
    blocks: Sequence[Any],
    kernels: Any,
    rows: int,
    ways: Mapping[Attention | None, Attend],
    gemms: Mapping[str, Sequence[Gemm]],
    offsets: torch.Tensor,
) -> Recipe:
    """Measure every way on a graph of `rows` rows, one step after the other, and return the fastest of each.

    Args:
        blocks: the tower's, on CUDA; quantised layers keep their own product.
        kernels: the module of that name.
        ways: of attention, all of which read `offsets`; None is vLLM's.
        gemms: ways to make the products of "qkv", "proj", "fc1" and "fc2".
        offsets: [slots + 1] int32 on the GPU, written meanwhile.
    """
    kept = offsets.clone()
    try:
        return _Bench(blocks, kernels, rows, ways, offsets).chosen(gemms)
    finally:
        offsets.copy_(kept)


class _Bench:
    """A call's rows, and the time of all blocks: their weights come from memory, as in the tower."""

    def __init__(
        self,
        blocks: Sequence[Any],
        kernels: Any,
        rows: int,
        ways: Mapping[Attention | None, Attend],
        offsets: torch.Tensor,
    ) -> None:
        self.blocks, self.kernels, self.rows, self.ways, self.offsets = blocks, kernels, rows, ways, offsets
        self.refused: list[str] = []
        self.last: Any = None  # the graph captured before; the next one is captured into its memory
        attention = blocks[0].attn
        heads, size = attention.num_attention_heads_per_partition, attention.hidden_size_per_attention_head
        self.dtype, device = blocks[0].norm1.weight.dtype, blocks[0].norm1.weight.device
        self.limit = _APART_ULPS[torch.finfo(self.dtype).bits] * torch.finfo(self.dtype).eps
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        width = blocks[0].norm1.weight.shape[0]
        angle = random(rows, size // 2).float()
        context = torch.zeros(rows, heads, size, dtype=self.dtype, device=device)
        self.narrow = random(rows, width)
        self.wide = random(*product(blocks[0].mlp.fc1, self.narrow, 0)[0].shape)  # a weight may be stored either way
        self.stream = Stream(random(rows, width), self.narrow, angle, angle, context)
        self.qkv = random(rows, 3 * heads, size)
        slots = offsets.shape[0] - 1
        # As many equal sequences as there can be, and one: both count alike.
        self.layouts = (min(slots, rows), 1)

    def chosen(self, gemms: Mapping[str, Sequence[Gemm]]) -> Recipe:
        """Return the fastest way of each step."""
        parts = _PARTS if self.rows <= MOST_ROWS else (0,)
        trials: dict[str, tuple[Any, ...]] = {
            "fc1": (*parts, *gemms["fc1"]),
            "qkv": (0, *gemms["qkv"]),
            "attention": tuple(self.ways),
            "proj": (*parts, *gemms["proj"]),
            "fc2": (*parts, *gemms["fc2"]),
        }
        fit = {step: [way for way in ways if self._fits(step, way)] for step, ways in trials.items()}
        # What has failed once is not tried again.
        usable = {step: [way for way in ways if self._tried(step, way)] for step, ways in fit.items()}
        best = Recipe()
        for _ in range(2 if self.rows <= _TWICE_UP_TO else 1):
            for step, ways in usable.items():
                cost = self._costs(step, ways, best)
                best = replace(best, **{step: min(cost, key=lambda way: cost[way])}) if cost else best
                usable[step] = list(cost)
        return replace(best, refused=tuple(dict.fromkeys(self.refused)))

    def _fits(self, step: str, way: Any) -> bool:
        """Tell whether the layers of all blocks can be multiplied that way; vLLM's own always."""
        if step == "attention" or way == 0:
            return True
        parts = way if isinstance(way, int) else 1
        return all(can_be_cut(layer_of(block, step), parts, self.dtype) for block in self.blocks)

    def _tried(self, step: str, way: Any) -> bool:
        """Tell whether `way` gives what vLLM's does. A compiler that gets it wrong is seen here."""
        try:
            if self._alike_vllm(step, way):
                return True
            self.refused.append(f"{step} by {_said(way)}: another result")
        except Exception as error:  # what a compiler raises has no common base; or this GPU has no room for a tile
            if way in (0, None):
                raise
            self.refused.append(f"{step} by {_said(way)}: {_short(error)}")
        return False

    def _alike_vllm(self, step: str, way: Any) -> bool:
        if step != "attention":
            made = self._made(step, way)
            return way == 0 or self._alike(made, self._made(step, 0))
        alike = True
        for sequences in self.layouts:
            held = self._lay(sequences)
            expected = self._attended(None)[:held].clone()
            self.stream.context.zero_()  # or rows that the way leaves as they were would be vLLM's
            alike &= way is None or self._alike(self._attended(way)[:held], expected)
        return alike

    def _lay(self, sequences: int) -> int:
        """Write offsets of so many equal sequences; rows behind belong to none, and some backends leave them unset."""
        slots = self.offsets.shape[0] - 1
        ends = torch.arange(slots + 1).clamp(max=sequences) * (self.rows // sequences)
        self.offsets.copy_(ends.to(torch.int32))
        return int(ends[-1])

    def _attended(self, way: Attention | None) -> torch.Tensor:
        return self.ways[way](self.blocks[0].attn.attn, self.qkv, self.stream.context)

    def _made(self, step: str, way: Product) -> torch.Tensor:
        layer = layer_of(self.blocks[0], step)
        if step == "fc1":
            return activated(self.kernels, layer, self.narrow, way)
        return dataflow.whole(*product(layer, self.wide if step == "fc2" else self.narrow, way))

    def _alike(self, got: torch.Tensor, expected: torch.Tensor) -> bool:
        """Tell whether two results differ by rounding only. Not-a-number is no number below the limit."""
        expected = expected.float()
        return bool((got.float() - expected).norm() / expected.norm() < self.limit)

    def _costs(self, step: str, ways: Sequence[Any], best: Recipe) -> dict[Any, float]:
        """Return what `best` costs with each way in it: milliseconds, or their product over layouts of sequences."""
        graphs = {}
        for way in ways:
            try:
                graphs[way] = self.captured(replace(best, **{step: way}))
            except Exception as error:  # as above
                if way in (0, None):
                    raise
                self.refused.append(f"{step} by {_said(way)}: {_short(error)}")
        cost = dict.fromkeys(graphs, 1.0)
        for sequences in self.layouts if step == "attention" else self.layouts[-1:]:
            self._lay(sequences)
            for way, milliseconds in self.times(graphs).items():
                cost[way] *= milliseconds
        return cost

    def run(self, recipe: Recipe, blocks: Sequence[Any]) -> None:
        """Run blocks, from the same rows every time."""
        self.stream.normed = self.narrow
        for block in blocks:
            run_block(self.kernels, block, block.norm1, self.stream, self.ways[recipe.attention], recipe)

    def captured(self, recipe: Recipe) -> Any:
        """Return a graph of all blocks."""
        torch.cuda.synchronize()
        with torch.cuda.stream(_side(self.stream.context.device)):
            self.run(recipe, self.blocks[:1])  # compiles, and sets libraries up
            torch.cuda.synchronize()
            graph, before = torch.cuda.CUDAGraph(), self.last
            self.last = None  # a capture that fails may spoil its memory
            # `torch.cuda.graph` would collect garbage and give memory back before each. Memory of its own would stay
            # reserved after each graph, where no later capture could have it. All that a graph reads there it has
            # written before, so graphs that are replayed in turn can have the same.
            graph.capture_begin(pool=None if before is None else before.pool())
            try:
                self.run(recipe, self.blocks)
            finally:
                graph.capture_end()
            self.last = graph
        return graph

    def times(self, graphs: Mapping[Any, Any]) -> dict[Any, float]:
        """Return the milliseconds of a replay of each, the median of several rounds.

        In turn, forwards and backwards: a GPU that gets warm or reaches its power limit meanwhile slows all alike.
        """
        stream = _side(self.stream.context.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        replays = 3 if self.rows <= _TWICE_UP_TO else 1
        found: dict[Any, list[float]] = {way: [] for way in graphs}
        torch.cuda.synchronize()  # the offsets are written
        with torch.cuda.stream(stream):
            for turn in range(_ROUNDS + 1):
                for way in list(graphs) if turn % 2 else list(reversed(graphs)):
                    self.stream.hidden.copy_(self.narrow)  # or it would grow with every replay
                    begin.record(stream)
                    for _ in range(replays):
                        graphs[way].replay()
                    end.record(stream)
                    end.synchronize()
                    found[way].append(begin.elapsed_time(end) / replays)
        return {way: statistics.median(times[1:]) for way, times in found.items()}  # the first round warms up


@cache
def _side(device: torch.device) -> Any:
    """Return the one stream of a device on which steps are timed: cuBLAS keeps 32 MiB for each stream it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def layer_of(block: Any, step: str) -> Any:
    """Return a block's linear layer, by its key in `LAYERS`."""
    return attrgetter(LAYERS[step])(block)


def _short(error: Exception) -> str:
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0][:120]}".strip()
