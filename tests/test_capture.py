"""The capture on vLLM's real classes (CPU: static replay at depth 2), and the command line around it."""

import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.test_profiler import annotations, operators, workload
from workbench.budgets import Configuration
from workbench.cli import main
from workbench.commands.capture import nsys_line, show
from workbench.errors import WorkbenchError
from workbench.grids import to_grids
from workbench.models import model_facts
from workbench.run import ARMS, UNNAMED_PHASE, Run, load_recording, read_run, recording_names
from workbench.workload import Workload

pytestmark = pytest.mark.engine

pytest.importorskip("vllm", reason="the engine is not installed")

import torch  # noqa: E402 - needs the engine

from workbench.encoder import engine  # noqa: E402
from workbench.encoder.session import EncoderSession, SessionOptions  # noqa: E402
from workbench.profiler import capture, distortions, recording  # noqa: E402

SMALL, WIDE, LARGE = (112, 112, 1), (224, 112, 1), (224, 448, 1)  # 16, 32 and 128 tokens
OPTIONS = SessionOptions(depth=2, width=160, device="cpu")
CONFIGURATION = Configuration((32, 64), 4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, which wait for each other where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three distinct calls; the third holds an item above the largest budget (D1)."""
    out = tmp_path_factory.mktemp("runs") / "small"
    calls = workload([SMALL], [SMALL, WIDE], [SMALL], [LARGE], [WIDE])
    seen: list[tuple[str, float]] = []
    run = capture(
        OPTIONS,
        CONFIGURATION,
        calls,
        out,
        repeats=4,
        warmup=1,
        traced_calls=3,
        max_calls=3,
        progress=lambda what, done: seen.append((what, done)),
    )
    assert run == read_run(out)
    shares = [done for _, done in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


def test_the_run_says_what_it_is(run: Run) -> None:
    assert run.name == "small"
    assert run.replay == "static_replay"
    assert any("static replay" in note for note in run.notes)
    assert not any("had traced its GPU before" in note for note in run.notes)
    assert "the first 3 of 4 distinct calls of the workload were measured; they are 4 of its 5 calls" in run.notes
    assert (run.model.key, run.model.depth, run.model.width, run.model.weights) == (
        "ernie45_vl",
        2,
        160,
        "dummy seed 0",
    )
    assert run.config.budgets == [32, 64]
    assert [cost.budget for cost in run.capture] == [64, 32]
    assert [call.count for call in run.calls] == [2, 1, 1]
    assert run.environment.vllm is not None


def test_timings_are_in_abba_order(run: Run) -> None:
    for call, arms in ((0, ARMS), (1, ARMS), (2, ARMS[:2])):
        timings = [timing for timing in run.timings if timing.call == call]
        assert [timing.arm for timing in timings] == list(arms)
        order = {position: timing.arm for timing in timings for position in timing.order}
        sequence = [order[position] for position in range(len(order))]
        assert sequence == [*arms, *arms[::-1]] * 2
        for timing in timings:
            assert len(timing.wall_us) == len(timing.order) == 4
            assert min(timing.wall_us) > 0
            assert timing.gpu_us == []


def test_every_batch_has_its_budget(run: Run) -> None:
    assert [(batch.call, batch.items, batch.tokens, batch.budget) for batch in run.batches] == [
        (0, [0], 16, 32),
        (1, [0, 1], 48, 64),
    ]
    assert (run.graph_hits, run.graph_misses) == (3, 0)


def test_graph_equals_both_eager_arms(run: Run) -> None:
    assert [(found.call, found.baseline) for found in run.equality] == [
        (call, arm) for call in (0, 1) for arm in ("eager_served", "eager_fallback")
    ]
    for found in run.equality:
        assert found.finite
        assert found.relative_rms is not None
        assert found.relative_rms < 0.02  # bf16 rounding of another batch composition


def test_an_item_above_the_largest_budget_fails_as_d1_and_the_rest_goes_on(run: Run) -> None:
    (failure,) = run.failures
    assert (failure.arm, failure.call, failure.cause) == ("graph", 2, "D1")
    assert "\n" not in failure.message
    assert {timing.arm for timing in run.timings if timing.call == 2} == {"eager_served", "eager_fallback"}


def test_phases_of_a_call_are_named_and_exclusive(run: Run) -> None:
    for call in (0, 1):
        phases = {phase.phase: phase.wall_us for phase in run.phases if phase.call == call}
        assert {"item_specs", "replay_buffers", "buffer_copies", "replay", "clone", UNNAMED_PHASE} <= set(phases)
        assert {len(wall) for wall in phases.values()} == {2}
        assert min(min(wall) for wall in phases.values()) >= 0
    assert not [phase for phase in run.phases if phase.call == 2]


def test_traces_hold_the_named_ranges(folder: Path, run: Run) -> None:
    assert [(trace.arm, trace.activities) for trace in run.traces] == [(arm, ["cpu"]) for arm in ARMS]
    for trace in run.traces:
        names = annotations(folder / trace.file)
        calls = [int(name.split("#")[1]) for name in names if name.startswith(f"{trace.window}#")]
        assert calls == trace.calls == ([0, 1] if trace.arm == "graph" else [0, 1, 2]) * 2
        assert len(trace.wall_us) == len(trace.calls)
        assert names.count("synchronise") == len(calls)
        assert operators(folder / trace.file) > 0
        if trace.arm == "graph":
            assert names.count("replay") == len(calls)
            assert not [name for name in names if "blocks" in name]
        else:
            assert names.count("vision_model.blocks.1.attn") == len(calls)


def test_the_trace_reader_reads_the_traces(folder: Path, run: Run) -> None:
    from workbench.trace import Category, read_trace

    for trace in run.traces:
        read = read_trace(folder / trace.file)
        assert len(read.rows(Category.USER_ANNOTATION)) >= len(trace.calls)
        assert len(read.gpu_rows()) == 0


def test_nothing_else_is_in_the_folder(folder: Path, run: Run) -> None:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"run.json", *(trace.file for trace in run.traces)}
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def glm(*groups: list[tuple[int, int, int]]) -> Workload:
    """A workload of GLM-4.1V by its own resize rule."""
    sizes = np.array([size for group in groups for size in group], dtype=np.int32)
    made = to_grids(sizes, model_facts("glm4_1v"))
    offsets = np.cumsum([0, *map(len, groups)])
    return Workload("glm", "glm4_1v", "a test", sizes, made.grids, made.tokens, offsets)


@pytest.mark.parametrize(
    ("configuration", "item", "cause"),
    [
        (Configuration((256,), 4, 4), (112, 112, 16), "D4"),  # 8 temporal patches where 4 sequences were captured
        (Configuration((100,), 8, 8), (280, 280, 1), "D3"),  # 100 tokens in a budget whose buffers hold 96
    ],
)
def test_known_defects_of_glm_are_named(
    tmp_path: Path, configuration: Configuration, item: tuple[int, int, int], cause: str
) -> None:
    options = SessionOptions(model="glm4_1v", depth=1, width=256, device="cpu", video_limit=1)
    run = capture(options, configuration, glm([item]), tmp_path / "run", repeats=1, warmup=0, profiled_repeats=0)
    assert [(failure.arm, failure.call, failure.cause) for failure in run.failures] == [("graph", 0, cause)]
    assert {timing.arm for timing in run.timings} == {"eager_served", "eager_fallback"}
    assert run.traces == []


def test_the_profilers_distortion_is_reported(run: Run) -> None:
    found = distortions(run)
    assert [(one.arm, one.call) for one in found] == [
        *(("eager_served", call) for call in (0, 1, 2)),
        *(("eager_fallback", call) for call in (0, 1, 2)),
        *(("graph", call) for call in (0, 1)),
    ]
    trace = run.traces[-1]
    expected = np.median([wall for wall, call in zip(trace.wall_us, trace.calls, strict=True) if call == 1])
    assert found[-1].profiled_us == expected
    assert found[-1].ratio == found[-1].profiled_us / found[-1].unprofiled_us


def test_an_interrupted_capture_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(what: str, done: float) -> None:
        if what.startswith("tracing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run", repeats=1, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
from tests.test_capture import CONFIGURATION, OPTIONS, SMALL, capture, torch, workload
report = lambda what, done: print(what, flush=True)
torch.set_num_threads(1)
capture(OPTIONS, CONFIGURATION, workload([SMALL]), Path(sys.argv[1]), repeats=1, progress=report)
"""


def test_a_killed_capture_leaves_no_run_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("tracing"):
                child.send_signal(signal.SIGKILL)
                break
        child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "run").exists()
    capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run", repeats=1, profiled_repeats=0)
    assert read_run(tmp_path / "run").name == "run"


