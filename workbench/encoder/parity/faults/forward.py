"""Faults of the captured forward: what a graph holds is another computation than eager's."""

from collections.abc import Iterator
from typing import Any

import torch

from workbench.encoder.parity.faults.buffers import buffers_not_zeroed
from workbench.encoder.parity.faults.planting import fault, head, inside_graph, last_attention
from workbench.encoder.parity.lab import Lab


@fault("attention of the last block left out", "attention", absent_on_cuda=("fused",))
def attention_skipped(lab: Lab) -> Iterator[None]:
    """Cosine hardly notices."""
    with inside_graph(lab, (last_attention(lab), lambda _args, output: torch.zeros_like(output), False)):
        yield


@fault("attention reads the padded rows", "attention", absent_on_cuda=("fused",))
def attention_over_padding(lab: Lab) -> Iterator[None]:
    """The last sequence of the last block runs to the end of the buffer."""

    def before(args: Any, kwargs: dict[str, Any]) -> Any:
        offsets, rows = kwargs["cu_seqlens"], kwargs["query"].shape[1]
        return args, kwargs | {"cu_seqlens": offsets.masked_fill(offsets == offsets.max(), rows)}

    with inside_graph(lab, (last_attention(lab), before, True)):
        yield


@fault(
    "replay buffers not zeroed, and attention reads past the last item",
    "padding",
    "attention",
    absent_on_cuda=("fused",),
)
def buffers_not_zeroed_and_read(lab: Lab) -> Iterator[None]:
    """The two together change outputs."""
    with buffers_not_zeroed(lab), attention_over_padding(lab):
        yield


@fault("attention with another softmax scale", "attention", absent_on_cuda=("fused",))
def attention_scaled(lab: Lab) -> Iterator[None]:
    """Queries of the last block come in halved."""

    def before(args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"query": kwargs["query"] * 0.5}

    with inside_graph(lab, (last_attention(lab), before, True)):
        yield


@fault("MLP of the last block left out", "mlp", absent=("fused",))
def mlp_skipped(lab: Lab) -> Iterator[None]:
    """Its output is zero."""
    with inside_graph(lab, (lab.tower.blocks[-1].mlp, lambda _args, output: torch.zeros_like(output), False)):
        yield


@fault("last block left out", "blocks", absent=("fused",))
def block_skipped(lab: Lab) -> Iterator[None]:
    """It hands on its input."""
    with inside_graph(lab, (lab.tower.blocks[-1], lambda args, _output: args[0], False)):
        yield


@fault("hidden states dropped to float8 in every block", "blocks", absent=("fused",))
def dtype_drop(lab: Lab) -> Iterator[None]:
    """Two bits of mantissa between the blocks."""

    def after(_args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.float8_e5m2).to(output.dtype)

    with inside_graph(lab, *((block, after, False) for block in lab.tower.blocks)):
        yield


@fault("NaN in the padded rows between the blocks", "blocks", "attention", absent=("fused", "resampler"))
def padding_becomes_nan(lab: Lab) -> Iterator[None]:
    """The valid rows stay right as long as no kernel reads behind them."""
    rows: list[torch.Tensor] = []

    def offsets(args: Any, kwargs: dict[str, Any]) -> Any:
        rows[:] = [kwargs["cu_seqlens"].max()]
        return args, kwargs

    def after(_args: Any, output: torch.Tensor) -> torch.Tensor:
        behind = torch.arange(output.shape[0], device=output.device) >= rows[0]
        return output.masked_fill(behind.view(-1, *[1] * (output.ndim - 1)), float("nan"))

    block = lab.tower.blocks[0]
    with inside_graph(lab, (block, offsets, True), (block, after, False)):
        yield


@fault("pixels of another mean in the patch embedding", "patch_embed")
def embedding_shifted(lab: Lab) -> Iterator[None]:
    """Another normalisation than eager's."""

    def before(args: Any, kwargs: Any) -> Any:
        return (args[0] + 0.5, *args[1:]), kwargs

    with inside_graph(lab, (lab.tower.patch_embed, before, True)):
        yield


@fault("last normalisation of the tower left out", "head", absent_on_cuda=("fused",))
def head_skipped(lab: Lab) -> Iterator[None]:
    """Ernie's final layer norm, GLM's merger: the output is another by a smooth function."""

    def after(_args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * output.abs()

    with inside_graph(lab, (head(lab), after, False)):
        yield
