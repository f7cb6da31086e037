"""Seconds that the advisor takes on 100,000 items with 8 budgets, and how far its answers are from the bound.

Measured: `workbench.advisor.advise`, from a workload in memory to the finished answer, baselines and reasons included,
with the cost profile that ships; wall and CPU time of one run each, after a small run that loads the compiled code.
The sizes are all different (log-normal photographs), so that no two calls are equal and nothing is saved by that.

Not measured: reading the workload, importing, the GPU.

    python -m benchmarks.advisor --out advisor.json
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.advisor import MAX_GRAPHS, OBJECTIVES, advise
from workbench.costs import CostModel, choose_profile
from workbench.files import write_json
from workbench.models import model_facts
from workbench.workload import ItemsPerCall, Workload, group, make_workload

ITEMS = 100_000
PER_CALL = (1, 4, 16)
SMALL = 500


def workload(items: int, per_call: int) -> Workload:
    """Photographs of log-normal width and height around 500 pixels, `per_call` to a call."""
    sides = np.random.default_rng(0).lognormal(6.2, 0.5, (items, 2)).clip(56, 2000).astype(np.int64)
    sizes = np.column_stack([sides, np.ones(items, np.int64)])
    offsets = np.arange(items + 1, dtype=np.int64)
    made = make_workload(sizes, offsets, model_facts("ernie45_vl"), name="photographs", source="a benchmark")
    return group(made, ItemsPerCall(per_call))


def measure(items: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Return one row per number of items in a call and objective."""
    model = CostModel(choose_profile("ernie45_vl"))
    rows = []
    for per_call in sizes:
        calls, small = workload(items, per_call), workload(SMALL, per_call)
        for objective in OBJECTIVES:
            advise(small, model, objective=objective)
            wall, processor = time.perf_counter(), time.process_time()
            advice = advise(calls, model, objective=objective)
            rows.append(
                {
                    "items_per_call": per_call,
                    "objective": objective,
                    "wall_seconds": time.perf_counter() - wall,
                    "cpu_seconds": time.process_time() - processor,
                    "configurations": advice.evaluations,
                    "exact": advice.exact,
                    "above_bound": advice.above_bound,
                    "budgets": advice.answer.budgets,
                    "max_items": advice.answer.max_items,
                }
            )
    return {"what": "advise()", "items": items, "max_graphs": MAX_GRAPHS, "profile": model.profile.title, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, and write the JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--per-call", type=int, nargs="+", default=PER_CALL, help="items in a call")
    options = parser.parse_args(arguments)
    result = measure(options.items, options.per_call)
    print(f"{options.items:,} items, up to {MAX_GRAPHS} budgets; costs of {result['profile']}")
    print(f"{'items/call':>10}{'objective':>11}{'wall s':>9}{'CPU s':>9}{'priced':>9}{'above bound':>13}")
    for row in result["rows"]:
        print(
            f"{row['items_per_call']:>10}{row['objective']:>11}{row['wall_seconds']:>9.2f}{row['cpu_seconds']:>9.2f}"
            f"{row['configurations']:>9,}{row['above_bound']:>13.1%}"
        )
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