def test_a_second_capture_needs_overwrite(folder: Path, run: Run) -> None:
    with pytest.raises(WorkbenchError, match="not empty"):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), folder, repeats=1, profiled_repeats=0)
    assert read_run(folder) == run


def test_overwrite_replaces_run_folders_only(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(WorkbenchError, match="not a run folder, so it is not replaced"):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path, repeats=1, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    target = tmp_path / "run"
    for repeats in (1, 2):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), target, repeats=repeats, profiled_repeats=0, overwrite=True)
        assert len(read_run(target).timings[0].wall_us) == repeats


@pytest.mark.parametrize(
    ("options", "configuration", "message"),
    [
        ({"model": "nope"}, CONFIGURATION, "unknown model 'nope'"),
        ({"device": "cuda"}, CONFIGURATION, "there is no CUDA device"),
        ({"device": "abacus"}, CONFIGURATION, "not a device"),
        ({"dtype": "int8"}, CONFIGURATION, "dtype 'int8'"),
        ({"depth": 0}, CONFIGURATION, "depth 0 is not between"),
        ({"width": 100}, CONFIGURATION, "width 100 is not a multiple"),
        ({"checkpoint": Path("missing")}, CONFIGURATION, "missing"),
        ({"attention_backend": "nope"}, CONFIGURATION, "attention backend 'nope'"),
        ({}, Configuration((0, 128), 4), "budget 0 is not positive"),
        ({}, Configuration((-64,), 4), "budget -64 is not positive"),
        ({}, Configuration((128, 256), 129), "above the smallest budget 128"),
        ({"model": "glm4_1v"}, CONFIGURATION, "was made for ernie45_vl"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], configuration: Configuration, message: str
) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(WorkbenchError, match=message) as caught:
        capture(replace(OPTIONS, **options), configuration, workload([SMALL]), tmp_path / "run", repeats=1)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "available_bytes", lambda device: 2**20)
    with pytest.raises(WorkbenchError, match=r"needs about .* GiB"):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_memory_that_runs_out_in_an_arm_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(session: EncoderSession, inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")

    monkeypatch.setattr(EncoderSession, "eager_fallback", full)
    with pytest.raises(WorkbenchError, match=r"not enough memory for eager_fallback on call 0 \(image 112x112\)"):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_another_vllm_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", "0.31.2")
    with pytest.raises(WorkbenchError, match=r"vLLM 0\.31\.2 is not supported"):
        capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_failure_is_recorded_without_a_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: EncoderSession, inputs: object) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(EncoderSession, "eager_served", broken)
    run = capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run", repeats=1, warmup=0)
    (failure,) = run.failures
    assert (failure.arm, failure.error, failure.message, failure.cause) == (
        "eager_served",
        "ValueError",
        "first line",
        None,
    )
    assert {timing.arm for timing in run.timings} == {"eager_fallback", "graph"}
    assert {trace.arm for trace in run.traces} == {"eager_fallback", "graph"}
    assert [found.baseline for found in run.equality] == ["eager_fallback"]


