"""Which budgets and how many items: a search over configurations with vLLM's exact packing and measured costs.

    limits = Limits.of(facts, max_model_len=16_384, max_num_batched_tokens=8_192)
    advice = advise(workload, CostModel(profile), limits)

Calls of one item are solved exactly: a batch is an item, its budget the smallest that holds it, and dynamic
programming over the budgets finds the best choice. Calls of several items are packed by vLLM's greedy rule, which
depends on the budgets, so there the same programming only starts a local search, from several configurations; the
answer is the best one seen (`workbench.search`). Every configuration is priced on its exact packing.

Among configurations of one price the one with the most items is taken, see `_roomiest`.

How far the answer is from anything possible is stated by a bound: see `workbench.search_loops.bound`.

Max frames is the third axis, for a workload with videos. The packer never looks at it; it decides how many sequences a
graph holds and, as every dummy item of a capture has its share of the frames, how many tokens the graph computes. So
it is chosen after the other two: the fewest computed tokens that hold every batch (`Setting.with_frames`), and
configurations are priced by what their graphs compute, not by their budgets. Where images are served beside videos, it
must not be above max items (D6), so max items is at least the most frames of a call.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from workbench.budgets import Configuration, Limits, Resolved, check_values, generate_budgets, resolve
from workbench.costs import CallCosts, CostModel, Objective, Prediction, computed, sequence_squares
from workbench.errors import WorkbenchError
from workbench.lint import Finding, lint
from workbench.models import ModelFacts, model_facts
from workbench.planner import Arrangement, Plan, arrange, pack
from workbench.progress import Progress, silent
from workbench.published import PULL_REQUEST_BUDGETS, PULL_REQUEST_FRAMES, PULL_REQUEST_ITEMS
from workbench.search import Space, find
from workbench.search_loops import Tables, distinct
from workbench.shapes import captured_shapes
from workbench.workload import Workload, apart

T = TypeVar("T")

AUTO = "vLLM auto"  # the name of what vLLM infers by itself, in advice, comparisons and figures
FRAMES_TRIED = 64  # shares of an item, from the smallest that holds every batch
MAX_GRAPHS = 8  # as many as vLLM infers from 64 to 8192
MAX_MODEL_LEN = 16_384
MAX_NUM_BATCHED_TOKENS = 8_192  # of `vllm serve` on a GPU of 70 to 160 GiB
OBJECTIVES: dict[Objective, str] = {
    "mean": "mean time of a call",
    "p99": "99th percentile of the time of a call",
    "gpu": "mean GPU time of a call's replays",
}


@dataclass(frozen=True)
class Constraints:
    """What an answer may cost. None: no limit.

    Attributes:
        max_graphs: captured graphs, the number of budgets.
        max_bytes: memory of all captures.
        max_capture_seconds: time of all captures.
    """

    max_graphs: int = MAX_GRAPHS
    max_bytes: float | None = None
    max_capture_seconds: float | None = None

    def check(self) -> None:
        """Refuse limits that nothing can meet.

        Raises:
            WorkbenchError: no graph, or a limit that is not above 0.
        """
        if self.max_graphs < 1:
            raise WorkbenchError(f"{self.max_graphs} graphs hold nothing; allow at least 1")
        for name, value in (("memory", self.max_bytes), ("capture time", self.max_capture_seconds)):
            if value is not None and not value > 0:
                raise WorkbenchError(f"the limit on {name} is {value:g}, not above 0; leave it out for no limit")


@dataclass(frozen=True)
class Candidate:
    """One configuration, priced on the whole workload.

    Attributes:
        configuration: as a person gives it.
        budgets, max_items, max_frames: as vLLM resolves it; none and 0 where it refuses.
        captured: tokens that each graph computes, whatever it holds; more than the budget where frames make it so.
        buffer_bytes: of all graphs' buffers, from their shapes.
        prediction: None where it cannot be served or priced, for the reason in `refused`.
        objective_us: what is minimised.
        waste: padding waste of its replays; None without a replay.
        capture_bytes, capture_seconds: of all graphs; None where the profile does not know.
    """

    name: str
    configuration: Configuration
    budgets: tuple[int, ...] = ()
    max_items: int = 0
    max_frames: int = 0
    captured: tuple[int, ...] = ()
    buffer_bytes: int = 0
    prediction: Prediction | None = None
    objective_us: float | None = None
    waste: float | None = None
    capture_bytes: int | None = None
    capture_seconds: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class BudgetReason:
    """Why one budget is in the answer.

    Attributes:
        replays, items: that it gets.
        calls: share of the calls with one of its replays.
        fill: tokens / budget over its replays.
        smallest, largest: tokens of its replays.
        common, common_share: tokens of the items of its commonest batch, and the share of its replays like it.
        without: relative increase of the objective without this budget; None where vLLM could not serve then.
    """

    budget: int
    replays: int
    items: int
    calls: float
    fill: float
    smallest: int
    largest: int
    common: tuple[int, ...]
    common_share: float
    without: float | None


@dataclass(frozen=True)
class EagerItem:
    """Items of one token count that eager as served encodes faster than their graph, alone in a call."""

    tokens: int
    items: int
    budget: int
    graph_us: float
    eager_us: float


@dataclass(frozen=True)
class Advice:
    """The answer, what it is compared with, and how far it is from the bound.

    Attributes:
        profile, measured: model and GPU of the cost profile, and when it was measured.
        objective: what was minimised; `answer.objective_us` is its value.
        exact: no configuration within the constraints is better, by the cost model.
        bound_us: value of the objective that no configuration of measured budgets goes below.
        baselines: what people use without this.
        findings: of the linter on the answer, with this workload.
        video_limit: of `--limit-mm-per-prompt` in the serve line; None for a model without video graphs.
        evaluations: configurations priced.
        searched_items: max items of the search's answer; `answer` has as many or more, see `items_reason`.
        crowded_frames: frames of the largest batch that videos of this workload make when they meet in other calls;
            None where the answer's max frames hold it.
    """

    workload: str
    source: str
    model: str
    profile: str
    measured: str
    objective: Objective
    answer: Candidate
    exact: bool
    bound_us: float
    baselines: tuple[Candidate, ...]
    reasons: tuple[BudgetReason, ...]
    eager_faster: tuple[EagerItem, ...]
    findings: tuple[Finding, ...]
    video_limit: int | None
    evaluations: int
    searched_items: int
    crowded_frames: int | None = None

    @property
    def frames_warning(self) -> str | None:
        """What other calls of the same videos would do to the answer; None where nothing."""
        if self.crowded_frames is None:
            return None
        return (
            f"max frames {self.answer.max_frames:,} hold every call of this workload; where a busy server puts videos "
            f"of several requests into one call, a batch can have {self.crowded_frames:,}, and vLLM raises (D4): "
            "advise from such calls, by --grouping scheduler or from the server's ledger"
        )

    @property
    def items_reason(self) -> str | None:
        """Why the answer has more max items than the search found; None where it has not."""
        most = self.answer.max_items
        if most == self.searched_items:
            return None
        return (
            f"max items {most} instead of {self.searched_items}: predicted time, graphs and findings are the same for "
            "these calls, and a busy server puts the items of several requests into a call"
        )

    @property
    def above_bound(self) -> float:
        """How far the answer is above the bound, relative to it; the best possible one lies between."""
        assert self.answer.objective_us is not None
        return max(0.0, self.answer.objective_us / self.bound_us - 1)

    @property
    def compilation_config(self) -> str:
        """JSON for `--compilation-config`."""
        return msgspec.json.encode(self.answer.configuration.compilation_config()).decode()

    @property
    def serve_line(self) -> str:
        """A command line of `vllm serve`; MODEL stands for the checkpoint."""
        limit = "" if self.video_limit is None else f" --limit-mm-per-prompt '{{\"video\": {self.video_limit}}}'"
        return f"vllm serve MODEL{limit} --compilation-config '{self.compilation_config}'"

    def record(self) -> dict[str, Any]:
        """Return the advice as plain data, the JSON of `workbench advise`."""
        return asdict(self) | {
            "above_bound": self.above_bound,
            "items_reason": self.items_reason,
            "frames_warning": self.frames_warning,
            "compilation_config": self.answer.configuration.compilation_config(),
            "serve_line": self.serve_line,
        }


def advise(
    workload: Workload,
    model: CostModel,
    limits: Limits | None = None,
    objective: Objective = "mean",
    constraints: Constraints | None = None,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> Advice:
    """Search the budgets and max items that minimise `objective` for the calls of `workload`.

    Args:
        workload: calls, as `workbench.workload.group` makes them; without it, every request is a call.
        model: costs measured on the GPU that serves.
        limits: of the server, for what vLLM would infer; None: 16,384 tokens of context, 8,192 per step, and no video
            where the workload has none.
        objective: see `OBJECTIVES`. The GPU objective ignores what eager fallbacks cost, so it allows none.
        constraints: what the answer may cost; None: the default.
        seed: of the calls that a large workload is searched on.
        progress: told what is going on.

    Raises:
        WorkbenchError: an item that the profile cannot price, constraints that nothing meets, or videos for a model
            that has graphs for images only.
    """
    study = open_study(workload, model, limits, objective, constraints)
    baselines = study.baselines()
    starts = [(candidate.budgets, candidate.max_items) for candidate in baselines if candidate.budgets]
    found = find(study.space, starts, seed=seed, progress=progress)
    progress("explaining the answer", 0.95)
    answer = _roomiest(study, study.candidate("advised", study.with_frames(found.budgets, found.max_items)))
    configuration = answer.configuration
    plan = study.plan(configuration)
    advice = Advice(
        workload=workload.name,
        source=study.workload.source,
        model=study.facts.key,
        profile=model.profile.title,
        measured=model.profile.created,
        objective=objective,
        answer=answer,
        exact=found.exact and answer.captured == answer.budgets,
        bound_us=study.space.bound(),
        baselines=tuple(baselines),
        reasons=tuple(_reasons(study, plan, answer)),
        eager_faster=tuple(_eager_faster(study, plan.resolved)),
        findings=lint(study.facts, configuration, study.limits, study.workload).findings,
        video_limit=study.limits.video_limit if "video" in study.facts.graph_modalities else None,
        evaluations=found.evaluations,
        searched_items=found.max_items,
        crowded_frames=_crowded_frames(study, answer),
    )
    progress("done", 1.0)
    return advice


def configurations_for(
    workload: Workload,
    named: dict[str, Configuration | None],
    model: CostModel | None,
    limits: Limits,
    *,
    constraints: Constraints | None = None,
    cover: bool = False,
) -> dict[str, Configuration]:
    """Return configurations to compare on `workload`: None becomes the advised one.

    Args:
        named: by name.
        model: costs for the advice; None: no advice can be given.
        limits: of the server.
        constraints: of the advice.
        cover: add the tokens of the largest item to budgets that end below it (Ernie's fallback fails, D1).

    Raises:
        WorkbenchError: advice without costs, or none possible.
    """
    largest = int(workload.tokens.max())
    chosen = {}
    for name, configuration in named.items():
        if configuration is None:
            if model is None:
                raise WorkbenchError(f"{name} is the advisor's answer, which needs a cost profile; pass --profile")
            configuration = advise(workload, model, limits, constraints=constraints).answer.configuration
        elif cover and configuration.budgets and max(configuration.budgets) < largest:
            configuration = replace(configuration, budgets=(*configuration.budgets, largest))
        chosen[name] = configuration
    return chosen


# What is studied --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A workload and a server: what can be said about a configuration without costs.

    Attributes:
        workload: its calls.
        arrangement: the same, in packing order.
    """

    workload: Workload
    facts: ModelFacts
    limits: Limits
    arrangement: Arrangement

    def plan(self, configuration: Configuration) -> Plan:
        """Every batch that vLLM makes.

        Raises:
            WorkbenchError: vLLM refuses the configuration.
        """
        return pack(self.arrangement, resolve(configuration, self.limits))

    def with_frames(self, budgets: tuple[int, ...], max_items: int) -> Configuration:
        """Add the max frames with which the graphs compute the fewest tokens and hold every batch.

        Left out for a workload of images. Never fewer than max items, and equal to it where the workload has images
        too and its batches allow it (D6).
        """
        configuration = Configuration(budgets, max_items)
        videos = self.workload.is_video
        if not videos.any():
            return configuration
        plan = self.plan(replace(configuration, max_frames=0))
        held = ~plan.fallback
        most = int(plan.frames[held].max(initial=1))
        if most <= max_items and not videos.all():
            return replace(configuration, max_frames=max_items)
        replays = np.bincount(plan.budget_index[held], minlength=len(plan.resolved.budgets))
        per_item = max(1, most // max_items)
        choices = (max(most, max_items, frames * max_items) for frames in range(per_item, per_item + FRAMES_TRIED))
        return min(
            (replace(configuration, max_frames=frames) for frames in choices),
            key=lambda one: (int(replays @ np.array(self.captured(resolve(one, self.limits)))), one.max_frames),
        )

    def captured(self, resolved: Resolved) -> tuple[int, ...]:
        """Tokens that the graph of each budget computes."""
        return tuple(capture.capacity for capture in captured_shapes(self.facts, resolved))

    def candidate(self, name: str, configuration: Configuration, plan: Plan | None = None) -> Candidate:
        """Judge a configuration on the whole workload; `plan` is its plan, where it is known."""
        plan = self.plan(configuration) if plan is None else plan
        resolved = plan.resolved
        captures = captured_shapes(self.facts, resolved)
        replayed = int(plan.budget[~plan.fallback].sum())
        return Candidate(
            name=name,
            configuration=configuration,
            budgets=resolved.budgets,
            max_items=resolved.max_items,
            max_frames=resolved.max_frames,
            captured=tuple(capture.capacity for capture in captures),
            buffer_bytes=sum(capture.bytes for capture in captures),
            waste=1 - int(plan.tokens[~plan.fallback].sum()) / replayed if replayed else None,
            refused=failure(self.facts, plan) or zeroed_tail(self.facts, resolved, not self.workload.is_video.all()),
        )

    @property
    def least_items(self) -> int:
        """Max items that no server of images and videos may go below (D6): the most frames of a call; otherwise 1."""
        calls, facts = self.workload, self.facts
        videos = calls.is_video
        if not videos.any() or videos.all() or not _zeroes_tails(facts):
            return 1
        frames = np.where(videos, calls.frames, 0)
        return int(np.add.reduceat(frames, calls.offsets[:-1][np.diff(calls.offsets) > 0]).max())


def failure(facts: ModelFacts, plan: Plan) -> str | None:
    """Say what vLLM 0.33 fails on in a plan; None: nothing that is known."""
    resolved, fallbacks, over = plan.resolved, int(plan.fallback.sum()), int(plan.over_frames.sum())
    replays = len(plan) - fallbacks
    if fallbacks and facts.extra.get("fallback_crashes"):
        return (
            f"{fallbacks:,} items above the largest budget, {resolved.budgets[-1]}: vLLM 0.33 fails on {facts.title}'s "
            "eager fallback (D1)"
        )
    if over:
        return (
            f"{over:,} of {replays:,} replays have up to {int(plan.frames.max()):,} frames and the graphs hold "
            f"{resolved.sequence_slots:,}: vLLM's copy raises (D4)"
        )
    room = np.array([*(capture.capacity for capture in captured_shapes(facts, resolved)), 0])[plan.budget_index]
    tight = int((~plan.fallback & (plan.tokens > room)).sum())
    if tight:
        return (
            f"{tight:,} of {replays:,} replays have more tokens than their graph has room for: vLLM's copy raises (D3)"
        )
    return None


def zeroed_tail(facts: ModelFacts, resolved: Resolved, images: bool) -> str | None:
    """Say that a server with `images` encodes them wrongly; None where it does not."""
    if not images or not _zeroes_tails(facts) or resolved.max_frames <= resolved.max_items:
        return None
    return (
        f"{resolved.max_frames:,} frames for {resolved.max_items:,} items: vLLM zeroes the rest of the sequence "
        "buffer where images replay, and their embeddings are wrong (D6)"
    )


def _zeroes_tails(facts: ModelFacts) -> bool:
    """Whether D6 concerns the model: a sequence a frame, and no padding of its own."""
    return facts.sequences == "frame" and not facts.extra.get("repeats_last_offset")


@dataclass(frozen=True)
class Study(Setting):
    """A workload ready to be priced under any configuration.

    Attributes:
        space: what the search needs.
    """

    model: CostModel
    objective: Objective
    space: Space

    def candidate(self, name: str, configuration: Configuration, plan: Plan | None = None) -> Candidate:
        """Judge and price a configuration on the whole workload; `plan` is its plan, where it is known."""
        return self.priced(name, configuration, self.plan(configuration) if plan is None else plan)[0]

    def priced(self, name: str, configuration: Configuration, plan: Plan) -> tuple[Candidate, CallCosts | None]:
        """Judge and price the configuration of `plan`; without costs of its calls where it cannot be priced."""
        judged = super().candidate(name, configuration, plan)
        unpriced = self._unpriced(judged)
        refused = judged.refused or unpriced
        prediction, objective, costs = None, None, None
        if refused is None:
            graphs = computed(self.facts, plan)
            try:
                costs = self.model.call_costs(graphs)
                prediction = self.model.predict(graphs, costs)
                values = {"mean": prediction.mean_us, "p99": prediction.p99_us, "gpu": prediction.gpu_mean_us}
                objective = values[self.objective]
            except WorkbenchError as error:
                refused, costs = str(error), None
        candidate = replace(
            judged,
            prediction=prediction,
            objective_us=objective,
            capture_bytes=None if unpriced else _if_known(self.model.capture_bytes, judged.captured),
            capture_seconds=None if unpriced else _if_known(self.model.capture_seconds, judged.captured),
            refused=refused,
        )
        return candidate, costs

    def _unpriced(self, judged: Candidate) -> str | None:
        """Say that frames make graphs larger than anything measured."""
        measured = int(self.model.replay.budgets[-1])
        size, budget = max(zip(judged.captured, judged.budgets, strict=True), key=lambda pair: pair[0] / pair[1])
        if size <= max(budget, measured):
            return None
        return (
            f"{judged.max_frames:,} frames make the graph of budget {budget:,} compute {size:,} tokens (D2), more "
            f"than the cost profile measured, {measured:,}"
        )

    def baselines(self) -> list[Candidate]:
        """What people use: vLLM's own, the pull requests', powers of two, equal steps."""
        tables, graphs = self.space.tables, self.space.max_graphs
        largest = self.space.largest_item
        call = int(np.add.reduceat(self.space.queues.tokens, self.space.queues.first[:-1]).max())
        top = max(tables.low, largest, min(call, tables.high))
        steps = np.linspace(0, top, graphs + 1)[1:].round().astype(int)
        linear = tuple(sorted({max(tables.low, int(step)) for step in steps}))
        powers = generate_budgets(tables.low, top)[:-1]
        frames = PULL_REQUEST_FRAMES if self.workload.is_video.any() else None
        named = {
            AUTO: Configuration(),
            "pull request": Configuration(PULL_REQUEST_BUDGETS, PULL_REQUEST_ITEMS, frames),
            "powers of two": Configuration((*powers, top)),
            "equal steps": Configuration(linear),
        }
        if self.space.covers and largest > PULL_REQUEST_BUDGETS[-1]:
            covering = Configuration((*PULL_REQUEST_BUDGETS, largest), PULL_REQUEST_ITEMS, frames)
            named[f"pull request and {largest}"] = covering
        return [self._baseline(name, configuration) for name, configuration in named.items()]

    def _baseline(self, name: str, configuration: Configuration) -> Candidate:
        """Price a configuration that vLLM may refuse for this server."""
        try:
            return self.candidate(name, configuration)
        except WorkbenchError as error:
            return Candidate(name, configuration, refused=str(error))


def _if_known(price: Callable[[tuple[int, ...]], T], budgets: tuple[int, ...]) -> T | None:
    try:
        return price(budgets)
    except WorkbenchError:
        return None


def open_setting(workload: Workload, limits: Limits | None = None) -> Setting:
    """Make a workload ready to be planned; arguments and errors as `advise`."""
    facts = model_facts(workload.model)
    if not workload.items:
        raise WorkbenchError("the workload has no item; give at least one image")
    videos = int(workload.is_video.sum())
    if videos and "video" not in facts.graph_modalities:
        raise WorkbenchError(
            f"{facts.title} has graphs for images only, and {videos:,} items are videos; leave them out"
        )
    if limits is None:
        limits = Limits.of(
            facts,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            video_limit=None if videos else 0,
        )
    check_values(Configuration(), limits)
    calls = apart(workload) if videos else workload
    arrangement = arrange(calls.tokens, calls.offsets, calls.frames if videos else None)
    return Setting(calls, facts, limits, arrangement)


def open_study(
    workload: Workload,
    model: CostModel,
    limits: Limits | None = None,
    objective: Objective = "mean",
    constraints: Constraints | None = None,
) -> Study:
    """Make a workload ready to be priced; arguments and errors as `advise`."""
    constraints = constraints or Constraints()
    constraints.check()
    setting = open_setting(workload, limits)
    facts, arrangement = setting.facts, setting.arrangement
    covers = objective == "gpu" or bool(facts.extra.get("fallback_crashes"))
    tables = cost_tables(model, objective, int(setting.workload.tokens.max()), facts, covers=covers)

    def affordable(budgets: tuple[int, ...]) -> bool:
        most_bytes, most_seconds = constraints.max_bytes, constraints.max_capture_seconds
        if most_bytes is not None and model.capture_bytes(budgets) > most_bytes:
            return False
        return most_seconds is None or model.capture_seconds(budgets) <= most_seconds

    queues = distinct(arrangement, sequence_squares(arrangement))
    least = setting.least_items
    if least > tables.high:
        raise WorkbenchError(
            f"a call has {least:,} frames, and beside images that takes as many max items (D6), more than the largest "
            f"budget of the cost profile, {tables.high:,}; advise for images and for videos apart"
        )
    positions = facts.extra.get("rotary_positions")
    widest = None if positions is None else int(positions) // facts.merge
    space = Space(queues, tables, objective, constraints.max_graphs, affordable, covers, least, widest)
    return Study(
        workload=setting.workload,
        facts=facts,
        limits=setting.limits,
        arrangement=arrangement,
        model=model,
        objective=objective,
        space=space,
    )


def cost_tables(model: CostModel, objective: Objective, largest: int, facts: ModelFacts, *, covers: bool) -> Tables:
    """The model's costs by whole tokens; for the GPU objective the replays alone.

    Raises:
        WorkbenchError: an item is above the largest measured budget and must not run eagerly.
    """
    low, high = int(model.replay.budgets[0]), int(model.replay.budgets[-1])
    if covers and largest > high:
        raise WorkbenchError(
            f"an item of {largest:,} tokens is above the largest budget of the cost profile, {high:,}, and "
            f"{facts.title} needs a graph for it; calibrate with larger budgets"
        )
    every = np.arange(max(low, high, largest) + 1)
    measured = (every >= low) & (every <= high)
    base = np.where(measured, model.replay.time_us(every, 0.0), np.inf)
    slope = np.where(measured, model.replay.time_us(every, 1.0) - model.replay.time_us(every, 0.0), np.inf)
    eager = np.full(len(every), np.inf) if covers else model.eager_us(every)
    if objective == "gpu":
        return Tables(base, slope, np.zeros(len(every)), eager, 0.0, 0.0, 0.0, low, high)
    host = model.host
    return Tables(base, slope, model.tail_us(every), eager, host.call_us, host.batch_us, host.item_us, low, high)


def _roomiest(study: Study, found: Candidate) -> Candidate:
    """Raise max items as far as nothing else changes: not the graphs, not the predicted time, not what lint finds.

    Calls of the workload may hold fewer items than those of a busy server, whose scheduler encodes what all waiting
    requests bring at once; for the workload's own calls the search cannot tell these configurations apart. Equal
    means equal to the precision at which the search compares: the residuals' interval is an error of both alike, so a
    predicted loss inside it is still a loss.

    No more items than the largest budget can hold of the smallest item that the model makes, nor than the smallest
    budget has tokens, and only numbers that divide all budgets, because others change the graphs (D3).
    """
    before, budgets = _concerns(study, found), found.budgets
    most = min(budgets[0], budgets[-1] // _smallest_item(study))
    shared = math.gcd(*budgets)
    for items in range(most, found.max_items, -1):
        if shared % items:
            continue
        one = study.candidate(found.name, study.with_frames(budgets, items))
        if one.captured == found.captured and _no_worse(one, found) and _concerns(study, one) <= before:
            return one
    return found


def _crowded_frames(study: Study, answer: Candidate) -> int | None:
    """Frames of a batch that is full of one of the workload's videos, the most of any; None where they are held.

    The packer counts items and tokens, never frames.
    """
    videos, largest = study.workload.is_video, answer.budgets[-1]
    tokens, frames = study.workload.tokens[videos], study.workload.frames[videos]
    held = tokens <= largest
    batches = np.minimum(answer.max_items, largest // tokens[held]) * frames[held]
    most = int(batches.max(initial=0))
    return most if most > answer.max_frames else None


def _smallest_item(study: Study) -> int:
    """Tokens of the smallest item: by the pixel limits of the workload's modalities, or of its own if smaller."""
    facts, videos = study.facts, study.workload.is_video
    served = [facts.limits[kind] for kind, there in (("image", not videos.all()), ("video", videos.any())) if there]  # type: ignore[index]
    pixels = (facts.patch * facts.merge) ** 2
    least = [one.min_pixels // (pixels * (facts.temporal_patch if one.counts_frames else 1)) for one in served]
    return max(1, min(*least, int(study.workload.tokens.min())))


def _no_worse(one: Candidate, other: Candidate) -> bool:
    """Whether `one` can be served and is predicted to take no longer, to a millionth of a microsecond."""
    if one.prediction is None or other.prediction is None or one.objective_us is None or other.objective_us is None:
        return False
    pairs = (one.objective_us, other.objective_us), (one.prediction.mean_us, other.prediction.mean_us)
    return all(round(mine, 6) <= round(its, 6) for mine, its in pairs)


def _concerns(study: Study, one: Candidate) -> set[tuple[str, int | None]]:
    """Rule and budget of what the linter finds above information."""
    found = lint(study.facts, one.configuration, study.limits, study.workload).findings
    return {(finding.rule, finding.budget) for finding in found if finding.severity != "info"}


# Why ----------------------------------------------------------------------------------------------------------------


def _reasons(study: Study, plan: Plan, answer: Candidate) -> Iterator[BudgetReason]:
    """Explain each budget of the answer."""
    budgets = answer.budgets
    calls = max(int((np.diff(study.arrangement.offsets) > 0).sum()), 1)
    for position, budget in enumerate(budgets):
        rows = np.flatnonzero(plan.budget_index == position)
        if not len(rows):
            continue
        tokens = plan.tokens[rows]
        common, count = _commonest(plan, rows)
        yield BudgetReason(
            budget=budget,
            replays=len(rows),
            items=int(plan.items[rows].sum()),
            calls=len(np.unique(plan.call[rows])) / calls,
            fill=float(tokens.sum()) / (budget * len(rows)),
            smallest=int(tokens.min()),
            largest=int(tokens.max()),
            common=common,
            common_share=count / len(rows),
            without=_without(study, answer, position),
        )


def _commonest(plan: Plan, rows: "np.typing.NDArray[np.int64]") -> tuple[tuple[int, ...], int]:
    """The tokens of the items of the commonest batch, and how many are like it."""
    tokens, first = plan.arrangement.tokens, plan.first
    counts = Counter(tokens[first[row] : first[row + 1]].tobytes() for row in rows.tolist())
    content, count = counts.most_common(1)[0]
    return tuple(np.frombuffer(content, np.int64).tolist()), count


def _without(study: Study, answer: Candidate, position: int) -> float | None:
    budgets = answer.budgets[:position] + answer.budgets[position + 1 :]
    if not budgets or budgets[0] < answer.max_items:
        return None
    # Both by their budgets: what frames add to a graph is not the budget's doing.
    value, whole = (
        study.space.score((each, answer.max_items), study.space.queues)[0] for each in (budgets, answer.budgets)
    )
    return value / whole - 1 if np.isfinite(value) else None


def _eager_faster(study: Study, resolved: Resolved) -> Iterator[EagerItem]:
    """Token counts that eager as served encodes faster, alone in a call, than the graph that holds them."""
    items = np.column_stack([study.arrangement.tokens, sequence_squares(study.arrangement)])
    kinds, counts = np.unique(items[items[:, 0] <= resolved.budgets[-1]], axis=0, return_counts=True)
    held, squares = kinds[:, 0].astype(np.int64), kinds[:, 1]
    budgets = np.array(resolved.budgets, np.int64)[np.searchsorted(resolved.budgets, held)]
    model = study.model
    try:
        eager = model.eager_us(held, "eager_served")
    except WorkbenchError:
        return
    graph = model.host.call_us + model.batch_us(budgets, 1, held, squares)
    for row in np.flatnonzero(eager < graph).tolist():
        yield EagerItem(
            tokens=int(held[row]),
            items=int(counts[row]),
            budget=int(budgets[row]),
            graph_us=float(graph[row]),
            eager_us=float(eager[row]),
        )
