"""The tables of notebook 01, on the shipped H200 recordings and on planted cases."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest

from tests.ladders import write_ladder
from tests.runs import make_run
from workbench import explain
from workbench.capturable import find_ladder
from workbench.errors import WorkbenchError
from workbench.explain import Subject, Traced
from workbench.files import write_json
from workbench.published import ERNIE_PULL_REQUEST
from workbench.run import (
    ARM_TITLES,
    ARMS,
    RECORDED,
    RUN_FILE,
    SOURCE_VARIABLE,
    UNNAMED_PHASE,
    load_recording,
    recording_folder,
)
from workbench.stats import summary
from workbench.views import boundary

RECORDING = "ernie45_vl-224"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return explain.open_subject(recording_folder(RECORDING))


@pytest.fixture(scope="module")
def arms(subject: Subject) -> list[Traced]:
    return [explain.traced(subject, arm) for arm in ARMS]


def cell(table: pd.DataFrame, row: object, column: str) -> float:
    """One number of a table."""
    return float(table[column].to_dict()[row])


def test_speed_is_computed_from_the_stored_samples(subject: Subject) -> None:
    table = explain.speed(subject.run).set_index("arm")
    samples = {timing.arm: timing.wall_us for timing in subject.run.timings}
    assert table.loc["graph", "median ms"] == pytest.approx(summary(samples["graph"]).median / 1e3)
    expected = np.median(samples["eager_served"]) / np.median(samples["graph"])
    assert table.loc["graph", "vs served"] == pytest.approx(expected)
    assert np.isnan(cell(table, "eager as served", "vs served"))


def test_the_recording_meets_what_the_issue_asks(subject: Subject, arms: list[Traced]) -> None:
    """Graph at least four times eager as served; one kernel count; eager's busy time within 2 % between runs."""
    table = explain.speed(subject.run).set_index("arm")
    assert cell(table, "graph", "vs served") >= 4
    assert explain.replay_kernels(arms[2])["kernels"].nunique() == 1
    busy = [row.busy_us for row in arms[0].analysis.windows]
    assert max(busy) / min(busy) < 1.02


def test_parts_of_a_call_add_up(arms: list[Traced]) -> None:
    table = explain.where_time_goes(arms)
    parts = [column for column in table if str(column).endswith(" us") and column != "window us"]
    assert table[parts].sum(axis=1).to_numpy() == pytest.approx(table["window us"].to_numpy(), abs=1e-6)


def test_a_trace_that_is_cut_off_is_not_explained(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recording_folder(RECORDING), folder)
    trace = folder / "traces" / "graph.ranges-cuda.json.gz"
    trace.write_bytes(trace.read_bytes()[:-2000])
    with pytest.raises(WorkbenchError, match="cut off before its end"):
        explain.traced(explain.open_subject(folder), "graph")


def test_failed_arms_are_listed_with_their_cause() -> None:
    run = load_recording("ernie45_vl-mixed-2048")
    table = explain.speed(run)
    failed = table[table["failed"].notna()]
    assert set(failed["failed"]) == {"D1"}
    assert set(failed["arm"]) == {"graph"}
    assert failed["median ms"].isna().all()
    assert (table[table["failed"].isna()]["median ms"] > 0).all()


def test_the_boundary_counts_the_resampler_outside(subject: Subject, arms: list[Traced]) -> None:
    table = explain.graph_boundary(subject.run, arms[2]).set_index("phase")
    assert table["share"].sum() == pytest.approx(1)
    assert list(table.index[table["in the graph"]]) == ["replay"]
    assert table.loc["postprocess", "syncs"] == 1
    assert table.loc["replay", "launches"] == 1
    assert table.index[-1] == UNNAMED_PHASE


def test_the_fallback_waits_46_times(subject: Subject, arms: list[Traced]) -> None:
    """D5, by stage: once per block's attention and the rest before the blocks and in the resampler."""
    ledger = explain.sync_ledger(
        [explain.traced(subject, "eager_served", "cpu"), explain.traced(subject, "eager_fallback", "cpu"), arms[2]]
    )
    waits = ledger.groupby("arm")["syncs"].sum()
    assert waits["eager as served"] == 0
    assert waits["eager fallback"] == 46
    attention = ledger[(ledger["arm"] == "eager fallback") & (ledger["where"] == "blocks: attention")]
    assert attention["syncs"].item() == subject.run.model.depth


@pytest.mark.parametrize(
    ("phase", "title"),
    [
        ("vision_model.blocks.7.attn.proj", "blocks: attention"),
        ("visual.blocks.0.mlp", "blocks: MLP"),
        ("vision_model.blocks.31", "blocks: residual adds"),
        ("resampler_model.spatial_norm", "resampler"),
        ("visual.merger.proj", "merger"),
        ("vision_model.patch_embed", "before the blocks"),
        ("call#3", "the call itself"),
        ("postprocess", "postprocess"),
    ],
)
def test_stages(phase: str, title: str) -> None:
    assert explain.stage(phase) == title


def test_timeline_holds_every_gpu_op_of_the_window(arms: list[Traced]) -> None:
    for one in arms:
        table = explain.timeline(one, 0)
        assert len(table[table["lane"] == "GPU"]) == one.analysis.windows[0].gpu_ops
        assert (table["start_us"] >= 0).all()
    with pytest.raises(WorkbenchError, match="no call 9"):
        explain.timeline(arms[0], 9)


def test_gap_totals_equal_the_analysis(arms: list[Traced]) -> None:
    windows = {ARM_TITLES[one.arm]: len(one.analysis.windows) for one in arms}
    table = explain.gap_summary(explain.gap_lengths(arms), windows).set_index(["arm", "kind"])
    total = arms[0].analysis.total
    launch = cell(table, ("eager as served", "launch gap"), "total us per call")
    assert launch * len(arms[0].analysis.windows) == pytest.approx(total.launch_gap_us)


