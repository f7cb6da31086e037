"""`workbench sweep`: measure many configurations, each in a task of its own, here or on a Ray cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.budgets import Configuration
    from workbench.fleet import Result

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verb `sweep`."""
    app.command("sweep")(sweep)


def sweep(
    workload: Annotated[str, Option(help="A preset, a file, a folder of images, or {(height, width, frames): share}.")],
    out: Annotated[Path, Option(help="The sweep's folder; results appear in it one by one.")],
    config: Annotated[
        list[str] | None, Option(help="NAME=128,256:4 (budgets:items[:frames]) or NAME=auto; repeatable.")
    ] = None,
    configs: Annotated[Path | None, Option(help="File with one such configuration a line.")] = None,
    ray: Annotated[
        str | None, Option(help="Ray cluster: local, auto or HOST:PORT; left out: this process, one by one.")
    ] = None,
    workers: Annotated[int | None, Option(help="How many at once on Ray; left out: every GPU.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the sweep that --out holds.")] = False,
    model: Annotated[str, Option(help="Which encoder.")] = "ernie45_vl",
    calls: Annotated[int, Option(help="Calls of images to time, the first ones.")] = 40,
    repeats: Annotated[int, Option(help="Samples per call.")] = 20,
    warmup: Annotated[int, Option(help="Runs of each call before its samples.")] = 2,
    depth: Annotated[int | None, Option(help="Blocks; left out: all on CUDA, 2 on the CPU.")] = None,
    width: Annotated[int | None, Option(help="Features; left out: all on CUDA, two heads on the CPU.")] = None,
    dtype: Annotated[str, Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
    seed: Annotated[int, Option(help="Seed of dummy weights and inputs.")] = 0,
    max_model_len: Annotated[int, Option(help="The server's, for inferred budgets.")] = 16_384,
    max_num_batched_tokens: Annotated[int, Option(help="The server's, for inferred budgets.")] = 8192,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time many configurations on the same calls, each beside eager as served; exit code 1 where one failed."""
    import msgspec

    from workbench import fleet
    from workbench.commands.parallel import size_here
    from workbench.encoder.session import SessionOptions
    from workbench.models import model_facts
    from workbench.progress import progress_bar
    from workbench.sources import load_workload

    if workers is not None and ray is None:
        raise WorkbenchError("--workers is for --ray; without it configurations run in this process, one by one")
    configurations = read_configurations(config or [], configs)
    if ray in (None, "local") or (device or "").startswith("cpu"):  # another machine's GPUs are not known here
        depth, width = size_here(model, depth, width, device)
    options = SessionOptions(
        model=model,
        depth=depth,
        width=width,
        dtype=dtype,
        device=device,
        seed=seed,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    loaded = load_workload(workload, model_facts(model))
    request = fleet.make_request(options, loaded, configurations, calls=calls, repeats=repeats, warmup=warmup)
    executor = None if ray is None else fleet.OnRay(ray, workers)
    with progress_bar() as progress:
        results = fleet.sweep(request, out, executor, resume=resume, progress=progress)
    if as_json:
        print(msgspec.json.encode({"folder": str(out), "results": results}).decode())
    else:
        show(results)
    if any(result.failed for result in results):
        raise typer.Exit(1)


def read_configurations(given: list[str], file: Path | None) -> "dict[str, Configuration]":
    """Return configurations by name, of the command line and of a file (empty lines and `#` lines are skipped).

    Raises:
        WorkbenchError: a line that is none, `NAME=advised` (which is `compare`'s), or a name given twice.
    """
    from workbench.commands.costs import parse_named

    lines = [("", line) for line in given]
    if file is not None:
        lines += [(f"{file} line {number}: ", line) for number, line in enumerate(_lines(file), start=1)]
    found: dict[str, Configuration] = {}
    for where, line in lines:
        if not line or line.startswith("#"):
            continue
        try:
            name, configuration = parse_named(line)
        except WorkbenchError as error:
            raise WorkbenchError(f"{where}{error}") from error
        if configuration is None:
            raise WorkbenchError(
                f"{where}{line!r}: a sweep measures budgets that are written out; see `workbench advise`"
            )
        if name in found:
            raise WorkbenchError(f"{where}two configurations are called {name!r}; give each a name of its own")
        found[name] = configuration
    return found


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text("utf-8").splitlines()]
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "not UTF-8"
    raise WorkbenchError(f"cannot read {file}: {reason}; give a UTF-8 text file, one NAME=128,256:4 a line")


def show(results: "list[Result]") -> None:
    """Print a table, fastest first and those last whose means lack failed calls, and the failures."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from workbench.stats import ratio, summary

    static = any(result.comparison and result.comparison.replay != "cuda_graph" for result in results)
    title = "milliseconds a call; ratio of medians, eager as served over graph; seconds of capture"
    title += "; static replay on the CPU, which says nothing about a GPU's times" if static else ""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("configuration", no_wrap=True)  # headings wrap, names do not
    for title in ("graphs", "items", "mean", "median", "P99", "ratio", "failed", "seconds"):
        table.add_column(title, justify="right")
    rows: list[tuple[int, float, tuple[str, ...]]] = []
    for result in results:
        if result.comparison is None:
            continue
        timing = result.comparison.configurations[0]
        samples = [us for call in timing.calls for us in call.wall_us]
        lost = sum(not call.wall_us for call in timing.calls)
        capture = f"{sum(cost.seconds for cost in timing.capture):.2f}"
        head = (result.task.name, str(len(timing.budgets)), str(timing.max_items))
        if not samples:
            rows.append((lost, float("inf"), (*head, "", "", "", "", str(lost), capture)))
            continue
        eager = [us for call, ran in zip(result.comparison.eager_served, timing.calls, strict=True)
                 if ran.wall_us for us in call.wall_us]  # fmt: skip
        found = summary(samples)
        times = (f"{us / 1e3:.2f}" for us in (found.mean, found.median, found.p99))
        speed = f"{ratio(eager, samples, 'median').value:.2f}x" if eager else ""
        rows.append((lost, found.mean, (*head, *times, speed, str(lost), capture)))
    for _, _, row in sorted(rows):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for result in results:
        if result.failed:
            console.print(f"{result.task.name} failed: {result.failed}", markup=False)
