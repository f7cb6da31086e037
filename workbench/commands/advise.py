"""`workbench advise`: the budgets and max items that minimise encoder time for a workload."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.advisor import Advice, Candidate

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verb `advise`."""
    app.command("advise")(advise)


def advise(
    workload: Annotated[str, Option(help="A preset's name, a bucket string, a workload file, or a folder of images.")],
    model: Annotated[str, Option(help="Which encoder: ernie45_vl, glm4_1v, qwen2_5_vl or qwen3_vl.")] = "ernie45_vl",
    profile: Annotated[
        Path | None, Option(help="Costs, from `workbench calibrate`; left out: the H200 profile that ships.")
    ] = None,
    objective: Annotated[
        Literal["mean", "p99", "gpu"], Option(help="Mean or 99th percentile of a call, or mean GPU time of replays.")
    ] = "mean",
    grouping: Annotated[
        str,
        Option(
            help="How items meet in calls: `given` (requests, or a ledger's own calls), `request`, a number, or "
            "`scheduler` (a model of vLLM's with all requests at the start, as its offline benchmarks have)."
        ),
    ] = "given",
    max_graphs: Annotated[int, Option(help="Most graphs, one per budget.")] = 8,
    max_memory: Annotated[float | None, Option(help="Most memory of all captures, MiB.")] = None,
    max_capture_seconds: Annotated[float | None, Option(help="Most time of all captures, seconds.")] = None,
    max_model_len: Annotated[int, Option(help="The server's, for vLLM's own budgets.")] = 16_384,
    max_num_batched_tokens: Annotated[int, Option(help="The server's, for vLLM's own budgets.")] = 8_192,
    any_profile: Annotated[
        bool, Option("--any-profile", help="Take a profile of another model or GPU than this machine's.")
    ] = False,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Leave unreadable images and refused sizes out.")] = False,
    seed: Annotated[int, Option(help="Of the calls that a large workload is searched on.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Choose budgets and max items for a workload, from measured costs."""
    from workbench.advisor import Constraints
    from workbench.advisor import advise as search
    from workbench.budgets import Limits
    from workbench.commands.workload import grouping_policy
    from workbench.costs import CostModel, choose_profile
    from workbench.models import model_facts
    from workbench.progress import progress_bar
    from workbench.sources import Options, load_workload
    from workbench.workload import Scheduler, group

    facts = model_facts(model)
    costs = CostModel(choose_profile(model, profile, any_profile=any_profile))
    calls = load_workload(workload, facts, Options(skip_bad=skip_bad))
    policy = grouping_policy(grouping, Scheduler(batched_tokens=max_num_batched_tokens))
    if policy is not None:
        calls = group(calls, policy)
    limits = Limits.of(
        facts,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        video_limit=None if calls.is_video.any() else 0,
    )
    constraints = Constraints(
        max_graphs=max_graphs,
        max_bytes=None if max_memory is None else max_memory * 2**20,
        max_capture_seconds=max_capture_seconds,
    )
    with progress_bar() as progress:
        advice = search(calls, costs, limits, objective, constraints, seed=seed, progress=progress)
    if as_json:
        import msgspec

        print(msgspec.json.encode(advice.record()).decode())
    else:
        from rich.console import Console

        _show(Console(highlight=False), advice)


def _show(console: "Console", advice: "Advice") -> None:
    from workbench.advisor import OBJECTIVES

    value = advice.answer.objective_us
    assert value is not None
    how = "the least possible" if advice.exact else "the best found"
    console.print(
        f"{advice.workload} ({advice.source}); costs measured on {advice.profile}, {advice.measured}\n"
        f"{OBJECTIVES[advice.objective]}: {value / 1e3:.3f} ms, {how}; {advice.above_bound:.1%} above the bound "
        f"without any padding, {advice.bound_us / 1e3:.3f} ms{_why_above(advice)}"
    )
    _show_candidates(console, [advice.answer, *advice.baselines])
    _show_reasons(console, advice)
    if advice.items_reason:
        console.print(advice.items_reason, markup=False)
    if advice.frames_warning:
        console.print("warning", advice.frames_warning, markup=False)
    for item in advice.eager_faster:
        console.print(
            f"eager as served is faster for items of {item.tokens:,} tokens ({item.items:,} of them): "
            f"{item.eager_us / 1e3:.2f} ms, graph {item.graph_us / 1e3:.2f} ms"
        )
    for finding in advice.findings:
        if finding.severity != "info":
            console.print(f"{finding.severity} {finding.rule}: {finding.message}", markup=False)
    console.print("--compilation-config", advice.compilation_config, soft_wrap=True, markup=False)
    console.print(advice.serve_line, soft_wrap=True, markup=False)


def _why_above(advice: "Advice") -> str:
    """Say what is left between an answer that pads nothing and the bound; nothing where padding explains it."""
    answer = advice.answer
    if advice.above_bound < 0.0005 or (answer.waste or 0) >= 0.0005 or answer.captured != answer.budgets:
        return ""
    return (
        "; it takes the cheapest replay and attention among all measured budgets that hold the tokens, and those of a "
        "larger budget may be cheaper"
    )


def _show_candidates(console: "Console", candidates: "list[Candidate]") -> None:
    from rich.table import Table

    table = Table(title="predicted per call", title_justify="left")
    framed = ["frames", "computes"] if any(one.max_frames for one in candidates) else []
    texts = ("configuration", "budgets")
    for column in (*texts, "items", *framed, "mean ms", "P99 ms", "waste", "capture MiB", "capture s"):
        table.add_column(column, justify="left" if column in texts else "right")
    for one in candidates:
        timed = one.prediction
        times = ("-", "-") if timed is None else (f"{timed.mean_us / 1e3:.3f}", f"{timed.p99_us / 1e3:.3f}")
        table.add_row(
            one.name,
            ", ".join(map(str, one.budgets)),
            str(one.max_items),
            *([f"{one.max_frames:,}", _computed(one)] if framed else []),
            *times,
            "-" if one.waste is None else f"{one.waste:.1%}",
            "-" if one.capture_bytes is None else f"{one.capture_bytes / 2**20:,.0f}",
            "-" if one.capture_seconds is None else f"{one.capture_seconds:.2f}",
        )
    console.print(table)
    for one in candidates:
        if one.refused:
            console.print(f"{one.name}: {one.refused}", markup=False)


def _computed(one: "Candidate") -> str:
    """Tokens that the graphs compute, as times their budgets."""
    times = [computed / budget for computed, budget in zip(one.captured, one.budgets, strict=True)]
    return "-" if not times else "budgets" if max(times) == 1 else f"up to {max(times):,.1f} x"


def _show_reasons(console: "Console", advice: "Advice") -> None:
    from rich.table import Table

    table = Table(title="why each budget", title_justify="left")
    for column in ("budget", "calls", "replays", "items", "fill", "tokens", "usual batch", "without it"):
        table.add_column(column, justify="right")
    for reason in advice.reasons:
        common = "+".join(map(str, reason.common[:6])) + ("+..." if len(reason.common) > 6 else "")
        table.add_row(
            str(reason.budget),
            f"{reason.calls:.1%}",
            f"{reason.replays:,}",
            f"{reason.items:,}",
            f"{reason.fill:.1%}",
            f"{reason.smallest} to {reason.largest}",
            f"{common} ({reason.common_share:.0%})",
            "not served" if reason.without is None else f"{reason.without:+.1%}",
        )
    console.print(table)