def test_published_rows_stand_beside_the_run(subject: Subject) -> None:
    table = explain.beside_published(subject.run, ERNIE_PULL_REQUEST)
    assert list(table["GPU"]) == ["H100 80GB"] * 2 + ["NVIDIA H200"] * 3
    assert table.iloc[1]["mean speed-up"] == pytest.approx(20.19 / 5.33)


def test_which_runs_can_be_explained(monkeypatch: pytest.MonkeyPatch, subject: Subject, tmp_path: Path) -> None:
    monkeypatch.delenv(SOURCE_VARIABLE, raising=False)
    shipped = explain.explainable()
    assert list(shipped) == ["ernie45_vl", "glm4_1v"]
    assert shipped["ernie45_vl"] == subject.folder
    monkeypatch.setenv(SOURCE_VARIABLE, RECORDED)
    assert explain.explainable() == shipped
    own = tmp_path / "mine"
    own.symlink_to(recording_folder("glm4_1v"))
    monkeypatch.setenv(SOURCE_VARIABLE, str(own))
    assert explain.explainable() == {"glm4_1v": own}
    assert (explain.open_subject(own).kind, subject.kind) == ("live", "recorded")
    monkeypatch.setenv(SOURCE_VARIABLE, "nowhere")
    with pytest.raises(WorkbenchError, match="nowhere is not a run folder"):
        explain.explainable()


def test_a_folder_of_a_ladder_alone_stands_beside_the_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = write_ladder(tmp_path, "glm4_1v")
    monkeypatch.setenv(SOURCE_VARIABLE, str(tmp_path))
    found = explain.explainable()
    assert list(found) == ["glm4_1v"]
    assert found["glm4_1v"].parent == recording_folder(RECORDING).parent
    assert find_ladder("glm4_1v", found["glm4_1v"]) == mine
    write_ladder(tmp_path, "unknown_vl")
    with pytest.raises(WorkbenchError, match="a ladder of unknown_vl, of which no run ships"):
        explain.explainable()


def test_a_run_of_a_cpu_has_nothing_to_explain(tmp_path: Path) -> None:
    write_json(tmp_path / RUN_FILE, make_run("small", replay="static_replay"))
    with pytest.raises(WorkbenchError, match="run small was captured on a CPU"):
        explain.open_subject(tmp_path)


def test_agreement_is_said(subject: Subject) -> None:
    assert explain.agreement(subject.run, 0) == "The graph's outputs equal eager's bit for bit."
    glm = load_recording("glm4_1v")
    row = next(row for row in glm.equality if row.baseline == "eager_served")

    def told(**changes: object) -> str:
        planted = msgspec.structs.replace(row, bit_equal=False, **changes)
        return explain.agreement(msgspec.structs.replace(glm, equality=[planted]), row.call)

    assert "differ from eager's by a relative RMS of 0.84" in told(relative_rms=0.841)
    assert "not finite" in told(relative_rms=None, finite=False)
    assert explain.agreement(glm, 7) == "The outputs were not compared."


def test_a_call_is_explained_alone() -> None:
    """GLM's recording holds a video and an image."""
    glm = explain.open_subject(recording_folder("glm4_1v"))
    assert explain.one_image(glm.run) == 1
    assert [explain.call_title(call) for call in glm.run.calls] == [
        "one video of 8 frames of 224 x 224",
        "one image of 224 x 224",
    ]
    both, image = explain.traced(glm, "graph"), explain.traced(glm, "graph", call=1)
    assert [len(one.analysis.windows) for one in (both, image)] == [2, 1]
    assert image.analysis.windows[0].gpu_ops == both.analysis.windows[1].gpu_ops
    with pytest.raises(WorkbenchError):
        explain.traced(glm, "graph", call=7)


def test_recordings_of_a_model_come_longest_first() -> None:
    runs = explain.recorded_runs("ernie45_vl")
    assert {run.name for run in runs} >= {"ernie45_vl-224", "ernie45_vl-mixed"}
    assert [len(run.calls) for run in runs] == sorted((len(run.calls) for run in runs), reverse=True)


def test_a_run_without_traces_says_so(subject: Subject) -> None:
    bare = Subject(msgspec.structs.replace(subject.run, traces=[]), subject.folder, subject.kind, subject.text)
    with pytest.raises(WorkbenchError, match="has no ranges trace of graph"):
        explain.traced(bare, "graph")


def test_figures_draw_every_row(subject: Subject, arms: list[Traced]) -> None:
    speed = explain.speed(subject.run)
    assert list(boundary.speed(speed).data[0].x) == list(speed["median ms"])
    parts = explain.where_time_goes(arms)
    drawn = sum(np.asarray(bar.x, dtype=float) for bar in boundary.where_time_goes(parts).data)
    assert drawn * 1e3 == pytest.approx(parts["window us"].to_numpy())
    lines = {ARM_TITLES[one.arm]: explain.timeline(one) for one in arms}
    figure = boundary.timelines(lines)
    assert sum(len(bar.x) for bar in figure.data) == sum(len(table) for table in lines.values())
    table = explain.profiler_effect(subject.run)
    assert sum(len(bar.x) for bar in boundary.distortion(table).data) == len(table)
    assert len(boundary.by_call(explain.speed(load_recording("ernie45_vl-mixed"))).data) == 2
    kinds = explain.families(arms)
    assert sum(sum(bar.y) for bar in boundary.families(kinds).data) * 1e3 == pytest.approx(
        kinds["GPU us per call"].sum()
    )
