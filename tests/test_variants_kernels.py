"""The Triton kernels of variant `fused`, run by Triton's interpreter and compared with the same functions in torch."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None, reason="needs Triton"
)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a process of its own: the interpreter is chosen when the kernels are imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_kernels_agree_with_torch_to_the_last_place() -> None:
    done = run("-m", "workbench.encoder.variants.check")
    assert done.returncode == 0, done.stderr[-2000:]
    worst = json.loads(done.stdout.splitlines()[-1])
    assert set(worst) == {"residual", "add_norm", "rotate", "quick_gelu", "attend", "multiply"}


FAULTS = """
import torch
from workbench.encoder.variants import check, kernels
from workbench.errors import WorkbenchError
rotate, add_norm, quick_gelu, attend = kernels.rotate, kernels.add_norm, kernels.quick_gelu, kernels.attend
multiply = kernels.multiply
check._NORMS, check._HEADS, check.TILES = check._NORMS[:2], check._HEADS[:2], check.TILES[:1]
for name, wrong in {
    "rotate": lambda rows, cos, sin: rotate(rows, cos, -sin),
    "add_norm": lambda hidden, update, offset, norm: add_norm(hidden, update, None, norm),
    "quick_gelu": lambda x, offset: quick_gelu(x, None),
    "attend": lambda rows, offsets, longest, *more: attend(rows, offsets, longest - 64, *more),
    "multiply": lambda x, weight, bias, way: multiply(x, weight, None, way),
}.items():
    right = getattr(kernels, name)
    setattr(kernels, name, wrong)
    try:
        check.check(torch.device("cpu"))
    except WorkbenchError as error:
        assert "more than rounding" in str(error)
        print(name)
    setattr(kernels, name, right)
check._multiplied = lambda *_: ()
print("multiply" in check.check(torch.device("cpu")))
"""


def test_the_check_sees_a_wrong_kernel_and_says_nothing_of_one_that_did_not_run() -> None:
    done = run("-c", FAULTS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["rotate", "add_norm", "quick_gelu", "attend", "multiply", "False"]


LIMITS = """
import sys
import torch
import triton
name = "triton.tools.tensor_descriptor"
descriptors, sys.modules[name] = sys.modules[name], None
from workbench.encoder.variants import kernels
from workbench.encoder.variants.gemm import Multiply
x, weight = torch.randn(4, 192).half(), torch.randn(32, 192).half()
def refused(parts, bias=None):
    try:
        kernels.multiply(x, weight, bias, Multiply(16, 32, 32, 4, 2, parts))
    except (ImportError, AssertionError) as error:
        return type(error).__name__
print(refused(1))
sys.modules[name] = descriptors
print(refused(3), refused(4), refused(2, weight[:, 0]))  # six steps by fours: 2, 2, 2 and none
"""


def test_only_the_product_needs_descriptors_and_none_of_its_parts_is_empty() -> None:
    """An older Triton has none; the kernels can be imported all the same."""
    done = run("-c", LIMITS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["ModuleNotFoundError", "None", "AssertionError", "AssertionError"]


def test_only_hopper_launches_a_kernel_before_the_one_in_front_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from workbench.encoder.variants.kernels import _early

    gpu = torch.device("cuda:0")
    for cuda, capability, early in (("13.0", (9, 0), True), ("13.0", (8, 9), False), (None, (9, 4), False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)  # None: one of AMD's, whose capability counts otherwise
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        _early.cache_clear()
        assert _early(gpu) == early
    _early.cache_clear()
    assert not _early(torch.device("cpu"))
