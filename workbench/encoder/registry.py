"""How to build each model's real vLLM encoder without its language model.

The facts of a model are in `workbench.models`; here is, under the same key, what needs vLLM: which classes make the
encoder, which attributes vLLM's model class keeps its parts in, and how the sizes shrink for quick tests.

Import this module only after `engine.require_vllm`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from workbench.encoder.candidates import Candidate, no_more, of_ernie, of_glm
from workbench.errors import WorkbenchError
from workbench.models import ModelFacts, model_facts

# Kernels want multiples of this; reduced widths of the output and the merger are rounded to it.
_ROUND = 64


@dataclass(frozen=True)
class Builder:
    """What the workbench needs to know about one vLLM model class.

    Attributes:
        build: facts -> the vLLM model object, holding only its encoder; call it inside `engine.building`.
        parts: attributes of the model object that are the encoder, which is also what a checkpoint must fill.
        reduce: facts, width -> facts of that width, with head size and ratios kept as far as they can be.
        parameters: facts -> number of parameters, before anything is built.
        module: vLLM's module of the model class, where it looks `scatter_output_slices` up.
        merged: dotted names of the modules that run on merged rows, patches / merge squared, with all inside them.
        outside: dotted names of the modules that no graph runs: what they make is metadata, computed before a replay.
        candidates: what `workbench boundary` tries beside what vLLM captures.
    """

    build: Callable[[ModelFacts], Any]
    parts: tuple[str, ...]
    reduce: Callable[[ModelFacts, int], ModelFacts]
    parameters: Callable[[ModelFacts], int]
    module: str
    merged: tuple[str, ...]
    outside: tuple[str, ...] = ()
    candidates: Callable[[Any, Any], list[Candidate]] = no_more


def builder(key: str) -> Builder:
    """Return the builder of model `key`.

    Raises:
        WorkbenchError: no such model, or facts without a builder.
    """
    model_facts(key)
    try:
        return BUILDERS[key]
    except KeyError:
        raise WorkbenchError(
            f"model {key!r} can be planned but not run; {', '.join(sorted(BUILDERS))} can be run"
        ) from None


def reduced_facts(key: str, depth: int | None, width: int | None) -> ModelFacts:
    """Return the facts of model `key` at `depth` blocks and `width` features; None is the full size.

    Raises:
        WorkbenchError: a size that is not positive, above the model's, or a width that cuts a head.
    """
    facts = model_facts(key)
    if depth is not None and not 1 <= depth <= facts.depth:
        raise WorkbenchError(f"depth {depth} is not between 1 and {facts.depth}, the depth of {facts.title}")
    facts = dataclasses.replace(facts, depth=depth or facts.depth)
    if width is None:
        width = facts.width
    head = facts.width // facts.heads
    if width % head or not head <= width <= facts.width:
        raise WorkbenchError(
            f"width {width} is not a multiple of {head}, the head size of {facts.title}, between {head} and "
            f"{facts.width}; try {2 * head}"
        )
    return builder(key).reduce(facts, width)


def _scaled(size: int, facts: ModelFacts, width: int) -> int:
    """Return `size` in proportion to the width, rounded to a multiple that kernels take."""
    return size if width == facts.width else max(1, round(size * width / facts.width / _ROUND)) * _ROUND


def _bare(model_class: Any) -> Any:
    """Return a vLLM model object on which nothing but `nn.Module` was initialised."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    return model


# Ernie-4.5-VL ---------------------------------------------------------------------------------------------------


def _reduce_ernie(facts: ModelFacts, width: int) -> ModelFacts:
    ratio = facts.mlp_width // facts.width
    return dataclasses.replace(
        facts,
        width=width,
        heads=width * facts.heads // facts.width,
        mlp_width=ratio * width,
        out_width=_scaled(facts.out_width, facts, width),
    )


def _build_ernie(facts: ModelFacts) -> Any:
    from vllm.model_executor.models import ernie45_vl

    vision = SimpleNamespace(
        patch_size=facts.patch,
        spatial_merge_size=facts.merge,
        in_channels=3,
        hidden_size=facts.width,
        embed_dim=facts.width,
        depth=facts.depth,
        num_heads=facts.heads,
        mlp_ratio=facts.mlp_width / facts.width,
    )
    config = SimpleNamespace(
        hidden_size=facts.out_width,
        pixel_hidden_size=facts.width,
        spatial_conv_size=facts.merge,
        temporal_conv_size=facts.extra["temporal_merge"],
        use_temporal_conv=facts.extra["use_temporal_conv"],
        rms_norm_eps=1e-5,
        vision_config=vision,
    )
    model = _bare(ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration)
    model.config = config
    model.vision_model = ernie45_vl.Ernie4_5_VisionTransformer(
        vision, norm_eps=config.rms_norm_eps, prefix="vision_model"
    )
    model.resampler_model = ernie45_vl.VariableResolutionResamplerModel(
        config.pixel_hidden_size,
        config.hidden_size,
        config.spatial_conv_size,
        config.temporal_conv_size,
        config=config,
        prefix="resampler_model",
    )
    return model


