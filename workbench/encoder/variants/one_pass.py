"""Variant `one_pass`: the buffers of a call are prepared in one pass over its items.

Grids are read once. Items that lie side by side are a view of the call's rows, not a copy. A captured buffer is
zeroed only where the replay before left rows behind, and not written at all when it already holds the value.

Import this module only after `engine.require_vllm`.
"""

from itertools import accumulate
from typing import Any

import torch

from workbench.encoder.variants.base import GridInts, GridsOnce
from workbench.encoder.variants.padding import NarrowCopy, Padding, held_offsets


class OnePass(GridsOnce):
    """See the module."""

    def __init_variant__(self) -> None:
        """Make the copies; `attach` calls it."""
        self._pixels = NarrowCopy(immutable=False)  # pixel rows are the caller's, who may write them again
        self._metadata = NarrowCopy(immutable=True)

    def padding_logic(self, key: str) -> Padding:
        """Return a narrow copy for every buffer; offsets repeat their last one, as vLLM's padding of them does."""
        if key == "cu_seqlens":
            return held_offsets
        return self._pixels if key == "pixel_values" else self._metadata

    def select_rows(self, mm_kwargs: dict[str, Any], grids: GridInts, indices: list[int]) -> dict[str, Any]:
        """Return a view where the items of the batch follow one another in the call, else a copy like vLLM's."""
        pixels, grid = mm_kwargs["pixel_values"], mm_kwargs["image_grid_thw"]
        offsets = [0, *accumulate([t * h * w for t, h, w in grids])]
        first = indices[0] if indices else 0
        last = first + len(indices)
        if indices != list(range(first, last)):
            rows = torch.cat([pixels[offsets[i] : offsets[i + 1]] for i in indices])
            return {"pixel_values": rows, "image_grid_thw": grid[indices]}
        if offsets[last] - offsets[first] < pixels.shape[0]:
            pixels = pixels[offsets[first] : offsets[last]]
        return {"pixel_values": pixels, "image_grid_thw": grid if len(indices) == len(grids) else grid[first:last]}
