"""The parts of the profiler that need no engine: order, phases, distinct calls, comparison, trace files."""

import gzip
import json
import os
import re
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.files import replacing_folder
from workbench.models import model_facts
from workbench.profiler import (
    PhaseClock,
    RaisedIn,
    Repeats,
    abba,
    distinct_calls,
    equality,
    known_cause,
    pack_trace,
    raised_in,
    recording,
    spans,
)
from workbench.run import ARMS, Call, ConfigRecord
from workbench.workload import Workload

torch = pytest.importorskip("torch")


def workload(*groups: list[tuple[int, int, int]]) -> Workload:
    """A workload of 14-pixel patches, merge 2; frames above 1 are videos."""
    sizes = np.array([size for group in groups for size in group], dtype=np.int32).reshape(-1, 3)
    grids = np.stack([sizes[:, 2], sizes[:, 1] // 14, sizes[:, 0] // 14], axis=1).astype(np.int32)
    offsets = np.cumsum([0, *map(len, groups)])
    tokens = grids.astype(np.int64).prod(axis=1) // 4
    return Workload("mine", "ernie45_vl", "a test", sizes, grids, tokens, offsets)


def test_abba_runs_forwards_then_backwards() -> None:
    served, fallback, graph = ARMS
    assert abba(ARMS, 2) == [served, fallback, graph, graph, fallback, served]
    assert abba((graph,), 3) == [graph] * 3


@given(st.integers(1, 20))
def test_abba_gives_every_arm_the_same_mean_position(pairs: int) -> None:
    order = abba(ARMS, 2 * pairs)
    means = {np.mean([i for i, arm in enumerate(order) if arm == chosen]) for chosen in ARMS}
    assert len(means) == 1


@pytest.mark.parametrize(
    "wrong", [{"timed": 0}, {"warmup": -1}, {"profiled": -1}, {"phases": 0}, {"traced_calls": -1}, {"calls": 0}]
)
def test_repeats_that_measure_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WorkbenchError, match="time at least one"):
        Repeats(**wrong)


def test_phases_add_up_and_inner_time_is_counted_once() -> None:
    waits = []
    clock = PhaseClock(lambda: waits.append(1))
    start = time.perf_counter_ns()
    with clock.span("whole"):
        time.sleep(0.002)
        with clock.span("outer"):
            with clock.span("inner"):
                time.sleep(0.01)
            with clock.span("inner"):
                time.sleep(0.01)
    whole = time.perf_counter_ns() - start
    assert len(waits) == 8  # both ends of four spans
    assert clock.totals["inner"] >= 20e6
    assert clock.totals["outer"] < 10e6
    assert clock.totals["whole"] >= 2e6
    assert sum(clock.totals.values()) <= whole


def test_distinct_calls_keep_order_and_count() -> None:
    small, wide, video = (224, 224, 1), (448, 224, 1), (224, 224, 4)
    calls = distinct_calls(workload([wide], [small, wide], [wide], [], [small, video, wide]))
    assert [(call.modality, call.sizes, call.count) for call in calls] == [
        ("image", [wide], 2),
        ("image", [small, wide], 2),
        ("video", [video], 1),
    ]
    assert calls[1].grids == [(1, 16, 16), (1, 16, 32)]
    assert calls[1].tokens == [64, 128]


def test_distinct_calls_need_an_item() -> None:
    with pytest.raises(WorkbenchError, match="holds no image"):
        distinct_calls(workload([], []))


def test_equality_takes_the_worst_item() -> None:
    eager = [torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.0]])]
    same = equality(0, "eager_served", eager, [item.clone() for item in eager])
    assert (same.bit_equal, same.max_abs, same.relative_rms, same.min_cosine) == (True, 0.0, 0.0, 1.0)
    graph = [eager[0].clone(), torch.tensor([[4.0, 3.0]])]
    differ = equality(2, "eager_fallback", graph, eager)
    assert not differ.bit_equal
    assert differ.max_abs == 1.0
    assert differ.relative_rms == pytest.approx(2**0.5 / 5)
    assert differ.min_cosine == pytest.approx(24 / 25)


def test_equality_reports_values_that_are_not_finite() -> None:
    eager = [torch.ones(2, 2)]
    broken = equality(0, "eager_served", [torch.tensor([[1.0, float("nan")], [1.0, 1.0]])], eager)
    assert (broken.finite, broken.bit_equal, broken.max_abs) == (False, False, None)
    with pytest.raises(WorkbenchError, match="returns 2 items"):
        equality(0, "eager_served", [*eager, *eager], eager)


def annotations(path: Path) -> list[str]:
    """Names of the user annotations of a trace, in time order."""
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def operators(path: Path) -> int:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("cat") == "cpu_op" for event in events)


@pytest.mark.parametrize("activity", ["cpu", "ranges"])
def test_a_recording_holds_the_ranges_after_its_start(tmp_path: Path, activity: str) -> None:
    path = tmp_path / "traces" / "t.json.gz"
    span = spans(cuda=False)
    with recording(path, [activity]) as start:
        with span("warm"):
            torch.ones(2).sum()
        start()
        for name in ("call#0", "call#1"):
            with span(name), span("inner"):
                torch.ones(2).sum()
    names = [name for name in annotations(path) if not name.startswith("ProfilerStep")]
    assert names == ["call#0", "inner", "call#1", "inner"]
    assert (operators(path) > 0) == (activity == "cpu")
    with recording(tmp_path / "again.json.gz", ["cpu"]) as start:  # the restriction to ranges is undone
        start()
        torch.ones(2).sum()
    assert operators(tmp_path / "again.json.gz") > 0


