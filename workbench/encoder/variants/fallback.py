"""Variant `fallback`: an item above the largest budget runs as served, and is post-processed once (D1, D5).

Import this module only after `engine.require_vllm`.
"""

from typing import Any

import torch
from vllm.model_executor.models import ernie45_vl

from workbench.encoder.variants.base import ErnieVariant

# Key that marks a batch whose output has been through the resampler.
MERGED = "workbench_merged"


class Fallback(ErnieVariant):
    """See the module."""

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> torch.Tensor:
        """Run tower and resampler with the grid on the CPU, as `embed_multimodal` does: nothing waits for the GPU.

        The batch's dict is marked, because the manager hands the same one to `postprocess_encoder_output`.
        """
        grid = mm_kwargs["image_grid_thw"]
        features = self.vision_model(mm_kwargs["pixel_values"].type(self.vision_model.dtype), grid)
        output: torch.Tensor = self.resampler_model(features, grid)
        mm_kwargs[MERGED] = True
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
        """Cut a fallback's rows into items; a replay's rows go through vLLM's own method."""
        if batch_mm_kwargs is None or not batch_mm_kwargs.pop(MERGED, False):
            super().postprocess_encoder_output(
                outputs, indices, per_item_out_tokens, dest, clone=clone, batch_mm_kwargs=batch_mm_kwargs
            )
            return
        ernie45_vl.scatter_output_slices(outputs["default"], indices, per_item_out_tokens, dest, clone)
