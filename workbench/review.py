"""What one run says by itself: arms, speed-ups against a named baseline, counts, parity.

`workbench.diff` compares two; this reads one, for the report and the pull request's table.
"""

import math
from collections.abc import Sequence

from workbench.bundle import Content
from workbench.diff import (
    NOTABLE_DRIFT,
    Clock,
    Statistics,
    arm_samples,
    one_pass,
    run_totals,
    statistics,
    trace_summary,
)
from workbench.errors import WorkbenchError
from workbench.evidence import drift
from workbench.run import ARMS, Arm, Record, Run
from workbench.stats import ratio

BASELINES: tuple[Arm, ...] = ("eager_served", "eager_fallback")


class ArmTiming(Record, frozen=True):
    """Samples of one arm over one pass of the workload (`call` None) or one call; microseconds."""

    arm: Arm
    clock: Clock
    call: int | None
    statistics: Statistics
    samples: list[float]


class SpeedUp(Record, frozen=True):
    """Mean of a baseline over the graph's, wall clock, with its 95 % bootstrap interval."""

    baseline: Arm
    call: int | None
    value: float
    low: float
    high: float
    median: float
    p99: float | None


class TraceSummary(Record, frozen=True):
    """One arm's trace per call: counts and microseconds, and the GPU operations with the largest total."""

    arm: Arm
    file: str
    counts: dict[str, float]
    spans_us: dict[str, float]
    kernels: list[tuple[str, float, float]]
    warnings: list[str]


class Review(Record, frozen=True):
    """One run, summarised."""

    name: str
    timings: list[ArmTiming]
    speed_ups: list[SpeedUp]
    totals: dict[str, float]
    equal: int
    compared: int
    worst_rms: float | None
    all_finite: bool
    traces: list[TraceSummary]
    notes: list[str]


def review(content: Content) -> Review | None:
    """Summarise a run; None for content without one.

    A trace that cannot be analysed becomes a note.
    """
    run = content.run
    if run is None:
        return None
    timings = list(_timings(run))
    equality = run.equality
    known = [row.relative_rms for row in equality if row.relative_rms is not None]
    traces, notes = _traces(content, run)
    notes += run.notes
    notes += [
        f"{row.arm} drifted by {wander:+.0%} between the halves of its run; the machine was not steady"
        for row in timings
        if row.clock == "wall" and (row.call is None or len(run.calls) == 1)
        if abs(wander := drift(row.samples)) >= NOTABLE_DRIFT
    ]
    if run.replay == "static_replay":
        notes.insert(0, "static replay: Python runs again over fixed buffers, so its times say nothing about graphs")
    return Review(
        name=run.name,
        timings=timings,
        speed_ups=_speed_ups(timings),
        totals=run_totals(run),
        equal=sum(row.bit_equal for row in equality),
        compared=len(equality),
        worst_rms=max(known, default=None),
        all_finite=all(row.finite for row in equality),
        traces=traces,
        notes=notes,
    )


def _timings(run: Run) -> Sequence[ArmTiming]:
    rows = []
    clocks: tuple[Clock, ...] = ("wall", "gpu")
    for arm in ARMS:
        for clock in clocks:
            samples = arm_samples(run, arm, clock)
            if len(samples) > 1 and len(samples) == len(run.calls):
                total = one_pass([(values, run.calls[call].count) for call, values in sorted(samples.items())])
                rows.append(ArmTiming(arm=arm, clock=clock, call=None, statistics=statistics(total), samples=total))
            rows += [
                ArmTiming(arm=arm, clock=clock, call=call, statistics=statistics(values), samples=values)
                for call, values in sorted(samples.items())
            ]
    return rows


def _speed_ups(timings: Sequence[ArmTiming]) -> list[SpeedUp]:
    wall = {(row.arm, row.call): row for row in timings if row.clock == "wall"}
    found = []
    for (arm, call), graph in wall.items():
        for baseline in BASELINES:
            eager = wall.get((baseline, call))
            if arm == "graph" and eager is not None and graph.statistics.mean > 0:
                known = ratio(eager.samples, graph.samples)
                tail = eager.statistics.p99 / graph.statistics.p99 if graph.statistics.p99 > 0 else math.nan
                found.append(
                    SpeedUp(
                        baseline=baseline,
                        call=call,
                        value=known.value,
                        low=known.low,
                        high=known.high,
                        median=eager.statistics.median / (graph.statistics.median or math.nan),
                        p99=None if math.isnan(tail) else tail,
                    )
                )
    return found


def _traces(content: Content, run: Run) -> tuple[list[TraceSummary], list[str]]:
    found, notes = [], []
    for trace in run.traces:
        if "cuda" not in trace.activities:
            continue
        try:
            counts, spans, kernels, warnings = trace_summary(content, trace.file, trace.window)
        except WorkbenchError as error:
            notes.append(f"{trace.file} is not analysed: {error}")
            continue
        found.append(
            TraceSummary(
                arm=trace.arm, file=trace.file, counts=counts, spans_us=spans, kernels=kernels, warnings=warnings
            )
        )
    return found, notes
