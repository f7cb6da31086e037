"""The verb `workload`, and limits from a checkpoint's folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.errors import WorkbenchError
from workbench.grids import largest_image, to_grids, with_limits
from workbench.models import model_facts
from workbench.presets import PRESETS

GLM = model_facts("glm4_1v")


def run(*arguments: str) -> Any:
    """Run the verb with --json; return what it prints, decoded."""
    made = CliRunner().invoke(app, ["workload", *arguments, "--json"], catch_exceptions=False)
    assert made.exit_code == 0
    return json.loads(made.stdout)


def test_without_a_source_the_presets_are_listed() -> None:
    assert [preset["name"] for preset in run()] == list(PRESETS)


def test_a_summary_and_the_planners_file(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    made = run("{(224, 224, 1): 1}", "--requests", "10", "--grouping", "4", "--out", str(out))
    assert (made["groups"], made["images"], made["tokens"]["sum"]) == (3, 10, 640)
    assert json.loads(out.read_text()) == [[64] * 4, [64] * 4, [64] * 2]


def test_calls_of_images_and_videos_are_written_apart(tmp_path: Path) -> None:
    """A call of vLLM's encoder holds one modality, and the planner's file has no modality to tell them by."""
    out = tmp_path / "calls.json"
    made = run("glm-mixed", "--model", "glm4_1v", "--out", str(out))
    requests = run("glm-mixed", "--model", "glm4_1v", "--grouping", "request")
    assert made["groups"] == requests["groups"] == len(json.loads(out.read_text())) > 500
    videos = {256, 1536}
    assert not any(videos & set(call) and set(call) - videos for call in json.loads(out.read_text()))


def test_the_planner_reads_what_the_workload_writes(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    run("small-many", "--grouping", "request", "--out", str(out))
    arguments = ["plan", "--calls", str(out), "--budgets", "128,256", "--max-items", "4", "--json"]
    planned = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(planned.stdout)["totals"]["tokens"] == run("small-many")["tokens"]["sum"]


def test_scheduler_options_reach_the_model() -> None:
    stream = ["pull-request", "--grouping", "scheduler", "--text-tokens", "0", "--batched-tokens", "640"]
    assert run(*stream, "--encoder-budget", "128")["items_per_group"]["max"] == 2
    slow = run(*stream, "--rate", "0.001", "--step-ms", "1")
    assert (slow["groups"], slow["items_per_group"]["max"]) == (1000, 1)


def test_a_seed_changes_what_it_is_of() -> None:
    two = "{(224, 224, 1): 0.5, (448, 448, 1): 0.5}"
    assert len({run(two, "--seed", seed)["tokens"]["sum"] for seed in ("0", "1", "2")}) > 1
    assert run(two)["source"] == run(two, "--seed", "0")["source"]
    stream = ["pull-request", "--grouping", "scheduler", "--rate", "20", "--step-ms", "50"]
    assert len({run(*stream, "--seed", seed)["groups"] for seed in ("1", "2", "3")}) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no workload"),
        (["mixed", "--model", "gpt"], "unknown model"),
        (["mixed", "--grouping", "sometimes"], "grouping 'sometimes' is not"),
        (["mixed", "--grouping", "0"], "not at least 1"),
        (["{(224, 224, 1): 1}", "--requests", "0"], "0 requests"),
        (["{(224, 224, 1): 1}", "--limit", "1"], "is not JSON like"),
        (["mixed", "--seed", "7"], "--seed has no effect on 'mixed'"),
        (["mixed", "--seed", "0", "--grouping", "scheduler"], "--seed has no effect"),
        (["mixed", "--requests", "10"], "--requests has no effect"),
        (["{(224, 224, 8): 1}"], "takes no video here"),
        (["mixed", "--processor", "/nowhere"], "has neither preprocessor_config.json"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    made = CliRunner().invoke(app, ["workload", *arguments])
    assert isinstance(made.exception, WorkbenchError)
    assert message in str(made.exception)
    assert made.stdout == ""


def folder(path: Path, **files: Any) -> Path:
    """Write JSON files."""
    path.mkdir(exist_ok=True)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_limits_of_a_checkpoints_own_processor(tmp_path: Path) -> None:
    size = {"shortest_edge": 12_544, "longest_edge": 9_633_792}
    separate = folder(tmp_path / "a", preprocessor_config={"size": size})
    together = folder(
        tmp_path / "b", processor_config={"image_processor": {"size": size}, "video_processor": {"fps": 2}}
    )
    old = folder(tmp_path / "c", preprocessor_config={"min_pixels": 12_544, "max_pixels": 9_633_792})
    for where in (separate, together, old):
        facts = with_limits(GLM, where)
        assert facts.limits["image"].max_pixels == 9_633_792
        assert facts.limits["video"] == GLM.limits["video"]
        assert largest_image(facts) < largest_image(GLM)
    video = folder(separate, video_preprocessor_config={"size": {"shortest_edge": 12_544, "longest_edge": 1_000_000}})
    sizes = np.array([[1920, 1080, 16]], np.int32)
    assert to_grids(sizes, with_limits(GLM, video)).tokens[0] < to_grids(sizes, GLM).tokens[0]


@pytest.mark.parametrize(
    "size", [{"shortest_edge": "x", "longest_edge": 5}, {"shortest_edge": 9, "longest_edge": 5}, {"longest_edge": 5}]
)
def test_limits_that_are_no_areas(tmp_path: Path, size: dict[str, Any]) -> None:
    with pytest.raises(WorkbenchError, match="are no areas"):
        with_limits(GLM, folder(tmp_path, preprocessor_config={"size": size}))


def test_the_verb_takes_a_processor(tmp_path: Path) -> None:
    path = folder(tmp_path, preprocessor_config={"size": {"shortest_edge": 12_544, "longest_edge": 100_352}})
    made = run("{(224, 224, 1): 1, (2000, 2000, 1): 1}", "--model", "glm4_1v", "--processor", str(path))
    assert made["tokens"]["max"] == 64
