"""Calls over several GPUs read back: tables, sentences and the notebook's cells, of the recordings."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from workbench import parallel
from workbench.cli import app
from workbench.errors import WorkbenchError
from workbench.models import model_facts
from workbench.parallel import ARMS, RESULT_FILE, ParallelRun, find_parallel, read_parallel, trace_ranks
from workbench.run import RECORDINGS
from workbench.views import parallel as views
from workbench.views import report, theme

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_capture_boundary.ipynb"
GLM, ERNIE = RECORDINGS / "parallel_glm4_1v", RECORDINGS / "parallel_ernie45_vl"


@pytest.fixture(scope="module")
def glm() -> ParallelRun:
    return read_parallel(GLM)


@pytest.fixture(scope="module")
def ernie() -> ParallelRun:
    return read_parallel(ERNIE)


def changed(run: ParallelRun, rank: int, call: int, **fields: Any) -> ParallelRun:
    """The run with one rank's share of one call changed."""
    calls = list(run.ranks[rank].calls)
    calls[call] = msgspec.structs.replace(calls[call], **fields)
    ranks = list(run.ranks)
    ranks[rank] = msgspec.structs.replace(ranks[rank], calls=calls)
    return msgspec.structs.replace(run, ranks=ranks)


# The tables ---------------------------------------------------------------------------------------------------------


def test_a_sample_over_several_gpus_is_the_slowest_ranks(glm: ParallelRun) -> None:
    first, second = (rank.calls[2].wall_us["graph_ranks"] for rank in glm.ranks)
    assert parallel.samples(glm, 2, "graph_ranks") == [max(pair) for pair in zip(first, second, strict=True)]
    alone = parallel.samples(glm, 2, "graph_one")
    assert sorted(alone) == sorted(value for rank in glm.ranks for value in rank.calls[2].wall_us["graph_one"])


def test_times_are_computed_from_the_samples(glm: ParallelRun) -> None:
    rows = parallel.times(glm)
    assert [row["arm"] for row in rows[:4]] == ["graph, 2 GPUs", "graph, 1 GPU", "eager, 2 GPUs", "eager, 1 GPU"]
    assert len(rows) == len(glm.calls) * len(ARMS)
    together, alone = rows[8:10]
    assert together["items"] == "336x336*8"
    assert together["median ms"] == pytest.approx(np.median(parallel.samples(glm, 2, "graph_ranks")) / 1e3)
    assert alone["P99 ms"] == pytest.approx(np.percentile(parallel.samples(glm, 2, "graph_one"), 99) / 1e3)
    assert together["vs 1 GPU"] == pytest.approx(float(str(alone["median ms"])) / float(str(together["median ms"])))
    assert alone["vs 1 GPU"] is None


def test_calls_are_named_as_they_are_given(glm: ParallelRun) -> None:
    from workbench.commands.parallel import parse_calls

    titles = parallel.call_titles(glm)
    assert titles == ["336x336", "336x336*2", "336x336*8", "224x224,896x896,336x336,560x560"]
    assert parse_calls(titles, "glm4_1v") == (glm.calls, "image")
    videos = msgspec.structs.replace(glm, modality="video", calls=[[(4, 16, 16)]])
    assert parallel.call_titles(videos) == ["224x224x8"]
    assert parse_calls(parallel.call_titles(videos), "glm4_1v") == (videos.calls, "video")


def test_recorded_outputs_have_one_gpus_bits_where_they_have_its_replays(glm: ParallelRun) -> None:
    """A share in another budget than the whole call has other bits, within rounding; the same replays the same bits."""
    rows = parallel.shares(glm)
    assert [row["same bits"] for row in rows] == [row["same replays"] for row in rows] == [True, False, False, True]
    assert parallel.agrees(glm)
    text = parallel.judgement(glm)
    assert "in 2 of 4 calls, exactly those with one GPU's replays" in text
    assert "within what rounding may do" in text


@pytest.mark.parametrize("wrong", [0.2, None])
def test_outputs_beyond_rounding_are_said(glm: ParallelRun, wrong: float | None) -> None:
    broken = changed(glm, 1, 3, relative_rms=wrong, equal=False)
    assert not parallel.agrees(broken)
    text = parallel.judgement(broken)
    assert ("not finite" in text) == (wrong is None)
    assert ("beyond what rounding may do" in text) == (wrong is not None)
    assert "exactly those" not in text


def test_another_budget_is_another_replay(glm: ParallelRun) -> None:
    batch = glm.ranks[0].calls[3].batches[0]
    other = changed(glm, 0, 3, batches=[msgspec.structs.replace(batch, budget=2048)])
    assert parallel.same_replays(other) == [True, False, False, False]


