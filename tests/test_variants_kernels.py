"""The Triton kernels of variant `fused`, run by Triton's interpreter and compared with the same functions in torch.

The interpreter truncates where it casts to bfloat16, a GPU rounds to nearest. So rounding is tested in float16, and
bfloat16 within one unit more.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# Runs in a child process: the interpreter is chosen when the kernels are imported.
COMPARE = """
import json, sys
import torch
from workbench.encoder.variants import dataflow, kernels
torch.manual_seed(0)
worst = {"add_norm": 0.0, "rotate": 0.0, "quick_gelu": 0.0}
def ulps(a, b):
    assert torch.isfinite(a).all()
    scale = torch.finfo(a.dtype).eps * b.float().abs().clamp(min=2.0**-6)
    return float(((a.float() - b.float()).abs() / scale).max())
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for rows, width in ((1, 80), (5, 160), (3, 1280)):
        norm = torch.nn.LayerNorm(width, eps=1e-5).to(dtype)
        torch.nn.init.normal_(norm.weight, 1, 0.1), torch.nn.init.normal_(norm.bias, 0, 0.1)
        with torch.no_grad():
            hidden, update = (3 * torch.randn(rows, width)).to(dtype), torch.randn(rows, width).to(dtype)
            mine, theirs = hidden.clone(), hidden.clone()
            a, _ = kernels.add_norm(mine, update, norm), dataflow.add_norm(theirs, update, norm)
            b = norm(mine)  # of the stream as it was rounded
        if dtype is torch.bfloat16:
            assert ulps(mine, theirs) <= 1
        else:
            assert torch.equal(mine, theirs), "the residual stream is rounded before the norm"
        if dtype is not torch.float32:
            worst["add_norm"] = max(worst["add_norm"], ulps(a, b))
        else:
            torch.testing.assert_close(a, b)
    for rows, heads, size in ((1, 1, 80), (5, 6, 80), (3, 48, 80), (2, 9, 64)):
        # q, k and v side by side: only the first two thirds turn
        wide = torch.randn(rows, 3 * heads, size).to(dtype)
        angle = torch.randn(rows, size // 2)
        mine, theirs = wide.clone(), wide.clone()
        kernels.rotate(mine[:, : 2 * heads], angle.cos(), angle.sin())
        dataflow.rotate(theirs[:, : 2 * heads], angle.cos(), angle.sin())
        assert torch.equal(mine[:, 2 * heads :], wide[:, 2 * heads :]), "v stays"
        worst["rotate"] = max(worst["rotate"], ulps(mine, theirs))
    x = (4 * torch.randn(3, 1000)).to(dtype)
    x[0, :3] = torch.tensor([0.0, -60.0, 60.0])
    expected = (x.float() * torch.sigmoid(1.702 * x.float())).to(dtype)
    got = kernels.quick_gelu(x.clone())
    worst["quick_gelu"] = max(worst["quick_gelu"], ulps(got, expected))
print(json.dumps(worst))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None, reason="needs Triton"
)
def test_kernels_agree_with_torch_to_the_last_place() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    worst = json.loads(done.stdout.splitlines()[-1])
    # Sums in another order, and fused multiplies, move a result by a unit or two in the last place.
    assert all(value <= 4 for value in worst.values()), worst
