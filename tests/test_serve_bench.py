"""The server benchmark: arms, time limits, failures and sentences with a stand-in for vLLM; one real server."""

import dataclasses
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from workbench import engine_bench
from workbench.budgets import Configuration
from workbench.cli import app
from workbench.engine_bench import PULL_REQUEST, RESULT_FILE, EngineBench, Setting, explain, run_bench
from workbench.errors import WorkbenchError
from workbench.files import read_json
from workbench.ledger import read_ledger
from workbench.serve_bench import measured, served_table

# Takes vLLM's arguments. As a server it leaves a ledger of calls of two images each and waits to be ended; as a client
# it leaves what `vllm bench serve` leaves. The server tells it the arm in a file of the port's number.
STAND_IN = """
import json, os, sys, time
from pathlib import Path
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
mode = os.environ.get("STAND_IN", "")
home = Path(os.environ["STAND_IN_HOME"])
assert sys.stdin.read() == ""
if sys.argv[1] == "serve":
    graphs = "cudagraph_mm_encoder" in arguments["--compilation-config"]
    print("non-default args: ...", flush=True)
    if mode == "server dies" and graphs:
        sys.exit("RuntimeError: boom")
    if mode == "server hangs" and graphs:
        time.sleep(60)
    assert arguments["--served-model-name"] == "glm4_1v" and arguments["--host"] == "127.0.0.1"
    with open(os.environ["WORKBENCH_LEDGER"], "w") as ledger:
        def line(**fields):
            ledger.write(json.dumps(fields | {"pid": os.getpid()}) + "\\n")
        line(kind="process", schema_version=1, t=0.0, workbench="0", vllm="0.33.0", device="cuda")
        for call in range(4):
            group = {"modality": "image", "route": "graph" if graphs else "eager", "grids": [[1, 16, 16]] * 2}
            group["tokens"] = [64] * 2
            if graphs:
                group["batches"] = [{"items": [0, 1], "tokens": 128, "budget": 128, "host_us": 9.0}]
            cost = 2000.0 if graphs else 8000.0
            line(kind="call", rank=0, t=1.0, runner="v2", host_us=cost, gpu_us=cost, groups=[group])
    (home / arguments["--port"]).write_text("graph" if graphs else "eager")
    print("Application startup complete", flush=True)
    time.sleep(60)
else:
    assert sys.argv[1:3] == ["bench", "serve"] and "WORKBENCH_LEDGER" not in os.environ
    arm = (home / arguments["--base-url"].rsplit(":")[-1]).read_text()
    if mode == "client fails" and arm == "graph":
        sys.exit("ValueError: refused")
    cost = 50.0 if arm == "graph" else 200.0
    made = {"duration": 1.0, "request_throughput": 1000 / cost, "model_id": "m", "failed": 0}
    made["completed"] = int(arguments["--num-prompts"]) - (mode == "loses one" and arm == "graph")
    for name, scale in (("ttft", 1.0), ("tpot", 0.1), ("itl", 0.05), ("e2el", 4.0)):
        made |= {f"{statistic}_{name}_ms": cost * scale for statistic in ("mean", "median", "std", "p99")}
    Path(arguments["--result-filename"]).write_text(json.dumps(made))
    print("Serving Benchmark Result", flush=True)
"""
SETTING = Setting(model="glm4_1v", workload="glm-video", prompts=8, full=False, arm_seconds=30)
ARMS = {"eager": None, "graph": PULL_REQUEST}


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The command that stands in for vLLM's."""
    pytest.importorskip("transformers", reason="the model folder needs transformers")
    (tmp_path / "ports").mkdir()
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("STAND_IN_HOME", str(tmp_path / "ports"))
    monkeypatch.setattr(engine_bench, "_POLL_SECONDS", 0.02)
    return (sys.executable, str(tmp_path / "stand_in.py"))


