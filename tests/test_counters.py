"""Hardware counters: reading Nsight Compute's table, adding it up, and saying what is missing."""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from workbench.budgets import Configuration
from workbench.cli import app
from workbench.encoder import counters
from workbench.encoder.counters import (
    ACTIVE,
    DRAM,
    DURATION,
    ELAPSED,
    TENSOR,
    KernelCounters,
    analyzer_options,
    by_family,
    missing,
    parse_raw,
)
from workbench.errors import WorkbenchError
from workbench.roofline import H200

GEMM, NORM = "nvjet_hsh_128x128_64x4_2x1", "void vllm::rms_norm_kernel<c10::BFloat16>(...)"
# As `ncu --import FILE --csv --page raw` prints it: lines of its own, names, units, one row a kernel, "," in numbers.
TABLE = f'''==PROF== Connected to process 1
"ID","Process ID","Kernel Name","{DRAM}","{DURATION}","{ACTIVE}","{ELAPSED}","{TENSOR}"
"","","","byte","ns","cycle","cycle","cycle"
"0","1","{GEMM}","2,000,000","1,000","900","1,000","2,000"
"1","1","{NORM}","4800000","1000","800","1000","0"
"2","1","{GEMM}","0","3000","2500","3000","6000"
'''


def test_a_table_is_read_and_added_up() -> None:
    kernels = parse_raw(TABLE)
    assert [kernel.name for kernel in kernels] == [GEMM, NORM, GEMM]
    gemm, norm = by_family(kernels, "NVIDIA H200")
    assert (gemm.family, gemm.kernels, gemm.duration_us, gemm.dram_bytes) == ("gemm", 2, 4.0, 2e6)
    assert (gemm.tensor, gemm.active, gemm.bandwidth) == (0.5, 0.85, 0.5e12)
    assert gemm.roofline == 0.5
    assert (norm.family, norm.tensor) == ("norm", 0.0)
    assert norm.roofline == 4.8e12 / H200.bytes_per_second
    assert all(row.roofline is None for row in by_family(kernels, "some GPU"))


def test_units_are_scaled() -> None:
    scaled = TABLE.replace('"byte","ns"', '"Mbyte","usecond"').replace("2,000,000", "2").replace("4800000", "4.8")
    ours, theirs = parse_raw(scaled), parse_raw(TABLE)
    assert [kernel.dram_bytes for kernel in ours] == [kernel.dram_bytes for kernel in theirs]
    assert ours[0].duration_us == 1000 * theirs[0].duration_us


@given(st.lists(st.tuples(st.sampled_from([GEMM, NORM, "unknown"]), st.floats(1, 1e6), st.floats(0, 1e9)), max_size=30))
@settings(max_examples=50)
def test_sums_are_kept(rows: list[tuple[str, float, float]]) -> None:
    kernels = [
        KernelCounters(
            name=name, duration_us=us, dram_bytes=moved, tensor_cycles=0, active_cycles=us, elapsed_cycles=us
        )
        for name, us, moved in rows
    ]
    made = by_family(kernels)
    assert sum(row.kernels for row in made) == len(kernels)
    assert sum(row.duration_us for row in made) == pytest.approx(sum(kernel.duration_us for kernel in kernels))
    assert sum(row.dram_bytes for row in made) == pytest.approx(sum(kernel.dram_bytes for kernel in kernels))
    assert [row.duration_us for row in made] == sorted((row.duration_us for row in made), reverse=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no kernel"),
        ("==ERROR== No kernels were profiled.", "holds no kernel"),
        (TABLE.replace(TENSOR, "other"), f"lacks {TENSOR}"),
        (TABLE.replace('"3000","2500"', '"n/a","2500"'), "is 'n/a' in 'ns'"),
        (TABLE.replace('"byte"', '"furlong"'), "in 'furlong'"),
    ],
)
def test_damaged_tables(text: str, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        parse_raw(text)


@pytest.mark.parametrize(
    ("gpus", "package", "ncu", "message"),
    [
        ([], True, True, "need an NVIDIA GPU"),
        ([1], False, True, "install the extra `counters`"),
        ([1], True, False, "put its `ncu` on the PATH"),
        ([1], True, True, None),
    ],
)
def test_what_is_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], package: bool, ncu: bool, message: str | None
) -> None:
    monkeypatch.setattr("workbench.environment.gpus", lambda: gpus)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if package else None)
    monkeypatch.setattr("shutil.which", lambda _: "/bin/ncu" if ncu else None)
    reason = missing()
    assert reason is None if message is None else message in str(reason)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "does not permit hardware counters"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "as under gVisor"),
        ("a\nRuntimeError: boom\n", "no report: RuntimeError: boom"),
        ("==ERROR== No such metric\nValueError: x\nRefer to the log", "no report: ==ERROR== No such metric"),
        ("==ERROR== The application returned an error code (1).\nKeyError: 'x'", "no report: KeyError: 'x'"),
        ("", "it said nothing"),
    ],
)
def test_why_there_is_no_report(told: str, message: str) -> None:
    assert message in counters._failure(told)


