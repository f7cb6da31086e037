"""One encoder call over several GPUs, in both of vLLM's ways (`mm_encoder_tp_mode`).

    from workbench.encoder.parallel import run_parallel

    run = run_parallel(SessionOptions("glm4_1v"), Configuration((64, 2048), 8), [[(1, 24, 24)] * 8], 2, Path("dp"))

"data": every rank is a process with all of the encoder. The real `EncoderCudaGraphManager` shards a call by patches
(`_dp_shard`), each rank replays its share, and `_dp_gather` pads the shares to the largest and gathers them.

"weights": every rank has a share of each layer and runs the whole call. The all-reduces lie inside the graph, which
is captured in vLLM's own `graph_capture`.

Four arms run the same calls: over all ranks and on one GPU with all weights, by graphs and eagerly as served. On the
CPU the ranks talk through gloo and graphs are static replays, so there only outputs, shares and padding mean something.

Written: `parallel.json` and per rank a folder with `rank.json` and a Kineto trace whose rows carry the rank.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import workbench
from workbench.budgets import Configuration
from workbench.errors import WorkbenchError
from workbench.files import read_json, refuse_occupied, replacing_folder, write_json
from workbench.lifeline import end_with
from workbench.parallel import (
    ARMS,
    RESULT_FILE,
    SCHEMA_VERSION,
    Grid,
    ParallelArm,
    ParallelRun,
    Rank,
    RankCall,
    rank_folder,
)
from workbench.progress import Progress, silent
from workbench.run import Record

if TYPE_CHECKING:
    from workbench.encoder.engine import TpMode
    from workbench.encoder.session import EncoderInputs, EncoderSession, SessionOptions

_SETTLE_SECONDS = 2.0  # after one rank has failed, until the others are ended
_POLL_SECONDS = 0.1
_MOST_RANKS = 16  # each is a process with a vLLM of its own, on the CPU too


class Job(Record, frozen=True):
    """What a rank is to do; every rank gets the same."""

    options: dict[str, Any]
    budgets: list[int]
    max_items: int
    max_frames: int | None
    calls: list[list[Grid]]
    modality: Literal["image", "video"]
    repeats: int
    size: int
    address: str
    tp_mode: Literal["data", "weights"]
    custom_all_reduce: bool


# The launcher ---------------------------------------------------------------------------------------------------


def run_parallel(
    options: "SessionOptions",
    configuration: Configuration,
    calls: Sequence[Sequence[Grid]],
    ranks: int,
    out: Path,
    *,
    tp_mode: "TpMode" = "data",
    custom_all_reduce: bool = True,
    modality: Literal["image", "video"] = "image",
    repeats: int = 20,
    overwrite: bool = False,
    seconds: float = 600.0,
    progress: Progress = silent,
    on_start: Callable[[list["subprocess.Popen[bytes]"]], None] | None = None,
    change: Callable[[int, Job], Job] | None = None,
) -> ParallelRun:
    """Start one process a rank, and return what they measured; `out` appears whole or not at all.

    Args:
        calls: (t, h, w) of each call's items.
        tp_mode: vLLM's `mm_encoder_tp_mode`.
        custom_all_reduce: False is a server's `--disable-custom-all-reduce`.
        repeats: samples per arm and call.
        seconds: after which the ranks are ended.
        on_start: told the processes, in rank order.
        change: makes rank r's job another; for tests of ranks that do not agree.

    Raises:
        WorkbenchError: fewer than two ranks, more ranks than GPUs, a model without data parallelism, a call on which
            vLLM fails, ranks that do not agree, a rank that fails or dies.
    """
    from workbench.environment import environment, gpus

    on_gpus = _check(options, ranks, calls, len(gpus()), tp_mode)
    if repeats < 1:
        raise WorkbenchError(f"{repeats} repeats measure nothing; ask for 1 or more")
    _check_plan(options, configuration, calls, ranks if tp_mode == "data" else 1)
    refuse_occupied(out, overwrite)
    machine = environment()
    with replacing_folder(out, overwrite) as folder, tempfile.TemporaryDirectory() as scratch:
        job = _job(options, configuration, calls, modality, repeats, ranks, tp_mode, custom_all_reduce)
        jobs = [Path(scratch) / f"{rank}.json" for rank in range(ranks)]
        for rank, path in enumerate(jobs):
            write_json(path, change(rank, job) if change else job)
        _run_ranks(jobs, folder, Path(scratch), seconds, progress, on_start)
        measured = [read_json(rank_folder(folder, rank) / "rank.json", Rank) for rank in range(ranks)]
        run = ParallelRun(
            schema_version=SCHEMA_VERSION,
            workbench=workbench.__version__,
            environment=machine,
            replay="cuda_graph" if on_gpus else "static_replay",
            tp_mode=tp_mode,
            custom_all_reduce=custom_all_reduce,
            modality=modality,
            calls=[list(call) for call in calls],
            ranks=measured,
        )
        write_json(folder / RESULT_FILE, run)
    return run


def _check(
    options: "SessionOptions", ranks: int, calls: Sequence[Sequence[Grid]], gpus: int, tp_mode: "TpMode" = "data"
) -> bool:
    """Refuse what cannot run; return whether it runs on GPUs."""
    from workbench.encoder.registry import reduced_facts
    from workbench.models import model_facts

    facts = model_facts(options.model)
    if tp_mode == "data" and facts.extra.get("single_rank"):
        raise WorkbenchError(
            f'vLLM has no mm_encoder_tp_mode="data" for {facts.title}: its vision tower is sharded by weights; use the '
            "mode weights, or glm4_1v, qwen2_5_vl or qwen3_vl"
        )
    if ranks < 2:
        raise WorkbenchError(f"{ranks} ranks share nothing; ask for 2 or more")
    facts = reduced_facts(options.model, options.depth, options.width)
    shared = {"attention heads": facts.heads, "MLP features": facts.mlp_width, "output features": facts.out_width}
    for what, number in shared.items():
        if tp_mode == "weights" and number % ranks:
            raise WorkbenchError(
                f"{ranks} ranks cannot share {number} {what} evenly; ask for a number of ranks that divides them"
            )
    if not calls or not all(calls):
        raise WorkbenchError("there is no call to share, or one without items; give at least one grid per call")
    on_gpus = gpus > 0 if options.device is None else options.device.startswith("cuda")
    if on_gpus and ranks > gpus:
        raise WorkbenchError(
            f"{ranks} ranks need {ranks} GPUs and {gpus} {'is' if gpus == 1 else 'are'} visible; ask for fewer ranks, "
            "or for the device cpu"
        )
    if ranks > _MOST_RANKS:
        raise WorkbenchError(f"{ranks} ranks are more than one host takes; ask for {_MOST_RANKS} or fewer")
    return on_gpus


def _check_plan(
    options: "SessionOptions", configuration: Configuration, calls: Sequence[Sequence[Grid]], ranks: int
) -> None:
    """Refuse calls on which vLLM 0.33 fails, shared or alone, such as videos of more frames than were captured."""
    import numpy as np

    from workbench.advisor import failure
    from workbench.budgets import resolve
    from workbench.encoder.session import server_limits
    from workbench.models import model_facts
    from workbench.planner import plan

    facts = model_facts(options.model)
    resolved = resolve(configuration, server_limits(options, facts))
    framed = facts.sequences == "frame"
    for number, call in enumerate(calls):
        tokens = np.array([facts.tokens(grid) for grid in call])
        frames = np.array([grid[0] for grid in call]) if framed else None
        patches = np.array([t * h * w for t, h, w in call])
        for dp in sorted({1, ranks}):
            reason = failure(facts, plan(tokens, np.array([0, len(call)]), resolved, frames, dp, patches))
            if reason:
                raise WorkbenchError(f"call {number}: {reason}; change the budgets, the frames or the call")


def _job(
    options: "SessionOptions",
    configuration: Configuration,
    calls: Sequence[Sequence[Grid]],
    modality: Literal["image", "video"],
    repeats: int,
    ranks: int,
    tp_mode: "TpMode",
    custom_all_reduce: bool,
) -> Job:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Job(
        options=options.plain(),
        budgets=list(configuration.budgets),
        max_items=configuration.max_items,
        max_frames=configuration.max_frames,
        calls=[list(call) for call in calls],
        modality=modality,
        repeats=repeats,
        size=ranks,
        address=f"tcp://127.0.0.1:{port}",
        tp_mode=tp_mode,
        custom_all_reduce=custom_all_reduce,
    )


def _run_ranks(
    jobs: Sequence[Path],
    folder: Path,
    scratch: Path,
    seconds: float,
    progress: Progress,
    on_start: Callable[[list["subprocess.Popen[bytes]"]], None] | None,
) -> None:
    """Run all ranks to their end. When one fails, the others are ended and its reason is raised."""
    from workbench.encoder.bootstrap import child_environment

    environment = child_environment() | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_DIST_IDENT": scratch.name,  # names the shared memory of vLLM's CPU groups; its own worker sets it too
    }
    processes: list[subprocess.Popen[bytes]] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.callback(_clear_shared_memory, scratch.name)
        for rank, path in enumerate(jobs):
            log = stack.enter_context((scratch / f"{rank}.log").open("wb"))
            where = str(rank_folder(folder, rank))
            command = [sys.executable, "-m", __name__, str(path), str(rank), where, str(os.getpid())]
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            stack.callback(_end, process)
            processes.append(process)
        if on_start is not None:
            on_start(processes)
        failed: dict[int, float] = {}
        while any(process.poll() is None for process in processes):
            now = time.monotonic() - began
            for rank, process in enumerate(processes):
                if process.poll() not in (None, 0):
                    failed.setdefault(rank, now)
            first = min(failed.values(), default=now)
            # A rank that says why it failed may come after one that was only cut off by it.
            if now > seconds or (failed and now - first > _SETTLE_SECONDS):
                break
            progress(f"{len(processes)} ranks", min(now / seconds, 0.99))
            time.sleep(_POLL_SECONDS)
        codes = [process.poll() for process in processes]
    if any(codes) or None in codes:
        raise WorkbenchError(_cause(codes, scratch, seconds))


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _clear_shared_memory(ident: str) -> None:
    """Remove what killed ranks left of vLLM's CPU groups: 4 MiB of memory each, until the machine restarts."""
    for left in Path("/dev/shm").glob(f"{ident}-*"):  # noqa: S108  not a file of ours to be guessed
        left.unlink(missing_ok=True)


