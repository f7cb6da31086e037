"""`workbench parity`, `decisions` and `faults`: does the graph change what the model sees, and would the lab notice?"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.budgets import Configuration
    from workbench.encoder.session import SessionOptions
    from workbench.parity import FaultResult, Parity

Option = typer.Option
MODELS = "ernie45_vl,glm4_1v"


def register(app: typer.Typer) -> None:
    """Add the verbs `parity`, `decisions` and `faults`."""
    _register_parity(app)
    _register_faults(app)
    _register_decisions(app)


def _register_parity(app: typer.Typer) -> None:
    @app.command("parity")
    def parity(
        model: Annotated[str, Option(help="Which encoder.")] = "ernie45_vl",
        variants: Annotated[str, Option(help="Encoder variants with commas, or all; empty: vLLM's code.")] = "",
        budgets: Annotated[str, Option(help="Token budgets like 128,256; empty: a range for this machine.")] = "",
        max_items: Annotated[int, Option(help="Images or videos per replay.")] = 4,
        scenarios: Annotated[str, Option(help="Names with commas; empty: all.")] = "",
        faults: Annotated[bool, Option("--faults", help="Also plant every known fault.")] = False,
        fault_depth: Annotated[int, Option(help="Blocks of the encoder the faults are planted in.")] = 4,
        clean: Annotated[int, Option(help="Random workloads on the unchanged code.")] = 0,
        depth: Annotated[int | None, Option(help="Blocks; left out: all on CUDA, 2 on the CPU.")] = None,
        width: Annotated[int | None, Option(help="Features; left out: all on CUDA, two heads on the CPU.")] = None,
        dtype: Annotated[str, Option(help="bfloat16 or float16.")] = "bfloat16",
        device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
        attention_backend: Annotated[str | None, Option(help="vLLM's name; left out: its choice.")] = None,
        checkpoint: Annotated[Path | None, Option(help="Folder with weights; left out: dummy ones.")] = None,
        seed: Annotated[int, Option(help="Seed of weights and inputs.")] = 0,
        out: Annotated[Path | None, Option(help="Folder for parity.json.")] = None,
        against: Annotated[Path | None, Option(help="Folder of an earlier session with the same inputs.")] = None,
        name: Annotated[str | None, Option(help="Name of the session; left out: the folder's.")] = None,
        as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Compare eager, padded eager and graph in every condition that breaks graphs.

        Exit code 1: they differ, a planted fault was missed, or variants that promise the bits of vLLM's graph give
        others. With --against: something is worse than before, which may be a session without the variants.
        """
        from workbench.encoder.parity.matrix import Plan, run
        from workbench.files import refuse_occupied, write_bytes
        from workbench.parity import PARITY_FILE, changes, compared_variants, encode, read_parity
        from workbench.progress import progress_bar

        if out is not None:
            refuse_occupied(out, overwrite=True)
        earlier = read_parity(against) if against is not None else None
        options, configuration = _lab(model, budgets, max_items, depth, width, dtype, device, attention_backend, seed)
        if checkpoint is not None:
            options = _with(options, checkpoint=checkpoint)
        plan = Plan(
            scenarios=tuple(filter(None, scenarios.split(","))),
            faults=faults,
            fault_depth=fault_depth,
            clean=clean,
            seed=seed,
        )

        def write(result: "Parity") -> None:
            if out is not None:
                write_bytes(out / PARITY_FILE, encode(result))

        with progress_bar() as progress:
            title = name or (out.name if out is not None else f"parity of {model}")
            result = run(
                options,
                configuration,
                plan,
                variants=_variants(model, variants),
                name=title,
                progress=progress,
                on_part=write,
            )
        write(result)
        if as_json:
            print(encode(result).decode(), end="")
        else:
            show_parity(result)
        if earlier is None:
            raise typer.Exit(1 if result.mismatched or result.promise_broken or _uncaught(result) else 0)
        changed = changes(earlier, result)
        if note := compared_variants(earlier, result):
            print(note, file=sys.stderr)
        for change in changed:
            where = f"{change.scenario}{f' at {change.budget}' if change.budget else ''}"
            print(f"{where}: {change.before} before, {change.after} now", file=sys.stderr)
        raise typer.Exit(1 if any(change.worse for change in changed) else 0)


