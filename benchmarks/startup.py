"""How long the command line takes to start, and the first call of compiled code in a new process.

Measured: wall and CPU seconds of a whole Python process, the least and the median of several, after one that fills the
caches (bytecode, compiled loops). The least is what the work takes; the median holds what else the machine did.

Not measured: disk reads of a cold machine, and the first run ever, which compiles.

    python -m benchmarks.startup --out startup.json
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench.files import write_json

PASSES = 9
_PLAN = (
    "from workbench.budgets import *; from workbench.planner import *; "
    "plan([100, 64, 300], [0, 2, 3], resolve(Configuration((128, 512), 4), Limits()))"
)
_ANALYZE = (
    "from pathlib import Path; from workbench.run import RECORDINGS; from workbench.trace import read_trace; "
    "from workbench.gaps import analyze; "
    "analyze(read_trace(next(RECORDINGS.glob('*-224/traces/graph.ranges*'))))"
)
CASES: dict[str, tuple[str, ...]] = {
    "python -c pass": ("-c", "pass"),
    "import workbench": ("-c", "import workbench"),
    "workbench --help": ("-m", "workbench", "--help"),
    "workbench plan --help": ("-m", "workbench", "plan", "--help"),
    "first plan()": ("-c", _PLAN),
    "first read_trace() and analyze()": ("-c", _ANALYZE),
}
LIMITS_S = {"import workbench": 0.3, "workbench --help": 0.4, "first plan()": 1.5}


def seconds(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Return wall and CPU seconds of one process."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure() -> dict[str, Any]:
    """Return one row per case."""
    rows = []
    for name, arguments in CASES.items():
        seconds(arguments)
        taken = [seconds(arguments) for _ in range(PASSES)]
        rows.append(
            {
                "what": name,
                "wall_s": min(wall for wall, _ in taken),
                "median_s": statistics.median(wall for wall, _ in taken),
                "cpu_s": min(cpu for _, cpu in taken),
                "limit_s": LIMITS_S.get(name),
                "passes": taken,
            }
        )
    return {"passes": PASSES, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(arguments).out
    result = measure()
    write_json(out, result)
    for row in result["rows"]:
        print(f"{row['what']:<36}{row['wall_s']:>8.3f} s wall{row['cpu_s']:>8.3f} s CPU")


if __name__ == "__main__":
    main()
