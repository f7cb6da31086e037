"""`workbench parallel` and `ranks`: an encoder call over several GPUs, beside one GPU, by graphs and eagerly."""

import enum
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.table import Table

    from workbench.collectives import Ranks
    from workbench.models import Modality
    from workbench.parallel import Grid, ParallelRun

Option = typer.Option
_ITEMS = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(?:\*(\d+))?")


class TpMode(enum.StrEnum):
    """vLLM's `mm_encoder_tp_mode`."""

    data = "data"
    weights = "weights"


def register(app: typer.Typer) -> None:
    """Add the verbs `parallel` and `ranks`."""
    app.command("parallel")(parallel)
    app.command("ranks")(show_ranks)


def parallel(
    call: Annotated[
        list[str], Option(help="A call's items in pixels, WIDTHxHEIGHT[xFRAMES][*COUNT], with commas; repeatable.")
    ],
    out: Annotated[Path, Option(help="The new folder.")],
    ranks: Annotated[int, Option(help="Processes, one GPU each.")] = 2,
    model: Annotated[str, Option(help="Which encoder: glm4_1v, qwen2_5_vl, qwen3_vl or ernie45_vl.")] = "glm4_1v",
    tp_mode: Annotated[
        TpMode, Option(help="vLLM's mm_encoder_tp_mode: ranks share a call's items, or the layers' weights.")
    ] = TpMode.data,
    budgets: Annotated[str, Option(help="Token budgets like 128,256; empty: vLLM's own.")] = "",
    max_items: Annotated[int, Option(help="Images or videos per replay; 0: vLLM's own.")] = 0,
    max_frames: Annotated[int | None, Option(help="Video frames per replay; left out: vLLM's own.")] = None,
    repeats: Annotated[int, Option(help="Timed samples per arm and call.")] = 20,
    depth: Annotated[int | None, Option(help="Blocks; left out: all on CUDA, 2 on the CPU.")] = None,
    width: Annotated[
        int | None, Option(help="Features; left out: all on CUDA, on the CPU two heads or those that the ranks share.")
    ] = None,
    device: Annotated[str | None, Option(help="cuda or cpu; left out: cuda if there is one.")] = None,
    disable_custom_all_reduce: Annotated[
        bool, Option("--disable-custom-all-reduce", help="As in `vllm serve`: reduce through NCCL only.")
    ] = False,
    seconds: Annotated[float, Option(help="The ranks are ended after this time.")] = 600.0,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what the folder holds.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Share calls over ranks as vLLM's vision encoders do, and time it beside one GPU.

    Exit code 1: the outputs differ from those of one GPU by more than rounding.
    """
    from workbench.budgets import Configuration, parse_budgets
    from workbench.progress import progress_bar

    calls, modality = parse_calls(call, model)
    configuration = Configuration(parse_budgets(budgets), max_items, max_frames)
    from workbench.encoder.parallel import run_parallel
    from workbench.encoder.session import SessionOptions

    depth, width = size_here(model, depth, width, device, heads=ranks if tp_mode is TpMode.weights else 2)
    options = SessionOptions(
        model=model, depth=depth, width=width, device=device, video_limit=1 if modality == "video" else 0
    )
    with progress_bar() as progress:
        run = run_parallel(
            options,
            configuration,
            calls,
            ranks,
            out,
            tp_mode=tp_mode.value,
            custom_all_reduce=not disable_custom_all_reduce,
            modality=modality,
            repeats=repeats,
            overwrite=overwrite,
            seconds=seconds,
            progress=progress,
        )
    _tell(out, run, as_json)


def size_here(
    model: str, depth: int | None, width: int | None, device: str | None, heads: int = 2
) -> tuple[int | None, int | None]:
    """Return blocks and features for this machine: on the CPU a small encoder where none is asked, told on stderr.

    Args:
        model: registry key.
        depth, width: as asked; None: not.
        device: as asked; None: CUDA where there is a GPU.
        heads: the fewest attention heads of the small encoder.
    """
    from workbench.environment import gpus
    from workbench.models import model_facts, small_size

    on_cpu = not gpus() if device is None else device.startswith("cpu")
    if not on_cpu or (depth is not None and width is not None):
        return depth, width
    blocks, features = small_size(model_facts(model), max(heads, 2))
    depth, width = blocks if depth is None else depth, features if width is None else width
    print(
        f"on the CPU: {depth} blocks of {width} features; --depth and --width choose another size, up to the whole "
        "encoder",
        file=sys.stderr,
    )
    return depth, width


def show_ranks(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `workbench parallel` made.")],
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what `workbench parallel` measured, from its folder.

    Exit code 1: the outputs differ from those of one GPU by more than rounding.
    """
    from workbench.parallel import read_parallel

    _tell(folder, read_parallel(folder), as_json)


def _tell(folder: Path, run: "ParallelRun", as_json: bool) -> None:
    from workbench.parallel import agrees, balance, trace_ranks

    traced, doubts = trace_ranks(folder, run)
    agreed = agrees(run)
    if as_json:
        import msgspec

        found = {"run": run, "balance": balance(run), "agrees": agreed, "traced": traced, "warnings": doubts}
        print(msgspec.json.encode(found).decode())
    else:
        _show(run, traced, doubts)
    if not agreed:
        raise typer.Exit(1)


def parse_calls(texts: list[str], model: str) -> "tuple[list[list[Grid]], Modality]":
    """Return the patch grids of calls like `336x336*8` or `896x896,224x224*3`, and their modality.

    Raises:
        WorkbenchError: not of this form, images and videos together, or a size that the model does not take.
    """
    import numpy as np

    from workbench.grids import check_sizes, to_grids
    from workbench.models import model_facts

    facts = model_facts(model)
    calls: list[list[Grid]] = []
    kinds: set[Modality] = set()
    for text in texts:
        sizes: list[tuple[int, int, int]] = []
        for part in text.split(","):
            found = _ITEMS.fullmatch(part.strip())
            if found is None or not 1 <= int(found[4] or 1) <= 10_000:
                raise WorkbenchError(f"{part.strip()!r} is no item; write WIDTHxHEIGHT[xFRAMES][*COUNT], as 336x336*8")
            width, height, frames, count = found.groups()
            sizes += [(int(width), int(height), int(frames or 1))] * int(count or 1)
            kinds.add("video" if int(frames or 1) > 1 else "image")
        made = to_grids(check_sizes(np.array(sizes), f"item {{}} of {text}".format), facts)
        if (made.failed | made.refused).any():
            raise WorkbenchError(f"{facts.title} does not take a size of {text!r}; choose another")
        calls.append([(int(t), int(h), int(w)) for t, h, w in made.grids.tolist()])
    if len(kinds) > 1:
        raise WorkbenchError("images and videos are calls of their own in vLLM; give them to two runs")
    return calls, kinds.pop()


def _show(run: "ParallelRun", ranks: "Ranks | None", doubts: list[str]) -> None:
    """Print tables that a terminal of 80 columns shows whole."""
    from rich.console import Console

    from workbench.commands.analyze import plain
    from workbench.parallel import judgement

    console = Console()
    timed = run.replay == "cuda_graph"
    shared = "each call's items" if run.tp_mode == "data" else "the layers' weights"
    print(f"{run.ranks[0].model.key}: {len(run.ranks)} ranks share {shared}")
    for table in _tables(run, ranks, timed):
        console.print(table)
    if not timed:
        print("static replay on the CPU: times mean nothing and are left out")
    print(judgement(run))
    if timed:
        _show_published(run)
    for doubt in doubts:
        print(f"warning: {plain(doubt)}")


def _tables(run: "ParallelRun", ranks: "Ranks | None", timed: bool) -> "Iterator[Table]":
    from workbench.parallel import clocks, exchanges, shares

    found = shares(run)
    if timed:
        yield _table("Milliseconds of a call in the median; several GPUs: the slowest rank's", _times(run))
    else:
        yield _table("Calls", [{"call": row["call"], "items": row["items"]} for row in found])
    if "padded" in found[0]:
        heads = ["items per rank", "patches per rank", "imbalance", "padded", *["waiting ms per rank"] * timed]
        yield _table("Shares", [{"call": row["call"]} | {name: row[name] for name in heads} for row in found])
    heads = [name for name in ("same replays", "same bits", "relative RMS", "eager relative RMS") if name in found[0]]
    yield _table(
        "Outputs beside one GPU's", [{"call": row["call"]} | {name: row[name] for name in heads} for row in found]
    )
    if timed and ranks is not None:
        yield _table("Collectives of one traced call", [_without(row, "items") for row in exchanges(run, ranks)])
        yield _table("Clocks against the first rank's", clocks(ranks))


def _without(row: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != name}


def _show_published(run: "ParallelRun") -> None:
    from workbench.parallel import beside_published

    for row in beside_published(run)[:1]:
        print(
            f"{row['source']} reports on {row['GPUs']}, {row['workload']}: eager over graph "
            f"{row['eager over graph, mean']:.2f} in the mean and {row['at P99']:.2f} at P99 of encoder_forward_ms per "
            "request; only ratios compare"
        )


def _times(run: "ParallelRun") -> list[dict[str, object]]:
    """Median of every arm, a column each, and how many times as fast graphs are over several GPUs as on one."""
    from workbench.parallel import ARMS, times

    found, rows = times(run), []
    for first in range(0, len(found), len(ARMS)):
        arms = found[first : first + len(ARMS)]
        row = {"call": arms[0]["call"]} | {f"{arm['arm']} ms": arm["median ms"] for arm in arms}
        rows.append(row | {"graph vs 1 GPU": arms[0]["vs 1 GPU"], "items": arms[0]["items"]})
    return rows


def _table(title: str, rows: "Sequence[dict[str, object]]") -> "Table":
    """A narrow table: headings break at spaces, but not before "GPU"; a call's items after commas."""
    from rich.box import SIMPLE
    from rich.table import Table

    from workbench.parallel import shown

    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    for name in rows[0] if rows else ():
        justify: Literal["left", "right"] = "left" if name == "items" else "right"
        head = re.sub(r" (?!GPU)", "\n", name)
        table.add_column(head, justify=justify, vertical="bottom", no_wrap=name != "items")
    for row in rows:
        table.add_row(*(shown(name, value).replace(",", ", ") for name, value in row.items()))
    return table
