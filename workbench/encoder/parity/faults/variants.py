"""Faults of the variants' own code: what is cached, what is believed to be in a buffer, indices, fused kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.faults.planting import Values, changed_values, fault
from workbench.encoder.parity.lab import Lab

ERNIE, GLM = ("ernie45_vl",), ("glm4_1v",)
_TEMPORAL = "temporal"


# Caches and buffers ------------------------------------------------------------------------------------------------


@fault("cached metadata of another grid of the same size", "positions", models=ERNIE, variants=("metadata_cache",))
def metadata_stale(lab: Lab) -> Iterator[None]:
    """The key holds how many patches a batch has, and not which grids."""

    def wrap(original: Any) -> Any:
        def get(key: tuple[Any, Any], compute: Callable[[], Values]) -> Values:
            values: Values = original(tuple(_patches(part) if _is_grids(part) else part for part in key), compute)
            return values

        return get

    with wrapped(lab.model.batch_cache, "get", wrap):
        yield


@fault("cached positions of another grid of the same size", "positions", models=GLM, variants=("position_cache",))
def positions_stale(lab: Lab) -> Iterator[None]:
    """The key holds how many patches an item has, and not its grid."""

    def wrap(original: Any) -> Any:
        def get(key: tuple[int, int, int], compute: Callable[[], Values]) -> Values:
            t, h, w = key
            values: Values = original(t * h * w, compute)
            return values

        return get

    with wrapped(lab.model.position_cache, "get", wrap):
        yield


@fault("temporal indices of another call", "frame_pairs", models=ERNIE, variants=("resampler",))
def temporal_indices_stale(lab: Lab) -> Iterator[None]:
    """The rows that the resampler merges are those of the replay before."""
    before: Values = {}

    def change(values: Values, _grids: list[list[int]]) -> None:
        own = values[_TEMPORAL]
        values[_TEMPORAL] = before.get(_TEMPORAL, own)[: len(own)]  # another budget's buffer may be shorter
        before[_TEMPORAL] = own

    with changed_values(lab, change):
        yield


@fault("a smaller batch leaves rows of the larger one before", "padding", models=ERNIE, variants=("one_pass",))
def rows_left_behind(lab: Lab) -> Iterator[None]:
    """What earlier replays wrote behind the rows of this one is not zeroed."""

    def copy(buffer: torch.Tensor, value: torch.Tensor) -> None:
        buffer[: value.shape[0]].copy_(value)

    with _padded_by(lab, dict.fromkeys(("pixel_values", "rotary_pos_emb"), lambda _original: copy)):
        yield


@fault("a buffer is believed to hold a value of the same shape", "positions", models=ERNIE, variants=("one_pass",))
def value_believed_held(lab: Lab) -> Iterator[None]:
    """Nothing is copied where an earlier value had as many rows."""

    def wrap(original: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
        rows: dict[int, int] = {}

        def copy(buffer: torch.Tensor, value: torch.Tensor) -> None:
            if rows.get(buffer.data_ptr()) != value.shape[0]:
                original(buffer, value)
                rows[buffer.data_ptr()] = value.shape[0]

        return copy

    with _padded_by(lab, {"rotary_pos_emb": wrap}):
        yield


@fault("offsets of an earlier batch are believed to be held", "cu_seqlens", models=ERNIE, variants=("one_pass",))
def offsets_believed_held(lab: Lab) -> Iterator[None]:
    """They are copied once and never again."""

    def wrap(original: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
        written: set[int] = set()

        def copy(buffer: torch.Tensor, value: torch.Tensor) -> None:
            if buffer.data_ptr() not in written:
                original(buffer, value)
                written.add(buffer.data_ptr())

        return copy

    with _padded_by(lab, {"cu_seqlens": wrap}):
        yield


@contextmanager
def _padded_by(lab: Lab, wraps: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace how the manager fills buffers, each by `wrap(what it was)`."""
    logics = lab.manager.config.padding_logics
    before = dict(logics)
    logics.update({key: wrap(before[key]) for key, wrap in wraps.items()})
    try:
        yield
    finally:
        logics.update(before)


def _is_grids(part: Any) -> bool:
    return isinstance(part, tuple) and bool(part) and isinstance(part[0], tuple)


def _patches(grids: tuple[tuple[int, int, int], ...]) -> int:
    return sum(t * h * w for t, h, w in grids)


# Fused kernels -----------------------------------------------------------------------------------------------------


@fault("the fused rotation leaves keys alone", "attention", models=ERNIE, variants=("fused",))
def keys_not_rotated(lab: Lab) -> Iterator[None]:
    """Only the first half of the heads it is given, the queries', are rotated."""

    def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        kernels.rotate(rows[:, : rows.shape[1] // 2], cos, sin)

    kernels = lab.model.kernels
    with _kernels(lab, rotate=rotate):
        yield


@fault("the fused norm forgets the residual of the MLP", "blocks", models=ERNIE, variants=("fused",))
def residual_forgotten(lab: Lab) -> Iterator[None]:
    """The output of the MLP takes the place of the stream instead of being added to it."""
    calls = 0

    def add_norm(
        hidden: torch.Tensor, update: torch.Tensor, offset: torch.Tensor | None, norm: torch.nn.Module
    ) -> torch.Tensor:
        nonlocal calls
        calls += 1  # one behind attention, one behind the MLP
        normed: torch.Tensor = kernels.add_norm(hidden if calls % 2 else hidden.zero_(), update, offset, norm)
        return normed

    kernels = lab.model.kernels
    with _kernels(lab, add_norm=add_norm):
        yield


@contextmanager
def _kernels(lab: Lab, **changed: Callable[..., Any]) -> Iterator[None]:
    from workbench.encoder.variants.dataflow import KERNELS

    before = lab.model.kernels
    own = {name: getattr(before, name) for name in KERNELS}
    lab.model.kernels = SimpleNamespace(**own | changed)
    try:
        yield
    finally:
        lab.model.kernels = before
