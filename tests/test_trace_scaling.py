"""The benchmark's scaled traces are traces: copies without overlap, and the same numbers as the reference."""

from pathlib import Path

import pytest

from benchmarks.trace_reader import compare, row, run_reader, scale, source_text
from tests import reference
from tests.kineto import workload
from workbench.gaps import COUNTS, TIMES, analyze
from workbench.trace import read_trace


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_a_scaled_trace_agrees_with_the_reference(tmp_path: Path, copies: int) -> None:
    text = workload(1, kernels=6, nodes=5).text()
    (tmp_path / "one.json").write_text(text)
    one = read_trace(tmp_path / "one.json")
    scaled = scale(text, copies * len(one), tmp_path / "scaled.json")
    trace = read_trace(scaled.path)
    assert len(trace) == scaled.events == copies * len(one)
    assert scaled.kept_bytes < scaled.bytes == scaled.path.stat().st_size
    assert not trace.warnings
    for pattern in (None, "*#0"):
        analysis = analyze(trace, pattern)
        wanted = reference.rows(scaled.path, pattern)
        for key in (*TIMES, *COUNTS):
            assert analysis.exact[key].tolist() == [found[key] for found in wanted], key
    single, several = analyze(one).total, analyze(trace).total
    assert several.launches == copies * single.launches
    assert several.busy_us == pytest.approx(copies * single.busy_us)


def test_readers_agree_and_failures_are_rows(tmp_path: Path) -> None:
    scaled = scale(workload(1).text(), 500, tmp_path / "scaled.json")
    rows = [row(name, run_reader(name, [scaled.path]), scaled) for name in ("workbench", "json.load")]
    assert rows[0]["busy_us"] == pytest.approx(rows[1]["busy_us"])
    assert rows[0]["kept_events"] == scaled.events
    failed = row("workbench", run_reader("workbench", [tmp_path / "none.json"]), scaled)
    assert "cannot read" in failed["failed"]
    assert compare([*rows, failed]) == {}


def test_the_recorded_eager_trace_is_the_default_source() -> None:
    text, name = source_text(None)
    assert name.startswith("eager_")
    assert '"traceEvents"' in text
