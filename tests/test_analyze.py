"""The verb `analyze`: its JSON contract, its words, its exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kineto import Kineto, workload
from workbench.cli import app
from workbench.errors import WorkbenchError

FIELDS = [
    "name", "device", "wall_us", "busy_us", "idle_us", "lead_us", "launch_gap_us", "queue_gap_us",
    "intra_graph_gap_us", "tail_us", "gpu_ops", "kernels", "memcpy_h2d", "memcpy_d2h", "memset", "launches",
    "graph_launches", "syncs", "spilled_ops",
]  # fmt: skip


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def run_json(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workload(2, kernels=4, nodes=12).write(tmp_path_factory.mktemp("trace") / "t.json.gz")


def test_json_has_the_fields_of_the_contract_and_no_others(trace: Path) -> None:
    shown = run_json(trace, "--window", "graph#*")
    assert set(shown) == {"windows", "total", "warnings"}
    assert [row["name"] for row in shown["windows"]] == ["graph#0", "graph#1"]
    for row in shown["windows"]:
        assert set(row) == set(FIELDS)
        assert all(isinstance(row[key], float if key.endswith("_us") else int) for key in FIELDS[1:])
    assert set(shown["total"]) == set(FIELDS[2:])
    assert shown["total"]["gpu_ops"] == 26
    assert shown["warnings"] == []


def test_without_a_window_the_file_is_one(trace: Path) -> None:
    (row,) = run_json(trace)["windows"]
    assert (row["name"], row["lead_us"], row["tail_us"]) == ("whole", 0.0, 0.0)


def test_details(trace: Path) -> None:
    shown = run_json(trace, "--details")
    assert set(shown) == {"windows", "total", "warnings", "kernels", "families", "phases", "replays"}
    assert [row["kernels"] for row in shown["replays"]] == [12, 12]
    assert sum(row["syncs"] for row in shown["phases"]) == shown["total"]["syncs"]


def test_tables_and_sentences(trace: Path) -> None:
    text = run(trace, "--window", "*")
    for expected in ("eager#1", "launch gap", "device_kernel[GemmUniversal]", "Graph replays", "The GPU was busy"):
        assert expected in text


def test_several_ranks(tmp_path: Path) -> None:
    paths = []
    for rank in (1, 0):
        made = Kineto(rank=rank)
        made.kernel(0, 1_000, 1_000 * (rank + 1))
        paths.append(made.write(tmp_path / f"{rank}.json"))
    shown = run_json(*paths)
    assert [(row["rank"], row["busy_us"]) for row in shown["windows"]] == [(0, 1.0), (1, 2.0)]
    assert shown["total"]["busy_us"] == 3.0
    assert "rank 1" in run(*paths)


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    made = Kineto()
    made.annotate("\x1b[2J[red]w[/red]", 0, 9_000)
    made.kernel(0, 1_000, 1_000, "k\x1b]0;title\x07[bold]")
    text = run(made.write(tmp_path / "t.json"), "--window", "*")
    assert "\x1b" not in text
    assert "[red]w" in text


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("", [], "is empty"),
        ("{}", [], "not a Kineto trace"),
        ('[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]', [], "no GPU work"),
        ('{"traceEvents": [{"ph": "X", "cat"', [], "cut off"),
        ('[{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}, {"ph"', [], "cut off before its first GPU"),
        (None, ["--window", "nothing*"], "'eager#0', 'graph#0'"),
    ],
)
def test_bad_input_is_one_sentence(
    trace: Path, tmp_path: Path, content: str | None, arguments: list[str], message: str
) -> None:
    path = trace
    if content is not None:
        path = tmp_path / "bad.json"
        path.write_text(content)
    with pytest.raises(WorkbenchError, match=message):
        run(path, *arguments)


def test_bad_input_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from workbench.cli import main; main()", "analyze", str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("workbench: cannot read")
    assert result.stderr.count("\n") == 1
