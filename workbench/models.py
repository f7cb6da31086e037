"""Facts about the models: what planning and linting need, without torch or vLLM.

An entry holds what the model's checkpoint config and vLLM's model file say: dimensions, how an
image becomes a patch grid, which modalities have graphs. Builders of the real classes are in
`workbench.encoder.registry`, under the same key.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from workbench.errors import WorkbenchError

Modality = Literal["image", "video"]


@dataclass(frozen=True)
class SizeLimits:
    """Pixel limits of a modality's resize rule.

    Attributes:
        min_pixels, max_pixels: area in pixels after rounding, as the model's processor sets them.
        max_aspect: the Hugging Face processor's error above this ratio; vLLM's own resize clamps.
        counts_frames: the limit is on frames x area, frames rounded up to whole temporal patches.
    """

    min_pixels: int
    max_pixels: int
    max_aspect: float | None = 200.0
    counts_frames: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """One vision encoder. Sizes in pixels, widths in features, depth in blocks.

    Attributes:
        key: registry key, also the command line's `--model`.
        title: name for people.
        architecture: vLLM's model class.
        min_budget: smallest auto-inferred token budget (vLLM's `get_encoder_cudagraph_budget_range`).
        max_frames_per_video: frames the manager assumes per video when the user sets none; vLLM's default is 1.
        frames_shared: the model's class divides these frames by the videos allowed per prompt (`frames_per_video`).
        graph_modalities: modalities vLLM captures graphs for.
        sequences: what one `cu_seqlens` entry of an image or video is: the item or a frame.
    """

    key: str
    title: str
    architecture: str
    depth: int
    width: int
    heads: int
    mlp_width: int
    out_width: int
    patch: int
    temporal_patch: int
    merge: int
    min_budget: int
    graph_modalities: tuple[Modality, ...]
    limits: dict[Modality, SizeLimits]
    sequences: Literal["item", "frame"]
    max_frames_per_video: int = 1
    frames_shared: bool = False
    extra: dict[str, int | float | bool] = field(default_factory=dict)

    @property
    def patch_features(self) -> int:
        """Features of one flattened patch row of `pixel_values`."""
        return 3 * self.temporal_patch * self.patch**2

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Output tokens of a (t, h, w) patch grid: t * h * w / merge squared."""
        return math.prod(grid) // self.merge**2

    def frames_per_video(self, video_limit: int) -> int:
        """Frames the manager assumes per video of a server that allows `video_limit` videos per prompt.

        Where they are shared this is the most: vLLM lowers it further when a video of so many frames and of the largest
        size has more tokens than `--max-model-len`.
        """
        shared = max(video_limit, 1) if self.frames_shared else 1
        return max(self.max_frames_per_video // shared, 1)


_ERNIE45_VL = ModelFacts(
    key="ernie45_vl",
    title="ERNIE-4.5-VL",
    architecture="Ernie4_5_VLMoeForConditionalGeneration",
    depth=32,
    width=1280,
    heads=16,
    mlp_width=5120,
    out_width=2560,
    patch=14,
    temporal_patch=1,
    merge=2,
    min_budget=64,
    graph_modalities=("image",),
    limits={"image": SizeLimits(min_pixels=3_136, max_pixels=4_842_768)},
    sequences="item",
    extra={"use_temporal_conv": True, "temporal_merge": 2, "fallback_crashes": True, "single_rank": True},
)
_GLM4_1V = ModelFacts(
    key="glm4_1v",
    title="GLM-4.1V",
    architecture="Glm4vForConditionalGeneration",
    depth=24,
    width=1536,
    heads=12,
    mlp_width=13_696,
    out_width=4096,
    patch=14,
    temporal_patch=2,
    merge=2,
    min_budget=64,
    graph_modalities=("image", "video"),
    limits={
        "image": SizeLimits(min_pixels=12_544, max_pixels=11_760_000, counts_frames=True),
        "video": SizeLimits(min_pixels=12_544, max_pixels=47_040_000, counts_frames=True),
    },
    sequences="frame",
    max_frames_per_video=600,
    extra={"rotary_positions": 8192},
)

# The 7B model's.
_QWEN2_5_VL = ModelFacts(
    key="qwen2_5_vl",
    title="Qwen2.5-VL",
    architecture="Qwen2_5_VLForConditionalGeneration",
    depth=32,
    width=1280,
    heads=16,
    mlp_width=3420,
    out_width=3584,
    patch=14,
    temporal_patch=2,
    merge=2,
    min_budget=64,
    graph_modalities=("image", "video"),
    limits={
        "image": SizeLimits(min_pixels=3_136, max_pixels=12_845_056),
        "video": SizeLimits(min_pixels=3_136, max_pixels=12_845_056),
    },
    sequences="frame",
    max_frames_per_video=14,
    frames_shared=True,
    extra={"rotary_positions": 8192, "window": 112, "repeats_last_offset": True},
)
# The 8B model's. A token of the output holds the merger's 4,096 features and those of three deepstack mergers.
_QWEN3_VL = ModelFacts(
    key="qwen3_vl",
    title="Qwen3-VL",
    architecture="Qwen3VLForConditionalGeneration",
    depth=27,
    width=1152,
    heads=16,
    mlp_width=4304,
    out_width=4 * 4096,
    patch=16,
    temporal_patch=2,
    merge=2,
    min_budget=64,
    graph_modalities=("image", "video"),
    limits={
        "image": SizeLimits(min_pixels=65_536, max_pixels=16_777_216),
        "video": SizeLimits(min_pixels=4_096, max_pixels=25_165_824, counts_frames=True),
    },
    sequences="frame",
    max_frames_per_video=2048,
    frames_shared=True,
    extra={"rotary_positions": 8192, "deepstack": 3, "positions": 2304},
)

MODELS: dict[str, ModelFacts] = {facts.key: facts for facts in (_ERNIE45_VL, _GLM4_1V, _QWEN2_5_VL, _QWEN3_VL)}


def model_facts(key: str) -> ModelFacts:
    """Return the registry's entry for `key`.

    Raises:
        WorkbenchError: no such model.
    """
    try:
        return MODELS[key]
    except KeyError:
        raise WorkbenchError(f"unknown model {key!r}; this workbench knows {', '.join(sorted(MODELS))}") from None


def small_size(facts: ModelFacts, heads: int = 2) -> tuple[int, int]:
    """Return blocks and features of the encoder that a CPU runs where nobody asks for a size.

    Args:
        facts: the whole encoder.
        heads: attention heads to keep, for ranks that share them.
    """
    return 2, min(heads, facts.heads) * facts.width // facts.heads
