"""`workbench capture`: time and trace eager and graph encoding on this machine into a run folder."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from workbench.errors import WorkbenchError
from workbench.run import ARM_TITLES

if TYPE_CHECKING:
    from workbench.run import Run

REPLAYS = {"cuda_graph": "CUDA graphs", "static_replay": "static replay on the CPU, no launch times"}
Option = typer.Option


def register(app: typer.Typer) -> None:
    """Add the verb `capture`."""

    @app.command("capture")
    def capture(
        workload: Annotated[
            str, Option(help="A preset, a file, a folder of images, or {(height, width, frames): share}.")
        ],
        out: Annotated[Path, Option(help="The run folder to make.")],
        model: Annotated[str, Option(help="Which encoder.")] = "ernie45_vl",
        clamp: Annotated[bool, Option("--clamp", help="Clamp sizes as vLLM does, where the processor raises.")] = False,
        skip_bad: Annotated[bool, Option("--skip-bad", help="Leave out items that cannot be encoded.")] = False,
        budgets: Annotated[str, Option(help="Token budgets like 128,256; empty: vLLM's own.")] = "",
        max_items: Annotated[int, Option(help="Images or videos per replay; 0: vLLM's own.")] = 0,
        max_frames: Annotated[int | None, Option(help="Video frames per replay; left out: vLLM's own.")] = None,
        video_limit: Annotated[int, Option(help="Videos per prompt; vLLM's own default is 999.")] = 0,
        max_model_len: Annotated[int, Option(help="The server's, for inferred budgets.")] = 16_384,
        max_num_batched_tokens: Annotated[int, Option(help="The server's, for inferred budgets.")] = 8192,
        depth: Annotated[int | None, Option(help="Blocks of a reduced encoder.")] = None,
        width: Annotated[int | None, Option(help="Features of a reduced encoder.")] = None,
        dtype: Annotated[str, Option(help="bfloat16, float16 or float32.")] = "bfloat16",
        device: Annotated[str | None, Option(help="cuda, cuda:1 or cpu; left out: cuda if there is one.")] = None,
        attention_backend: Annotated[str | None, Option(help="vLLM's name; left out: its choice.")] = None,
        checkpoint: Annotated[Path | None, Option(help="Folder with weights; left out: dummy ones.")] = None,
        seed: Annotated[int, Option(help="Seed of dummy weights and inputs.")] = 0,
        repeats: Annotated[int, Option(help="Timed repeats per arm and distinct call.")] = 40,
        profiled_repeats: Annotated[int, Option(help="Traced repeats per arm and distinct call.")] = 2,
        traced_calls: Annotated[int, Option(help="How many of the measured calls to trace.")] = 2,
        max_calls: Annotated[int, Option(help="How many of the workload's distinct calls to measure.")] = 8,
        warmup: Annotated[int, Option(help="Repeats before timing.")] = 5,
        name: Annotated[str | None, Option(help="Name of the run; left out: the folder's.")] = None,
        overwrite: Annotated[bool, Option("--overwrite", help="Replace what the folder holds.")] = False,
        nsys: Annotated[bool, Option("--nsys", help="Print the Nsight Systems command line, and stop.")] = False,
        watched: Annotated[
            bool, Option("--watched", help="Leave tracing to a tool outside: ranges only, as --nsys uses it.")
        ] = False,
        as_json: Annotated[bool, Option("--json", help="Print the run as one JSON object.")] = False,
    ) -> None:
        """Time eager as served, eager fallback and graph, trace them, and write a run folder.

        With the CPU engine graphs are static replays: packing, padding and outputs, never launch times.
        """
        if nsys:
            print(nsys_line(sys.argv[1:], out, as_json))
            return
        from workbench.budgets import Configuration, parse_budgets
        from workbench.models import model_facts
        from workbench.profiler import capture as run_capture
        from workbench.progress import progress_bar
        from workbench.sources import Options, load_workload

        configuration = Configuration(parse_budgets(budgets), max_items, max_frames)
        loaded = load_workload(workload, model_facts(model), Options(clamp=clamp, skip_bad=skip_bad))
        from workbench.encoder.session import SessionOptions

        options = SessionOptions(
            model=model,
            depth=depth,
            width=width,
            dtype=dtype,
            seed=seed,
            checkpoint=checkpoint,
            device=device,
            video_limit=video_limit,
            attention_backend=attention_backend,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        with progress_bar() as progress:
            run = run_capture(
                options,
                configuration,
                loaded,
                out,
                repeats=repeats,
                profiled_repeats=profiled_repeats,
                traced_calls=traced_calls,
                max_calls=max_calls,
                warmup=warmup,
                progress=progress,
                name=name,
                overwrite=overwrite,
                watched=watched,
            )
        if as_json:
            print(msgspec.json.encode(run).decode())
        else:
            show(run, out)


def nsys_line(arguments: Sequence[str], out: Path, as_json: bool = False) -> str:
    """Return the shell line that runs this capture under Nsight Systems; the report lies beside the run folder.

    Node by node (`--cuda-graph-trace=node`), because a graph is one opaque bar otherwise. Only what lies between
    cudaProfilerStart and Stop is recorded, so the un-profiled timings of the run stay un-profiled.

    Raises:
        WorkbenchError: there is no `nsys` here.
    """
    if shutil.which("nsys") is None:
        raise WorkbenchError(
            "nsys is not on the PATH; install Nsight Systems, or leave --nsys out for torch's profiler"
        )
    kept = [argument for argument in arguments if argument not in ("--nsys", "--json")]
    line = shlex.join(
        [
            *("nsys", "profile", "--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node"),
            *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--output", f"{out}.nsys-rep"),
            *(sys.executable, "-m", "workbench", *kept, "--watched"),
        ]
    )
    return msgspec.json.encode({"command": line}).decode() if as_json else line


def show(run: "Run", out: Path) -> None:
    """Print what was measured: every arm and call, the baselines over graph, equality, failures, notes."""
    from rich.console import Console
    from rich.table import Table

    from workbench.stats import ratio, summary

    console = Console()
    table = Table(
        title=f"{run.name}: {run.model.key}, {REPLAYS[run.replay]}; ms, ratio of medians", title_justify="left"
    )
    for column in ("call", "arm"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "mean", "median", "std", "P99", "to graph"):
        table.add_column(column, justify="right")
    graphs = {timing.call: timing for timing in run.timings if timing.arm == "graph"}
    for timing in run.timings:
        found = summary(timing.wall_us)
        speedup = ""
        if timing.arm != "graph" and timing.call in graphs:
            speedup = f"{ratio(timing.wall_us, graphs[timing.call].wall_us, 'median').value:.2f}x"
        times = (f"{us / 1e3:.2f}" for us in (found.mean, found.median, found.std, found.p99))
        table.add_row(str(timing.call), ARM_TITLES[timing.arm], str(found.n), *times, speedup)
    console.print(table)
    for line in remarks(run):
        console.print(line, markup=False)
    console.print(f"written to {out}", markup=False)


def remarks(run: "Run") -> list[str]:
    """Return what a table of times does not say, one sentence each."""
    lines = [f"{run.graph_hits} items in replays, {run.graph_misses} in eager fallbacks"]
    equal = [found for found in run.equality if found.bit_equal]
    lines.append(f"graph's outputs are bit-equal to a baseline's in {len(equal)} of {len(run.equality)} comparisons")
    differing = [found.relative_rms for found in run.equality if found.relative_rms is not None]
    if len(equal) < len(run.equality) and differing:
        lines[-1] += f", the largest relative RMS is {max(differing):.2g}"
    if not all(found.finite for found in run.equality):
        lines.append("some outputs are NaN or infinite")
    lines += [
        f"{ARM_TITLES[failure.arm]} failed on call {failure.call} "
        f"({failure.cause or 'no known cause'}): {failure.error}: {failure.message}"
        for failure in run.failures
    ]
    return lines + run.notes