def _cause(codes: Sequence[int | None], scratch: Path, seconds: float) -> str:
    """Say which rank failed and why: one with a reason of its own before those that were cut off."""
    reasons: dict[int, str] = {}
    for rank, code in enumerate(codes):
        if code in (None, 0):
            continue
        assert code is not None
        lines = (scratch / f"{rank}.log").read_text(errors="replace").strip().splitlines()
        told = next((line.split(_MARK, 1)[1] for line in lines if _MARK in line), None)
        if told is not None:
            return f"rank {rank}: {told}"
        if code < 0:
            reasons[rank] = f"rank {rank} was ended by {signal.Signals(-code).name}; the other ranks were ended"
        else:
            reasons.setdefault(rank, f"rank {rank} failed: {lines[-1] if lines else f'exit code {code}'}")
    killed = [reason for reason in reasons.values() if "was ended by" in reason]
    if reasons:
        return (killed or list(reasons.values()))[0]
    return f"the ranks did not finish in {seconds:.0f} s and were ended; lower the repeats or the calls"


# One rank -------------------------------------------------------------------------------------------------------

_MARK = "workbench rank: "  # before the sentence of a WorkbenchError in a rank's log


def rank_main(job_file: Path, rank: int, folder: Path) -> None:
    """Run one rank's job and write its folder. The processes of `run_parallel` call it."""
    from workbench.encoder import engine
    from workbench.encoder.session import SessionOptions, open_session

    job = read_json(job_file, Job)
    engine.require_vllm()
    device = job.options["device"] or engine.choose_device(None).type
    place = engine.Place(rank, job.size, job.address, job.tp_mode, job.custom_all_reduce)
    options = SessionOptions.from_plain(job.options | {"device": f"cuda:{rank}" if device == "cuda" else device}, place)
    configuration = Configuration(tuple(job.budgets), job.max_items, job.max_frames)
    with open_session(options, configuration) as session:
        _agree(session, job)
        session.capture()
        with session.alone(configuration) as alone:
            folder.mkdir()
            calls = [session.inputs(call, job.modality, seed=number) for number, call in enumerate(job.calls)]
            measured = [_measure(session, alone, inputs, job.repeats) for inputs in calls]
            trace = _trace(session, calls, folder)
        write_json(
            folder / "rank.json",
            Rank(rank=rank, model=session.model_record, config=session.config_record, calls=measured, trace=trace),
        )


