"""How variant `fused` computes the steps of a block: of several ways the one that this GPU takes least time for.

A graph of few rows has products that cannot fill the GPU. Cut along their inner dimension, into parts that the next
kernel adds up, they can; and for short sequences one small attention kernel is faster than FlashAttention. Which way
wins depends on rows and GPU, so each is measured, once for every number of rows, before the first capture.

Import this module only after `engine.require_vllm`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

# Above so many rows no product was faster in parts, and no short attention, on an H200.
MOST_ROWS = 2048
_PARTS = (0, 1, 2, 4)
_ROUNDS = 5
_REPLAYS = 4
# Relative RMS in units of the last place: two attention kernels that round differently lie a quarter of one apart. A
# product in TF32 is thousands of float32's away, so models of that dtype keep vLLM's attention.
_APART_ULPS = 1.25

_NEVER = float("inf")

Attend = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
Step = Callable[[Any], object]


@dataclass(frozen=True)
class Tile:
    """How `kernels.attend` cuts its work: rows of queries and of keys at a time, warps and stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


TILES = (Tile(64, 64, 4, 3), Tile(128, 64, 8, 2))


@dataclass(frozen=True)
class Recipe:
    """One way.

    Attributes:
        proj, fc1, fc2: parts of the layer's product; 0 is the layer's own way, its bias in the product.
        tile: of `kernels.attend`; None is vLLM's attention.
    """

    proj: int = 0
    fc1: int = 0
    fc2: int = 0
    tile: Tile | None = None

    def __str__(self) -> str:
        """Say it in words, for the record of a capture."""
        parts = ", ".join(f"{name} in {n}" for name, n in vars(self).items() if isinstance(n, int) and n > 1)
        attention = "attention in vLLM's way" if self.tile is None else "attention by the kernel for short sequences"
        return f"{attention}; products {f'in parts: {parts}' if parts else 'whole'}"


def product(layer: Any, x: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a linear layer's product of [rows, inner], and the bias that is still to be added.

    Returns:
        [rows, outer] with its bias, and None, where `parts` is 0; [rows, outer] and the bias where it is 1; else
        [parts, rows, outer] and the bias.
    """
    if parts == 0:
        return layer(x)[0], None
    # In the layer's place, so that hooks on modules see the product as the layer's.
    before = vars(layer).get("forward")
    layer.forward = partial(_sums, layer.weight, parts=parts)
    try:
        return layer(x), layer.bias
    finally:
        del layer.forward
        if before is not None:
            layer.forward = before


def _sums(weight: torch.Tensor, x: torch.Tensor, parts: int) -> torch.Tensor:
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
    blocks: Sequence[Any], kernels: Any, rows: int, attend: Attend, offsets: torch.Tensor, longest: int
) -> Recipe:
    """Measure every way on a graph of `rows` rows, and return the fastest of each step.

    Args:
        blocks: the tower's, on CUDA, not quantised.
        kernels: the module of that name.
        attend: vLLM's way, see `fused`; it reads `offsets`.
        offsets: [slots + 1] int32 on the GPU, written meanwhile.
        longest: rows of the longest sequence a replay may have.
    """
    if rows > MOST_ROWS:
        return Recipe()
    bench, kept = _Bench(blocks, kernels, rows), offsets.clone()
    try:
        tile = bench.attention(attend, offsets, longest)
    finally:
        offsets.copy_(kept)
    return Recipe(bench.cheapest("proj"), bench.cheapest("fc1"), bench.cheapest("fc2"), tile)


class _Bench:
    """Inputs of every step, and the time of a step over all blocks: their weights come from memory, as in the tower."""

    def __init__(self, blocks: Sequence[Any], kernels: Any, rows: int) -> None:
        self.blocks, self.kernels = blocks, kernels
        attention = blocks[0].attn
        self.heads, self.size = attention.num_attention_heads_per_partition, attention.hidden_size_per_attention_head
        self.dtype, device = blocks[0].norm1.weight.dtype, blocks[0].norm1.weight.device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        width = blocks[0].norm1.weight.shape[0]
        self.hidden, self.narrow = random(rows, width), random(rows, width)
        self.wide = random(rows, blocks[0].mlp.fc2.weight.shape[1])
        self.qkv = random(rows, 3 * self.heads, self.size)
        self.context = torch.zeros(rows, self.heads, self.size, dtype=self.dtype, device=device)

    def cheapest(self, name: str) -> int:
        """Return the parts of a layer's product that cost least together with the kernel behind it."""
        layer = attrgetter({"proj": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}[name])
        x = self.wide if name == "fc2" else self.narrow

        def step(parts: int, block: Any) -> None:
            result = product(layer(block), x, parts)
            if name == "fc1":
                self.kernels.quick_gelu(*result)
            else:
                self.kernels.add_norm(self.hidden, *result, block.norm1)

        ways = [n for n in _PARTS if all(can_be_cut(layer(block), n, self.dtype) for block in self.blocks)]
        return min(ways or [0], key=lambda parts: self.time(partial(step, parts)))

    def attention(self, attend: Attend, offsets: torch.Tensor, longest: int) -> Tile | None:
        """Return what costs least on one sequence and on as many equal ones as there can be; the ratios count alike."""
        rows, slots = self.qkv.shape[0], offsets.shape[0] - 1
        limit = _APART_ULPS * torch.finfo(self.dtype).eps
        scale = float(self.blocks[0].attn.attn.scale)

        def theirs(block: Any) -> torch.Tensor:
            return attend(block.attn.attn, self.qkv, self.context)

        def ours(tile: Tile, block: Any) -> torch.Tensor:
            self.kernels.attend(self.qkv, offsets, longest, scale, self.context, tile)
            return self.context

        ways: dict[Tile | None, Callable[[Any], torch.Tensor]] = {None: theirs}
        ways |= {tile: partial(ours, tile) for tile in TILES}
        cost = dict.fromkeys(ways, 1.0)
        for sequences in (min(slots, rows), 1):
            ends = torch.arange(slots + 1).clamp(max=sequences) * (rows // sequences)
            offsets.copy_(ends.to(torch.int32))
            held = int(ends[-1])  # rows behind belong to no sequence, and some backends leave them as they were made
            expected = theirs(self.blocks[0])[:held].float().clone()
            for tile, step in ways.items():
                if cost[tile] == _NEVER:
                    continue
                try:
                    got = step(self.blocks[0])[:held].float()
                except self.kernels.REFUSED:  # a tile that this GPU has no room for
                    cost[tile] = _NEVER
                    continue
                apart = float((got - expected).norm() / expected.norm())
                # A compiler that gets it wrong is seen here. Not-a-number is no number below the limit either.
                cost[tile] = cost[tile] * self.time(step) if apart < limit or tile is None else _NEVER
        return min(cost, key=lambda tile: cost[tile])

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
            for _ in range(_ROUNDS):
                begin.record(stream)
                for _ in range(_REPLAYS):
                    graph.replay()
                end.record(stream)
                end.synchronize()
                found.append(begin.elapsed_time(end) / _REPLAYS)
        return float(statistics.median(found))


@cache
def _side(device: torch.device) -> Any:
    """Return the one stream of a device on which steps are timed: cuBLAS keeps 32 MiB for each stream it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
