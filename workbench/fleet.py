"""A live sweep: many configurations measured on this machine or on a Ray cluster, one task each.

    request = make_request(options, load_workload("mixed", facts), {"doubling": Configuration(), ...})
    results = sweep(request, Path("sweeps/mixed"))                                # in this process, one after another
    results = sweep(request, Path("sweeps/mixed"), OnRay("auto"), resume=True)    # one worker per GPU of the cluster

    SWEEP/sweep.json         the request: written first, never changed
    SWEEP/results/0007.json  of the eighth configuration, as soon as it is there

A task captures its configuration and times every call under it and eager as served in turn, so that its ratio holds on
whichever GPU it ran; times of two tasks compare only as far as their GPUs and hosts do. A sweep that ends early, even
by SIGKILL, has lost nothing that lies in `results/`: `resume` measures what is missing or has failed.
"""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

import workbench
from workbench.budgets import Configuration
from workbench.comparison import Comparison
from workbench.errors import WorkbenchError
from workbench.files import read_json, read_versioned, refuse_occupied, write_json
from workbench.progress import Progress, silent
from workbench.run import Environment, Record

if TYPE_CHECKING:
    from workbench.encoder.session import EncoderSession, SessionOptions
    from workbench.workload import Workload

SCHEMA_VERSION = 1
REQUEST_FILE, RESULTS = "sweep.json", "results"
RETRIES = 2  # of a task whose worker died; one that kills three workers is recorded as failed
_POLL_S = 1.0
_PING_S, _PINGS = 2.0, 3  # a cluster whose head does not answer three times in a row is gone
_BEGIN_AGAIN = "start it and repeat the command with --resume"


class Task(Record, frozen=True):
    """One configuration to measure."""

    name: str
    budgets: list[int] = []
    max_items: int = 0
    max_frames: int | None = None

    @property
    def configuration(self) -> Configuration:
        """As the session takes it."""
        return Configuration(tuple(self.budgets), self.max_items, self.max_frames)


class Encoder(Record, frozen=True):
    """Which encoder every task runs; the fields of `SessionOptions`."""

    model: str
    depth: int | None
    width: int | None
    dtype: str
    seed: int
    checkpoint: str | None
    device: str | None
    max_model_len: int
    max_num_batched_tokens: int
    video_limit: int | None
    attention_backend: str | None


class Request(Record, frozen=True):
    """What a sweep measures. `calls` are the (t, h, w) grids of the images of each call."""

    schema_version: int
    workbench: str
    encoder: Encoder
    workload: str
    calls: list[list[tuple[int, int, int]]]
    repeats: int
    warmup: int
    tasks: list[Task]


class Result(Record, frozen=True):
    """What became of one task: `comparison`, or the sentence that says why there is none."""

    task: Task
    started: str  # ISO 8601, UTC
    seconds: float
    environment: Environment | None = None
    comparison: Comparison | None = None
    failed: str | None = None


class Executor(Protocol):
    """Where tasks run."""

    def results(self, request: Request, tasks: Sequence[Task]) -> Iterator[Result]:
        """Yield one result per task, in any order, each as soon as it is there."""


def make_request(
    options: "SessionOptions",
    workload: "Workload",
    configurations: Mapping[str, Configuration],
    *,
    calls: int = 40,
    repeats: int = 20,
    warmup: int = 2,
) -> Request:
    """Say what to measure: the first `calls` calls of `workload` under each configuration.

    Raises:
        WorkbenchError: no configuration, one that vLLM refuses, or no call of images.
    """
    from workbench.budgets import Limits, resolve
    from workbench.encoder.calibrate import first_calls
    from workbench.models import model_facts

    if not configurations:
        raise WorkbenchError("a sweep needs a configuration; give --config NAME=128,256:4 or --configs FILE")
    if repeats < 1 or calls < 1 or warmup < 0:
        raise WorkbenchError("a sweep times at least one call and one repeat; give --calls and --repeats of 1 or more")
    limits = Limits.of(
        model_facts(options.model),
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        video_limit=options.video_limit,
    )
    for name, configuration in configurations.items():
        try:
            resolve(configuration, limits)
        except WorkbenchError as error:
            raise WorkbenchError(f"configuration {name!r}: {error}") from error
    checkpoint = options.checkpoint and str(options.checkpoint.absolute())
    named = {field: getattr(options, field) for field in Encoder.__struct_fields__}
    return Request(
        schema_version=SCHEMA_VERSION,
        workbench=workbench.__version__,
        encoder=Encoder(**named | {"checkpoint": checkpoint}),
        workload=workload.name,
        calls=[[(int(t), int(h), int(w)) for t, h, w in call] for call in first_calls(workload, calls)],
        repeats=repeats,
        warmup=warmup,
        tasks=[
            Task(name=name, budgets=list(one.budgets), max_items=one.max_items, max_frames=one.max_frames)
            for name, one in configurations.items()
        ],
    )


