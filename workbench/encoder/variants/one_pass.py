"""Variant `one_pass`: the buffers of a call are prepared in one pass over its items.

Grids are read once. Items that lie side by side are a view of the call's rows, not a copy. A captured buffer is
zeroed only where the replay before left rows behind, and not written at all when it already holds the value.

Import this module only after `engine.require_vllm`.
"""

from itertools import accumulate, pairwise
from typing import Any

from workbench.encoder.variants.base import GridInts, GridsOnce
from workbench.encoder.variants.padding import HeldOffsets, NarrowCopy, Padding


class OnePass(GridsOnce):
    """See the module."""

    def __init_variant__(self) -> None:
        """Make the notes of what buffers hold; `attach` calls it."""
        self._pixels = NarrowCopy(immutable=False)  # pixel rows are the caller's, who may write them again
        self._metadata = NarrowCopy(immutable=True)
        self._offsets = HeldOffsets()

    def padding_logic(self, key: str) -> Padding:
        """Return a narrow copy for every buffer; offsets repeat their last one, as vLLM's padding of them does."""
        if key == "cu_seqlens":
            return self._offsets
        return self._pixels if key == "pixel_values" else self._metadata

    def select_rows(self, mm_kwargs: dict[str, Any], grids: GridInts, indices: list[int]) -> dict[str, Any]:
        """Return a view where the items of the batch follow one another in the call, else vLLM's copy."""
        side_by_side = indices and all(b == a + 1 for a, b in pairwise(indices))
        if not side_by_side:
            return super().select_rows(mm_kwargs, grids, indices)
        offsets = [0, *accumulate(t * h * w for t, h, w in grids)]
        first, last = indices[0], indices[-1] + 1
        return {
            "pixel_values": mm_kwargs["pixel_values"][offsets[first] : offsets[last]],
            "image_grid_thw": mm_kwargs["image_grid_thw"][first:last],
        }