def _agree(session: "EncoderSession", job: Job) -> None:
    """Refuse ranks that were not asked for the same: their shares would not fit together, or worse, hang.

    Raises:
        WorkbenchError: a rank differs from rank 0, and in what.
    """
    import torch

    place = session.options.place
    assert place is not None
    model = session.model_record
    own = {
        "model": f"{model.key} of depth {model.depth}, width {model.width}",
        "weights": model.weights_fingerprint,
        "budgets": str(list(session.manager.token_budgets)),
        "max items": str(session.manager.max_batch_size),
        "max frames": str(session.manager.max_frames_per_batch),
        "calls": str(job.calls),
        "repeats": str(job.repeats),
        "mode": job.tp_mode,
    }
    everyone: list[Any] = [None] * place.size
    torch.distributed.all_gather_object(everyone, own)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise WorkbenchError(
                    f"rank {rank} has other {name} than rank 0 ({value[:80]}, not {everyone[0][name][:80]}); give "
                    "every rank the same"
                )


def _measure(session: "EncoderSession", alone: Any, inputs: "EncoderInputs", repeats: int) -> RankCall:
    """Run one call in all arms: once for what it gives, then for its times."""
    import torch

    from workbench.encoder.parity.metrics import compare

    arms: dict[ParallelArm, Callable[[], Any]] = {
        "graph_ranks": lambda: session.graph(inputs),
        "graph_one": lambda: alone.execute(inputs.mm_kwargs),
        "eager_ranks": lambda: session.eager_served(inputs),
        "eager_one": lambda: _eager_one(session, inputs),
    }
    shard: dict[str, Any] = {"items": list(range(len(inputs.grids))), "rows": 0}
    with torch.inference_mode():
        with _noting(session, shard), session.watch() as batches:
            together = torch.cat(arms["graph_ranks"]())
        graphs = compare(together, torch.cat(list(arms["graph_one"]())))
        eager = [torch.cat(list(arms[arm]())) for arm in ("eager_ranks", "eager_one")]
    gathers: list[float] = []
    wall: dict[ParallelArm, list[float]] = {arm: [] for arm in ARMS}
    with _timed_gathers(session, gathers):
        for number in range(repeats + 1):
            for arm in ARMS if number % 2 else ARMS[::-1]:
                gathers_before = len(gathers)
                wall[arm].append(_time(session, arms[arm]))
                if number == 0:  # warm-up
                    del gathers[gathers_before:]
    for samples in wall.values():
        del samples[0]
    return RankCall(
        items=shard["items"],
        patches=sum(t * h * w for t, h, w in (inputs.grids[item] for item in shard["items"])),
        tokens=sum(inputs.tokens[item] for item in shard["items"]),
        gathered_rows=shard["rows"],
        batches=list(batches),
        equal=graphs.bit_equal,
        max_abs=graphs.max_abs,
        relative_rms=graphs.relative_rms,
        eager_rms=compare(*eager).relative_rms,
        wall_us=wall,
        gather_us=gathers,
    )


