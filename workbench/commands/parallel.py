"""`workbench parallel`: one encoder call over several GPUs, beside one GPU, by graphs and eagerly."""

import enum
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.collectives import Ranks
    from workbench.encoder.parallel import Grid, ParallelRun, RankCall

Option = typer.Option
_ITEMS = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(?:\*(\d+))?")


class TpMode(enum.StrEnum):
    """vLLM's `mm_encoder_tp_mode`."""

    data = "data"
    weights = "weights"


def register(app: typer.Typer) -> None:
    """Add the verb `parallel`."""
    app.command("parallel")(parallel)


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
    depth: Annotated[int | None, Option(help="Blocks of a reduced encoder.")] = None,
    width: Annotated[int | None, Option(help="Features of a reduced encoder.")] = None,
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
    from workbench.encoder.parallel import agrees, balance, run_parallel, trace_ranks
    from workbench.encoder.session import SessionOptions

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
            modality=modality,  # type: ignore[arg-type]  # one of the two
            repeats=repeats,
            overwrite=overwrite,
            seconds=seconds,
            progress=progress,
        )
    traced, doubts = trace_ranks(out, run)
    if as_json:
        import msgspec

        found = {"run": run, "balance": balance(run), "traced": traced, "warnings": doubts}
        print(msgspec.json.encode(found).decode())
    else:
        _show(run, traced, doubts)
    if not agrees(run):
        raise typer.Exit(1)


def parse_calls(texts: list[str], model: str) -> "tuple[list[list[Grid]], str]":
    """Return the patch grids of calls like `336x336*8` or `896x896,224x224*3`, and their modality.

    Raises:
        WorkbenchError: not of this form, images and videos together, or a size that the model does not take.
    """
    import numpy as np

    from workbench.grids import check_sizes, to_grids
    from workbench.models import model_facts

    facts = model_facts(model)
    calls, kinds = [], set()
    for text in texts:
        sizes: list[tuple[int, int, int]] = []
        for part in text.split(","):
            found = _ITEMS.fullmatch(part.strip())
            if found is None or int(found[4] or 1) > 10_000:
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
    from rich.console import Console
    from rich.table import Table

    from workbench.commands.analyze import ranks_table
    from workbench.published import TWO_GPUS

    timed = run.replay == "cuda_graph"
    table = Table(title=f"{len(run.ranks)} ranks, {run.ranks[0].model.key}, {run.tp_mode}", title_justify="left")
    rows = _weights_rows(run) if run.tp_mode == "weights" else _data_rows(run)
    for column in (*rows[0], *(_times(run, 0) if timed else ())):
        table.add_column(column)
    for call, row in enumerate(rows):
        table.add_row(*row.values(), *(_times(run, call).values() if timed else ()))
    Console().print(table)
    if not timed:
        print("static replay on the CPU: times mean nothing and are left out")
    elif ranks is not None:
        Console().print(ranks_table(ranks))
        published = TWO_GPUS.get((run.ranks[0].model.key, run.modality)) if run.tp_mode == "data" else None
        if published is not None:
            off, on = published.rows
            print(
                f"{published.source} reports on {published.gpu}, {published.workload}: eager over graph "
                f"{off.mean / on.mean:.2f} in the mean and {off.p99 / on.p99:.2f} at P99 of encoder_forward_ms per "
                "request; only ratios compare"
            )
    for doubt in doubts:
        print(f"warning: {doubt}")


def _data_rows(run: "ParallelRun") -> list[dict[str, str]]:
    """How each call was shared, and how far its outputs are from one GPU's, where ranks share items."""
    from workbench.encoder.parallel import balance

    return [
        {
            "call": str(row.call),
            "items per rank": "/".join(map(str, row.items)),
            "patches per rank": "/".join(map(str, row.patches)),
            "imbalance": f"{row.imbalance:.2f}",
            "padded": f"{row.padded:.0%}",
            "relative RMS": _distance([rank.calls[row.call] for rank in run.ranks]),
        }
        for row in balance(run)
    ]


def _weights_rows(run: "ParallelRun") -> list[dict[str, str]]:
    """How far each call's outputs are from one GPU's, where ranks share weights."""
    return [
        {
            "call": str(call),
            "items": str(len(share.items)),
            "patches": str(share.patches),
            "relative RMS": _distance([rank.calls[call] for rank in run.ranks]),
            "of eager": "not finite" if share.eager_rms is None else f"{share.eager_rms:.4f}",
        }
        for call, share in enumerate(run.ranks[0].calls)
    ]


def _distance(shares: "list[RankCall]") -> str:
    """The worst rank's distance from one GPU's outputs."""
    if all(share.equal for share in shares):
        return "0, same bits"
    worst = [share.relative_rms for share in shares]
    known = [value for value in worst if value is not None]
    return f"{max(known):.4f}" if len(known) == len(worst) else "not finite"


def _times(run: "ParallelRun", call: int) -> dict[str, str]:
    """Median milliseconds per arm; a call is over when its last rank is."""
    from statistics import median

    from workbench.encoder.parallel import ARMS, balance

    shares = [rank.calls[call] for rank in run.ranks]
    times = {arm: max(median(share.wall_us[arm]) for share in shares) for arm in ARMS if shares[0].wall_us[arm]}
    named: dict[str, float] = {str(arm): value for arm, value in times.items()}
    if run.tp_mode == "data":
        named["waiting"] = max(balance(run)[call].waiting_us)
    return {name: f"{value / 1e3:.2f} ms" for name, value in named.items()}
