"""Products of variant `fused` that are not the layer's own: by quack-kernels, and by `kernels.multiply`.

vLLM's GPU package depends on quack-kernels, whose kernels have bias and activation inside. Unlike cuBLAS's, both may be
launched before the kernel in front of them has ended. The Triton kernel besides asks for its share of the weights while
it waits, and can leave the inner dimension in parts.
"""

import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

import torch

_HOPPER = (9, 0)
# Rows up to which small tiles are worth a trial, and from which large ones are.
_SMALL_UP_TO, _LARGE_FROM = 1024, 1024


@dataclass(frozen=True)
class Quack:
    """How quack cuts a product.

    Attributes:
        rows, columns: of the result, one thread block's tile.
        pingpong: two groups of warps take turns, one multiplies while the other stores.
        cluster: thread blocks that share what they read, along rows and along columns.
    """

    rows: int
    columns: int
    pingpong: bool
    cluster: tuple[int, int]

    def __str__(self) -> str:
        """Say it in words, for the record of a capture."""
        return f"quack, {self.rows} x {self.columns}"


@dataclass(frozen=True)
class Multiply:
    """How `kernels.multiply` cuts a product.

    Attributes:
        rows, columns: of the result, one program's tile.
        inner: of the inner dimension, at a time.
        warps, stages: of a program.
        parts: sums over shares of the inner dimension, which the next kernel adds up.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    parts: int = 1

    def __str__(self) -> str:
        """Say it in words, for the record of a capture."""
        return f"Triton, {self.rows} x {self.columns}" + (f", {self.parts} parts" if self.parts > 1 else "")


Gemm = Quack | Multiply

# Those that were fastest for a product of ERNIE's blocks on an H200, at 256 to 8,192 rows.
_SMALL = (
    Quack(64, 128, False, (4, 1)),
    Quack(64, 160, False, (2, 1)),
    Quack(128, 64, False, (2, 1)),
    Quack(128, 80, False, (2, 1)),
    Quack(128, 128, False, (2, 1)),
)
_LARGE = (
    Quack(128, 128, True, (2, 1)),
    Quack(128, 160, True, (2, 1)),
    Quack(128, 192, True, (2, 1)),
    Quack(128, 192, True, (1, 2)),
    Quack(256, 160, False, (2, 1)),
)
# At 256 rows.
_MULTIPLY = (
    Multiply(64, 64, 128, 4, 4),
    Multiply(128, 64, 128, 4, 4),
    Multiply(64, 128, 128, 4, 4),
    Multiply(128, 128, 64, 8, 4),
)
# An activation is cheap only inside quack's products; a residual add only outside.
_QUACKS = ("qkv", "fc1")
_MULTIPLIES = ("qkv", "proj", "fc2")


def is_hopper(device: torch.device) -> bool:
    """Tell whether `device` is an NVIDIA GPU of that generation, which the tilings here were found on."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None  # AMD's GPUs are of that type too
    return nvidia and torch.cuda.get_device_capability(device) == _HOPPER


def candidates(step: str, rows: int, outer: int, inner: int, multiprocessors: int, quack: bool) -> tuple[Gemm, ...]:
    """Return the ways worth a trial on a product; compiling one takes about a second, once.

    Args:
        step: "qkv", "proj", "fc1" or "fc2".
        rows, outer, inner: [rows, inner] times [inner, outer].
        multiprocessors: of the GPU.
        quack: quack-kernels can be imported.
    """
    found: list[Gemm] = []
    if quack and step in _QUACKS:
        found += (_SMALL if rows <= _SMALL_UP_TO else ()) + (_LARGE if rows >= _LARGE_FROM else ())
    if step in _MULTIPLIES and rows <= _SMALL_UP_TO:
        fit = [way for way in _MULTIPLY if outer % way.columns == 0 and inner % way.inner == 0]
        found += [_in_one_wave(way, rows, outer, inner, multiprocessors, whole=step == "qkv") for way in fit]
    return tuple(found)


def _in_one_wave(way: Multiply, rows: int, outer: int, inner: int, multiprocessors: int, whole: bool) -> Multiply:
    """Return `way` with as many parts as there are multiprocessors for, none of them empty."""
    tiles = ceil(rows / way.rows) * (outer // way.columns)
    steps = inner // way.inner
    parts = 1 if whole else min(max(multiprocessors // tiles, 1), steps)
    return replace(way, parts=ceil(steps / ceil(steps / parts)))


def has_quack() -> bool:
    """Tell whether quack-kernels is installed."""
    return importlib.util.find_spec("quack") is not None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gemm: Gemm, activation: str | None = None
) -> torch.Tensor:
    """Return activation(x weightᵀ + bias), computed in float32 and rounded once; or its parts.

    Args:
        x: [rows, inner], contiguous.
        weight: [outer, inner].
        bias: [outer]; None where it is still to be added.
        activation: quack's name of one; None is none.

    Returns:
        [rows, outer], or [parts, rows, outer].
    """
    if isinstance(gemm, Multiply):
        from workbench.encoder.variants import kernels

        assert activation is None
        return kernels.multiply(x, weight, bias, gemm)
    from quack.gemm_interface import gemm_act

    result = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    gemm_act(
        x, weight.t(), bias=bias, activation=activation, postact_out=result, store_preact=False, tuned=False,
        config=_config(gemm),
    )  # fmt: skip
    return result


@cache  # quack knows a configuration by its identity: one that was collected could be mistaken for another
def _config(gemm: Quack) -> Any:
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=gemm.rows, tile_n=gemm.columns, pingpong=gemm.pingpong, cluster_m=gemm.cluster[0],
        cluster_n=gemm.cluster[1], is_dynamic_persistent=False,
    )  # fmt: skip
