"""From one taped call to findings: what is not as it must be, and which part of the encoder or manager to suspect.

Every check compares what the manager did with something computed apart from it: the plan with the budgets and the
items' tokens, the buffers with the metadata that eager as served computes, the replay with the captured forward run
eagerly, that with eager as served, module by module. Checks run in the order in which data passes.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from workbench.encoder.parity.bisect import (
    RESAMPLER,
    TOWER,
    beyond,
    bisect_padded,
    compare_stage,
    served_stages,
    valid_rows,
)
from workbench.encoder.parity.tape import TapedBatch, selected_tensors
from workbench.parity import Finding, Severity

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab, Observation

# Positions are recomputed by the same code, so they agree to a few roundings; another grid's do not.
_POSITION_TOLERANCE = 1e-2
FAILED = ("mismatch", "hazard")  # of an item; "hazard" where a scenario probes
_NOT_POSITIONS = ("pixel_values", "cu_", "max_seqlen", "sequence_lengths")  # beginnings of names


def diagnose(lab: "Lab", seen: "Observation", *, probe: bool = False) -> list[Finding]:
    """Return the findings of one observation, in the order of the data's way.

    Args:
        probe: a mismatch is only a hazard, since the scenario broke the manager's promises itself.
    """
    failed = bool(seen.error) or any(status in FAILED for status in seen.item_statuses)
    severity: Severity = "mismatch" if failed and not probe else "hazard"
    findings: list[Finding] = []

    def add(suspect: str, message: str, budget: int | None = None, defect: str | None = None) -> None:
        findings.append(
            Finding(
                suspect=suspect,
                severity=severity,
                scenario=seen.scenario,
                budget=budget,
                message=message,
                defect=defect,
            )
        )

    for suspect, message in _input_findings(seen):
        add(suspect, message)
    for batch in seen.batches:
        for suspect, message, defect in _batch_findings(lab, seen, batch):
            add(suspect, message, batch.budget, defect)
    if seen.error and not findings:
        add(*_error_finding(seen))
    elif failed and not findings:
        for batch in seen.batches:
            for suspect, message in (*_deep_findings(lab, seen, batch), *_overwritten(seen, batch)):
                add(suspect, message, batch.budget)
        if not findings:
            add("postprocess", "the rows of every replay are right, and the items made of them are not")
    return findings


def _input_findings(seen: "Observation") -> Iterator[tuple[str, str]]:
    if not seen.given:
        return
    pixels, grids = selected_tensors(seen.given)
    if grids != [list(grid) for grid in seen.call.grids] or not torch.equal(pixels, seen.call.pixels):
        yield "inputs", "the pixel rows or grids that reached the graph manager are not those that eager got"
    items = sorted(item for batch in seen.batches for item in batch.items)
    if not seen.error and seen.call.grids and not items:
        yield "budget", "the call was answered without any replay"
    elif not seen.error and items != list(range(len(seen.call.grids))):
        yield "selection", f"the replays hold items {items} of a call of {len(seen.call.grids)}"


def _batch_findings(lab: "Lab", seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str, str | None]]:
    tokens = sum(lab.budget_tokens(seen.call, item) for item in batch.items)
    fitting = min((budget for budget in lab.budgets if budget >= tokens), default=None)
    # An error before a budget was chosen says nothing about the choice.
    if batch.budget != fitting and not (seen.error and seen.phase in ("packing", "selection")):
        yield "budget", f"{tokens} tokens ran in budget {batch.budget}; the smallest that holds them is {fitting}", None
    if batch.selected:
        yield from _selection_findings(lab, seen, batch)
    if batch.budget is None:
        return
    yield from _baked_findings(lab, seen, batch)
    if batch.buffers:
        yield from _buffer_findings(lab, seen, batch)
    if batch.raw is not None and batch.buffers:
        yield from _spoiled_findings(lab, seen, batch)


def _selection_findings(lab: "Lab", seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str, str | None]]:
    own = lab.part(seen.call, batch.items)
    pixels, grids = selected_tensors(batch.selected)
    if grids != [list(grid) for grid in own.grids]:
        yield "selection", f"items {batch.items} were selected with grids {grids}", None
    elif not torch.equal(pixels, own.pixels) and not _inputs_differ(seen):
        yield "selection", f"the pixel rows selected for items {batch.items} are not theirs", None


def _inputs_differ(seen: "Observation") -> bool:
    """Whether the call that reached the manager is another one; then its selections differ too."""
    return any(suspect == "inputs" for suspect, _ in _input_findings(seen))


def _baked_findings(lab: "Lab", seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str, str | None]]:
    assert batch.budget is not None
    baked = lab.baked.get(batch.budget)
    longest = batch.budget * lab.session.facts.merge**2
    if baked is not None and baked < longest:
        yield (
            "max_seqlen",
            f"budget {batch.budget} baked max_seqlen {baked}, and one item can have {longest} rows",
            None,
        )


def _buffer_findings(lab: "Lab", seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str, str | None]]:
    pixels, grids = selected_tensors(batch.selected)
    rows = pixels.shape[0]
    buffer = batch.buffers["pixel_values"]
    if not torch.equal(buffer[:rows], pixels.to(buffer.dtype)):
        yield "pixel_values", _where(buffer[:rows], pixels, "pixel_values"), None
    if bool((buffer[rows:] != 0).any()):
        yield "padding", f"pixel_values has values behind its {rows} valid rows", None
    expected = lab.tower_metadata(grids)
    yield from _position_findings(expected, batch, grids)
    yield from _index_findings(lab, batch, grids)
    for key in expected:
        if key.startswith("cu_"):
            yield from _offset_findings(expected[key].tolist(), batch.buffers[key].tolist(), key)


def _position_findings(
    expected: dict[str, torch.Tensor], batch: TapedBatch, grids: list[list[int]]
) -> Iterator[tuple[str, str, str | None]]:
    for key, value in expected.items():
        if value is None or key not in batch.buffers or key.startswith(_NOT_POSITIONS):
            continue
        own = batch.buffers[key]
        if not value.is_floating_point():  # Qwen2.5-VL's order of windows
            if not torch.equal(own[: value.shape[0]], value):
                yield "positions", f"{key} is not that of the grids {grids[:4]}", None
            continue
        stage = compare_stage(key, own, value)
        if stage.relative_rms is None or stage.relative_rms > _POSITION_TOLERANCE:
            yield "positions", f"{key} is not that of the grids {grids[:4]}", None
        if stage.padded_max_abs != 0.0 and stage.padded_finite is not None:
            yield "padding", f"{key} has values behind its {value.shape[0]} valid rows", None


def _index_findings(lab: "Lab", batch: TapedBatch, grids: list[list[int]]) -> Iterator[tuple[str, str, str | None]]:
    """Check the rows that a resampler inside the graph merges: even frames with odd ones, an image with itself."""
    if not lab.resamples or "temporal" not in batch.buffers:
        return
    held, expected = batch.buffers["temporal"].tolist(), frame_pairs(grids, lab.session.facts.merge)
    if held[: len(expected)] != expected:
        yield "frame_pairs", f"temporal is not that of the grids {grids[:4]}", None
    elif any(held[len(expected) :]):
        yield "padding", f"temporal has values behind its {len(expected)} valid entries", None


def frame_pairs(grids: list[list[int]], merge: int) -> list[int]:
    """Return each merged patch of an even frame, followed by that of the next frame; an image's frame is its own."""
    pairs: list[int] = []
    start = 0
    for frames, height, width in grids:
        area = height * width // merge**2
        for frame in range(0, frames, 2):
            step = area if frame + 1 < frames else 0
            for patch in range(start + frame * area, start + (frame + 1) * area):
                pairs += (patch, patch + step)
        start += frames * area
    return pairs