def test_exchanges_add_up_to_the_traces(ernie: ParallelRun) -> None:
    ranks, doubts = trace_ranks(ERNIE, ernie)
    assert doubts == []
    assert ranks is not None
    rows: list[dict[str, Any]] = parallel.exchanges(ernie, ranks)
    for clock in ranks.clocks:
        own = [row for row in rows if row["rank"] == clock.rank]
        assert [row["call"] for row in own] == list(range(len(ernie.calls)))
        assert sum(row["all-reduces"] + row["all-gathers"] for row in own) == clock.collectives
        assert sum(row["exchange ms"] + row["waiting ms"] for row in own) == pytest.approx(clock.total_us / 1e3)
    replays = [len(share.batches) for share in ernie.ranks[0].calls]
    # Two all-reduces a layer in every replay.
    assert [row["all-reduces"] for row in rows[::2]] == [2 * ernie.ranks[0].model.depth * count for count in replays]


# In words -----------------------------------------------------------------------------------------------------------


def test_what_two_gpus_gain_in_words(glm: ParallelRun) -> None:
    rows: list[dict[str, Any]] = parallel.times(glm)
    text = views.gain(glm, rows)
    best = max((row for row in rows if row["arm"] == "graph, 2 GPUs"), key=lambda row: float(row["vs 1 GPU"]))
    assert f"By graphs `336x336*8` takes {best['median ms']:.2f} ms over 2 GPUs" in text
    assert f"**{best['vs 1 GPU']:.2f} times as fast**" in text
    assert "Slower than on one: `336x336` (0.92)." in text
    assert "rank 1, with 0 of 1 items, waits 7.76 ms" in views.loads(glm, parallel.shares(glm))


def test_shared_weights_are_slower_and_the_trace_says_why(ernie: ParallelRun) -> None:
    rows: list[dict[str, Any]] = parallel.times(ernie)
    assert all(row["vs 1 GPU"] < 1 for row in rows if row["vs 1 GPU"] is not None)
    assert "**slower than one on every call**" in views.gain(ernie, rows)
    ranks, _ = trace_ranks(ERNIE, ernie)
    assert ranks is not None
    text = views.why(ernie, rows, parallel.exchanges(ernie, ranks))
    assert "64 to 192 all-reduces and 37 to 111 all-gathers" in text
    assert "times as long as the whole call on one GPU" in text
    assert "their loads are equal" in views.loads(ernie, parallel.shares(ernie))
    assert "its 606 collectives allow -8.4 to 7.8" in views.clock(parallel.clocks(ranks))


def test_published_ratios_stand_beside_ours(glm: ParallelRun, ernie: ParallelRun) -> None:
    rows: list[dict[str, Any]] = parallel.beside_published(glm)
    assert rows[0]["eager over graph, mean"] == pytest.approx(6.01 / 2.24)
    eager, graph = (np.mean(parallel.samples(glm, 2, arm)) for arm in (ARMS[2], ARMS[0]))
    assert rows[3]["eager over graph, mean"] == pytest.approx(eager / graph)
    assert {row["GPUs"] for row in rows[1:]} == {"2 NVIDIA H200"}
    text = views.published(rows)
    assert "vLLM pull request 40576 reports on 2 RTX 4090" in text
    assert parallel.beside_published(ernie) == []


def test_figures_draw_every_row(glm: ParallelRun) -> None:
    rows: list[dict[str, Any]] = parallel.times(glm)
    figure = views.times(rows)
    assert [bar.name for bar in figure.data] == list(parallel.arm_titles(glm).values())
    assert [value for bar in figure.data for value in bar.x] == [
        row["median ms"] for arm in parallel.arm_titles(glm).values() for row in rows if row["arm"] == arm
    ]
    assert all(
        a + b == pytest.approx(row["P99 ms"])
        for a, b, row in zip(figure.data[0].x, figure.data[0].error_x.array, rows[::4], strict=True)
    )
    ranks, _ = trace_ranks(GLM, glm)
    assert ranks is not None
    exchanged: list[dict[str, Any]] = parallel.exchanges(glm, ranks)
    exchange, waiting = views.exchanges(exchanged).data
    assert list(waiting.x) == [row["waiting ms"] for row in exchanged]
    assert len(exchange.y) == 8


