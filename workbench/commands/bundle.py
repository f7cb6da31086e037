"""`workbench bundle`: make, check, open and compare review bundles."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from workbench.bundle import Bundle, Created
    from workbench.conditions import Answer
    from workbench.diff import Diff, PairDiff

_SHOWN_KERNELS = 20

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OneBundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A .wbz file.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def register(app: typer.Typer) -> None:
    """Add the group `bundle`."""
    group = typer.Typer(no_args_is_help=True, help="Review bundles: one file that carries the evidence.")
    for verb in (create, show, verify, extract, diff, report):
        group.command(verb.__name__)(verb)
    app.add_typer(group, name="bundle")


def create(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of runs, ladders or parity sessions, or results of other tools."),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The bundle to write.")] = None,
    note: Annotated[Path | None, typer.Option("--note", help="A Markdown note for the reader.")] = None,
    redact: Annotated[bool, typer.Option("--redact/--no-redact", help="Replace names, paths, secrets.")] = True,
    show_redactions: Annotated[
        bool, typer.Option("--show-redactions", help="List what redaction replaces; without -o, write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Bundle runs, ladders, parity sessions (and JSON, SQLite or traces of other tools) into one redacted file."""
    from workbench.bundle import create as make
    from workbench.errors import WorkbenchError

    if out is None and not show_redactions:
        raise WorkbenchError("the bundle has no name; give one with -o, such as -o base.wbz")
    made = make(runs, out, redact=redact, note=note, overwrite=overwrite)
    if as_json:
        _print_json({"file": str(out) if out else None, "digest": made.digest, "bytes": made.bytes,
                     "findings": made.findings if show_redactions else [], "manifest": made.manifest})  # fmt: skip
        return
    _print_created(made, out, show_redactions)


def show(bundle: OneBundle, as_json: Json = False) -> None:
    """Say what a bundle holds; check its directory and manifest, not every byte."""
    from workbench.bundle import Bundle

    opened = Bundle(bundle)
    if as_json:
        _print_json({"digest": opened.digest, "manifest": opened.manifest})
        return
    _print_bundle(opened)


def verify(
    bundle: OneBundle,
    expect: Annotated[str | None, typer.Option("--expect", help="The digest its author posted.")] = None,
    as_json: Json = False,
) -> None:
    """Check every byte of a bundle; exit 2 names the first member that is wrong."""
    from workbench.bundle import Bundle

    opened = Bundle(bundle)
    opened.verify(expect)
    if as_json:
        _print_json({"digest": opened.digest, "members": len(opened.manifest.members), "whole": True})
        return
    print(f"{bundle} is whole: {len(opened.manifest.members)} members, digest {opened.digest}")


