"""The tensors that vLLM fixes when it captures a graph, from facts alone: no GPU, no torch, no vLLM.

The rules are each model's `prepare_encoder_cudagraph_capture_inputs` in vLLM 0.33.0 (`ernie45_vl.py`,
`glm4_1v.py`, `qwen2_5_vl.py`, `qwen3_vl.py`), for a tower on one GPU with any attention backend but FlashInfer, which
reshapes `cu_seqlens`.
A test compares them with the real functions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from workbench.budgets import Resolved
from workbench.errors import WorkbenchError
from workbench.models import ModelFacts

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Buffer:
    """One tensor that lives as long as its graph."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of its values; the allocator rounds up."""
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class Capture:
    """What vLLM captures for one budget.

    Attributes:
        budget: output tokens the graph is meant to hold.
        items: dummy items of the capture, the configuration's max items.
        grid: (t, h, w) in patches of each dummy item.
        sequence_slots: attention sequences that `cu_seqlens` holds.
        max_seqlen: longest sequence in patches, baked into the graph.
        merge: patches per output token are its square.
        inputs: the buffers written before a replay.
        output: the buffer read after a replay.
    """

    budget: int
    items: int
    grid: tuple[int, int, int]
    sequence_slots: int
    max_seqlen: int
    merge: int
    inputs: tuple[Buffer, ...]
    output: Buffer

    @property
    def patches(self) -> int:
        """Rows of `pixel_values`: what a replay computes, whatever it holds."""
        return self.items * math.prod(self.grid)

    @property
    def capacity(self) -> int:
        """Output tokens the buffers really hold."""
        return self.patches // self.merge**2

    @property
    def bytes(self) -> int:
        """Bytes of all its buffers."""
        return self.output.bytes + sum(buffer.bytes for buffer in self.inputs)


def has_shapes(key: str) -> bool:
    """Whether the captured shapes of model `key` are known."""
    return key in _CAPTURES


def captured_shapes(facts: ModelFacts, resolved: Resolved, dtype: str = "bfloat16") -> tuple[Capture, ...]:
    """Return what vLLM captures for each of the resolved budgets, ascending.

    Raises:
        WorkbenchError: no capture rule for this model.
    """
    if not has_shapes(facts.key):
        raise WorkbenchError(
            f"the captured shapes of {facts.title} are not known; {', '.join(sorted(_CAPTURES))} can be checked"
        )
    return tuple(_CAPTURES[facts.key](facts, resolved, budget, dtype) for budget in resolved.budgets)


def _capture(
    facts: ModelFacts,
    resolved: Resolved,
    budget: int,
    grid: tuple[int, int, int],
    slots: int,
    extra: Callable[[int], tuple[Buffer, ...]],
    output: Callable[[int], Buffer],
    dtype: str,
    longest: str = "max_seqlen",
) -> Capture:
    """`longest`: the model's name of the buffer with the longest sequence."""
    rows = resolved.max_items * math.prod(grid)
    common = (
        Buffer("pixel_values", (rows, facts.patch_features), dtype),
        Buffer("cu_seqlens", (slots + 1,), "int32"),
        Buffer(longest, (), "int32"),
    )
    return Capture(
        budget=budget,
        items=resolved.max_items,
        grid=grid,
        sequence_slots=slots,
        max_seqlen=budget * facts.merge**2,
        merge=facts.merge,
        inputs=common + extra(rows),
        output=output(rows),
    )


def _ernie(facts: ModelFacts, resolved: Resolved, budget: int, dtype: str) -> Capture:
    per_item = math.ceil(budget / resolved.max_items)
    head = facts.width // facts.heads
    return _capture(
        facts,
        resolved,
        budget,
        grid=(1, facts.merge, per_item * facts.merge),
        slots=resolved.max_items,
        extra=lambda rows: (Buffer("rotary_pos_emb", (rows, head // 2), "float32"),),
        # The graph ends before the resampler: one row per patch.
        output=lambda rows: Buffer("output", (rows, facts.width), dtype),
        dtype=dtype,
    )


def _glm(facts: ModelFacts, resolved: Resolved, budget: int, dtype: str) -> Capture:
    return _framed(facts, resolved, budget, dtype, budget // resolved.max_items)


def _qwen3(facts: ModelFacts, resolved: Resolved, budget: int, dtype: str) -> Capture:
    return _framed(facts, resolved, budget, dtype, math.ceil(budget / resolved.max_items))


def _framed(facts: ModelFacts, resolved: Resolved, budget: int, dtype: str, per_item: int) -> Capture:
    """One sequence a frame, position embeddings from outside."""
    frames = max(1, resolved.max_frames // resolved.max_items)
    per_frame = -(-per_item // frames)
    head = facts.width // facts.heads
    return _capture(
        facts,
        resolved,
        budget,
        grid=(frames, facts.merge, per_frame * facts.merge),
        slots=resolved.sequence_slots,
        extra=lambda rows: (
            Buffer("pos_embeds", (rows, facts.width), dtype),
            Buffer("rotary_pos_emb_cos", (rows, head // 2), dtype),
            Buffer("rotary_pos_emb_sin", (rows, head // 2), dtype),
        ),
        output=lambda rows: Buffer("output", (rows // facts.merge**2, facts.out_width), dtype),
        dtype=dtype,
    )


def _qwen2_5(facts: ModelFacts, resolved: Resolved, budget: int, dtype: str) -> Capture:
    """Sequences of two kinds: frames in some blocks, windows of `window` pixels in the others."""
    frames = max(1, resolved.max_frames // resolved.max_items)
    per_frame = -(-math.ceil(budget / resolved.max_items) // frames)
    head = facts.width // facts.heads
    side = int(facts.extra["window"]) // facts.patch // facts.merge  # of a window, in tokens
    dummy = resolved.max_items * frames * -(-per_frame // side)
    windows = max(dummy, min(budget, resolved.sequence_slots - (-budget // side)))
    return _capture(
        facts,
        resolved,
        budget,
        grid=(frames, facts.merge, per_frame * facts.merge),
        slots=resolved.sequence_slots,
        extra=lambda rows: (
            Buffer("rotary_pos_emb_cos", (rows, head // 2), dtype),
            Buffer("rotary_pos_emb_sin", (rows, head // 2), dtype),
            Buffer("window_index", (rows // facts.merge**2,), "int64"),
            Buffer("reverse_indices", (rows // facts.merge**2,), "int64"),
            Buffer("cu_window_seqlens", (windows + 1,), "int32"),
            Buffer("max_seqlen_window", (), "int32"),
        ),
        output=lambda rows: Buffer("output", (rows // facts.merge**2, facts.out_width), dtype),
        dtype=dtype,
        longest="max_seqlen_full",
    )


_CAPTURES: dict[str, Callable[[ModelFacts, Resolved, int, str], Capture]] = {
    "ernie45_vl": _ernie,
    "glm4_1v": _glm,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
}
