"""The planner against the installed vLLM's own manager, driven with a model that records what it is asked."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.budgets import Configuration, Limits, resolve
from workbench.errors import WorkbenchError
from workbench.planner import plan

pytestmark = pytest.mark.engine


class Recorder:
    """A model without an encoder: items are (input size, output tokens), and the manager's choices are kept."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.batches: list[tuple[list[int], int | None]] = []

    def get_encoder_cudagraph_config(self) -> Any:
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=[],
            out_hidden_size=8,
            max_frames_per_video=self.limits.max_frames_per_video,
        )

    def get_encoder_cudagraph_budget_range(self, _config: Any) -> tuple[int, int]:
        largest = self.limits.max_budget
        assert largest is not None
        return self.limits.min_budget, largest

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderItemSpec

        return [EncoderItemSpec(input_size=size, output_tokens=tokens) for _, size, tokens in mm_kwargs["items"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        return {"items": [mm_kwargs["items"][index] for index in indices]}

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> None:
        self.batches.append(([index for index, _, _ in mm_kwargs["items"]], None))

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: dict[str, Any], *_: Any) -> Any:
        self.replayed = [index for index, _, _ in mm_kwargs["items"]]
        return SimpleNamespace(values={})

    def postprocess_encoder_output(
        self, _outputs: Any, indices: list[int], _tokens: list[int], dest: dict[int, Any], **_: Any
    ) -> None:
        dest.update(dict.fromkeys(indices, 0))


class Graph:
    """What the manager replays: the budget is noted in the recorder."""

    def __init__(self, recorder: Recorder, budget: int) -> None:
        self.recorder, self.budget = recorder, budget
        self.input_buffers: dict[str, Any] = {}
        self.output_buffer = self  # anything but None, which vLLM takes for a missing graph
        self.graph = self

    def replay(self) -> None:
        self.recorder.batches.append((self.recorder.replayed, self.budget))


@pytest.fixture(scope="module")
def encoder_cudagraph() -> Any:
    """vLLM's module of the manager."""
    pytest.importorskip("vllm")
    from workbench.encoder.engine import require_vllm

    require_vllm()
    import vllm.v1.worker.encoder_cudagraph as module

    return module


def manager(module: Any, configuration: Configuration, limits: Limits) -> Any:
    """Return vLLM's real manager over a recorder, as if its graphs were captured."""
    from vllm.config import CompilationConfig

    multimodal = SimpleNamespace(
        get_limit_per_prompt=lambda modality: limits.video_limit if modality == "video" else 999,
        mm_encoder_tp_mode="weights",
    )
    config = SimpleNamespace(
        compilation_config=CompilationConfig(**configuration.compilation_config()),
        model_config=SimpleNamespace(multimodal_config=multimodal),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    recorder = Recorder(limits)
    made = module.EncoderCudaGraphManager(config, None, None, recorder)
    made.budget_graphs = {"default": {budget: Graph(recorder, budget) for budget in made.token_budgets}}
    return made


configurations = st.builds(
    Configuration,
    budgets=st.lists(st.integers(1, 5000) | st.sampled_from([64, 128, 256, 512, 1024]), max_size=7).map(tuple),
    max_items=st.just(0) | st.integers(0, 80),
    max_frames=st.none() | st.integers(0, 200),
)
server_limits = st.builds(
    Limits,
    max_model_len=st.integers(1, 9000),
    max_num_batched_tokens=st.integers(1, 9000),
    min_budget=st.sampled_from([0, 1, 16, 64, 64, 64, 500]),
    video_limit=st.sampled_from([0, 1, 999]),
    max_frames_per_video=st.sampled_from([1, 7, 600]),
)
calls = st.lists(st.lists(st.integers(1, 6000) | st.integers(1, 200), max_size=40), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(configuration=configurations, limits=server_limits)
def test_configurations_resolve_as_in_the_real_manager(
    encoder_cudagraph: Any, configuration: Configuration, limits: Limits
) -> None:
    try:
        real = manager(encoder_cudagraph, configuration, limits)
    except ValueError:
        with pytest.raises(WorkbenchError, match="vLLM refuses"):
            resolve(configuration, limits)
        return
    resolved = resolve(configuration, limits)
    assert list(resolved.budgets) == real.token_budgets
    assert resolved.max_items == real.max_batch_size
    assert resolved.max_frames == real.max_frames_per_batch


@pytest.mark.parametrize(
    "configuration", [Configuration((128, 0)), Configuration((-1,)), Configuration((), -1), Configuration((), 0, -1)]
)
def test_values_refused_as_in_the_real_configuration(encoder_cudagraph: Any, configuration: Configuration) -> None:
    limits = Limits(max_model_len=4096, max_num_batched_tokens=4096)
    with pytest.raises(ValueError, match=r"positive|non-negative"):
        manager(encoder_cudagraph, configuration, limits)
    with pytest.raises(WorkbenchError, match="vLLM refuses"):
        resolve(configuration, limits)


@settings(max_examples=200, deadline=None)
@given(workload=calls, configuration=configurations)
def test_batches_are_those_of_the_real_manager(
    encoder_cudagraph: Any, workload: list[list[int]], configuration: Configuration
) -> None:
    limits = Limits(max_model_len=4096, max_num_batched_tokens=8192)
    try:
        real = manager(encoder_cudagraph, configuration, limits)
    except ValueError:
        return
    offsets = np.cumsum([0, *(len(call) for call in workload)])
    tokens = np.array([count for call in workload for count in call], np.int64)
    made = plan(tokens, offsets, resolve(configuration, limits)).record()
    for call, planned in zip(workload, made["calls"], strict=True):
        real.model.batches.clear()
        real.execute({"items": [(index, 4 * count, count) for index, count in enumerate(call)]})
        assert [(batch["items"], batch["budget"]) for batch in planned["batches"]] == real.model.batches


@settings(max_examples=150, deadline=None)
@given(
    call=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), max_size=40),
    dp=st.integers(2, 8),
)
def test_ranks_are_those_of_the_real_manager(encoder_cudagraph: Any, call: list[tuple[int, int]], dp: int) -> None:
    limits = Limits()
    configuration = Configuration((64, 100, 256), 6)
    tokens = [count for count, _ in call]
    sizes = [size for _, size in call]
    made = plan(
        np.array(tokens, np.int64),
        np.array([0, len(call)]),
        resolve(configuration, limits),
        dp=dp,
        input_sizes=np.array(sizes, np.int64),
    ).record()
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_cudagraph, "get_tensor_model_parallel_world_size", lambda: dp)
        for rank in range(dp):
            patch.setattr(encoder_cudagraph, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            real = manager(encoder_cudagraph, configuration, limits)
            items = {"items": [(index, size, count) for index, (count, size) in enumerate(call)]}
            local = real._dp_shard(items, tokens)[0]
            real._execute_local(local)
            expected += [(rank, items, budget) for items, budget in real.model.batches]
    found = [(batch["rank"], batch["items"], batch["budget"]) for batch in made["calls"][0]["batches"]]
    assert found == expected
