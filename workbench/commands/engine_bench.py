"""`workbench engine-bench` and `served`: vLLM's own multimodal benchmark in the whole engine, graphs on and off."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from workbench.budgets import Configuration
    from workbench.engine_bench import EngineBench

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verbs `engine-bench` and `served`."""
    app.command("engine-bench")(engine_bench)
    app.command("served")(served)


def engine_bench(
    out: Annotated[Path, Option(help="The new folder for ledgers, logs, vLLM's JSON and summary.json.")],
    model: Annotated[str, Option(help="Which model: ernie45_vl or glm4_1v.")] = "ernie45_vl",
    workload: Annotated[str, Option(help="A preset: pull-request, glm-image, glm-video, mixed, small-many.")] = (
        "pull-request"
    ),
    config: Annotated[
        list[str] | None,
        Option(help="An arm: NAME=128,256:4[:FRAMES], NAME=auto, NAME=advised; repeatable. Default: graph=, the PR's."),
    ] = None,
    no_eager: Annotated[bool, Option("--no-eager", help="Leave the arm with encoder graphs off out.")] = False,
    profile: Annotated[Path | None, Option(help="A cost profile, for predictions and NAME=advised.")] = None,
    prompts: Annotated[int, Option(help="Requests per arm.")] = 1000,
    repeats: Annotated[int, Option(help="Rounds of all arms, every second one backwards (2: ABBA).")] = 1,
    serve: Annotated[
        bool, Option("--serve", help="Measure a server: `vllm serve` and `vllm bench serve`, TTFT, TPOT and ITL.")
    ] = False,
    tiny: Annotated[bool, Option("--tiny", help="Two small layers instead of the real vision tower.")] = False,
    video_limit: Annotated[int | None, Option(help="Videos per prompt; left out: the preset's.")] = None,
    arm_seconds: Annotated[float, Option(help="An arm is ended after this time.")] = 300.0,
    overwrite: Annotated[bool, Option("--overwrite", help="Use a folder that holds something.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the pull requests' `vllm bench mm-processor` or `vllm bench serve` per arm, the ledger on.

    Exit code 1: an arm gave no result.
    """
    from workbench.commands.costs import parse_all_named
    from workbench.costs import CostModel, read_profile
    from workbench.engine_bench import EAGER, Setting, lint_errors, run_bench
    from workbench.progress import progress_bar

    arms: dict[str, Configuration | None] = {} if no_eager else {EAGER: None}
    setting = Setting(model, workload, prompts, not tiny, video_limit, arm_seconds=arm_seconds)
    arms |= {"graph": setting.published} if config is None else parse_all_named(config, taken=(EAGER,))
    priced = None if profile is None else CostModel(read_profile(profile, model))
    for name, configuration in arms.items():
        for finding in lint_errors(setting, configuration):
            typer.echo(f"lint, arm {name}: {finding}", err=True)
    with progress_bar() as progress:
        bench = run_bench(
            setting,
            arms,
            out,
            profile=priced,
            repeats=repeats,
            serve=serve,
            overwrite=overwrite,
            progress=progress,
        )
    _tell(bench, as_json)


def served(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `workbench engine-bench` made.")],
    profile: Annotated[
        Path | None, Option(help="Predict by this cost profile instead of the one that was given at the measurement.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what `workbench engine-bench` measured, from its folder.

    Exit code 1: an arm gave no result.
    """
    from workbench.costs import CostModel, read_profile
    from workbench.engine_bench import read_bench, reprice

    bench = read_bench(folder)
    if profile is not None:
        bench = reprice(bench, folder, CostModel(read_profile(profile, bench.model)))
    _tell(bench, as_json)


def _tell(bench: "EngineBench", as_json: bool) -> None:
    from workbench.engine_bench import explain

    if as_json:
        import msgspec

        print(msgspec.json.encode({"bench": bench, "explanation": explain(bench)}).decode())
    else:
        (_show_served if bench.kind == "serve" else _show)(bench)
        print(*explain(bench), sep="\n")
    if any(run.error for run in bench.runs):
        raise typer.Exit(1)


def _show_served(bench: "EngineBench") -> None:
    from rich.console import Console
    from rich.table import Table

    from workbench.serve_bench import served_table

    runs = served_table(bench)
    table = Table("", title=f"vllm bench serve: {bench.model}, {bench.workload}", title_justify="left")
    for run in runs:
        table.add_column(f"{run.pop('run')} {run.pop('arm')}", justify="right")
    for name in runs[0] if runs else ():
        table.add_row(name, *("-" if run[name] is None else f"{run[name]:.2f}" for run in runs))
    Console().print(table)


def _show(bench: "EngineBench") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    columns = ("run", "arm", "mean", "median", "P99", "predicted", "images", "calls", "hits", "run\ns")
    title = f"encoder_forward, ms per request: {bench.model}, {bench.workload}"
    # Whole in 80 columns, also where an arm has a long name.
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=name != "arm", vertical="bottom")
    for run in bench.runs:
        forward = run.forward
        figures = [None] * 3 if forward is None else [forward.mean, forward.median, forward.percentiles.get("99")]
        counts = ("", "", "") if run.calls is None else (run.calls.items, run.calls.calls, run.calls.hits)
        times = ["" if value is None else f"{value / 1e3:.2f}" for value in (*figures, run.predicted_us)]
        table.add_row(str(run.number), run.arm, *times, *map(str, counts), f"{run.seconds:.0f}")
    Console().print(table)
