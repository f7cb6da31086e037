"""`workbench boundary` and `workbench ladder`: what a graph can hold, and what each variant saves."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.capturable import Boundary, BoundaryReport, Case, Column, Ladder
    from workbench.encoder.session import SessionOptions

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verbs `boundary` and `ladder`."""
    _register_boundary(app)
    _register_ladder(app)


def _register_boundary(app: typer.Typer) -> None:
    @app.command("boundary")
    def boundary(
        call: Annotated[
            str, Option(help="The call's items in pixels, WIDTHxHEIGHT[xFRAMES][*COUNT], with commas.")
        ] = "224x224",
        model: Annotated[str, Option(help="Which encoder.")] = "ernie45_vl",
        variants: Annotated[str, Option(help="Names with commas; empty: all; none: no variant.")] = "",
        depth: Annotated[int | None, Option(help="Blocks; left out: all on CUDA, 2 on the CPU.")] = None,
        width: Annotated[int | None, Option(help="Features; left out: all on CUDA, two heads on the CPU.")] = None,
        device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
        attention_backend: Annotated[str | None, Option(help="vLLM's name; left out: its choice.")] = None,
        repeats: Annotated[int, Option(help="Timed runs of each region, on CUDA.")] = 20,
        as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Find out what of an encoder a graph can hold, and what stands in the way of the rest."""
        import msgspec

        from workbench.budgets import Configuration
        from workbench.commands.parallel import parse_calls
        from workbench.encoder.engine import require_vllm

        (grids,), modality = parse_calls([call], model)
        if repeats < 1:
            raise WorkbenchError(f"{repeats} repeats time nothing; give at least 1")
        require_vllm()
        from workbench.encoder.boundary import probe
        from workbench.encoder.session import open_session

        options, _ = _options(model, depth, width, device, attention_backend)
        options = replace(options, video_limit=int(modality == "video"))
        names = {"": None, "none": ()}.get(variants, tuple(variants.split(",")))
        with open_session(options, Configuration()) as session:
            report = probe(session, grids, names, repeats, modality)
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            show(report)


def _register_ladder(app: typer.Typer) -> None:
    @app.command("ladder")
    def ladder(
        out: Annotated[Path, Option(help="Folder for ladder.json, written after every case.")],
        model: Annotated[str, Option(help="Which encoder.")] = "ernie45_vl",
        budgets: Annotated[str, Option(help="Token budgets; left out: a range for this machine.")] = "",
        depth: Annotated[int | None, Option(help="Blocks; left out: all on CUDA, 2 on the CPU.")] = None,
        width: Annotated[int | None, Option(help="Features; left out: all on CUDA, two heads on the CPU.")] = None,
        device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
        attention_backend: Annotated[str | None, Option(help="vLLM's name; left out: its choice.")] = None,
        repeats: Annotated[int, Option(help="Samples per column and case; P99 wants 100.")] = 100,
        warmup: Annotated[int, Option(help="Runs of each column before timing.")] = 8,
        seconds: Annotated[float, Option(help="After which no case begins.")] = 240.0,
        case_seconds: Annotated[
            float,
            Option(help="After which a case takes no more samples than two of each column.", show_default="no limit"),
        ] = math.inf,
        attention_plan: Annotated[
            bool,
            Option("--attention-plan", help="Variant fused plans attention once per call; see docs/variants/fused.md."),
        ] = False,
        seed: Annotated[int, Option(help="Of dummy weights and inputs.")] = 0,
        as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Time an encoder eagerly, by vLLM's graph, with each variant and with all, on the same calls."""
        import msgspec

        from workbench.capturable import LADDER_FILE
        from workbench.encoder.engine import require_vllm
        from workbench.files import refuse_occupied, write_json
        from workbench.models import model_facts
        from workbench.progress import progress_bar

        refuse_occupied(out, overwrite=True)
        require_vllm()
        from workbench.encoder.variants.fused import Fused
        from workbench.encoder.variants.measure import Effort, cases_for, measure

        Fused.plan_attention = attention_plan
        effort = Effort(repeats, warmup, seconds, case_seconds, seed)
        options, usual = _options(model, depth, width, device, attention_backend)
        chosen = _budgets(budgets) or usual
        with progress_bar() as progress:
            found = measure(
                options,
                chosen,
                cases_for(model_facts(model), max(chosen)),
                effort,
                on_case=lambda so_far: write_json(out / LADDER_FILE, so_far),
                progress=progress,
            )
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(found)).decode())
        else:
            show_ladder(found)


