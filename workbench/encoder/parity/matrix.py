"""The whole lab in one run: matrix of scenarios and budgets, bisections, planted faults, random clean workloads.

from workbench.budgets import Configuration
from workbench.encoder.parity.matrix import Plan, run
from workbench.encoder.session import SessionOptions

parity = run(SessionOptions(depth=2, width=160), Configuration((16, 32, 64), 4), Plan(faults=True))
print(parity.mismatched, [cell for cell in parity.cells if cell.status == "error"])
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import torch

import workbench
from workbench.budgets import Configuration
from workbench.decision import ProxyFlips, proxy_flips
from workbench.encoder.instruments import wrapped
from workbench.encoder.parity import child
from workbench.encoder.parity.bisect import bisect_graph, bisect_padded
from workbench.encoder.parity.faults import FAULTS, Fault, Sentinel, baseline, try_fault, untested
from workbench.encoder.parity.lab import ENCODER_ERRORS, Lab, Observation, lab_options, open_lab
from workbench.encoder.parity.metrics import compare
from workbench.encoder.parity.scenarios import SCENARIOS, NotTestedError, Scenario, near_square, video_manager
from workbench.encoder.session import Grid, SessionOptions
from workbench.environment import environment
from workbench.errors import WorkbenchError
from workbench.models import Modality, model_facts
from workbench.parity import (
    SCHEMA_VERSION,
    Bisection,
    Campaign,
    Cell,
    CleanRuns,
    FaultResult,
    Finding,
    ItemResult,
    Parity,
    Visibility,
    worst_status,
)
from workbench.progress import Progress, silent
from workbench.run import Replay

KEPT_ITEMS = 60  # items stored, the worst first
KEPT_BISECTIONS = 6
FAULT_BUDGETS = (8, 32)  # enough for every fault to show, and small enough to plant dozens

STATIC_LIMITS = [
    "the effect of values baked at capture (max_seqlen, host values, branches): a static replay runs Python again; "
    "the baked max_seqlen itself is checked",
    "what CUDA attention kernels do with padded rows: the CPU's attention gets the valid rows only",
    "memory that graphs of one pool share: a static replay has no pool",
    "captured addresses (replaced buffers, reloaded weights): a static replay looks them up again",
]

FUSED_LIMIT = "the Triton kernels of variant fused: on the CPU torch computes the same dataflow"


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        scenarios: names; empty: all.
        faults: also plant every fault, at `FAULT_BUDGETS`.
        fault_depth: blocks of the encoder that the faults are planted in, where it has as many.
        clean: random workloads on the unchanged code.
        seed: of inputs and random workloads.
    """

    scenarios: tuple[str, ...] = ()
    faults: bool = False
    fault_depth: int = 4
    clean: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.scenarios:
            if name not in SCENARIOS:
                raise WorkbenchError(f"unknown scenario {name!r}; there are {', '.join(SCENARIOS)}")
        if self.clean < 0:
            raise WorkbenchError(f"{self.clean} random workloads cannot be run; give 0 or more")


