"""Faults of what becomes of a replay's rows, and of the arms that are compared."""

from collections.abc import Iterator
from typing import Any

import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.faults.planting import after_capture, changed_postprocess, fault
from workbench.encoder.parity.lab import Lab

# Postprocessing and outputs ----------------------------------------------------------------------------------------


@fault("postprocess applied twice", "postprocess", models=("ernie45_vl",))
def postprocess_twice(lab: Lab) -> Iterator[None]:
    """What D1 does to a fallback, done to every replay."""

    def call(
        original: Any, outputs: Any, indices: Any, tokens: Any, dest: Any, clone: bool, batch: dict[str, Any]
    ) -> None:
        grid = batch["image_grid_thw"]
        rows = int(grid.prod(-1).sum())
        once = lab.model.resampler_model(outputs["default"][:rows], grid.to(outputs["default"].device))
        original({"default": once}, indices, tokens, dest, clone, batch)

    with changed_postprocess(lab, call):
        yield


@fault("items handed out in the wrong order", "postprocess")
def order_wrong(lab: Lab) -> Iterator[None]:
    """Rows are split in the order of the replay and labelled back to front."""

    def call(original: Any, outputs: Any, indices: list[int], tokens: Any, dest: Any, clone: bool, batch: Any) -> None:
        original(outputs, indices[::-1], tokens, dest, clone, batch)

    with changed_postprocess(lab, call):
        yield


@fault("valid rows counted from the second token", "postprocess")
def count_wrong(lab: Lab) -> Iterator[None]:
    """The slice of valid rows begins one token late."""

    def call(
        original: Any, outputs: dict[str, torch.Tensor], indices: Any, tokens: Any, dest: Any, clone: bool, batch: Any
    ) -> None:
        per_token = lab.session.facts.merge**2 if hasattr(lab.model, "resampler_model") else 1
        original({"default": outputs["default"].roll(-per_token, dims=0)}, indices, tokens, dest, clone, batch)

    with changed_postprocess(lab, call):
        yield


@fault("resampler offsets of another call", "postprocess", models=("ernie45_vl",), absent=("resampler",))
def resampler_stale(lab: Lab) -> Iterator[None]:
    """The grids of the previous replay decide how rows are merged and split."""
    previous: list[dict[str, Any]] = []

    def call(
        original: Any, outputs: dict[str, torch.Tensor], indices: Any, tokens: Any, dest: Any, clone: bool, batch: Any
    ) -> None:
        stale = previous[0] if previous else batch
        previous[:] = [batch]
        # Rows that are not there would be read out of bounds.
        fits = int(stale["image_grid_thw"].prod(-1).sum()) <= outputs["default"].shape[0]
        original(outputs, indices, tokens, dest, clone, stale if fits else batch)

    with changed_postprocess(lab, call):
        yield


@fault("clone of the outputs omitted", "output", models=("glm4_1v",))
def clone_omitted(lab: Lab) -> Iterator[None]:
    """Results are views of the output buffer. Ernie's resampler makes new tensors, so there it would do no harm."""

    def call(original: Any, outputs: Any, indices: Any, tokens: Any, dest: Any, clone: bool, batch: Any) -> None:
        original(outputs, indices, tokens, dest, False, batch)

    with changed_postprocess(lab, call):
        yield


@fault("outputs of all calls in one shared buffer", "output")
def output_shared(lab: Lab) -> Iterator[None]:
    """The next call overwrites a result that is still held."""
    shared: dict[int, torch.Tensor] = {}

    def call(
        original: Any,
        outputs: Any,
        indices: list[int],
        tokens: list[int],
        dest: dict[int, torch.Tensor],
        clone: bool,
        batch: Any,
    ) -> None:
        original(outputs, indices, tokens, dest, clone, batch)
        for index in indices:
            rows, width = dest[index].shape
            if index not in shared or shared[index].shape[0] < rows:
                shared[index] = torch.empty(
                    4 * max(lab.budgets), width, dtype=dest[index].dtype, device=dest[index].device
                )
            shared[index][:rows] = dest[index]
            dest[index] = shared[index][:rows]

    with changed_postprocess(lab, call):
        yield


# The arms themselves -----------------------------------------------------------------------------------------------


@fault("another input seed in the graph arm", "inputs")
def seed_changed(lab: Lab) -> Iterator[None]:
    """The arms do not see the same pixels."""

    def wrap(original: Any) -> Any:
        def execute(mm_kwargs: dict[str, Any]) -> Any:
            key = next(key for key in mm_kwargs if key.startswith("pixel_values"))
            return original(mm_kwargs | {key: mm_kwargs[key].flip(0) + 1})

        return execute

    with wrapped(lab.manager, "execute", wrap):
        yield


@fault("weights change after capture", "weights", "replay")
def weights_changed(lab: Lab) -> Iterator[None]:
    """A reload puts other values into new memory: eager sees them, a graph keeps reading the old."""
    parameter = lab.tower.blocks[0].norm1.weight
    before = parameter.data

    def change() -> None:
        parameter.data = before * 1.5

    try:
        with after_capture(lab, change):
            yield
    finally:
        parameter.data = before
