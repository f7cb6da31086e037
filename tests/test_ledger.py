"""The ledger's file and its reader, and the plugin's behaviour around miniature copies of vLLM's classes."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from workbench.encoder import ledger_plugin
from workbench.encoder.ledger_plugin import MANAGER, RUNNER_V1, RUNNER_V2, Recorder
from workbench.errors import WorkbenchError
from workbench.ledger import Batch, CallLine, FullLine, Group, HitRow, ProcessLine, hit_table, read_ledger, summarize
from workbench.models import model_facts
from workbench.sources import load_workload

ERNIE, GLM = model_facts("ernie45_vl"), model_facts("glm4_1v")

# --- the reader ---------------------------------------------------------------------------------------------

PROCESS = ProcessLine(pid=7, schema_version=1, t=1.0, workbench="0", vllm="0.33.0", device="cuda")


def call(*groups: Group, **fields: Any) -> CallLine:
    """A call line with defaults."""
    defaults: dict[str, Any] = {"pid": 7, "rank": 0, "t": 2.0, "runner": "v2", "host_us": 100.0}
    return CallLine(groups=list(groups), **(defaults | fields))


def graph_group(*batches: tuple[list[int], int, int | None], side: int = 16) -> Group:
    """A group of square images through the manager; a batch is (items, tokens, budget)."""
    count = sum(len(items) for items, _, _ in batches)
    return Group(
        modality="image",
        route="graph",
        grids=[[1, side, side]] * count,
        tokens=[side * side // 4] * count,
        batches=[Batch(items=items, tokens=tokens, budget=budget, host_us=10.0) for items, tokens, budget in batches],
    )


def write(path: Path, *lines: Any) -> Path:
    """Write lines."""
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


EAGER = Group(modality="image", route="eager", grids=[[1, 16, 16]], tokens=[64])
SERVED = (
    call(graph_group(([1, 0], 128, 128), ([2], 64, 64)), gpu_us=50.0),
    call(graph_group(([0], 2500, None), side=100), host_us=300.0, gpu_us=70.0),
    call(EAGER, host_us=20.0),
)


def test_hits_fallbacks_and_eager_calls_are_counted_apart(tmp_path: Path) -> None:
    ledger = read_ledger(write(tmp_path / "l", PROCESS, *SERVED))
    common: dict[str, Any] = {"batches": 1, "host_us": 10.0}
    assert hit_table(ledger) == [
        HitRow(route="graph", budget=64, items=1, tokens=64, fill=1.0, **common),
        HitRow(route="graph", budget=128, items=2, tokens=128, fill=1.0, **common),
        HitRow(route="fallback", budget=None, items=1, tokens=2500, fill=None, **common),
        HitRow(route="eager", budget=None, batches=1, items=1, tokens=64, fill=None, host_us=20.0),
    ]
    made = summarize(ledger)
    assert (made.calls, made.items, made.items_per_call, made.hits, made.misses) == (3, 5, {1: 2, 3: 1}, 3, 2)
    assert (made.host_us, made.gpu_us) == (100.0, 60.0)


def test_a_ledger_is_a_workload(tmp_path: Path) -> None:
    video = Group(modality="video", route="graph", grids=[[4, 16, 16]], tokens=[256])
    path = write(tmp_path / "served.jsonl", PROCESS, call(graph_group(([0, 1], 128, 128)), video), call(EAGER))
    made = load_workload(path, GLM)
    assert made.calls() == [[64, 64], [256], [64]]
    assert made.sizes.tolist() == [[224, 224, 1], [224, 224, 1], [224, 224, 8], [224, 224, 1]]
    assert made.frames.tolist() == [1, 1, 4, 1]
    assert made.source == "ledger served.jsonl: 3 encoder calls of vLLM 0.33.0"


def test_profiling_is_not_traffic_and_ranks_are_not_counted_twice(tmp_path: Path) -> None:
    lines = [call(EAGER, phase="profile"), call(EAGER), call(EAGER, rank=1, pid=8)]
    ledger = read_ledger(write(tmp_path / "l", PROCESS, *lines))
    assert len(ledger.calls) == 3
    assert summarize(ledger).calls == 1
    assert load_workload(tmp_path / "l", GLM).items == 1


def test_a_shard_counts_its_own_items(tmp_path: Path) -> None:
    whole = graph_group(([0], 64, 64))
    shared = msgspec.structs.replace(whole, grids=[[1, 16, 16]] * 2, tokens=[64, 64], shard=[0])
    made = summarize(read_ledger(write(tmp_path / "l", PROCESS, call(shared))))
    assert (made.items, made.hits, made.misses) == (2, 1, 0)


def test_cut_lines_are_left_out_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "l", PROCESS, *SERVED)
    whole = path.read_bytes()
    for cut in (1, 10, 100):
        path.write_bytes(whole[:-cut])
        ledger = read_ledger(path)
        assert len(ledger.calls) == (3 if cut == 1 else 2)  # one byte less is only the newline
        assert len(ledger.lost) == (0 if cut == 1 else 1)
    assert ledger.lost == ["1 line of l could not be read (line 4): cut short or damaged, so its call is missing"]
    path.write_bytes(whole[:-40] + whole)  # killed within a line, then another process appended
    assert [len(read_ledger(path).calls), len(read_ledger(path).processes)] == [5, 1]
    assert load_workload(path, ERNIE).notes == tuple(read_ledger(path).lost)


def test_every_cut_keeps_all_whole_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "l", PROCESS, *SERVED)
    whole = path.read_bytes()
    for length in range(len(whole.splitlines(keepends=True)[0]), len(whole)):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n") - 1
        assert complete <= len(read_ledger(path).calls) <= complete + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a ledger"),
        ("hello\n", "is not a ledger"),
        ('{"kind":"call"}\n', "is not a ledger"),
        (
            '{"kind":"process","pid":1,"schema_version":99,"t":0,"workbench":"","vllm":"","device":""}\n',
            "schema version 99",
        ),
    ],
)
def test_files_that_are_no_ledger(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "l").write_text(text)
    with pytest.raises(WorkbenchError, match=message):
        read_ledger(tmp_path / "l")


def test_a_missing_ledger(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="cannot read the ledger"):
        read_ledger(tmp_path / "none")


def test_a_ledger_that_cannot_be_a_workload(tmp_path: Path) -> None:
    without = Group(modality="image", route="eager", grids=None, tokens=[64])
    for line, message in (
        (call(without), "has no grids"),
        (call(EAGER, phase="profile"), "no served encoder call"),
        (call(msgspec.structs.replace(EAGER, tokens=[16])), r"\[1, 16, 16\] with 16 tokens, where GLM-4.1V makes 64"),
    ):
        write(tmp_path / "l", PROCESS, line)
        with pytest.raises(WorkbenchError, match=message):
            load_workload(tmp_path / "l", GLM)


def test_a_full_ledger_says_so(tmp_path: Path) -> None:
    ledger = read_ledger(write(tmp_path / "l", PROCESS, FullLine(pid=7, limit_bytes=1000)))
    assert ledger.lost == ["process 7 stopped recording at the limit of 1,000 bytes; later calls are missing"]


def test_the_verb(tmp_path: Path) -> None:
    path = write(tmp_path / "l", PROCESS, *SERVED)
    code = "from workbench.cli import main; main()"
    made = subprocess.run(
        [sys.executable, "-c", code, "ledger", str(path), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(made.stdout)["summary"]["hits"] == 3


# --- the plugin around miniature classes
# ----------------------------------------------------------------------


class Tensor:
    """What the plugin may touch of a tensor: where it is, its shape, and, on the CPU only, its values."""

    def __init__(self, values: Any, device: str = "cpu") -> None:
        self.values = np.array(values)
        self.shape = self.values.shape
        self.device = SimpleNamespace(type=device)

    def tolist(self) -> Any:
        assert self.device.type == "cpu", "reading a device tensor synchronises"
        return self.values.tolist()


class Manager:
    """The control flow of vLLM's `EncoderCudaGraphManager`, two items a batch, the largest budget 128."""

    def __init__(self) -> None:
        self.model, self.token_budgets, self.max_batch_size, self.max_frames_per_batch = object(), [64, 128], 2, 0
        self.use_dp = False

    def _get_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        return [SimpleNamespace(output_tokens=int(np.prod(grid)) // 4) for grid in mm_kwargs["image_grid_thw"].values]

    def _select_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> Any:
        return {"image_grid_thw": Tensor(mm_kwargs["image_grid_thw"].values[indices])}, ()

    def _run_budget_graph(self, mm_kwargs: dict[str, Any], token_budget: int, path: str = "default") -> Any:
        self._get_item_specs(mm_kwargs)
        return object()

    def _execute_local(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        specs = self._get_item_specs(mm_kwargs)
        for first in range(0, len(specs), 2):
            items = list(range(first, min(first + 2, len(specs))))
            selected, _ = self._select_items(mm_kwargs, items)
            tokens = sum(specs[item].output_tokens for item in items)
            if tokens <= 128:
                self._run_budget_graph(selected, 128 if tokens > 64 else 64)
        return [Tensor(np.zeros((spec.output_tokens, 3))) for spec in specs]

    def execute(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        return self._execute_local(mm_kwargs)


class Runner:
    """Both of vLLM's runners in one: `_execute_mm_encoder` is v1's name, `execute_mm_encoder` v2's."""

    def __init__(self, manager: Manager | None = None, device: str = "cpu", fail: Exception | None = None) -> None:
        self.manager, self.fail = manager, fail
        self.device = SimpleNamespace(type=device)
        self.observability_config = SimpleNamespace(enable_mm_processor_stats=True)

    def execute_mm_encoder(self, items: list[tuple[str, Any]]) -> list[Any]:
        order = sorted(range(len(items)), key=lambda item: items[item][0])
        outputs = []
        group_and_batch = sys.modules[type(self).__module__].group_and_batch_mm_kwargs
        for modality, _, kwargs in group_and_batch([items[item] for item in order]):
            if self.fail is not None:
                raise self.fail
            if self.manager is not None and modality == "image":
                outputs.extend(self.manager.execute(kwargs))
            else:
                grids = kwargs[f"{modality}_grid_thw"].values
                outputs.extend(Tensor(np.zeros((int(np.prod(grid)) // 4, 3))) for grid in grids)
        return [outputs[item] for item in np.argsort(order)]

    def _execute_mm_encoder(self, scheduled: Any) -> list[Any]:
        return self.execute_mm_encoder(scheduled.scheduled_encoder_inputs)

    def profile_encoder_cache(self, items: list[tuple[str, Any]]) -> None:
        self.execute_mm_encoder(items)


def group_and_batch_mm_kwargs(items: list[tuple[str, Any]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Group by modality, as vLLM's function of that name."""
    for modality in dict.fromkeys(modality for modality, _ in items):
        grids = [grid for name, grid in items if name == modality]
        yield modality, len(grids), {f"{modality}_grid_thw": Tensor(grids)}


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Let pytest hear the plugin's log, whatever an earlier test's import of vLLM made of vLLM's logger."""
    vllm = logging.getLogger("vllm")
    before = vllm.level, vllm.propagate
    vllm.setLevel(logging.WARNING)
    vllm.propagate = True
    yield
    vllm.setLevel(before[0])
    vllm.propagate = before[1]


@pytest.fixture
def vllm_like(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fresh classes, in a module of their own."""
    module = ModuleType("miniature")
    monkeypatch.setitem(sys.modules, "miniature", module)
    module.__dict__["group_and_batch_mm_kwargs"] = group_and_batch_mm_kwargs
    classes = {
        name: type(name, (), dict(base.__dict__) | {"__module__": "miniature"})
        for name, base in (("EncoderRunner", Runner), ("EncoderCudaGraphManager", Manager))
    }
    module.__dict__.update(classes | {"GPUModelRunner": classes["EncoderRunner"]})
    return {"module": module, "runner": classes["EncoderRunner"], "manager": classes["EncoderCudaGraphManager"]}


def patch(vllm_like: dict[str, Any], recorder: Recorder, *names: str) -> None:
    """Apply the plugin's patches to the miniature module."""
    for name in names or (RUNNER_V2, MANAGER):
        ledger_plugin._PATCHES[name](vllm_like["module"], recorder)


IMAGES = [("image", [1, 16, 16]), ("image", [1, 4, 4]), ("image", [1, 40, 40])]


def tokens(outputs: list[Any]) -> list[int]:
    """Return the outputs' rows."""
    return [output.shape[0] for output in outputs]


def test_batches_budgets_hits_and_fallbacks(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    runner = vllm_like["runner"](vllm_like["manager"]())
    mixed = [("video", [2, 8, 8]), *IMAGES]
    assert tokens(runner.execute_mm_encoder(mixed)) == [32, 64, 4, 400]
    ledger = read_ledger(tmp_path / "l")
    images, video = ledger.calls[0].groups
    assert (images.route, images.tokens, images.grids) == ("graph", [64, 4, 400], [grid for _, grid in IMAGES])
    assert [(batch.items, batch.tokens, batch.budget) for batch in images.batches] == [
        ([0, 1], 68, 128),
        ([2], 400, None),
    ]
    assert (video.route, video.tokens, video.batches) == ("eager", [32], [])
    assert (ledger.managers[0].budgets, ledger.managers[0].max_items) == ([64, 128], 2)
    assert ledger.calls[0].host_us >= sum(batch.host_us for batch in images.batches) > 0
    assert (ledger.calls[0].runner, ledger.calls[0].gpu_us, ledger.calls[0].error) == ("v2", None, None)


def test_a_rank_records_its_share_under_the_calls_own_indices(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    class Sharded(Manager):
        def execute(self, mm_kwargs: dict[str, Any]) -> list[Any]:
            specs = self._get_item_specs(mm_kwargs)
            local, _ = self._select_items(mm_kwargs, [2, 0])
            self._execute_local(local)
            return [Tensor(np.zeros((spec.output_tokens, 3))) for spec in specs]

    vllm_like["module"].__dict__["EncoderCudaGraphManager"] = Sharded
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    vllm_like["runner"](Sharded()).execute_mm_encoder(IMAGES)
    group = read_ledger(tmp_path / "l").calls[0].groups[0]
    assert (group.shard, group.tokens) == ([2, 0], [64, 4, 400])
    assert [(batch.items, batch.tokens, batch.budget) for batch in group.batches] == [([2, 0], 464, None)]


def test_a_vllm_that_calls_otherwise_switches_recording_off_only(
    tmp_path: Path, vllm_like: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Renamed(Manager):
        def _execute_local(self, mm_kwargs: dict[str, Any]) -> Any:
            self._select_items(mm_kwargs=mm_kwargs, indices=[0])
            return super()._execute_local(mm_kwargs)

    vllm_like["module"].__dict__["EncoderCudaGraphManager"] = Renamed
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    assert tokens(vllm_like["runner"](Renamed()).execute_mm_encoder(IMAGES)) == [64, 4, 400]
    assert len(caplog.records) == 1


def test_runner_v1_says_that_it_synchronises(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 10**6), RUNNER_V1)
    for images in ([], IMAGES):  # a step without images is no call
        vllm_like["runner"]()._execute_mm_encoder(SimpleNamespace(scheduled_encoder_inputs=images))
    assert len(read_ledger(tmp_path / "l").calls) == 1
    line = read_ledger(tmp_path / "l").calls[0]
    assert (line.runner, line.synchronised, line.groups[0].tokens) == ("v1", True, [64, 4, 400])


def test_profiling_is_marked(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    runner = vllm_like["runner"]()
    runner.profile_encoder_cache(IMAGES)
    runner.execute_mm_encoder(IMAGES)
    assert [line.phase for line in read_ledger(tmp_path / "l").calls] == ["profile", "serve"]


def test_a_call_that_encodes_nothing_is_no_line(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    assert vllm_like["runner"]().execute_mm_encoder([]) == []
    assert not (tmp_path / "l").exists()


def test_an_error_of_the_encoder_passes_through_and_is_recorded(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    failure = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught:
        vllm_like["runner"](fail=failure).execute_mm_encoder(IMAGES)
    assert caught.value is failure
    assert read_ledger(tmp_path / "l").calls[0].error == f"RuntimeError: {failure}"


def test_after_a_failed_cuda_call_no_event_is_asked(
    tmp_path: Path, vllm_like: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = RuntimeError("CUDA error: an illegal memory access was encountered")

    def sticky(self: Event) -> bool:
        raise failure

    def failing_at_videos(items: Any) -> Iterator[Any]:
        for group in group_and_batch_mm_kwargs(items):
            yield group
            if group[0] == "video":
                monkeypatch.setattr(Event, "query", sticky)
                raise failure

    monkeypatch.setattr(ledger_plugin, "_new_events", lambda: (Event(), Event()))
    monkeypatch.setattr(Event, "complete", False)
    vllm_like["module"].__dict__["group_and_batch_mm_kwargs"] = failing_at_videos
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    runner = vllm_like["runner"](device="cuda")
    runner.execute_mm_encoder(IMAGES)
    with pytest.raises(RuntimeError) as caught:
        runner.execute_mm_encoder([("video", [2, 8, 8])])
    assert caught.value is failure
    calls = read_ledger(tmp_path / "l").calls
    assert [(line.gpu_us, line.error) for line in calls] == [(None, None), (None, f"RuntimeError: {failure}")]


def test_grids_on_a_device_are_never_read(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    def on_device(items: Any) -> Iterator[Any]:
        for modality, count, kwargs in group_and_batch_mm_kwargs(items):
            yield modality, count, {name: Tensor(value.values, "cuda") for name, value in kwargs.items()}

    vllm_like["module"].__dict__["group_and_batch_mm_kwargs"] = on_device
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    vllm_like["runner"]().execute_mm_encoder(IMAGES)
    assert read_ledger(tmp_path / "l").calls[0].groups == [
        Group(modality="image", route="eager", grids=None, tokens=[64, 4, 400])
    ]


class Event:
    """A CUDA event of a made-up clock; only `query` and `elapsed_time` of complete events are allowed."""

    now = 0.0
    complete = False

    def record(self) -> None:
        Event.now += 1.5
        self.time = Event.now

    def query(self) -> bool:
        return Event.complete

    def elapsed_time(self, other: "Event") -> float:
        assert Event.complete
        return other.time - self.time


def test_gpu_times_are_read_late_and_in_order(
    tmp_path: Path, vllm_like: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_plugin, "_new_events", lambda: (Event(), Event()))
    monkeypatch.setattr(Event, "complete", False)
    recorder = Recorder(tmp_path / "l", 10**6)
    patch(vllm_like, recorder)
    runner = vllm_like["runner"](device="cuda")
    for _ in range(2):
        runner.execute_mm_encoder(IMAGES)
    assert read_ledger(tmp_path / "l").calls == []
    monkeypatch.setattr(Event, "complete", True)
    runner.execute_mm_encoder(IMAGES[:1])  # complete before the next call begins, so it is written at once
    assert [(line.gpu_us, len(line.groups[0].tokens)) for line in read_ledger(tmp_path / "l").calls] == [
        (1500.0, 3),
        (1500.0, 3),
        (1500.0, 1),
    ]
    monkeypatch.setattr(Event, "complete", False)
    runner.execute_mm_encoder(IMAGES[:2])
    assert len(read_ledger(tmp_path / "l").calls) == 3
    monkeypatch.setattr(Event, "complete", True)
    recorder.close()
    assert len(read_ledger(tmp_path / "l").calls[-1].groups[0].tokens) == 2


def test_events_that_never_complete_do_not_pile_up(
    tmp_path: Path, vllm_like: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_plugin, "_new_events", lambda: (Event(), Event()))
    monkeypatch.setattr(ledger_plugin, "_MAX_PENDING", 4)
    monkeypatch.setattr(Event, "complete", False)
    recorder = Recorder(tmp_path / "l", 10**6)
    patch(vllm_like, recorder)
    for _ in range(10):
        vllm_like["runner"](device="cuda").execute_mm_encoder(IMAGES)
    recorder.close()
    assert [line.gpu_us for line in read_ledger(tmp_path / "l").calls] == [None] * 10


def test_the_size_is_bounded(tmp_path: Path, vllm_like: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 3000))
    for _ in range(100):
        assert tokens(vllm_like["runner"]().execute_mm_encoder(IMAGES)) == [64, 4, 400]
    assert (tmp_path / "l").stat().st_size < 3100
    ledger = read_ledger(tmp_path / "l")
    assert 5 < len(ledger.calls) < 100
    assert "stopped recording at the limit of 3,000 bytes" in ledger.lost[0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("where", ["folder that is missing/l", "."])
def test_a_file_that_cannot_be_written_costs_one_log_line(
    tmp_path: Path, vllm_like: dict[str, Any], caplog: pytest.LogCaptureFixture, where: str
) -> None:
    patch(vllm_like, Recorder(tmp_path / where, 10**6))
    for _ in range(3):
        assert tokens(vllm_like["runner"]().execute_mm_encoder(IMAGES)) == [64, 4, 400]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "method", ["begin", "end", "group", "manager", "specs", "local", "selected", "replayed", "_drain", "_write"]
)
def test_a_fault_anywhere_in_the_recorder_never_reaches_the_server(
    tmp_path: Path, vllm_like: dict[str, Any], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def broken(self: Recorder, *args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError(method)

    hidden = method.startswith("_")
    kind = type("Broken", (Recorder,), {method: broken if hidden else ledger_plugin._safe(broken)})
    patch(vllm_like, kind(tmp_path / "l", 10**6))
    runner = vllm_like["runner"](vllm_like["manager"]())
    for _ in range(3):
        assert tokens(runner.execute_mm_encoder(IMAGES)) == [64, 4, 400]
    assert len(caplog.records) == 1
    assert f"ZeroDivisionError: {method}" in caplog.text


def test_another_vllm_switches_recording_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "l", 10**6)
    ledger_plugin._patch(ModuleType(RUNNER_V1), recorder)
    assert recorder.off
    assert "not one the ledger knows" in caplog.text
    assert not (tmp_path / "l").exists()


def test_a_forked_process_writes_lines_of_its_own(tmp_path: Path, vllm_like: dict[str, Any]) -> None:
    patch(vllm_like, Recorder(tmp_path / "l", 10**6))
    vllm_like["runner"]().execute_mm_encoder(IMAGES)
    child = os.fork()
    if child == 0:
        vllm_like["runner"]().execute_mm_encoder(IMAGES)
        os._exit(0)
    os.waitpid(child, 0)
    ledger = read_ledger(tmp_path / "l")
    assert [line.pid for line in ledger.processes] == [os.getpid(), child]
    assert [line.pid for line in ledger.calls] == [os.getpid(), child]


def in_child(code: str, **variables: str) -> str:
    """Run code in a child; return what it prints."""
    made = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


COUNT = (
    "import sys; from workbench.encoder.ledger_plugin import LedgerFinder, register; register(); register()\n"
    "print([f.recorder.max_bytes for f in sys.meta_path if isinstance(f, LedgerFinder)], "
    "[m for m in ('torch', 'vllm') if m in sys.modules])"
)


def test_registering_is_off_by_default_and_once(tmp_path: Path) -> None:
    assert in_child(COUNT, WORKBENCH_LEDGER="") == "[] []"
    path = str(tmp_path / "l")
    assert in_child(COUNT, WORKBENCH_LEDGER=path) == f"[{256 * 2**20}] []"
    assert in_child(COUNT, WORKBENCH_LEDGER=path, WORKBENCH_LEDGER_MAX_BYTES="1000") == "[1000] []"
    assert in_child(COUNT, WORKBENCH_LEDGER=path, WORKBENCH_LEDGER_MAX_BYTES="lots") == f"[{256 * 2**20}] []"
    assert not (tmp_path / "l").exists()


def test_the_entry_point_is_vllms_general_plugin() -> None:
    code = (
        "import importlib.metadata as m; found = m.entry_points(group='vllm.general_plugins')\n"
        "print([e.load().__module__ for e in found if e.name == 'workbench_ledger'])"
    )
    assert in_child(code) == "['workbench.encoder.ledger_plugin']"