def _eager_one(session: "EncoderSession", inputs: "EncoderInputs") -> Any:
    """Run the call eagerly as served by one GPU: the model with all weights, no sharing."""
    model = session.whole
    shares = model.use_data_parallel
    model.use_data_parallel = False
    try:
        return model.embed_multimodal(**inputs.mm_kwargs)
    finally:
        model.use_data_parallel = shares


def _time(session: "EncoderSession", run: Callable[[], Any]) -> float:
    """Microseconds of one call on this rank, all ranks starting together."""
    import torch

    session.synchronize()
    torch.distributed.barrier()
    began = time.perf_counter_ns()
    with torch.inference_mode():
        run()
    session.synchronize()
    return (time.perf_counter_ns() - began) / 1e3


@contextlib.contextmanager
def _noting(session: "EncoderSession", into: dict[str, Any]) -> Iterator[None]:
    """Note this rank's share as vLLM's `_dp_shard` makes it."""
    from workbench.encoder.instruments import wrapped

    place = session.options.place
    assert place is not None

    def noting(original: Any) -> Any:
        def shard(*args: Any) -> Any:
            result = original(*args)
            _, assignment, counts, rows = result
            first = sum(counts[: place.rank])
            into["items"] = list(assignment[first : first + counts[place.rank]])
            into["rows"] = int(rows)
            return result

        return shard

    with wrapped(session.manager, "_dp_shard", noting):
        yield


@contextlib.contextmanager
def _timed_gathers(session: "EncoderSession", into: list[float]) -> Iterator[None]:
    """Time vLLM's `_dp_gather`, the device synchronised around it."""
    from workbench.encoder.instruments import wrapped

    def timing(original: Any) -> Any:
        def gather(*args: Any) -> Any:
            session.synchronize()
            began = time.perf_counter_ns()
            result = original(*args)
            session.synchronize()
            into.append((time.perf_counter_ns() - began) / 1e3)
            return result

        return gather

    with wrapped(session.manager, "_dp_gather", timing):
        yield


def _trace(session: "EncoderSession", calls: Sequence["EncoderInputs"], folder: Path) -> str:
    """Trace one shared call of each by graphs; torch writes the rank into the file, whose gathers align the ranks."""
    import torch

    from workbench.profiler import recording

    place = session.options.place
    assert place is not None
    path = folder / "trace.json.gz"
    with recording(path, ["cpu", "cuda"] if session.device.type == "cuda" else ["cpu"]) as start:
        torch.distributed.barrier()
        start()
        for number, inputs in enumerate(calls):
            with torch.profiler.record_function(f"call#{number} rank#{place.rank}"):
                session.graph(inputs)
                session.synchronize()
    return path.name


if __name__ == "__main__":
    end_with(int(sys.argv[4]))
    try:
        rank_main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    except WorkbenchError as error:
        print(f"{_MARK}{error}", file=sys.stderr, flush=True)
        os._exit(1)  # a group that other ranks wait in cannot be taken down in peace
