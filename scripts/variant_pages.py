#!/usr/bin/env python3
"""Write the figures of docs/variants.md and docs/variants/NAME.md from ladders that were measured on a GPU.

    .venv/bin/python scripts/variant_pages.py [FOLDER...]      default: every workbench/recordings/variants_*

Replaces what stands below "## Figures" on the overview and on the page of every variant that the ladders hold. No
number there is typed by hand, and none comes from a CPU.
"""

import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from workbench.capturable import ALL, FALLBACK, GRAPH, LADDER_FILE, SERVED, Case, Column, Ladder, read_ladder
from workbench.errors import WorkbenchError
from workbench.ladder import FAR, caveats, in_order, last_step, recipes, schedules, title
from workbench.models import model_facts
from workbench.stats import summary
from workbench.views import ladder_words

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = ROOT / "workbench" / "recordings"
HEADING = "\n## Figures\n\n"
# The one variant that changes nothing of a replay: it is compared where an item is above the largest budget.
FALLBACK_VARIANT = "fallback"
_FEW = 100  # samples that a P99 wants
HEADS = (
    "call", "before ms", "P99", "with it ms", "P99", "speed-up", "GPU busy ms", "nodes", "parity",
)  # fmt: skip


def figures(ladder: Ladder, variant: str) -> str:
    """Return the table of `variant`: its column beside its baseline, a row per case; or a sentence: there is none.

    Raises:
        WorkbenchError: the ladder was made on a CPU.
    """
    about = _about(ladder)
    baseline = FALLBACK if variant == FALLBACK_VARIANT else GRAPH
    rows = [row for case in in_order(ladder) if (row := _row(case, baseline, variant))]
    if not rows:
        return _wrapped(
            f"{about}: no call of this session has times of this variant beside {baseline}.\n{_caveats(ladder)}"
        )
    before = f"Before: vLLM's {baseline}"
    before += "." if _everywhere(ladder, GRAPH) else ", or for video eager as served."
    if variant == FALLBACK_VARIANT:
        before = f"An item above the largest budget, {max(ladder.budgets)}. {_refused(ladder)}Before: {baseline}."
    return _wrapped(
        f"{about}.\n{before} GPU busy and nodes: before → with it.\n"
        f"Parity: distance to eager as served over the noise floor{_before_too(ladder.cases, baseline)}.\n"
        f"{_beyond(ladder.cases, variant)}\n"
        f"{_table(HEADS, rows)}{_recipes(ladder, variant)}"
    )


def _recipes(ladder: Ladder, variant: str) -> str:
    """How graphs compute their steps, on the page of the variant that chooses it; or nothing."""
    rows = recipes(ladder)
    if not len(rows) or not any(one.recipes for one in ladder.captured if one.column == variant):
        return ""
    cells = [[f"{budget:,}", f"{size:,}", *ways] for budget, size, *ways in rows.itertuples(index=False)]
    return f"\n{ladder_words.recipes(rows, schedules(ladder))}\n\n{_table(list(rows.columns), cells)}"


def overview(ladder: Ladder) -> str:
    """Return one row per case: eager as served, vLLM's graph and all variants together, or the only one.

    Raises:
        WorkbenchError: the ladder was made on a CPU.
    """
    about, rows = _about(ladder), []
    last = last_step(title(column.name) for case in ladder.cases for column in case.columns) or ALL
    for case in in_order(ladder):
        columns = {column.name: column for column in case.columns}
        served, graph, whole = (columns.get(name) for name in (SERVED, GRAPH, last))
        timed = [_times(column) for column in (served, graph, whole)]
        nodes = f"{_count(graph)} → {_count(whole)}"
        parity = "-" if whole is None else _parity_change(graph, whole, case.noise_rms)
        faster = (_speed_up(served, whole), _speed_up(graph, whole))
        samples = max((len(column.wall_us) for column in case.columns), default=0)
        rows.append((case.name, str(samples), *(cell for pair in timed for cell in pair), *faster, nodes, parity))
    heads = (
        "call", "n", "eager as served ms", "P99", "vLLM's graph ms", "P99", f"{last} ms", "P99", "over eager",
        "over the graph", "nodes", "parity",
    )  # fmt: skip
    return _wrapped(
        f"{about}.\nNodes: vLLM's graph → {last}. Parity: of {last}, distance to eager as served "
        f"over the noise floor{_before_too(ladder.cases, GRAPH)}.\n{_beyond(ladder.cases, last)}{_caveats(ladder)}"
        f"Every column of every call is in notebook 01, section 10.\n\n"
        f"{_table(heads, rows)}"
    )


