"""Sizes to grids to tokens: known answers, limits, and (engine) the functions that vLLM itself calls."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.grids import check_sizes, largest_image, resize, to_grids
from workbench.models import MODELS, Modality, ModelFacts, model_facts

ERNIE, GLM = model_facts("ernie45_vl"), model_facts("glm4_1v")


def grids(facts: ModelFacts, *sizes: tuple[int, int, int]) -> list[list[int]]:
    """Return the grids of a few sizes."""
    made: list[list[int]] = to_grids(np.array(sizes, np.int32), facts).grids.tolist()
    return made


def test_known_sizes() -> None:
    assert grids(ERNIE, (224, 224, 1), (640, 480, 1)) == [[1, 16, 16], [1, 34, 46]]
    assert to_grids(np.array([[224, 224, 1], [640, 480, 1]], np.int32), ERNIE).tokens.tolist() == [64, 391]
    assert grids(GLM, (224, 224, 1), (224, 224, 8), (224, 224, 7)) == [[1, 16, 16], [4, 16, 16], [4, 16, 16]]


def test_vllm_clamps_what_the_processor_refuses() -> None:
    made = resize(np.array([[20, 6000, 1]], np.int32), "image", ERNIE)
    assert (made.width[0], made.height[0], bool(made.refused[0])) == (28, 5600, True)


def test_the_aspect_limit_of_glm_is_taken_after_small_sides_are_scaled_up() -> None:
    sizes = np.array([[28, 5600, 1], [28, 5601, 1], [14, 2800, 1]], np.int32)
    assert to_grids(sizes, GLM).refused.tolist() == [False, True, False]


def test_the_largest_image_is_the_largest_of_many() -> None:
    sides = np.random.default_rng(1).integers(1000, 9000, (20_000, 3)).astype(np.int32)
    sides[:, 2] = 1
    for facts in (ERNIE, GLM):
        assert to_grids(sides, facts).tokens.max() <= largest_image(facts) * 1.02
        assert largest_image(facts) <= facts.limits["image"].max_pixels / (facts.patch * facts.merge) ** 2


def test_ernie_takes_no_video_here() -> None:
    with pytest.raises(WorkbenchError, match="takes no video here"):
        grids(ERNIE, (224, 224, 8))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "has height 0; sizes are at least 1"),
        (-3, "has height -3; sizes are at least 1"),
        (float("nan"), "has no value for height"),
        (float("inf"), "has an infinite height"),
        (10.5, "has height 10.5, which is not a whole number"),
        (2e6, "above the limit of 1,000,000"),
    ],
)
def test_values_that_are_no_sizes(value: float, message: str) -> None:
    sizes = np.array([[10, 10, 1], [10, value, 1], [10, value, 1]])
    with pytest.raises(WorkbenchError, match=r"row 1 .*\(and 1 more\)") as caught:
        check_sizes(sizes, "row {}".format)
    assert message in str(caught.value)


def test_too_many_pixels_over_all_frames() -> None:
    with pytest.raises(WorkbenchError, match="pixels over all frames"):
        check_sizes(np.array([[1_000_000, 1_000_000, 1_000_000]]), "row {}".format)


@given(
    st.lists(st.tuples(st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 700)), min_size=1, max_size=50),
    st.sampled_from(sorted(MODELS)),
)
@settings(max_examples=150, deadline=None)
def test_grids_hold_whole_tokens_within_the_limits(sizes: list[tuple[int, int, int]], key: str) -> None:
    facts = model_facts(key)
    if "video" not in facts.limits:
        sizes = [(width, height, 1) for width, height, _ in sizes]
    made = to_grids(np.array(sizes, np.int32), facts)
    kept = ~made.failed & ~made.refused
    t, h, w = made.grids[kept].T.astype(np.int64)
    assert ((h % facts.merge == 0) & (w % facts.merge == 0) & (t >= 1) & (made.tokens[kept] >= 1)).all()
    assert (made.tokens[kept] * facts.merge**2 == t * h * w).all()


# --- against the functions that vLLM calls ------------------------------------------------------------------


def extreme_sizes(count: int, frames: bool) -> Any:
    """Return sizes spread over all scales and aspect ratios, halves and multiples of the factor among them."""
    generator = np.random.default_rng(7)
    sides = np.exp(generator.uniform(0, np.log(30_000), (count, 2))).astype(np.int64)
    sides[: count // 4] = generator.integers(1, 60, (count // 4, 2)) * 14  # ties of the rounding
    third = generator.integers(2, 700, count) if frames else np.ones(count, np.int64)
    return np.maximum(np.column_stack([sides, third]), 1).astype(np.int32)


@pytest.fixture(scope="module")
def rules() -> dict[tuple[str, str], Any]:
    """The reference of each model and modality: (width, height, frames, limits) -> (width, height), or ValueError."""
    pytest.importorskip("vllm")
    from workbench.encoder import bootstrap

    bootstrap.prepare()
    from transformers.models.glm4v.image_processing_glm4v import smart_resize as glm_image
    from transformers.models.glm4v.video_processing_glm4v import smart_resize as glm_video
    from vllm.model_executor.models import ernie45_vl, glm4_1v

    assert glm4_1v.smart_resize is glm_image  # what vLLM calls is transformers' function

    def ernie(width: int, height: int, _frames: int, limits: Any) -> tuple[int, int]:
        resized = ernie45_vl.smart_resize(height, width, 28, limits.min_pixels, limits.max_pixels)
        return resized[1], resized[0]

    def glm(function: Any) -> Any:
        def rule(width: int, height: int, frames: int, limits: Any) -> tuple[int, int]:
            counted = max(frames, 2)
            resized = function(counted, height, width, 2, 28, limits.min_pixels, limits.max_pixels)
            return resized[1], resized[0]

        return rule

    return {
        ("ernie45_vl", "image"): ernie,
        ("glm4_1v", "image"): glm(glm_image),
        ("glm4_1v", "video"): glm(glm_video),
    }


@pytest.mark.engine
@pytest.mark.parametrize(("key", "modality"), [("ernie45_vl", "image"), ("glm4_1v", "image"), ("glm4_1v", "video")])
def test_every_rule_equals_the_engines(rules: dict[tuple[str, str], Any], key: str, modality: Modality) -> None:
    facts = model_facts(key)
    limits = facts.limits[modality]
    sizes = extreme_sizes(20_000, modality == "video")
    made = resize(sizes, modality, facts)
    assert made.refused.sum() > 1000  # the aspect limit is exercised
    for row, (width, height, frames) in enumerate(sizes.tolist()):
        try:
            expected = rules[key, modality](width, height, frames, limits)
        except ValueError:
            assert made.refused[row] or made.failed[row], sizes[row]
            continue
        assert (made.width[row], made.height[row]) == expected, sizes[row]
        assert key == "ernie45_vl" or not made.refused[row]


@pytest.mark.engine
def test_ernies_refusals_are_those_of_transformers(rules: dict[tuple[str, str], Any]) -> None:
    from transformers.models.ernie4_5_vl_moe.image_processing_ernie4_5_vl_moe import smart_resize

    sizes = extreme_sizes(5000, False)
    made = resize(sizes, "image", ERNIE)
    limits = ERNIE.limits["image"]
    for row, (width, height, _) in enumerate(sizes.tolist()):
        try:
            smart_resize(height, width, 28, limits.min_pixels, limits.max_pixels)
        except ValueError:
            assert made.refused[row]
        else:
            assert not made.refused[row]


@pytest.mark.engine
def test_the_limits_are_the_processors_own(rules: dict[tuple[str, str], Any]) -> None:
    from transformers import Glm4vImageProcessor, Glm4vVideoProcessor
    from transformers.models.ernie4_5_vl_moe.image_processing_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessor

    for facts, modality, processor in (
        (ERNIE, "image", Ernie4_5_VLMoeImageProcessor),
        (GLM, "image", Glm4vImageProcessor),
        (GLM, "video", Glm4vVideoProcessor),
    ):
        limits = facts.limits[modality]  # type: ignore[index]
        size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        assert dict(processor.size) == size, (facts.key, modality)
