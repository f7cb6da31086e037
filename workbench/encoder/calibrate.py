"""Measure what `workbench.costs` predicts from, and check its predictions on what it has not seen.

* `calibrate` measures one cost profile: replays by CUDA events, tails, eager arms and whole calls by host time between
  two synchronises, captures by time and memory.
* `compare` times several configurations on the same calls in one process, in ABBA order, nothing profiled.

On a machine without CUDA the same code runs on static replays; the profile then says so and prices that machine only.
Sizes are in output tokens; one token is `merge` squared patches.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

import workbench
from workbench import comparison
from workbench.budgets import Configuration
from workbench.comparison import CallTiming, Comparison, Comparisons, ConfigurationTiming
from workbench.costs import (
    SCHEMA_VERSION,
    BatchShape,
    CallPoint,
    CostProfile,
    EagerPoint,
    MemoryPoint,
    ReplayPoint,
    TailPoint,
)
from workbench.environment import environment
from workbench.errors import WorkbenchError
from workbench.progress import Progress, silent
from workbench.run import Arm, CaptureCost, Environment

if TYPE_CHECKING:
    from workbench.encoder.session import EncoderInputs, EncoderSession, Grid
    from workbench.workload import Workload

# To open a session with, when other managers do the work.
IDLE = Configuration((64,), 1)
# Calibrated densely, because a replay's time is a staircase in the rows of its matrix products: 32 tokens are 128 rows.
# They end at the largest budget that vLLM infers by default, above ERNIE-4.5-VL's largest image, 6,177 tokens.
BUDGETS = (*range(64, 1024, 32), *range(1024, 2048, 64), *range(2048, 4096, 128), *range(4096, 8193, 1024))
MAX_ITEMS = 16  # of the manager whose replays are timed; at most the smallest budget
EAGER_TOKENS = (64, 256, 1024, 2048, 4096)
CALL_TOKENS = 4096  # largest budget of the random configurations whose whole calls are timed
MANY_TOKENS = 96  # largest of many small images in a random call
FIRST_CAPTURES = 4  # managers of one budget each, whose capture shows what the activations take


@dataclass(frozen=True)
class Effort:
    """How much is measured: samples per point; for the host terms, configurations, calls of each, samples per call."""

    samples: int = 5
    warmup: int = 1
    configurations: int = 6
    calls: int = 16
    call_samples: int = 5


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
    configuration = Configuration(tuple(sorted(set(budgets))), min(MAX_ITEMS, min(budgets)))
    meter = _Meter(session, effort, np.random.default_rng(seed))
    captures = meter.first_captures(configuration.budgets)
    with session.alongside(configuration) as manager, session.using(manager, configuration):
        progress("capturing", 0.05)
        captures += [_memory(cost, first=i == 0) for i, cost in enumerate(session.capture())]
        replays = []
        for done, budget in enumerate(configuration.budgets):
            progress(f"timing replays of budget {budget}", 0.1 + 0.4 * done / len(configuration.budgets))
            replays += meter.replays(budget)
        progress("timing what follows a replay", 0.5)
        tails = meter.tails(configuration.budgets)
        progress("timing eager items", 0.6)
        eager = meter.eager(configuration.budgets)
    progress("timing whole calls", 0.7)
    calls = meter.calls([b for b in configuration.budgets if b <= CALL_TOKENS] or configuration.budgets)
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
        calls=calls,
        captures=captures,
        seed=seed,
    )


def check_budgets(budgets: Sequence[int]) -> None:
    """Refuse budgets that no profile can be made of; call it before an encoder is built.

    Raises:
        WorkbenchError: fewer than two, or one that is not positive.
    """
    if len(set(budgets)) < 2 or min(budgets) < 1:
        raise WorkbenchError("a profile needs at least two budgets to interpolate between, all positive; give more")


def _memory(cost: CaptureCost, *, first: bool) -> MemoryPoint:
    return MemoryPoint(budget=cost.budget, first=first, seconds=cost.seconds, bytes=cost.pool_bytes)


def image_grid(tokens: int, merge: int = 2) -> "Grid":
    """A (t, h, w) grid of one image with exactly `tokens` output tokens, as square as its divisors allow."""
    rows = next(n for n in range(int(tokens**0.5), 0, -1) if tokens % n == 0)
    return (1, merge * rows, merge * (tokens // rows))


class _Meter:
    """Times parts of an open session."""

    def __init__(self, session: "EncoderSession", effort: Effort, random: np.random.Generator) -> None:
        self.session = session
        self.effort = effort
        self.random = random

    def inputs(self, tokens: Sequence[int]) -> "EncoderInputs":
        """Images of these many tokens each."""
        merge = self.session.facts.merge
        return self.session.inputs([image_grid(n, merge) for n in tokens], "image", int(self.random.integers(2**31)))

    def wall(self, work: Callable[[], object]) -> list[float]:
        """Host microseconds of `work` between two synchronises, per sample."""
        for _ in range(self.effort.warmup):
            work()
        return [_wall_us(self.session, work) for _ in range(self.effort.samples)]

    def first_captures(self, budgets: Sequence[int]) -> list[MemoryPoint]:
        """Capture single budgets into pools of their own; nothing on a machine without CUDA, which has no pool."""
        if self.session.replay != "cuda_graph":
            return []
        points = []
        for index in np.unique(np.linspace(0, len(budgets) - 2, FIRST_CAPTURES).astype(int)):
            configuration = Configuration((budgets[index],), 1)
            with self.session.alongside(configuration) as manager, self.session.using(manager, configuration):
                points += [_memory(cost, first=True) for cost in self.session.capture()]
        return points

    def replays(self, budget: int) -> list[ReplayPoint]:
        """Time the graph of `budget` holding one item, one of half its size, and as many equal ones as may be."""
        merge = self.session.facts.merge
        most = self.session.manager.max_batch_size
        points = []
        for tokens in ([budget], [max(budget // 2, 1)], [budget // most] * most):
            samples = self._replay_us(budget, self.inputs(tokens))
            points.append(ReplayPoint(budget=budget, sequences=[n * merge**2 for n in tokens], gpu_us=samples))
        return points

    def _replay_us(self, budget: int, inputs: "EncoderInputs") -> list[float]:
        """Fill the buffers of `budget` through vLLM's own copy, then time replays alone."""
        import torch

        session = self.session
        with torch.inference_mode():
            session.manager._run_budget_graph(inputs.mm_kwargs, budget)
            graph = session.manager.budget_graphs["default"][budget].graph
            if session.replay != "cuda_graph":
                return self.wall(graph.replay)
            for _ in range(self.effort.warmup):
                graph.replay()
            return [_event_us(session, graph.replay) for _ in range(self.effort.samples)]

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
        """Time both eager arms on single items, in turn."""
        arms: tuple[Arm, ...] = ("eager_served", "eager_fallback")
        run: dict[str, Callable[[EncoderInputs], object]] = {
            "eager_served": self.session.eager_served,
            "eager_fallback": self.session.eager_fallback,
        }
        points = []
        for tokens in [n for n in EAGER_TOKENS if n <= max(budgets)] or [max(budgets)]:
            inputs = self.inputs([tokens])
            timed = _alternate(self.session, run, inputs, self.effort.samples, self.effort.warmup)
            points += [EagerPoint(arm=arm, tokens=tokens, wall_us=timed[arm]) for arm in arms]
        return points

    def calls(self, budgets: Sequence[int]) -> list[CallPoint]:
        """Time random calls under random configurations, so that call, batch and item costs can be told apart.

        In rounds over all of them, so that every call's samples are spread over the whole time: a host's speed drifts.
        """
        with ExitStack() as stack:
            work: list[tuple[Callable[[EncoderInputs], object], EncoderInputs, list[BatchShape]]] = []
            for _ in range(self.effort.configurations):
                configuration = random_configuration(self.random, budgets)
                manager = stack.enter_context(self.session.alongside(configuration))
                with self.session.using(manager, configuration):
                    self.session.capture()
                    for _ in range(self.effort.calls):
                        inputs = self.inputs(random_call(self.random, configuration.budgets[-1]))
                        shapes = self._shapes(inputs)  # also the warm-up
                        work.append((_graph_arm(self.session, manager, configuration), inputs, shapes))
            rounds = [[self._both_us(arm, inputs) for arm, inputs, _ in work] for _ in range(self.effort.call_samples)]
        return [
            CallPoint(batches=shapes, wall_us=[wall for wall, _ in samples], host_us=[host for _, host in samples])
            for (_, _, shapes), samples in zip(work, zip(*rounds, strict=True), strict=True)
        ]

    def _shapes(self, inputs: "EncoderInputs") -> list[BatchShape]:
        """Encode once and return the batches that were replayed."""
        patches = [n * self.session.facts.merge**2 for n in inputs.tokens]
        with self.session.watch() as batches:
            self.session.graph(inputs)
        return [
            BatchShape(
                budget=batch.budget or 0,
                items=len(batch.items),
                tokens=batch.tokens,
                squares=sum(patches[i] ** 2 for i in batch.items),
            )
            for batch in batches
        ]

    def _both_us(self, arm: Callable[["EncoderInputs"], object], inputs: "EncoderInputs") -> tuple[float, float]:
        """Microseconds until the outputs are there, and until the call returns."""
        self.session.synchronize()
        start = time.perf_counter_ns()
        arm(inputs)
        returned = time.perf_counter_ns()
        self.session.synchronize()
        return (time.perf_counter_ns() - start) / 1e3, (returned - start) / 1e3


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


