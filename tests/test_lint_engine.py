"""Captured shapes, and the defects the rules name, against the installed vLLM's own model classes at tiny width."""

from collections.abc import Iterator
from typing import Any

import pytest

from workbench.budgets import Configuration, Limits, Resolved, resolve
from workbench.lint import lint
from workbench.models import model_facts
from workbench.shapes import Capture, captured_shapes

pytestmark = pytest.mark.engine

pytest.importorskip("vllm", reason="the engine is not installed")

WIDTHS = {"ernie45_vl": 160, "glm4_1v": 256, "qwen2_5_vl": 160, "qwen3_vl": 144}


@pytest.fixture(scope="module", params=sorted(WIDTHS))
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One-block encoders of both models."""
    from workbench.encoder.session import SessionOptions, open_session

    options = SessionOptions(model=request.param, depth=1, width=WIDTHS[request.param], device="cpu", video_limit=1)
    with open_session(options, Configuration((64,), 4)) as opened:
        yield opened


def real_inputs(session: Any, budget: int, resolved: Resolved) -> dict[str, Any]:
    """Return the tensors that vLLM captures for a budget."""
    import torch

    with torch.inference_mode():
        captured = session.model.prepare_encoder_cudagraph_capture_inputs(
            budget, resolved.max_items, resolved.max_frames, session.device, torch.bfloat16
        )
    return {name: tensor for name, tensor in captured.values.items() if tensor is not None}


CONFIGURATIONS = (
    ((64, 256), 4, None, 0),
    ((64, 100, 101), 8, None, 0),
    ((64,), 1, None, 0),
    ((100, 333), 7, 0, 999),
    ((64, 100), 4, 2, 999),
    ((64,), 4, 7, 999),
    ((64, 100), 4, 10, 999),
    ((64,), 4, 32, 999),
    ((64,), 2, None, 999),
)


@pytest.mark.parametrize(("budgets", "items", "frames", "video_limit"), CONFIGURATIONS)
def test_shapes(session: Any, budgets: tuple[int, ...], items: int, frames: int | None, video_limit: int) -> None:
    limits = Limits.of(session.facts, video_limit=video_limit)
    resolved = resolve(Configuration(budgets, items, frames), limits)
    for capture in captured_shapes(session.facts, resolved):
        real = real_inputs(session, capture.budget, resolved)
        found = {buffer.name: (buffer.shape, buffer.dtype) for buffer in capture.inputs}
        assert found == {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in real.items()}
        assert sum(buffer.bytes for buffer in capture.inputs) == sum(t.nbytes for t in real.values())
        longest = "max_seqlen_full" if session.facts.key == "qwen2_5_vl" else "max_seqlen"
        assert capture.max_seqlen == int(real[longest])
        assert capture.sequence_slots == len(real["cu_seqlens"]) - 1
        assert capture.patches == int(real["cu_seqlens"].max())
        check_output(session, capture, real)


def check_output(session: Any, capture: Capture, real: dict[str, Any]) -> None:
    """Compare the output buffer with what the real forward returns."""
    import torch

    if capture.patches > 2048:
        return
    with torch.inference_mode():
        output = session.model.encoder_cudagraph_forward(dict(real))
    assert tuple(output.shape) == capture.output.shape
    assert str(output.dtype) == f"torch.{capture.output.dtype}"


@pytest.mark.parametrize("items", [1, 4])
@pytest.mark.parametrize("frames", [0, 2, 4, 5, 7, 32])
def test_zeroed_tails_are_those_of_the_real_buffers(session: Any, items: int, frames: int) -> None:
    import torch

    configuration = Configuration((64,), items, frames)
    resolved = resolve(configuration, Limits.of(session.facts))
    captured = real_inputs(session, 64, resolved)
    for modality in session.facts.graph_modalities:
        inputs = session.inputs([(1, 4, 4)], modality=modality)
        with torch.inference_mode():
            replay = session.model.prepare_encoder_cudagraph_replay_buffers(
                inputs.mm_kwargs, items, resolved.max_frames
            ).values
        repeats = "cu_seqlens" in session.model.get_encoder_cudagraph_config().padding_logics
        assert repeats == bool(session.facts.extra.get("repeats_last_offset"))
        zeroed = 0 if repeats else len(captured["cu_seqlens"]) - len(replay["cu_seqlens"])
        findings = [
            finding.evidence["zeroed"]
            for finding in lint(session.facts, configuration).findings
            if finding.rule == "zeroed-sequence-tail" and ("image replay" in finding.message) == (modality == "image")
        ]
        assert findings == ([zeroed] if zeroed > 0 else [])


@pytest.mark.parametrize("session", ["glm4_1v"], indirect=True)
def test_the_default_video_limit_computes_600_times_the_smallest_budget(session: Any) -> None:
    """D2: with nothing given, vLLM's own dummy inputs have the same 153,600 patches for different budgets."""
    limits = Limits.of(session.facts, max_model_len=16_384, max_num_batched_tokens=8_192)
    resolved = resolve(Configuration(), limits)
    assert (resolved.max_items, resolved.max_frames) == (64, 38_400)
    for budget in resolved.budgets[:2]:
        real = real_inputs(session, budget, resolved)
        assert len(real["pixel_values"]) == int(real["cu_seqlens"].max()) == 153_600
    assert 600 * resolved.budgets[0] * session.facts.merge**2 == 153_600
    spared = resolve(Configuration(), Limits.of(session.facts, max_model_len=16_384, video_limit=0))
    assert len(real_inputs(session, 64, spared)["pixel_values"]) == 64 * session.facts.merge**2


