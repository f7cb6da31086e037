"""Does the session work on this machine? Ernie-4.5-VL, GLM-4.1V, Ernie-4.5-VL again, in one process.

    python -m workbench.encoder.smoke                 full size
    python -m workbench.encoder.smoke --depth 2       quick

For each it captures, compares graph with both eager arms, watches the batches, times the arms, and looks at what is
left in memory afterwards. One JSON object per session goes to stdout; the exit code is 1 when a check fails. The
times are a first look, not a measurement: `workbench capture` measures.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from workbench.budgets import Configuration
from workbench.encoder.session import EncoderSession, Grid, SessionOptions, open_session
from workbench.models import Modality
from workbench.run import ARMS, Arm

# Relative RMS between graph and eager. bf16's own rounding is 0.04 for GLM-4.1V's 24 blocks (see weights.py).
LIMIT = 0.06
# What may stay allocated on the GPU between sessions: cuBLAS workspaces, rotary tables that vLLM caches.
LEFT_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Case:
    """One session and its calls."""

    model: str
    configuration: Configuration
    calls: tuple[tuple[Modality, tuple[Grid, ...]], ...]
    video_limit: int = 0


_ERNIE = Case(
    "ernie45_vl",
    Configuration((128, 256, 512, 1024, 1536, 2048), 4),
    (
        ("image", ((1, 16, 16),)),
        ("image", ((1, 16, 16),) * 4),
        ("image", ((1, 46, 34), (1, 16, 16), (1, 74, 56))),
        ("image", ((1, 90, 90),)),
    ),
)
CASES = (
    _ERNIE,
    Case("glm4_1v", Configuration((64, 128, 512), 4), (("image", ((1, 16, 16),)), ("image", ((1, 24, 24), (1, 8, 8))))),
    Case(
        "glm4_1v",
        Configuration((64, 128, 512), 4, 32),
        (("video", ((4, 16, 16),)), ("video", ((2, 8, 8), (6, 8, 8)))),
        1,
    ),
    _ERNIE,
)


def check(case: Case, depth: int | None, width: int | None, device: str | None, repeats: int) -> dict[str, Any]:
    """Run one case and return what was seen, with a list of `failures`."""
    options = SessionOptions(case.model, depth=depth, width=width, device=device, video_limit=case.video_limit)
    start = time.perf_counter()
    with open_session(options, case.configuration) as session:
        opened = time.perf_counter() - start
        costs = session.capture()
        calls = [_call(session, modality, grids, repeats) for modality, grids in case.calls]
        report = {
            "model": session.model_record,
            "config": session.config_record,
            "replay": session.replay,
            "open_seconds": opened,
            "capture": costs,
            "calls": calls,
            "findings": [finding.message for finding in session.findings],
        }
    left = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    failures = [failure for call in calls for failure in call["failures"]]
    if left > LEFT_BYTES:
        failures.append(f"{left:,} bytes are still allocated after the session")
    return report | {"left_bytes": left, "failures": failures}


def _call(session: EncoderSession, modality: Modality, grids: Sequence[Grid], repeats: int) -> dict[str, Any]:
    inputs = session.inputs(grids, modality)
    with session.watch() as batches:
        outputs = {arm: session.run(arm, inputs) for arm in ARMS}
    differences: dict[Arm, float] = {
        arm: max(_relative_rms(a, b) for a, b in zip(outputs["graph"], outputs[arm], strict=True))
        for arm in ARMS
        if arm != "graph"
    }
    failures = [
        f"graph and {arm} differ by a relative RMS of {rms:.3f} on {modality} {list(grids)}"
        for arm, rms in differences.items()
        if not rms <= LIMIT  # a NaN fails too
    ]
    return {
        "modality": modality,
        "grids": grids,
        "batches": batches,
        "relative_rms": differences,
        "mean_ms": {arm: _mean_ms(session, arm, inputs, repeats) for arm in ARMS},
        "failures": failures,
    }


def _relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def _mean_ms(session: EncoderSession, arm: Arm, inputs: Any, repeats: int) -> float:
    """Mean host time between two synchronises, after as many warm-up calls."""
    for _ in range(repeats):
        session.run(arm, inputs)
    total = 0.0
    for _ in range(repeats):
        session.synchronize()
        start = time.perf_counter()
        session.run(arm, inputs)
        session.synchronize()
        total += time.perf_counter() - start
    return total / repeats * 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.encoder.smoke", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--depth", type=int, help="blocks of a smaller encoder")
    parser.add_argument("--width", type=int, help="features of a smaller encoder; only with one --model")
    parser.add_argument("--model", choices=sorted({case.model for case in CASES}), help="only this model's cases")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls per arm")
    asked = parser.parse_args(arguments)
    failed = False
    for case in CASES:
        if asked.model in (None, case.model):
            report = check(case, asked.depth, asked.width, asked.device, asked.repeats)
            print(msgspec.json.encode(report).decode(), flush=True)
            failed |= bool(report["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
