"""What `kernels` computes, in torch: where there is no Triton or no CUDA, and the reference of the kernels' tests."""

import torch


def add_norm(hidden: torch.Tensor, update: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """Add `update` to `hidden` [rows, width] in place, and return `norm` of the sum in a new tensor."""
    hidden.add_(update)
    normed: torch.Tensor = norm(hidden)
    return normed


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate [rows, heads, head size] in place: halves a, b become a cos - b sin, b cos + a sin.

    Args:
        cos, sin: [rows, head size / 2] float32.
    """
    cos, sin = cos[:, None], sin[:, None]
    a, b = rows.float().chunk(2, dim=-1)
    rows.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """Replace x by x sigmoid(1.702 x) in place."""
    return values.mul_(torch.sigmoid(1.702 * values))