def _spoiled_findings(lab: "Lab", seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str, str | None]]:
    """NaN or infinity behind the valid rows of a replay's output: harmless until a kernel reads past them."""
    assert batch.raw is not None
    valid = valid_rows(lab, batch, batch.raw.shape[0])
    if bool(torch.isfinite(batch.raw[valid:]).all()):
        return
    found = bisect_padded(lab, seen.call, batch, seen.scenario)
    suspect, eagerly = "replay", ", and the captured forward run eagerly leaves them finite"
    if found.first is not None:
        suspect, eagerly = suspect_of_stage(found.first), ""
    yield suspect, f"rows behind the {valid} valid ones of the replay's output are not finite{eagerly}", None


def _offset_findings(expected: list[int], offsets: list[int], name: str) -> Iterator[tuple[str, str, str | None]]:
    head, tail = offsets[: len(expected)], offsets[len(expected) :]
    shown = f"[{', '.join(map(str, offsets[:10]))}{', ...' if len(offsets) > 10 else ''}]"
    if head != expected:
        yield "cu_seqlens", f"{name} is {shown}, and the items need {expected[:10]}", None
    elif any(offset != expected[-1] for offset in tail):
        falls = any(b < a for a, b in pairwise(offsets))
        yield (
            "cu_seqlens",
            f"{name} {shown} {'falls' if falls else 'moves'} behind its last valid offset {expected[-1]}: "
            "the padding must repeat it",
            "D6" if falls and set(tail) <= {0, expected[-1]} else None,
        )


