#!/usr/bin/env python3
"""Write the generated regions of README and of pages in docs/; with --check, only say whether they are current.

    .venv/bin/python scripts/readme.py [--check]

A region lies between `<!-- generated: NAME -->` and `<!-- end -->`. No number in one is typed by hand:

    notebooks   title of each notebook and the sentence that says what it is for
    found       headlines of the variants, parity, the costs and the engine, from the recordings
    measured    the recordings' timings
    benchmarks  the first part of benchmarks/results.md, which `make bench` writes
    faults      the first part of docs/faults.md, which `make faults` writes
    parallel    calls over several GPUs, from the recordings of `workbench parallel`; in docs/parallel.md
    sweep       what a sweep on Ray lived through, from the recording of scripts/sweep_trial.py; in docs/sweeps.md
    lab         what the parity lab says of the variants on a GPU, from its recordings; in docs/variants.md
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.capturable import ALL, GRAPH, SERVED, read_ladder
from workbench.comparison import read_comparisons
from workbench.costs import CostModel, read_profile
from workbench.engine_bench import arms_table, read_bench
from workbench.ladder import in_order
from workbench.models import model_facts
from workbench.outcomes import held_out, won
from workbench.outcomes import validation as validated
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
from workbench.parity import (
    DETAILS,
    PARITY_FILE,
    Parity,
    changes_sentence,
    read_parity,
    recorded_sentence,
    verdict,
    without_variants,
)
from workbench.run import RUN_FILE, Arm, Equality, Run, read_run
from workbench.stats import summary
from workbench.views.answers import defect_of, differing

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
    """Return one row per question and model: what the recordings answer, and the section that shows it."""
    folder = root / "workbench" / "recordings"
    rows = [
        *(row for model in MODELS for row in _of_variants(folder / f"variants_{model}")),
        *_of_parity([path.parent for path in sorted(folder.glob(f"*/{PARITY_FILE}"))]),
        *(
            row
            for ask in (_of_predictions, _of_advice)
            for model in MODELS
            for row in ask(folder / f"costs_h200_{model}")
        ),
        *(row for model in MODELS for row in _of_engine(sorted(folder.glob(f"served_{model}-*")))),
    ]
    return table(("question", "measured", "shown in"), rows) if rows else "No recording answers it yet.\n"


Rows = list[tuple[str, str, str]]


def _of_variants(folder: Path) -> Rows:
    """Means of vLLM's graph and of all variants on a few calls, and how eager as served takes the first of them."""
    if not folder.is_dir():
        return []
    ladder = read_ladder(folder)
    told, slow = [], ""
    for case in in_order(ladder):
        means = {column.name: summary(column.wall_us).mean / 1e3 for column in case.columns if column.wall_us}
        before, after, served = means.get(GRAPH), means.get(ALL), means.get(SERVED)
        if case.name in CALLS and before and after and served:
            told.append(f"{case.name} {before:.2f} ms to {after:.2f} ms ({before / after:.2f}x)")
            slow = slow or f"; eager as served takes {served:.1f} ms for {case.name}"
    if not told:
        return []
    title = model_facts(ladder.model.key).title
    text = f"from vLLM's graph to the variants', means, grids seen before: {', '.join(told)}{slow}"
    return [(f"what do better graphs win, {title}", text, "notebook 01, section 10")]


def _of_parity(folders: Sequence[Path]) -> Rows:
    """In how many conditions graph and eager part, of vLLM's own code and with the variants."""
    rows = []
    sessions = [read_parity(folder) for folder in folders]
    for after in sessions:
        before = without_variants(after, sessions)
        if before is None:
            continue
        text = f"vLLM's graphs part from eager in {_parted(before)}; the variants' in {_parted(after)}"
        rows.append((f"are the outputs right, {model_facts(after.model.key).title}", text, "notebook 03, section 2"))
    return rows


def _parted(session: Parity) -> str:
    """As "7 of 74 conditions (D4, D6)"."""
    tested = [cell for cell in session.cells if cell.status != "not_tested"]
    bad = differing(session)
    why = ", ".join(sorted({defect_of(session, cell) or "unexplained" for cell in bad}))
    return f"{len(bad) or 'none'} of {len(tested)} conditions" + (f" ({why})" if why else "")


def _of_predictions(folder: Path) -> Rows:
    """How right predictions are, held out and against another session."""
    if not folder.is_dir():
        return []
    model = CostModel(read_profile(folder / "profile.json"))
    off = held_out(model, read_comparisons(folder / "heldout.json"))["error"].abs()
    across = validated(model, read_comparisons(folder / "validation.json"))["error"].dropna()
    text = f"{off.median():.1%} off in the median and {off.max():.1%} at worst, over {len(off)} pairs of configuration "
    text += f"and workload; against another session {across.min():+.0%} to {across.max():+.0%}"
    return [(f"are predictions right, {model_facts(model.profile.model.key).title}", text, "notebook 02, section 10")]


