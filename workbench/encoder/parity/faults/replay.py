"""Faults of a replay itself: baked values, captured addresses, memory that others write."""

from collections.abc import Iterator
from typing import Any

import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.faults.planting import Values, after_capture, fault, inside_graph, last_attention
from workbench.encoder.parity.lab import Lab
from workbench.encoder.parity.tape import captured_budgets


@fault("replay left out", "replay")
def replay_skipped(lab: Lab) -> Iterator[None]:
    """The output buffer still holds the previous result."""

    class _Nothing:
        def replay(self) -> None:
            """Do nothing."""

    def change() -> None:
        for captured in captured_budgets(lab.manager).values():
            captured.graph = _Nothing()

    with after_capture(lab, change):
        yield


@fault("output read from another budget's buffer", "replay")
def output_of_other_budget(lab: Lab) -> Iterator[None]:
    """The budgets' output buffers are mixed up."""

    kept: list[torch.Tensor] = []  # freed, it would be the memory of some tensor of the lab, which the graph then fills

    def change() -> None:
        captured = [entry for _, entry in sorted(captured_budgets(lab.manager).items())]
        kept.append(captured[0].output_buffer)
        captured[0].output_buffer = captured[1].output_buffer[: captured[0].output_buffer.shape[0]]

    with after_capture(lab, change):
        yield


@fault("input buffer replaced after capture", "replay", needs="cuda")
def buffer_replaced(lab: Lab) -> Iterator[None]:
    """The graph reads the address it was captured with; the manager fills another."""

    kept: list[torch.Tensor] = []  # freed, it might come to hold the right rows by chance

    def change() -> None:
        for captured in captured_budgets(lab.manager).values():
            kept.append(captured.input_buffers["pixel_values"])
            captured.input_buffers["pixel_values"] = kept[-1].clone()

    with after_capture(lab, change):
        yield


@fault("a host value baked into the graph", "replay", needs="cuda")
def baked_host_value(lab: Lab) -> Iterator[None]:
    """A Python number that differs between capture and replay; an offset, since GLM normalises a factor away."""
    offset = [0.5]

    def wrap(original: Any) -> Any:
        def forward(values: Values, *args: Any, **kwargs: Any) -> Any:
            return original(values | {"pixel_values": values["pixel_values"] + offset[0]}, *args, **kwargs)

        return forward

    def change() -> None:
        offset[0] = 0.0

    with wrapped(lab.model, "encoder_cudagraph_forward", wrap), after_capture(lab, change):
        yield


@fault("a branch baked into the graph", "replay", needs="cuda", absent=("fused",))
def baked_branch(lab: Lab) -> Iterator[None]:
    """A block that Python skips for the dummy items of the capture only."""
    capturing = [True]

    def after(args: Any, output: torch.Tensor) -> torch.Tensor:
        return args[0] if capturing[0] else output

    def change() -> None:
        capturing[0] = False

    with inside_graph(lab, (lab.tower.blocks[-1], after, False)), after_capture(lab, change):
        yield


@fault(
    "attention leaves padded rows unwritten",
    "attention",
    "replay",
    needs="cuda",
    backends=("FLASH_ATTN",),
    absent=("fused",),
)
def attention_unwritten(lab: Lab) -> Iterator[None]:
    """vLLM issue 57136: the output buffer is not zeroed, and padded rows hold what another graph left in the pool.

    Each capture's output buffers have memory of their own, given back to the pool afterwards: in a pool of few graphs,
    others of the same graph would overwrite it first.
    """
    from vllm.v1.attention.ops import vit_attn_wrappers

    kept: list[torch.Tensor] | None = []

    class _Torch:
        """torch, with `zeros` leaving memory as it is."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            output = torch.empty(*args, **kwargs)
            if kept is not None:
                kept.append(output)
            return output

    def change() -> None:
        nonlocal kept
        kept = None

    before, vit_attn_wrappers.torch = vit_attn_wrappers.torch, _Torch()
    try:
        with after_capture(lab, change):
            yield
    finally:
        vit_attn_wrappers.torch = before


@fault(
    "NaN in the padded keys and values of attention",
    "attention",
    "blocks",
    needs="cuda",
    backends=("FLASH_ATTN",),
    absent=("fused",),
)
def attention_nan_values(lab: Lab) -> Iterator[None]:
    """A kernel that multiplies by zero instead of masking turns them into NaN of valid rows."""

    def before(args: Any, kwargs: dict[str, Any]) -> Any:
        rows = kwargs["value"].shape[1]
        behind = torch.arange(rows, device=kwargs["value"].device) >= kwargs["cu_seqlens"].max()
        spoiled = {
            key: kwargs[key].masked_fill(behind.view(1, -1, *[1] * (kwargs[key].ndim - 2)), float("nan"))
            for key in ("key", "value")
        }
        return args, kwargs | spoiled

    with inside_graph(lab, (last_attention(lab), before, True)):
        yield
