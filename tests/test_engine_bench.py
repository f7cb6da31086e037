"""The engine benchmark: order, time limits, failures and sentences with a stand-in for vLLM; one run of the engine."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.processes import runs
from tests.profiles import make_profile
from workbench import engine_bench
from workbench.budgets import Configuration
from workbench.cli import app
from workbench.costs import SHIPPED, CostModel, read_profile
from workbench.engine_bench import (
    PULL_REQUEST,
    RESULT_FILE,
    EngineBench,
    Setting,
    abba,
    explain,
    lint_errors,
    run_bench,
)
from workbench.errors import WorkbenchError
from workbench.files import read_json, write_json
from workbench.ledger import CallLine, Group, Ledger, read_ledger
from workbench.run import RECORDINGS

# Takes vLLM's arguments and leaves what vLLM leaves: a warm-up call, then all prompts in calls of four images of 224 x
# 224, each a replay where graphs are on. The time of a call is 8,000 us eagerly and 2,000 us by a replay.
STAND_IN = """
import json, os, sys, time
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
graphs = "cudagraph_mm_encoder" in arguments["--compilation-config"]
print("non-default args: ...", flush=True)
mode = os.environ.get("STAND_IN", "")
if mode == "hangs" and graphs:
    time.sleep(60)
if mode == "fails" and graphs:
    sys.exit("RuntimeError: boom")