def _options(
    model: str, depth: int | None, width: int | None, device: str | None, attention_backend: str | None
) -> "tuple[SessionOptions, tuple[int, ...]]":
    """Return the encoder, and the budgets that suit this machine."""
    from workbench.encoder.parity.lab import lab_options

    options, budgets = lab_options(model, device)
    changed = replace(
        options,
        depth=options.depth if depth is None else depth,
        width=options.width if width is None else width,
        attention_backend=attention_backend,
    )
    return changed, budgets


def _budgets(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and int(part[:12]) > 0 for part in parts):
        raise WorkbenchError(f"budgets {text!r} are not positive numbers with commas between; write them like 64,128")
    return tuple(map(int, parts))


def show(report: "BoundaryReport") -> None:
    """Print one row per candidate, and every obstacle with its place."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None)
    for heading in ("what the graph would hold", "captures", "nodes", "inside us", "eager us", "outside us", "syncs"):
        table.add_column(heading, justify="left" if heading == "what the graph would hold" else "right")
    for found in report.boundaries:
        times = (found.inside_us, found.eager_us, found.outside_us)
        table.add_row(
            found.title.partition(":")[0],
            _verdict(found),
            "-" if found.nodes is None else str(found.nodes),
            *("-" if value is None else f"{value:,.0f}" for value in times),
            str(sum(sync.count for sync in found.syncs)),
        )
    console.print(table)
    for found in report.boundaries:
        if found.obstacle is not None:
            obstacle = found.obstacle
            console.print(f"\n{found.title}: {obstacle.error} at {obstacle.place}: {obstacle.message}", markup=False)
        for sync in found.syncs:
            kind = "copies from host memory" if sync.host_copy else "reads on the host"
            often = f", {sync.count} times" if sync.count > 1 else ""
            console.print(f"{found.title}: {sync.call} {kind} at {sync.place}{often}: {sync.source}", markup=False)


def _verdict(found: "Boundary") -> str:
    if found.captured is None:
        return "nothing in the way" if found.clean else "no"
    return "yes" if found.captured else "no"


def show_ladder(ladder: "Ladder") -> None:
    """Print one table per case: milliseconds, GPU time, nodes, and parity beside the noise floor."""
    from rich.console import Console

    from workbench.ladder import STEPS_OF_A_BLOCK

    console = Console(highlight=False)
    if ladder.replay == "static_replay":
        console.print("Static replays on the CPU: outputs are compared, times say nothing about CUDA graphs.")
    for case in ladder.cases:
        _show_case(console, case)
    for mapped in ladder.maps:
        console.print(f"map of {mapped.name}: {mapped.why_not or f'{mapped.nodes} nodes'}", markup=False)
    for captured in ladder.captured:
        for schedule in captured.schedules:
            console.print(f"{captured.column}: attention is planned {schedule}", markup=False)
        for steps in captured.recipes:
            said = ", ".join(f"{step} {getattr(steps, step)}" for step in STEPS_OF_A_BLOCK)
            console.print(f"{captured.column}: {steps.rows:,} rows: {said}", markup=False)
            for reason in steps.refused:
                console.print(f"{captured.column}: {steps.rows:,} rows: not tried: {reason}", markup=False)
    for note in ladder.notes:
        console.print(note, markup=False)


def _show_case(console: "Console", case: "Case") -> None:
    from rich.table import Table

    table = Table(title=f"{case.name}: {sum(case.tokens)} tokens", title_justify="left", box=None)
    table.add_column("", overflow="fold")
    for heading in ("n", "mean ms", "P99 ms", "GPU busy ms", "idle inside ms", "GPU ops", "nodes", "parity"):
        table.add_column(heading, justify="right")
    for column in case.columns:
        table.add_row(column.name, *_ladder_cells(column, case.noise_rms))
    console.print(table)
    for column in case.columns:
        for finding in column.findings:
            console.print(f"{column.name}: {finding}", markup=False)


def _ladder_cells(column: "Column", noise: float | None) -> list[str]:
    from workbench.stats import summary

    if column.error is not None:
        return ["-"] * 7 + [column.error[:60]]
    timed = summary(column.wall_us) if column.wall_us else None
    times = (
        None if timed is None else timed.mean,
        None if timed is None else timed.p99,
        column.busy_us,
        column.idle_us,
    )
    return [
        str(len(column.wall_us)),
        *("-" if value is None else f"{value / 1e3:.3f}" for value in times),
        *("-" if value is None else str(value) for value in (column.ops, column.nodes)),
        _parity_cell(column, noise),
    ]


def _parity_cell(column: "Column", noise: float | None) -> str:
    if all(item.bit_equal for item in column.parity):
        return "bit-equal"
    worst = [item.relative_rms for item in column.parity]
    known = [value for value in worst if value is not None]
    if len(known) < len(worst) or not noise:
        return "not finite" if len(known) < len(worst) else f"{max(known):.1e}"
    return f"{max(known) / noise:.2f} x noise"
