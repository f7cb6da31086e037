"""Make a run folder: time the three arms, then trace them, on vLLM's own classes.

    from pathlib import Path
    from workbench.budgets import Configuration
    from workbench.encoder.session import SessionOptions
    from workbench.models import model_facts
    from workbench.profiler import capture
    from workbench.sources import load_workload

    workload = load_workload("mixed", model_facts("ernie45_vl"))
    run = capture(SessionOptions(), Configuration((128, 256), 4), workload, Path("runs/mixed"))

Measured: host time between two synchronises and CUDA-event time around one encoder call, for eager as
served, eager fallback and graph, interleaved in ABBA order within one process; the phases of
`execute()` with a synchronise at each end; then the same calls once more under torch.profiler.
Not measured: the processor, the scheduler, the language model, several calls in flight at once.
"""

import gzip
import itertools
import re
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import workbench
from workbench.budgets import DEFAULT_VIDEO_LIMIT, Configuration, Limits, resolve
from workbench.environment import environment, gpus
from workbench.errors import WorkbenchError
from workbench.files import refuse_occupied, replacing_folder, write_bytes, write_json
from workbench.models import ModelFacts, model_facts
from workbench.progress import Progress, silent
from workbench.run import (
    ARMS,
    RUN_FILE,
    SCHEMA_VERSION,
    UNNAMED_PHASE,
    Arm,
    Batch,
    Call,
    ConfigRecord,
    Equality,
    Failure,
    PhaseTiming,
    Record,
    Run,
    Timing,
    TraceFile,
)
from workbench.stats import summary
from workbench.workload import Ints, Workload

if TYPE_CHECKING:
    from workbench.encoder.session import EncoderSession, SessionOptions

CALL_RANGE = "call"  # the range around call 3 is `call#3`
SYNCHRONISE_RANGE = "synchronise"  # the workbench's own wait at the end of each profiled call
# Traced one after the other. "ranges" with "cuda" shows GPU work nearly undisturbed, "cpu" adds every operator.
ACTIVITIES: dict[str, list[list[str]]] = {"cuda": [["ranges", "cuda"], ["cpu", "cuda"]], "cpu": [["cpu"]]}
Span = Callable[[str], AbstractContextManager[None]]
_TRACED = threading.Event()  # this process has recorded a trace of its GPU


@dataclass(frozen=True)
class Repeats:
    """How often each thing is done per arm and distinct call, and for how many calls."""

    timed: int = 40
    phases: int = 20
    profiled: int = 2
    warmup: int = 5
    traced_calls: int = 2
    calls: int = 8

    def __post_init__(self) -> None:
        if min(self.timed, self.phases, self.calls) < 1 or min(self.warmup, self.profiled, self.traced_calls) < 0:
            raise WorkbenchError(
                f"{self.timed} repeats of {self.calls} calls, {self.warmup} for warm-up and {self.profiled} traced of "
                f"{self.traced_calls} calls cannot be run; time at least one, and leave the others at zero or more"
            )


def abba(arms: Sequence[Arm], repeats: int) -> list[Arm]:
    """Return the order of `repeats` samples of each arm: forwards, backwards, forwards ...

    A drift that is linear in time then shifts all arms alike (exactly so for an even number).
    """
    return [arm for repeat in range(repeats) for arm in (arms if repeat % 2 == 0 else arms[::-1])]


