"""`workbench analyze`: where the time of a Kineto trace goes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from workbench.collectives import Ranks
    from workbench.gaps import Analysis

SHOWN_ROWS = 25


def register(app: typer.Typer) -> None:
    """Add the verb `analyze`."""

    @app.command("analyze")
    def analyze(
        traces: Annotated[
            list[Path], typer.Argument(metavar="TRACE", help="Kineto traces, .json or .json.gz; one per rank.")
        ],
        window: Annotated[str | None, typer.Option(help="Annotations to analyse, as a shell pattern: 'step*'.")] = None,
        details: Annotated[
            bool, typer.Option("--details", help="With --json: kernels, families, phases, replays, collectives too.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Split the time of each window into busy and idle by cause; count launches, copies and syncs.

        Without --window the span from the first GPU op to the last is the one window. Traces of several ranks are
        put on one clock by their collectives, and what each rank waited in them is shown.
        """
        import msgspec

        from workbench.collectives import join_or_doubt
        from workbench.gaps import analyze as analyze_trace
        from workbench.gaps import report
        from workbench.trace import read_traces

        read = read_traces(traces)
        analyses = [analyze_trace(trace, window) for trace in read]
        ranks, doubts = join_or_doubt(read, window)
        if as_json:
            found = report(analyses, details)
            found["warnings"] += doubts
            if ranks is not None:
                found["ranks"] = ranks.clocks
                if details:
                    found["collectives"] = ranks.collectives
            text = msgspec.json.format(msgspec.json.encode(found), indent=1)
            sys.stdout.write(text.decode() + "\n")
        else:
            _show(analyses, ranks, doubts)


def _show(analyses: Sequence["Analysis"], ranks: "Ranks | None", doubts: Sequence[str]) -> None:
    from rich.console import Console

    from workbench.gaps import explain

    # A file or pipe has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 150)
    for analysis in analyses:
        for table in (_windows(analysis), _families(analysis), _kernels(analysis), _phases(analysis)):
            console.print(table)
        if analysis.replays:
            console.print(_replays(analysis))
        for sentence in explain(analysis):
            console.print(plain(sentence), markup=False, highlight=False)
        for warning in analysis.warnings:
            console.print(f"warning: {plain(warning)}", markup=False, highlight=False, style="yellow")
    if ranks is not None:
        console.print(ranks_table(ranks))
    for doubt in doubts:
        console.print(f"warning: {plain(doubt)}", markup=False, highlight=False, style="yellow")


def plain(text: str) -> str:
    """`text` from a trace with everything that could steer a terminal made visible."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _table(title: str, text_columns: Sequence[str], number_columns: Sequence[str]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(plain(title)), title_justify="left", box=SIMPLE, pad_edge=False)
    for column in text_columns:
        table.add_column(column, no_wrap=True)
    for column in number_columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _add(table: "Table", *cells: str | float | int | None, style: str | None = None) -> None:
    from rich.text import Text

    def shown(cell: str | float | int | None) -> Text:
        if isinstance(cell, float):
            return Text(f"{cell:,.1f}")
        return Text("-" if cell is None else f"{cell:,}" if isinstance(cell, int) else plain(cell))

    table.add_row(*(shown(cell) for cell in cells), style=style)


def _windows(analysis: "Analysis") -> "Table":
    shown = analysis.windows[:SHOWN_ROWS]
    more = len(analysis.windows) - len(shown)
    rank = "" if analysis.rank is None else f", rank {analysis.rank}"
    table = _table(
        f"{analysis.source}{rank}: times in us" + (f" (first {len(shown)} of {len(analysis.windows):,})" * (more > 0)),
        ["window", "GPU"],
        ["wall", "busy", "lead", "launch gap", "queue gap", "in graph", "tail", "ops", "launches", "graphs", "syncs"],
    )  # fmt: skip
    for row in shown:
        _add(
            table, row.name, str(row.device), row.wall_us, row.busy_us, row.lead_us, row.launch_gap_us,
            row.queue_gap_us, row.intra_graph_gap_us, row.tail_us, row.gpu_ops, row.launches,
            row.graph_launches, row.syncs,
        )  # fmt: skip
    total = analysis.total
    table.add_section()
    _add(
        table, "total", "", total.wall_us, total.busy_us, total.lead_us, total.launch_gap_us, total.queue_gap_us,
        total.intra_graph_gap_us, total.tail_us, total.gpu_ops, total.launches, total.graph_launches, total.syncs,
        style="bold",
    )  # fmt: skip
    return table


def ranks_table(ranks: "Ranks") -> "Table":
    """Clock and waiting of each rank in its collectives, whole in 80 columns."""
    table = _table(
        f"Ranks on rank {ranks.clocks[0].rank}'s clock: times in us",
        ["rank"],
        ["count", "ahead", "at least", "at most", "spread", "in total", "waiting", "longest"],
    )
    table.collapse_padding = True
    for clock in ranks.clocks:
        longest = max(row.waited_us for row in ranks.collectives if row.rank == clock.rank)
        _add(
            table, str(clock.rank), clock.collectives, clock.ahead_us, clock.lowest_us, clock.highest_us,
            clock.spread_us, clock.total_us, clock.waited_us, longest,
        )  # fmt: skip
    return table


def _families(analysis: "Analysis") -> "Table":
    table = _table("GPU work by family", ["family"], ["ops", "us", "%"])
    for row in analysis.families:
        _add(table, row.family, row.count, row.total_us, 100 * row.share)
    return table


def _kernels(analysis: "Analysis") -> "Table":
    table = _table("Longest GPU ops by name", ["name", "family"], ["ops", "us", "%"])
    for row in analysis.kernels[:12]:
        _add(table, row.short, row.family, row.count, row.total_us, 100 * row.share)
    return table


def _phases(analysis: "Analysis") -> "Table":
    table = _table(
        "By phase (innermost annotation)",
        ["phase"],
        ["host us", "launches", "graphs", "ops", "GPU us", "HtoD", "DtoH", "syncs", "blocked us"],
    )
    for row in analysis.phases[:SHOWN_ROWS]:
        _add(
            table, row.phase, row.host_us, row.launches, row.graph_launches, row.gpu_ops, row.gpu_us,
            row.memcpy_h2d, row.memcpy_d2h, row.syncs, row.blocked_us,
        )  # fmt: skip
    return table


def _replays(analysis: "Analysis") -> "Table":
    table = _table(
        "Graph replays",
        ["phase", "graph"],
        ["kernels", "launch call", "call to first node", "span", "gaps inside", "last node to sync"],
    )
    for row in analysis.replays[:SHOWN_ROWS]:
        _add(
            table, row.phase, "-" if row.graph < 0 else str(row.graph), row.kernels, row.launch_us,
            row.to_first_us, row.span_us, row.intra_graph_gap_us, row.to_sync_us,
        )  # fmt: skip
    return table