class Worker:
    """Measures tasks in its own process; the encoder is built for the first one and kept.

    Tasks and results pass as JSON, so that nothing but this class need be importable where it runs.
    """

    def __init__(self, request: bytes) -> None:
        self.request = msgspec.json.decode(request, type=Request)
        self.open = ExitStack()
        self.session: EncoderSession | None = None

    def prepare(self) -> None:
        """Build the encoder unless it is there.

        Raises:
            WorkbenchError: this machine cannot run it, whatever the task.
        """
        from workbench.encoder import calibrate
        from workbench.encoder.session import SessionOptions, open_session

        if self.session is None:
            named = msgspec.structs.asdict(self.request.encoder)
            checkpoint = self.request.encoder.checkpoint
            options = SessionOptions(**named | {"checkpoint": checkpoint and Path(checkpoint)})
            self.session = self.open.enter_context(open_session(options, calibrate.IDLE))

    def measure(self, task: bytes) -> bytes:
        """Measure one task; whatever goes wrong becomes a result that says so."""
        one = msgspec.json.decode(task, type=Task)
        started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        environment = comparison = failed = None
        try:
            environment, comparison = self.compare(one)
        except WorkbenchError as error:
            failed = str(error)
        except Exception as error:  # noqa: BLE001  one configuration's failure is a result, the next may run
            failed = f"{type(error).__name__}: {error}"[:500]
            self.close()  # what it left behind must not colour the next
        seconds = time.perf_counter() - begin
        return msgspec.json.encode(
            Result(
                task=one,
                started=started,
                seconds=seconds,
                environment=environment,
                comparison=comparison,
                failed=failed,
            )
        )

    def compare(self, task: Task) -> tuple[Environment, Comparison]:
        """Capture the configuration and time the calls."""
        from workbench.encoder import calibrate
        from workbench.environment import environment

        request = self.request
        self.prepare()
        assert self.session is not None
        machine = environment()
        return machine, calibrate.compare(
            self.session,
            {task.name: task.configuration},
            request.calls,
            repeats=request.repeats,
            warmup=request.warmup,
            seed=request.encoder.seed,
            workload=request.workload,
        )

    def close(self) -> None:
        """Release the encoder; the next task builds it anew."""
        self.session = None
        self.open.close()


class InProcess:
    """Run tasks in this process, one after another: the default."""

    def __init__(self, worker: type[Worker] = Worker) -> None:
        self.worker = worker

    def results(self, request: Request, tasks: Sequence[Task]) -> Iterator[Result]:
        """See `Executor`.

        Raises:
            WorkbenchError: this machine cannot run the encoder.
        """
        worker = self.worker(msgspec.json.encode(request))
        try:
            worker.prepare()
            for task in tasks:
                yield msgspec.json.decode(worker.measure(msgspec.json.encode(task)), type=Result)
        finally:
            worker.close()


class OnRay:
    """Run tasks on a Ray cluster, one worker per GPU, or as many as asked for where there is none.

    Args:
        address: "local" starts a Ray on this machine for as long as the sweep runs; "auto" is the cluster this machine
            belongs to; else HOST:PORT of its head. The workbench must be installed on every node.
        workers: how many run at once, at most one per GPU or else core; None: all GPUs, one without GPUs.
        worker: the class that measures.
    """

    def __init__(self, address: str = "local", workers: int | None = None, worker: type[Worker] = Worker) -> None:
        if workers is not None and workers < 1:
            raise WorkbenchError(f"a sweep needs at least one worker, not {workers}; leave --workers out for all GPUs")
        self.address = address
        self.workers = workers
        self.worker = worker

    def results(self, request: Request, tasks: Sequence[Task]) -> Iterator[Result]:
        """See `Executor`.

        Raises:
            WorkbenchError: Ray is not installed, there is no such cluster, it lacks GPUs, or it goes away.
        """
        with _connected(self.address, self.workers) as (ray, head):
            if (request.encoder.device or "").startswith("cuda:"):
                raise WorkbenchError(
                    "on Ray each worker sees one GPU, chosen by Ray; use --device cuda, or leave it out"
                )
            gpus = int(ray.cluster_resources().get("GPU", 0)) if request.encoder.device != "cpu" else 0
            if request.encoder.device not in (None, "cpu") and not gpus:
                raise WorkbenchError(f"the Ray cluster {self.address} has no GPU; use --device cpu, or nodes with GPUs")
            room = gpus or int(ray.cluster_resources().get("CPU", 1))
            count = min(self.workers or gpus or 1, room, len(tasks))
            remote = ray.remote(
                num_cpus=1, num_gpus=1 if gpus else 0, max_restarts=-1, max_task_retries=RETRIES, max_concurrency=1
            )(self.worker)
            yield from self._pool(ray, head, remote, count, request, tasks)

    def _pool(
        self, ray: Any, head: str, remote: Any, count: int, request: Request, tasks: Sequence[Task]
    ) -> Iterator[Result]:
        waiting = list(reversed(tasks))
        encoded = msgspec.json.encode(request)
        running: dict[Any, tuple[Any, Task, str, float]] = {}

        def give(actor: Any) -> None:
            if waiting:
                task = waiting.pop()
                reference = actor.measure.remote(msgspec.json.encode(task))
                running[reference] = (actor, task, datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter())
            else:
                ray.kill(actor)  # frees its GPU, for whoever waits for one

        for _ in range(count):
            give(remote.remote(encoded))
        silence = 0
        while running:
            done, _ = ray.wait(list(running), timeout=_POLL_S)
            silence = 0 if _answers(head) else silence + 1
            for reference in done:
                actor, task, started, begin = running.pop(reference)
                try:
                    result = msgspec.json.decode(ray.get(reference), type=Result)
                except ray.exceptions.RayError as error:
                    if silence:  # not this worker's death: the cluster's
                        raise self._gone() from error
                    failed = f"its worker died {RETRIES + 1} times: {type(error).__name__}: {error}"[:500]
                    result = Result(task=task, started=started, seconds=time.perf_counter() - begin, failed=failed)
                    ray.kill(actor)
                    actor = remote.remote(encoded)
                yield result
                give(actor)
            if silence >= _PINGS:
                raise self._gone()

    def _gone(self) -> WorkbenchError:
        return WorkbenchError(
            f"the Ray cluster {self.address} went away; what had finished is in the sweep's folder: {_BEGIN_AGAIN}"
        )


