"""Triton kernels of variant `fused`. Statistics are float32, and results are rounded where vLLM rounds them.

Every function takes contiguous rows (`rotate` also takes rows of a wider matrix) and works on CUDA tensors; under
`TRITON_INTERPRET=1` on CPU tensors. `workbench.encoder.variants.dataflow` has the same functions in torch.
"""

import torch
import triton
import triton.language as tl

_ACTIVATION_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(hidden, update, weight, bias, normed, width: tl.constexpr, block: tl.constexpr, eps: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    old = tl.load(hidden + row + column, mask=inside, other=0.0).to(tl.float32)
    x = old + tl.load(update + row + column, mask=inside, other=0.0).to(tl.float32)
    x = x.to(hidden.dtype.element_ty)  # the residual stream is rounded before it is normalised
    tl.store(hidden + row + column, x, mask=inside)
    x = x.to(tl.float32)
    mean = tl.sum(x, 0) / width
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = centred * scale * gain + shift
    tl.store(normed + row + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(rows, cos, sin, stride, heads: tl.constexpr, half: tl.constexpr, head_block: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)[:, None]
    feature = tl.arange(0, block)[None, :]
    inside = (head < heads) & (feature < half)
    c = tl.load(cos + row * half + feature, mask=feature < half, other=0.0)
    s = tl.load(sin + row * half + feature, mask=feature < half, other=0.0)
    place = rows + row * stride + head * (2 * half) + feature
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (a * c - b * s).to(rows.dtype.element_ty), mask=inside)
    tl.store(place + half, (b * c + a * s).to(rows.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quick_gelu(values, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    x = x / (1.0 + tl.exp(-1.702 * x))
    tl.store(values + place, x.to(values.dtype.element_ty), mask=inside)


def add_norm(hidden: torch.Tensor, update: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """Add `update` to `hidden` [rows, width] in place, and return `norm` of the sum in a new tensor."""
    rows, width = hidden.shape
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](hidden, update, norm.weight, norm.bias, normed, width, block, norm.eps, num_warps=4)
    return normed


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate [rows, heads, head size] in place: halves a, b become a cos - b sin, b cos + a sin.

    Args:
        rows: heads and features contiguous, rows at any stride.
        cos, sin: [rows, head size / 2] float32.
    """
    count, heads, size = rows.shape
    half = size // 2
    head_block = 8
    grid = (count, triton.cdiv(heads, head_block))
    _rotate[grid](rows, cos, sin, rows.stride(0), heads, half, head_block, triton.next_power_of_2(half), num_warps=2)


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """Replace x by x sigmoid(1.702 x) in place."""
    count = values.numel()
    _quick_gelu[(triton.cdiv(count, _ACTIVATION_BLOCK),)](values, count, _ACTIVATION_BLOCK, num_warps=4)
    return values