def overviews(ladders: Sequence[Ladder]) -> str:
    """Return the overview of every ladder, each below the name of its model where there are several."""
    if len(ladders) == 1:
        return overview(ladders[0])
    return "\n".join(f"### {model_facts(ladder.model.key).title}\n\n{overview(ladder)}" for ladder in ladders)


def _about(ladder: Ladder) -> str:
    if ladder.replay != "cuda_graph":
        raise WorkbenchError("this ladder was made on a CPU, where times say nothing; measure on a GPU")
    gpus = ", ".join(sorted({gpu.name for gpu in ladder.environment.gpus})) or "GPU"
    model = ladder.model
    counts = sorted({len(column.wall_us) for case in ladder.cases for column in case.columns if column.wall_us})
    samples = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "no"
    few = f"; a P99 of fewer than {_FEW} is near the largest sample" if counts and counts[0] < _FEW else ""
    return (
        f"{gpus}, vLLM {ladder.environment.vllm}, {model.attention_backend}, {model.weights}; un-profiled, "
        f"{samples} samples a column, mean and P99 of one call{few}"
    )


def _everywhere(ladder: Ladder, name: str) -> bool:
    """Whether every case has a column `name`."""
    return all(name in {column.name for column in case.columns} for case in ladder.cases)


def _beyond(cases: Sequence[Case], name: str) -> str:
    """Say how far outputs lie beyond the noise floor, and apart from that what the graph has wrong; or nothing."""
    spoilt = [case for case in cases if min(_distance(case, name), _distance(case, GRAPH)) > FAR]
    listed = ", ".join(case.name for case in spoilt)
    told = f"It leaves as it is what vLLM's graph has wrong: {listed}.\n" if spoilt else ""
    worst = max((_distance(case, name) for case in cases if case not in spoilt), default=0.0)
    if worst <= 1:
        return told
    # Two roundings of one value, each a floor from it and independent, are the square root of two floors apart.
    seen = ", no further than two independent roundings lie apart (√2 floors)" if worst <= math.sqrt(2) else ""
    return f"Outputs lie up to {worst:.2f} noise floors from eager as served: beyond the floor{seen}.\n{told}"


def _distance(case: Case, name: str) -> float:
    """Return how many noise floors a column's outputs lie from eager as served; zero where that is not known."""
    items = [item.relative_rms for column in case.columns if column.name == name for item in column.parity]
    return max((rms / case.noise_rms for rms in items if rms is not None and case.noise_rms), default=0.0)


def _before_too(cases: Sequence[Case], baseline: str) -> str:
    """Say that the baseline's distance stands in front, where there is a row in which it is not noise."""
    wrong = any(_distance(case, baseline) > FAR for case in cases)
    return "; where vLLM's graph is wrong, its distance stands in front" if wrong else ""


def _wrapped(text: str) -> str:
    """Break the lines of prose; a table's row stays one."""
    lines = (line if line.startswith("|") else textwrap.fill(line, 118) for line in text.split("\n"))
    return "\n".join(lines)


def _caveats(ladder: Ladder) -> str:
    """Say what the run did not come to, and what disturbed it."""
    return "".join(f"{caveat[0].upper()}{caveat[1:]}.\n" for caveat in caveats(ladder))