def _ernie_parameters(facts: ModelFacts) -> int:
    width, mlp, out = facts.width, facts.mlp_width, facts.out_width
    block = 4 * width * (width + 1) + 2 * width * mlp + mlp + width + 4 * width
    merged = facts.merge**2 * width
    temporal = int(facts.extra["temporal_merge"]) if facts.extra["use_temporal_conv"] else 0
    linears = (2 + (temporal + 1 if temporal else 0)) * merged**2 + merged * out
    biases = (2 + 2 * bool(temporal)) * merged + out
    norms = (2 + 2 * bool(temporal)) * merged + out
    return facts.depth * block + facts.patch_features * width + 2 * width + linears + biases + norms


# GLM-4.1V -------------------------------------------------------------------------------------------------------


def _reduce_glm(facts: ModelFacts, width: int) -> ModelFacts:
    return dataclasses.replace(
        facts,
        width=width,
        heads=width * facts.heads // facts.width,
        mlp_width=_scaled(facts.mlp_width, facts, width),
        out_width=_scaled(facts.out_width, facts, width),
    )


def _build_glm(facts: ModelFacts) -> Any:
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from vllm.model_executor.models import glm4_1v

    vision = Glm4vVisionConfig(
        depth=facts.depth,
        hidden_size=facts.width,
        num_heads=facts.heads,
        patch_size=facts.patch,
        temporal_patch_size=facts.temporal_patch,
        spatial_merge_size=facts.merge,
        out_hidden_size=facts.out_width,
        intermediate_size=facts.mlp_width,
        image_size=_GLM_IMAGE_SIZE,
    )
    text = SimpleNamespace(hidden_size=facts.out_width)
    model = _bare(glm4_1v.Glm4vForConditionalGeneration)
    model.config = SimpleNamespace(vision_config=vision, text_config=text)
    model.is_multimodal_pruning_enabled = False
    # 1e-5: what vLLM uses, as GLM's top-level config names no epsilon.
    model.visual = glm4_1v.Glm4vVisionTransformer(text, vision, norm_eps=1e-5, prefix="visual")
    return model


# Side of the image, in pixels, whose position embedding the checkpoint holds.
_GLM_IMAGE_SIZE = 336


