"""What the ERNIE variants share: reading a call's grids, and where metadata comes from.

Import this module only after `engine.require_vllm`.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphReplayBuffers, EncoderItemSpec

from workbench.encoder.variants.padding import Padding

if TYPE_CHECKING:
    from vllm.model_executor.models.ernie45_vl import Ernie4_5_VLMoeForConditionalGeneration as Model
else:
    Model = object  # a variant stands before vLLM's class in the order of methods

GridInts = tuple[tuple[int, int, int], ...]
Values = dict[str, torch.Tensor]

# Key that a batch's dict carries its grids under, as Python ints.
GRIDS = "workbench_grids"
SPECS = 256  # sequences of grids whose specs are kept


@lru_cache(maxsize=SPECS)
def item_specs(grids: GridInts, merge: int) -> tuple[EncoderItemSpec, ...]:
    """Return vLLM's specs of images; nobody writes to them, so calls of the same grids share them."""
    return tuple(EncoderItemSpec(input_size=t * h * w, output_tokens=t * h * w // merge // merge) for t, h, w in grids)


class ErnieVariant(Model):  # type: ignore[misc]  # vLLM is untyped here
    """Base of all ERNIE variants: vLLM's behaviour, cut at the places that variants replace."""

    def grids_of(self, mm_kwargs: Mapping[str, Any]) -> GridInts:
        """Return (t, h, w) in patches of each item of an image call, read on the host."""
        return tuple((t, h, w) for t, h, w in mm_kwargs["image_grid_thw"].tolist())

    def grids_of_call(self, mm_kwargs: Mapping[str, Any]) -> GridInts:
        """Return the same at the item specs, where a call or a batch begins."""
        return self.grids_of(mm_kwargs)

    def get_encoder_cudagraph_config(self) -> Any:
        """Return vLLM's, with the buffers and padding logics that variants add."""
        config = super().get_encoder_cudagraph_config()
        config.buffer_keys = [*config.buffer_keys, *self.more_buffers()]
        logics = {key: self.padding_logic(key) for key in config.buffer_keys}
        config.padding_logics = config.padding_logics | {key: logic for key, logic in logics.items() if logic}
        return config

    def more_buffers(self) -> tuple[str, ...]:
        """Return the names of captured buffers that vLLM does not have."""
        return ()

    def padding_logic(self, key: str) -> Padding | None:
        """Return how buffer `key` is filled; None is vLLM's way: zero it, then copy."""
        return None

    def sequence_slots(self, token_budget: int, max_batch_size: int, max_frames_per_batch: int) -> int:
        """Return the number of attention sequences that a captured graph has room for."""
        return max_batch_size

    def replay_metadata(self, grids: GridInts, max_batch_size: int) -> Values:
        """Compute the values of a replay's metadata buffers, which depend on the grids alone.

        A CUDA graph has values on the host baked in: a copy of the call's would be read by nobody.
        """
        values = self.tower_metadata(grids, max_batch_size)
        if self.vision_model.device.type != "cuda":
            return values
        return {name: value for name, value in values.items() if value is None or value.is_cuda}

    def tower_metadata(self, grids: GridInts, max_batch_size: int) -> Values:
        """Return what the tower's graph reads; computed by vLLM unless a variant knows better."""
        metadata: Values = self.vision_model.prepare_encoder_metadata(
            [list(grid) for grid in grids], max_batch_size=max_batch_size
        )
        return metadata

    def normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a norm of [rows, width]; a variant may have a faster kernel."""
        result: torch.Tensor = norm(x)
        return result

    def kept(self, key: Hashable, compute: Callable[[], Values]) -> Values:
        """Return what `compute` makes for `key`; a variant that caches may have it already."""
        return compute()

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Any:
        """Return the metadata of the batch and its pixel rows."""
        grids = self.grids_of(mm_kwargs)
        metadata = self.kept((grids, max_batch_size), partial(self.replay_metadata, grids, max_batch_size))
        return EncoderCudaGraphReplayBuffers(values=metadata | {"pixel_values": mm_kwargs["pixel_values"]})


class GridsOnce(ErnieVariant):
    """Reads a call's grids from their tensor once: the dict of a batch carries them on as Python ints."""

    _read: tuple[torch.Tensor | None, GridInts] = (None, ())  # the call's tensor, and what it holds

    def grids_of(self, mm_kwargs: Mapping[str, Any]) -> GridInts:
        """Return the carried grids; those just read from the same tensor; or read them."""
        carried: GridInts | None = mm_kwargs.get(GRIDS)
        if carried is not None:
            return carried
        tensor, grids = self._read
        return grids if mm_kwargs["image_grid_thw"] is tensor else super().grids_of(mm_kwargs)

    def grids_of_call(self, mm_kwargs: Mapping[str, Any]) -> GridInts:
        """Return the carried grids, or read them anew: a call's tensor may have been overwritten since the last one."""
        if GRIDS not in mm_kwargs:
            # Not by nn.Module's setter, which looks through parameters and submodules first.
            self.__dict__["_read"] = mm_kwargs["image_grid_thw"], super().grids_of(mm_kwargs)
        return self.grids_of(mm_kwargs)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> Any:
        """Return the specs of the grids, as vLLM's."""
        return list(item_specs(self.grids_of_call(mm_kwargs), self.vision_model.spatial_merge_size))

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """Select the rows of `indices`, and hand their grids on."""
        grids = self.grids_of(mm_kwargs)
        selected = self.select_rows(mm_kwargs, grids, indices)
        selected[GRIDS] = tuple([grids[i] for i in indices])
        return selected

    def select_rows(self, mm_kwargs: dict[str, Any], grids: GridInts, indices: list[int]) -> dict[str, Any]:
        """Return a new dict of the batch's pixel rows and grid tensor; vLLM's way by default."""
        selected: dict[str, Any] = super().select_encoder_cudagraph_items(
            {key: mm_kwargs[key] for key in ("pixel_values", "image_grid_thw")}, indices
        )
        return selected
