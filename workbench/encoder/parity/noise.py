"""The noise floor: what rounding alone does to an encoder's outputs, and to each module on the way to them.

Two differences that are nothing but rounding are measured: eager as served of items together against each alone, and
eager as served against the same encoder in float32. The larger of the two is the floor.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from workbench.encoder.parity.bisect import RESAMPLER, Stages, compare_stage, staged, tower_of
from workbench.encoder.parity.metrics import compare
from workbench.errors import WorkbenchError
from workbench.parity import Difference, Noise

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab
    from workbench.encoder.session import EncoderInputs, EncoderSession, Grid

# A mismatch is further from eager than this many times what rounding does. Rounding differs by item: the worst of
# thousands of random items stays below 2 times the floor that a dozen items show (tests/test_parity_lab.py).
NOISE_FACTOR = 3.0


def measure_noise(lab: "Lab", reference: "EncoderSession", calls: Sequence["EncoderInputs"]) -> Noise:
    """Measure what rounding does to the items of `calls`.

    Args:
        reference: the same encoder in float32. Only its eager outputs count, so it needs no variant.
        calls: each is encoded whole and item by item.

    Raises:
        WorkbenchError: an output is not finite.
    """
    composition: list[Difference] = []
    against_reference: list[Difference] = []
    floors: dict[str, tuple[float, float]] = {}
    run = partial(_run, lab.resamples)
    for call in calls:
        whole, stages = run(lab.session, call)
        exact, exact_stages = run(reference, dataclasses.replace(call, pixels=call.pixels.to(reference.dtype)))
        against_reference += [compare(a, b) for a, b in zip(whole, exact, strict=True)]
        for i, (own, own_exact) in enumerate(zip(_split(stages, call), _split(exact_stages, call), strict=True)):
            (alone,), alone_stages = run(lab.session, lab.part(call, [i]))
            composition.append(compare(whole[i], alone))
            _raise_floors(floors, own, alone_stages)
            _raise_floors(floors, own, own_exact)
    composition_rms, composition_row = _worst(composition)
    reference_rms, reference_row = _worst(against_reference)
    return Noise(
        items=len(composition),
        composition_rms=composition_rms,
        composition_worst_row=composition_row,
        reference_rms=reference_rms,
        reference_worst_row=reference_row,
        graph_reference_rms=_graph_rms(lab, reference, calls),
        factor=NOISE_FACTOR,
        limit_rms=NOISE_FACTOR * max(composition_rms, reference_rms),
        limit_worst_row=NOISE_FACTOR * max(composition_row, reference_row),
        stages=floors,
    )


def _run(resamples: bool, session: "EncoderSession", call: "EncoderInputs") -> tuple[list[torch.Tensor], Stages]:
    with staged(tower_of(session)) as stages:
        outputs = session.eager_served(call)
    if resamples:
        stages[RESAMPLER] = torch.cat(outputs)
    return outputs, stages


def _split(stages: Stages, call: "EncoderInputs") -> Iterator[Stages]:
    """Yield the rows of each item; a stage has a row per patch, or per token behind a merge."""
    sizes = [t * h * w for t, h, w in call.grids]
    total = sum(sizes)
    for start, end in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        yield {name: value[start * len(value) // total : end * len(value) // total] for name, value in stages.items()}


def _raise_floors(floors: dict[str, tuple[float, float]], stages: Stages, references: Stages) -> None:
    for name, reference in references.items():
        stage = compare_stage(name, stages[name], reference)
        if stage.relative_rms is None or stage.worst_row is None:
            raise _not_finite()
        rms, worst_row = floors.get(name, (0.0, 0.0))
        floors[name] = max(rms, stage.relative_rms), max(worst_row, stage.worst_row)


def _graph_rms(lab: "Lab", reference: "EncoderSession", calls: Sequence["EncoderInputs"]) -> float | None:
    """Worst relative RMS of the graph against float32; None where it fails, which the matrix will show."""
    from workbench.encoder.parity.lab import ENCODER_ERRORS

    graph: list[Difference] = []
    for call in calls:
        exact = reference.eager_served(dataclasses.replace(call, pixels=call.pixels.to(reference.dtype)))
        try:
            graph += [compare(a, b) for a, b in zip(lab.session.graph(call), exact, strict=True)]
        except ENCODER_ERRORS:
            return None
    return _worst(graph)[0] if all(difference.finite for difference in graph) else None


def _worst(differences: list[Difference]) -> tuple[float, float]:
    if any(d.relative_rms is None or d.worst_row is None for d in differences):
        raise _not_finite()
    return max(d.relative_rms or 0.0 for d in differences), max(d.worst_row or 0.0 for d in differences)


def _not_finite() -> WorkbenchError:
    return WorkbenchError(
        "eager as served gives outputs that are not finite on random inputs, so nothing can be compared; check the "
        "weights"
    )


def noise_grids(budgets: Sequence[int], merge: int) -> list[list["Grid"]]:
    """Return calls of a dozen items from one token to the largest budget, square and long."""
    from workbench.encoder.parity.scenarios import near_square

    largest, smallest = max(budgets), min(budgets)
    sizes = [[1, smallest, max(2, smallest // 2)], [largest], [max(1, largest // 2), max(1, largest // 4), 3]]
    calls = [[near_square(tokens, merge) for tokens in call] for call in sizes]
    calls.append([(1, merge, merge * smallest), (1, merge * smallest, merge)])
    return calls
