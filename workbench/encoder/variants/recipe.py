"""How variant `fused` computes the steps of a block: of several ways the one that this GPU takes least time for.

A graph of few rows has products that cannot fill the GPU. Cut along their inner dimension, into parts that the next
kernel adds up, they can; and for short sequences one small attention kernel is faster than FlashAttention. In larger
graphs the activation costs less inside its product, and attention less where the head size is not padded. Which way
wins depends on rows and GPU, so each is measured, once for every number of rows, before the first capture.

Import this module only after `engine.require_vllm`.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

from workbench.encoder.variants import gemm
from workbench.encoder.variants.attention import Attend, Flash4, Tile
from workbench.encoder.variants.gemm import Gemm

# Above so many rows no product was faster in parts, and no attention by the short kernel, on an H200.
MOST_ROWS = 2048
_PARTS = (0, 1, 2, 4)
_ROUNDS = 5
_REPLAYS = 4
# Relative RMS in units of the last place, of attention and of quack's products: two attention kernels that round
# differently lie a quarter of one apart. A product in TF32 is thousands of float32's away, so models of that dtype keep
# vLLM's attention.
_APART_ULPS = 1.25

_NEVER = float("inf")

# Parts of a product, 0 for the layer's own way; or how quack cuts it.
Product = int | Gemm
Attention = Tile | Flash4
Step = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """One way.

    Attributes:
        qkv: how the layer's product is made, whole and with its bias: 0 or quack's.
        proj, fc1, fc2: the same in any way; quack's of `fc1` has the activation inside.
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
        products = {name: _said(getattr(self, name)) for name in ("qkv", "proj", "fc1", "fc2")}
        return {"attention": "vLLM's" if self.attention is None else str(self.attention)} | products


def _said(way: Product) -> str:
    if isinstance(way, Gemm):
        return str(way)
    return ("vLLM's", "bias behind")[way] if way < 2 else f"{way} parts"


