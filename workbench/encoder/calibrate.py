"""Measure what `workbench.costs` predicts from, and check its predictions on what it has not seen.

* `calibrate` measures one cost profile: replays by CUDA events, tails, eager arms and whole calls by host time between
  two synchronises, captures by time and memory.
* `compare` times several configurations on the same calls in one process, in ABBA order, nothing profiled.

A model with graphs for videos is measured with both, in a session whose video limit is not 0. Its graphs have as many
frames as items wherever images replay, because vLLM 0.33 zeroes part of `cu_seqlens` otherwise (D6).

On a machine without CUDA the same code runs on static replays; the profile then says so and prices that machine only.
Sizes are in output tokens; one token is `merge` squared patches. Frames are those of the grid, after temporal merging.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace as replace_fields

import workbench
from workbench import comparison
from workbench.budgets import Configuration, Resolved, resolve
from workbench.comparison import CallTiming, Comparison, Comparisons, ConfigurationTiming
from workbench.costs import (
    SCHEMA_VERSION,
    BatchShape,
    CallPoint,
    CostProfile,
    EagerPoint,
    FramesPoint,
    MemoryPoint,
    ReplayPoint,
    TailPoint,
)
from workbench.environment import environment
from workbench.errors import WorkbenchError
from workbench.progress import Progress, silent
from workbench.run import Arm, CaptureCost, Environment
from workbench.shapes import captured_shapes

if TYPE_CHECKING:
    from workbench.encoder.session import EncoderInputs, EncoderSession, Grid
    from workbench.models import Modality
    from workbench.workload import Workload

# To open a session with, when other managers do the work.
IDLE = Configuration((64,), 1)
# Calibrated densely, because a replay's time is a staircase in the rows of its matrix products: 32 tokens are 128 rows.
# They end at the largest budget that vLLM infers by default, above ERNIE-4.5-VL's largest image, 6,177 tokens.
BUDGETS = (*range(64, 1024, 32), *range(1024, 2048, 64), *range(2048, 4096, 128), *range(4096, 8193, 1024))
MAX_ITEMS = 16  # at most, of the manager whose replays are timed
EAGER_TOKENS = (64, 256, 1024, 2048, 4096)
CALL_TOKENS = 4096  # largest budget of the random configurations whose whole calls are timed
CALL_ITEM = 768  # largest item of a random call: in the time of a larger one the host's share is lost
MANY_TOKENS = 96  # largest of many small images in a random call
# Max items of the random configurations for images, in turn, and of those for videos.
CALL_ITEMS, CALL_VIDEOS = (32, 1, 8, 2, 16, 4), (4, 1)
FIRST_CAPTURES = 4  # managers of one budget each, whose capture shows what the activations take
VIDEO_FRAMES = 8  # of a video that is timed; in calls, the most
# Graphs of videos that are captured alone: budgets, max items, max frames; vLLM's own frames come on top.
FRAMES_BUDGETS, FRAMES_ITEMS, FRAMES_TIMED = (64, 256, 1024), 4, (4, 16, 64)
CLIPS = "clips"  # the held-out workload of videos
CPU_COMPUTED = 1024  # a static replay of vLLM's own frames takes a minute and says nothing of a GPU's
FEWEST = 3  # samples of a point, however long they take


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        samples, warmup: of a point; once `point_us` microseconds are spent on it, no more than `FEWEST` samples.
        configurations, calls, call_samples: for the host terms: configurations, calls of each, samples of a call.
        most_computed: tokens of the largest graph whose frames are studied; on a CPU at most `CPU_COMPUTED`.
    """

    samples: int = 5
    warmup: int = 1
    configurations: int = 6
    calls: int = 16
    call_samples: int = 5
    point_us: float = 150_000.0
    most_computed: int = 40_000


