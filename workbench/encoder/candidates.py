"""Candidates for a capture: regions of an encoder that one graph could hold, beside what vLLM captures.

    from workbench.encoder.candidates import as_captured
    from workbench.encoder.registry import builder

    wanted = [as_captured(session.model, inputs, "vit", "..."), *builder("glm4_1v").candidates(session, inputs)]

`workbench.encoder.boundary` runs them. A function per model makes those that vLLM's class does not capture; its entry
in the registry names it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from workbench.encoder.session import EncoderInputs, EncoderSession

Values = dict[str, torch.Tensor]

SHIPPED = "vit+resampler"
WITHOUT_TEMPORAL = "vit+resampler, no temporal conv"
WITH_POSITIONS = "vit+positions"
WITH_METADATA = "vit+metadata"


@dataclass(frozen=True)
class Candidate:
    """A region of the encoder.

    Attributes:
        region: values on the device -> output; what the graph would hold.
        prepare: -> the values; outside, before.
        rest: output of the region -> embeddings; outside, behind.
        refused: it reads or copies on the host, so a capture is expected to end in an error.
    """

    name: str
    title: str
    region: Callable[[Values], torch.Tensor]
    prepare: Callable[[], Values]
    rest: Callable[[torch.Tensor], Any]
    refused: bool = False


def as_captured(model: Any, inputs: "EncoderInputs", name: str, title: str) -> Candidate:
    """Return what `model` captures, between its own preparation of a replay and its own handling of the output."""
    items = len(inputs.grids)
    frames = sum(t for t, _, _ in inputs.grids) if inputs.modality == "video" else 0

    def prepare() -> Values:
        values = dict(model.prepare_encoder_cudagraph_replay_buffers(inputs.mm_kwargs, items, frames).values)
        if values.get("max_seqlen") is None:  # no backend of the CPU reads it, or left out as baked into a CUDA graph
            values["max_seqlen"] = torch.tensor(max(h * w for _, h, w in inputs.grids), dtype=torch.int32)
        return values

    return Candidate(name, title, model.encoder_cudagraph_forward, prepare, _splitting(model, inputs))


def _splitting(model: Any, inputs: "EncoderInputs") -> Callable[[torch.Tensor], Any]:
    """Return what vLLM does behind a replay: whatever the class runs there, then a clone per item."""

    def rest(output: torch.Tensor) -> Any:
        done: dict[int, torch.Tensor] = {}
        items, tokens = list(range(len(inputs.grids))), list(inputs.tokens)
        model.postprocess_encoder_output(
            {"default": output}, items, tokens, done, True, batch_mm_kwargs=inputs.mm_kwargs
        )
        return done

    return rest


def no_more(session: "EncoderSession", inputs: "EncoderInputs") -> list[Candidate]:
    """Nothing beside what vLLM captures."""
    return []


def of_ernie(session: "EncoderSession", inputs: "EncoderInputs") -> list[Candidate]:
    """ViT and resampler: as shipped, and with its temporal part off."""
    model = session.model
    tower, resampler = model.vision_model, model.resampler_model
    metadata = as_captured(model, inputs, "", "").prepare

    def with_grid() -> Values:
        return metadata() | {"grid_thw": inputs.grid.to(session.device)}

    def shipped(values: Values) -> torch.Tensor:
        grid = values.pop("grid_thw")
        features = tower(values.pop("pixel_values"), encoder_metadata=values)
        embeddings: torch.Tensor = resampler(features, grid)
        return embeddings

    def without_temporal(values: Values) -> torch.Tensor:
        resampler.use_temporal_conv = False
        try:
            return shipped(values)
        finally:
            resampler.use_temporal_conv = True

    def split(output: torch.Tensor) -> Any:
        return [item.clone() for item in torch.split(output, list(inputs.tokens))]

    found = [Candidate(SHIPPED, "ViT and the resampler as shipped", shipped, with_grid, split, refused=True)]
    if resampler.use_temporal_conv:
        title = "ViT and the resampler, its temporal part off"
        found.append(Candidate(WITHOUT_TEMPORAL, title, without_temporal, with_grid, split))
    return found


def of_glm(session: "EncoderSession", inputs: "EncoderInputs") -> list[Candidate]:
    """ViT with the metadata that vLLM computes before each replay: position embeddings alone, and all of it.

    The grids are Python's in the first, so a graph of it would serve these grids alone; in the second they are read
    from the device, as eager does.
    """
    model, tower = session.model, session.model.visual
    grids = [list(grid) for grid in inputs.grids]
    metadata = as_captured(model, inputs, "", "").prepare

    def without_positions() -> Values:
        return {key: value for key, value in metadata().items() if key != "pos_embeds"}

    def with_positions(values: Values) -> torch.Tensor:
        positions = {"pos_embeds": tower.pos_embeds_interpolate(grids)}
        output: torch.Tensor = tower(values.pop("pixel_values"), None, encoder_metadata=values | positions)
        return output

    def pixels() -> Values:
        return {"pixel_values": inputs.pixels, "grid_thw": inputs.grid.to(session.device)}

    def with_metadata(values: Values) -> torch.Tensor:
        output: torch.Tensor = tower(values["pixel_values"], values["grid_thw"])
        return output

    split = _splitting(model, inputs)
    positions = "ViT and its position embeddings, interpolated inside"
    every = "ViT and all its metadata, computed from the grids"
    return [
        Candidate(WITH_POSITIONS, positions, with_positions, without_positions, split, refused=True),
        Candidate(WITH_METADATA, every, with_metadata, pixels, split, refused=True),
    ]