def extract(
    bundle: OneBundle,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Verify, then unpack; the traces open in ui.perfetto.dev with Open trace file."""
    from workbench.bundle import Bundle

    traces = Bundle(bundle).extract(folder, overwrite=overwrite)
    if as_json:
        _print_json({"folder": str(folder), "traces": [str(path) for path in traces]})
        return
    print(f"unpacked to {folder}")
    for path in traces:
        print(f"  {path}  (drop it into ui.perfetto.dev: nothing is uploaded)")


def diff(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A bundle, folder of measurements or foreign result.")],
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="The same kind of thing, changed.")],
    fail_if: Annotated[
        list[str] | None, typer.Option("--fail-if", help="Such as 'graph.mean > +5%'; may be repeated.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write one HTML file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write Markdown for a pull request.")] = None,
    as_json: Json = False,
) -> None:
    """Compare base and head; exit 1 when a call fails only in the head or a --fail-if condition is met."""
    from workbench.conditions import check, parse
    from workbench.diff import compare_files

    conditions = fail_if or []
    for text in conditions:
        parse(text)  # a typing error should not cost the comparison
    found = compare_files(base, head)
    answers = check(found, conditions)
    if html or markdown:
        from workbench.files import write_bytes
        from workbench.views.bundle_markdown import diff_markdown
        from workbench.views.bundle_report import diff_html

        if html:
            write_bytes(html, diff_html(found, answers).encode())
        if markdown:
            write_bytes(markdown, diff_markdown(found, answers).encode())
    if as_json:
        _print_json({"diff": found, "conditions": answers})
    else:
        _print_diff(found, answers)
    raise typer.Exit(1 if found.has_new_failures() or any(answer.hit for answer in answers) else 0)


def report(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A bundle, folder of measurements or foreign result.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The HTML file; left out: SOURCE.html.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write Markdown for a pull request.")] = None,
    as_json: Json = False,
) -> None:
    """Write one bundle as one HTML file that opens offline, verdict first."""
    from workbench.bundle import Bundle, is_bundle, opened
    from workbench.files import write_bytes
    from workbench.views.bundle_markdown import bundle_markdown
    from workbench.views.bundle_report import bundle_html, contents_html

    page = out or Path(f"{source}.html")
    bundle = Bundle(source) if is_bundle(source) else None
    with opened(source) as contents:
        text = bundle_html(bundle, contents) if bundle else contents_html(contents, source.name)
        write_bytes(page, text.encode())
        if markdown:
            write_bytes(markdown, bundle_markdown(contents, bundle.digest if bundle else None).encode())
    if as_json:
        _print_json({"html": str(page), "bytes": page.stat().st_size, "markdown": str(markdown) if markdown else None})
        return
    print(f"{page}: {page.stat().st_size:,} bytes")


def _print_json(value: dict[str, Any]) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def _print_created(made: "Created", out: Path | None, show_redactions: bool) -> None:
    import sys

    from workbench.archive import printable

    if show_redactions:
        for finding in made.findings:
            times = f" ({finding.count} times)" if finding.count > 1 else ""
            print(f"{finding.rule:16} {finding.where}: {printable(finding.shown)}{times}")
        print(f"{sum(finding.count for finding in made.findings)} replacements")
    for warning in made.manifest.warnings:
        print(f"workbench: {printable(warning)}", file=sys.stderr)
    if out is not None:
        print(f"{out}: {made.bytes:,} bytes, digest {made.digest}")


def _print_diff(found: "Diff", answers: "list[Answer]") -> None:
    from workbench.views.words import tone, verdicts

    console = _console()
    colors = {"good": "green", "bad": "red", None: "default"}
    console.print(f"[bold]{_safe(found.base)} → {_safe(found.head)}[/]")
    for text, verdict in verdicts(found):
        console.print(f"[{colors[tone(verdict)]}]{_safe(text)}[/]")
    for pair in found.pairs:
        for doubt in pair.doubts:
            console.print(f"[yellow]doubtful:[/] {_safe(doubt)}")
        for table in _diff_tables(pair):
            if table.row_count:
                console.print(table)
        for note in pair.notes:
            console.print(_safe(note))
    for answer in answers:
        result = "[red]fails[/]" if answer.hit else "passes"
        console.print(f"{result}: {_safe(answer.condition)}: {_safe(answer.reason)}")


def _diff_tables(pair: "PairDiff") -> "list[Table]":
    from rich.table import Table

    from workbench.views.words import change_text, headline, p_text, quantity, timing_title

    columns = ("timing", "statistic", "base", "head", "change", "p", "verdict")
    timings = Table(*columns, title=timing_title(pair), title_justify="left")
    for timing in headline(pair):
        for change in timing.changes:
            values = (quantity(change.base, timing.unit), quantity(change.head, timing.unit))
            told = (change_text(change), p_text(change), change.verdict)
            timings.add_row(*map(_safe, (timing.name, change.statistic, *values, *told)))
    counts = Table("quantity", "base", "head")
    for metric in pair.metrics:
        if metric.base != metric.head:
            values = (quantity(metric.base, metric.unit), quantity(metric.head, metric.unit))
            counts.add_row(*map(_safe, (metric.name, *values)))
    operations = Table("arm", "GPU operation", "status", "base", "head")
    for row in pair.kernels[:_SHOWN_KERNELS]:
        number = (f"{row.base_count:.6g}", f"{row.head_count:.6g}")
        operations.add_row(*map(_safe, (row.arm, row.short, row.status, *number)))
    return [timings, counts, operations]


def _console() -> "Console":
    """A console that does not cut its tables at 80 columns where nobody reads them in a window."""
    import sys

    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _safe(text: object) -> str:
    """Text from a bundle: no control characters, no markup of the console."""
    from rich.markup import escape

    from workbench.archive import printable

    return escape(printable(str(text)))


def _print_bundle(bundle: "Bundle") -> None:
    from rich.table import Table

    manifest = bundle.manifest
    console = _console()
    console.print(f"digest {bundle.digest}, made by {_safe(manifest.creator)}")
    table = Table("entry", "kind", "model", "replay", "GPU", "vLLM", "made")
    for entry in manifest.entries:
        machine = entry.environment
        gpu = machine.gpus[0].name if machine and machine.gpus else "none"
        vllm = machine.vllm if machine else None
        cells = (entry.name, entry.kind, entry.model, entry.replay, gpu, vllm, entry.created)
        table.add_row(*(_safe("-" if cell is None else cell) for cell in cells))
    console.print(table)
    files = Table("member", "bytes")
    files.columns[1].justify = "right"
    for member in manifest.members:
        files.add_row(_safe(member.path), f"{member.bytes:,}")
    console.print(files)
    if manifest.redactions is None:
        console.print("not redacted")
    else:
        told = ", ".join(f"{count} {_safe(rule)}" for rule, count in manifest.redactions.items())
        console.print(f"redacted: {told or 'nothing was found'}")
    if (note := bundle.note()) is not None:
        console.print(f"\n{_safe(note)}")