def test_both_arms_are_measured_and_told_apart(launcher: tuple[str, ...], tmp_path: Path) -> None:
    bench = run_bench(SETTING, ARMS, tmp_path / "out", repeats=2, serve=True, launcher=launcher)
    assert bench.kind == "serve"
    assert [run.arm for run in bench.runs] == ["eager", "graph", "graph", "eager"]
    assert [run.error for run in bench.runs] == [None] * 4
    assert read_json(tmp_path / "out" / RESULT_FILE, EngineBench) == bench
    for row, cost in zip(served_table(bench), (200, 50, 50, 200), strict=True):
        assert (row["TTFT mean ms"], row["TPOT P99 ms"], row["ITL median ms"]) == (cost, cost / 10, cost / 20)
        assert row["requests/s"] == 1000 / cost
    assert {"imports", "server", "requests"} <= set(bench.runs[0].stages)
    told = "\n".join(explain(bench))
    assert "eager: the first token came after 200.00 ms in the mean and 200.00 ms at P99, averaged over 2 runs." in told
    assert "8 items of 8 requests met in 4 encoder calls, 2.0 a call; the encoder took 32.00 ms" in told
    assert "graph: 8 of 8 images went through 4 replays" in told
    assert "TTFT mean 200.00 to 50.00 ms (4.00)" in told
    assert "The encoder: 32.00 to 8.00 ms (4.00)" in told
    assert "mean times off over on of TTFT 1.11, TPOT 1.00, ITL 1.00; only ratios compare" in told


@pytest.mark.parametrize(
    ("mode", "seconds", "reason"),
    [
        ("server dies", 30, "the server ended with 1, in its stage model inspection; its log is 1-graph.server.log"),
        ("server hangs", 2, "in its stage model inspection; the server's log is 1-graph.server.log"),
        ("client fails", 30, "vLLM ended with 1, in its stage model inspection; its log is 1-graph.log"),
        ("loses one", 30, "7 of 8 requests were answered; the server's log is 1-graph.server.log"),
    ],
)
def test_an_arm_that_fails_is_said_and_the_other_stays(
    launcher: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seconds: float, reason: str
) -> None:
    monkeypatch.setenv("STAND_IN", mode)
    setting = dataclasses.replace(SETTING, arm_seconds=seconds)
    bench = run_bench(setting, ARMS, tmp_path / "out", serve=True, launcher=launcher)
    eager, graph = bench.runs
    assert eager.error is None
    assert reason in (graph.error or "")
    assert len(served_table(bench)) == 1
    assert f"Arm graph (run 1) gave nothing: {graph.error}." in explain(bench)


def test_arms_that_ran_the_same_encoder_are_not_compared(launcher: tuple[str, ...], tmp_path: Path) -> None:
    bench = run_bench(SETTING, ARMS, tmp_path / "out", serve=True, launcher=launcher)
    eager, graph = bench.runs
    assert eager.calls is not None
    same = msgspec.structs.replace(graph, calls=eager.calls, hits=eager.hits)
    told = explain(msgspec.structs.replace(bench, runs=[eager, same]))
    assert any("ran the same encoder" in sentence for sentence in told)
    assert not any("TTFT mean" in sentence for sentence in told)


def test_the_verb_ends_with_2_on_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine-bench", "--serve", "--out", str(tmp_path / "o"), "--prompts", "0"])
    assert isinstance(result.exception, WorkbenchError)


@pytest.mark.engine
def test_a_real_server_on_this_machine(tmp_path: Path) -> None:
    """`vllm serve` on vLLM's CPU engine, asked by `vllm bench serve`."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    setting = Setting(
        model="glm4_1v",
        workload="glm-image",
        prompts=3,
        full=False,
        input_tokens=16,
        output_tokens=4,
        arm_seconds=400,
    )
    arms = {"graph": Configuration((64, 128), 2)}
    bench = run_bench(setting, arms, tmp_path / "out", serve=True)
    (run,) = bench.runs
    assert run.error is None
    for name in ("ttft", "tpot", "itl"):
        found = measured(run, name)
        assert found is not None
        assert (found.mean or 0) > 0
    # Every request has one image of 64 tokens; the first request, sent once more before, finds its image in the cache.
    served = read_ledger(tmp_path / "out" / "0-graph.ledger.jsonl").served()
    assert [tokens for call in served for group in call.groups for tokens in group.tokens] == [64] * setting.prompts
    assert any("has no encoder graphs" in sentence for sentence in explain(bench))