def calibrate(
    session: "EncoderSession",
    budgets: Sequence[int] = BUDGETS,
    *,
    effort: Effort | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> CostProfile:
    """Measure a cost profile of one model on this machine.

    Args:
        session: of the encoder; its own configuration is not used, and costs do not depend on its weights.
        budgets: the budgets to capture and time; predictions refuse budgets outside their range.
        effort: how much to measure; None: the default, about two minutes on an H200 at full depth.
        seed: of inputs and random calls.
        progress: told what is going on.

    Raises:
        WorkbenchError: fewer than two budgets, or a machine that cannot run them.
    """
    check_budgets(budgets)
    effort = effort or Effort()
    machine = environment()
    meter = _Meter(session, effort, np.random.default_rng(seed))
    configuration = meter.configuration(tuple(sorted(set(budgets))), shared_items(budgets))
    captures = meter.first_captures(configuration)
    replays: list[ReplayPoint] = []
    with ExitStack() as stack:
        manager = stack.enter_context(session.alongside(configuration))
        stack.enter_context(session.using(manager, configuration))
        progress("capturing", 0.05)
        captures += [_memory(cost, first=i == 0) for i, cost in enumerate(session.capture())]
        calls = _Calls(meter, stack, [b for b in configuration.budgets if b <= CALL_TOKENS] or configuration.budgets)
        due = np.linspace(0, len(configuration.budgets), effort.call_samples).round()
        for done, budget in enumerate(configuration.budgets):
            calls.time(int((due == done).sum()))
            progress(f"timing replays of budget {budget}", 0.1 + 0.6 * done / len(configuration.budgets))
            replays += meter.replays(budget)
        progress("timing what follows a replay", 0.7)
        tails = meter.tails(configuration.budgets)
        progress("timing eager items", 0.75)
        eager = meter.eager(configuration.budgets)
        progress("timing whole calls", 0.8)
        calls.time(int((due == len(configuration.budgets)).sum()))
    progress("timing frames", 0.9)
    frames = meter.frames() if meter.videos else []
    progress("done", 1.0)
    return CostProfile(
        schema_version=SCHEMA_VERSION,
        workbench=workbench.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        replay_kind=session.replay,
        environment=machine,
        model=session.model_record,
        replays=replays,
        tails=tails,
        eager=eager,
        calls=calls.points(),
        captures=captures,
        seed=seed,
        frames=frames,
    )


def check_budgets(budgets: Sequence[int]) -> None:
    """Refuse budgets that no profile can be made of; call it before an encoder is built.

    Raises:
        WorkbenchError: fewer than two, or one that is not positive.
    """
    if len(set(budgets)) < 2 or min(budgets) < 1:
        raise WorkbenchError("a profile needs at least two budgets to interpolate between, all positive; give more")


def shared_items(budgets: Sequence[int]) -> int:
    """The most items up to `MAX_ITEMS` that divide all budgets, so that every graph holds what its budget says (D3)."""
    shared = math.gcd(*budgets)
    return max(items for items in range(1, MAX_ITEMS + 1) if shared % items == 0)


def _memory(cost: CaptureCost, *, first: bool) -> MemoryPoint:
    return MemoryPoint(budget=cost.budget, first=first, seconds=cost.seconds, bytes=cost.pool_bytes)


def image_grid(tokens: int, merge: int = 2) -> "Grid":
    """A (t, h, w) grid of one image with exactly `tokens` output tokens, as square as its divisors allow."""
    rows = next(n for n in range(int(tokens**0.5), 0, -1) if tokens % n == 0)
    return (1, merge * rows, merge * (tokens // rows))


def video_grid(tokens: int, frames: int, merge: int = 2) -> "Grid":
    """A (t, h, w) grid of one video of `frames` frames with `tokens` output tokens, a multiple of `frames`."""
    _, height, width = image_grid(tokens // frames, merge)
    return (frames, height, width)


class _Meter:
    """Times parts of an open session."""

    def __init__(self, session: "EncoderSession", effort: Effort, random: np.random.Generator) -> None:
        self.session = session
        self.effort = effort
        self.random = random
        self.videos = takes_videos(session)

    def configuration(self, budgets: tuple[int, ...], max_items: int, frames: int = 1) -> Configuration:
        """A configuration of the session's model; `frames` of each item where it takes videos."""
        return Configuration(budgets, max_items, frames * max_items if self.videos else None)

    def inputs(self, tokens: Sequence[int], frames: Sequence[int] | None = None) -> "EncoderInputs":
        """Images of these many tokens each, or videos of so many frames."""
        merge = self.session.facts.merge
        seed = int(self.random.integers(2**31))
        if frames is None:
            return self.session.inputs([image_grid(n, merge) for n in tokens], "image", seed)
        grids = [video_grid(n, t, merge) for n, t in zip(tokens, frames, strict=True)]
        return self.session.inputs(grids, "video", seed)

    def wall(self, work: Callable[[], object]) -> list[float]:
        """Host microseconds of `work` between two synchronises, per sample."""
        return self._samples(lambda: _wall_us(self.session, work))

    def _samples(self, measure: Callable[[], float]) -> list[float]:
        for _ in range(self.effort.warmup):
            measure()
        samples: list[float] = []
        while len(samples) < self.effort.samples and (len(samples) < FEWEST or sum(samples) < self.effort.point_us):
            samples.append(measure())
        return samples

    def first_captures(self, configuration: Configuration) -> list[MemoryPoint]:
        """Capture single budgets into pools of their own; nothing on a machine without CUDA, which has no pool."""
        if self.session.replay != "cuda_graph":
            return []
        points = []
        budgets = configuration.budgets
        for index in np.unique(np.linspace(0, len(budgets) - 2, FIRST_CAPTURES).astype(int)):
            one = self.configuration((budgets[index],), configuration.max_items)
            with self.session.alongside(one) as manager, self.session.using(manager, one):
                points += [_memory(cost, first=True) for cost in self.session.capture()]
        return points

    def replays(self, budget: int) -> list[ReplayPoint]:
        """Time the graph of `budget` holding one item, one of half its size, as many equal ones as may be, a video."""
        most = self.session.manager.max_batch_size
        held = [self.inputs(tokens) for tokens in ([budget], [max(budget // 2, 1)], [budget // most] * most)]
        if self.videos:
            held.append(self._video(budget, most))
        return [
            ReplayPoint(budget=budget, sequences=_sequences(inputs), gpu_us=self._replay_us(budget, inputs))
            for inputs in held
        ]

    def _video(self, budget: int, slots: int) -> "EncoderInputs":
        """One video that fills `budget`."""
        frames = min(VIDEO_FRAMES, slots, budget)
        return self.inputs([budget // frames * frames], [frames])

    def _replay_us(self, budget: int, inputs: "EncoderInputs") -> list[float]:
        """Fill the buffers of `budget` through vLLM's own copy, then time replays alone."""
        import torch

        session = self.session
        with torch.inference_mode():
            session.manager._run_budget_graph(inputs.mm_kwargs, budget)
            graph = session.manager.budget_graphs["default"][budget].graph
            if session.replay != "cuda_graph":
                return self.wall(graph.replay)
            return self._samples(lambda: _event_us(session, graph.replay))

    def frames(self) -> list[FramesPoint]:
        """Capture graphs alone that differ in their frames, and time a full video in each."""
        session, points = self.session, []
        most = self.effort.most_computed if session.replay == "cuda_graph" else CPU_COMPUTED
        for configuration, computed in frames_studied(session, min(most, self.effort.most_computed)):
            (budget,), slots = configuration.budgets, configuration.max_frames or 1
            with session.alongside(configuration) as manager, session.using(manager, configuration):
                try:
                    (cost,) = session.capture()
                except WorkbenchError:
                    continue  # more memory than the device has: its size is known all the same, see `workbench lint`
                inputs = self._video(budget, FRAMES_TIMED[0])  # the same one in all of them
                points.append(
                    FramesPoint(
                        budget=budget,
                        max_items=configuration.max_items,
                        max_frames=slots,
                        computed=computed,
                        sequences=_sequences(inputs),
                        seconds=cost.seconds,
                        bytes=cost.pool_bytes,
                        gpu_us=self._replay_us(budget, inputs),
                    )
                )
        return points

    def tails(self, budgets: Sequence[int]) -> list[TailPoint]:
        """Time the postprocess phase of calls of one item."""
        from workbench.encoder.instruments import POSTPROCESS

        points = []
        for tokens in _spread(budgets, 10):
            inputs, samples = self.inputs([tokens]), _PhaseSamples(self.session, POSTPROCESS)
            for _ in range(self.effort.warmup):
                self.session.graph(inputs)
            with self.session.phases(samples.span):
                for _ in range(self.effort.samples):
                    self.session.graph(inputs)
            points.append(TailPoint(tokens=tokens, wall_us=samples.wall_us))
        return points

    def eager(self, budgets: Sequence[int]) -> list[EagerPoint]:
        """Time both eager arms on single images, in turn."""
        arms: tuple[Arm, ...] = ("eager_served", "eager_fallback")
        run: dict[str, Callable[[EncoderInputs], object]] = {
            "eager_served": self.session.eager_served,
            "eager_fallback": self.session.eager_fallback,
        }
        points = []
        for tokens in [n for n in EAGER_TOKENS if n <= max(budgets)] or [max(budgets)]:
            timed = _alternate(self.session, run, [self.inputs([tokens])], self.effort.samples, self.effort.warmup)
            points += [EagerPoint(arm=arm, tokens=tokens, wall_us=timed[arm][0]) for arm in arms]
        return points

    def shapes(self, inputs: "EncoderInputs") -> list[BatchShape]:
        """Encode once and return the batches that were replayed."""
        manager = self.session.manager
        resolved = Resolved(tuple(manager.token_budgets), manager.max_batch_size, manager.max_frames_per_batch)
        captures = captured_shapes(self.session.facts, resolved)
        computed = {capture.budget: capture.capacity for capture in captures}
        squares = [t * (h * w) ** 2 for t, h, w in inputs.grids]
        with self.session.watch() as batches:
            self.session.graph(inputs)
        return [
            BatchShape(
                budget=computed[batch.budget or 0],
                items=len(batch.items),
                tokens=batch.tokens,
                squares=sum(squares[i] for i in batch.items),
            )
            for batch in batches
        ]

    def both_us(self, arm: Callable[["EncoderInputs"], object], inputs: "EncoderInputs") -> tuple[float, float]:
        """Microseconds until the outputs are there, and until the call returns."""
        self.session.synchronize()
        start = time.perf_counter_ns()
        arm(inputs)
        returned = time.perf_counter_ns()
        self.session.synchronize()
        return (time.perf_counter_ns() - start) / 1e3, (returned - start) / 1e3


class _Calls:
    """Random calls under random configurations, so that call, batch and item costs can be told apart.

    They are timed in rounds over all of them, and rounds are spread over the whole calibration: a host's speed drifts,
    on an H200's by a factor of two for seconds at a time. Max items come in turn, so that batches of many items are
    among them whatever the seed; every third configuration is for videos where the model takes them.
    """

    def __init__(self, meter: _Meter, stack: ExitStack, budgets: Sequence[int]) -> None:
        self.meter = meter
        self.work: list[tuple[Callable[[EncoderInputs], object], EncoderInputs, list[BatchShape]]] = []
        self.rounds: list[list[tuple[float, float]]] = []
        session, random = meter.session, meter.random
        for_images, for_videos = cycle(CALL_ITEMS), cycle(CALL_VIDEOS)
        for index in range(meter.effort.configurations):
            videos = meter.videos and index % 3 == 2
            drawn = random_configuration(random, budgets, next(for_videos if videos else for_images))
            configuration = meter.configuration(drawn.budgets, drawn.max_items, VIDEO_FRAMES if videos else 1)
            manager = stack.enter_context(session.alongside(configuration))
            largest = configuration.budgets[-1]
            with session.using(manager, configuration):
                session.capture()
                for call in range(meter.effort.calls):
                    drawn_call = (
                        random_videos(random, largest)
                        if videos
                        else (random_call(random, largest, many=call % 3 == 2), None)
                    )
                    inputs = meter.inputs(*drawn_call)
                    shapes = meter.shapes(inputs)  # also the warm-up
                    self.work.append((_graph_arm(session, manager, configuration), inputs, shapes))

    def time(self, rounds: int) -> None:
        """Time every call `rounds` times more."""
        for _ in range(rounds):
            self.rounds.append([self.meter.both_us(arm, inputs) for arm, inputs, _ in self.work])

    def points(self) -> list[CallPoint]:
        """What has been timed."""
        return [
            CallPoint(batches=shapes, wall_us=[wall for wall, _ in samples], host_us=[host for _, host in samples])
            for (_, _, shapes), samples in zip(self.work, zip(*self.rounds, strict=True), strict=True)
        ]


def takes_videos(session: "EncoderSession") -> bool:
    """Whether graphs of the session hold videos."""
    return "video" in session.facts.graph_modalities and session.options.video_limit != 0


def frames_studied(session: "EncoderSession", most_computed: int) -> list[tuple[Configuration, int]]:
    """Configurations of one graph that differ in their frames, and the tokens that each computes.

    vLLM's own frames are among them, for `FRAMES_ITEMS` items and for those that vLLM infers too (D2).
    """
    own = resolve(Configuration(), session.limits)
    per_video = session.limits.max_frames_per_video
    asked = [
        Configuration((budget,), FRAMES_ITEMS, frames)
        for budget in FRAMES_BUDGETS
        for frames in (*FRAMES_TIMED, FRAMES_ITEMS * per_video)
    ]
    asked.append(Configuration((own.budgets[0],), own.max_items, own.max_frames))
    sized = [(one, captured_shapes(session.facts, resolve(one, session.limits))[0].capacity) for one in asked]
    return [(one, computed) for one, computed in sized if computed <= most_computed]


def _sequences(inputs: "EncoderInputs") -> list[int]:
    """Attention sequences of the items, in patches: one a frame."""
    return [h * w for t, h, w in inputs.grids for _ in range(t)]


class _PhaseSamples:
    """Host time of one phase, with a synchronise at both ends; the other phases run as they are."""

    def __init__(self, session: "EncoderSession", phase: str) -> None:
        self.session = session
        self.phase = phase
        self.wall_us: list[float] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A span for `EncoderSession.phases`."""
        if name != self.phase:
            yield
            return
        self.session.synchronize()
        start = time.perf_counter_ns()
        yield
        self.session.synchronize()
        self.wall_us.append((time.perf_counter_ns() - start) / 1e3)


def _wall_us(session: "EncoderSession", work: Callable[[], object]) -> float:
    session.synchronize()
    start = time.perf_counter_ns()
    work()
    session.synchronize()
    return (time.perf_counter_ns() - start) / 1e3


def _event_us(session: "EncoderSession", work: Callable[[], object]) -> float:
    """GPU microseconds of `work` between two CUDA events."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    stop.record()
    session.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def _spread(budgets: Sequence[int], count: int) -> list[int]:
    """At most `count` of `budgets`, evenly spread in rank, both ends among them."""
    return [budgets[i] for i in np.unique(np.linspace(0, len(budgets) - 1, count).round().astype(int))]


def random_configuration(random: np.random.Generator, budgets: Sequence[int], items: int = 0) -> Configuration:
    """Draw 3 to 8 budgets between the smallest and largest of `budgets`, and max items unless they are given.

    Where they are given, the smallest budget holds so many small images: below it vLLM would rather make two batches
    than one of the next budget, and no batch would have as many.

    The drawn budgets need not be among `budgets`: between them, predictions interpolate. They are multiples of 16 and,
    where that range allows, of max items, so that every graph holds what its budget says (D3).
    """
    low, high = -(-min(budgets) // 16), max(budgets) // 16
    low = max(low, min(2 * items, high // 2))  # 32 tokens an item
    largest = int(random.integers(max(low, high // 2), high + 1))
    count = int(random.integers(2, 8))
    drawn = np.exp(random.uniform(np.log(low), np.log(largest), count)).astype(int)
    items = items or int(random.choice(sorted(CALL_ITEMS)))
    unit = max(16, items)
    top = max(budgets) // unit * unit
    chosen = sorted({min(-(-16 * int(n) // unit) * unit, top) for n in (*drawn, largest)})
    return Configuration(tuple(chosen), min(items, chosen[0]))


def random_call(random: np.random.Generator, largest: int, *, many: bool) -> list[int]:
    """Draw the tokens of 1 to 8 images or, of `many` small ones, 9 to 32; none above `largest`.

    Sizes are log-uniform from 16 tokens. Without the small ones a batch has few items, and the costs of a batch and of
    an item cannot be told apart: an H200 profile made so predicted 32 images in one replay 40 % too slow.
    """
    count = int(random.integers(9, 33) if many else random.integers(1, 9))
    most = min(MANY_TOKENS if many else CALL_ITEM, largest)
    return [int(n) for n in np.exp(random.uniform(np.log(16), np.log(most), count))]


def random_videos(random: np.random.Generator, largest: int) -> tuple[list[int], list[int]]:
    """Draw tokens and frames of 1 to 6 videos: 1 to `VIDEO_FRAMES` frames of 4 to 96 tokens, none above `largest`."""
    count = int(random.integers(1, 7))
    frames = random.integers(1, VIDEO_FRAMES + 1, count)
    each = np.exp(random.uniform(np.log(4), np.log(MANY_TOKENS), count)).astype(int)
    tokens = frames * np.minimum(each, largest // frames)
    return tokens.tolist(), frames.tolist()


def compare(
    session: "EncoderSession",
    configurations: dict[str, Configuration],
    calls: Sequence[Sequence["Grid"]],
    *,
    modalities: "Sequence[Modality] | None" = None,
    repeats: int = 20,
    warmup: int = 2,
    seed: int = 0,
    workload: str = "",
    eager: bool = True,
    progress: Progress = silent,
) -> Comparison:
    """Time `calls` under several configurations, all captured at once, and eager as served beside them.

    Order: ABBA over the configurations on every call, in rounds over all calls, so that a drift shifts all alike.

    Args:
        session: of the model; its own configuration is not used.
        configurations: by the name that tables show.
        calls: (t, h, w) grids of the items of each call.
        modalities: of each call; None: images.
        repeats: samples per call and configuration.
        workload: name of the calls, for tables.
        eager: time eager as served too.

    Raises:
        WorkbenchError: vLLM refuses a configuration, or one does not fit into memory.
    """
    modalities = modalities or ["image"] * len(calls)
    with ExitStack() as stack:
        rows, arms = [], {}
        for name, configuration in configurations.items():
            manager = stack.enter_context(session.alongside(configuration))
            with session.using(manager, configuration):
                costs = session.capture()
            rows.append((name, manager, costs))
            arms[name] = _graph_arm(session, manager, configuration)
        if eager:
            arms["eager_served"] = session.eager_served
        inputs = [
            session.inputs(grids, modality, seed + index)
            for index, (grids, modality) in enumerate(zip(calls, modalities, strict=True))
        ]
        samples = _alternate(session, arms, inputs, repeats, warmup, progress)
        timings = {name: [_timing(*call) for call in zip(inputs, each, strict=True)] for name, each in samples.items()}
        progress("done", 1.0)
        return Comparison(
            workload=workload,
            model=session.model_record,
            replay=session.replay,
            eager_served=timings.get("eager_served", []),
            configurations=[
                ConfigurationTiming(
                    name=name,
                    budgets=list(manager.token_budgets),
                    max_items=manager.max_batch_size,
                    max_frames=manager.max_frames_per_batch,
                    capture=costs,
                    calls=timings[name],
                )
                for name, manager, costs in rows
            ],
        )


def without_videos(configurations: dict[str, Configuration]) -> dict[str, Configuration]:
    """The graphs that a server without videos has of `configurations`, whatever this session's video limit is."""
    return {name: replace(configuration, max_frames=0) for name, configuration in configurations.items()}


def _timing(inputs: "EncoderInputs", wall_us: list[float]) -> CallTiming:
    frames = [t for t, _, _ in inputs.grids] if inputs.modality == "video" else []
    return CallTiming(tokens=list(inputs.tokens), wall_us=wall_us, frames=frames)


def _graph_arm(
    session: "EncoderSession", manager: object, configuration: Configuration
) -> Callable[["EncoderInputs"], object]:
    def run(inputs: "EncoderInputs") -> object:
        with session.using(manager, configuration):
            return session.graph(inputs)

    return run


def _alternate(
    session: "EncoderSession",
    arms: dict[str, Callable[["EncoderInputs"], object]],
    calls: Sequence["EncoderInputs"],
    repeats: int,
    warmup: int,
    progress: Progress = silent,
) -> dict[str, list[list[float]]]:
    """Samples of every arm on every call: rounds over the calls, arms forwards then backwards.

    An arm that raises on a call has no sample of it: vLLM's own failure, such as D1.
    """
    working = [[name for name, arm in arms.items() if _works(session, arm, inputs, warmup)] for inputs in calls]
    samples: dict[str, list[list[float]]] = {name: [[] for _ in calls] for name in arms}
    for repeat in range(repeats):
        progress(f"timing round {repeat + 1} of {repeats}", repeat / repeats)
        for index, inputs in enumerate(calls):
            for name in working[index] if repeat % 2 == 0 else reversed(working[index]):
                samples[name][index].append(_wall_us(session, lambda: arms[name](inputs)))  # noqa: B023  called at once
    return samples


def _works(
    session: "EncoderSession", arm: Callable[["EncoderInputs"], object], inputs: "EncoderInputs", warmup: int
) -> bool:
    """Warm up; whether vLLM can run it."""
    try:
        for _ in range(max(warmup, 1)):
            arm(inputs)
        session.synchronize()
    except RuntimeError:
        return False
    return True


def first_calls(workload: "Workload", count: int) -> list[list["Grid"]]:
    """Return the grids of the first `count` calls of images, equal ones included: their mean is that of traffic.

    Raises:
        WorkbenchError: no call of images.
    """
    images = [grids for grids, modality in _calls(workload) if modality == "image"][:count]
    if not images:
        raise WorkbenchError(
            f"workload {workload.name} has no call of images, which alone a sweep times; give another, or time its "
            "videos with `workbench compare`"
        )
    return images


def first_calls_of_both(workload: "Workload", count: int) -> tuple[list[list["Grid"]], list["Modality"]]:
    """Return grids and modality of the first `count` calls, whatever they hold."""
    calls = list(islice(_calls(workload), count))
    return [grids for grids, _ in calls], [modality for _, modality in calls]


def _calls(workload: "Workload") -> Iterator[tuple[list["Grid"], "Modality"]]:
    """Grids and modality of every call, one request a call."""
    from workbench.workload import RequestPerCall, group

    calls = group(workload, RequestPerCall())
    videos = calls.is_video[calls.offsets[:-1]]
    for part, video in zip(np.split(calls.grids, calls.offsets[1:-1]), videos, strict=True):
        yield [(int(t), int(h), int(w)) for t, h, w in part], "video" if video else "image"


def held_out_calls(seed: int, count: int, model: str) -> dict[str, list[list["Grid"]]]:
    """Workloads that calibration does not use: photographs of many sizes, small images, and `CLIPS` where a model has
    graphs for videos.

    Args:
        seed: of sizes and of how many items meet in a call.
        count: calls per workload.
        model: whose resize rule makes grids of sizes.
    """
    from workbench.grids import to_grids
    from workbench.models import model_facts

    random = np.random.default_rng(seed)
    facts = model_facts(model)
    shapes = {"photographs": (420, 1600, 4), "thumbnails": (56, 512, 9)}
    if "video" in facts.graph_modalities:
        shapes[CLIPS] = (112, 448, 4)
    workloads = {}
    for name, (low, high, most) in shapes.items():
        calls = []
        for _ in range(count):
            items = int(random.integers(1, most))
            sides = np.exp(random.uniform(np.log(low), np.log(high), (items, 2))).astype(np.int32)
            longest = VIDEO_FRAMES * facts.temporal_patch
            frames = random.integers(2, longest + 1, items) if name == CLIPS else np.ones(items)
            sizes = np.column_stack([sides, frames.astype(np.int32)])
            calls.append([(int(t), int(h), int(w)) for t, h, w in to_grids(sizes, facts).grids])
        workloads[name] = calls
    return workloads


def check_held_out(
    session: "EncoderSession",
    budgets: Sequence[int],
    *,
    configurations: int = 12,
    calls: int = 12,
    repeats: int = 4,
    seed: int = 1,
    progress: Progress = silent,
) -> list[Comparison]:
    """Time random configurations on the held-out workloads, all in turn on each call; each is captured once.

    Every second one ends with the largest budget. Where vLLM fails on items above it (D1), they are left out.
    """
    random = np.random.default_rng(seed)
    meter = _Meter(session, Effort(), random)
    budgets = [budget for budget in budgets if budget <= CALL_TOKENS] or budgets
    drawn = [random_configuration(random, budgets) for _ in range(configurations)]
    tops = [
        tuple(sorted({*one.budgets, max(budgets) // one.max_items * one.max_items})) if index % 2 else one.budgets
        for index, one in enumerate(drawn)
    ]
    held = min(top[-1] for top in tops)
    comparisons = []
    workloads = {
        name: _without_crashes(session, grids, held)
        for name, grids in held_out_calls(seed, calls, session.facts.key).items()
    }
    for videos in (False, True) if meter.videos else (False,):
        chosen = {name: grids for name, grids in workloads.items() if grids and (name == CLIPS) == videos}
        named = {
            f"random {index}": meter.configuration(top, one.max_items, VIDEO_FRAMES if videos else 1)
            for index, (top, one) in enumerate(zip(tops, drawn, strict=True))
        }
        every = [grids for calls_of_one in chosen.values() for grids in calls_of_one]
        if every:
            together = compare(
                session,
                named,
                every,
                modalities=["video" if videos else "image"] * len(every),
                repeats=repeats,
                warmup=1,
                seed=seed,
                eager=False,
                progress=progress,
            )
            comparisons += _split(together, {name: len(grids) for name, grids in chosen.items()})
    return comparisons


def _split(together: Comparison, counts: dict[str, int]) -> list[Comparison]:
    """One comparison for each workload, by the number of its calls, of one over the calls of all."""
    parts, first = [], 0
    for name, count in counts.items():
        timings = [replace_fields(one, calls=one.calls[first : first + count]) for one in together.configurations]
        parts.append(replace_fields(together, workload=name, configurations=timings))
        first += count
    return parts


def _without_crashes(session: "EncoderSession", calls: list[list["Grid"]], largest: int) -> list[list["Grid"]]:
    """Calls that vLLM survives: Ernie's fallback raises (D1), so its items above the largest budget are left out."""
    if session.facts.key != "ernie45_vl":
        return calls
    kept = [[grid for grid in grids if session.facts.tokens(grid) <= largest] for grids in calls]
    return [grids for grids in kept if grids]


def stored(purpose: str, machine: Environment, comparisons: list[Comparison]) -> Comparisons:
    """Wrap measured comparisons for a file."""
    return Comparisons(
        schema_version=comparison.SCHEMA_VERSION,
        workbench=workbench.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        purpose=purpose,
        environment=machine,
        comparisons=comparisons,
    )