def random_configuration(random: np.random.Generator, budgets: Sequence[int]) -> Configuration:
    """Draw 3 to 8 budgets between the smallest and largest of `budgets` (multiples of 16) and an item count.

    The drawn budgets need not be among `budgets`: between them, predictions interpolate.
    """
    low, high = -(-min(budgets) // 16), max(budgets) // 16
    largest = int(random.integers(max(low, high // 2), high + 1))
    count = int(random.integers(2, 8))
    drawn = np.exp(random.uniform(np.log(low), np.log(largest), count)).astype(int)
    chosen = tuple(sorted({*(16 * int(n) for n in drawn), 16 * largest}))
    items = int(random.choice([1, 2, 4, 8, 16, 32]))
    return Configuration(chosen, min(items, chosen[0]))


def random_call(random: np.random.Generator, largest: int) -> list[int]:
    """Draw the tokens of 1 to 8 images or, every third time or so, of 9 to 32 small ones; none above `largest`.

    Sizes are log-uniform from 16 tokens. Without the small ones a batch has few items, and the costs of a batch and of
    an item cannot be told apart: an H200 profile made so predicted 32 images in one replay 40 % too slow.
    """
    many = random.random() < 1 / 3
    count = int(random.integers(9, 33) if many else random.integers(1, 9))
    most = min(MANY_TOKENS, largest) if many else largest
    return [int(n) for n in np.exp(random.uniform(np.log(16), np.log(most), count))]


def compare(
    session: "EncoderSession",
    configurations: dict[str, Configuration],
    calls: Sequence[Sequence["Grid"]],
    *,
    repeats: int = 20,
    warmup: int = 2,
    seed: int = 0,
    workload: str = "",
    eager: bool = True,
    progress: Progress = silent,
) -> Comparison:
    """Time `calls` under several configurations, all captured at once, and eager as served beside them.

    Order: ABBA over the configurations within each call, so that a drift shifts all alike.

    Args:
        session: of the model; its own configuration is not used.
        configurations: by the name that tables show.
        calls: (t, h, w) grids of the images of each call.
        repeats: samples per call and configuration.
        workload: name of the calls, for tables.
        eager: time eager as served too.

    Raises:
        WorkbenchError: vLLM refuses a configuration, or one does not fit into memory.
    """
    with ExitStack() as stack:
        rows, arms = [], {}
        for name, configuration in configurations.items():
            manager = stack.enter_context(session.alongside(configuration))
            with session.using(manager, configuration):
                costs = session.capture()
            rows.append((name, configuration, manager, costs))
            arms[name] = _graph_arm(session, manager, configuration)
        if eager:
            arms["eager_served"] = session.eager_served
        timings: dict[str, list[CallTiming]] = {name: [] for name in arms}
        for index, grids in enumerate(calls):
            progress(f"timing call {index} of {len(calls)}", index / len(calls))
            inputs = session.inputs(grids, "image", seed + index)
            for name, samples in _alternate(session, arms, inputs, repeats, warmup).items():
                timings[name].append(CallTiming(tokens=list(inputs.tokens), wall_us=samples))
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
                    capture=costs,
                    calls=timings[name],
                )
                for name, configuration, manager, costs in rows
            ],
        )


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
    inputs: "EncoderInputs",
    repeats: int,
    warmup: int,
) -> dict[str, list[float]]:
    """Samples of every arm on one call, forwards then backwards; an arm that raises has none."""
    samples: dict[str, list[float]] = {}
    for name, arm in arms.items():
        try:
            for _ in range(max(warmup, 1)):
                arm(inputs)
            session.synchronize()
        except RuntimeError:
            samples[name] = []  # vLLM's own failure, D1: an empty list is shown as failed
    working = [name for name in arms if name not in samples]
    collected: dict[str, list[float]] = {name: [] for name in working}
    for repeat in range(repeats):
        for name in working if repeat % 2 == 0 else reversed(working):
            collected[name].append(_wall_us(session, lambda name=name: arms[name](inputs)))  # type: ignore[misc]
    return samples | collected


