"""Triton kernels of variant `fused`. Statistics are float32, and results are rounded where vLLM rounds them.

On Hopper a kernel is launched before the one in front of it has ended, and waits for it inside (programmatic dependent
launch); and it lets the next one be launched at once.

A product may come in parts, [parts, rows, width]: sums over shares of its inner dimension that are still to be added,
and its bias too. The kernel that reads the product adds them up, in float32 and always in the same order.

Every function works on CUDA tensors, and under `TRITON_INTERPRET=1` on CPU tensors.
`workbench.encoder.variants.dataflow` has the same functions in torch, but for `multiply`.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from workbench.encoder.variants.attention import Tile
from workbench.encoder.variants.gemm import Multiply

_ACTIVATION_BLOCK = 1024
_LOG2_E = 1.4426950408889634
_HEAD_BLOCK = 32
# Rows up to which a rotation by more warps was faster on an H200.
_WIDE_UP_TO = 2048
# Columns of a tile of `attend`. With 16, Triton 3.6 read beside the tile on an H200: wrong products, or a fault.
_NARROWEST = 32


@triton.jit  # type: ignore[untyped-decorator]
def _total(place, inside, step, parts: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        total += tl.load(place + part * step, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(hidden, update, offset, weight, bias, normed, step, parts: tl.constexpr, has_offset: tl.constexpr, width: tl.constexpr, block: tl.constexpr, eps: tl.constexpr, early: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(hidden + row + column, mask=inside, other=0.0).to(tl.float32)
    if parts > 0:
        added = _total(update + row + column, inside, step, parts)
        if has_offset:
            added += tl.load(offset + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + added).to(hidden.dtype.element_ty)  # the residual stream is rounded before it is normalised
        tl.store(hidden + row + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, 0) / width
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    result = centred * scale * gain + shift
    tl.store(normed + row + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(rows, cos, sin, stride, heads: tl.constexpr, half: tl.constexpr, head_block: tl.constexpr, block: tl.constexpr, early: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)[:, None]
    feature = tl.arange(0, block)[None, :]
    inside = (head < heads) & (feature < half)
    c = tl.load(cos + row * half + feature, mask=feature < half, other=0.0)
    s = tl.load(sin + row * half + feature, mask=feature < half, other=0.0)
    place = rows + row * stride + head * (2 * half) + feature
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (a * c - b * s).to(rows.dtype.element_ty), mask=inside)
    tl.store(place + half, (b * c + a * s).to(rows.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _quick_gelu(values, offset, result, count, parts: tl.constexpr, has_offset: tl.constexpr, width: tl.constexpr, block: tl.constexpr, early: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = _total(values + place, inside, count, parts)
    if has_offset:
        x += tl.load(offset + place % width, mask=inside, other=0.0).to(tl.float32)
    x = x.to(result.dtype.element_ty).to(tl.float32)
    x = x / (1.0 + tl.exp(-1.702 * x))
    tl.store(result + place, x.to(result.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(rows, offsets, context, stride, scale, heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr, query_block: tl.constexpr, key_block: tl.constexpr, early: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    dtype: tl.constexpr = context.dtype.element_ty
    head = tl.program_id(1)
    begin = tl.load(offsets + tl.program_id(2))
    end = tl.load(offsets + tl.program_id(2) + 1)
    first = begin + tl.program_id(0) * query_block
    if first >= end:
        return
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    feature = tl.arange(0, block)[None, :]
    query = (first + tl.arange(0, query_block))[:, None]
    wanted = (query < end) & (feature < size)
    query = query.to(tl.int64)
    q = tl.load(rows + query * stride + head * size + feature, mask=wanted, other=0.0)
    most = tl.full([query_block], float("-inf"), tl.float32)
    total = tl.zeros([query_block], tl.float32)
    out = tl.zeros([query_block, block], tl.float32)
    for start in range(begin, end, key_block):
        key = (start + tl.arange(0, key_block))[:, None]
        there = (key < end) & (feature < size)
        place = rows + key.to(tl.int64) * stride + (heads + head) * size + feature
        k = tl.load(place, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        visible = (start + tl.arange(0, key_block))[None, :] < end
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        most = larger
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(place + heads * size, mask=there, other=0.0)
        out = tl.dot(weights.to(dtype), v, out * shrink[:, None])
    out = out / total[:, None]
    tl.store(context + query * (heads * size) + head * size + feature, out.to(dtype), mask=wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _fetch(first, stride, count: tl.constexpr, size):  # type: ignore[no-untyped-def]
    """Ask for `size` bytes at each of `count` places, `stride` bytes apart, to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred mine;
        .reg .u32 thread;
        .reg .u64 place;
        mov.u32 thread, %tid.x;
        setp.lt.u32 mine, thread, $3;
        mad.wide.u32 place, thread, $2, $1;
        @mine cp.async.bulk.prefetch.L2.global [place], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [first, stride, count, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(lefts, rights, weight, bias, result, rows, outer, steps, share, row_block: tl.constexpr, column_block: tl.constexpr, inner_block: tl.constexpr, has_bias: tl.constexpr, early: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    row, column, part = tl.program_id(0) * row_block, tl.program_id(1) * column_block, tl.program_id(2)
    first = part * share
    last = tl.minimum(steps, first + share)
    columns = column + tl.arange(0, column_block)
    if has_bias:
        shift = tl.load(bias + columns)[None, :].to(tl.float32)
    if early:
        if row == 0:  # programs of other rows read the same weights
            size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            begin = weight + column.to(tl.int64) * steps * inner_block + first * inner_block
            _fetch(begin.to(tl.int64, bitcast=True), steps * inner_block * size, column_block, (last - first) * inner_block * size)  # fmt: skip  # noqa: E501
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([row_block, column_block], tl.float32)
    for step in range(first, last):
        left = lefts.load([row, step * inner_block])
        right = rights.load([column, step * inner_block])
        total = tl.dot(left, right.T, total)
    if has_bias:
        total += shift
    inside = row + tl.arange(0, row_block)
    place = (part * rows + inside[:, None]).to(tl.int64) * outer + columns[None, :]
    tl.store(result + place, total.to(result.dtype.element_ty), mask=inside[:, None] < rows)


def add_norm(
    hidden: torch.Tensor, update: torch.Tensor, offset: torch.Tensor | None, norm: torch.nn.LayerNorm
) -> torch.Tensor:
    """Add a product to `hidden` [rows, width] in place, and return `norm` of the sum in a new tensor.

    Args:
        update: [rows, width] or [parts, rows, width].
        offset: the product's bias [width], where it is still to be added.
    """
    return _norm_launched(hidden, update, offset, norm, _parts(update))


def normed(x: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """Return `norm` of [rows, width], contiguous, in a new tensor."""
    return _norm_launched(x, x, None, norm, 0)


def _norm_launched(
    hidden: torch.Tensor, update: torch.Tensor, offset: torch.Tensor | None, norm: torch.nn.LayerNorm, parts: int
) -> torch.Tensor:
    rows, width = hidden.shape
    result = torch.empty_like(hidden)
    early = _early(hidden.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        hidden, update, norm.bias if offset is None else offset, norm.weight, norm.bias, result, rows * width,
        parts, offset is not None, width, block, norm.eps, early, num_warps=4 if block <= 2048 else 16,
        **_launch(early),
    )  # fmt: skip
    return result


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate [rows, heads, head size] in place: halves a, b become a cos - b sin, b cos + a sin.

    Args:
        rows: heads and features contiguous, rows at any stride.
        cos, sin: [rows, head size / 2] float32.
    """
    count, heads, size = rows.shape
    half = size // 2
    early = _early(rows.device)
    grid = (count, triton.cdiv(heads, _HEAD_BLOCK))
    _rotate[grid](
        rows, cos, sin, rows.stride(0), heads, half, _HEAD_BLOCK, triton.next_power_of_2(half), early,
        num_warps=8 if count <= _WIDE_UP_TO else 4, **_launch(early),
    )  # fmt: skip


def quick_gelu(values: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """Return x sigmoid(1.702 x) of a product: in place of [rows, width], in a new tensor of [parts, rows, width].

    Args:
        offset: the product's bias [width], where it is still to be added.
    """
    result = values if values.dim() == 2 else torch.empty_like(values[0])
    count = result.numel()
    early = _early(values.device)
    _quick_gelu[(triton.cdiv(count, _ACTIVATION_BLOCK),)](
        values, values if offset is None else offset, result, count, _parts(values), offset is not None,
        values.shape[-1], _ACTIVATION_BLOCK, early, num_warps=4, **_launch(early),
    )  # fmt: skip
    return result


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: Multiply) -> torch.Tensor:
    """Return x weightᵀ + bias; in parts, where the bias must be None: [rows, outer] or [parts, rows, outer].

    Args:
        x: [rows, inner], contiguous.
        weight: [outer, inner], contiguous; `way.columns` divides outer, and `way.inner` inner.
        bias: [outer].
        way: no part may be empty.

    Raises:
        ImportError: this Triton has no tensor descriptors on the host, as before 3.4.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # here, so that the other kernels work without

    (rows, inner), outer = x.shape, weight.shape[0]
    steps = inner // way.inner
    share = triton.cdiv(steps, way.parts)
    assert bias is None or way.parts == 1
    assert (way.parts - 1) * share < steps
    result = x.new_empty((rows, outer) if way.parts == 1 else (way.parts, rows, outer))
    early = _early(x.device)
    _multiply[(triton.cdiv(rows, way.rows), outer // way.columns, way.parts)](
        TensorDescriptor.from_tensor(x, [way.rows, way.inner]),
        TensorDescriptor.from_tensor(weight, [way.columns, way.inner]),
        weight, weight if bias is None else bias, result, rows, outer, steps, share, way.rows, way.columns, way.inner,
        bias is not None, early, num_warps=way.warps, num_stages=way.stages, **_launch(early),
    )  # fmt: skip
    return result


def attend(
    rows: torch.Tensor, offsets: torch.Tensor, longest: int, scale: float, context: torch.Tensor, tile: Tile
) -> None:
    """Attend within short sequences. Rows behind the last one are neither read nor written.

    Args:
        rows: [rows, 3 heads, size], heads and features contiguous: queries, keys, values.
        offsets: [sequences + 1] int32, first rows of the sequences and the end of the last.
        longest: rows of the longest sequence that a graph with this launch may ever meet.
        scale: of the scores.
        context: [rows, heads, size], the result.
    """
    _, heads, size = context.shape
    early = _early(rows.device)
    grid = (triton.cdiv(longest, tile.queries), heads, offsets.shape[0] - 1)
    _attend[grid](
        rows, offsets, context, rows.stride(0), scale * _LOG2_E, heads, size,
        max(triton.next_power_of_2(size), _NARROWEST), tile.queries, tile.keys, early, num_warps=tile.warps,
        num_stages=tile.stages, **_launch(early),
    )  # fmt: skip


def _parts(product: torch.Tensor) -> int:
    return 1 if product.dim() == 2 else product.shape[0]


@cache
def _early(device: torch.device) -> bool:
    """Tell whether a kernel may be launched before the one in front of it has ended, as Hopper can."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None  # AMD's GPUs are of that type too
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def _launch(early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}