@pytest.mark.parametrize("session", ["glm4_1v"], indirect=True)
def test_the_rotary_table_ends_where_the_rule_says(session: Any) -> None:
    images = Limits.of(session.facts, video_limit=0)
    for budget, found in ((4096, False), (4097, True)):
        configuration = Configuration((budget,), 1)
        rules = {finding.rule for finding in lint(session.facts, configuration, images).findings}
        assert ("rotary-table-overrun" in rules) == found
        if found:
            with pytest.raises(IndexError, match="8192"):
                real_inputs(session, budget, resolve(configuration, images))
        else:
            real_inputs(session, budget, resolve(configuration, images))


@pytest.mark.parametrize("session", ["glm4_1v"], indirect=True)
def test_more_frames_than_slots_raise_at_the_copy(session: Any) -> None:
    """The planner's `over_frames` is what vLLM's manager fails on (D4); one frame fewer runs."""
    import numpy as np

    from workbench.planner import plan

    configuration = Configuration((64,), 4, 6)
    session.configure(configuration)
    session.capture()
    for frames, over in ((2, False), (3, True)):
        inputs = session.inputs([(frames, 4, 4), (frames, 4, 4), (2, 4, 4)], modality="video")
        made = plan(
            np.array(inputs.tokens),
            np.array([0, 3]),
            resolve(configuration, Limits.of(session.facts)),
            frames=np.array([frames, frames, 2]),
        )
        assert made.over_frames.any() == over
        if over:
            with pytest.raises(RuntimeError, match="size"):
                session.graph(inputs)
        else:
            session.graph(inputs)


def test_facts_agree_with_the_real_budget_range(session: Any) -> None:
    from types import SimpleNamespace

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        model_config=session.model.model_config
        if session.facts.frames_shared
        else SimpleNamespace(max_model_len=16_384),
    )
    facts = model_facts(session.facts.key)
    assert session.model.get_encoder_cudagraph_budget_range(config) == (facts.min_budget, 8192)
    graphs = session.model.get_encoder_cudagraph_config()
    assert tuple(graphs.modalities) == facts.graph_modalities
    assert graphs.max_frames_per_video == facts.max_frames_per_video
