"""README: its tables come from the recordings, the notebooks and the benchmarks, and are current."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from tests.runs import make_run
from workbench.files import write_json
from workbench.run import RUN_FILE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workbench_readme", ROOT / "scripts" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_readme_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_tables_name_the_recordings_own_numbers(readme: ModuleType, tmp_path: Path) -> None:
    run = make_run()
    write_json(tmp_path / "workbench" / "recordings" / "base" / RUN_FILE, run)
    served, graph = (
        np.mean([np.mean(t.wall_us) for t in run.timings if t.arm == arm]) / 1000 for arm in ("eager_served", "graph")
    )
    row = readme.measured(tmp_path).splitlines()[2]
    assert "NVIDIA H200, vllm 0.33.0" in row
    assert f"| {served:.2f} |" in row
    assert f"| {graph:.2f} | {served / graph:.2f}x |" in row


def test_an_arm_that_did_not_run_has_no_number(readme: ModuleType, tmp_path: Path) -> None:
    run = make_run()
    timings = [timing for timing in run.timings if timing.arm != "eager_fallback"]
    write_json(tmp_path / "workbench" / "recordings" / "base" / RUN_FILE, msgspec.structs.replace(run, timings=timings))
    assert "| not run |" in readme.measured(tmp_path)


def test_headlines_are_the_recordings_own(readme: ModuleType, tmp_path: Path) -> None:
    assert "No recording" in readme.found(tmp_path)
    told = readme.found(ROOT)
    folder = ROOT / "workbench" / "recordings"
    summary = json.loads((folder / "served_ernie45_vl-mixed" / "summary.json").read_text())
    for run in summary["runs"]:
        mean = next(m["mean"] for m in run["vllm"]["measures"] if m["name"] == "encoder_forward")
        assert f"{run['arm']} {mean / 1e3:.2f} ms" in told
    case = json.loads((folder / "variants_ernie45_vl" / "ladder.json").read_text())["cases"][1]
    for column in case["columns"]:
        if column["name"] in ("graph", "all variants"):
            assert f"{np.mean(column['wall_us']) / 1e3:.2f} ms" in told


def test_each_notebook_has_its_title_and_its_sentence(readme: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    source = ["# Title | one\n", "\n", "Where does an image's\n", "time go? More text.\n", "\n", "Next."]
    notebook = {"cells": [{"cell_type": "markdown", "source": source}]}
    (tmp_path / "notebooks" / "01_a.ipynb").write_text(json.dumps(notebook), "utf-8")
    row = readme.notebooks(tmp_path).splitlines()[2]
    assert row == "| [01_a](notebooks/01_a.ipynb) | Title \\| one | Where does an image's time go? |"
    source[4:4] = ["This notebook says so.\n"]
    (tmp_path / "notebooks" / "01_a.ipynb").write_text(json.dumps(notebook), "utf-8")
    assert readme.notebooks(tmp_path).splitlines()[2].endswith("| This notebook says so. |")


def test_only_regions_change_and_a_second_time_nothing(readme: ModuleType, tmp_path: Path) -> None:
    text = "before 1\n<!-- generated: benchmarks -->\nold 2\n<!-- end -->\nafter 3\n"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results.md").write_text("| new \\1 |\n\n", "utf-8")
    once = readme.regenerate(text, tmp_path)
    assert once == text.replace("old 2", "| new \\1 |")
    assert readme.regenerate(once, tmp_path) == once
    with pytest.raises(KeyError):
        readme.regenerate(text.replace("benchmarks", "unknown"), tmp_path)
