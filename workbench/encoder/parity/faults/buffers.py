"""Faults of what is in a replay's buffers: sequence offsets, longest sequence, positions, pixel rows."""

from collections.abc import Iterator

import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.faults.planting import Values, changed_capture, changed_values, dropped_values, fault
from workbench.encoder.parity.lab import Lab

_POSITIONS = ("rotary_pos_emb", "rotary_pos_emb_cos", "rotary_pos_emb_sin")


# Sequence offsets --------------------------------------------------------------------------------------------------


@fault("cu_seqlens one row short", "cu_seqlens")
def offsets_off_by_one(lab: Lab) -> Iterator[None]:
    """Every offset but the first is one too small."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        values["cu_seqlens"] = torch.cat([values["cu_seqlens"][:1], values["cu_seqlens"][1:] - 1])

    with changed_values(lab, change):
        yield


@fault("cu_seqlens not padded", "cu_seqlens", absent=("resampler", "one_pass", "cu_seqlens_tail"))
def offsets_unpadded(lab: Lab) -> Iterator[None]:
    """The manager zeroes what the model does not give, and offsets fall behind the last sequence."""

    def change(values: Values, grids: list[list[int]]) -> None:
        values["cu_seqlens"] = values["cu_seqlens"][: len(grids) + 1]

    with changed_values(lab, change):
        yield


@fault("cu_seqlens of an earlier replay", "cu_seqlens")
def offsets_stale(lab: Lab) -> Iterator[None]:
    """The offsets are not copied."""
    with dropped_values(lab, "cu_seqlens"):
        yield


@fault("cu_seqlens without the borders between items", "cu_seqlens")
def offsets_merged(lab: Lab) -> Iterator[None]:
    """All items are one sequence, so they attend to each other."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        offsets = values["cu_seqlens"]
        values["cu_seqlens"] = torch.where(offsets == 0, offsets, offsets[-1])

    with changed_values(lab, change):
        yield


@fault("cu_seqlens padded with a sequence over the padding", "cu_seqlens")
def offsets_over_padding(lab: Lab) -> Iterator[None]:
    """The padding's offsets point behind the last valid row: a wasted sequence, and a longer one than planned."""

    def change(values: Values, grids: list[list[int]]) -> None:
        offsets = values["cu_seqlens"].clone()
        rows = int(offsets[-1])
        if rows // lab.session.facts.merge**2 not in lab.budgets:  # a full budget has no row behind
            offsets[len(grids) + 1 :] += 1
        values["cu_seqlens"] = offsets

    with changed_values(lab, change):
        yield


# Longest sequence --------------------------------------------------------------------------------------------------


@fault("max_seqlen baked in tokens, not rows", "max_seqlen")
def max_seqlen_too_small(lab: Lab) -> Iterator[None]:
    """The graph's attention covers a quarter of the rows that one item can have."""

    def change(budget: int, values: Values) -> None:
        values["max_seqlen"] = torch.tensor(budget, dtype=torch.int32)

    with changed_capture(lab, change):
        yield


@fault("max_seqlen baked from the capture's dummy items", "max_seqlen")
def max_seqlen_of_dummy(lab: Lab) -> Iterator[None]:
    """Captured with the length of the dummy items, so a single long item is cut."""

    def change(budget: int, values: Values) -> None:
        offsets = values["cu_seqlens"]
        values["max_seqlen"] = (offsets[1:] - offsets[:-1]).max().cpu().to(torch.int32)

    with changed_capture(lab, change):
        yield


# Positions ---------------------------------------------------------------------------------------------------------


@fault("rotary embedding of the transposed grid", "positions")
def rotary_transposed(lab: Lab) -> Iterator[None]:
    """Height and width are swapped."""

    def change(values: Values, grids: list[list[int]]) -> None:
        other = lab.tower_metadata([[t, w, h] for t, h, w in grids])
        values.update({key: other[key] for key in _POSITIONS if key in other})

    with changed_values(lab, change):
        yield


@fault("rotary embedding not copied", "positions")
def rotary_stale(lab: Lab) -> Iterator[None]:
    """The positions of an earlier replay stay in the buffer."""
    with dropped_values(lab, *_POSITIONS):
        yield


@fault("rotary embedding shifted by one token", "positions")
def rotary_shifted(lab: Lab) -> Iterator[None]:
    """Each row has its neighbour's position."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        for key in _POSITIONS:
            if key in values:
                values[key] = values[key].roll(lab.session.facts.merge**2, dims=0)

    with changed_values(lab, change):
        yield


@fault("absolute position embedding not copied", "positions", models=("glm4_1v",))
def position_embedding_stale(lab: Lab) -> Iterator[None]:
    """GLM's interpolated position embedding of an earlier replay."""
    with dropped_values(lab, "pos_embeds"):
        yield


# Pixel rows --------------------------------------------------------------------------------------------------------


@fault("pixel rows not copied", "pixel_values")
def pixels_stale(lab: Lab) -> Iterator[None]:
    """The graph encodes an earlier image."""
    with dropped_values(lab, "pixel_values"):
        yield


@fault("pixel rows written one row too late", "pixel_values")
def pixels_shifted(lab: Lab) -> Iterator[None]:
    """The copy begins at row 1."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        values["pixel_values"] = values["pixel_values"].roll(1, dims=0)

    with changed_values(lab, change):
        yield


@fault("replay buffers not zeroed before the copy", "padding", absent=("one_pass",))
def buffers_not_zeroed(lab: Lab) -> Iterator[None]:
    """Rows of an earlier replay stay behind the valid ones; harmless until a kernel reads them."""
    with wrapped(lab.manager, "_copy_padded_buffer", lambda _original: _copy_without_zero):
        yield


def _copy_without_zero(dst: torch.Tensor, src: torch.Tensor) -> None:
    if dst.is_floating_point():
        dst[: src.shape[0]].copy_(src)
    else:
        dst.zero_()
        dst[: src.shape[0]].copy_(src)
