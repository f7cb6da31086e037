#!/usr/bin/env python3
"""Write the figures of docs/variants/NAME.md from a ladder that was measured on a GPU.

    .venv/bin/python scripts/variant_pages.py [FOLDER]      default: workbench/recordings/variants

Replaces what stands below "## Figures" on the page of every variant that the ladder holds. No number there is typed by
hand, and none comes from a CPU.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.capturable import Case, Column, Ladder, read_ladder
from workbench.errors import WorkbenchError
from workbench.stats import summary

ROOT = Path(__file__).resolve().parents[1]
HEADING = "\n## Figures\n\n"
# What a variant is compared with: vLLM's graph, but for those that change something else.
BASELINES = {"fallback": "eager fallback"}
HEADS = (
    "call", "before ms", "P99", "with it ms", "P99", "speed-up", "GPU busy ms", "nodes", "parity",
)  # fmt: skip


def figures(ladder: Ladder, variant: str) -> str:
    """Return the table of `variant`: its column beside its baseline, a row per case.

    Raises:
        WorkbenchError: the ladder has no such column, or was made on a CPU.
    """
    if ladder.replay != "cuda_graph":
        raise WorkbenchError("this ladder was made on a CPU, where times say nothing; measure on a GPU")
    baseline = BASELINES.get(variant, "graph")
    column = "fallback" if variant == "fallback" else variant
    rows = [row for case in ladder.cases if (row := _row(case, baseline, column))]
    if not rows:
        raise WorkbenchError(f"this ladder holds no times of {variant} beside {baseline}; measure it again")
    gpus = {gpu.name for gpu in ladder.environment.gpus}
    about = f"{', '.join(sorted(gpus)) or 'GPU'}, {ladder.model.attention_backend}, {ladder.model.weights}"
    lines = (HEADS, ["---"] * len(HEADS), *rows)
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return (
        f"{about}; un-profiled, {ladder.repeats} samples a column, mean and P99 of one call.\n"
        f"Before: {baseline}, or for video eager as served. GPU busy and nodes: before → with it.\n"
        f"Parity: distance to eager as served over the noise floor.\n\n{table}"
    )


def _row(case: Case, baseline: str, name: str) -> Sequence[str] | None:
    columns = {column.name: column for column in case.columns}
    before = columns.get(baseline) or columns.get("eager as served")
    after = columns.get(name)
    if before is None or after is None or not before.wall_us or not after.wall_us:
        return None
    a, b = summary(before.wall_us), summary(after.wall_us)
    return (
        case.name,
        *(f"{value / 1e3:.2f}" for value in (a.mean, a.p99, b.mean, b.p99)),
        f"{a.mean / b.mean:.2f}×",
        f"{_ms(before.busy_us)} → {_ms(after.busy_us)}",
        f"{before.nodes or '-'} → {after.nodes or '-'}",
        _parity(after, case.noise_rms),
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e3:.2f}"


def _parity(column: Column, noise: float | None) -> str:
    if column.against_graph and all(item.bit_equal for item in column.against_graph):
        return "bit-equal to the graph"
    known = [item.relative_rms for item in column.parity if item.relative_rms is not None]
    if not noise or len(known) < len(column.parity):
        return "not known"
    return f"{max(known, default=0.0) / noise:.2f}"


def write(ladder: Ladder, pages: Path) -> list[str]:
    """Write the figures of every variant that `ladder` holds into its page; return their names."""
    written = []
    held = {column.name for case in ladder.cases for column in case.columns}
    for page in sorted(pages.glob("*.md")):
        if page.stem not in held:
            continue
        head, heading, _ = page.read_text("utf-8").partition(HEADING)
        page.write_text(head + heading + figures(ladder, page.stem), "utf-8")
        written.append(page.stem)
    return written


def main() -> None:
    """Run the script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "workbench" / "recordings" / "variants"
    try:
        print("\n".join(write(read_ladder(folder), ROOT / "docs" / "variants")))
    except WorkbenchError as error:
        sys.exit(f"variant_pages: {error}")


if __name__ == "__main__":
    main()
