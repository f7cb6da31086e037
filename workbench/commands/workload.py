"""`workbench workload` and `workbench ledger`: what a server's images are, and what its encoder did with them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.ledger import CallSummary, HitRow, Ledger
    from workbench.workload import Policy, Summary

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the verbs `workload` and `ledger`."""
    app.command("workload")(workload)
    app.command("ledger")(show_ledger)


def workload(
    source: Annotated[
        str,
        typer.Argument(
            help="A preset, a file (CSV, JSON, JSONL, Parquet, ledger), a folder of images, or a bucket string of "
            "vLLM's random-mm like '{(224, 224, 1): 1.0}'. Leave out to list the presets."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="Whose resize rule makes tokens of sizes.")] = "ernie45_vl",
    processor: Annotated[
        Path | None, typer.Option(help="A checkpoint's folder, to take its processor's pixel limits.")
    ] = None,
    grouping: Annotated[
        str,
        typer.Option(
            help="How items meet in calls: `given` (requests, or a ledger's own calls), `request` (one request a "
            "call), a number of items, or `scheduler` (a model of vLLM's; see the options below)."
        ),
    ] = "given",
    requests: Annotated[int | None, typer.Option(help="Bucket string: number of requests; left out: 1000.")] = None,
    base_items: Annotated[int | None, typer.Option(help="Bucket string: base items per request; left out: 1.")] = None,
    range_ratio: Annotated[
        float | None, typer.Option(help="Bucket string: spread of the items per request, 0 to 1; left out: 0.")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(help='Bucket string: most items per request, as JSON; left out: {"image": 255, "video": 1}.'),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Bucket string, and arrivals of the scheduler's --rate; left out: 0.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="scheduler: requests per second; left out: all at once.")] = None,
    step_ms: Annotated[float, typer.Option(help="scheduler: duration of a step.")] = 30.0,
    text_tokens: Annotated[int, typer.Option(help="scheduler: prompt tokens beside the items.")] = 1024,
    batched_tokens: Annotated[int, typer.Option(help="scheduler: max_num_batched_tokens.")] = 16_384,
    encoder_budget: Annotated[
        int | None, typer.Option(help="scheduler: encoder tokens per step; left out: vLLM's rule.")
    ] = None,
    clamp: Annotated[
        bool, typer.Option("--clamp", help="Clamp an extreme aspect ratio as vLLM's resize does.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out images that are refused or unreadable.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the calls' token counts for `workbench plan --calls`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print sizes, tokens and calls of a workload under a model's own resize rule."""
    import msgspec

    from workbench.files import write_bytes
    from workbench.grids import with_limits
    from workbench.models import model_facts
    from workbench.random_mm import RandomMM, parse_limit
    from workbench.sources import Options, load_workload
    from workbench.workload import Scheduler, apart, group, summarize

    if not source:
        _list_presets(as_json)
        return
    given: dict[str, Any] = {
        "requests": requests,
        "base_items": base_items,
        "range_ratio": range_ratio,
        "limit": limit,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    _refuse_idle(source, given, arrivals=grouping == "scheduler" and rate is not None)
    setting = RandomMM({}, **given | ({} if limit is None else {"limit": parse_limit(limit)}))
    facts = model_facts(model) if processor is None else with_limits(model_facts(model), processor)
    loaded = load_workload(source, facts, Options(setting, clamp, skip_bad))
    scheduler = Scheduler(
        rate=rate,
        step_ms=step_ms,
        text_tokens=text_tokens,
        batched_tokens=batched_tokens,
        encoder_budget=encoder_budget,
        seed=seed or 0,
    )
    policy = grouping_policy(grouping, scheduler)
    grouped = group(loaded, policy) if policy is not None else apart(loaded) if loaded.is_video.any() else loaded
    if out is not None:
        write_bytes(out, msgspec.json.encode(grouped.calls()))
    summary = summarize(grouped)
    if as_json:
        _print_json(summary)
    else:
        _show_workload(summary)


def _refuse_idle(source: str, given: dict[str, Any], *, arrivals: bool) -> None:
    """Refuse options of random-mm that change nothing: a preset has its own, a file and a folder have none."""
    if source.lstrip().startswith("{"):
        return
    idle = sorted(given.keys() - ({"seed"} if arrivals else set()))
    if idle:
        option = f"--{idle[0].replace('_', '-')}"
        raise WorkbenchError(
            f"{option} has no effect on {source[:200]!r}; leave it out, or write the workload as a bucket string like "
            "{(224, 224, 1): 1.0}"
        )


def grouping_policy(grouping: str, scheduler: "Policy") -> "Policy | None":
    """Return the policy that `--grouping` names; None for the calls as given.

    Raises:
        WorkbenchError: neither a name nor a number.
    """
    from workbench.workload import ItemsPerCall, RequestPerCall

    if grouping.isdecimal():
        return ItemsPerCall(int(grouping))
    named: dict[str, Policy | None] = {"given": None, "request": RequestPerCall(), "scheduler": scheduler}
    if grouping not in named:
        raise WorkbenchError(f"grouping {grouping!r} is not given, request, scheduler or a number of items per call")
    return named[grouping]


def _list_presets(as_json: bool) -> None:
    from workbench.presets import PRESETS

    if as_json:
        _print_json(
            [
                {"name": name, "title": preset.title, "origin": preset.origin, "models": preset.models}
                for name, preset in PRESETS.items()
            ]
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "what", "whose numbers", "models", box=None)
    for name, preset in PRESETS.items():
        table.add_row(name, preset.title, preset.origin, ", ".join(preset.models))
    Console(highlight=False).print(table)


def _show_workload(summary: "Summary") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{summary.name}[/] for {summary.model}: {summary.source}")
    empty = f" ({summary.empty:,} empty)" if summary.empty else ""
    console.print(
        f"{summary.groups:,} calls{empty}, {summary.images:,} images, {summary.videos:,} videos, "
        f"{summary.tokens['sum']:,.0f} tokens"
    )
    spread = Table("", "min", "median", "p90", "p99", "max", box=None)
    for title, figures in (
        ("tokens per item", summary.tokens),
        ("items per call", summary.items_per_group),
        ("tokens per call", summary.tokens_per_group),
    ):
        spread.add_row(title, *(f"{figures[name]:,.0f}" for name in ("min", "median", "p90", "p99", "max")))
    console.print(spread)
    shapes = Table("width", "height", "frames", "tokens", "items", box=None)
    for shape in summary.shapes:
        shapes.add_row(*(f"{shape[name]:,}" for name in ("width", "height", "frames", "tokens", "items")))
    console.print(shapes)
    for note in summary.notes:
        console.print(f"note: {note}")


def show_ledger(
    path: Annotated[Path, typer.Argument(help="The ledger file.")],
    as_json: AsJson = False,
) -> None:
    """Print a server's encoder calls: images per call, replays per budget, hits, fallbacks.

    Record one by starting vLLM with WORKBENCH_LEDGER=FILE (WORKBENCH_LEDGER_MAX_BYTES bounds it, 256 MiB by
    default).
    """
    from workbench.ledger import hit_table, read_ledger, summarize

    ledger = read_ledger(path)
    summary, rows = summarize(ledger), hit_table(ledger)
    if as_json:
        _print_json(
            {"summary": summary, "hits": rows, "managers": ledger.managers, "processes": ledger.processes}
            | {"lost": ledger.lost}
        )
    else:
        _show_ledger(ledger, summary, rows)


def _show_ledger(ledger: "Ledger", summary: "CallSummary", rows: "list[HitRow]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for process in ledger.processes:
        console.print(f"process {process.pid}: vLLM {process.vllm} on {process.device}")
    for manager in ledger.managers:
        console.print(
            f"{manager.model}: budgets {manager.budgets}, {manager.max_items} items and {manager.max_frames} frames "
            "a replay"
        )
    console.print(
        f"{summary.calls:,} encoder calls, {summary.items:,} items: {summary.hits:,} hit, {summary.misses:,} not"
    )
    calls = Table("items per call", "calls", box=None)
    for items, count in summary.items_per_call.items():
        calls.add_row(f"{items:,}", f"{count:,}")
    console.print(calls)
    hits = Table("route", "budget", "batches", "items", "tokens", "fill", "host us (median)", box=None)
    for row in rows:
        hits.add_row(
            row.route,
            "" if row.budget is None else f"{row.budget:,}",
            f"{row.batches:,}",
            f"{row.items:,}",
            f"{row.tokens:,}",
            "" if row.fill is None else f"{row.fill:.0%}",
            f"{row.host_us:,.0f}",
        )
    console.print(hits)
    for loss in ledger.lost:
        console.print(f"lost: {loss}")


def _print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value)).decode())
