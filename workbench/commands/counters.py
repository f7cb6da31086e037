"""`workbench counters`: hardware counters of one encoder call, eager and by graph, per kernel family."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from workbench.encoder.counters import Counters

Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verb `counters`."""
    app.command("counters")(counters)


def counters(
    call: Annotated[str, Option(help="The call's items in pixels, WIDTHxHEIGHT[*COUNT], with commas.")],
    out: Annotated[Path, Option(help="The new folder.")],
    model: Annotated[str, Option(help="Which encoder.")] = "ernie45_vl",
    budgets: Annotated[str, Option(help="Token budgets like 128,256; empty: vLLM's own.")] = "",
    max_items: Annotated[int, Option(help="Images per replay; 0: vLLM's own.")] = 0,
    depth: Annotated[int | None, Option(help="Blocks of a reduced encoder.")] = None,
    width: Annotated[int | None, Option(help="Features of a reduced encoder.")] = None,
    seconds: Annotated[float, Option(help="An arm is ended after this time.")] = 300.0,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what the folder holds.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count bytes, tensor-core and multiprocessor cycles of the kernels of eager as served and of graph replays."""
    from workbench.budgets import Configuration, parse_budgets
    from workbench.commands.parallel import parse_calls
    from workbench.encoder.counters import collect
    from workbench.encoder.session import SessionOptions
    from workbench.errors import WorkbenchError

    (grids,), modality = parse_calls([call], model)
    if modality != "image":
        raise WorkbenchError("counters are read for images; leave the frames out")
    options = SessionOptions(model=model, depth=depth, width=width)
    configuration = Configuration(parse_budgets(budgets), max_items)
    counted = collect(options, configuration, grids, out, overwrite=overwrite, seconds=seconds)
    if as_json:
        import msgspec

        print(msgspec.json.encode(counted).decode())
        return
    _show(counted)


def _show(counted: "Counters") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"counters of {counted.model}", title_justify="left")
    for column in ("arm", "family", "kernels", "ms", "MB", "TB/s", "tensor", "busy", "of roofline"):
        table.add_column(column)
    for arm in counted.arms:
        for row in counted.families(arm):
            shares = (f"{row.tensor:.0%}", f"{row.active:.0%}", "-" if row.roofline is None else f"{row.roofline:.0%}")
            figures = (f"{row.duration_us / 1e3:.3f}", f"{row.dram_bytes / 1e6:.1f}", f"{row.bandwidth / 1e12:.2f}")
            table.add_row(arm.arm, row.family, str(row.kernels), *figures, *shares)
    Console().print(table)
