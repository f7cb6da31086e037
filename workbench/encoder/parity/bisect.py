"""Where two arms part: the first module, the rows, the statistics.

Eager on the padded buffers is followed by forward hooks. A replayed CUDA graph runs no Python, so its first diverging
block is found by capturing prefixes: the encoder with its first k blocks only, for k by bisection.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from workbench.encoder import registry
from workbench.encoder.parity.tape import TapedBatch, captured_budgets
from workbench.parity import Bisection, Stage

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab
    from workbench.encoder.session import EncoderInputs, EncoderSession

Stages = dict[str, torch.Tensor]
TOWER = "tower"  # the last stage, but for a graph that holds the resampler too
RESAMPLER = "resampler"


def tower_of(session: "EncoderSession") -> Any:
    """Return the vision transformer: what a graph holds."""
    return getattr(session.model, registry.builder(session.facts.key).parts[0])


@contextmanager
def staged(tower: Any) -> Iterator[Stages]:
    """Yield a dict that fills with the outputs of a tower's modules, in order of execution.

    Names: "embeddings" (the first block's input), "blocks.0.attn", "blocks.0.mlp", "blocks.0", ..., "tower".
    """
    stages: Stages = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            stages[name] = _rows(output[0] if isinstance(output, tuple) else output)

        return hook

    def first(_module: Any, arguments: tuple[Any, ...]) -> None:
        stages["embeddings"] = _rows(arguments[0])

    with ExitStack() as stack:
        stack.callback(tower.blocks[0].register_forward_pre_hook(first).remove)
        for i, block in enumerate(tower.blocks):
            for name, module in (
                (f"blocks.{i}.attn", block.attn),
                (f"blocks.{i}.mlp", block.mlp),
                (f"blocks.{i}", block),
            ):
                stack.callback(module.register_forward_hook(keep(name)).remove)
        stack.callback(tower.register_forward_hook(keep(TOWER)).remove)
        yield stages


def _rows(value: torch.Tensor) -> torch.Tensor:
    """[rows, 1, features] or [rows, features] -> a copy of [rows, features]."""
    return value.detach().reshape(value.shape[0], -1).clone()


def served_stages(lab: "Lab", call: "EncoderInputs", batch: TapedBatch) -> Stages:
    """Return the stages of eager as served on the items of `batch`."""
    with staged(lab.tower) as stages:
        outputs = lab.session.eager_served(lab.part(call, batch.items))
    if lab.resamples:
        stages[RESAMPLER] = torch.cat(outputs)
    return stages


def padded_stages(lab: "Lab", batch: TapedBatch) -> Stages:
    """Return the stages of eager on the padded buffers of `batch`."""
    with staged_kernels(lab.model) if lab.fused else staged(lab.tower) as stages:
        raw = lab.padded_raw(batch)
    if lab.resamples:
        stages[RESAMPLER] = raw
    return stages


@contextmanager
def staged_kernels(model: Any) -> Iterator[Stages]:
    """Do what `staged` does for a model with variant `fused`, which runs no block as a module.

    Its kernel `add_norm` is called twice per block, with the residual stream and the output of attention or MLP.
    """
    from workbench.encoder.variants.dataflow import KERNELS, whole

    stages: Stages = {}
    kernels, calls = model.kernels, 0

    def add_norm(
        hidden: torch.Tensor, update: torch.Tensor, offset: torch.Tensor | None, norm: torch.nn.Module
    ) -> torch.Tensor:
        nonlocal calls
        block, behind = divmod(calls, 2)
        calls += 1
        stages.setdefault("embeddings", _rows(hidden))
        stages[f"blocks.{block}.{'mlp' if behind else 'attn'}"] = _rows(whole(update, offset))
        normed: torch.Tensor = kernels.add_norm(hidden, update, offset, norm)
        if behind:
            stages[f"blocks.{block}"] = _rows(hidden)
        if calls == 2 * len(model.vision_model.blocks):
            stages[TOWER] = _rows(normed)
        return normed

    own = {name: getattr(kernels, name) for name in KERNELS}
    model.kernels = SimpleNamespace(**own | {"add_norm": add_norm})
    try:
        yield stages
    finally:
        model.kernels = kernels


def compare_stage(name: str, value: torch.Tensor, reference: torch.Tensor) -> Stage:
    """Compare one module's output on the valid rows, and describe the rows behind them."""
    valid = reference.shape[0]
    difference = (value[:valid].float() - reference.float()).square().mean(dim=-1)
    scale = reference.float().square().mean().sqrt()
    rms, row = (float(difference.mean().sqrt() / scale), float(difference.amax().sqrt() / scale))
    padding = value[valid:]
    highest = float(padding.float().abs().amax()) if len(padding) else None
    return Stage(
        name=name,
        relative_rms=rms if math.isfinite(rms) else None,
        worst_row=row if math.isfinite(row) else None,
        finite=bool(torch.isfinite(value[:valid]).all()),
        padded_max_abs=highest if highest is not None and math.isfinite(highest) else None,
        padded_finite=math.isfinite(highest) if highest is not None else None,
    )


def beyond(lab: "Lab", stage: Stage) -> bool:
    """Whether a stage differs by more than rounding on its valid rows; a prefix is judged as the whole graph."""
    assert lab.noise is not None
    if stage.relative_rms is None or stage.worst_row is None or not stage.finite:
        return True
    rms, worst_row = lab.noise.stages.get(stage.name) or lab.noise.stages[lab.last_stage]
    return stage.relative_rms > lab.noise.factor * rms or stage.worst_row > lab.noise.factor * worst_row


def bisect_padded(
    lab: "Lab", call: "EncoderInputs", batch: TapedBatch, scenario: str, reference: Stages | None = None
) -> Bisection:
    """Follow eager as served and eager on the padded buffers module by module; the last stage is the tower's output.

    Args:
        reference: `served_stages` of the batch, where they are known.
    """
    assert batch.budget is not None
    reference, padded = reference or served_stages(lab, call, batch), padded_stages(lab, batch)
    stages = [compare_stage(name, padded[name], reference[name]) for name in reference if name in padded]
    first, rows = _first(lab, stages)
    return Bisection(scenario=scenario, budget=batch.budget, arms="padded", first=first, rows=rows, stages=stages)


def _first(lab: "Lab", stages: list[Stage]) -> tuple[str | None, Literal["valid", "padded"] | None]:
    """Return the stage where two arms part, and in which rows.

    What a kernel leaves in padded rows is its own affair: they say something only where they hold NaN or infinity, and
    then only when no valid row went wrong, or one did by not being finite any more.
    """
    first = next((stage for stage in stages if beyond(lab, stage)), None)
    spoiled = next((stage for stage in stages if stage.padded_finite is False), None)
    if first is None:
        return (spoiled.name, "padded") if spoiled is not None else (None, None)
    if spoiled is not None and not first.finite and stages.index(spoiled) <= stages.index(first):
        return spoiled.name, "padded"
    return first.name, "valid"


def bisect_graph(lab: "Lab", batch: TapedBatch, scenario: str) -> Bisection:
    """Find the first block at which a replayed prefix leaves eager on the same buffers.

    Each probe captures the encoder with its first k blocks for this one budget and replays it on the buffers of
    `batch`; log2(depth) captures.
    """
    assert batch.budget is not None
    stages: dict[int, Stage] = {}

    def differs(blocks: int) -> bool:
        with _truncated(lab, blocks):
            stages[blocks] = _prefix_stage(lab, batch, blocks)
        return beyond(lab, stages[blocks])

    # The fused tower takes its sizes from its first block.
    low, high = int(lab.fused), len(lab.tower.blocks)
    first, rows = None, None
    if differs(high):
        while low < high:  # the first prefix that differs is in low..high
            middle = (low + high) // 2
            if differs(middle):
                high = middle
            else:
                low = middle + 1
        first = f"blocks.{low - 1}" if low else "embeddings"
        rows = "padded" if not stages[low].finite and stages[low].padded_finite is False else "valid"
    return Bisection(
        scenario=scenario,
        budget=batch.budget,
        arms="graph",
        first=first,
        rows=rows,  # type: ignore[arg-type]
        stages=[stage for _, stage in sorted(stages.items())],
    )


@contextmanager
def _truncated(lab: "Lab", blocks: int) -> Iterator[None]:
    whole = lab.tower.blocks
    lab.tower.blocks = whole[:blocks]
    try:
        yield
    finally:
        lab.tower.blocks = whole


def _prefix_stage(lab: "Lab", batch: TapedBatch, blocks: int) -> Stage:
    """Capture and replay the truncated encoder on the buffers of `batch`, against eager on the same buffers."""
    assert batch.budget is not None
    manager = lab.new_manager()
    with lab.using(manager), torch.inference_mode():
        lab.capture(manager, [batch.budget])
        captured = captured_budgets(manager)[batch.budget]
        for key, value in batch.buffers.items():
            captured.input_buffers[key].copy_(value)
        captured.graph.replay()
        replayed = captured.output_buffer.clone()
        eager = lab.padded_raw(batch)
        manager.clear()
    valid = valid_rows(lab, batch, eager.shape[0])
    return compare_stage(f"{blocks} blocks", replayed, eager[:valid])


def valid_rows(lab: "Lab", batch: TapedBatch, rows: int) -> int:
    """Rows of a raw output that belong to items: patches where the graph ends before the merge, else tokens."""
    from workbench.encoder.parity.tape import selected_tensors

    pixels, _ = selected_tensors(batch.selected)
    buffer = batch.buffers["pixel_values"].shape[0]
    pairs = lab.frames_per_step if "video_grid_thw" in batch.selected else 1
    return int(pixels.shape[0]) * rows // buffer // pairs