def test_planted_wrong_output_is_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = EncoderSession.graph

    def shifted(session: EncoderSession, inputs: Any) -> list[Any]:
        return [item + 1 for item in graph(session, inputs)]

    monkeypatch.setattr(EncoderSession, "graph", shifted)
    run = capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run", repeats=1, profiled_repeats=0)
    for found in run.equality:
        assert not found.bit_equal
        assert found.max_abs == pytest.approx(1, abs=0.05)


def test_a_watched_run_leaves_tracing_to_others(tmp_path: Path) -> None:
    with recording(tmp_path / "outside.json.gz", ["ranges"]) as start:
        start()
        run = capture(OPTIONS, CONFIGURATION, workload([SMALL]), tmp_path / "run", repeats=1, watched=True)
    assert run.traces == []
    names = annotations(tmp_path / "outside.json.gz")
    assert [name for name in names if name in ARMS] == list(ARMS)
    assert names.count("call#0") == 2 * len(ARMS)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_both_sets_of_activities_are_traced(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = capture(replace(OPTIONS, device="cuda"), CONFIGURATION, workload([SMALL]), out, repeats=4)
    assert run.replay == "cuda_graph"
    assert all(len(timing.gpu_us) == 4 for timing in run.timings)
    assert [trace.activities for trace in run.traces] == [["ranges", "cuda"]] * 3 + [["cpu", "cuda"]] * 3
    for trace in run.traces:
        assert annotations(out / trace.file).count("call#0") == trace.repeats == (1 if "cpu" in trace.activities else 2)
        assert (operators(out / trace.file) > 0) == ("cpu" in trace.activities)


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run `workbench capture` in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["workbench", "capture", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    code = left.value.code
    assert isinstance(code, int)
    return code


SMALL_RUN = ("--device", "cpu", "--depth", 1, "--width", 80, "--repeats", 2, "--warmup", 0, "--profiled-repeats", 1)


def test_the_command_prints_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    traced = threading.Event()
    traced.set()
    monkeypatch.setattr("workbench.profiler._TRACED", traced)
    workload = ("--workload", "{(112, 112, 1): 0.6, (112, 224, 1): 0.4}", "--max-calls", 1, "--name", "mine")
    code = cli(monkeypatch, *SMALL_RUN, *workload, "--budgets", "64,32", "--max-items", 4, "--out", out, "--json")
    assert code == 0
    printed = msgspec.json.decode(capfd.readouterr().out, type=Run)
    assert printed == read_run(out)
    assert printed.name == "mine"
    assert any("not in ascending order" in note for note in printed.notes)
    assert any("the first 1 of 2 distinct calls" in note for note in printed.notes)
    assert any("had traced its GPU before" in note for note in printed.notes)


def test_the_command_prints_a_table_and_what_failed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(run, tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "static replay" in printed
    assert "3 items in replays, 0 in eager fallbacks" in printed
    assert "graph failed on call 2 (D1): RuntimeError" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budgets", "128,many"), "budget 'many' is not a whole number"),
        (("--budgets", "0,128", "--max-items", 4), "budget 0 is not positive"),
        (("--budgets=-8", "--max-items", 4), "budget -8 is not positive"),
        (("--budgets", "128", "--max-items", 200), "above the smallest budget 128"),
        (("--model", "nope"), "unknown model 'nope'"),
        (("--workload", "nope"), "there is no workload 'nope'"),
        (("--workload", "{(20, 6000, 1): 1.0}"), "the Hugging Face processor of ERNIE-4.5-VL refuses"),
        (("--workload", "{(224, 224, 8): 1.0}"), "video"),
        (("--repeats", 0), "time at least one"),
        (("--nsys",), "nsys is not on the PATH"),
    ],
)
def test_bad_arguments_are_one_sentence_with_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nsys there
    code = cli(monkeypatch, "--workload", "pull-request", *SMALL_RUN, "--out", tmp_path / "run", *arguments)
    printed, said = capfd.readouterr()
    assert code == 2
    assert printed == ""
    assert message in said
    assert said.startswith("workbench: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_nsys_line_runs_the_same_capture_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nsys").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["capture", "--workload", "{(224, 224, 1): 1.0}"]
    line = shlex.split(nsys_line([*arguments, "--nsys"], Path("runs/a")))
    assert line[:2] == ["nsys", "profile"]
    assert "--cuda-graph-trace=node" in line
    assert "--capture-range=cudaProfilerApi" in line
    assert line[line.index("workbench") :] == [
        "workbench",
        "capture",
        "--workload",
        "{(224, 224, 1): 1.0}",
        "--watched",
    ]


def test_recordings_are_found_by_name(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.run.RECORDINGS", folder.parent)
    assert recording_names() == ["small"]
    assert load_recording("small") == run
    with pytest.raises(WorkbenchError, match="no recording is called 'nope'; there are small"):
        load_recording("nope")
