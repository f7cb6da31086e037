"""`make bench`: what it writes is what README quotes, and a benchmark that fails is an error."""

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import trace_reader
from benchmarks.markdown import DETAILS, HEADLINES, SECTIONS, markdown
from workbench.errors import WorkbenchError

ROOT = Path(__file__).resolve().parents[1]
FAKE = """
import json, sys
if "--fail" in sys.argv:
    sys.exit(3)
rows = [{"items": 4, "batches": 1, "overhead_us": 7.4}]
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps({"rows": rows}))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that runs in a new process and writes what the ledger's benchmark writes."""
    (tmp_path / "fake_benchmark.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_benchmark"


def test_committed_tables_are_those_of_the_committed_results() -> None:
    folder = ROOT / "benchmarks"
    results = json.loads((folder / "results.json").read_text("utf-8"))
    assert markdown(results) == (folder / "results.md").read_text("utf-8")
    named = results["benchmarks"]
    assert {"trace_reader", "planner", "ledger"} <= named.keys() <= SECTIONS.keys()
    found = named["trace_reader"]["result"]["comparison"]
    headlines, details = markdown(results).split(DETAILS)
    assert f"loses {found['busy_lost_by_hta']:.0%} of the busy time" in headlines
    assert f"loses {found['busy_lost_by_hta']:.0%} of the busy time" in details
    assert headlines.count("\n| ") <= 16  # what README quotes


def test_every_benchmark_has_a_table_and_a_module() -> None:
    assert SECTIONS.keys() == (bench.BENCHMARKS | bench.FULL).keys()
    assert HEADLINES.keys() < SECTIONS.keys()
    for command in (bench.BENCHMARKS | bench.FULL).values():
        assert (ROOT / (command[0].replace(".", "/") + ".py")).is_file()


def test_results_of_others_are_kept_on_the_same_machine_only(
    tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", {"planner": (fake,), "ledger": (fake,)})
    monkeypatch.setattr(bench, "DATA", tmp_path / "data")
    for name in ("ledger", "planner"):
        monkeypatch.setitem(SECTIONS, name, SECTIONS["ledger"])
        monkeypatch.setitem(HEADLINES, name, HEADLINES["ledger"])
        bench.main(["--only", name, "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert list(results["benchmarks"]) == ["planner", "ledger"]
    assert "| 4 | 1 | 7 |" in (tmp_path / "results.md").read_text("utf-8")
    results["machine"]["cpu"] = "another"
    (tmp_path / "results.json").write_text(json.dumps(results))
    bench.main(["--only", "ledger", "--out", str(tmp_path)])
    assert list(json.loads((tmp_path / "results.json").read_text("utf-8"))["benchmarks"]) == ["ledger"]


def test_a_failing_benchmark_and_an_unknown_one_are_errors(fake: str) -> None:
    with pytest.raises(WorkbenchError, match="exit code 3"):
        bench.run("ledger", (fake, "--fail"))
    with pytest.raises(WorkbenchError, match="no benchmark is called 'x'"):
        bench.chosen("planner,x", full=False)
    assert bench.chosen("", full=True) == bench.BENCHMARKS | bench.FULL


def test_a_reader_that_failed_is_a_row_that_says_why() -> None:
    ours = {"reader": "workbench", "load_s": 1.0, "table_s": 1.0, "table_cpu_s": 1.0, "events_per_cpu_s_table": 1e6}
    rows = [ours | {"peak_bytes": 2**20, "busy_us": 1.0}, {"reader": "other", "failed": "out of memory"}]
    _, body = SECTIONS["trace_reader"]({"source": "t", "events": 1, "bytes": 1, "rows": rows, "comparison": {}})
    assert "| other | out of memory |" in body


def test_a_reader_gets_no_more_memory_than_is_spared_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(f'{{"traceEvents": [{", ".join(["{}"] * 2_000_000)}]}}')
    monkeypatch.setattr(trace_reader, "_available_bytes", lambda: trace_reader.SPARED_BYTES + 150 * 2**20)
    result = trace_reader.run_reader("json.load", [trace])
    assert result["failed"] == "more memory than the 0.1 GiB it was given"


def test_the_widgets_benchmark_moves_the_slider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    from benchmarks import widgets

    monkeypatch.setattr(widgets, "MOVES", 3)
    file = tmp_path / "sizes.parquet"
    assert widgets.write_workload(file, 2000) == pytest.approx(2000, rel=0.05)
    assert len(widgets.in_kernel(file)) == 3
    _, body = SECTIONS["widgets"](
        {"items": 2000, "limit_ms": 250.0, "rows": [{"what": "browser", "missing": "none"}, widgets._row("k", [1.0])]}
    )
    assert "| browser | none |" in body
