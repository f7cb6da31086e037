"""`workbench calibrate` and `workbench compare`: measured costs of encoder calls on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from collections.abc import Collection

    from workbench.budgets import Configuration
    from workbench.comparison import CheckRow, Comparisons

Option = typer.Option
Model = Annotated[str, Option(help="Which encoder.")]
Depth = Annotated[int | None, Option(help="Blocks of a reduced encoder.")]
Width = Annotated[int | None, Option(help="Features of a reduced encoder.")]
Device = Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")]
Seed = Annotated[int, Option(help="Seed of dummy weights, inputs and random calls.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the verbs `calibrate` and `compare`."""
    app.command("calibrate")(calibrate)
    app.command("compare")(compare)


def calibrate(
    out: Annotated[Path, Option(help="The cost profile to write, JSON.")],
    model: Model = "ernie45_vl",
    budgets: Annotated[str, Option(help="Budgets to time like 64,128,4096; empty: a dense list from 64 to 4096.")] = "",
    check: Annotated[Path | None, Option(help="Also time random configurations, other workloads.")] = None,
    configurations: Annotated[int, Option(help="Random configurations of --check.")] = 12,
    calls: Annotated[int, Option(help="Calls of each workload of --check.")] = 12,
    samples: Annotated[int, Option(help="Samples per point.")] = 8,
    depth: Depth = None,
    width: Width = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what a replay of each budget, its host work and eager encoding cost on this machine."""
    from workbench.budgets import parse_budgets
    from workbench.costs import CostModel
    from workbench.encoder import calibrate as meter
    from workbench.encoder.session import SessionOptions, open_session
    from workbench.files import write_json
    from workbench.models import model_facts
    from workbench.progress import progress_bar

    videos = "video" in model_facts(model).graph_modalities
    options = SessionOptions(
        model=model, depth=depth, width=width, device=device, seed=seed, video_limit=1 if videos else 0
    )
    chosen = parse_budgets(budgets) or meter.BUDGETS
    meter.check_budgets(chosen)
    effort = meter.Effort(samples=samples)
    rows: list[CheckRow] = []
    with progress_bar() as progress, open_session(options, meter.IDLE) as session:
        profile = meter.calibrate(session, chosen, effort=effort, seed=seed, progress=progress)
        write_json(out, profile)
        if check is not None:
            measured = meter.check_held_out(
                session, chosen, configurations=configurations, calls=calls, seed=seed + 1, progress=progress
            )
            comparisons = meter.stored("held-out", profile.environment, measured)
            write_json(check, comparisons)
            rows = _checked(CostModel(profile), comparisons)
    _show({"profile": str(out), "host": CostModel(profile).host, "check": rows}, rows, as_json)


def compare(
    workload: Annotated[list[str], Option(help="A preset's name, or a workload file; repeatable.")],
    config: Annotated[
        list[str],
        Option(
            help="NAME=128,256:4 (budgets:items, for videos budgets:items:frames), NAME=auto for vLLM's own, "
            "NAME=advised for the advisor's answer; repeatable."
        ),
    ],
    out: Annotated[Path, Option(help="Where the samples go, JSON.")],
    model: Model = "ernie45_vl",
    profile: Annotated[Path | None, Option(help="A cost profile, for predictions and for NAME=advised.")] = None,
    cover: Annotated[
        bool, Option("--cover", help="Add a workload's largest item to budgets that would not hold it (D1).")
    ] = False,
    max_graphs: Annotated[int, Option(help="Most graphs of an advised configuration.")] = 8,
    repeats: Annotated[int, Option(help="Samples per call and configuration.")] = 20,
    warmup: Annotated[int, Option(help="Runs of each before its samples.")] = 2,
    calls: Annotated[int, Option(help="Calls to time, the first ones.")] = 40,
    max_model_len: Annotated[int, Option(help="The server's, for inferred budgets.")] = 16_384,
    max_num_batched_tokens: Annotated[int, Option(help="The server's, for inferred budgets.")] = 8192,
    depth: Depth = None,
    width: Width = None,
    device: Device = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Time several budget configurations on the same calls in one process, in ABBA order."""
    from workbench.advisor import Constraints, configurations_for
    from workbench.budgets import Limits
    from workbench.costs import CostModel, read_profile
    from workbench.encoder import calibrate as meter
    from workbench.encoder.session import SessionOptions, open_session
    from workbench.environment import environment
    from workbench.files import write_json
    from workbench.models import model_facts
    from workbench.progress import progress_bar
    from workbench.sources import load_workload

    facts = model_facts(model)
    named = parse_all_named(config)
    priced = None if profile is None else CostModel(read_profile(profile, model))
    loaded = [load_workload(name, facts) for name in workload]
    # A server's, for each workload: without videos where it has none.
    servers = [
        Limits.of(
            facts,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            video_limit=int(one.is_video.any()),
        )
        for one in loaded
    ]
    options = SessionOptions(
        model=model,
        depth=depth,
        width=width,
        device=device,
        seed=seed,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        video_limit=max(limits.video_limit for limits in servers),
    )
    constraints = Constraints(max_graphs=max_graphs)
    chosen = [
        configurations_for(one, named, priced, limits, constraints=constraints, cover=cover)
        for one, limits in zip(loaded, servers, strict=True)
    ]
    machine = environment()
    measured = []
    with progress_bar() as progress, open_session(options, meter.IDLE) as session:
        for one, limits, configurations in zip(loaded, servers, chosen, strict=True):
            grids, modalities = meter.first_calls_of_both(one, calls)
            measured.append(
                meter.compare(
                    session,
                    configurations if limits.video_limit else meter.without_videos(configurations),
                    grids,
                    modalities=modalities,
                    repeats=repeats,
                    warmup=warmup,
                    seed=seed,
                    workload=one.name,
                    progress=progress,
                )
            )
    comparisons = meter.stored("compare", machine, measured)
    write_json(out, comparisons)
    rows = [] if priced is None else _checked(priced, comparisons)
    _show({"comparisons": comparisons, "check": rows}, rows, as_json)
    if not as_json:
        _show_measured(comparisons)


def parse_named(text: str) -> "tuple[str, Configuration | None]":
    """Return name and configuration of `NAME=128,256:4[:FRAMES]`, `NAME=128,256`, `NAME=auto`; None for `NAME=advised`.

    Raises:
        WorkbenchError: no name, or budgets, items or frames that are not whole numbers.
    """
    from workbench.budgets import Configuration, parse_budgets

    name, equals, rest = text.partition("=")
    budgets, _, more = rest.partition(":")
    items, _, frames = more.partition(":")
    if not name or not equals or any(text and not text.isdigit() for text in (items, frames)):
        raise WorkbenchError(
            f"{text!r} is not a named configuration; write NAME=128,256:4, NAME=128,256:4:32 "
            "with max frames, NAME=auto or NAME=advised"
        )
    if rest == "advised":
        return name, None
    asked = parse_budgets("" if budgets == "auto" else budgets)
    return name, Configuration(asked, int(items or 0), int(frames) if frames else None)


def parse_all_named(texts: list[str], taken: "Collection[str]" = ()) -> "dict[str, Configuration | None]":
    """Return the configurations of several texts; see `parse_named`.

    Raises:
        WorkbenchError: a name given twice, or one of `taken`.
    """
    found: dict[str, Configuration | None] = {}
    for text in texts:
        name, configuration = parse_named(text)
        if name in found or name in taken:
            raise WorkbenchError(f"two configurations are called {name!r}; give each a name of its own")
        found[name] = configuration
    return found


def _checked(model: object, comparisons: "Comparisons") -> "list[CheckRow]":
    from workbench.comparison import check
    from workbench.costs import CostModel

    assert isinstance(model, CostModel)
    return check(model, comparisons)


def _show_measured(comparisons: "Comparisons") -> None:
    """Print what each configuration took, and eager as served; of the calls that it finished."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    table = Table(title="measured per call", title_justify="left")
    for column in ("workload", "configuration", "calls", "failed", "mean ms", "P99 ms"):
        table.add_column(column, justify="left" if column in ("workload", "configuration") else "right")
    for one in comparisons.comparisons:
        named = [("eager as served", one.eager_served), *((timed.name, timed.calls) for timed in one.configurations)]
        for name, calls in named:
            samples = np.array([sample for call in calls for sample in call.wall_us])
            failed = sum(not call.wall_us for call in calls)
            figures = (samples.mean(), np.percentile(samples, 99)) if samples.size else ()
            shown = [f"{figure / 1e3:.3f}" for figure in figures] or ["-", "-"]
            table.add_row(one.workload, name, str(len(calls)), str(failed), *shown)
    Console().print(table)
    if comparisons.comparisons and comparisons.comparisons[0].replay == "static_replay":
        Console().print("Static replays on the CPU: these times say nothing about a GPU's.")


def _show(answer: dict[str, object], rows: "list[CheckRow]", as_json: bool) -> None:
    import msgspec

    if as_json:
        print(msgspec.json.encode(answer).decode())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="predicted beside measured", title_justify="left")
    for column in ("workload", "configuration", "calls", "measured mean ms", "predicted", "error"):
        table.add_column(column)
    for row in rows:
        figures = (f"{row.measured_mean_us / 1e3:.3f}", f"{row.predicted_mean_us / 1e3:.3f}", f"{row.error:+.1%}")
        table.add_row(row.workload, row.configuration, str(row.calls), *figures)
    if rows:
        Console().print(table)
