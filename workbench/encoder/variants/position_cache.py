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
        self.position_cache = TensorCache(CACHE_BYTES)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Forget what was computed from other weights, and load."""
        self.position_cache = TensorCache(CACHE_BYTES)
        loaded: set[str] = super().load_weights(weights)
        return loaded

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Any:
        """Return the pixel rows, and vLLM's metadata with the positions of grids seen before."""
        from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphReplayBuffers

        image = self.get_input_modality(mm_kwargs) == "image"
        pads = {"max_batch_size": max_batch_size} if image else {"max_frames_per_batch": max_frames_per_batch}
        grids = self._get_grid_thw_by_modality(mm_kwargs)
        # vLLM's own method, on a tower whose positions come from the cache.
        tower = _Positions(self.visual, self.position_cache)
        metadata = type(self.visual).prepare_encoder_metadata(tower, grids, **pads)
        pixels = self._get_pixel_values_by_modality(mm_kwargs)
        return EncoderCudaGraphReplayBuffers(values=metadata | {"pixel_values": pixels})


class _Positions:
    """A tower whose positions are cached by grid; everything else is the tower's own."""

    def __init__(self, tower: Any, cache: TensorCache) -> None:
        self._tower, self._cache = tower, cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def pos_embeds_interpolate(self, grids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [patches, width], as vLLM's."""
        return self._joined("embeddings", grids)

    def rot_pos_emb(self, grids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return cosines and sines, [patches, half a head] each, as vLLM's; nobody reads the third."""
        return self._joined("cos", grids), self._joined("sin", grids), None

    def _joined(self, name: str, grids: Sequence[Sequence[int]]) -> torch.Tensor:
        weight = self._tower.embeddings.position_embedding.weight.data_ptr()
        items = [self._cache.get((weight, *grid), partial(self._computed, list(grid)))[name] for grid in grids]
        return items[0] if len(items) == 1 else torch.cat(items)

    def _computed(self, grid: list[int]) -> Values:
        cos, sin, _ = self._tower.rot_pos_emb([grid])
        return {"embeddings": self._tower.pos_embeds_interpolate([grid]), "cos": cos, "sin": sin}