@dataclass
class Matrix:
    """What the scenarios showed so far."""

    cells: list[Cell] = field(default_factory=list)
    items: list[ItemResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    bisections: list[Bisection] = field(default_factory=list)


def run(
    options: SessionOptions,
    configuration: Configuration,
    plan: Plan | None = None,
    *,
    variants: Sequence[str] = (),
    name: str = "parity",
    progress: Progress = silent,
    on_part: Callable[[Parity], None] = lambda _parity: None,
) -> Parity:
    """Run the lab on one encoder and configuration.

    Args:
        variants: of the encoder, see `lab.open_lab`.
        name: stored with the result.
        on_part: given the result so far, after the matrix and after each fault: a fault may end a CUDA process.

    Raises:
        WorkbenchError: see `lab.open_lab`.
    """
    plan = plan or Plan()
    start = time.perf_counter()
    with open_lab(options, configuration, seed=plan.seed, variants=variants) as lab:
        parity = _with_faults(observe(lab, plan, name=name, progress=progress), [], start)
        on_part(parity)
    if not plan.faults:
        return parity
    shallow = replace(options, depth=min(plan.fault_depth, parity.model.depth))
    small = replace(configuration, budgets=FAULT_BUDGETS)
    with open_lab(shallow, small, seed=plan.seed, variants=variants) as lab:
        results = campaign(lab, progress, lambda results: on_part(_with_faults(parity, results, start)))
        return _with_faults(parity, results, start)


def _with_faults(parity: Parity, faults: list[FaultResult], start: float) -> Parity:
    import msgspec

    return msgspec.structs.replace(parity, faults=faults, seconds=time.perf_counter() - start)


def observe(lab: Lab, plan: Plan, *, name: str = "parity", progress: Progress = silent) -> Parity:
    """Run all of `plan` but its faults on an open lab."""
    assert lab.noise is not None
    start = time.perf_counter()
    sentinel = Sentinel(lab)
    lab.digest = hashlib.sha256()
    matrix = run_matrix(lab, plan.scenarios or tuple(SCENARIOS), progress)
    inputs, lab.digest = lab.digest.hexdigest(), None
    matrix.findings += sentinel.findings()
    proxy, proxy_noise = _proxy(lab)
    record = lab.session.model_record
    return Parity(
        schema_version=SCHEMA_VERSION,
        workbench=workbench.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=name,
        replay=lab.session.replay,
        environment=environment(),
        model=record,
        config=lab.session.config_record,
        inputs_fingerprint=inputs,
        seed=plan.seed,
        noise=lab.noise,
        visibility=visibility(lab),
        cells=matrix.cells,
        items=sorted(matrix.items, key=_badness, reverse=True)[:KEPT_ITEMS],
        findings=matrix.findings,
        bisections=matrix.bisections,
        proxy=proxy,
        proxy_noise=proxy_noise,
        faults=[],
        clean=clean_runs(lab, plan.clean, plan.seed, progress) if plan.clean else None,
        not_tested=_untested_here(lab),
        seconds=time.perf_counter() - start,
        variants=list(lab.variants),
        exact=lab.exact,
    )


def _untested_here(lab: Lab) -> list[str]:
    if lab.cuda:
        return []
    return STATIC_LIMITS + [FUSED_LIMIT] * lab.fused


def _badness(item: ItemResult) -> float:
    return float("inf") if item.graph.relative_rms is None else item.graph.relative_rms


# Matrix ------------------------------------------------------------------------------------------------------------


def run_matrix(lab: Lab, names: tuple[str, ...], progress: Progress = silent) -> Matrix:
    """Run scenarios at every budget; an error in one does not stop the others."""
    matrix = Matrix()
    cells = [(SCENARIOS[name], budget) for name in names for budget in _budgets(lab, SCENARIOS[name])]
    for done, (scenario, budget) in enumerate(cells):
        progress(f"{scenario.name} {budget or ''}", done / len(cells))
        if scenario.child:
            part = child.run(lab, scenario.name)
            matrix.cells += part.cells
            matrix.items += part.items
            matrix.findings += part.findings
        else:
            with _digest_of(lab, scenario):
                run_cell(lab, scenario, budget, matrix)
    progress("scenarios", 1.0)
    return matrix


@contextmanager
def _digest_of(lab: Lab, scenario: Scenario) -> Iterator[None]:
    """Leave inputs out of the fingerprint that exist only with a variant, so that a session without has the same."""
    digest = lab.digest
    if scenario.modality not in model_facts(lab.session.facts.key).graph_modalities:
        lab.digest = None
    try:
        yield
    finally:
        lab.digest = digest


def _budgets(lab: Lab, scenario: Scenario) -> list[int | None]:
    return [None] if scenario.spans else list(lab.budgets)


def run_cell(lab: Lab, scenario: Scenario, budget: int | None, matrix: Matrix) -> None:
    """Run one scenario at one budget and add what it shows to `matrix`."""
    seen: list[Observation] = []
    try:
        for observation in scenario.run(lab, budget):
            seen.append(observation)
            if "mismatch" in observation.item_statuses and len(matrix.bisections) < KEPT_BISECTIONS:
                # Now, while the scenario's manager is the one under observation.
                matrix.bisections += _bisect(lab, observation)
    except NotTestedError as reason:
        matrix.cells.append(Cell(scenario=scenario.name, budget=budget, status="not_tested", reason=str(reason)))
        return
    matrix.cells.append(_cell(scenario.name, budget, seen))
    matrix.items += [item for number, one in enumerate(seen) for item in _items(number, one)]
    for observation in seen:
        matrix.findings += [finding for finding in observation.findings if finding not in matrix.findings]


def _cell(name: str, budget: int | None, seen: list[Observation]) -> Cell:
    differences = [difference for one in seen for difference in one.graph]
    ratios = [one.ratio for one in seen if one.graph]
    known = [ratio for ratio in ratios if ratio is not None]
    reason = next((one.error for one in seen if one.error), "") or next(
        (finding.message for one in seen for finding in one.findings), ""
    )
    return Cell(
        scenario=name,
        budget=budget,
        status=worst_status([one.status for one in seen]),
        calls=len(seen),
        items=len(differences),
        bit_equal=sum(difference.bit_equal for difference in differences),
        ratio=max(known) if known and len(known) == len(ratios) else None,
        worst=max(differences, key=lambda d: float("inf") if d.relative_rms is None else d.relative_rms, default=None),
        reason=reason,
        graph_items=sum(len(one.as_graph) for one in seen),
        graph_equal=sum(sum(one.as_graph) for one in seen),
    )


def _items(number: int, seen: Observation) -> Iterator[ItemResult]:
    for i, (difference, status) in enumerate(zip(seen.graph, seen.item_statuses, strict=True)):
        yield ItemResult(
            scenario=seen.scenario,
            budget=seen.budgets[i],
            call=number,
            item=i,
            modality=seen.call.modality,
            grid=seen.call.grids[i],
            status=status,
            graph=difference,
            padded=seen.padded[i],
        )


def _bisect(lab: Lab, seen: Observation) -> list[Bisection]:
    """Bisect the first mismatching replay: the padded buffers first, the graph when those are innocent."""
    for batch in seen.batches:
        if batch.budget is None or not batch.buffers:
            continue
        if all(seen.item_statuses[item] != "mismatch" for item in batch.items):
            continue
        try:
            padded = bisect_padded(lab, seen.call, batch, seen.scenario)
            return [padded] if padded.first is not None else [bisect_graph(lab, batch, seen.scenario)]
        except ENCODER_ERRORS:
            return []  # the observation itself names the error
    return []


def bisect_fault(lab: Lab, name: str, arms: Literal["padded", "graph"] = "padded") -> Bisection:
    """Plant fault `name` and bisect one call that it spoils.

    Raises:
        WorkbenchError: no such fault, or it spoils no replay here.
    """
    planted = _fault(name)
    manager = lab.new_manager()
    with lab.using(manager), planted.plant(lab):
        lab.capture(manager)
        largest = max(lab.budgets)
        for grids in (
            [near_square(largest * 3 // 4, lab.session.facts.merge)],
            [near_square(1, lab.session.facts.merge)],
        ):
            seen = lab.observe(grids, f"fault {name}")
            if seen.status == "mismatch" and seen.batches and seen.batches[0].buffers:
                batch = seen.batches[0]
                if arms == "graph":
                    return bisect_graph(lab, batch, seen.scenario)
                return bisect_padded(lab, seen.call, batch, seen.scenario)
    raise WorkbenchError(f"fault {name!r} spoils no replay here, so there is nothing to bisect")


def _fault(name: str) -> Fault:
    if name not in FAULTS:
        raise WorkbenchError(f"unknown fault {name!r}; there are {', '.join(FAULTS)}")
    return FAULTS[name]


# Faults and clean code ---------------------------------------------------------------------------------------------


def campaign(
    lab: Lab,
    progress: Progress = silent,
    on_fault: Callable[[list[FaultResult]], None] | None = None,
    names: Sequence[str] = (),
) -> list[FaultResult]:
    """Plant faults in turn.

    Args:
        on_fault: given all results so far after each fault; a CUDA process may end at the next one.
        names: which; empty: every one, those of a variant's code where the lab has it.

    Raises:
        WorkbenchError: no such fault.
    """
    chosen = [_fault(name) for name in names] or [f for f in FAULTS.values() if set(f.variants) <= set(lab.variants)]
    results: list[FaultResult] = []
    known = baseline(lab)
    for done, planted in enumerate(chosen):
        progress(f"fault {planted.name}", done / len(chosen))
        try:
            lab.session.synchronize()
            results.append(try_fault(lab, planted, known))
        except ENCODER_ERRORS as error:
            results.append(untested(lab, planted, f"an earlier fault ended the CUDA context: {error}"))
        if on_fault is not None:
            on_fault(results)
    progress("faults", 1.0)
    return results


def run_campaign(
    models: Sequence[str],
    *,
    faults: Sequence[str] = (),
    clean: int = 200,
    depth: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Campaign:
    """Plant faults in a small encoder of each model, and run random workloads on its unchanged code.

    Args:
        faults: names; empty: every fault.
        depth: blocks; None is 4 on CUDA, where nothing else is reduced, and 2 on the CPU, of one head.
    """
    results: list[FaultResult] = []
    runs: dict[str, CleanRuns] = {}
    replay: Replay = "static_replay"
    for model in models:
        options, _ = lab_options(model, device)
        facts = model_facts(model)
        width = None if options.width is None else facts.width // facts.heads
        options = replace(options, depth=depth or options.depth or 4, width=width, attention_backend=backend)
        with open_lab(options, Configuration(FAULT_BUDGETS, 4), seed=seed) as lab:
            replay = lab.session.replay
            results += campaign(lab, progress, names=faults)
            runs[model] = clean_runs(lab, clean, seed, progress)
    return Campaign(replay=replay, results=results, clean=runs)


def clean_runs(lab: Lab, workloads: int, seed: int, progress: Progress = silent) -> CleanRuns:
    """Run random calls on the unchanged code; each that is not equal or within noise is a false alarm.

    A call holds 1 to 2 x max items images whose tokens and aspect ratios are drawn log-uniformly. Where a variant
    gives an encoder of images its graphs for videos, the last quarter of the calls are of videos.
    """
    rng = np.random.default_rng(seed)
    videos = workloads // 4 if lab.resamples else 0
    alarms = items = 0
    worst = 0.0

    def run(calls: range, draw: Callable[[Lab, np.random.Generator], list[Grid]], modality: Modality) -> None:
        nonlocal alarms, items, worst
        for done in calls:
            progress("random workloads", done / workloads)
            seen = lab.observe(lab.inputs(draw(lab, rng), modality), "random")
            items += len(seen.call.grids)
            alarms += seen.status not in ("equal", "within_noise")
            worst = max(worst, seen.ratio if seen.ratio is not None else float("inf"))

    run(range(workloads - videos), random_grids, "image")
    if videos:
        with video_manager(lab, max(lab.budgets)):
            run(range(workloads - videos, workloads), random_videos, "video")
    return CleanRuns(workloads=workloads, items=items, false_alarms=alarms, worst_ratio=min(worst, 1e9), seed=seed)


def random_grids(lab: Lab, rng: np.random.Generator) -> list[Grid]:
    """Draw the grids of one call, each of at most the largest budget's tokens."""
    merge, largest = lab.session.facts.merge, max(lab.budgets)
    grids: list[Grid] = []
    for _ in range(int(rng.integers(1, 2 * lab.manager.max_batch_size + 1))):
        tokens = int(np.exp(rng.uniform(0, np.log(largest + 1))))
        height = max(1, min(tokens, round(np.exp(rng.uniform(0, np.log(tokens + 1))))))
        grids.append((1, height * merge, tokens // height * merge))
    return grids


def random_videos(lab: Lab, rng: np.random.Generator) -> list[Grid]:
    """Draw the grids of one call of videos, each of at most the largest budget's tokens before frames are merged."""
    merge, largest, step = lab.session.facts.merge, max(lab.budgets), lab.frames_per_step
    grids: list[Grid] = []
    for _ in range(int(rng.integers(1, lab.manager.max_batch_size + 1))):
        frames = step * int(rng.integers(1, 5))
        height = int(rng.integers(1, max(1, largest // frames) + 1))
        width = int(rng.integers(1, max(1, largest // frames // height) + 1))
        grids.append((frames, height * merge, width * merge))
    return grids


# Proxy and visibility ----------------------------------------------------------------------------------------------


def _proxy(lab: Lab) -> tuple[ProxyFlips | None, ProxyFlips | None]:
    """Argmax flips of a random head: graph against eager, and eager against eager item by item."""
    call = lab.inputs([near_square(tokens, lab.session.facts.merge) for tokens in lab.budgets])
    served = lab.session.eager_served(call)
    alone = [lab.session.eager_served(lab.part(call, [i]))[0] for i in range(len(served))]
    try:
        graph = lab.session.graph(call)
        return _flips(served, graph), _flips(served, alone)
    except (*ENCODER_ERRORS, WorkbenchError):
        return None, _flips(served, alone)


def _flips(reference: list[torch.Tensor], other: list[torch.Tensor]) -> ProxyFlips:
    a, b = (torch.cat(list(outputs)).float().cpu().numpy() for outputs in (reference, other))
    return proxy_flips(a, b)


def visibility(lab: Lab) -> Visibility:
    """Measure two grave faults in eager as served, so that "no mismatch" is known to mean something."""
    assert lab.noise is not None
    merge = lab.session.facts.merge
    call = lab.inputs([(1, 4 * merge, 12 * merge), (1, 2 * merge, 8 * merge), (1, merge, 16 * merge)])
    served = lab.session.eager_served(call)
    floor = lab.noise.limit_rms / lab.noise.factor
    with _without_attention(lab):
        attention = _least_rms(lab.session.eager_served(call), served)
    with _transposed_rotary(lab):
        rotary = _least_rms(lab.session.eager_served(call), served)
    return Visibility(
        attention_removed=attention,
        rotary_swapped=rotary,
        attention_ratio=attention / floor,
        rotary_ratio=rotary / floor,
    )


def _least_rms(outputs: list[torch.Tensor], references: list[torch.Tensor]) -> float:
    return min(compare(a, b).relative_rms or 0.0 for a, b in zip(outputs, references, strict=True))


@contextmanager
def _without_attention(lab: Lab) -> Iterator[None]:
    with ExitStack() as stack:
        for block in lab.tower.blocks:
            hook = block.attn.attn.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output))
            stack.callback(hook.remove)
        yield


@contextmanager
def _transposed_rotary(lab: Lab) -> Iterator[None]:
    def wrap(original: Any) -> Any:
        def prepare(grids: Any, **kwargs: Any) -> Any:
            rows = grids.tolist() if isinstance(grids, torch.Tensor) else grids
            other = original([[t, w, h] for t, h, w in rows], **kwargs)
            metadata = original(grids, **kwargs)
            return metadata | {key: value for key, value in other.items() if key.startswith("rotary")}

        return prepare

    with wrapped(lab.tower, "prepare_encoder_metadata", wrap):
        yield