def first_calls(workload: "Workload", count: int) -> list[list["Grid"]]:
    """Return the grids of the first `count` calls of images, equal ones included: their mean is that of traffic.

    Raises:
        WorkbenchError: no call of images.
    """
    from workbench.workload import RequestPerCall, group

    calls = group(workload, RequestPerCall())
    grids = np.split(calls.grids, calls.offsets[1:-1])
    videos = calls.is_video[calls.offsets[:-1]]
    images = [part for part, video in zip(grids, videos, strict=True) if not video][:count]
    if not images:
        raise WorkbenchError(f"workload {workload.name} has no call of images to time; give one")
    return [[(int(t), int(h), int(w)) for t, h, w in part] for part in images]


def held_out_calls(seed: int, count: int, model: str) -> dict[str, list[list["Grid"]]]:
    """Two workloads that calibration does not use: photographs of many sizes, and many small images a call.

    Args:
        seed: of sizes and of how many images meet in a call.
        count: calls per workload.
        model: whose resize rule makes grids of sizes.
    """
    from workbench.grids import to_grids
    from workbench.models import model_facts

    random = np.random.default_rng(seed)
    shapes = {"photographs": (420, 1600, 4), "thumbnails": (56, 512, 9)}
    workloads = {}
    for name, (low, high, most) in shapes.items():
        calls = []
        for _ in range(count):
            items = int(random.integers(1, most))
            sides = np.exp(random.uniform(np.log(low), np.log(high), (items, 2))).astype(np.int32)
            sizes = np.column_stack([sides, np.ones(items, dtype=np.int32)])
            calls.append([(int(t), int(h), int(w)) for t, h, w in to_grids(sizes, model_facts(model)).grids])
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
    """Time random configurations on the held-out workloads, all configurations in turn on each call.

    Every second one ends with the largest budget. Where vLLM fails on items above it (D1), they are left out.
    """
    random = np.random.default_rng(seed)
    budgets = [budget for budget in budgets if budget <= CALL_TOKENS] or budgets
    named = {}
    for index in range(configurations):
        drawn = random_configuration(random, budgets)
        top = tuple(sorted({*drawn.budgets, max(budgets)})) if index % 2 else drawn.budgets
        named[f"random {index}"] = Configuration(top, drawn.max_items)
    held = min(configuration.budgets[-1] for configuration in named.values())
    comparisons = []
    for name, grids in held_out_calls(seed, calls, session.facts.key).items():
        fitting = _without_crashes(session, grids, held)
        if fitting:
            comparisons.append(
                compare(
                    session,
                    named,
                    fitting,
                    repeats=repeats,
                    warmup=1,
                    seed=seed,
                    workload=name,
                    eager=False,
                    progress=progress,
                )
            )
    return comparisons


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
