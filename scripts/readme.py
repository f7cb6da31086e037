#!/usr/bin/env python3
"""Write README's generated regions from the files they quote; with --check, only say whether they are current.

    .venv/bin/python scripts/readme.py [--check]

A region lies between `<!-- generated: NAME -->` and `<!-- end -->`. No number of README is typed by hand:

    notebooks   title of each notebook and the sentence that says what it is for
    measured    the recordings' timings
    benchmarks  the first part of benchmarks/results.md, which `make bench` writes
    faults      the first part of docs/faults.md, which `make faults` writes
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.models import model_facts
from workbench.parity import DETAILS
from workbench.run import RUN_FILE, Arm, Run, read_run
from workbench.stats import summary

ROOT = Path(__file__).resolve().parents[1]
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a `|` inside a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def notebooks(root: Path) -> str:
    """Return one row per notebook: its heading of level 1, and of the paragraph under it the sentence that begins
    with "This notebook", or else the first.
    """
    rows = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        title, _, rest = text.partition("# ")[2].partition("\n")
        sentences = re.split(r"(?<=[.?!])\s", " ".join(rest.strip().split("\n\n")[0].split()))
        about = [sentence for sentence in sentences if sentence.startswith("This notebook")]
        rows.append((f"[{path.stem}](notebooks/{path.name})", title, (about or sentences)[0]))
    return table(("notebook", "title", "what it answers"), rows)


def mean_ms(run: Run, arm: Arm, calls: Sequence[int]) -> float | None:
    """Return the mean over `calls` of the arm's mean host time, in milliseconds; None where one was not timed."""
    means = {timing.call: summary(timing.wall_us).mean for timing in run.timings if timing.arm == arm}
    if not calls or not all(call in means for call in calls):
        return None
    return sum(means[call] for call in calls) / len(calls) / 1000


def measured(root: Path) -> str:
    """Return one row per recording, over the calls that eager as served and graph both finished."""
    rows = []
    for folder in sorted(path.parent for path in (root / "workbench" / "recordings").glob(f"*/{RUN_FILE}")):
        run = read_run(folder)
        timed = [{timing.call for timing in run.timings if timing.arm == arm} for arm in ("eager_served", "graph")]
        calls = sorted(set.intersection(*timed))
        served, fallback, graph = (mean_ms(run, arm, calls) for arm in ("eager_served", "eager_fallback", "graph"))
        machine = run.environment
        where = machine.gpus[0].name if run.replay == "cuda_graph" and machine.gpus else f"{machine.cpu}, static replay"
        cells = [f"{value:.2f}" if value is not None else "not run" for value in (served, fallback, graph)]
        ratio = f"{served / graph:.2f}x" if served is not None and graph else ""
        title = f"{model_facts(run.model.key).title}, depth {run.model.depth}, {run.model.weights}"
        engine = f"{machine.vllm_distribution} {machine.vllm}"
        rows.append((folder.name, title, f"{where}, {engine}", f"{len(calls)} of {len(run.calls)}", *cells, ratio))
    heads = (
        "recording",
        "model",
        "measured on",
        "calls",
        "eager as served, ms",
        "eager fallback, ms",
        "graph, ms",
        "graph vs eager as served",
    )
    return table(heads, rows)


def benchmarks(root: Path) -> str:
    """Return the headlines of benchmarks/results.md: what stands above its second heading."""
    path = root / "benchmarks" / "results.md"
    if not path.is_file():
        return "`make bench` has not been run yet.\n"
    return path.read_text("utf-8").partition("\n## ")[0]


def faults(root: Path) -> str:
    """Return how many planted faults each scenario sees: docs/faults.md between its heading and its long table."""
    path = root / "docs" / "faults.md"
    if not path.is_file():
        return "`make faults` has not been run yet.\n"
    return path.read_text("utf-8").split(DETAILS)[0].partition("\n")[2].strip() + "\n"


REGIONS: dict[str, Callable[[Path], str]] = {
    "notebooks": notebooks,
    "measured": measured,
    "benchmarks": benchmarks,
    "faults": faults,
}


def regenerate(text: str, root: Path) -> str:
    """Return README's `text` with every region written anew.

    Raises:
        KeyError: a region of an unknown name.
    """
    return REGION.sub(lambda found: f"{found[1]}{REGIONS[found[2]](root).rstrip()}\n{found[3]}", text)


def main() -> int:
    """Write README, or with --check compare it; exit 1 when it is not current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when README is not current")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text("utf-8")
    after = regenerate(before, ROOT)
    if check and before != after:
        print("README.md is not current; run scripts/readme.py", file=sys.stderr)
        return 1
    if not check:
        path.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
