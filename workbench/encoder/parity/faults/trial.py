"""Whether the lab catches a planted fault: the scenarios run with it, and what they name."""

from collections.abc import Iterator

import msgspec
import torch

from workbench.encoder.parity.faults.planting import Fault
from workbench.encoder.parity.lab import ENCODER_ERRORS, Lab, Observation
from workbench.encoder.parity.scenarios import SCENARIOS, NotTestedError, Scenario
from workbench.parity import FaultResult, Finding, suspect_of


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
    missing = [name for name in planted.variants if name not in lab.variants]
    if missing:
        return f"it needs the code of variant {', '.join(missing)}"
    absent = planted.absent + (planted.absent_on_cuda if lab.bakes else ())
    gone = [name for name in absent if name in lab.variants]
    if gone:
        return f"with variant {', '.join(gone)} its code is not there, or its effect does not reach the graph's output"
    if planted.needs == "cuda" and not lab.bakes:
        return "a static replay runs Python again, so it cannot show this"
    backend = lab.session.model_record.attention_backend.split()[0]  # "FLASH_ATTN 3" names the version too
    if planted.backends and backend not in planted.backends:
        return f"{backend} has no such code"
    return ""
