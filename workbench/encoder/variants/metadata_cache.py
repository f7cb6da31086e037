"""Variant `metadata_cache`: a batch's metadata is computed once per grid, and grids are read once per call.

Rotary embeddings are kept per item's grid, everything else per batch. What is cached is never written again, so a
buffer that already holds it need not be filled (see `one_pass`). On CUDA all copies come from pinned memory and wait
for nothing.

Import this module only after `engine.require_vllm`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from workbench.encoder.variants.base import GridInts, GridsOnce, Values

CACHE_BYTES = 64 * 2**20  # each of the two; ERNIE's largest image has 4 MB of rotary embeddings


class TensorCache:
    """Tensors by key, the least recently used dropped when they are more than `limit` bytes in all.

    Attributes:
        hits, misses: look-ups so far.
        held_bytes: of the tensors it holds, at most `limit`.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._values: OrderedDict[Hashable, Values] = OrderedDict()
        self.held_bytes = 0
        self.hits = self.misses = 0

    def get(self, key: Hashable, compute: Callable[[], Values]) -> Values:
        """Return the value of `key`, computing it where it is not held."""
        value = self._values.get(key)
        if value is not None:
            self.hits += 1
            self._values.move_to_end(key)
            return value
        self.misses += 1
        value = compute()
        self._values[key] = value
        self.held_bytes += _bytes(value)
        while self.held_bytes > self._limit:
            _, dropped = self._values.popitem(last=False)
            self.held_bytes -= _bytes(dropped)
        return value


def _bytes(values: Values) -> int:
    return sum(tensor.nbytes for tensor in values.values() if tensor is not None)


class MetadataCache(GridsOnce):
    """See the module."""

    def __init_variant__(self) -> None:
        """Make the caches; `attach` calls it."""
        self.batch_cache = TensorCache()
        self.item_cache = TensorCache()

    def kept(self, key: Hashable, compute: Callable[[], Values]) -> Values:
        """Return the cached values of a batch with these grids, in this order."""
        return self.batch_cache.get(key, compute)

    def tower_metadata(self, grids: GridInts, max_batch_size: int) -> Values:
        """Return vLLM's metadata from Python ints and the rotary embeddings of items seen before."""
        from vllm.utils.torch_utils import async_tensor_h2d

        tower = self.vision_model
        rotary = [self.item_cache.get(grid, partial(_rotary, tower, grid))["rotary"] for grid in grids]
        offsets = [0, *accumulate(h * w for t, h, w in grids for _ in range(t))]
        offsets += [offsets[-1]] * (max_batch_size + 1 - len(offsets))
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        return {
            "rotary_pos_emb": rotary[0] if len(rotary) == 1 else torch.cat(rotary),
            "cu_seqlens": async_tensor_h2d(cu_seqlens, tower.device),
            "max_seqlen": tower.compute_attn_mask_seqlen(cu_seqlens),
        }


def _rotary(tower: Any, grid: tuple[int, int, int]) -> Values:
    return {"rotary": tower.rot_pos_emb(torch.tensor([grid], dtype=torch.int32))}
