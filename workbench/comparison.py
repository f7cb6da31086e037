"""Several configurations timed on the same calls in one process, and predictions set beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workbench.budgets import Resolved
from workbench.costs import CallCosts, CostModel, computed
from workbench.errors import WorkbenchError
from workbench.files import read_versioned
from workbench.models import model_facts
from workbench.planner import Arrangement, Plan, arrange, pack
from workbench.run import CaptureCost, Environment, ModelRecord, Record, Replay

SCHEMA_VERSION = 1


class CallTiming(Record, frozen=True):
    """Un-profiled wall time of one call per repeat, microseconds; no samples where it failed.

    `frames` is the grid's t of each item of a call of videos; empty for images.
    """

    tokens: list[int]
    wall_us: list[float]
    frames: list[int] = []


class ConfigurationTiming(Record, frozen=True):
    """One configuration: as resolved, what its capture took, and its calls in the workload's order."""

    name: str
    budgets: list[int]
    max_items: int
    capture: list[CaptureCost]
    calls: list[CallTiming]
    max_frames: int = 0

    @property
    def resolved(self) -> Resolved:
        """The configuration that its manager ran with."""
        return Resolved(tuple(self.budgets), self.max_items, self.max_frames)


class Comparison(Record, frozen=True):
    """One workload under several configurations, in ABBA order, and eager as served beside them."""

    workload: str
    model: ModelRecord
    replay: Replay
    eager_served: list[CallTiming]
    configurations: list[ConfigurationTiming]


class Comparisons(Record, frozen=True):
    """What one session on one machine compared; `purpose` is "held-out" or "compare"."""

    schema_version: int
    workbench: str
    created: str
    purpose: str
    environment: Environment
    comparisons: list[Comparison]


def read_comparisons(path: Path) -> Comparisons:
    """Read what `workbench compare` or `workbench calibrate --check` wrote.

    Raises:
        WorkbenchError: not such a file, or one of another schema version.
    """
    return read_versioned(path, Comparisons, SCHEMA_VERSION)


@dataclass(frozen=True)
class CheckRow:
    """Measured and predicted time of one configuration on one workload, microseconds per call.

    Attributes:
        calls: calls compared; failed ones are left out and counted in `failed_calls`.
        fallback_calls: of these, calls with an eager fallback.
        measured_*: of all samples of all compared calls; `predicted_*` of the predicted calls.
        call_error: median over calls of |predicted / median measured - 1|.
    """

    workload: str
    configuration: str
    budgets: tuple[int, ...]
    max_items: int
    calls: int
    failed_calls: int
    fallback_calls: int
    measured_mean_us: float
    predicted_mean_us: float
    measured_p99_us: float
    predicted_p99_us: float
    call_error: float

    @property
    def error(self) -> float:
        """Relative error of the predicted mean."""
        return self.predicted_mean_us / self.measured_mean_us - 1


def check(model: CostModel, comparisons: Comparisons, *, replays_only: bool = False) -> list[CheckRow]:
    """Predict every configuration of `comparisons` and set it beside what was measured.

    No row for a configuration whose frames make its graphs larger than the largest measured budget.

    Args:
        replays_only: leave out calls with an eager fallback (their time varies from run to run).

    Raises:
        WorkbenchError: measured on another model or with budgets outside the profile.
    """
    rows = []
    for comparison in comparisons.comparisons:
        if comparison.model.key != model.profile.model.key or comparison.model.depth != model.profile.model.depth:
            raise WorkbenchError(
                f"the comparison ran {comparison.model.key} at depth {comparison.model.depth}, the profile "
                f"{model.profile.model.key} at depth {model.profile.model.depth}; use a profile of the same encoder"
            )
        for timing in comparison.configurations:
            row = _row(model, comparison.workload, timing, replays_only)
            if row is not None:
                rows.append(row)
    return rows


def arrange_calls(calls: Sequence[CallTiming]) -> Arrangement:
    """The calls that were timed, in packing order."""
    tokens = np.array([n for call in calls for n in call.tokens], dtype=np.int64)
    frames = [n for call in calls for n in call.frames or [1] * len(call.tokens)]
    videos = any(call.frames for call in calls)
    return arrange(tokens, np.cumsum([0, *(len(call.tokens) for call in calls)]), frames if videos else None)


def planned(model: str, timing: ConfigurationTiming) -> Plan:
    """The batches of a measured configuration, as they are priced: with the tokens that each graph computes."""
    return computed(model_facts(model), pack(arrange_calls(timing.calls), timing.resolved))


def predicted_calls(model: CostModel, timing: ConfigurationTiming) -> CallCosts:
    """Price the calls of one measured configuration.

    Raises:
        WorkbenchError: a graph that was used is outside the measured range.
    """
    return model.call_costs(planned(model.profile.model.key, timing))


def _row(model: CostModel, workload: str, timing: ConfigurationTiming, replays_only: bool) -> CheckRow | None:
    largest = int(model.replay.budgets[-1])
    graphs = planned(model.profile.model.key, timing)
    if int(graphs.budget.max(initial=0)) > max(largest, max(timing.budgets)):
        return None  # frames make graphs larger than anything that was measured: D2
    costs = model.call_costs(graphs)
    ran = np.array([bool(call.wall_us) for call in timing.calls])
    kept = ran & costs.replays_only if replays_only else ran
    if not kept.any():
        return None
    samples = [np.asarray(call.wall_us) for call, keep in zip(timing.calls, kept, strict=True) if keep]
    every: npt.NDArray[np.float64] = np.concatenate(samples)
    medians = np.array([np.median(sample) for sample in samples])
    wanted = costs.wall_us[kept]
    return CheckRow(
        workload=workload,
        configuration=timing.name,
        budgets=tuple(timing.budgets),
        max_items=timing.max_items,
        calls=int(kept.sum()),
        failed_calls=int((~ran).sum()),
        fallback_calls=int((~costs.replays_only & kept).sum()),
        measured_mean_us=float(every.mean()),
        predicted_mean_us=float(wanted.mean()),
        measured_p99_us=float(np.percentile(every, 99)),
        predicted_p99_us=float(np.percentile(wanted, 99)),
        call_error=float(np.median(np.abs(wanted / medians - 1))),
    )
