"""`workbench bundle`: make, check, open and compare review bundles."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from workbench.bundle import Bundle, Created

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OneBundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A .wbz file.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def register(app: typer.Typer) -> None:
    """Add the group `bundle`."""
    group = typer.Typer(no_args_is_help=True, help="Review bundles: one file that carries the evidence.")
    for verb in (create, show, verify, extract):
        group.command(verb.__name__)(verb)
    app.add_typer(group, name="bundle")


def create(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or results of other tools.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The bundle to write.")] = None,
    note: Annotated[Path | None, typer.Option("--note", help="A Markdown note for the reader.")] = None,
    redact: Annotated[bool, typer.Option("--redact/--no-redact", help="Replace names, paths, secrets.")] = True,
    show_redactions: Annotated[
        bool, typer.Option("--show-redactions", help="List what redaction replaces; without -o, write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bundle run folders (and JSON, SQLite or traces of other tools) into one redacted file."""
    from workbench.bundle import create as make
    from workbench.errors import WorkbenchError

    if out is None and not show_redactions:
        raise WorkbenchError("the bundle has no name; give one with -o, such as -o base.wbz")
    made = make(runs, out, redact=redact, note=note)
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
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
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


def _print_bundle(bundle: "Bundle") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from workbench.archive import printable

    def safe(text: object) -> str:
        return escape(printable(str(text if text is not None else "-")))

    manifest = bundle.manifest
    console = Console(highlight=False)
    console.print(f"digest {bundle.digest}, made by {safe(manifest.creator)}")
    table = Table("entry", "kind", "model", "replay", "GPU", "vLLM", "made")
    for entry in manifest.entries:
        machine = entry.environment
        gpu = machine.gpus[0].name if machine and machine.gpus else "none"
        vllm = machine.vllm if machine else None
        cells = (entry.name, entry.kind, entry.model, entry.replay, gpu, vllm, entry.created)
        table.add_row(*map(safe, cells))
    console.print(table)
    files = Table("member", "bytes")
    files.columns[1].justify = "right"
    for member in manifest.members:
        files.add_row(safe(member.path), f"{member.bytes:,}")
    console.print(files)
    if manifest.redactions is None:
        console.print("not redacted")
    else:
        told = ", ".join(f"{count} {safe(rule)}" for rule, count in manifest.redactions.items())
        console.print(f"redacted: {told or 'nothing was found'}")
    if (note := bundle.note()) is not None:
        console.print(f"\n{safe(note)}")