def test_a_profiled_process_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real child process, without nsight-python."""
    monkeypatch.setattr(counters, "_CHILD", "import sys\nsys.exit('RuntimeError: no nsight here')\n")
    with pytest.raises(WorkbenchError, match="no report: RuntimeError: no nsight here"):
        counters._profile({"arm": "graph"}, tmp_path / "r.ncu-rep", 60)


def test_a_report_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "_CHILD", "open('ncu-output-encode-0.ncu-rep', 'w').write('x')\n")
    counters._profile({"arm": "graph"}, tmp_path / "r.ncu-rep", 60)
    assert (tmp_path / "r.ncu-rep").read_text() == "x"


def test_a_profiled_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "_CHILD", "import time\ntime.sleep(60)\n")
    with pytest.raises(WorkbenchError, match="took more than 1 s"):
        counters._profile({"arm": "graph"}, tmp_path / "r.ncu-rep", 1)


# What is used of nsight-python, without a GPU: the function runs, and a report lies where the real one would.
STAND_IN = """
import contextlib
from types import SimpleNamespace

annotate = contextlib.nullcontext

def _kernel(*, metrics, output_prefix):
    def decorate(function):
        def run():
            function()
            open(f"{output_prefix}ncu-output-encode-0.ncu-rep", "w").write("x")
        return run
    return decorate

analyze = SimpleNamespace(kernel=_kernel)
"""


@pytest.mark.engine
def test_an_arm_runs_in_the_profiled_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM encodes in the script that nsight-python starts again; its name once hid a module of Python's."""
    (tmp_path / "nsight.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    from workbench.encoder.session import SessionOptions

    job = counters._job(SessionOptions(depth=1, width=160, device="cpu"), Configuration((64,), 4), [(1, 16, 16)])
    counters._profile(job | {"arm": "graph"}, tmp_path / "r.ncu-rep", 120)
    assert (tmp_path / "r.ncu-rep").read_text() == "x"


def old(
    *,
    metrics: Any,
    runs: Any,
    output: Any,
    thermal_mode: Any,
    clock_control: Any,
    combine_kernel_metrics: Any,
    output_prefix: Any,
) -> None:
    """The arguments of nsight-python 0.9.6 that matter."""


def new(
    *, metrics: Any, runs: Any, verbosity: Any, thermal_mode: Any, combine_kernel_metrics: Any, output_prefix: Any
) -> None:
    """Those of 1.x."""


@pytest.mark.parametrize("kernel", [old, new])
def test_both_versions_of_nsight_python_are_called_right(kernel: Any) -> None:
    options = analyzer_options(kernel)
    assert set(options) <= set(inspect.signature(kernel).parameters)
    assert options["metrics"] == list(counters.METRICS)
    assert options["output_prefix"] == f"{Path.cwd()}/"  # where the report and the logs are looked for
    assert options["combine_kernel_metrics"](1, 2) == 3
    assert ("output" in options) == (kernel is old)


def test_the_verb_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("workbench.environment.gpus", list)
    result = CliRunner().invoke(app, ["counters", "--call", "224x224", "--out", str(tmp_path / "o")])
    assert isinstance(result.exception, WorkbenchError)
    assert "need an NVIDIA GPU" in str(result.exception)
    assert not (tmp_path / "o").exists()
