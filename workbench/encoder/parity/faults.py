"""Planted faults: mutations of the encoder or its manager at run time, and whether the lab catches them.

A fault is a context manager that patches one model object and one manager object; nothing of vLLM's classes or files
changes. Each is planted before a manager captures, so that a CUDA graph holds it too. Faults of the graph's own code
act inside `encoder_cudagraph_forward` only, so eager as served stays right.

A fault counts as caught when the lab reports anything and the suspect it names first is one of the expected.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.lab import ENCODER_ERRORS, Lab, Observation
from workbench.encoder.parity.scenarios import SCENARIOS, NotTestedError, Scenario
from workbench.encoder.parity.tape import captured_budgets
from workbench.parity import FaultResult, Finding, suspect_of

Plant = Callable[[Lab], AbstractContextManager[None]]
Values = dict[str, torch.Tensor]
BOTH = ("ernie45_vl", "glm4_1v")
_POSITIONS = ("rotary_pos_emb", "rotary_pos_emb_cos", "rotary_pos_emb_sin")


@dataclass(frozen=True)
class Fault:
    """One mutation.

    Attributes:
        title: what is wrong, for the table.
        expected: suspects (keys of `workbench.parity.SUSPECTS`) of which the lab must name one.
        needs: "cuda" where a static replay cannot show it.
        models: registry keys of the models that it can exist in.
        backends: attention backends that it can exist in; empty: all.
    """

    name: str
    title: str
    plant: Plant
    expected: tuple[str, ...]
    needs: Literal["cpu", "cuda"] = "cpu"
    models: tuple[str, ...] = BOTH
    backends: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


def fault(title: str, *expected: str, **options: Any) -> Callable[[Callable[[Lab], Iterator[None]]], Plant]:
    """Register a fault under the function's name; the function patches, yields, and mends."""

    def register(plant: Callable[[Lab], Iterator[None]]) -> Plant:
        name = plant.__name__.replace("_", "-")
        manager = contextmanager(plant)
        FAULTS[name] = Fault(name=name, title=title, plant=manager, expected=expected, **options)
        return manager

    return register


# Ways to patch -----------------------------------------------------------------------------------------------------


