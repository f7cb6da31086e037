"""What `kernels` computes, in torch: where there is no Triton or no CUDA, and the reference of the kernels' tests."""

from itertools import pairwise

import torch

from workbench.encoder.variants.attention import Tile

# The functions that are both here and in `kernels`; variant `fused` runs those of one of them.
KERNELS = ("add_norm", "normed", "rotate", "quick_gelu", "attend")


def add_norm(
    hidden: torch.Tensor, update: torch.Tensor, offset: torch.Tensor | None, norm: torch.nn.LayerNorm
) -> torch.Tensor:
    """Add a product to `hidden` [rows, width] in place, and return `norm` of the sum in a new tensor.

    Args:
        update: [rows, width] or [parts, rows, width].
        offset: the product's bias [width], where it is still to be added.
    """
    hidden.add_(whole(update, offset))
    normed: torch.Tensor = norm(hidden)
    return normed


def normed(x: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """Return `norm` of [rows, width] in a new tensor."""
    result: torch.Tensor = norm(x)
    return result


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate [rows, heads, head size] in place: halves a, b become a cos - b sin, b cos + a sin.

    Args:
        cos, sin: [rows, head size / 2] float32.
    """
    cos, sin = cos[:, None], sin[:, None]
    a, b = rows.float().chunk(2, dim=-1)
    rows.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))


def quick_gelu(values: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """Return x sigmoid(1.702 x) of a product: in place of [rows, width], in a new tensor of [parts, rows, width].

    Args:
        offset: the product's bias [width], where it is still to be added.
    """
    x = whole(values, offset).to(values.dtype)
    return x.mul_(torch.sigmoid(1.702 * x))


def attend(
    rows: torch.Tensor, offsets: torch.Tensor, longest: int, scale: float, context: torch.Tensor, tile: Tile
) -> None:
    """Attend within sequences, see `kernels.attend`; neither `longest` nor `tile` makes a difference here."""
    for begin, end in pairwise(offsets.tolist()):
        q, k, v = rows[begin:end].transpose(0, 1).chunk(3)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        context[begin:end] = attended.transpose(0, 1)


def whole(product: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """Add up parts and bias, in float32 where there is anything to add."""
    if product.dim() == 2 and offset is None:
        return product
    total = product.float() if product.dim() == 2 else product.float().sum(0)
    return total if offset is None else total + offset.float()