def _error_finding(seen: "Observation") -> tuple[str, str, int | None, str | None]:
    """Name the part that raised: where no check above saw anything wrong before it."""
    batch = seen.batches[-1] if seen.batches else None
    budget = batch.budget if batch is not None else None
    if batch is not None and budget is None and seen.phase in ("postprocess", "fallback"):
        defect = "D1" if seen.phase == "postprocess" else None
        reason = "; the fallback's output is postprocessed a second time" if defect else ""
        return "fallback", f"{seen.error}{reason}", None, defect
    if seen.phase == "copies":
        return _copy_error(seen, budget)
    suspect = {"postprocess": "postprocess", "replay": "replay", "fallback": "fallback"}.get(seen.phase, "selection")
    return suspect, seen.error, budget, None


def _copy_error(seen: "Observation", budget: int | None) -> tuple[str, str, int | None, str | None]:
    """A copy into a captured buffer failed: D3 (rows) or D4 (sequences) of docs/defects.md."""
    call = seen.call
    if call.modality == "video":
        return "cu_seqlens", f"{seen.error}; the batch holds more frames than were captured", budget, "D4"
    return "pixel_values", f"{seen.error}; the captured buffer holds fewer rows than its budget", budget, "D3"


def _deep_findings(lab: "Lab", seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str]]:
    """Compare a replay with eager as served, then the captured forward run eagerly with that."""
    if batch.raw is None or batch.budget is None:
        if batch.budget is None and any(seen.item_statuses[item] in FAILED for item in batch.items):
            yield "fallback", "the eager fallback's output is not that of eager as served"
        return
    if all(seen.item_statuses[item] not in FAILED for item in batch.items):
        return
    reference = served_stages(lab, seen.call, batch)
    if not beyond(lab, compare_stage(lab.last_stage, batch.raw, reference[lab.last_stage])):
        return  # the rows that the graph gave are right, so what follows it is not
    found = bisect_padded(lab, seen.call, batch, seen.scenario, reference)
    if found.first is None or not beyond(lab, found.stages[-1]):
        yield "replay", f"replaying budget {batch.budget} does not give what the captured forward gives eagerly"
    else:
        yield suspect_of_stage(found.first), f"first module to differ is {found.first}, in {found.rows} rows"


def _overwritten(seen: "Observation", batch: TapedBatch) -> Iterator[tuple[str, str]]:
    for item, made in batch.made.items():
        if not torch.equal(made, seen.outputs[item]) and not bool(torch.isnan(made).any()):
            yield "output", f"item {item} was changed by a later replay of the same call"


def suspect_of_stage(stage: str) -> str:
    """Return the suspect that a stage of `bisect.staged` stands for."""
    if stage in (TOWER, RESAMPLER):
        return "head"
    if stage == "embeddings":
        return "patch_embed"
    return {"attn": "attention", "mlp": "mlp"}.get(stage.rsplit(".", 1)[-1], "blocks")


def _where(value: torch.Tensor, expected: torch.Tensor, name: str) -> str:
    wrong = (value != expected.to(value.dtype)).any(dim=-1).nonzero().flatten().tolist()
    return f"{name} has {len(wrong)} wrong rows of {expected.shape[0]}, the first is row {wrong[0]}"
