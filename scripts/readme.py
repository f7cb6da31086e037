#!/usr/bin/env python3
"""Write the generated regions of README and docs/parallel.md; with --check, only say whether they are current.

    .venv/bin/python scripts/readme.py [--check]

A region lies between `<!-- generated: NAME -->` and `<!-- end -->`. No number in one is typed by hand:

    notebooks   title of each notebook and the sentence that says what it is for
    found       headlines of the variants, the costs and the engine, from the recordings
    measured    the recordings' timings
    benchmarks  the first part of benchmarks/results.md, which `make bench` writes
    faults      the first part of docs/faults.md, which `make faults` writes
    parallel    calls over several GPUs, from the recordings of `workbench parallel`; in docs/parallel.md
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from workbench.capturable import ALL, GRAPH, SERVED, read_ladder
from workbench.comparison import check, read_comparisons
from workbench.costs import CostModel, read_profile
from workbench.engine_bench import arms_table, read_bench
from workbench.models import model_facts
from workbench.parallel import (
    ARMS,
    RESULT_FILE,
    arm_titles,
    beside_published,
    exchanges,
    gpu_names,
    judgement,
    read_parallel,
    shares,
    shown,
    times,
    trace_ranks,
)
from workbench.parity import DETAILS
from workbench.run import RUN_FILE, Arm, Equality, Run, read_run
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


def _agrees(row: Equality) -> bool:
    """Say whether outputs agree but for rounding: bfloat16's stays far below a tenth, a defect of vLLM's does not."""
    return row.relative_rms is not None and row.relative_rms <= 0.1


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
        far = sum(row.baseline == "eager_served" and not _agrees(row) for row in run.equality)
        ratio += f"; the graph's outputs are wrong on {far} call{'s' * (far != 1)}" if far else ""
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


def found(root: Path) -> str:
    """Return one row per question: what the recordings answer, and the section that shows it."""
    folder = root / "workbench" / "recordings"
    rows = [*_of_variants(folder / "variants_ernie45_vl"), *_of_costs(folder / "costs_h200_ernie45_vl")]
    rows += [_of_engine(path) for path in sorted(folder.glob("served_ernie45_vl-*"))]
    return table(("question", "measured", "shown in"), rows) if rows else "No recording answers it yet.\n"


def _of_variants(folder: Path) -> list[tuple[str, str, str]]:
    if not folder.is_dir():
        return []
    ladder = read_ladder(folder)
    rows = []
    for case in ladder.cases:
        means = {column.name: summary(column.wall_us).mean / 1e3 for column in case.columns if column.wall_us}
        before, after, served = means.get(GRAPH), means.get(ALL), means.get(SERVED)
        if before and after and served and len(case.grids) == 1:
            text = f"vLLM's graph {before:.2f} ms, the variants' {after:.2f} ms: {before / after:.2f}x; "
            text += f"eager as served {served:.1f} ms, {served / after:.1f}x"
            rows.append((f"what better graphs win, {case.name}", text, "notebook 01, section 10"))
    return rows


def _of_costs(folder: Path) -> list[tuple[str, str, str]]:
    if not folder.is_dir():
        return []
    model = CostModel(read_profile(folder / "profile.json"))
    off = [abs(row.error) for row in check(model, read_comparisons(folder / "heldout.json"), replays_only=True)]
    text = f"{median(off):.1%} off in the median, {max(off):.1%} at worst, "
    text += f"over {len(off)} pairs of configuration and workload"
    rows = [("are predictions right", text, "notebook 02, section 10")]
    validation = read_comparisons(folder / "validation.json")
    errors: dict[str, list[float]] = {}
    for row in check(model, validation):
        errors.setdefault(row.workload, []).append(row.error)
    for workload, of in errors.items():
        text = f"{min(of):+.1%} to {max(of):+.1%} off, over {len(of)} configurations"
        rows.append((f"and against another session, {workload}", text, "notebook 02, section 10"))
    for comparison in validation.comparisons:
        means = {
            timing.name: summary([x for call in timing.calls for x in call.wall_us]).mean / 1e3
            for timing in comparison.configurations
        }
        text = ", ".join(f"{name} {value:.2f} ms" for name, value in means.items()) + " a call"
        rows.append((f"what advised budgets win, {comparison.workload}", text, "notebook 02, section 10"))
    return rows


def _of_engine(folder: Path) -> tuple[str, str, str]:
    bench = read_bench(folder)
    text = ", ".join(f"{row['arm']} {row['mean ms']:.2f} ms" for row in arms_table([bench])) + " a request"
    return f"and in the whole engine, {bench.workload}", text, "notebook 02, section 10"


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


def parallel(root: Path) -> str:
    """Return the tables of every recording of calls over several GPUs, one heading each."""
    folders = sorted(path.parent for path in (root / "workbench" / "recordings").glob(f"*/{RESULT_FILE}"))
    return "\n".join(_ranks_of(folder) for folder in folders) or "No recording of several GPUs is here.\n"


def _ranks_of(folder: Path) -> str:
    from workbench.views.parallel import gain, published, why

    run = read_parallel(folder)
    joined, doubts = trace_ranks(folder, run)
    timed = times(run)
    heads = ("call", *arm_titles(run).values(), "graph, times 1 GPU")
    rows = []
    for first in range(0, len(timed), len(ARMS)):
        arms = timed[first : first + len(ARMS)]
        cells = [f"{arm['median ms']:.2f} ({arm['P99 ms']:.2f})" for arm in arms]
        rows.append((f"`{arms[0]['items']}`", *cells, f"{arms[0]['vs 1 GPU']:.2f}"))
    about = f"vLLM {run.environment.vllm}, {run.ranks[0].model.weights}, n = {timed[0]['n']}; `{folder.name}`."
    text = (
        f"### {model_facts(run.ranks[0].model.key).title}, mode `{run.tp_mode}`, {gpu_names(run)}\n\n"
        f"{about} Medians in ms, P99 in brackets.\n\n{table(heads, rows)}\n"
        f"{_listed(shares(run))}\n{gain(run, timed)} {judgement(run)}"
    )
    beside = beside_published(run)
    text += f" {published(beside)}" if beside else ""
    if joined is None:
        return f"{text} {' '.join(doubts)}\n"
    exchanged = exchanges(run, joined)
    return f"{text} {why(run, timed, exchanged)}\n\n{_listed(exchanged)}"


def _listed(rows: Sequence[dict[str, object]]) -> str:
    """A table of rows, calls by their items."""
    heads = [name for name in rows[0] if name != "call"]
    cells = [[f"`{row[name]}`" if name == "items" else shown(name, row[name]) for name in heads] for row in rows]
    return table(heads, cells)


PAGES = ("README.md", "docs/parallel.md")
REGIONS: dict[str, Callable[[Path], str]] = {
    "notebooks": notebooks,
    "found": found,
    "measured": measured,
    "benchmarks": benchmarks,
    "faults": faults,
    "parallel": parallel,
}


def regenerate(text: str, root: Path) -> str:
    """Return a page's `text` with every region written anew.

    Raises:
        KeyError: a region of an unknown name.
    """
    return REGION.sub(lambda found: f"{found[1]}{REGIONS[found[2]](root).rstrip()}\n{found[3]}", text)


def main() -> int:
    """Write the pages, or with --check compare them; exit 1 when one is not current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not current")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        before = (ROOT / page).read_text("utf-8")
        after = regenerate(before, ROOT)
        if before != after:
            stale.append(page)
        if not check:
            (ROOT / page).write_text(after, "utf-8")
    if check and stale:
        print(f"{' and '.join(stale)} not current; run scripts/readme.py", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
