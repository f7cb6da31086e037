"""Live sweeps: streamed, resumed, retried; the same in one process and on a Ray cluster, with and without vLLM."""

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.sweeps import Invented, measured, request
from workbench import fleet
from workbench.budgets import Configuration
from workbench.cli import app
from workbench.commands.sweep import read_configurations, show
from workbench.errors import WorkbenchError
from workbench.fleet import REQUEST_FILE, InProcess, OnRay, Result, make_request, read_sweep, sweep
from workbench.models import model_facts
from workbench.sources import load_workload

ROOT = Path(__file__).resolve().parents[1]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: install the extra ray")
HERE = InProcess(Invented)
# One secret for the cluster and all that connect to it (else Ray keeps one in the home folder), read by Ray's import.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
CLUSTER = """
import sys, ray
from ray._private import worker
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
gcs = worker._global_node.all_processes["gcs_server"][0].process.pid
print(ray.get_runtime_context().gcs_address, gcs, flush=True)
sys.stdin.read()
"""


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.05)


# In one process -------------------------------------------------------------------------------------------------------


def test_results_stream_into_the_folder_and_failures_are_results(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    there: list[int] = []
    asked = request(tmp_path, "a", "refused", "breaks", "b")
    results = sweep(
        asked, out, HERE, progress=lambda _what, _done: there.append(len(list(out.glob("results/[0-9]*.json"))))
    )
    assert there == [0, 1, 2, 3, 4]
    assert [result.task.name for result in results] == ["a", "refused", "breaks", "b"]
    assert results[1].failed == "this one does not fit; take fewer budgets"
    assert results[2].failed == "RuntimeError: mat1 and mat2"
    assert results[3].comparison is not None
    assert read_sweep(out) == (asked, {result.task.name: result for result in results})
    show(results)


def test_a_resume_measures_what_is_missing_or_failed_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    asked = request(tmp_path, "a", "breaks", "b")
    sweep(asked, out, HERE)
    (out / "results" / "0002.json").unlink()
    before = (out / "results" / "0000.json").read_bytes()
    sweep(asked, out, HERE, resume=True)
    assert measured(tmp_path) == ["a", "breaks", "b", "breaks", "b"]
    assert (out / "results" / "0000.json").read_bytes() == before


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep"
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if "0001" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WorkbenchError, match="No space left"):
        sweep(request(tmp_path, "a", "b", "c"), out, HERE)
    assert list(read_sweep(out)[1]) == ["a"]
    assert sorted(path.name for path in (out / "results").iterdir()) == ["0000.json"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / REQUEST_FILE).unlink(), "holds no sweep"),
        (lambda out: (out / REQUEST_FILE).write_text('{"schema_version": 99}'), "schema version 99"),
        (lambda out: (out / REQUEST_FILE).write_text("[]"), "not what this command reads"),
        (lambda out: (out / "results" / "0000.json").write_text("{"), "not what this command reads"),
        (lambda out: (out / "results" / "0001.json").rename(out / "results" / "0000.json"), "another configuration"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    out = tmp_path / "sweep"
    asked = request(tmp_path, "a", "b")
    sweep(asked, out, HERE)
    damage(out)
    with pytest.raises(WorkbenchError, match=message):
        sweep(asked, out, HERE, resume=True)


def test_another_request_is_refused_and_an_occupied_folder_too(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sweep(request(tmp_path, "a"), out, HERE)
    with pytest.raises(WorkbenchError, match="other repeats"):
        sweep(request(tmp_path, "a", repeats=3), out, HERE, resume=True)
    with pytest.raises(WorkbenchError, match="not empty"):
        sweep(request(tmp_path, "a"), out, HERE)


def test_a_machine_that_cannot_run_the_encoder_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    with pytest.raises(WorkbenchError, match="no GPU here"):
        sweep(request(tmp_path, "a", seed=13), out, HERE)
    assert not out.exists()
    sweep(request(tmp_path, "a"), out, HERE)
    (out / "results" / "0000.json").unlink()
    with pytest.raises(WorkbenchError, match="other encoder"):
        sweep(request(tmp_path, "a", seed=13), out, HERE, resume=True)
    assert (out / REQUEST_FILE).is_file()


def test_bad_requests() -> None:
    pytest.importorskip("torch")
    from workbench.encoder.session import SessionOptions

    calls = load_workload("mixed", model_facts("ernie45_vl"))
    with pytest.raises(WorkbenchError, match="needs a configuration"):
        make_request(SessionOptions(), calls, {})
    with pytest.raises(WorkbenchError, match="'odd'"):
        make_request(SessionOptions(), calls, {"odd": Configuration((0,), 1)})
    with pytest.raises(WorkbenchError, match="at least one call"):
        make_request(SessionOptions(), calls, {"a": Configuration()}, calls=0)
    made = make_request(SessionOptions(), calls, {"a": Configuration((128, 256), 4)}, calls=3)
    assert len(made.calls) == 3
    assert made.tasks[0].configuration == Configuration((128, 256), 4)


def test_configurations_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_text("# mine\n\na=64,128:4\nb=auto\n")
    found = read_configurations(["c=32:1"], file)
    assert found == {"c": Configuration((32,), 1), "a": Configuration((64, 128), 4), "b": Configuration()}
    for line, message in (("a=1:1", "two configurations"), ("x=advised", "advise"), ("x", "not a named")):
        with pytest.raises(WorkbenchError, match=message):
            read_configurations([line], file)
    with pytest.raises(WorkbenchError, match="cannot read"):
        read_configurations([], tmp_path / "none")


def test_a_bad_file_of_configurations_is_named_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_text("# mine\n\na=64,128:4\nb\n")
    with pytest.raises(WorkbenchError, match=r"list line 4: 'b' is not a named"):
        read_configurations([], file)
    file.write_bytes(b"\xe9=64:4\n")
    with pytest.raises(WorkbenchError, match="list: not UTF-8; give"):
        read_configurations([], file)
    with pytest.raises(WorkbenchError) as caught:
        read_configurations([], tmp_path / "none")
    assert str(caught.value).count("none") == 1
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:9", "no Ray cluster answers"), ("somewhere", "is no Ray cluster"), ("ray://a:1", "is no Ray cluster")],
)
@needs_ray
def test_addresses_without_a_cluster(tmp_path: Path, address: str, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        sweep(request(tmp_path, "a"), tmp_path / "sweep", OnRay(address))


def test_without_ray_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkbenchError, match="install the extra"):
        sweep(request(tmp_path, "a"), tmp_path / "sweep", OnRay())
    with pytest.raises(WorkbenchError, match="at least one worker"):
        OnRay(workers=0)


# On a Ray cluster of this machine -------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A local Ray in a process of its own; `gcs` is the process that a cluster cannot live without."""

    address: str
    gcs: int


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    for _ in range(4):  # Ray gives a node 30 s to start, which is little on a busy machine
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        if told := process.stdout.readline().split():
            break
        process.communicate()
    address, gcs = told
    yield Cluster(address, int(gcs))
    process.communicate()  # closes its input, at which it ends


@pytest.fixture(params=["in process", pytest.param("ray", marks=needs_ray)])
def address(request: pytest.FixtureRequest) -> str:
    if request.param == "in process":
        return ""
    found: Cluster = request.getfixturevalue("cluster")
    return found.address


def test_a_killed_head_loses_nothing_that_had_finished(tmp_path: Path, address: str) -> None:
    out, names = tmp_path / "sweep", ("a", "b", "waits", "c")
    head = subprocess.Popen([sys.executable, "-m", "tests.sweeps", str(tmp_path), address, *names], cwd=ROOT)
    wait_for(lambda: (out / "results" / "0001.json").is_file() and "waits" in measured(tmp_path))
    head.send_signal(signal.SIGKILL)
    assert head.wait() == -signal.SIGKILL
    (tmp_path / "go").touch()
    executor = OnRay(address, 1, Invented) if address else HERE
    results = sweep(request(tmp_path, *names), out, executor, resume=True)
    assert all(result.comparison for result in results)
    assert measured(tmp_path) == ["a", "b", "waits", "waits", "c"]


@needs_ray
def test_a_task_whose_worker_is_killed_is_tried_again(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RETRIES", 1)  # each new worker takes seconds
    names = ("a", "dies once", "refused", "dies always", "b")
    results = sweep(request(tmp_path, *names), tmp_path / "sweep", OnRay(cluster.address, 1, Invented))
    failed = {result.task.name: result.failed for result in results if result.failed}
    assert failed.keys() == {"refused", "dies always"}
    assert "died 2 times" in (failed["dies always"] or "")
    begun = measured(tmp_path)
    assert (begun.count("dies once"), begun.count("dies always"), begun.count("b")) == (2, 2, 1)


@needs_ray
@pytest.mark.parametrize(("device", "message"), [("cuda:1", "sees one GPU"), ("cuda", "has no GPU")])
def test_gpus_that_ray_does_not_have(tmp_path: Path, cluster: Cluster, device: str, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        sweep(request(tmp_path, "a", device=device), tmp_path / "sweep", OnRay(cluster.address, 1, Invented))
    assert not (tmp_path / "sweep").exists()


@needs_ray
@pytest.mark.engine
def test_vllms_classes_on_two_workers(tmp_path: Path, cluster: Cluster) -> None:
    small, one = command(tmp_path, "--ray", cluster.address, "--workers", "2")
    assert small.comparison is not None
    assert one.comparison is not None
    assert small.comparison.model == one.comparison.model


@needs_ray
def test_a_cluster_that_goes_away_is_an_error_and_finished_work_is_kept(tmp_path: Path, cluster: Cluster) -> None:
    """The last test of the cluster: it kills it."""
    out = tmp_path / "sweep"

    def kill() -> None:
        wait_for(lambda: (out / "results" / "0000.json").is_file() and "waits" in measured(tmp_path))
        os.kill(cluster.gcs, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(WorkbenchError, match="went away"):
        sweep(request(tmp_path, "a", "waits"), out, OnRay(cluster.address, 1, Invented))
    killer.join()
    assert list(read_sweep(out)[1]) == ["a"]


# vLLM's own classes ---------------------------------------------------------------------------------------------------


def command(folder: Path, *more: str) -> list[Result]:
    """Run the verb on two configurations of a small encoder on the CPU."""
    words = ["sweep", "--workload", "pull-request", "--out", str(folder / "sweep"), "--device", "cpu", "--json"]
    words += ["--config", "small=64,128:4", "--config", "one=64:1", "--depth", "1", "--width", "160"]
    done = CliRunner().invoke(app, [*words, "--calls", "2", "--repeats", "2", "--warmup", "1", *more])
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(msgspec.json.encode(json.loads(done.stdout)["results"]), type=list[Result])


@pytest.mark.engine
def test_the_verb_in_this_process(tmp_path: Path) -> None:
    small, one = command(tmp_path)
    assert small.comparison is not None
    assert one.comparison is not None
    assert small.comparison.replay == "static_replay"
    assert small.comparison.configurations[0].budgets == [64, 128]
    assert [len(call.wall_us) for call in small.comparison.configurations[0].calls] == [2, 2]
    assert [len(call.wall_us) for call in small.comparison.eager_served] == [2, 2]
    assert small.environment is not None
    assert small.comparison.model == one.comparison.model
    show([small, one])
    refused = CliRunner().invoke(app, ["sweep", "--workload", "mixed", "--out", str(tmp_path / "x"), "--workers", "2"])
    assert isinstance(refused.exception, WorkbenchError)
    assert not (tmp_path / "x").exists()
