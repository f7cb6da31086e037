"""Ways to compute the attention of a block from the product's output, [rows, 3 heads, size], for variant `fused`.

Import this module only after `engine.require_vllm`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.encoder.variants.gemm import has_quack, is_hopper

# (vLLM's attention layer, rows [rows, 3 heads, size], context [rows, heads, size]) -> the result, often `context`.
Attend = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Tile:
    """How `kernels.attend` cuts its work: rows of queries and of keys at a time, warps and stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        """Say it in words, for the record of a capture."""
        return f"Triton, {self.queries} x {self.keys}, {self.stages} stages"


# The first was fastest on an H200, at 256 rows; the second needs half its memory.
TILES = (Tile(64, 64, 4, 4), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2))


@dataclass(frozen=True)
class Flash4:
    """How FlashAttention 4 cuts its work.

    Attributes:
        queries, keys: rows at a time.
        registers: weights stay in registers between the two products, instead of going through shared memory.
    """

    queries: int
    keys: int
    registers: bool

    def __str__(self) -> str:
        """Say it in words, for the record of a capture."""
        return f"FlashAttention 4, {self.queries} x {self.keys}"


# Those that were fastest at head size 80 on an H200, at 2,048 and at 8,192 rows; the last but one is its own choice.
FLASH4 = (
    Flash4(128, 128, True), Flash4(128, 160, True), Flash4(128, 176, True), Flash4(192, 144, False),
    Flash4(192, 160, False),
)  # fmt: skip


def is_flash(attention: Any) -> bool:
    """Tell whether vLLM's attention layer calls FlashAttention."""
    return bool(attention.attn_backend.name == "FLASH_ATTN")


def flash4_refusal(attention: Any, device: torch.device) -> str | None:
    """Say why FlashAttention 4 cannot be tried in place of `attention`; None where it can."""
    if not is_flash(attention):
        return "another backend was asked for"
    if not is_hopper(device):
        return "its tiles here are for Hopper"
    if importlib.util.find_spec("vllm.vllm_flash_attn.cute") is None or not has_quack():
        return "this vLLM has none, or what it needs is not installed"
    return None


def by_vllm(
    offsets: torch.Tensor, longest: torch.Tensor, attention: Any, rows: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """Run vLLM's own attention on views of `rows`; it makes the output itself."""
    q, k, v = (x.unsqueeze(0) for x in rows.chunk(3, dim=1))
    output: torch.Tensor = attention(query=q, key=k, value=v, cu_seqlens=offsets, max_seqlen=longest)
    return output.squeeze(0)


def by_kernel(
    kernels: Any,
    offsets: torch.Tensor,
    longest: int,
    tile: Tile,
    attention: Any,
    rows: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """Run the kernel for short sequences into `context`."""
    kernels.attend(rows, offsets, longest, attention.scale, context, tile)
    return context


def by_flash(
    offsets: torch.Tensor,
    most: int,
    schedule: torch.Tensor | None,
    attention: Any,
    rows: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """Run vLLM's FlashAttention on views of `rows` into `context`, whose padding rows it leaves alone."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    q, k, v = rows.chunk(3, dim=1)
    more = {} if schedule is None else {"scheduler_metadata": schedule}
    flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=most,
        max_seqlen_k=most,
        dropout_p=0.0,
        causal=False,
        softmax_scale=attention.scale,
        fa_version=attention._fa_version,
        out=context,
        **more,
    )
    return context


def by_flash4(
    offsets: torch.Tensor, most: int, way: Flash4, attention: Any, rows: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """Run FlashAttention 4 on views of `rows` into `context`, whose padding rows it leaves alone.

    vLLM's wrapper does not take a tile; its head size is not padded to 96, as FlashAttention 3's is.
    """
    from vllm.vllm_flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = rows.chunk(3, dim=1)
    _flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=most,
        max_seqlen_k=most,
        softmax_scale=attention.scale,
        causal=False,
        tile_mn=(way.queries, way.keys),
        mma_pv_is_rs=way.registers,
        intra_wg_overlap=True,
        out=context,
    )
    return context


def flash_schedule(attention: Any, offsets: torch.Tensor, most: int, dtype: torch.dtype) -> torch.Tensor:
    """Return FlashAttention 3's plan of a call, which every block can use."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    schedule: torch.Tensor = get_scheduler_metadata(
        batch_size=offsets.shape[0] - 1,
        max_seqlen_q=most,
        max_seqlen_k=most,
        num_heads_q=attention.num_heads,
        num_heads_kv=attention.num_kv_heads,
        headdim=attention.head_size,
        cache_seqlens=offsets[1:] - offsets[:-1],
        qkv_dtype=dtype,
        cu_seqlens_q=offsets,
        causal=False,
    )
    return schedule


def attention_plan(attention: Any, offsets: torch.Tensor, most: int, dtype: torch.dtype) -> str:
    """Compare attention with one plan, used three times over, and without; "once per call", or what is wrong."""
    shape = (int(offsets[-1]), 3 * attention.num_heads, attention.head_size)
    rows = torch.randn(shape, dtype=dtype, device=offsets.device)
    plain, planned = (torch.zeros_like(rows[:, : attention.num_heads]).contiguous() for _ in range(2))
    by_flash(offsets, most, None, attention, rows, plain)
    try:
        schedule = flash_schedule(attention, offsets, most, dtype)
        for _ in range(3):
            by_flash(offsets, most, schedule, attention, rows, planned.zero_())
            if not torch.equal(plain, planned):
                return "in every block: with one plan for all the result differs"
    except (RuntimeError, TypeError, AttributeError, ImportError) as error:
        return f"in every block: {type(error).__name__} {str(error).splitlines()[0][:120]}"
    return "once per call"
