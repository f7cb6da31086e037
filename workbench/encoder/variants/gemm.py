"""Products by quack-kernels, on which vLLM's GPU package depends: bias and activation in the product's own kernel.

Unlike cuBLAS's, its kernels may be launched before the kernel in front of them has ended.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_HOPPER = (9, 0)
# Rows up to which small tiles are worth a trial, and from which large ones are.
_SMALL_UP_TO, _LARGE_FROM = 1024, 1024


@dataclass(frozen=True)
class Gemm:
    """How a product is cut.

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


# Those that were fastest for a product of ERNIE's blocks on an H200, at 256 to 8,192 rows.
_SMALL = (
    Gemm(64, 128, False, (4, 1)),
    Gemm(64, 160, False, (2, 1)),
    Gemm(128, 64, False, (2, 1)),
    Gemm(128, 80, False, (2, 1)),
    Gemm(128, 128, False, (2, 1)),
)
_LARGE = (
    Gemm(128, 128, True, (2, 1)),
    Gemm(128, 160, True, (2, 1)),
    Gemm(128, 192, True, (2, 1)),
    Gemm(128, 192, True, (1, 2)),
    Gemm(256, 160, False, (2, 1)),
)


def is_hopper(device: torch.device) -> bool:
    """Tell whether `device` is an NVIDIA GPU of that generation, which the tilings here were found on."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None  # AMD's GPUs are of that type too
    return nvidia and torch.cuda.get_device_capability(device) == _HOPPER


def refusal(device: torch.device) -> str | None:
    """Say why quack's products cannot be tried on `device`; None where they can."""
    if not is_hopper(device):
        return "its tiles here are for Hopper"
    if importlib.util.find_spec("quack") is None:
        return "quack-kernels is not installed"
    return None


def candidates(rows: int) -> Sequence[Gemm]:
    """Return the tiles worth a trial on a product of so many rows; compiling one takes about a second, once."""
    return (_SMALL if rows <= _SMALL_UP_TO else ()) + (_LARGE if rows >= _LARGE_FROM else ())


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gemm: Gemm, activation: str | None = None
) -> torch.Tensor:
    """Return activation(x weightᵀ + bias), computed in float32 and rounded once.

    Args:
        x: [rows, inner], contiguous.
        weight: [outer, inner].
        bias: [outer].
        activation: quack's name of one; None is none.
    """
    from quack.gemm_interface import gemm_act

    result = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    gemm_act(
        x, weight.t(), bias=bias, activation=activation, postact_out=result, store_preact=False, tuned=False,
        config=_config(gemm),
    )  # fmt: skip
    return result


@cache  # quack knows a configuration by its identity: one that was collected could be mistaken for another
def _config(gemm: Gemm) -> Any:
    from quack.gemm_config import GemmConfig

    return GemmConfig(
        tile_m=gemm.rows, tile_n=gemm.columns, pingpong=gemm.pingpong, cluster_m=gemm.cluster[0],
        cluster_n=gemm.cluster[1], is_dynamic_persistent=False,
    )  # fmt: skip
