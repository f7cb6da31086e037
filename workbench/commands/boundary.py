"""`workbench boundary` and `workbench ladder`: what a graph can hold, and what each variant saves."""

from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.capturable import Boundary, BoundaryReport
    from workbench.encoder.session import Grid

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verb `boundary`."""

    @app.command("boundary")
    def boundary(
        images: Annotated[str, Option(help="Images of one call, width x height in pixels, with commas.")] = "224x224",
        variants: Annotated[str, Option(help="Names with commas; empty: all; none: no variant.")] = "",
        depth: Annotated[int | None, Option(help="Blocks; left out: all on CUDA, 2 on the CPU.")] = None,
        width: Annotated[int | None, Option(help="Features; left out: all on CUDA, two heads on the CPU.")] = None,
        device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
        attention_backend: Annotated[str | None, Option(help="vLLM's name; left out: its choice.")] = None,
        repeats: Annotated[int, Option(help="Timed runs of each region, on CUDA.")] = 20,
        as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Find out what of ERNIE's encoder a graph can hold, and what stands in the way of the rest."""
        import dataclasses

        import msgspec

        from workbench.budgets import Configuration
        from workbench.encoder.engine import require_vllm

        grids = _grids(images)
        if repeats < 1:
            raise WorkbenchError(f"{repeats} repeats time nothing; give at least 1")
        require_vllm()
        from workbench.encoder.boundary import probe
        from workbench.encoder.parity.lab import lab_options
        from workbench.encoder.session import open_session

        options, _ = lab_options("ernie45_vl", device)
        options = dataclasses.replace(
            options,
            depth=depth or options.depth,
            width=width or options.width,
            attention_backend=attention_backend,
        )
        names = {"": None, "none": ()}.get(variants, tuple(variants.split(",")))
        with open_session(options, Configuration()) as session:
            report = probe(session, grids, names, repeats)
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            show(report)


def _grids(images: str) -> "list[Grid]":
    import numpy as np

    from workbench.grids import to_grids
    from workbench.models import model_facts

    sizes = []
    for image in images.split(","):
        width, _, height = image.strip().partition("x")
        if not (width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
            raise WorkbenchError(f"image {image!r} is not a size; write width x height in pixels, like 224x224")
        if not 0 < int(width) < 2**31 or not 0 < int(height) < 2**31:
            raise WorkbenchError(f"image {image!r} has a side that no image has; write sizes like 224x224")
        sizes.append((int(width), int(height), 1))
    found = to_grids(np.array(sizes, dtype=np.int32), model_facts("ernie45_vl")).grids
    return [(int(t), int(h), int(w)) for t, h, w in found]


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
            found.title,
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
