"""Variant `position_cache`, for GLM-4.1V: an item's position embeddings are computed once per grid.

vLLM interpolates the learned position embeddings bicubically, in float32, anew for every item of every call, before
the replay; the rotary tables are gathered anew too. Both depend on the grid and on weights that do not change.

Import this module only after `engine.require_vllm`.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from workbench.encoder.variants.base import Values
from workbench.encoder.variants.metadata_cache import TensorCache

if TYPE_CHECKING:
    from vllm.model_executor.models.glm4_1v import Glm4vForConditionalGeneration as Model
else:
    Model = object

CACHE_BYTES = 256 * 2**20  # 3.6 KiB a patch of the whole encoder: 18 images of 1,024 tokens


class PositionCache(Model):  # type: ignore[misc]  # vLLM is untyped here
    """See the module."""

    def __init_variant__(self) -> None:
        """Make the cache; `attach` calls it."""
        self._forget_positions()

    def _forget_positions(self) -> None:
        self.position_cache = TensorCache(CACHE_BYTES)
        # Held on to: while it is, no other weight can have its memory and be taken for it.
        self._position_weight = self.visual.embeddings.position_embedding.weight.detach()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Forget what was computed from other weights, and load."""
        self._forget_positions()
        loaded: set[str] = super().load_weights(weights)
        return loaded

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Any:
        """Return the pixel rows, and vLLM's metadata with the positions of grids seen before."""
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphReplayBuffers

        weight = self.visual.embeddings.position_embedding.weight
        if weight.data_ptr() != self._position_weight.data_ptr():  # replaced, or moved to another device or dtype
            self._forget_positions()
        image = self.get_input_modality(mm_kwargs) == "image"
        pads = {"max_batch_size": max_batch_size} if image else {"max_frames_per_batch": max_frames_per_batch}
        grids = self._get_grid_thw_by_modality(mm_kwargs)
        # vLLM's own method, on a tower whose positions come from the cache.
        tower = _Positions(self.visual, self.position_cache)
        metadata = type(self.visual).prepare_encoder_metadata(tower, grids, **pads)
        pixels = self._get_pixel_values_by_modality(mm_kwargs)
        return EncoderCudaGraphReplayBuffers(values=metadata | {"pixel_values": pixels})


class _Positions:
    """A tower, for one call, whose positions are cached by grid; everything else is the tower's own."""

    def __init__(self, tower: Any, cache: TensorCache) -> None:
        self._tower, self._cache = tower, cache
        self._items: dict[tuple[int, ...], Values] = {}  # of this call, which may have more than the cache holds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def pos_embeds_interpolate(self, grids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [patches, width], as vLLM's."""
        return self._joined("embeddings", grids)

    def rot_pos_emb(self, grids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return cosines and sines, [patches, half a head] each, as vLLM's; nobody reads the third."""
        return self._joined("cos", grids), self._joined("sin", grids), None

    def _joined(self, name: str, grids: Sequence[Sequence[int]]) -> torch.Tensor:
        items = [self._item(tuple(grid))[name] for grid in grids]
        return items[0] if len(items) == 1 else torch.cat(items)

    def _item(self, grid: tuple[int, ...]) -> Values:
        if grid not in self._items:
            self._items[grid] = self._cache.get(grid, partial(self._computed, list(grid)))
        return self._items[grid]

    def _computed(self, grid: list[int]) -> Values:
        cos, sin, _ = self._tower.rot_pos_emb([grid])
        return {"embeddings": self._tower.pos_embeds_interpolate([grid]), "cos": cos, "sin": sin}