def capture(
    options: "SessionOptions",
    configuration: Configuration,
    workload: Workload,
    out: Path,
    *,
    repeats: int = 40,
    profiled_repeats: int = 2,
    traced_calls: int = 2,
    max_calls: int = 8,
    warmup: int = 5,
    progress: Progress = silent,
    name: str | None = None,
    overwrite: bool = False,
    watched: bool = False,
) -> Run:
    """Measure distinct calls of `workload` and write the run folder `out`.

    Args:
        options: which encoder, where, with which weights.
        configuration: the budgets; what is left out vLLM infers.
        workload: each distinct call is measured for itself, whatever its count.
        out: the folder to make; it appears under this name only when everything is in it.
        repeats: un-profiled samples per arm and call; phases get half as many.
        profiled_repeats: traced repeats per arm and call; one of them on CUDA where every operator is recorded.
        traced_calls: how many of the measured calls, the first ones, are traced.
        max_calls: how many of the distinct calls, the first ones, are measured; a note tells when there are more.
        warmup: repeats before timing.
        progress: told what is going on.
        name: the run's; None: the folder's.
        overwrite: replace the run folder `out`; a folder that is none is never replaced.
        watched: a tool outside records the trace (two tracers cannot share CUPTI): the traced repeats then run
            between cudaProfilerStart and Stop, with their NVTX ranges, and the run holds no trace.

    Raises:
        WorkbenchError: bad input, an occupied `out`, or a machine that cannot run it; nothing is written then.
    """
    counts = Repeats(repeats, max(1, repeats // 2), profiled_repeats, warmup, traced_calls, max_calls)
    _refuse_target(out, overwrite)
    facts = model_facts(options.model)
    if workload.model != facts.key:
        raise WorkbenchError(
            f"workload {workload.name!r} was made for {workload.model}, not {facts.key}; load it for this model"
        )
    limits = Limits.of(
        facts,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        video_limit=DEFAULT_VIDEO_LIMIT if options.video_limit is None else options.video_limit,
    )
    warnings = resolve(configuration, limits).warnings
    distinct = distinct_calls(workload)
    calls = distinct[:max_calls]
    if len(calls) < len(distinct):
        warnings += (
            f"the first {len(calls)} of {len(distinct)} distinct calls of the workload were measured; they are "
            f"{sum(call.count for call in calls)} of its {sum(call.count for call in distinct)} calls",
        )
    machine = environment()  # before this process has a CUDA context
    from workbench.encoder.session import open_session

    progress("building the encoder", 0.0)
    with replacing_folder(out, overwrite) as folder, open_session(options, configuration) as session:
        costs = session.capture(lambda cost: progress(f"captured budget {cost.budget}", 0.05))
        recorder = _Recorder(session, calls, counts, folder, options.seed)
        recorder.run(progress, watched)
        run = Run(
            schema_version=SCHEMA_VERSION,
            workbench=workbench.__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            name=name or out.absolute().name,
            replay=session.replay,
            environment=machine,
            model=session.model_record,
            config=session.config_record,
            workload=workload.name,
            calls=calls,
            batches=recorder.batches,
            capture=costs,
            timings=recorder.timings,
            phases=recorder.phases,
            traces=recorder.traces,
            equality=recorder.equality,
            failures=recorder.failures,
            graph_hits=sum(len(batch.items) for batch in recorder.batches if batch.budget is not None),
            graph_misses=sum(len(batch.items) for batch in recorder.batches if batch.budget is None),
            warmup=warmup,
            seed=options.seed,
            notes=[*warnings, *workload.notes, *recorder.notes()],
            gpus_after=gpus(),
        )
        write_json(folder / RUN_FILE, run)
    progress("done", 1.0)
    return run


def _refuse_target(out: Path, overwrite: bool) -> None:
    """Refuse a target before the long work; `--overwrite --out .` must not cost anyone their files."""
    refuse_occupied(out, overwrite)
    if out.is_dir() and any(out.iterdir()) and not (out / RUN_FILE).is_file():
        raise WorkbenchError(f"{out} is not empty and not a run folder, so it is not replaced; choose another name")


def distinct_calls(workload: Workload) -> list[Call]:
    """Return the distinct encoder calls of `workload`, in order of first appearance, with their counts.

    A group that mixes images and videos is two calls, as vLLM encodes one modality at a time. The order of the items
    tells calls apart, as it does in vLLM's batches.

    Raises:
        WorkbenchError: no item at all.
    """
    counts: Counter[tuple[bool, bytes]] = Counter()
    first: dict[tuple[bool, bytes], Ints] = {}
    for start, stop in itertools.pairwise(workload.offsets.tolist()):
        videos = workload.is_video[start:stop]
        for video in (False, True):
            items = start + np.flatnonzero(videos == video)
            if items.size:
                key = (video, workload.sizes[items].tobytes())
                counts[key] += 1
                first.setdefault(key, items)
    if not first:
        raise WorkbenchError(f"workload {workload.name!r} holds no image and no video; add one")
    return [
        Call(
            modality="video" if key[0] else "image",
            sizes=[_triple(size) for size in workload.sizes[items].tolist()],
            grids=[_triple(grid) for grid in workload.grids[items].tolist()],
            tokens=workload.tokens[items].tolist(),
            count=counts[key],
        )
        for key, items in first.items()
    ]


def _triple(row: list[int]) -> tuple[int, int, int]:
    a, b, c = row
    return a, b, c


class Distortion(Record, frozen=True):
    """What profiling did to one arm on one call: medians of host time with and without, and their ratio."""

    arm: Arm
    call: int
    activities: list[str]
    profiled_us: float
    unprofiled_us: float
    ratio: float


def distortions(run: Run) -> list[Distortion]:
    """Return the profiler's own effect for every trace and call of `run`; read it beside any number from a trace."""
    timed = {(timing.arm, timing.call): summary(timing.wall_us).median for timing in run.timings}
    found = []
    for trace in run.traces:
        for call in sorted(set(trace.calls)):
            samples = [wall for wall, of in zip(trace.wall_us, trace.calls, strict=True) if of == call]
            profiled, unprofiled = summary(samples).median, timed[trace.arm, call]
            found.append(
                Distortion(
                    arm=trace.arm,
                    call=call,
                    activities=trace.activities,
                    profiled_us=profiled,
                    unprofiled_us=unprofiled,
                    ratio=profiled / unprofiled,
                )
            )
    return found


@dataclass
class PhaseClock:
    """Host time of nested spans, with a synchronise at both ends of each.

    `totals` maps a name to nanoseconds, the time inside inner spans excluded.
    """

    synchronize: Callable[[], None]
    totals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inner: list[int] = field(default_factory=lambda: [0])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time one phase; phases may nest."""
        self.synchronize()
        self._inner.append(0)
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.synchronize()
            spent = time.perf_counter_ns() - start
            self.totals[name] += spent - self._inner.pop()
            self._inner[-1] += spent


@dataclass
class _Recorder:
    """Measures the calls of one run on one open session; collects the records."""

    session: "EncoderSession"
    calls: list[Call]
    repeats: Repeats
    folder: Path
    seed: int
    batches: list[Batch] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    phases: list[PhaseTiming] = field(default_factory=list)
    traces: list[TraceFile] = field(default_factory=list)
    equality: list[Equality] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    after_trace: bool = field(default_factory=lambda: _TRACED.is_set())

    def inputs(self, call: int) -> Any:
        """The same tensors for the same call, whoever asks."""
        record = self.calls[call]
        return self.session.inputs(record.grids, record.modality, self.seed + call)

    def arms(self, call: int) -> list[Arm]:
        """The arms that have not failed on `call`."""
        failed = {failure.arm for failure in self.failures if failure.call == call}
        return [arm for arm in ARMS if arm not in failed]

    def run(self, progress: Progress, watched: bool) -> None:
        """Measure every call, then trace every arm."""
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"timing call {call}", partial(self.measure, call)) for call in range(len(self.calls))
        ]
        if watched:
            steps.append(("running under the tool outside", self.show))
        else:
            steps += [
                (f"tracing {arm} ({'+'.join(activities)})", partial(self.trace, arm, activities))
                for activities in ACTIVITIES[self.session.device.type]
                for arm in ARMS
            ]
        for done, (what, step) in enumerate(steps):
            progress(what, 0.1 + 0.9 * done / len(steps))
            step()

    def notes(self) -> list[str]:
        """Sentences that a reader of the run needs."""
        notes = [f"{finding.defect}: {finding.message}" for finding in self.session.findings]
        if self.after_trace:
            notes.append(
                "This process had traced its GPU before, and CUPTI stays attached: every launch takes longer than in a "
                "new process. Measure in a new one to compare times with other runs."
            )
        if self.session.replay == "static_replay":
            notes.append(
                "The graph arm is a static replay on the CPU: the same forward over the same fixed buffers. It shows "
                "packing, padding and equality of outputs, and says nothing about launch times."
            )
        return notes

    def measure(self, call: int) -> None:
        """Compare outputs, then time every arm and the phases of one call."""
        inputs = self.inputs(call)
        self._first_runs(call, inputs)
        for arm in self.arms(call):
            for _ in range(self.repeats.warmup):
                self.session.run(arm, inputs)
        self._time_arms(call, inputs)
        if "graph" in self.arms(call):
            self._time_phases(call, inputs)

    def _first_runs(self, call: int, inputs: Any) -> None:
        """Run every arm once: which work, what the graph arm replays, how the outputs compare."""
        outputs: dict[Arm, Any] = {}
        for arm in ARMS:
            try:
                with self.session.watch() if arm == "graph" else nullcontext([]) as watched:
                    outputs[arm] = self.session.run(arm, inputs)
                    self.session.synchronize()
            except Exception as error:  # noqa: BLE001 - whatever an arm raises is the finding
                self._fail(arm, call, error)
            else:
                self.batches += [msgspec.structs.replace(batch, call=call) for batch in watched]
        if "graph" in outputs:
            graph = outputs.pop("graph")
            self.equality += [equality(call, arm, graph, eager) for arm, eager in outputs.items()]

    def _fail(self, arm: Arm, call: int, error: Exception) -> None:
        """Record a failure; stop the run where nothing measured afterwards could be trusted."""
        import torch

        if isinstance(error, WorkbenchError):
            raise error
        where = f"{arm} on call {call} ({_described(self.calls[call])})"
        if isinstance(error, torch.OutOfMemoryError):
            raise WorkbenchError(
                f"not enough memory for {where}; use fewer or smaller images, smaller budgets, or a reduced --depth"
            ) from error
        try:
            self.session.synchronize()
        except RuntimeError as broken:
            raise WorkbenchError(
                f"the GPU is in an error state after {where}, so nothing after it can be measured: {error}"
            ) from broken
        place = raised_in(error)
        self.failures.append(
            Failure(
                arm=arm,
                call=call,
                error=type(error).__name__,
                message=str(error).strip().split("\n")[0],
                cause=known_cause(self.session.facts, self.session.config_record, self.calls[call], place),
            )
        )

    def _time_arms(self, call: int, inputs: Any) -> None:
        """Time the arms in ABBA order, un-profiled."""
        arms = self.arms(call)
        samples = {arm: Timing(arm=arm, call=call, wall_us=[]) for arm in arms}
        for position, arm in enumerate(abba(arms, self.repeats.timed)):
            wall, gpu = timed(self.session, partial(self.session.run, arm, inputs))
            samples[arm].wall_us.append(wall)
            samples[arm].order.append(position)
            if gpu is not None:
                samples[arm].gpu_us.append(gpu)
        self.timings += samples.values()

    def _time_phases(self, call: int, inputs: Any) -> None:
        """Time the phases of `execute()`, un-profiled, in calls of their own."""
        samples: dict[str, list[float]] = {}
        clock = PhaseClock(self.session.synchronize)
        with self.session.phases(clock.span):
            for _ in range(self.repeats.phases):
                clock.totals.clear()
                with clock.span(UNNAMED_PHASE):
                    self.session.run("graph", inputs)
                for phase, spent in clock.totals.items():
                    samples.setdefault(phase, []).append(spent / 1e3)
        self.phases += [PhaseTiming(phase=phase, call=call, wall_us=wall) for phase, wall in samples.items()]

    def trace(self, arm: Arm, activities: Sequence[str]) -> None:
        """Record every call that `arm` can run into one trace file."""
        calls = self._traced_calls(arm)
        if not calls:
            return
        inputs = {call: self.inputs(call) for call in calls}
        span = spans(self.session.device.type == "cuda")
        file = f"traces/{arm}.{'-'.join(activities)}.json.gz"
        # With every operator a trace is large and disturbed: it explains one repeat, the other set shows several.
        repeats = 1 if {"cpu", "cuda"} <= set(activities) else self.repeats.profiled
        record = TraceFile(file=file, arm=arm, activities=list(activities), repeats=repeats, window=CALL_RANGE)
        with recording(self.folder / file, activities) as start, self._inner_ranges(arm, activities, span):
            self._traced_call(arm, calls[0], inputs[calls[0]], span)
            start()
            for _ in range(repeats):
                for call in calls:
                    record.wall_us.append(self._traced_call(arm, call, inputs[call], span))
                    record.calls.append(call)
        self.traces.append(record)

    def _traced_calls(self, arm: Arm) -> list[int]:
        wanted = range(len(self.calls))[: self.repeats.traced_calls]
        return [call for call in wanted if self.repeats.profiled and arm in self.arms(call)]

    def show(self) -> None:
        """Run every arm and call inside its ranges, between cudaProfilerStart and Stop."""
        import torch

        on_cuda = self.session.device.type == "cuda"
        span = spans(on_cuda)
        inputs = {call: self.inputs(call) for call in range(len(self.calls))}
        profiler_api: Any = torch.cuda.profiler
        with profiler_api.profile() if on_cuda else nullcontext():
            for arm in ARMS:
                with span(arm), self._inner_ranges(arm, ["cpu"], span):
                    for call in self._traced_calls(arm) * self.repeats.profiled:
                        self._traced_call(arm, call, inputs[call], span)

    @contextmanager
    def _inner_ranges(self, arm: Arm, activities: Sequence[str], span: Span) -> Iterator[None]:
        """Ranges inside a call: the phases of graph; the modules of eager, where operators are recorded too."""
        with ExitStack() as stack:
            if arm == "graph":
                stack.enter_context(self.session.phases(span))
            elif "cpu" in activities:
                stack.enter_context(self.session.module_spans(span))
            yield

    def _traced_call(self, arm: Arm, call: int, inputs: Any, span: Span) -> float:
        """Run one call inside its range; return the host microseconds of what `timed` would time."""
        self.session.synchronize()
        with span(f"{CALL_RANGE}#{call}"):
            start = time.perf_counter_ns()
            self.session.run(arm, inputs)
            with span(SYNCHRONISE_RANGE):
                self.session.synchronize()
            return (time.perf_counter_ns() - start) / 1e3


def timed(session: "EncoderSession", run: Callable[[], Any]) -> tuple[float, float | None]:
    """Return microseconds of `run()`: of the host between two synchronises and, on CUDA, between two events.

    The events are made and the first is recorded before the clock starts; the second costs a call at most its own
    launch, and nothing where the GPU still works by then. After a process's first trace every launch takes longer,
    since CUPTI stays attached (issue 144455 of pytorch); so time first, and trace afterwards.
    """
    events = _recorded_events() if session.device.type == "cuda" else None
    session.synchronize()
    if events:
        events[0].record()
    start = time.perf_counter_ns()
    run()
    if events:
        events[1].record()
    session.synchronize()
    wall = (time.perf_counter_ns() - start) / 1e3
    return wall, events[0].elapsed_time(events[1]) * 1e3 if events else None


def _recorded_events() -> tuple[Any, Any]:
    """Return two CUDA events; torch makes one when it is recorded for the first time."""
    import torch

    event: Any = torch.cuda.Event
    events = event(enable_timing=True), event(enable_timing=True)
    for made in events:
        made.record()
    return events


def _described(call: Call) -> str:
    sizes = ", ".join(
        f"{width}x{height}" + (f"x{frames}" if call.modality == "video" else "") for width, height, frames in call.sizes
    )
    return f"{call.modality} {sizes}"


@dataclass(frozen=True)
class RaisedIn:
    """Where vLLM raised: the functions entered, outermost first, and the graph buffer being filled, if any."""

    functions: tuple[str, ...]
    buffer: str | None = None


def raised_in(error: BaseException) -> RaisedIn:
    """Read the place of an error from its traceback; messages differ between devices and versions."""
    functions, buffer = [], None
    for frame, _line in traceback.walk_tb(error.__traceback__):
        functions.append(frame.f_code.co_name)
        if frame.f_code.co_name == "_run_budget_graph":
            buffer = frame.f_locals.get("key", buffer)
    return RaisedIn(tuple(functions), buffer)


def known_cause(facts: ModelFacts, config: ConfigRecord, call: Call, place: RaisedIn) -> str | None:
    """Return the number of the known defect (docs/defects.md) that explains a failure, or None.

    D1: Ernie post-processes an item above the largest budget a second time. D3: a budget that max items
    does not divide holds fewer patches than it says. D4: a batch has more frames than were captured.
    """
    oversized = max(call.tokens) > max(config.budgets)
    if facts.key == "ernie45_vl" and oversized and "postprocess_encoder_output" in place.functions:
        return "D1"
    if place.buffer is None or facts.sequences != "frame":
        return None
    if place.buffer == "cu_seqlens":
        return "D4" if sum(grid[0] for grid in call.grids) > config.max_frames else None
    return "D3" if any(budget % config.max_items for budget in config.budgets) else None


def equality(call: int, baseline: Arm, graph: Sequence[Any], eager: Sequence[Any]) -> Equality:
    """Compare the graph arm's outputs, one (tokens, features) tensor per item, with a baseline's.

    Raises:
        WorkbenchError: the arms returned different numbers of items.
    """
    from workbench.encoder.parity.metrics import compare

    if len(graph) != len(eager):
        raise WorkbenchError(f"graph returns {len(graph)} items on call {call} and {baseline} {len(eager)}; report it")
    items = [compare(ours, theirs) for ours, theirs in zip(graph, eager, strict=True)]
    return Equality(
        call=call,
        baseline=baseline,
        bit_equal=all(item.bit_equal for item in items),
        max_abs=_worst(max, [item.max_abs for item in items]),
        relative_rms=_worst(max, [item.relative_rms for item in items]),
        min_cosine=_worst(min, [item.min_cosine for item in items]),
        finite=all(item.finite for item in items),
    )


def _worst(choose: Callable[[list[float]], float], values: list[float | None]) -> float | None:
    """The worst of the items' values, None when one of them is."""
    known = [value for value in values if value is not None]
    return choose(known) if len(known) == len(values) else None


def spans(cuda: bool) -> Span:
    """Return a maker of ranges that torch.profiler (`record_function`) and, on CUDA, NVTX tools see."""
    import torch

    nvtx: Any = torch.cuda.nvtx

    @contextmanager
    def span(name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            if not cuda:
                yield
                return
            nvtx.range_push(name)
            try:
                yield
            finally:
                nvtx.range_pop()

    return span


@contextmanager
def recording(path: Path, activities: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Record what happens after the yielded function is called into `path`, a gzipped Chrome trace.

    What happens before that call warms the profiler up and is dropped. `activities` as in `TraceFile`.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    if "cuda" in activities:
        _TRACED.set()
    chosen = {"cpu": ProfilerActivity.CPU, "ranges": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
    with (
        _only_ranges() if "ranges" in activities else nullcontext(),
        tempfile.TemporaryDirectory() as scratch,
    ):
        raw = Path(scratch, "trace.json")
        with profile(
            activities=sorted({chosen[name] for name in activities}, key=str),
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(raw)),
        ) as profiler:
            yield profiler.step
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if not raw.is_file():  # torch says so on stderr only
            raise WorkbenchError(
                f"torch's profiler could not write its trace to {Path(scratch).parent}; free some room there, or name "
                "a folder with room in TMPDIR"
            )
        pack_trace(raw, path)


@contextmanager
def _only_ranges() -> Iterator[None]:
    """Let torch.profiler see `record_function` ranges but no operators.

    `profile` offers no argument for it, though the function below it does; recording every operator makes eager
    about twice as slow.
    """
    import torch.autograd.profiler
    from torch._C._profiler import RecordScope

    autograd_profiler: Any = torch.autograd.profiler
    enable = autograd_profiler._enable_profiler
    autograd_profiler._enable_profiler = partial(enable, scopes={RecordScope.USER_SCOPE})
    try:
        yield
    finally:
        autograd_profiler._enable_profiler = enable


def pack_trace(raw: Path, target: Path) -> None:
    """Gzip a Chrome trace without the host's name, the path it was written to, and what only fills it up.

    The latter are indentation and torch's running numbers of events, a third of the gzipped size. Times stay as they
    were written, digit by digit; the same trace gives the same bytes.
    """
    text = raw.read_bytes()
    text = re.sub(rb'"host_name": "[^"]*",', b"", text)
    text = re.sub(rb'"traceName": "(?:[^"\\]|\\.)*"', b'"traceName": "' + target.name.encode() + b'"', text)
    text = re.sub(rb"\n\s*", b"", text)
    text = re.sub(rb', ?"(?:Record function id|Ev Idx)": \d+', b"", text)
    write_bytes(target, gzip.compress(text, compresslevel=9, mtime=0))