def _refused(ladder: Ladder) -> str:
    """Say what vLLM's graph does with an item above the largest budget."""
    errors = {column.error for case in ladder.cases for column in case.columns if column.name == GRAPH and column.error}
    return f"vLLM's graph ends with `{min(errors)}`. " if errors else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (heads, ["---"] * len(heads), *rows)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _row(case: Case, baseline: str, name: str) -> Sequence[str] | None:
    columns = {column.name: column for column in case.columns}
    before, after = columns.get(baseline) or columns.get(SERVED), columns.get(name)
    if before is None or after is None or not before.wall_us or not after.wall_us:
        return None
    if name == FALLBACK_VARIANT and None not in after.budgets:
        return None
    return (
        case.name,
        *_times(before),
        *_times(after),
        _speed_up(before, after),
        f"{_ms(before.busy_us)} → {_ms(after.busy_us)}",
        f"{_count(before)} → {_count(after)}",
        _parity_change(before, after, case.noise_rms),
    )


def _times(column: Column | None) -> tuple[str, str]:
    """Mean and P99; a column that could not run says so."""
    if column is None or not column.wall_us:
        return ("fails" if column is not None and column.error else "-"), "-"
    found = summary(column.wall_us)
    return f"{found.mean / 1e3:.2f}", f"{found.p99 / 1e3:.2f}"


def _speed_up(before: Column | None, after: Column | None) -> str:
    if before is None or after is None or not before.wall_us or not after.wall_us:
        return "-"
    return f"{summary(before.wall_us).mean / summary(after.wall_us).mean:.2f}×"


def _count(column: Column | None) -> str:
    return "-" if column is None or column.nodes is None else str(column.nodes)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e3:.2f}"


def _parity(column: Column, noise: float | None) -> str:
    if column.against_graph and all(item.bit_equal for item in column.against_graph):
        return "bit-equal to the graph"
    known = [item.relative_rms for item in column.parity if item.relative_rms is not None]
    if not noise or len(known) < len(column.parity):
        return "not known"
    return f"{max(known, default=0.0) / noise:.2f}"


def _parity_change(before: Column | None, after: Column, noise: float | None) -> str:
    """Return the parity of `after`, behind that of `before` where that is a mismatch."""
    rms = [item.relative_rms for item in before.parity if item.relative_rms is not None] if before else []
    wrong = noise and max(rms, default=0.0) > FAR * noise
    return f"{max(rms) / noise:,.0f} → {_parity(after, noise)}" if noise and wrong else _parity(after, noise)


def write(ladder: Ladder, pages: Path) -> list[str]:
    """Write the figures of every variant that `ladder` holds into its page; return their names."""
    written = []
    held = {column.name for case in ladder.cases for column in case.columns}
    for page in sorted(pages.glob("*.md")):
        if page.stem in held:
            replace_figures(page, figures(ladder, page.stem))
            written.append(page.stem)
    return written


def replace_figures(page: Path, text: str) -> None:
    """Replace what stands below the page's heading."""
    head, heading, _ = page.read_text("utf-8").partition(HEADING)
    page.write_text(head + heading + text, "utf-8")


def main() -> None:
    """Run the script."""
    folders = [Path(name) for name in sys.argv[1:]]
    folders = folders or sorted(path.parent for path in RECORDINGS.glob(f"variants_*/{LADDER_FILE}"))
    try:
        if not folders:
            raise WorkbenchError("no ladder is recorded; make one with scripts/h200_variants.sh on a GPU")
        ladders = [read_ladder(folder) for folder in folders]
        replace_figures(ROOT / "docs" / "variants.md", overviews(ladders))
        for ladder in ladders:
            print("\n".join(write(ladder, ROOT / "docs" / "variants")))
    except WorkbenchError as error:
        sys.exit(f"variant_pages: {error}")


if __name__ == "__main__":
    main()