@contextmanager
def changed_values(lab: Lab, change: Callable[[Values, list[list[int]]], None]) -> Iterator[None]:
    """Let `change` alter what the model prepares for a replay, given the batch's grids."""
    from workbench.encoder.parity.tape import selected_tensors

    def wrap(original: Any) -> Any:
        def prepare(mm_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(mm_kwargs, *args, **kwargs)
            change(result.values, selected_tensors(mm_kwargs)[1])
            return result

        return prepare

    with wrapped(lab.model, "prepare_encoder_cudagraph_replay_buffers", wrap):
        yield


@contextmanager
def dropped_values(lab: Lab, *keys: str) -> Iterator[None]:
    """Let the manager not copy these buffers: they keep what an earlier replay, or the capture, left."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        for key in keys:
            values.pop(key, None)

    with changed_values(lab, change):
        yield


@contextmanager
def changed_capture(lab: Lab, change: Callable[[int, Values], None]) -> Iterator[None]:
    """Let `change` alter what a budget is captured with."""

    def wrap(original: Any) -> Any:
        def prepare(token_budget: int, *args: Any, **kwargs: Any) -> Any:
            result = original(token_budget, *args, **kwargs)
            change(token_budget, result.values)
            return result

        return prepare

    with wrapped(lab.model, "prepare_encoder_cudagraph_capture_inputs", wrap):
        yield


@contextmanager
def inside_graph(lab: Lab, *hooks: tuple[torch.nn.Module, Callable[..., Any], bool]) -> Iterator[None]:
    """Attach hooks that act only while the captured forward runs.

    Args:
        hooks: (module, function, before). Before: gets (arguments, keyword arguments) and returns both, changed. After:
            gets (arguments, output) and returns the output, changed.
    """
    active = [False]

    def wrap(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            active[0] = True
            try:
                return original(*args, **kwargs)
            finally:
                active[0] = False

        return forward

    with ExitStack() as stack:
        stack.enter_context(wrapped(lab.model, "encoder_cudagraph_forward", wrap))
        for module, function, before in hooks:
            if before:

                def pre(_module: Any, args: Any, kwargs: Any, function: Callable[..., Any] = function) -> Any:
                    return function(args, kwargs) if active[0] else None

                stack.callback(module.register_forward_pre_hook(pre, with_kwargs=True).remove)
            else:

                def post(_module: Any, args: Any, output: Any, function: Callable[..., Any] = function) -> Any:
                    return function(args, output) if active[0] else None

                stack.callback(module.register_forward_hook(post).remove)
        yield


@contextmanager
def changed_postprocess(lab: Lab, call: Callable[..., None]) -> Iterator[None]:
    """Replace postprocessing by `call(original, outputs, indices, tokens, dest, clone, batch)`."""

    def wrap(original: Any) -> Any:
        def postprocess(
            outputs: Any, indices: Any, tokens: Any, dest: Any, clone: bool = False, batch_mm_kwargs: Any = None
        ) -> None:
            call(original, outputs, indices, tokens, dest, clone, batch_mm_kwargs)

        return postprocess

    with wrapped(lab.model, "postprocess_encoder_output", wrap):
        yield


@contextmanager
def after_capture(lab: Lab, change: Callable[[], None]) -> Iterator[None]:
    """Run `change` once the manager has captured."""

    def wrap(original: Any) -> Any:
        def capture(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            change()
            return result

        return capture

    with wrapped(lab.manager, "capture", wrap):
        yield


def _last_attention(lab: Lab) -> torch.nn.Module:
    module: torch.nn.Module = lab.tower.blocks[-1].attn.attn
    return module


def _head(lab: Lab) -> torch.nn.Module:
    module: torch.nn.Module = lab.tower.merger if hasattr(lab.tower, "merger") else lab.tower.ln
    return module


# Sequence offsets --------------------------------------------------------------------------------------------------


@fault("cu_seqlens one row short", "cu_seqlens")
def offsets_off_by_one(lab: Lab) -> Iterator[None]:
    """Every offset but the first is one too small."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        values["cu_seqlens"] = torch.cat([values["cu_seqlens"][:1], values["cu_seqlens"][1:] - 1])

    with changed_values(lab, change):
        yield


@fault("cu_seqlens not padded", "cu_seqlens")
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


@fault("replay buffers not zeroed before the copy", "padding")
def buffers_not_zeroed(lab: Lab) -> Iterator[None]:
    """Rows of an earlier replay stay behind the valid ones; harmless until a kernel reads them."""
    with wrapped(lab.manager, "_copy_padded_buffer", lambda _original: _copy_without_zero):
        yield


@fault("replay buffers not zeroed, and attention reads past the last item", "padding", "attention")
def buffers_not_zeroed_and_read(lab: Lab) -> Iterator[None]:
    """The two together change outputs."""
    with buffers_not_zeroed(lab), attention_over_padding(lab):
        yield


def _copy_without_zero(dst: torch.Tensor, src: torch.Tensor) -> None:
    if dst.is_floating_point():
        dst[: src.shape[0]].copy_(src)
    else:
        dst.zero_()
        dst[: src.shape[0]].copy_(src)


# Plan --------------------------------------------------------------------------------------------------------------


@fault("largest budget for every batch", "budget")
def budget_largest(lab: Lab) -> Iterator[None]:
    """Outputs are right and time is wasted."""

    def wrap(original: Any) -> Any:
        def find(total: int, budgets: list[int] | None = None) -> int | None:
            return None if original(total, budgets) is None else max(budgets or lab.manager.token_budgets)

        return find

    with wrapped(lab.manager, "_find_smallest_fitting_budget_given_tokens", wrap):
        yield


@fault("a budget smaller than the batch", "budget")
def budget_too_small(lab: Lab) -> Iterator[None]:
    """The next smaller budget is chosen where there is one."""

    def wrap(original: Any) -> Any:
        def find(total: int, budgets: list[int] | None = None) -> int | None:
            found = original(total, budgets)
            smaller = [budget for budget in budgets or lab.manager.token_budgets if found is None or budget < found]
            return max(smaller) if found is not None and smaller else found

        return find

    with wrapped(lab.manager, "_find_smallest_fitting_budget_given_tokens", wrap):
        yield


@fault("graphs never used", "budget")
def graphs_never_used(lab: Lab) -> Iterator[None]:
    """Every call runs eagerly: outputs are right, and only the batches show it."""

    def wrap(_original: Any) -> Any:
        def execute(mm_kwargs: Any) -> list[torch.Tensor]:
            if not len(lab.model.get_encoder_cudagraph_item_specs(mm_kwargs)):
                return []
            return list(lab.model.embed_multimodal(**mm_kwargs))

        return execute

    with wrapped(lab.manager, "_execute_local", wrap):
        yield


@fault("pixel rows of the items in another order than their grids", "selection")
def items_swapped(lab: Lab) -> Iterator[None]:
    """Rows are gathered back to front."""

    def wrap(original: Any) -> Any:
        def select(mm_kwargs: Any, indices: list[int]) -> Any:
            result = dict(original(mm_kwargs, indices))
            if len(indices) > 1:
                key = next(key for key in result if key.startswith("pixel_values"))
                result[key] = original(mm_kwargs, indices[::-1])[key]
            return result

        return select

    with wrapped(lab.model, "select_encoder_cudagraph_items", wrap):
        yield


@fault("an item of the call encoded twice, another never", "selection")
def item_repeated(lab: Lab) -> Iterator[None]:
    """The first item's rows stand in for the last one's."""

    def wrap(original: Any) -> Any:
        def select(mm_kwargs: Any, indices: list[int]) -> Any:
            return original(mm_kwargs, [*indices[:-1], indices[0]])

        return select

    with wrapped(lab.model, "select_encoder_cudagraph_items", wrap):
        yield


# Inside the graph --------------------------------------------------------------------------------------------------


@fault("attention of the last block left out", "attention")
def attention_skipped(lab: Lab) -> Iterator[None]:
    """Cosine hardly notices."""
    with inside_graph(lab, (_last_attention(lab), lambda _args, output: torch.zeros_like(output), False)):
        yield


@fault("attention reads the padded rows", "attention")
def attention_over_padding(lab: Lab) -> Iterator[None]:
    """The last sequence of the last block runs to the end of the buffer."""

    def before(args: Any, kwargs: dict[str, Any]) -> Any:
        offsets, rows = kwargs["cu_seqlens"], kwargs["query"].shape[1]
        return args, kwargs | {"cu_seqlens": offsets.masked_fill(offsets == offsets.max(), rows)}

    with inside_graph(lab, (_last_attention(lab), before, True)):
        yield


@fault("attention with another softmax scale", "attention")
def attention_scaled(lab: Lab) -> Iterator[None]:
    """Queries of the last block come in halved."""

    def before(args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"query": kwargs["query"] * 0.5}

    with inside_graph(lab, (_last_attention(lab), before, True)):
        yield


@fault("MLP of the last block left out", "mlp")
def mlp_skipped(lab: Lab) -> Iterator[None]:
    """Its output is zero."""
    with inside_graph(lab, (lab.tower.blocks[-1].mlp, lambda _args, output: torch.zeros_like(output), False)):
        yield


@fault("last block left out", "blocks")
def block_skipped(lab: Lab) -> Iterator[None]:
    """It hands on its input."""
    with inside_graph(lab, (lab.tower.blocks[-1], lambda args, _output: args[0], False)):
        yield


@fault("hidden states dropped to float8 in every block", "blocks")
def dtype_drop(lab: Lab) -> Iterator[None]:
    """Two bits of mantissa between the blocks."""

    def after(_args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.float8_e5m2).to(output.dtype)

    with inside_graph(lab, *((block, after, False) for block in lab.tower.blocks)):
        yield


@fault("NaN in the padded rows between the blocks", "blocks", "attention")
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


@fault("last normalisation of the tower left out", "head")
def head_skipped(lab: Lab) -> Iterator[None]:
    """Ernie's final layer norm, GLM's merger: the output is another by a smooth function."""

    def after(_args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5 * output.abs()

    with inside_graph(lab, (_head(lab), after, False)):
        yield


# Replay ------------------------------------------------------------------------------------------------------------


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


@fault("a branch baked into the graph", "replay", needs="cuda")
def baked_branch(lab: Lab) -> Iterator[None]:
    """A block that Python skips for the dummy items of the capture only."""
    capturing = [True]

    def after(args: Any, output: torch.Tensor) -> torch.Tensor:
        return args[0] if capturing[0] else output

    def change() -> None:
        capturing[0] = False

    with inside_graph(lab, (lab.tower.blocks[-1], after, False)), after_capture(lab, change):
        yield


@fault("attention leaves padded rows unwritten", "attention", "replay", needs="cuda", backends=("FLASH_ATTN",))
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


@fault("NaN in the padded keys and values of attention", "attention", "blocks", needs="cuda", backends=("FLASH_ATTN",))
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

    with inside_graph(lab, (_last_attention(lab), before, True)):
        yield


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


@fault("resampler offsets of another call", "postprocess", models=("ernie45_vl",))
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


# Campaign ----------------------------------------------------------------------------------------------------------


def battery() -> list[Scenario]:
    """The scenarios that every fault is tried with: all that need no child process and no video manager."""
    return [s for s in SCENARIOS.values() if not s.child and s.modality == "image"]


# What the battery reports on the unchanged code, as (suspect, scenario); it is no credit to catch that again.
Baseline = frozenset[tuple[str, str]]


def baseline(lab: Lab) -> Baseline:
    """Run the battery on the unchanged code."""
    lab.restart_inputs()
    return frozenset((finding.suspect, finding.scenario) for seen in run_battery(lab) for finding in seen.findings)


def try_fault(lab: Lab, planted: Fault, known: Baseline = frozenset()) -> FaultResult:
    """Plant one fault in a manager of its own, run the battery, and say whether it was caught.

    Args:
        known: see `baseline`; such findings do not count.
    """
    result = untested(lab, planted, _not_testable(lab, planted))
    if result.message:
        return result
    manager = lab.new_manager()
    lab.restart_inputs()
    seen: list[Observation] = []
    findings: list[Finding] = []
    with lab.using(manager):
        sentinel = Sentinel(lab)
        try:
            with planted.plant(lab):
                lab.capture(manager)
                seen.extend(run_battery(lab))
                findings += sentinel.findings()
        except ENCODER_ERRORS as error:
            # On CUDA a fault may end the context; what was seen before counts.
            result = msgspec.structs.replace(result, message=f"ended by {type(error).__name__}: {error}")
        finally:
            manager.clear()
    findings += [
        finding for one in seen for finding in one.findings if (finding.suspect, finding.scenario) not in known
    ]
    return _judged(result, seen, findings) if findings or not result.message else result


def untested(lab: Lab, planted: Fault, reason: str) -> FaultResult:
    """Return the result of a fault that was not tried."""
    return FaultResult(
        fault=planted.name,
        title=planted.title,
        model=lab.session.facts.key,
        needs=planted.needs,
        expected=list(planted.expected),
        status="not_tested",
        message=reason,
    )


def _judged(result: FaultResult, seen: list[Observation], findings: list[Finding]) -> FaultResult:
    suspect = suspect_of(findings)
    if suspect is None:
        return msgspec.structs.replace(result, status="missed", message="no finding")
    ratios = [one.ratio for one in seen if one.call.grids]
    known = [ratio for ratio in ratios if ratio is not None]
    return msgspec.structs.replace(
        result,
        status="caught" if suspect.suspect in result.expected else "misnamed",
        suspect=suspect.suspect,
        severity=suspect.severity,
        scenarios=sorted({finding.scenario for finding in findings}),
        ratio=max(known) if known and len(known) == len(ratios) else None,
        message=suspect.message,
    )


def run_battery(lab: Lab) -> Iterator[Observation]:
    """Run every scenario of the battery at every budget."""
    for each in battery():
        for budget in [None] if each.spans else lab.budgets:
            try:
                yield from each.run(lab, budget)
            except NotTestedError:
                continue


class Sentinel:
    """Eager's own output for fixed inputs: when it changes, weights or other state did."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._call = lab.session.inputs([(1, 4 * lab.session.facts.merge, 2 * lab.session.facts.merge)], seed=lab.seed)
        self._before = lab.session.eager_served(self._call)[0].clone()

    def findings(self) -> list[Finding]:
        """Return a finding when eager's output is no longer bit-equal to the first one."""
        after = self._lab.session.eager_served(self._call)[0]
        if torch.equal(self._before, after):
            return []
        return [
            Finding(
                suspect="weights",
                severity="mismatch",
                scenario="sentinel",
                budget=None,
                message="eager as served gives another output for the same input than at the start",
            )
        ]


def _not_testable(lab: Lab, planted: Fault) -> str:
    if lab.session.facts.key not in planted.models:
        return f"{lab.session.facts.title} has no such code"
    if planted.needs == "cuda" and not lab.bakes:
        return "a static replay runs Python again, so it cannot show this"
    backend = lab.session.model_record.attention_backend.split()[0]  # "FLASH_ATTN 3" names the version too
    if planted.backends and backend not in planted.backends:
        return f"{backend} has no such code"
    return ""