def test_packing_a_trace_drops_host_and_path_and_keeps_every_digit(tmp_path: Path) -> None:
    raw = tmp_path / "secret-place" / "raw.json"
    raw.parent.mkdir()
    raw.write_text(
        '{\n  "schemaVersion": 1,\n  "host_name": "my-box",\n  "traceEvents": [\n'
        '  {"ph": "X", "name": "a\\n b", "ts": 5119663249085.325, "dur": 0.100}\n ],\n'
        f'  "traceName": "{raw}" }}\n'
    )
    before = json.loads(raw.read_text(), parse_float=Decimal)
    pack_trace(raw, tmp_path / "a.json.gz")
    pack_trace(raw, tmp_path / "b.json.gz")
    text = gzip.decompress((tmp_path / "a.json.gz").read_bytes())
    assert b"my-box" not in text
    assert b"secret-place" not in text
    after = json.loads(text, parse_float=Decimal)
    assert after["traceEvents"] == before["traceEvents"]
    assert after["traceName"] == "a.json.gz"
    second = gzip.decompress((tmp_path / "b.json.gz").read_bytes())
    assert re.sub(rb"b\.json", b"a.json", second) == text


def fill_half(target: Path) -> None:
    with replacing_folder(target) as folder:
        (folder / "x").write_text("half")
        raise OSError("the disk went away")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "a"
    with pytest.raises(OSError, match="disk"):
        fill_half(target)
    assert not target.exists()
    assert list(target.parent.iterdir()) == []
    with replacing_folder(target) as folder:
        assert not target.exists()
        (folder / "x").write_text("whole")
    assert (target / "x").read_text() == "whole"


def test_an_occupied_folder_is_kept_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with replacing_folder(tmp_path / "a") as folder:  # an empty one is no obstacle
        (folder / "x").write_text("old")
    with pytest.raises(WorkbenchError, match="not empty"), replacing_folder(tmp_path / "a"):
        pytest.fail("the block ran")
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "a", overwrite=True):
        raise RuntimeError
    assert (tmp_path / "a" / "x").read_text() == "old"
    with replacing_folder(tmp_path / "a", overwrite=True) as folder:
        (folder / "y").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["y"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorkbenchError, match="cannot write"), replacing_folder(tmp_path / "a"):
        pytest.fail("the block ran")


def test_a_target_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(WorkbenchError, match="not a folder"), replacing_folder(tmp_path / "a", overwrite=True):
        pytest.fail("the block ran")
    with pytest.raises(WorkbenchError, match="cannot write"), replacing_folder(tmp_path / "a" / "b"):
        pytest.fail("the block ran")


def test_importing_the_profiler_is_light() -> None:
    code = "import sys, workbench.profiler; print({'torch', 'vllm', 'pandas', 'plotly'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


CONFIG = ConfigRecord(
    requested_budgets=[128],
    requested_max_items=3,
    requested_max_frames=4,
    budgets=[128],
    max_items=3,
    max_frames=4,
)


def call_of(tokens: int, frames: int = 1) -> Call:
    return Call(modality="image", sizes=[(224, 224, frames)], grids=[(frames, 16, 16)], tokens=[tokens])


@pytest.mark.parametrize(
    ("model", "call", "place", "cause"),
    [
        ("ernie45_vl", call_of(129), RaisedIn(("execute", "postprocess_encoder_output")), "D1"),
        ("ernie45_vl", call_of(128), RaisedIn(("execute", "postprocess_encoder_output")), None),
        ("ernie45_vl", call_of(129), RaisedIn(("execute", "encoder_eager_forward")), None),
        ("glm4_1v", call_of(129), RaisedIn(("execute", "postprocess_encoder_output")), None),
        ("glm4_1v", call_of(128, frames=5), RaisedIn(("_run_budget_graph",), "cu_seqlens"), "D4"),
        ("glm4_1v", call_of(128, frames=4), RaisedIn(("_run_budget_graph",), "cu_seqlens"), None),
        ("glm4_1v", call_of(128), RaisedIn(("_run_budget_graph",), "pixel_values"), "D3"),
        ("ernie45_vl", call_of(128), RaisedIn(("_run_budget_graph",), "pixel_values"), None),
    ],
)
def test_a_cause_is_named_by_place_and_sizes(model: str, call: Call, place: RaisedIn, cause: str | None) -> None:
    assert known_cause(model_facts(model), CONFIG, call, place) == cause


def test_the_place_of_an_error_is_read_from_its_traceback() -> None:
    def _run_budget_graph() -> None:
        for key in ("pixel_values", "cu_seqlens"):
            if key == "cu_seqlens":
                raise RuntimeError("whatever")

    with pytest.raises(RuntimeError) as caught:
        _run_budget_graph()
    place = raised_in(caught.value)
    assert place.functions[-1] == "_run_budget_graph"
    assert place.buffer == "cu_seqlens"