# The verb -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [GLM, ERNIE], ids=["data", "weights"])
def test_a_folder_reads_back_whole_in_80_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["ranks", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    tables = done.stdout.split("Outputs of 2 GPUs")[0]
    assert all(len(line.rstrip()) <= 80 for line in tables.splitlines())
    for row in parallel.times(read_parallel(folder)):
        assert f"{row['median ms']:.2f}" in tables
    assert done.stdout == (folder / "table.txt").read_text("utf-8")


def test_the_verb_ends_with_1_beyond_rounding(glm: ParallelRun, tmp_path: Path) -> None:
    shutil.copytree(GLM, tmp_path / "ranks")
    broken = changed(glm, 0, 1, eager_rms=0.5)
    (tmp_path / "ranks" / RESULT_FILE).write_bytes(msgspec.json.encode(broken))
    done = CliRunner().invoke(app, ["ranks", str(tmp_path / "ranks"), "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["agrees"] is False
    assert len(found["traced"]["clocks"]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "has no parallel.json"),
        ({"schema_version": 9}, "schema version 9"),
        ({"ranks": []}, "does not hold two ranks"),
        ({"calls": []}, "does not hold two ranks"),
    ],
)
def test_a_folder_that_is_none(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    if change:
        stored = json.loads((GLM / RESULT_FILE).read_text("utf-8")) | change
        (tmp_path / RESULT_FILE).write_text(json.dumps(stored), "utf-8")
    with pytest.raises(WorkbenchError, match=message):
        read_parallel(tmp_path)
    assert isinstance(CliRunner().invoke(app, ["ranks", str(tmp_path)]).exception, WorkbenchError)


@pytest.mark.parametrize(
    "fields",
    [
        {"wall_us": {}},
        {"wall_us": {arm: [] for arm in ARMS}},
        {"wall_us": {arm: [1.0] for arm in ARMS}},
        {"gathered_rows": 0, "tokens": 0},
        {"items": []},
    ],
    ids=["no arm", "no sample", "fewer samples", "nothing gathered", "replays of no item"],
)
def test_an_arm_that_is_missing_is_refused(glm: ParallelRun, fields: dict[str, Any], tmp_path: Path) -> None:
    broken = changed(changed(glm, 1, 2, **fields), 0, 2, gathered_rows=fields.get("gathered_rows", 576))
    (tmp_path / RESULT_FILE).write_bytes(msgspec.json.encode(broken))
    with pytest.raises(WorkbenchError, match="every call in every arm"):
        read_parallel(tmp_path)


def test_a_trace_outside_its_folder_is_refused(glm: ParallelRun, tmp_path: Path) -> None:
    ranks = [msgspec.structs.replace(rank, trace="../../other.json.gz") for rank in glm.ranks]
    (tmp_path / RESULT_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(glm, ranks=ranks)))
    with pytest.raises(WorkbenchError, match="measure it again"):
        read_parallel(tmp_path)


# The notebook -------------------------------------------------------------------------------------------------------


def shown_by_cells(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Run the notebook's cells on several GPUs with nothing else."""
    bundles: list[Mapping[str, Any]] = []
    monkeypatch.setattr(theme, "publish", bundles.append)
    names: dict[str, Any] = {"theme": theme, "note_source": report.note_source, "facts": model_facts(model)}
    names["subject"] = SimpleNamespace(folder=folder)
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = [text for cell in cells if cell["cell_type"] == "code" and "together" in (text := "".join(cell["source"]))]
    assert len(code) == 2
    for text in code:
        exec(compile(text, NOTEBOOK.name, "exec"), names)
    return bundles


@pytest.mark.parametrize(("model", "published"), [("glm4_1v", 1), ("ernie45_vl", 0)])
def test_the_notebook_draws_the_recording(
    model: str, published: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles = shown_by_cells(model, tmp_path, monkeypatch)
    assert [bundle["text/plain"] for bundle in bundles if theme.PLOTLY_MIME in bundle] == [
        "A call over several GPUs and on one",
        "Inside the collectives",
    ]
    said = " ".join(bundle["text/markdown"] for bundle in bundles if "text/markdown" in bundle)
    assert said.count("reports on 2 RTX 4090") == published
    assert not re.search(r"\bnan\b|None", said)


def test_the_notebook_says_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "RECORDINGS", tmp_path)
    (bundle,) = shown_by_cells("glm4_1v", tmp_path, monkeypatch)
    assert "No call of GLM-4.1V over several GPUs is recorded here" in bundle["text/markdown"]
    assert find_parallel("glm4_1v") is None


def test_a_run_of_the_cpu_has_outputs_and_no_times(
    glm: ParallelRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = msgspec.structs.replace(glm, replay="static_replay")
    shutil.copytree(GLM, tmp_path / "own")
    (tmp_path / "own" / RESULT_FILE).write_bytes(msgspec.json.encode(static))
    bundles = shown_by_cells("glm4_1v", tmp_path / "own", monkeypatch)
    assert [bundle for bundle in bundles if theme.PLOTLY_MIME in bundle] == []
    said = " ".join(bundle["text/markdown"] for bundle in bundles if "text/markdown" in bundle)
    assert "exactly those with one GPU's replays" in said
    assert " ms" not in said
    text = CliRunner().invoke(app, ["ranks", str(tmp_path / "own")], catch_exceptions=False).stdout
    assert "static replay on the CPU: times mean nothing and are left out" in text
    assert "waiting" not in text