def _answers(address: str) -> bool:
    """Whether the cluster's head accepts connections. Ray itself waits a minute and then ends the whole process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PING_S).close()
    except OSError:
        return False
    return True


@contextmanager
def _connected(address: str, workers: int | None) -> Iterator[tuple[Any, str]]:
    """Yield the module `ray`, connected, and the address of the cluster's head."""
    try:
        import ray
    except ImportError:
        raise WorkbenchError("--ray needs Ray; install the extra: pip install 'vit-graph-workbench[ray]'") from None
    if address not in ("local", "auto"):
        _, colon, port = address.rpartition(":")
        if not colon or not port.isdigit() or "/" in address:
            raise WorkbenchError(f"{address!r} is no Ray cluster; give local, auto, or HOST:PORT of its head")
        if not _answers(address):
            raise WorkbenchError(f"no Ray cluster answers at {address}; start one with `ray start --head`")
    quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    local = {"num_cpus": workers, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, **quiet, **local)
    except Exception as error:  # a node that does not start within 30 s is a bare Exception
        raise WorkbenchError(f"cannot connect to the Ray cluster {address}: {error}; see `ray status`") from error
    try:
        yield ray, ray.get_runtime_context().gcs_address
    finally:
        with suppress(Exception):  # of a cluster that went away there is nothing to leave
            ray.shutdown()


def sweep(
    request: Request,
    out: Path,
    executor: Executor | None = None,
    *,
    resume: bool = False,
    progress: Progress = silent,
) -> list[Result]:
    """Measure what is not yet in `out` and return all results, in the request's order.

    Args:
        executor: where; None: in this process.
        resume: go on with the sweep that `out` holds, which must be of the same request.

    Raises:
        WorkbenchError: `out` is occupied, holds another sweep or cannot be written; the cluster went away.
    """
    known = _begin(request, out, resume)
    missing = [task for task in request.tasks if known.get(task.name) is None or known[task.name].failed]
    numbers = {task.name: number for number, task in enumerate(request.tasks)}
    finished = len(request.tasks) - len(missing)
    progress(f"{finished} of {len(numbers)} configurations", finished / len(numbers))
    try:
        for result in (executor or InProcess()).results(request, missing) if missing else ():
            write_json(_result_file(out, numbers[result.task.name]), result)
            known[result.task.name] = result
            finished += 1
            progress(f"{finished} of {len(numbers)} configurations", finished / len(numbers))
    except WorkbenchError:
        if not known:  # refused before anything was measured: leave no folder that the next try would find occupied
            (out / REQUEST_FILE).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()
        raise
    return [known[task.name] for task in request.tasks]


def read_sweep(folder: Path) -> tuple[Request, dict[str, Result]]:
    """Read a sweep's request, and the results there are by name.

    Raises:
        WorkbenchError: not a sweep's folder, one of another version, or a result that belongs to another.
    """
    path = folder / REQUEST_FILE
    if not path.is_file():
        raise WorkbenchError(f"{folder} holds no sweep: it has no {REQUEST_FILE}; begin one without --resume")
    request = read_versioned(path, Request, SCHEMA_VERSION)
    results = {}
    for number, task in enumerate(request.tasks):
        file = _result_file(folder, number)
        if file.is_file():
            result = read_json(file, Result)
            if result.task != task:
                raise WorkbenchError(f"{file} is a result of another configuration; delete it and use --resume")
            results[task.name] = result
    return request, results


def _begin(request: Request, out: Path, resume: bool) -> dict[str, Result]:
    if not resume:
        refuse_occupied(out, overwrite=False)
        write_json(out / REQUEST_FILE, request)
        return {}
    begun, results = read_sweep(out)
    for field in Request.__struct_fields__:
        if getattr(begun, field) != getattr(request, field):
            raise WorkbenchError(
                f"{out} holds a sweep with other {field}, so it cannot go on; give the same arguments, or another --out"
            )
    return results


def _result_file(folder: Path, number: int) -> Path:
    return folder / RESULTS / f"{number:04}.json"
