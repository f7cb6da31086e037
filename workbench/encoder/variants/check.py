"""Compare the Triton kernels of variant `fused` with torch: `python -m workbench.encoder.variants.check`.

On CUDA they are compiled; under `TRITON_INTERPRET=1` the interpreter runs them on the CPU. The interpreter truncates
where it casts to bfloat16, a GPU rounds to nearest: there, bfloat16 is compared within one unit more.

With the argument `attention-plan`, tries instead whether FlashAttention 3 can plan all blocks' attention at once; exit
code 1: it cannot.
"""

import json
import os
import sys
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace

import torch

from workbench.encoder.variants import dataflow
from workbench.errors import WorkbenchError

# Sums in another order and fused multiplies move a result by a unit or two in the last place.
ALLOWED_ULPS = 4.0
_NORMS = ((1, 80), (5, 160), (3, 1280), (257, 1280))
_HEADS = ((1, 1, 80), (5, 6, 80), (3, 16, 80), (2, 9, 64))


def ulps(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in units of the last place of `expected`; values near zero count as 2⁻⁶."""
    if not torch.isfinite(got).all():
        return float("inf")
    unit = torch.finfo(got.dtype).eps * expected.float().abs().clamp(min=2.0**-6)
    return float(((got.float() - expected.float()).abs() / unit).max())


def check(device: torch.device) -> dict[str, float]:
    """Run every kernel on random rows in three dtypes; the worst distance of each, in units of the last place.

    float32 is left out of the statistics: its units are too small for sums in another order.

    Raises:
        WorkbenchError: a kernel is further from torch than rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    worst = {"residual": 0.0, "add_norm": 0.0, "rotate": 0.0, "quick_gelu": 0.0}
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            for name, distance in _distances(device, dtype, random):
                worst[name] = max(worst[name], distance)
    bad = {name: value for name, value in worst.items() if value > ALLOWED_ULPS}
    truncates = device.type == "cpu"
    if bad or worst["residual"] > (1.0 if truncates else 0.0):
        raise WorkbenchError(f"kernels differ from torch by more than rounding, in units of the last place: {worst}")
    return worst


def _distances(
    device: torch.device, dtype: torch.dtype, random: Callable[..., torch.Tensor]
) -> list[tuple[str, float]]:
    from workbench.encoder.variants import kernels

    found = []
    for rows, width in _NORMS:
        norm = torch.nn.LayerNorm(width, eps=1e-5)
        norm.weight.copy_(1 + 0.1 * random(width))
        norm.bias.copy_(0.1 * random(width))
        norm = norm.to(device, dtype)
        hidden, update = (3 * random(rows, width)).to(device, dtype), random(rows, width).to(device, dtype)
        mine, theirs = hidden.clone(), hidden.clone()
        normed = kernels.add_norm(mine, update, norm)
        dataflow.add_norm(theirs, update, norm)
        found.append(("residual", ulps(mine, theirs)))
        found.append(("add_norm", ulps(normed, norm(mine))))
    for rows, heads, size in _HEADS:
        wide, angle = random(rows, 3 * heads, size).to(device, dtype), random(rows, size // 2).to(device)
        mine, theirs = wide.clone(), wide.clone()
        kernels.rotate(mine[:, : 2 * heads], angle.cos(), angle.sin())
        dataflow.rotate(theirs[:, : 2 * heads], angle.cos(), angle.sin())
        untouched = torch.equal(mine[:, 2 * heads :], wide[:, 2 * heads :])
        found.append(("rotate", ulps(mine, theirs) if untouched else float("inf")))
    x = (4 * random(3, 1000)).to(device, dtype)
    x[0, :3] = torch.tensor([0.0, -60.0, 60.0])
    expected = (x.float() * torch.sigmoid(1.702 * x.float())).to(dtype)
    found.append(("quick_gelu", ulps(kernels.quick_gelu(x.clone()), expected)))
    return found


def check_attention_plan() -> list[str]:
    """Try one FlashAttention plan for several blocks, on few and on many sequence slots; what came of each.

    In a process of its own, because a plan that does not fit could end it.
    """
    from workbench.encoder.engine import require_vllm

    require_vllm()
    from workbench.encoder.variants.fused import attention_plan

    attention = SimpleNamespace(num_heads=16, num_kv_heads=16, head_size=80, scale=80**-0.5, _fa_version=3)
    found = []
    for lengths, slots, most in (([256], 4, 512), ([1564, 256], 4, 2048), ([8192], 4, 8192), ([256] * 4, 512, 8192)):
        ends = [0, *accumulate(lengths)]
        offsets = torch.tensor(ends + [ends[-1]] * (slots - len(lengths)), dtype=torch.int32, device="cuda")
        found.append(attention_plan(attention, offsets, most, torch.bfloat16))
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["attention-plan"]:
        plans = check_attention_plan()
        print(json.dumps(plans))
        sys.exit(any(plan != "once per call" for plan in plans))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps(check(torch.device("cpu" if interpreted else "cuda"))))
