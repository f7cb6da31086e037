"""Compare the Triton kernels of variant `fused` with torch: `python -m workbench.encoder.variants.check`.

On CUDA they are compiled; under `TRITON_INTERPRET=1` the interpreter runs them on the CPU. The interpreter truncates
where it casts to bfloat16, a GPU rounds to nearest: there, bfloat16 is compared within one unit more.

With the argument `attention-plan`, tries instead whether FlashAttention 3 can plan all blocks' attention at once; exit
code 1: it cannot.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from types import SimpleNamespace

import torch

from workbench.encoder.variants import dataflow
from workbench.encoder.variants.attention import TILES
from workbench.encoder.variants.gemm import Multiply, is_hopper
from workbench.errors import WorkbenchError

Random = Callable[..., torch.Tensor]

# Sums in another order and fused multiplies move a result by a unit or two in the last place.
ALLOWED_ULPS = 4.0
_NORMS = ((1, 80), (5, 160), (3, 1280), (257, 1280))
_PARTS = (0, 1, 3)
_ATTENTION = ((2, 80), (1, 64))
# Rows, outer, inner, parts: more rows than tiles hold, and parts that share unevenly.
_PRODUCTS = ((256, 128, 1280, 1), (70, 64, 384, 1), (70, 128, 640, 3), (1, 64, 256, 2))
_HEADS = ((1, 1, 80), (5, 6, 80), (3, 16, 80), (2, 9, 64))


def ulps(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, in units of the last place of `expected`; values near zero count as 2⁻⁶."""
    if not torch.isfinite(got).all():
        return float("inf")
    unit = torch.finfo(got.dtype).eps * expected.float().abs().clamp(min=2.0**-6)
    return float(((got.float() - expected.float()).abs() / unit).max())


def check(device: torch.device) -> dict[str, float]:
    """Run every kernel on random rows; the worst distance of each that is for this device, in units of the last place.

    In both dtypes of 16 bits; float32's units are too small for sums in another order.

    Raises:
        WorkbenchError: a kernel is further from torch than rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    worst: dict[str, float] = {}
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            for name, distance in _distances(device, dtype, random):
                worst[name] = max(worst.get(name, 0.0), distance)
    bad = {name: value for name, value in worst.items() if value > ALLOWED_ULPS}
    truncates = device.type == "cpu"
    if bad or worst["residual"] > (1.0 if truncates else 0.0):
        raise WorkbenchError(f"kernels differ from torch by more than rounding, in units of the last place: {worst}")
    return worst


def _distances(device: torch.device, dtype: torch.dtype, random: Random) -> list[tuple[str, float]]:
    from workbench.encoder.variants import kernels

    found = []
    for (rows, width), parts in product(_NORMS, _PARTS):
        norm = torch.nn.LayerNorm(width, eps=1e-5)
        norm.weight.copy_(1 + 0.1 * random(width))
        norm.bias.copy_(0.1 * random(width))
        norm = norm.to(device, dtype)
        hidden = (3 * random(rows, width)).to(device, dtype)
        update, offset = _product(rows, width, parts, random, device, dtype)
        mine, theirs = hidden.clone(), hidden.clone()
        normed = kernels.add_norm(mine, update, offset, norm)
        dataflow.add_norm(theirs, update, offset, norm)
        found.append(("residual", ulps(mine, theirs)))
        found.append(("add_norm", ulps(normed, norm(mine))))
    for rows, heads, size in _HEADS:
        wide, angle = random(rows, 3 * heads, size).to(device, dtype), random(rows, size // 2).to(device)
        mine, theirs = wide.clone(), wide.clone()
        kernels.rotate(mine[:, : 2 * heads], angle.cos(), angle.sin())
        dataflow.rotate(theirs[:, : 2 * heads], angle.cos(), angle.sin())
        untouched = torch.equal(mine[:, 2 * heads :], wide[:, 2 * heads :])
        found.append(("rotate", ulps(mine, theirs) if untouched else float("inf")))
    for parts in _PARTS:
        x, offset = _product(3, 1000, parts, random, device, dtype)
        x *= 4
        (x if parts == 0 else x[0])[0, :3] = torch.tensor([0.0, -60.0, 60.0])
        whole = dataflow.whole(x, offset).to(dtype).float()
        expected = (whole * torch.sigmoid(1.702 * whole)).to(dtype)
        found.append(("quick_gelu", ulps(kernels.quick_gelu(x.clone(), offset), expected)))
    if device.type == "cuda" or dtype == torch.float16:  # the interpreter multiplies no blocks of bfloat16
        found += [("attend", distance) for distance in _attended(device, dtype, random)]
        if device.type == "cpu" or is_hopper(device):
            found += [("multiply", distance) for distance in _multiplied(device, dtype, random)]
    return found


def _product(
    rows: int, width: int, parts: int, random: Random, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a product of [rows, width] and no bias where `parts` is 0; else [parts, rows, width] and a bias."""
    if parts == 0:
        return random(rows, width).to(device, dtype), None
    return random(parts, rows, width).to(device, dtype), (0.1 * random(width)).to(device, dtype)


def _attended(device: torch.device, dtype: torch.dtype, random: Random) -> Iterator[float]:
    """Attend over sequences of which one is empty, poisoned rows behind them; relative RMS over what rounding gives."""
    from workbench.encoder.variants import kernels

    for (heads, size), tile in product(_ATTENTION, TILES):
        ends = [0, 70, 71, 71, 200]
        rows = random(ends[-1] + 20, 3 * heads, size).to(device, dtype)
        rows[ends[-1] :] = float("nan")
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        got, expected = (torch.zeros(rows.shape[0], heads, size, dtype=kind, device=device) for kind in (dtype, torch.float32))  # fmt: skip  # noqa: E501
        kernels.attend(rows, offsets, 150, size**-0.5, got, tile)
        dataflow.attend(rows.float(), offsets, 150, size**-0.5, expected, tile)
        clean = not bool(got[ends[-1] :].any())
        yield _apart(got, expected) if clean else float("inf")


def _multiplied(device: torch.device, dtype: torch.dtype, random: Random) -> Iterator[float]:
    """Multiply, whole with a bias and in parts without; relative RMS over what rounding gives."""
    from workbench.encoder.variants import kernels

    for rows, outer, inner, parts in _PRODUCTS:
        x, weight, bias = (one.to(device, dtype) for one in (random(rows, inner), random(outer, inner), random(outer)))
        inside = bias if parts == 1 else None
        product = kernels.multiply(x, weight, inside, Multiply(64, 64, 128, 4, 4, parts))
        expected = dataflow.whole(x.float() @ weight.float().t(), inside)
        yield _apart(dataflow.whole(product, None).to(dtype), expected)


def _apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative RMS of a difference, in units of the last place of `got`; infinite if it is no number."""
    apart = float((got.float() - expected).norm() / expected.norm())
    return apart / torch.finfo(got.dtype).eps if apart == apart else float("inf")


def check_attention_plan() -> list[str]:
    """Try one FlashAttention plan for several blocks, on few and on many sequence slots; what came of each.

    In a process of its own, because a plan that does not fit could end it.
    """
    from workbench.encoder.engine import require_vllm

    require_vllm()
    from workbench.encoder.variants.attention import attention_plan

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