def _glm_parameters(facts: ModelFacts) -> int:
    width, out = facts.width, facts.out_width
    # vLLM's blocks take the output width as the width of their MLP; `mlp_width` is the merger's.
    block = 4 * width**2 + 3 * width * out + 2 * width
    merger = out**2 + 2 * out + 3 * out * facts.mlp_width
    positions = (_GLM_IMAGE_SIZE // facts.patch) ** 2 * width
    downsample = facts.merge**2 * width * out + out
    return facts.depth * block + (facts.patch_features + 1) * width + positions + 2 * width + downsample + merger


# Qwen ------------------------------------------------------------------------------------------------------------


def _allowing_video(model: Any, facts: ModelFacts) -> Any:
    """Give `model` what Qwen's classes read beside their tower.

    Their frames per video come from a processor, which a model without a checkpoint has not.
    """
    from vllm.config import get_current_vllm_config

    limit = get_current_vllm_config().model_config.multimodal_config.get_limit_per_prompt
    model.is_multimodal_pruning_enabled = False
    model.model_config = get_current_vllm_config().model_config
    model.get_max_frames_per_video = lambda: facts.frames_per_video(limit("video"))
    return model


def _build_qwen2_5(facts: ModelFacts) -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from vllm.model_executor.models import qwen2_5_vl

    # Every eighth block attends to whole frames; of fewer than eight blocks the last, if it is not the only one.
    full = list(range(7, facts.depth, 8)) or [facts.depth - 1][: facts.depth - 1]
    vision = Qwen2_5_VLVisionConfig(
        depth=facts.depth,
        hidden_size=facts.width,
        num_heads=facts.heads,
        intermediate_size=facts.mlp_width,
        out_hidden_size=facts.out_width,
        patch_size=facts.patch,
        temporal_patch_size=facts.temporal_patch,
        spatial_merge_size=facts.merge,
        window_size=facts.extra["window"],
        fullatt_block_indexes=full,
    )
    model = _bare(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration)
    model.config = SimpleNamespace(vision_config=vision)
    model.visual = qwen2_5_vl.Qwen2_5_VisionTransformer(vision, norm_eps=1e-6, prefix="visual")
    return _allowing_video(model, facts)


def _qwen2_5_parameters(facts: ModelFacts) -> int:
    width, mlp, merged = facts.width, facts.mlp_width, facts.merge**2 * facts.width
    block = 4 * width * (width + 1) + 3 * width * mlp + 2 * mlp + width + 2 * width
    merger = width + merged * (merged + 1) + (merged + 1) * facts.out_width
    return facts.depth * block + facts.patch_features * width + merger


def _reduce_qwen3(facts: ModelFacts, width: int) -> ModelFacts:
    """Fewer blocks than deepstack mergers leave room for as many mergers as blocks, which narrows the output."""
    full = int(facts.extra["deepstack"])
    levels = min(full, facts.depth)
    single = _scaled(facts.out_width // (1 + full), facts, width)
    return dataclasses.replace(
        _reduce_glm(facts, width), out_width=(1 + levels) * single, extra=facts.extra | {"deepstack": levels}
    )


def _build_qwen3(facts: ModelFacts) -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from vllm.model_executor.models import qwen3_vl

    levels = int(facts.extra["deepstack"])
    full = [8, 16, 24]
    vision = Qwen3VLVisionConfig(
        depth=facts.depth,
        hidden_size=facts.width,
        num_heads=facts.heads,
        intermediate_size=facts.mlp_width,
        out_hidden_size=facts.out_width // (1 + levels),
        patch_size=facts.patch,
        temporal_patch_size=facts.temporal_patch,
        spatial_merge_size=facts.merge,
        num_position_embeddings=facts.extra["positions"],
        deepstack_visual_indexes=full if facts.depth > full[-1] else list(range(levels)),
    )
    model = _bare(qwen3_vl.Qwen3VLForConditionalGeneration)
    model.config = SimpleNamespace(vision_config=vision)
    model.visual = qwen3_vl.Qwen3_VisionTransformer(vision, norm_eps=1e-6, prefix="visual")
    return _allowing_video(model, facts)


def _qwen3_parameters(facts: ModelFacts) -> int:
    width, mlp, merged = facts.width, facts.mlp_width, facts.merge**2 * facts.width
    levels = int(facts.extra["deepstack"])
    single = facts.out_width // (1 + levels)
    block = 4 * width * (width + 1) + 2 * width * mlp + mlp + width + 4 * width
    linears = merged * (merged + 1) + (merged + 1) * single
    outside = (facts.patch_features + 1) * width + int(facts.extra["positions"]) * width
    return facts.depth * block + outside + (1 + levels) * linears + 2 * width + levels * 2 * merged


BUILDERS: dict[str, Builder] = {
    "ernie45_vl": Builder(
        build=_build_ernie,
        parts=("vision_model", "resampler_model"),
        reduce=_reduce_ernie,
        parameters=_ernie_parameters,
        module="vllm.model_executor.models.ernie45_vl",
        merged=("resampler_model",),
        candidates=of_ernie,
    ),
    "glm4_1v": Builder(
        build=_build_glm,
        parts=("visual",),
        reduce=_reduce_glm,
        parameters=_glm_parameters,
        module="vllm.model_executor.models.glm4_1v",
        merged=("visual.downsample", "visual.merger"),
        outside=("visual.embeddings",),
        candidates=of_glm,
    ),
    "qwen2_5_vl": Builder(
        build=_build_qwen2_5,
        parts=("visual",),
        reduce=_reduce_glm,
        parameters=_qwen2_5_parameters,
        module="vllm.model_executor.models.qwen2_5_vl",
        merged=("visual.merger",),
    ),
    "qwen3_vl": Builder(
        build=_build_qwen3,
        parts=("visual",),
        reduce=_reduce_qwen3,
        parameters=_qwen3_parameters,
        module="vllm.model_executor.models.qwen3_vl",
        merged=("visual.merger", "visual.deepstack_merger_list"),
        outside=("visual.pos_embed",),
    ),
}