print("Resolved architecture: X", flush=True)
prompts, pid = int(arguments["--num-prompts"]), os.getpid()
assert sys.stdin.read() == ""
with open(os.environ["WORKBENCH_LEDGER"], "w") as ledger:
    def line(**fields):
        ledger.write(json.dumps(fields | {"pid": pid}) + "\\n")
    line(kind="process", schema_version=1, t=0.0, workbench="0", vllm="0.33.0", device="cuda")
    for number, items in enumerate([1] + [4] * (prompts // 4)):
        group = {"modality": "image", "route": "graph" if graphs else "eager", "grids": [[1, 16, 16]] * items}
        group["tokens"] = [64] * items
        if graphs:
            group["batches"] = [{"items": list(range(items)), "tokens": 64 * items, "budget": 256, "host_us": 9.0}]
        cost = 2000.0 if graphs else 8000.0
        line(kind="call", rank=0, t=1.0, runner="v2", host_us=cost, gpu_us=cost, groups=[group])
if mode != "silent":
    cost = 0.5 if graphs else 2.0
    forward = {"mean": cost, "median": cost, "std": 0.0, "p99.0": 2 * cost}
    made = {"completed": prompts, "failed": 0, "mm_processor_stats": {"encoder_forward_ms": forward}, "config": {}}
    with open(arguments["--output-json"], "w") as result:
        json.dump(made, result)
print("Multimodal Processor Benchmark Results", flush=True)
"""
SETTING = Setting(prompts=16, full=False, arm_seconds=30)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The command that stands in for vLLM's."""
    pytest.importorskip("transformers", reason="the model folder needs transformers")
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    monkeypatch.setattr(engine_bench, "_POLL_SECONDS", 0.02)
    return (sys.executable, str(program))


def run(launcher: tuple[str, ...], out: Path, **options: object) -> EngineBench:
    """Two arms, eager and the pull request's."""
    arms = options.pop("arms", {"eager": None, "graph": PULL_REQUEST})
    setting = options.pop("setting", SETTING)
    return run_bench(setting, arms, out, launcher=launcher, **options)  # type: ignore[arg-type]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True), st.integers(1, 5))
@settings(max_examples=50)
def test_order_meets_a_linear_drift_evenly(names: list[str], repeats: int) -> None:
    order = abba(names, repeats)
    places = {name: [place for place, other in enumerate(order) if other == name] for name in names}
    assert all(len(mine) == repeats for mine in places.values())
    if repeats % 2 == 0:
        assert len({sum(mine) for mine in places.values()}) == 1


def test_arms_are_measured_predicted_and_explained(launcher: tuple[str, ...], tmp_path: Path) -> None:
    shown: list[str] = []
    bench = run(
        launcher,
        tmp_path / "out",
        profile=CostModel(make_profile()),
        repeats=2,
        arms={"eager": None, "graph": PULL_REQUEST, "advised": None},
        progress=lambda what, _: shown.append(what),
    )
    assert [one.arm for one in bench.runs] == ["eager", "graph", "advised", "advised", "graph", "eager"]
    assert all(one.error is None for one in bench.runs)
    eager, graph, advised = bench.runs[:3]
    assert eager.calls is not None
    assert (eager.calls.items, eager.calls.calls, eager.calls.hits) == (16, 4, 0)  # without the warm-up's call
    assert graph.calls is not None
    assert (graph.calls.hits, graph.host_us, graph.gpu_us) == (16, 8000.0, 8000.0)
    assert advised.budgets
    assert bench.runs[3].budgets == advised.budgets
    assert {"imports", "model inspection", "requests"} <= set(eager.stages)
    assert all(one.predicted_us and one.alone_us for one in bench.runs)
    assert read_json(tmp_path / "out" / RESULT_FILE, EngineBench) == bench
    told = "\n".join(explain(bench))
    assert "16 images met in 4 encoder calls, 4.0 a call" in told
    assert "the ledger's sum gives 2.00 ms" in told
    assert "16 of 16 images went through 4 replays, 1.0 a call, 100% full" in told
    assert "graph against eager: 4.00 times as fast" in told
    assert "averages of 2 and 2 runs" in told
    assert any("arm 2 of 6, graph" in what for what in shown)


def test_rounds_are_averaged_and_arms_of_one_encoder_not_compared(launcher: tuple[str, ...], tmp_path: Path) -> None:
    bench = run(launcher, tmp_path / "out", repeats=2)
    last = bench.runs[-1]
    assert last.arm == "eager"
    assert last.vllm is not None
    measures = [msgspec.structs.replace(one, mean=3 * (one.mean or 0.0)) for one in last.vllm.measures]
    slow = msgspec.structs.replace(last, vllm=msgspec.structs.replace(last.vllm, measures=measures))
    assert "graph against eager: 8.00 times as fast" in "\n".join(
        explain(msgspec.structs.replace(bench, runs=[*bench.runs[:-1], slow]))
    )
    without = [
        msgspec.structs.replace(one, calls=msgspec.structs.replace(one.calls, hits=0)) if one.calls else one
        for one in bench.runs
    ]
    told = "\n".join(explain(msgspec.structs.replace(bench, runs=without)))  # as on the CPU engine
    assert "graph and eager ran the same encoder" in told
    assert "times as fast" not in told


def test_a_recorded_run_on_an_h200_is_explained() -> None:
    """Real files: vLLM's mean per request is the ledger's calls shared by their requests, to one per cent."""
    folder = RECORDINGS / "served_ernie45_vl-pull-request"
    setting = Setting(prompts=400)
    ledger, notes = engine_bench.without_warmup(read_ledger(folder / "0-eager.ledger.jsonl"), setting)
    assert notes == []
    assert sum(len(group.tokens) for call in ledger.served() for group in call.groups) == 400
    measured = engine_bench._ingested(folder / "0-eager.vllm.json")
    forward = next(measure for measure in measured.measures if measure.name == "encoder_forward")
    assert forward.mean == pytest.approx(sum(call.host_us for call in ledger.served()) / 400, rel=0.01)
    model = CostModel(read_profile(SHIPPED["ernie45_vl"]))
    eager, alone_eager = engine_bench.price(model, ledger, None, setting)
    graph, alone_graph = engine_bench.price(model, ledger, PULL_REQUEST, setting)
    # What the pull request's figure per request cannot show: alone an image gains far more than in calls of many.
    assert alone_eager / alone_graph > 4 * eager / graph
    assert eager == pytest.approx(forward.mean, rel=0.6)  # the host of another session


def test_recorded_arms_become_one_row_each() -> None:
    benches = engine_bench.recorded("ernie45_vl")
    rows = engine_bench.arms_table(benches)
    assert len(rows) == sum(len(bench.runs) for bench in benches) >= 3
    by_arm = {row["arm"]: row for row in rows if row["workload"] == "pull-request"}
    assert by_arm["eager"]["replays a call"] == 0
    for row in by_arm.values():
        # vLLM's mean per request is the sum over the calls, divided by the requests.
        assert row["mean ms"] == pytest.approx(1e3 * row["encoder s"] / 400, rel=0.03)
    assert engine_bench.recorded("no such model") == []


def test_a_call_lasts_until_the_gpu_is_done() -> None:
    """GLM-4.1V's replays wait for nothing: the host goes on while the GPU still works."""
    (bench,) = (one for one in engine_bench.recorded("glm4_1v") if one.workload == "glm-video")
    eager, graph = bench.runs
    assert graph.host_us is not None
    assert graph.encoder_us is not None
    assert graph.forward is not None
    assert graph.encoder_us == graph.gpu_us
    assert graph.forward.mean == pytest.approx(graph.encoder_us / bench.prompts, rel=0.03)
    assert graph.host_us < 0.3 * graph.encoder_us
    assert eager.encoder_us == eager.host_us
    told = "\n".join(explain(bench))
    assert "graph: 100 videos met in 100 encoder calls" in told
    assert "of which the host needs 2.18 ms to launch it" in told


@pytest.mark.parametrize("name", [path.name for path in sorted(RECORDINGS.glob("served_*"))])
def test_a_folder_reads_back_as_its_explanation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/recordings.md` says how the file is made again."""
    monkeypatch.setenv("COLUMNS", "80")
    folder = RECORDINGS / name
    model = name.removeprefix("served_").partition("-")[0]
    done = CliRunner().invoke(app, ["served", str(folder), "--profile", str(SHIPPED[model])], catch_exceptions=False)
    assert done.exit_code == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout
    assert done.stdout == (folder / "explanation.txt").read_text("utf-8")


def test_a_folder_reads_back_as_it_was_measured(launcher: tuple[str, ...], tmp_path: Path) -> None:
    bench = run(launcher, tmp_path / "out")
    done = CliRunner().invoke(app, ["served", str(tmp_path / "out"), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert msgspec.json.decode(msgspec.json.encode(told["bench"]), type=EngineBench) == bench
    assert told["explanation"] == explain(bench)
    failed = msgspec.structs.replace(bench, runs=[msgspec.structs.replace(bench.runs[0], error="it hung")])
    write_json(tmp_path / "out" / RESULT_FILE, failed)
    done = CliRunner().invoke(app, ["served", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "gave nothing: it hung" in done.stdout


def test_calls_of_many_large_items_are_priced_right_eagerly_and_by_graphs() -> None:
    """Real engine, real traffic: launches do not bound the mixed workload's calls, GPU work does."""
    model = CostModel(read_profile(SHIPPED["ernie45_vl"]))
    rows = engine_bench.arms_table(engine_bench.recorded("ernie45_vl", model))
    mixed = {row["arm"]: row["error"] for row in rows if row["workload"] == "mixed"}
    assert set(mixed) == {"eager", "graph", "advised"}
    assert all(abs(error) < 0.05 for error in mixed.values())
    # Calls that launches bound depend on the host's speed of the day: half as long on one as on another.
    assert all(abs(row["error"]) < 0.6 for row in rows)


def test_a_folder_without_a_result_or_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="has no summary"):
        engine_bench.read_bench(tmp_path)
    (tmp_path / RESULT_FILE).write_text('{"schema_version": 99}')
    with pytest.raises(WorkbenchError, match="schema version 99"):
        engine_bench.read_bench(tmp_path)


@pytest.mark.parametrize(
    ("mode", "seconds", "reason"),
    [
        ("hangs", 3, "ended after 3 s, in its stage model inspection"),
        ("fails", 30, "vLLM ended with 1"),
        ("silent", 30, "vLLM ended with 0"),
    ],
)
def test_an_arm_that_fails_is_said_and_the_others_stay(
    launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seconds: int, reason: str
) -> None:
    monkeypatch.setenv("STAND_IN", mode)
    if mode == "silent":
        with pytest.raises(WorkbenchError, match=reason):
            run(launcher, tmp_path / "out")
        return
    bench = run(launcher, tmp_path / "out", setting=dataclasses.replace(SETTING, arm_seconds=seconds))
    assert bench.runs[0].error is None
    assert reason in str(bench.runs[1].error)
    assert f"Arm graph (run 1) gave nothing: {bench.runs[1].error}." in explain(bench)


def test_the_warm_up_is_what_a_pause_follows() -> None:
    """With 16 to 32 images a request the first two calls or the first three could be it."""
    group = Group(modality="image", route="eager", grids=None, tokens=[1] * 8)
    starts = [0.0, 0.1, 0.2, 5.0, 5.1]
    calls = [CallLine(pid=1, rank=0, t=t, runner="v2", host_us=5e4, groups=[group]) for t in starts]
    ledger = Ledger(path="x", processes=[], managers=[], calls=calls, full=[], lost=[])
    setting = Setting(workload="small-many", prompts=1)
    assert engine_bench.without_warmup(ledger, setting) == (msgspec.structs.replace(ledger, calls=calls[3:]), [])
    short = msgspec.structs.replace(ledger, calls=calls[:2])
    kept, notes = engine_bench.without_warmup(short, setting)
    assert kept == short
    assert "warm-up" in notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setting": Setting(workload="nothing")}, "unknown workload"),
        ({"setting": Setting(workload="glm-video")}, "takes no video"),
        ({"setting": Setting(prompts=0)}, "at least 1"),
        ({"arms": {}}, "no arm"),
        ({"arms": {"eager": None, "best": None}}, "needs a cost profile"),
        ({"arms": {"graph": Configuration((4,), 8)}}, "items"),
        ({"arms": {"best": None, "eager": None}, "profile": CostModel(make_profile())}, "is the first"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    launcher: tuple[str, ...], tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(WorkbenchError, match=message):
        run(launcher, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_occupied_folder_is_refused(launcher: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="not empty"):
        run(launcher, tmp_path)


def test_glms_video_limit_is_named_before_any_gpu_time() -> None:
    """Issue 7's case: with vLLM's default video limit GLM-4.1V's graphs are slower than the eager encoder."""
    default = Setting(model="glm4_1v", video_limit=999)
    assert any("oversized-buffer" in finding for finding in lint_errors(default, PULL_REQUEST))
    assert not any("oversized" in finding for finding in lint_errors(Setting(model="glm4_1v"), PULL_REQUEST))
    assert lint_errors(default, None) == []


def test_the_verb_ends_with_2_on_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine-bench", "--out", str(tmp_path / "o"), "--workload", "nothing"])
    assert isinstance(result.exception, WorkbenchError)


@pytest.mark.parametrize("verb", [["engine-bench"], ["compare", "--workload", "mixed"]])
def test_two_arms_of_one_name_are_refused(verb: list[str], tmp_path: Path) -> None:
    given = ["--config", "graph=128:4", "--config", "graph=64:4", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(app, [*verb, *given])
    assert isinstance(result.exception, WorkbenchError)
    assert "two configurations are called 'graph'" in str(result.exception)
    result = CliRunner().invoke(app, ["engine-bench", "--config", "eager=64:4", "--out", str(tmp_path / "o")])
    assert "two configurations are called 'eager'" in str(result.exception)
    assert not list(tmp_path.iterdir())


# Stands in for vLLM, which ends when asked to, its engine's process, which does not, and the memory they share.
WAITING = """
import os, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
shared = SharedMemory(create=True, size=4096)
print(os.getpid(), engine.pid, shared.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("serve", [False, True], ids=["offline", "server"])
def test_an_arm_ends_with_a_launcher_that_is_killed(tmp_path: Path, serve: bool) -> None:
    pytest.importorskip("transformers", reason="the model folder needs transformers")
    (tmp_path / "waiting.py").write_text(WAITING)
    code = (
        "import sys\nfrom pathlib import Path\nfrom workbench.engine_bench import Setting, run_bench\n"
        "home = Path(sys.argv[1])\n"
        "run_bench(Setting(model='glm4_1v', workload='glm-image', prompts=1, full=False), {'eager': None}, "
        f"home / 'out', serve={serve}, launcher=(sys.executable, str(home / 'waiting.py')))"
    )
    log = tmp_path / "out" / ("0-eager.server.log" if serve else "0-eager.log")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.DEVNULL) as launcher:
        while not (log.is_file() and log.read_text().endswith("\n")):
            assert launcher.poll() is None
            time.sleep(0.05)
        *pids, shared = log.read_text().split()
        memory = Path("/dev/shm") / shared

        def left() -> list[bool]:
            return [*map(runs, pids), memory.exists()]

        assert left() == [True, True, True]
        launcher.kill()
    until = time.monotonic() + 20
    while any(left()) and time.monotonic() < until:
        time.sleep(0.05)
    assert left() == [False, False, False]


@pytest.mark.engine
def test_the_whole_engine_keeps_a_ledger(tmp_path: Path) -> None:
    """vLLM's own benchmark on the CPU engine: its ledger holds exactly the images that its data set draws."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    from workbench.grids import to_grids
    from workbench.ledger import to_workload
    from workbench.presets import PRESETS

    setting = Setting(
        model="glm4_1v",
        workload="small-many",
        prompts=2,
        full=False,
        input_tokens=32,
        output_tokens=2,
        max_model_len=4096,
        arm_seconds=400,
    )
    bench = run_bench(setting, {"graph": Configuration((64, 128, 256), 3)}, tmp_path / "out")
    (one,) = bench.runs
    assert one.error is None
    assert one.notes == []
    served, _ = engine_bench.without_warmup(read_ledger(tmp_path / "out" / "0-graph.ledger.jsonl"), setting)
    sizes = np.array([(width, height, 1) for height, width, _ in PRESETS["small-many"].recipe.buckets], np.int32)
    possible = set(map(tuple, to_grids(sizes, setting.facts).grids.tolist()))
    assert set(map(tuple, to_workload(served, setting.facts).grids.tolist())) <= possible
    assert one.calls is not None
    assert 2 * 16 <= one.calls.items <= 2 * 32
    assert [row.route for row in one.hits] == ["eager"]
    assert one.gpu_us is None
    assert one.forward is not None
    assert one.host_us is not None
    assert one.forward.mean == pytest.approx(one.host_us / setting.prompts, rel=0.5)
    assert any("has no encoder graphs" in sentence for sentence in explain(bench))
    document = json.loads((tmp_path / "out" / "0-graph.vllm.json").read_text())
    assert document["completed"] == 2


def test_short_clips_are_sampled_whole() -> None:
    """At GLM-4.1V's own 2 frames a second the pull request's clip of 8 frames would have none."""
    arguments = Setting(model="glm4_1v", workload="glm-video", prompts=1).engine_arguments((), {})
    assert json.loads(arguments[arguments.index("--media-io-kwargs") + 1]) == {"video": {"fps": 30}}
    images = Setting(model="glm4_1v", workload="glm-image", prompts=1).engine_arguments((), {})
    assert "--media-io-kwargs" not in images


@pytest.mark.engine
def test_vllm_samples_no_frame_of_a_short_clip_and_all_at_its_own_rate() -> None:
    pytest.importorskip("vllm", reason="the engine is not installed")
    from workbench.encoder.engine import require_vllm

    require_vllm()
    from vllm.multimodal import video

    clip = video.VideoSourceMetadata(8, 30.0, 8 / 30)
    for fps, frames in ((2, 0), (engine_bench.CLIP_FPS, 8)):
        asked = video.VideoTargetMetadata(num_frames=-1, fps=fps, max_duration=300)
        assert len(video.DynamicVideoBackend.compute_frames_index_to_sample(clip, asked)) == frames
