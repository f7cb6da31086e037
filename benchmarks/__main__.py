"""`make bench`: run every benchmark, each in a process of its own, and write results.json and results.md.

    python -m benchmarks [--only trace_reader,planner] [--full] [--out FOLDER]

results.json holds what each benchmark wrote and the facts of the machine; results.md is made of it, and README quotes
results.md (scripts/readme.py). A benchmark that is not asked for keeps what results.json had. HolisticTraceAnalysis
and Perfetto live in a virtual environment under build/, made when it is missing. `--full` also reads a trace of ten
million events, about 3 GB, written to benchmarks/data/ for as long as it is measured, plans ten million items under
500 configurations, and asks the advisor about as many.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown
from workbench.environment import environment
from workbench.errors import WorkbenchError
from workbench.files import read_json, write_bytes, write_json

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "build" / "peers"
DATA = ROOT / "benchmarks" / "data"
SCHEMA_VERSION = 1
BUSY = 0.5  # load average per core from which wall times are not to be trusted
PACKAGES = ("numpy", "numba", "llvmlite", "pandas", "msgspec")

# Name, arguments. Each is a module `benchmarks.NAME` with `--out FILE`; "full" ones run with --full only.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "startup": ("benchmarks.startup",),
    "trace_reader": ("benchmarks.trace_reader", "--peers", str(PEERS)),
    "planner": ("benchmarks.planner",),
    "sweep": ("benchmarks.sweep",),
    "advisor": ("benchmarks.advisor",),
    "figures": ("benchmarks.figures",),
    "widgets": ("benchmarks.widgets",),
    "ledger": ("benchmarks.ledger",),
}
FULL: dict[str, tuple[str, ...]] = {
    "trace_reader_full": (
        *("benchmarks.trace_reader", "--events", "10000000", "--peers", str(PEERS), "--folder", str(DATA)),
    ),
    "sweep_full": ("benchmarks.sweep", "--items", "10000000", "--configurations", "500"),
    "advisor_full": ("benchmarks.advisor", "--items", "10000000", "--per-call", "1"),
}


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on; no user, host or path."""
    found = environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": found.cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": found.system,
        "python": found.python,
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "gpus": [gpu.name for gpu in found.gpus],
    }


def commit() -> str | None:
    """Return the checked-out commit, with a + where tracked files differ from it; None without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def run(name: str, command: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark; return its own JSON and when, how long and how busy the machine was.

    Raises:
        WorkbenchError: it failed; what it printed is on stderr.
    """
    load, begin = os.getloadavg()[0], time.perf_counter()
    if load > BUSY * len(os.sched_getaffinity(0)):
        print(f"{name}: load average {load:.1f}; other work slows wall times down", file=sys.stderr)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        done = subprocess.run([sys.executable, "-m", *command, "--out", out], cwd=ROOT, check=False)
        if done.returncode:
            raise WorkbenchError(
                f"benchmark {name} ended with exit code {done.returncode}; run `python -m {command[0]}`"
            )
        result = read_json(out, dict)
    return {
        "started": started,
        "commit": commit(),
        "load_average": load,
        "seconds": time.perf_counter() - begin,
        "result": result,
    }


def chosen(only: str, full: bool) -> dict[str, tuple[str, ...]]:
    """Return the benchmarks to run.

    Raises:
        WorkbenchError: a name that is none.
    """
    known = BENCHMARKS | FULL
    if not only:
        return known if full else BENCHMARKS
    names = only.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise WorkbenchError(f"no benchmark is called {unknown[0]!r}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks and write both files after each, so that a later failure loses nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas; else all that are not full")
    parser.add_argument("--full", action="store_true", help="also the largest sizes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of results.json and results.md")
    options = parser.parse_args(arguments)
    path = options.out / "results.json"
    DATA.mkdir(parents=True, exist_ok=True)
    facts = machine()
    kept: dict[str, Any] = {}
    if path.is_file():
        before = read_json(path, dict)
        # Numbers of another machine or library do not stand beside new ones.
        if before.get("schema_version") == SCHEMA_VERSION and before.get("machine") == facts:
            kept = before["benchmarks"]
    for name, command in chosen(options.only, options.full).items():
        print(f"== {name}", flush=True)
        kept[name] = run(name, command)
        ordered = {known: kept[known] for known in (*BENCHMARKS, *FULL) if known in kept}
        results = {"schema_version": SCHEMA_VERSION, "machine": facts, "benchmarks": ordered}
        write_json(path, results)
        write_bytes(options.out / "results.md", markdown(results).encode())
    print(f"written to {path} and results.md beside it; scripts/readme.py quotes them in README.md")


if __name__ == "__main__":
    try:
        main()
    except WorkbenchError as error:
        sys.exit(f"benchmarks: {error}")
