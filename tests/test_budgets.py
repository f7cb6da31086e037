"""Budgets resolved as vLLM resolves them; what vLLM refuses is refused, what it accepts oddly is said."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.budgets import (
    DEFAULT_VIDEO_LIMIT,
    MAX_TOKENS,
    Configuration,
    Limits,
    generate_budgets,
    parse_budgets,
    parse_compilation_config,
    resolve,
)
from workbench.errors import WorkbenchError
from workbench.models import MODELS

SERVER = Limits(max_model_len=4096, max_num_batched_tokens=8192)


def test_both_given() -> None:
    resolved = resolve(Configuration((512, 128), 4))
    assert (resolved.budgets, resolved.max_items, resolved.max_frames) == ((128, 512), 4, 4)


def test_all_inferred() -> None:
    resolved = resolve(Configuration(), SERVER)
    assert resolved.budgets == (64, 128, 256, 512, 1024, 2048, 4096)
    assert resolved.max_items == 64
    assert resolved.warnings == ()


def test_inferred_items_are_capped_by_the_smallest_budget() -> None:
    assert resolve(Configuration(budgets=(16, 512)), SERVER).max_items == 16


def test_inferred_budgets_start_at_given_items() -> None:
    assert resolve(Configuration(max_items=100), SERVER).budgets == (100, 200, 400, 800, 1600, 3200, 4096)


def test_the_largest_budget_is_always_there() -> None:
    assert generate_budgets(64, 300) == (64, 128, 256, 300)
    assert generate_budgets(64, 256) == (64, 128, 256)
    assert generate_budgets(5000, 4096) == (4096,)


def test_items_above_every_inferred_budget_are_accepted_and_said() -> None:
    resolved = resolve(Configuration(max_items=5000), SERVER)
    assert (resolved.budgets, resolved.max_items) == ((4096,), 5000)
    assert any("above the smallest inferred budget 4096" in warning for warning in resolved.warnings)


@pytest.mark.parametrize(
    ("configuration", "limits", "frames"),
    [
        (Configuration((64,), 4), Limits(), 4),
        (Configuration((64,), 4), Limits(max_frames_per_video=600), 2400),
        (Configuration((64,), 4, 32), Limits(max_frames_per_video=600), 32),
        (Configuration((64,), 4, 0), Limits(max_frames_per_video=600), 0),
        (Configuration((64,), 4, 32), Limits(max_frames_per_video=600, video_limit=0), 0),
    ],
)
def test_frames(configuration: Configuration, limits: Limits, frames: int) -> None:
    assert resolve(configuration, limits).max_frames == frames


def test_sequence_slots_are_never_fewer_than_items() -> None:
    assert resolve(Configuration((64,), 4, 2)).sequence_slots == 4
    assert resolve(Configuration((64,), 4, 7)).sequence_slots == 7


@pytest.mark.parametrize(
    ("configuration", "limits", "reason"),
    [
        (Configuration((128, 0), 1), SERVER, "budget 0 is not positive"),
        (Configuration((-64,), 1), SERVER, "budget -64 is not positive"),
        (Configuration((128,), -1), SERVER, "max items -1 is negative"),
        (Configuration((128,), 1, -1), SERVER, "max frames -1 is negative"),
        (Configuration((128, 512), 129), SERVER, "above the smallest budget 128"),
        (Configuration(), Limits(), "give max model len"),
        (Configuration((128,)), Limits(), "give max model len"),
        (Configuration(), Limits(max_model_len=32, max_num_batched_tokens=64), "above the largest, 32"),
        (Configuration(), Limits(max_model_len=0), "not positive"),
        (Configuration(), Limits(max_model_len=512, min_budget=0), "not positive"),
        (Configuration((128,), 1), Limits(max_model_len=-5), "max model len -5 is not positive"),
        (Configuration((128,), 1), Limits(max_num_batched_tokens=0), "max num batched tokens 0 is not positive"),
        (Configuration((128,), 1), Limits(max_num_batched_tokens=10**20), "larger than any encoder call"),
        (Configuration((128,), 1), Limits(video_limit=-1), "cannot be negative"),
        (Configuration((MAX_TOKENS + 1,), 1), SERVER, "larger than any encoder call"),
    ],
)
def test_refused(configuration: Configuration, limits: Limits, reason: str) -> None:
    with pytest.raises(WorkbenchError, match=reason):
        resolve(configuration, limits)


@pytest.mark.parametrize(
    ("configuration", "limits", "warning"),
    [
        (Configuration((512, 128), 4), Limits(), "512, 128 are not in ascending order"),
        (Configuration((128, 128, 512), 4), Limits(), "budgets repeat 128"),
        (Configuration(), Limits(max_model_len=4096), "only one of max model len"),
        (Configuration((128,), 4, 8), Limits(video_limit=0), "max frames 8 has no effect"),
    ],
)
def test_accepted_and_said(configuration: Configuration, limits: Limits, warning: str) -> None:
    assert any(warning in said for said in resolve(configuration, limits).warnings)


def test_plain_input_has_no_warnings() -> None:
    assert resolve(Configuration((128, 512), 4, 8)).warnings == ()


@pytest.mark.parametrize(("text", "budgets"), [("", ()), (" ", ()), ("128", (128,)), ("256, 128,", (256, 128))])
def test_budgets_of_text(text: str, budgets: tuple[int, ...]) -> None:
    assert parse_budgets(text) == budgets


@pytest.mark.parametrize("text", ["abc", "128,x", "1.5", "128;256", "nan", "[128]"])
def test_budgets_with_other_text(text: str) -> None:
    with pytest.raises(WorkbenchError, match="not a whole number"):
        parse_budgets(text)


configurations = st.builds(
    Configuration,
    budgets=st.lists(st.integers(1, 10_000), max_size=5).map(tuple),
    max_items=st.integers(0, 100),
    max_frames=st.none() | st.integers(0, 100),
)


@given(configurations)
def test_compilation_config_round_trip(configuration: Configuration) -> None:
    assert parse_compilation_config(json.dumps(configuration.compilation_config())) == configuration


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not what vLLM reads"),
        ("[]", "not what vLLM reads"),
        ('{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budgets": ["x"]}', "not what vLLM reads"),
        ('{"encoder_cudagraph_token_budgets": [128]}', "captures no encoder graph"),
        ('{"cudagraph_mm_encoder": false}', "captures no encoder graph"),
        ('{"cudagraph_mm_encoder": true, "encoder_cudagraph_token_budget": [64]}', "which vLLM refuses; it knows"),
    ],
)
def test_compilation_config_refused(text: str, reason: str) -> None:
    with pytest.raises(WorkbenchError, match=reason):
        parse_compilation_config(text)


def test_limits_of_a_model() -> None:
    limits = Limits.of(MODELS["glm4_1v"], max_model_len=4096, video_limit=None, min_budget=None)
    assert limits == Limits(max_model_len=4096, max_frames_per_video=600, video_limit=DEFAULT_VIDEO_LIMIT)
    assert Limits.of(MODELS["ernie45_vl"], min_budget=32).min_budget == 32
