"""The ledger around vLLM's own classes: the real runners and the real manager with static replay.

The whole engine is in `test_engine_bench.py`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.budgets import Configuration, Limits, resolve
from workbench.encoder import ledger_plugin
from workbench.encoder.ledger_plugin import MANAGER, RUNNER_V1, RUNNER_V2, Recorder
from workbench.ledger import CallLine, read_ledger, summarize
from workbench.models import model_facts
from workbench.planner import plan

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="the engine is not installed")

GLM = model_facts("glm4_1v")
GRIDS = [(1, 16, 16), (1, 8, 8), (1, 16, 24), (1, 40, 40), (1, 4, 16)]
CONFIGURATION = Configuration((64, 128, 256), 3)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """A one-block GLM-4.1V with captured static replays."""
    from workbench.encoder.session import SessionOptions, open_session

    with open_session(SessionOptions(model="glm4_1v", depth=1, width=256, device="cpu"), CONFIGURATION) as opened:
        opened.capture()
        yield opened


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder patched into vLLM's modules, which are as before after the test."""
    from importlib import import_module

    runner_v1, runner_v2, manager = (import_module(name) for name in (RUNNER_V1, RUNNER_V2, MANAGER))
    kept = {
        runner_v1: ["group_and_batch_mm_kwargs"],
        runner_v2: ["group_and_batch_mm_kwargs"],
        runner_v1.GPUModelRunner: ["_execute_mm_encoder"],
        runner_v2.EncoderRunner: ["execute_mm_encoder", "profile_encoder_cache"],
        manager.EncoderCudaGraphManager: [
            *("execute", "_execute_local", "_get_item_specs", "_select_items", "_run_budget_graph")
        ],
    }
    for owner, names in kept.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    made = Recorder(tmp_path / "ledger.jsonl", 10**7)
    for module in (runner_v1, runner_v2, manager):
        ledger_plugin._patch(module, made)
    return made


def items(session: Any, grids: list[tuple[int, int, int]]) -> list[tuple[str, Any]]:
    """Return images as the scheduler hands them to a runner."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    inputs = session.inputs(grids)
    sizes = inputs.grid.prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    made = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs.mm_kwargs), fields)
    return [("image", item) for item in made["image"]]


def runner_v2(session: Any, graphs: bool) -> Any:
    """Return vLLM's own runner of encoders, model runner v2."""
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    manager = session.manager if graphs else None
    return EncoderRunner(session.model, 8, 8, EncoderCache(), session.dtype, session.device, manager)


def served_by_v1(session: Any, graphs: bool, images: list[tuple[str, Any]]) -> list[Any]:
    """Run v1's own `_execute_mm_encoder` over a runner that has only what it reads."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(
        _batch_mm_inputs_from_scheduler=lambda _: ([str(index) for index in range(len(images))], images, []),
        _cache_encoder_output=lambda *_: None,
        timed_encoder_operation=lambda *_: nullcontext(),
        observability_config=None,
        lora_config=None,
        model=session.model,
        device=session.device,
        is_multimodal_pruning_enabled=False,
        requires_sequential_video_encoding=False,
        encoder_cudagraph_manager=session.manager if graphs else None,
    )
    scheduled = SimpleNamespace(
        scheduled_encoder_inputs={"0": [0]}, ec_manager_metadata=None, free_encoder_mm_hashes=[]
    )
    outputs: list[Any] = GPUModelRunner._execute_mm_encoder(runner, scheduled)
    return outputs


def run(session: Any, runner: str, graphs: bool) -> list[Any]:
    """Encode GRIDS with one of vLLM's runners."""
    import torch

    images = items(session, GRIDS)
    with torch.inference_mode():
        if runner == "v1":
            return served_by_v1(session, graphs, images)
        outputs: list[Any] = runner_v2(session, graphs).execute_mm_encoder(images)
        return outputs


def the_call(path: Path) -> CallLine:
    """Return the only call of a ledger."""
    calls = read_ledger(path).calls
    assert len(calls) == 1
    return calls[0]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_batches_are_the_planners_and_outputs_unchanged(session: Any, recorder: Recorder, runner: str) -> None:
    import torch

    outputs = run(session, runner, graphs=True)
    recorder.off = True
    expected = run(session, runner, graphs=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    line = the_call(recorder.path)
    group = line.groups[0]
    assert (line.runner, group.route, group.modality) == (runner, "graph", "image")
    assert group.grids == [list(grid) for grid in GRIDS]
    tokens = [GLM.tokens(grid) for grid in GRIDS]
    assert group.tokens == tokens
    planned = plan(tokens, [0, len(tokens)], resolve(CONFIGURATION, Limits.of(GLM, video_limit=0))).record()
    batches = [(batch.items, batch.tokens, batch.budget) for batch in group.batches]
    assert batches == [(batch["items"], batch["tokens"], batch["budget"]) for batch in planned["calls"][0]["batches"]]
    assert {batch.budget for batch in group.batches} >= {None, 128}
    assert read_ledger(recorder.path).managers[0].budgets == [64, 128, 256]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_without_graphs_the_call_is_eager(session: Any, recorder: Recorder, runner: str) -> None:
    run(session, runner, graphs=False)
    group = the_call(recorder.path).groups[0]
    assert (group.route, group.tokens, group.batches) == ("eager", [GLM.tokens(grid) for grid in GRIDS], [])
    assert summarize(read_ledger(recorder.path)).misses == len(GRIDS)
