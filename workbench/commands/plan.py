"""`workbench plan` and `workbench lint`: what vLLM will do with a configuration, before any GPU time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from workbench.budgets import Configuration
    from workbench.lint import Report

_SHOWN_CALLS = 20

Budgets = Annotated[str, typer.Option(help="Token budgets like 128,256,512; empty: vLLM's own.")]
MaxItems = Annotated[int, typer.Option(help="Images or videos per replay; 0: vLLM's own.")]
MaxFrames = Annotated[int | None, typer.Option(help="Video frames per replay; left out: vLLM's own.")]
VideoLimit = Annotated[int | None, typer.Option(help="Videos per prompt; left out: vLLM's own, 999.")]
MinBudget = Annotated[int | None, typer.Option(help="Smallest inferred budget; left out: the model's, 64.")]
MaxModelLen = Annotated[int | None, typer.Option(help="The server's, for inferred budgets.")]
MaxBatchedTokens = Annotated[int | None, typer.Option(help="The server's, for inferred budgets.")]
CompilationConfig = Annotated[
    str | None, typer.Option(help="JSON of --compilation-config, instead of budgets, items and frames.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the verbs `plan` and `lint`."""
    app.command("plan")(plan)
    app.command("lint")(lint)


def plan(
    calls: Annotated[Path, typer.Option(help="JSON: a list of calls, each a list of output-token counts.")],
    budgets: Budgets = "",
    max_items: MaxItems = 0,
    max_frames: MaxFrames = None,
    video_limit: VideoLimit = None,
    min_budget: MinBudget = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    compilation_config: CompilationConfig = None,
    model: Annotated[
        str | None, typer.Option(help="Take the smallest budget and frames per video from this model.")
    ] = None,
    frames: Annotated[
        Path | None, typer.Option(help="JSON like --calls: attention sequences (grid t) of each item.")
    ] = None,
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel ranks that share a call; names each batch's rank.")
    ] = None,
    input_sizes: Annotated[Path | None, typer.Option(help="JSON like --calls: patches of each item, for --dp.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print which replays vLLM makes of encoder calls: items, tokens, budget, fallbacks and padding waste."""
    from workbench.budgets import Limits, resolve
    from workbench.models import model_facts
    from workbench.planner import plan as make_plan
    from workbench.planner import read_calls, read_like

    given = {
        "min_budget": min_budget,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "video_limit": video_limit,
    }
    if model is None:
        limits = Limits(**{name: value for name, value in given.items() if value is not None})
    else:
        limits = Limits.of(model_facts(model), **given)
    resolved = resolve(_configuration(budgets, max_items, max_frames, compilation_config), limits)
    tokens, offsets = read_calls(calls)
    made = make_plan(
        tokens,
        offsets,
        resolved,
        frames=None if frames is None else read_like(frames, offsets),
        dp=1 if dp is None else dp,
        input_sizes=None if input_sizes is None else read_like(input_sizes, offsets),
    )
    record = made.record(ranked=dp is not None) | {"warnings": list(resolved.warnings)}
    if as_json:
        _print_json(record)
    else:
        _show_plan(record)


def lint(
    model: Annotated[str, typer.Option(help="Which encoder: ernie45_vl, glm4_1v, qwen2_5_vl or qwen3_vl.")],
    budgets: Budgets = "",
    max_items: MaxItems = 0,
    max_frames: MaxFrames = None,
    video_limit: VideoLimit = None,
    min_budget: MinBudget = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    compilation_config: CompilationConfig = None,
    workload: Annotated[
        str | None, typer.Option(help="A preset's name or a workload file, for rules on what comes.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A cost profile of the model, to estimate the captures' memory and seconds.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the shapes vLLM would capture; exit code 1 when a finding is an error."""
    from workbench.budgets import Limits
    from workbench.lint import lint as check
    from workbench.models import model_facts

    facts = model_facts(model)
    limits = Limits.of(
        facts,
        min_budget=min_budget,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        video_limit=video_limit,
    )
    traffic = None
    if workload is not None:
        from workbench.sources import load_workload

        traffic = load_workload(workload, facts)
    report = check(facts, _configuration(budgets, max_items, max_frames, compilation_config), limits, traffic)
    costs = None
    if profile is not None:
        from workbench.costs import CostModel, read_profile

        costs = CostModel(read_profile(profile, model))
    record = report.record(costs)
    if as_json:
        warnings = list(report.resolved.warnings) if report.resolved else []
        _print_json(record | {"warnings": warnings})
    else:
        _show_findings(report, record["memory"])
    if report.failed:
        raise typer.Exit(1)


def _configuration(
    budgets: str, max_items: int, max_frames: int | None, compilation_config: str | None
) -> "Configuration":
    from workbench.budgets import Configuration, parse_budgets, parse_compilation_config
    from workbench.errors import WorkbenchError

    if compilation_config is None:
        return Configuration(parse_budgets(budgets), max_items, max_frames)
    if budgets or max_items or max_frames is not None:
        raise WorkbenchError("give either --compilation-config or --budgets, --max-items and --max-frames, not both")
    return parse_compilation_config(compilation_config)


def _print_json(record: dict[str, Any]) -> None:
    import msgspec

    print(msgspec.json.encode(record).decode())


def _show_plan(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for warning in record["warnings"]:
        console.print(f"[yellow]note[/] {warning}")
    budgets = ", ".join(map(str, record["budgets"]))
    slots = max(record["max_items"], record["max_frames"])
    table = Table(title=f"budgets {budgets}; max items {record['max_items']}", title_justify="left")
    framed = any("frames" in batch for planned in record["calls"] for batch in planned["batches"])
    for column in ("call", "items", "tokens", "budget", "fill", *(["frames"] if framed else [])):
        table.add_column(column, justify="right")
    for call, planned in enumerate(record["calls"][:_SHOWN_CALLS]):
        for batch in planned["batches"]:
            fill = "eager" if batch["budget"] is None else f"{batch['tokens'] / batch['budget']:.1%}"
            name = f"{call} rank {batch['rank']}" if "rank" in batch else str(call)
            items = ", ".join(map(str, batch["items"]))
            frames = [f"{batch['frames']} of {slots}" + " over" * ("over_frames" in batch)] if framed else []
            table.add_row(name, items, str(batch["tokens"]), str(batch["budget"] or "-"), fill, *frames)
    console.print(table)
    if len(record["calls"]) > _SHOWN_CALLS:
        console.print(f"... and {len(record['calls']) - _SHOWN_CALLS:,} more calls; --json prints all")
    totals = record["totals"]
    waste = "no replay" if totals["waste"] is None else f"padding waste {totals['waste']:.1%}"
    console.print(
        f"{totals['replays']:,} replays of {totals['tokens']:,} tokens, {waste}; {totals['fallbacks']:,} eager "
        f"fallbacks of {totals['fallback_tokens']:,} tokens"
    )
    if totals["over_frames"]:
        console.print(
            f"[red]{totals['over_frames']:,} replays hold more frames than the captured buffer, and vLLM raises (D4); "
            "give more --max-frames[/]"
        )


def _show_findings(report: "Report", memory: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{report.facts.title}: captured graphs", title_justify="left")
    for column in ("budget", "patches", "holds tokens", "sequences", "MiB of buffers"):
        table.add_column(column, justify="right")
    for capture in report.captures:
        table.add_row(
            f"{capture.budget:,}",
            f"{capture.patches:,}",
            f"{capture.capacity:,}",
            f"{capture.sequence_slots:,}",
            f"{capture.bytes / 2**20:,.1f}",
        )
    if report.captures:
        console.print(table)
        console.print(f"{memory['graphs']} graphs, {memory['buffer_bytes'] / 2**20:,.1f} MiB of buffers")
        if memory["capture_bytes"] is not None:
            console.print(
                f"captures: {memory['capture_bytes'] / 2**20:,.0f} MiB in all, {memory['capture_seconds']:.1f} s; "
                f"{memory['capture_basis']}"
            )
    colours = {"error": "red", "warning": "yellow", "info": "cyan"}
    for finding in report.findings:
        console.print(
            f"[{colours[finding.severity]}]{finding.severity}[/] [bold]{finding.rule}[/]: "
            f"{escape(finding.message)}\n    {escape(finding.remedy)}"
        )
    if not report.findings:
        console.print("no finding")
