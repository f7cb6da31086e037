"""Comparisons made from the stated formula of `tests.profiles`, with noise of a known size."""

from collections.abc import Mapping, Sequence

import numpy as np

from tests.profiles import make_profile
from tests.runs import make_environment, make_run
from workbench.budgets import Configuration, Limits, resolve
from workbench.comparison import SCHEMA_VERSION, CallTiming, Comparison, Comparisons, ConfigurationTiming
from workbench.costs import CostModel
from workbench.planner import plan
from workbench.run import CaptureCost

MODEL = CostModel(make_profile())
Calls = Sequence[Sequence[int]]


def make_comparisons(
    workloads: Mapping[str, tuple[Calls, Mapping[str, Configuration]]],
    *,
    noise: float = 0.0,
    off: float = 0.0,
    fails: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Comparisons:
    """Calls and configurations by workload, "measured" by the formula.

    Args:
        noise: relative standard deviation of every sample.
        off: relative error of the formula against what is measured.
        fails: by configuration, the call that raised.
    """
    random = np.random.default_rng(seed)
    run = make_run()
    comparisons = []
    for name, (calls, configurations) in workloads.items():
        tokens = np.array([n for call in calls for n in call], np.int64)
        offsets = np.cumsum([0, *map(len, calls)])
        timings = []
        for title, configuration in configurations.items():
            limits = Limits(max_model_len=16_384, max_num_batched_tokens=8_192, video_limit=0)
            resolved = resolve(configuration, limits)
            times = MODEL.call_costs(plan(tokens, offsets, resolved)).wall_us * (1 + off)
            measured = times[:, None] * (1 + noise * random.standard_normal((len(calls), 4)))
            failed = (fails or {}).get(title)
            timings.append(
                ConfigurationTiming(
                    name=title,
                    budgets=list(resolved.budgets),
                    max_items=resolved.max_items,
                    capture=[CaptureCost(budget=b, seconds=0.1, pool_bytes=2**20) for b in resolved.budgets],
                    calls=[
                        CallTiming(tokens=list(call), wall_us=[] if index == failed else samples)
                        for index, (call, samples) in enumerate(zip(calls, measured.tolist(), strict=True))
                    ],
                )
            )
        eager = [CallTiming(tokens=list(call), wall_us=[24_000.0 + 12.0 * sum(call)] * 4) for call in calls]
        comparisons.append(
            Comparison(workload=name, model=run.model, replay="cuda_graph", eager_served=eager, configurations=timings)
        )
    return Comparisons(
        schema_version=SCHEMA_VERSION,
        workbench="test",
        created=run.created,
        purpose="compare",
        environment=make_environment(),
        comparisons=comparisons,
    )