def product(
    layer: Any, x: torch.Tensor, way: Product, activation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a linear layer's product of [rows, inner], and the bias that is still to be added.

    Args:
        activation: quack's name of one that goes into the product, if `way` is quack's.

    Returns:
        [rows, outer] with its bias, and None, where `way` is 0 or quack's; [rows, outer] and the bias where it is 1;
        else [parts, rows, outer] and the bias.
    """
    if way == 0:
        return layer(x)[0], None
    if isinstance(way, Gemm):
        forward = partial(gemm.linear, weight=layer.weight, bias=layer.bias, gemm=way, activation=activation)
    else:
        forward = partial(_sums, weight=layer.weight, parts=way)
    # In the layer's place, so that hooks on modules see the product as the layer's.
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        return layer(x), None if isinstance(way, Gemm) else layer.bias
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def activated(kernels: Any, layer: Any, x: torch.Tensor, way: Product) -> torch.Tensor:
    """Return quick GELU of a layer's product of [rows, inner]: [rows, outer]."""
    if isinstance(way, Gemm):
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
    weight = layer.weight
    plain = weight.dim() == 2 and weight.dtype == dtype and weight.is_contiguous() and layer.bias is not None
    return bool(plain and weight.shape[1] % (8 * max(parts, 1)) == 0)


def choose(
    blocks: Sequence[Any],
    kernels: Any,
    rows: int,
    ways: Mapping[Attention | None, Attend],
    gemms: Sequence[Gemm],
    offsets: torch.Tensor,
) -> Recipe:
    """Measure every way on a graph of `rows` rows, and return the fastest of each step.

    Args:
        blocks: the tower's, on CUDA, not quantised.
        kernels: the module of that name.
        ways: of attention, all of which read `offsets`; None is vLLM's.
        gemms: quack's ways to make a product.
        offsets: [slots + 1] int32 on the GPU, written meanwhile.
    """
    bench, kept = _Bench(blocks, kernels, rows), offsets.clone()
    try:
        attention = bench.attention(ways, offsets)
    finally:
        offsets.copy_(kept)
    parts = _PARTS if rows <= MOST_ROWS else (0,)
    qkv, fc1 = bench.cheapest("qkv", (0, *gemms)), bench.cheapest("fc1", (*parts, *gemms))
    proj, fc2 = bench.cheapest("proj", parts), bench.cheapest("fc2", parts)
    return Recipe(qkv, proj, fc1, fc2, attention, tuple(bench.refused))


class _Bench:
    """Inputs of every step, and the time of a step over all blocks: their weights come from memory, as in the tower."""

    def __init__(self, blocks: Sequence[Any], kernels: Any, rows: int) -> None:
        self.blocks, self.kernels = blocks, kernels
        self.refused: list[str] = []
        attention = blocks[0].attn
        self.heads, self.size = attention.num_attention_heads_per_partition, attention.hidden_size_per_attention_head
        self.dtype, device = blocks[0].norm1.weight.dtype, blocks[0].norm1.weight.device
        self.limit = _APART_ULPS * torch.finfo(self.dtype).eps
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        width = blocks[0].norm1.weight.shape[0]
        self.hidden, self.narrow = random(rows, width), random(rows, width)
        self.wide = random(rows, blocks[0].mlp.fc2.weight.shape[1])
        self.qkv = random(rows, 3 * self.heads, self.size)
        self.angle = random(rows, self.size // 2).float()
        self.context = torch.zeros(rows, self.heads, self.size, dtype=self.dtype, device=device)

    def cheapest(self, name: str, ways: Iterable[Product]) -> Product:
        """Return the way to make a layer's product that costs least together with the kernel behind it."""
        fit = [
            way
            for way in ways
            if all(
                can_be_cut(_layer(name, block), way if isinstance(way, int) else 1, self.dtype) for block in self.blocks
            )
        ]
        cost = {way: self._cost(name, way) for way in fit or [0]}
        return min(cost, key=lambda way: cost[way])

    def _cost(self, name: str, way: Product) -> float:
        try:
            if isinstance(way, Gemm):
                expected, got = (self._made(name, self.blocks[0], one) for one in (0, way))
                if not self._alike(got, expected):
                    self.refused.append(f"{name} by {way}: another result")
                    return _NEVER
            return self.time(partial(self._step, name, way))
        except Exception as error:  # what a compiler raises has no common base
            if way == 0:
                raise
            self.refused.append(f"{name} by {_said(way)}: {_short(error)}")
            return _NEVER

    def _made(self, name: str, block: Any, way: Product) -> torch.Tensor:
        layer = _layer(name, block)
        if name == "fc1":
            return activated(self.kernels, layer, self.narrow, way)
        return product(layer, self.narrow, way)[0]

    def _step(self, name: str, way: Product, block: Any) -> torch.Tensor:
        if name in ("qkv", "fc1"):
            made = self._made(name, block, way)
            if name == "qkv":
                rows = made.view(-1, 3 * self.heads, self.size)
                self.kernels.rotate(rows[:, : 2 * self.heads], self.angle, self.angle)
            return made
        result = product(_layer(name, block), self.wide if name == "fc2" else self.narrow, way)
        normed: torch.Tensor = self.kernels.add_norm(self.hidden, *result, block.norm1)
        return normed

    def attention(self, ways: Mapping[Attention | None, Attend], offsets: torch.Tensor) -> Attention | None:
        """Return what costs least on one sequence and on as many equal ones as there can be; the ratios count alike."""
        rows, slots = self.qkv.shape[0], offsets.shape[0] - 1
        cost = dict.fromkeys(ways, 1.0)
        for sequences in (min(slots, rows), 1):
            ends = torch.arange(slots + 1).clamp(max=sequences) * (rows // sequences)
            offsets.copy_(ends.to(torch.int32))
            held = int(ends[-1])  # rows behind belong to no sequence, and some backends leave them as they were made
            expected = self._attended(ways[None])[:held].clone()
            for way, attend in ways.items():
                if cost[way] != _NEVER:
                    cost[way] *= self._attention_cost(way, attend, expected)
        return min(cost, key=lambda way: cost[way])

    def _attention_cost(self, way: Attention | None, attend: Attend, expected: torch.Tensor) -> float:
        try:
            # A compiler that gets it wrong is seen here.
            if way is not None and not self._alike(self._attended(attend)[: len(expected)], expected):
                self.refused.append(f"attention by {way}: another result")
                return _NEVER
            return self.time(lambda block: attend(block.attn.attn, self.qkv, self.context))
        except Exception as error:  # as above; or a tile that this GPU has no room for
            if way is None:
                raise
            self.refused.append(f"attention by {way}: {_short(error)}")
            return _NEVER

    def _attended(self, attend: Attend) -> torch.Tensor:
        return attend(self.blocks[0].attn.attn, self.qkv, self.context)

    def _alike(self, got: torch.Tensor, expected: torch.Tensor) -> bool:
        """Tell whether two results differ by rounding only. Not-a-number is no number below the limit."""
        expected = expected.float()
        return bool((got.float() - expected).norm() / expected.norm() < self.limit)

    def time(self, step: Step) -> float:
        """Return the milliseconds of a step over all blocks, replayed from a graph; the median of several rounds."""
        stream = _side(self.context.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            step(self.blocks[0])  # compiles, and sets libraries up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()  # torch.cuda.graph would collect garbage before each
            try:
                for block in self.blocks:
                    step(block)
            finally:
                graph.capture_end()
            graph.replay()
            found = []
            replays = _REPLAYS if self.hidden.shape[0] <= MOST_ROWS else 1
            for _ in range(_ROUNDS):
                begin.record(stream)
                for _ in range(replays):
                    graph.replay()
                end.record(stream)
                end.synchronize()
                found.append(begin.elapsed_time(end) / replays)
        return float(statistics.median(found))


@cache
def _side(device: torch.device) -> Any:
    """Return the one stream of a device on which steps are timed: cuBLAS keeps 32 MiB for each stream it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _layer(name: str, block: Any) -> Any:
    paths = {"qkv": "attn.qkv", "proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    return attrgetter(paths[name])(block)


def _short(error: Exception) -> str:
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0][:120]}".strip()
