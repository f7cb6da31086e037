"""A workload: the images and videos a server gets, and how they meet in encoder calls.

Everything is a column, so that a million items plan and predict at numpy's speed. Where workloads come from
is in `workbench.sources`, how a size becomes a grid in `workbench.grids`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Workload:
    """N items in C groups. A group is a request as loaded, an encoder call after `group`.

    Attributes:
        name: short name for tables, such as a preset's or a file's.
        model: key of the registry entry whose rule made the grids.
        source: where the sizes come from, in words a reviewer can check.
        sizes: int32 [N, 3], (width, height, frames) in pixels; frames 1 is an image, more is a video.
        grids: int32 [N, 3], (t, h, w) in patches before the spatial merge.
        tokens: int64 [N], output tokens of each item, the unit of vLLM's budgets.
        offsets: int64 [C + 1], ascending from 0 to N: group c is items `offsets[c]:offsets[c + 1]`. Groups
            may be empty (a request without an image) until `group` drops them.
        notes: what happened to the data on the way, one sentence each (items skipped, clamped, lost).
    """

    name: str
    model: str
    source: str
    sizes: Sizes
    grids: Sizes
    tokens: Ints
    offsets: Ints
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.offsets) - 1

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.tokens)

    @cached_property
    def frames(self) -> Ints:
        """int64 [N], grid t of each item: the attention sequences a captured `cu_seqlens` counts per item."""
        return self.grids[:, 0].astype(np.int64)

    @cached_property
    def is_video(self) -> npt.NDArray[np.bool_]:
        """bool [N], True for an item of more than one frame (the rule of vLLM's random-mm data set)."""
        return self.sizes[:, 2] > 1

    @cached_property
    def counts(self) -> Ints:
        """int64 [C], items per group."""
        return np.diff(self.offsets)
