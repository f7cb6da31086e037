"""One workload under many configurations: packing sums of each, on one core and on all that this process may use.

Measured: `planner.map_totals` from an arrangement in memory to the padding waste of every configuration; wall and CPU
seconds, and the process's largest resident size with the workload in it. Sizes are log-normal, four items a call.

Not measured: making and sorting the workload, which happens once (its seconds are in the JSON).

    python -m benchmarks.sweep --items 1000000 --configurations 100 --out sweep.json
"""

import argparse
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from workbench.budgets import Configuration, Limits, Resolved, resolve
from workbench.files import write_json
from workbench.planner import arrange, map_totals

ITEMS, CONFIGURATIONS = 1_000_000, 100
PER_CALL = 4


def configurations(count: int) -> list[Resolved]:
    """Return `count` different ones: 2 to 9 budgets between 64 and 8192, 1 to 32 items."""
    rng = np.random.default_rng(1)
    made: dict[Resolved, None] = {}
    while len(made) < count:
        budgets = 64 * np.unique(rng.integers(1, 129, int(rng.integers(2, 10))))
        made[resolve(Configuration(tuple(budgets.tolist()), int(2 ** rng.integers(0, 6))), Limits())] = None
    return list(made)


def measure(items: int, count: int) -> dict[str, Any]:
    """Return the seconds of each number of workers."""
    tokens = np.random.default_rng(0).lognormal(5.5, 1.0, items).clip(16, 6177).astype(np.int64)
    begin = time.perf_counter()
    arrangement = arrange(tokens, np.append(np.arange(0, items, PER_CALL), items))
    arranged = time.perf_counter() - begin
    chosen = configurations(count)
    map_totals(arrangement, chosen[:1], lambda totals: totals.waste)  # loads the compiled code
    rows, answers = [], []
    for workers in sorted({1, len(os.sched_getaffinity(0))}):
        wall, cpu = time.perf_counter(), time.process_time()
        answers.append(map_totals(arrangement, chosen, lambda totals: totals.waste, workers))
        rows.append(
            {
                "workers": workers,
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    if any(answer != answers[0] for answer in answers):
        raise AssertionError("answers differ with the number of workers")
    return {"items": items, "items_per_call": PER_CALL, "configurations": count, "arrange_s": arranged, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--configurations", type=int, default=CONFIGURATIONS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = measure(options.items, options.configurations)
    write_json(options.out, result)
    for row in result["rows"]:
        print(f"{row['workers']} workers: {row['wall_s']:.2f} s wall, {row['cpu_s']:.2f} s CPU")


if __name__ == "__main__":
    main()
