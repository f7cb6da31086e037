"""Variant `resampler`: the resampler inside the graph, for images and videos.

vLLM runs it after each replay because its temporal part builds two index arrays on the host. Here they are, in turn,
one buffer of the graph, filled before the replay like `cu_seqlens`. For video, budgets count what the graph computes,
patches / merge²; each item's own output has half as many rows, since the temporal part merges frames in pairs.

Import this module only after `engine.require_vllm`.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.model_executor.models import ernie45_vl
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.encoder_cudagraph_defs import EncoderItemSpec

from workbench.encoder.variants.base import SPECS, ErnieVariant, GridInts, Values, item_specs
from workbench.encoder.variants.padding import Padding, repeat_last

TEMPORAL = "temporal"
# A frame counts as at least this many tokens, so that a budget's tokens bound its frames. The processor's smallest
# image, 56 x 56 pixels, has four.
TOKENS_PER_FRAME = 4
_FRAMES_PER_VIDEO = 32  # what the manager multiplies by max items; not zero is all that matters here


def temporal_pairs(grids: GridInts, merge: int) -> NDArray[np.int64]:
    """Return, [2 * rows], for each row that comes out the merged patch of an even frame and that of the next frame.

    A single frame is its own partner.

    Raises:
        ValueError: an odd number of frames above one, which has no pairs.
    """
    pairs = []
    offset = 0
    for t, h, w in grids:
        if t > 1 and t % 2:
            raise ValueError(f"a video of {t} frames cannot be merged in pairs; give an even number of frames")
        frames = (np.arange(t * h * w // merge**2) + offset).reshape(t, -1)
        pairs.append(np.stack([frames[0::2], frames[1::2] if t > 1 else frames], axis=-1).ravel())
        offset += frames.size
    return np.concatenate(pairs)


@lru_cache(maxsize=SPECS)
def checked_specs(grids: GridInts, merge: int, pairs: int | None) -> tuple[EncoderItemSpec, ...]:
    """Return the specs of images, or of videos whose frames are merged by `pairs`.

    Raises:
        ValueError: a grid that the merge does not divide, a video of an odd number of frames.
    """
    for t, h, w in grids:
        if h % merge or w % merge:
            raise ValueError(f"the grid {t} x {h} x {w} is not divisible by the merge of {merge}; resize the input")
        if pairs and t % pairs:
            raise ValueError(
                f"a video of {t} frames cannot be merged in pairs, by vLLM's eager path neither; repeat its last frame"
            )
    specs = item_specs(grids, merge)
    if not pairs:
        return specs
    return tuple(
        EncoderItemSpec(
            input_size=spec.input_size,
            output_tokens=spec.output_tokens // pairs,
            path_output_tokens={"default": max(spec.output_tokens, TOKENS_PER_FRAME * frames)},
        )
        for spec, (frames, _, _) in zip(specs, grids, strict=True)
    )


class ResamplerInGraph(ErnieVariant):
    """See the module."""

    def get_encoder_cudagraph_config(self) -> Any:
        """Add video where the temporal part exists: without it vLLM's own video path raises."""
        config = super().get_encoder_cudagraph_config()
        if self.resampler_model.use_temporal_conv:
            config.modalities = ["image", "video"]
            config.max_frames_per_video = _FRAMES_PER_VIDEO
        return config

    def more_buffers(self) -> tuple[str, ...]:
        """Add the indices."""
        return (*super().more_buffers(), *((TEMPORAL,) if self.resampler_model.use_temporal_conv else ()))

    def padding_logic(self, key: str) -> Padding | None:
        """Let offsets repeat their last one: there are more slots than vLLM's padding fills. Zero is an index."""
        return super().padding_logic(key) or (repeat_last if key == "cu_seqlens" else None)

    # Videos: everything below the outermost methods sees them under the names of images. ----------------------------

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> Any:
        """Count tokens: an image's as vLLM does, a video's as the graph computes and as it comes out.

        Raises:
            ValueError: a grid that the merge does not divide, a video of an odd number of frames.
        """
        grids = self.grids_of_call(_as_images(mm_kwargs))
        pairs = self.resampler_model.temporal_conv_size if _is_video(mm_kwargs) else None
        return list(checked_specs(grids, self.vision_model.spatial_merge_size, pairs))

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """Select a batch; a video's keeps the names of videos."""
        selected: dict[str, Any] = super().select_encoder_cudagraph_items(_as_images(mm_kwargs), indices)
        if _is_video(mm_kwargs):
            selected["pixel_values_videos"] = selected.pop("pixel_values")
            selected["video_grid_thw"] = selected.pop("image_grid_thw")
        return selected

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> torch.Tensor:
        """Run an item above the largest budget; the result is already merged."""
        output: torch.Tensor = super().encoder_eager_forward(_as_images(mm_kwargs), path)
        return output

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Any:
        """Return the buffers of images and videos alike."""
        return super().prepare_encoder_cudagraph_replay_buffers(
            _as_images(mm_kwargs), max_batch_size, max_frames_per_batch, path
        )

    # The graph ------------------------------------------------------------------------------------------------------

    def sequence_slots(self, token_budget: int, max_batch_size: int, max_frames_per_batch: int) -> int:
        """Return one slot per item, or per frame that a budget can hold where videos are served."""
        if max_frames_per_batch == 0 or not self.resampler_model.use_temporal_conv:
            return max_batch_size
        return max(max_batch_size, token_budget // TOKENS_PER_FRAME)

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        """Add the indices, and room for the frames of videos."""
        inputs = super().prepare_encoder_cudagraph_capture_inputs(
            token_budget, max_batch_size, max_frames_per_batch, device, dtype, path, axis_keys
        )
        if not self.resampler_model.use_temporal_conv:
            return inputs
        values = inputs.values
        rows = values["pixel_values"].shape[0] // self.vision_model.spatial_merge_size**2
        values[TEMPORAL] = torch.arange(rows, device=device).repeat_interleave(2)
        offsets = values["cu_seqlens"]
        slots = self.sequence_slots(token_budget, max_batch_size, max_frames_per_batch)
        if slots + 1 > offsets.shape[0]:
            values["cu_seqlens"] = offsets.new_empty(slots + 1)
            repeat_last(values["cu_seqlens"], offsets)
        return inputs

    def replay_metadata(self, grids: GridInts, max_batch_size: int) -> Values:
        """Add the indices. Those behind them are zero, and row 0 exists."""
        values = super().replay_metadata(grids, max_batch_size)
        if self.resampler_model.use_temporal_conv:
            pairs = temporal_pairs(grids, self.vision_model.spatial_merge_size)
            values[TEMPORAL] = async_tensor_h2d(pairs, self.vision_model.device)
        return values

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor], path: str = "default") -> torch.Tensor:
        """Run the tower and the resampler; [budget, out width], of a video's rows only half."""
        features = super().encoder_cudagraph_forward(values, path)
        return self.resample(features, values.get(TEMPORAL))

    def resample(self, x: torch.Tensor, temporal: torch.Tensor | None) -> torch.Tensor:
        """Run vLLM's resampler on [patches, width] features, the rows it pairs given as a tensor [2 * rows]."""
        resampler = self.resampler_model
        x = resampler.spatial_conv_reshape(x, resampler.spatial_conv_size)
        x, _ = resampler.spatial_linear1(x)
        x, _ = resampler.spatial_linear2(resampler.spatial_gelu(x))
        x = self.normed(resampler.spatial_norm, x)
        if temporal is not None:
            x = x.index_select(0, temporal).view(-1, 2 * x.shape[1])
            x, _ = resampler.temporal_linear1(x)
            x, _ = resampler.temporal_linear2(resampler.temporal_gelu(x))
            x = self.normed(resampler.temporal_norm, x)
        x, _ = resampler.mlp(x)
        output: torch.Tensor = resampler.after_norm(x)
        return output

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Cut the merged rows into items."""
        ernie45_vl.scatter_output_slices(outputs["default"], indices, per_item_out_tokens, dest, clone)


def _is_video(mm_kwargs: dict[str, Any]) -> bool:
    return "video_grid_thw" in mm_kwargs


def _as_images(mm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call with a video's tensors under the names of an image's."""
    if not _is_video(mm_kwargs):
        return mm_kwargs
    names = {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"}
    return {names.get(key, key): value for key, value in mm_kwargs.items()}