def _register_faults(app: typer.Typer) -> None:
    @app.command("faults")
    def faults(
        model: Annotated[str, Option(help="Encoders with commas.")] = MODELS,
        clean: Annotated[int, Option(help="Random workloads per encoder on the unchanged code.")] = 200,
        depth: Annotated[int | None, Option(help="Blocks; left out: 4 on CUDA, 2 on the CPU.")] = None,
        device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
        attention_backend: Annotated[str | None, Option(help="vLLM's name; left out: its choice.")] = None,
        markdown: Annotated[bool, Option("--markdown", help="Print the tables as Markdown.")] = False,
        out: Annotated[Path | None, Option(help="File for these tables.")] = None,
        as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Plant every known fault and see that the lab names it, with no false alarm on the clean code."""
        from workbench.encoder.parity.matrix import run_campaign
        from workbench.encoder.registry import reduced_facts
        from workbench.files import write_bytes
        from workbench.parity import campaign_sentence, fault_document, recorded
        from workbench.progress import progress_bar

        for key in model.split(","):
            reduced_facts(key, depth, None)  # refuses a depth that it does not have
        with progress_bar() as progress:
            campaign = run_campaign(
                model.split(","), clean=clean, depth=depth, device=device, backend=attention_backend, progress=progress
            )
        text = fault_document(campaign, recorded())
        if out is not None:
            write_bytes(out, text.encode())
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(campaign)).decode())
        elif markdown:
            print(text, end="")
        else:
            _show_faults(campaign.results, _console())
            print(campaign_sentence(campaign))
        raise typer.Exit(0 if campaign.passed else 1)


def _register_decisions(app: typer.Typer) -> None:
    @app.command("decisions")
    def decisions(
        a: Annotated[Path, typer.Argument(help="Answers (.jsonl) or lmms-eval results (.json) with graphs off.")],
        b: Annotated[Path, typer.Argument(help="The same with graphs on.")],
        metric: Annotated[str | None, Option(help="A 0/1 value of every sample, for the paired test.")] = None,
        confidence: Annotated[float, Option(help="Of the intervals.")] = 0.95,
        delta: Annotated[float, Option(help="The change whose sample size is wanted.")] = 0.01,
        near_tie: Annotated[float, Option(help="Nats below which two tokens count as tied.")] = 0.25,
        as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Compare the answers of two servers, or two benchmark results. Exit code 1: they differ beyond chance."""
        if a.suffix == ".jsonl":
            changed = _compare_answers(a, b, metric, confidence, delta, near_tie, as_json)
        else:
            changed = _compare_results(a, b, confidence, delta, as_json)
        raise typer.Exit(1 if changed else 0)


def _lab(
    model: str,
    budgets: str,
    max_items: int,
    depth: int | None,
    width: int | None,
    dtype: str,
    device: str | None,
    backend: str | None,
    seed: int,
) -> "tuple[SessionOptions, Configuration]":
    """Options and budgets for this machine: the whole encoder on CUDA, a small one on the CPU."""
    from workbench.budgets import Configuration, parse_budgets
    from workbench.encoder.parity.lab import lab_options

    options, usual = lab_options(model, device=device)
    changes = {"depth": depth, "width": width, "attention_backend": backend}
    options = _with(
        options, dtype=dtype, seed=seed, **{key: value for key, value in changes.items() if value is not None}
    )
    chosen = parse_budgets(budgets) if budgets else usual
    return options, Configuration(chosen, max_items)


def _variants(model: str, text: str) -> tuple[str, ...]:
    """Names of variants; "all" is every one that the encoder has.

    Raises:
        WorkbenchError: the encoder has no such variant.
    """
    from workbench.encoder.variants import chosen, names_for

    if not text:
        return ()
    if not names_for(model):
        raise WorkbenchError(f"there are no variants of {model}; leave them out")
    names = names_for(model) if text == "all" else tuple(filter(None, text.split(",")))
    return tuple(variant.name for variant in chosen(model, names))


def _with(options: "SessionOptions", **changes: object) -> "SessionOptions":
    import dataclasses

    return dataclasses.replace(options, **changes)  # type: ignore[arg-type]


def _uncaught(result: "Parity") -> bool:
    return any(fault.status in ("missed", "misnamed") for fault in result.faults)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def show_parity(result: "Parity") -> None:
    """Print verdict, matrix, findings and faults of a session."""
    from rich.table import Table

    from workbench.parity import matrix_rows, verdict

    console = _console()
    console.print(f"[bold]{verdict(result)}[/]\n")
    rows = matrix_rows(result)
    table = Table(box=None)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    noise = result.noise
    console.print(
        f"\nNoise floor over {noise.items} items (relative RMS): eager in another composition "
        f"{noise.composition_rms:.2g}, eager against float32 {noise.reference_rms:.2g}, graph against float32 "
        f"{'not finite' if noise.graph_reference_rms is None else f'{noise.graph_reference_rms:.2g}'}; limit "
        f"{noise.limit_rms:.2g}. Without attention {result.visibility.attention_ratio:.0f} times the floor, with a "
        "wrong "
        f"rotary embedding {result.visibility.rotary_ratio:.0f} times."
    )
    for finding in result.findings[:20]:
        where = f"{finding.scenario}{f' at {finding.budget}' if finding.budget else ''}"
        defect = f" [{finding.defect}]" if finding.defect else ""
        console.print(f"{finding.severity} in {where}: {finding.suspect}: {finding.message}{defect}", markup=False)
    if result.clean is not None:
        console.print(f"{result.clean.false_alarms} false alarms in {result.clean.workloads} random workloads.")
    for sentence in result.not_tested:
        console.print(f"Not tested here: {sentence}.")
    if result.faults:
        _show_faults(result.faults, console)


def _show_faults(faults: "list[FaultResult]", console: "Console") -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("fault", "model", "status", "suspect", "seen in", "reason"):
        table.add_column(column)
    for fault in faults:
        table.add_row(
            fault.title,
            fault.model,
            fault.status,
            fault.suspect or "",
            f"{len(fault.scenarios)} scenarios" if fault.scenarios else "",
            fault.message if fault.status != "caught" else "",
        )
    console.print(table)


def _compare_answers(
    a: Path, b: Path, metric: str | None, confidence: float, delta: float, near_tie: float, as_json: bool
) -> bool:
    from workbench.answers import compare_answers, compare_correctness, read_answers
    from workbench.decision import agreement_sentence, paired_sentence

    left, right = read_answers(a), read_answers(b)
    agreement = compare_answers(left, right, confidence=confidence, near_tie_nats=near_tie)
    paired = compare_correctness(left, right, metric, confidence=confidence, target_delta=delta)
    if as_json:
        print(msgspec.json.encode({"agreement": agreement, "paired": paired}).decode())
    else:
        print(agreement_sentence(agreement))
        for difference in agreement.differences[:20]:
            tie = {True: "near tie", False: "decided", None: "no logprobs"}[difference.near_tie]
            print(
                f"  {difference.sample}: {difference.unit} {difference.position}: "
                f"{difference.a!r} against {difference.b!r} ({tie})"
            )
        if paired is not None:
            print(paired_sentence(paired))
    return agreement.changed or (paired is not None and paired.p_value < 1 - confidence)


def _compare_results(a: Path, b: Path, confidence: float, delta: float, as_json: bool) -> bool:
    from workbench.answers import compare_results
    from workbench.decision import benchmark_sentence

    if b.suffix == ".jsonl":
        raise WorkbenchError(f"{a} holds results and {b} answers; give two files of one kind")
    deltas = compare_results(a, b, target_delta=delta)
    if as_json:
        print(msgspec.json.encode({"benchmarks": deltas}).decode())
    else:
        for result in deltas:
            print(benchmark_sentence(result))
    return any(result.p_value < 1 - confidence for result in deltas)