def _of_advice(folder: Path) -> Rows:
    """What advised budgets win against the best others whose outputs are right."""
    if not folder.is_dir():
        return []
    model = CostModel(read_profile(folder / "profile.json"))
    compared = read_comparisons(folder / "validation.json")
    gains = [_gain(row) for row in won(compared, validated(model, compared)).to_dict("records")]
    title = model_facts(model.profile.model.key).title
    return [(f"what do advised budgets win, {title}", f"a call of {'; '.join(gains)}", "notebook 02, section 10")]


def _gain(row: Mapping[Any, Any]) -> str:
    """What the advised budgets of one workload win, or save where they win nothing."""
    text = f"{row['workload']} {row['best other ms']:.2f} ms to {row['advised ms']:.2f} ms ({row['faster']:.2f}x"
    if row["won"] is not None and row["won"] == row["won"]:
        return f"{text}, {row['won']:.0%} of what the bound leaves)"
    ours, others = (_held(row[n], row[mib]) for n, mib in (GRAPHS, OTHER_GRAPHS))
    return f"{text}; {ours}, not {others})"


def _held(graphs: int, mib: float) -> str:
    """As "1 graph in 28 MiB"."""
    return f"{graphs} graph{'s' * (graphs != 1)} in {mib:,.0f} MiB"


def _of_engine(folders: Sequence[Path]) -> Rows:
    """Milliseconds a request of every arm, a workload after the other."""
    benches = [read_bench(folder) for folder in folders]
    told = [
        f"{bench.workload}: " + ", ".join(f"{row['arm']} {row['mean ms']:.2f} ms" for row in arms_table([bench]))
        for bench in benches
    ]
    if not told:
        return []
    title = model_facts(benches[0].model).title
    return [(f"and in the whole engine, {title}", f"a request of {'; '.join(told)}", "notebook 02, section 10")]


def sweep(root: Path) -> str:
    """Return what the trial of a sweep on Ray found, from the file that `scripts/sweep_trial.py` wrote."""
    told = []
    for path in sorted((root / "workbench" / "recordings").glob("sweep_*/check.json")):
        found = json.loads(path.read_text("utf-8"))
        busy = " and ".join(str(gpu["samples_busy"]) for gpu in found["gpus"])
        killed, ended = found["worker_killed_after_s"], found["sweep_killed_after_s"]
        kept = "is unchanged" if found["before_unchanged"] else "HAS CHANGED"
        told += [
            f"* `{path.parent.name}`: {found['configurations']} configurations on {len(found['gpus'])} GPUs.",
            f"* A worker got SIGKILL after {killed:.0f} s, the command after {ended:.0f} s, with "
            f"{found['results_then']} results there.",
            f"* `--resume` ended with exit code {found['exit_code_of_resume']}: "
            f"{'every configuration has its result' if found['all_there'] else 'RESULTS ARE MISSING'}, "
            f"{'none failed' if found['none_failed'] else 'SOME FAILED'}, and what was there before {kept}.",
            f"* {found['tasks_at_once']} tasks began before the one before them had ended: {found['task_seconds']:.0f} "
            f"s of tasks took {found['seconds']:.0f} s, the start of Ray and of two rounds of workers included. The "
            f"GPUs were busy in {busy} of {found['gpus'][0]['samples']} samples each.",
        ]
    return "\n".join(told) or "No sweep is recorded.\n"


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


def lab(root: Path) -> str:
    """Return what every recorded parity session with variants says, and what changed against the one without."""
    paths = sorted((root / "workbench" / "recordings").glob(f"*/{PARITY_FILE}"))
    sessions = [read_parity(path.parent) for path in paths]
    told = []
    for session in sessions:
        before = without_variants(session, sessions)
        if session.variants and before is not None:
            faults = recorded_sentence(session).partition(": ")[2]
            told.append(f"* {changes_sentence(before, session)} {verdict(session)} The lab itself: {faults}")
    return "\n".join(told) or "No parity session with variants is recorded.\n"


PAGES = ("README.md", "docs/parallel.md", "docs/sweeps.md", "docs/variants.md")
MODELS = ("ernie45_vl", "glm4_1v")
GRAPHS, OTHER_GRAPHS = ("graphs", "memory MiB"), ("best other graphs", "best other MiB")
CALLS = ("64 tokens", "128 tokens", "4 x 64 tokens", "mixed", "2048 tokens")  # of the ladder's, in README
REGIONS: dict[str, Callable[[Path], str]] = {
    "notebooks": notebooks,
    "found": found,
    "measured": measured,
    "benchmarks": benchmarks,
    "faults": faults,
    "parallel": parallel,
    "sweep": sweep,
    "lab": lab,
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
