"""What a configuration does to a workload, as tables: the numbers behind notebook 02 and its widgets.

    study = open_study(load_workload("mixed", facts), model)
    tried = outcome(study, Configuration((128, 512, 2048, 4096), 4), "mine")
    per_budget(tried)                     # replays, fill, padding of each graph
    latency([tried])                      # histogram of the predicted time of a call
    bill(tried)                           # memory and seconds of each capture

Times are predicted by `workbench.costs` where a table does not say "measured"; packing is vLLM's own rule. A setting
without costs (`advisor.open_setting`) has all tables but those of times; what they lack is None.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.advisor import (
    AUTO,
    Advice,
    Candidate,
    Constraints,
    Setting,
    Study,
    advise,
    cost_tables,
    zeroed_tail,
)
from workbench.budgets import Configuration, resolve
from workbench.comparison import (
    CallTiming,
    Comparison,
    Comparisons,
    ConfigurationTiming,
    arrange_calls,
    check,
    read_comparisons,
)
from workbench.costs import (
    SHIPPED,
    CallCosts,
    CostModel,
    default_profile,
    read_profile,
    sequence_squares,
    significant,
)
from workbench.errors import WorkbenchError
from workbench.lint import lint
from workbench.models import ModelFacts, model_facts
from workbench.planner import FALLBACK, Plan, pack
from workbench.search import best_by_size
from workbench.search_loops import bound, distinct
from workbench.shapes import captured_shapes
from workbench.workload import Workload, apart, summarize

# Names a profile to show instead of the one that ships; comparisons are looked for in its folder.
SOURCE_VARIABLE = "WORKBENCH_PROFILE"
HELD_OUT, VALIDATION = "heldout.json", "validation.json"
MIB = 2**20
DRAWS = 2000  # of a bootstrap
DIGITS = 6  # of numbers in tables, so that figures are equal on machines whose last bits differ
FILL_BINS = 20
TIME_BINS = 60
ITEMS = (1, 2, 4, 8, 16, 32, 64)  # max items of a map
GRAPHS = (4, 8, 10, 16, 32)  # numbers of graphs that an answer may have


@dataclass(frozen=True)
class Outcome:
    """One configuration on one workload.

    Attributes:
        study: with costs, or without.
        costs: of each call; None without costs, and where the candidate says why it cannot be served or priced.
    """

    study: Setting
    candidate: Candidate
    plan: Plan
    costs: CallCosts | None

    @property
    def name(self) -> str:
        """Of the configuration."""
        return self.candidate.name


def outcome(study: Setting, configuration: Configuration, name: str) -> Outcome:
    """Plan a configuration, and price it where the study has costs.

    Raises:
        WorkbenchError: vLLM refuses it.
    """
    plan = study.plan(configuration)
    if isinstance(study, Study):
        candidate, costs = study.priced(name, configuration, plan)
    else:
        candidate, costs = study.candidate(name, configuration, plan), None
    return Outcome(study, candidate, plan, costs)


@dataclass(frozen=True)
class Measured:
    """What was measured on one GPU: costs, and what was compared with them.

    Attributes:
        held_out, validation: None where the files are not beside the profile.
    """

    model: CostModel
    held_out: Comparisons | None
    validation: Comparisons | None


def measured(model: str) -> Measured | None:
    """Read the profile that `WORKBENCH_PROFILE` names, or the one that ships, and the comparisons beside it.

    None where no profile is named and none ships for the model.

    Raises:
        WorkbenchError: no such file, or measured for another model.
    """
    given = os.environ.get(SOURCE_VARIABLE)
    shipped = SHIPPED.get(model)
    if not given and (shipped is None or not shipped.is_file()):
        return None
    path = Path(given) if given else default_profile(model)
    beside = [path.with_name(name) for name in (HELD_OUT, VALIDATION)]
    held_out, validated = (read_comparisons(file) if file.is_file() else None for file in beside)
    return Measured(CostModel(read_profile(path, model)), held_out, validated)


def unpriced(facts: ModelFacts) -> str:
    """What to do about a model without costs, for people."""
    return (
        f"No costs of {facts.title} ship with the workbench, so times are not predicted here; packing, padding, frames "
        "and what is captured are. Measure them on the GPU that serves, "
        f"`workbench calibrate --model {facts.key} --out costs/profile.json --check costs/heldout.json`, and start the "
        f"notebook with `{SOURCE_VARIABLE}=costs/profile.json`."
    )


def listed(budgets: Iterable[int]) -> str:
    """Budgets as one word, which a table does not break."""
    return ",".join(map(str, budgets))


def _table(rows: Sequence[Mapping[str, object]] | Mapping[str, object]) -> pd.DataFrame:
    """A table whose numbers have DIGITS significant digits."""
    table = pd.DataFrame(rows)
    for name in table.columns[[kind.kind == "f" for kind in table.dtypes]]:
        table[name] = significant(table[name].to_numpy(), DIGITS)
    return table


# Items and calls ------------------------------------------------------------------------------------------------------


def items(workloads: Sequence[Workload]) -> pd.DataFrame:
    """Share of the items of each token count, at most 12 of them a workload."""
    rows = []
    for workload in workloads:
        kinds, counts = np.unique(workload.tokens, return_counts=True)
        common = np.sort(np.argsort(-counts, kind="stable")[:12])
        rows += [
            {"workload": workload.name, "tokens": int(kinds[i]), "items": int(counts[i]),
             "share": counts[i] / workload.items}
            for i in common
        ]  # fmt: skip
    return _table(rows)


def workloads_table(workloads: Sequence[Workload]) -> pd.DataFrame:
    """One row per workload: encoder calls, which hold images or videos, items, tokens."""
    rows = []
    for workload in workloads:
        told = summarize(apart(workload) if workload.is_video.any() else workload)
        rows.append(
            {
                "workload": told.name,
                "calls": told.groups - told.empty,
                "items": told.images + told.videos,
                "items a call, median": told.items_per_group["median"],
                "items a call, most": told.items_per_group["max"],
                "tokens an item, median": told.tokens["median"],
                "tokens an item, most": told.tokens["max"],
                "tokens a call, P99": told.tokens_per_group["p99"],
            }
        )
    return _table(rows)


# One configuration ----------------------------------------------------------------------------------------------------


def per_budget(tried: Outcome) -> pd.DataFrame:
    """One row per graph, and one for eager fallbacks where there are any: replays, items, tokens, padding, fill.

    `calls` is the share of calls that use it; `fill` is tokens / budget over all its replays.
    """
    plan = tried.plan
    budgets = tried.candidate.budgets
    rows = []
    calls = max(int((np.diff(plan.arrangement.offsets) > 0).sum()), 1)
    graph = np.where(plan.fallback, len(budgets), plan.budget_index)
    counts, items, held = (
        np.bincount(graph, weights=values, minlength=len(budgets) + 1).astype(np.int64)  # exact up to 2^53
        for values in (None, plan.items, plan.tokens)
    )
    for position, budget in [*enumerate(budgets), (FALLBACK, 0)]:
        replays, tokens = int(counts[position]), int(held[position])
        if position == FALLBACK and not replays:
            continue
        padding = 0 if position == FALLBACK else budget * replays - tokens
        rows.append(
            {
                "graph": "eager" if position == FALLBACK else f"{budget:,}",
                "budget": None if position == FALLBACK else budget,
                "replays": replays,
                "items": int(items[position]),
                "calls": _calls_with(plan, plan.budget_index == position) / calls,
                "tokens": tokens,
                "padding tokens": padding,
                "fill": None if position == FALLBACK or not replays else tokens / (budget * replays),
            }
        )
    return _table(rows)


def _calls_with(plan: Plan, rows: npt.NDArray[np.bool_]) -> int:
    """Calls that have one of the batches; batches are in call order."""
    calls = plan.call[rows]
    return int(np.count_nonzero(calls[1:] != calls[:-1])) + bool(calls.size)


def fill_histogram(tried: Outcome) -> pd.DataFrame:
    """Replays by fill, in steps of 5 %."""
    fill = tried.plan.fill[~tried.plan.fallback]
    counts, edges = np.histogram(fill, bins=FILL_BINS, range=(0.0, 1.0))
    share = counts / max(counts.sum(), 1)
    return _table({"from": edges[:-1], "to": edges[1:], "replays": counts, "share": share})


def latency(tried: Sequence[Outcome]) -> pd.DataFrame:
    """Calls by predicted time, the same steps for every configuration that can be served."""
    served = [(one.name, one.costs.wall_us[np.diff(one.plan.arrangement.offsets) > 0] / 1e3)
              for one in tried if one.costs is not None]  # fmt: skip
    columns = ["configuration", "from ms", "to ms", "calls", "share"]
    if not served:
        return pd.DataFrame(columns=columns)
    top = max(float(times.max()) for _, times in served)
    edges = np.linspace(0.0, top * (1 + 1e-9), TIME_BINS + 1)
    tables = []
    for name, times in served:
        counts, _ = np.histogram(times, bins=TIME_BINS, range=(edges[0], edges[-1]))
        row = {"from ms": edges[:-1], "to ms": edges[1:], "calls": counts, "share": counts / len(times)}
        tables.append(_table({"configuration": [name] * TIME_BINS, **row}))
    return pd.concat(tables, ignore_index=True)


def bill(tried: Outcome) -> pd.DataFrame:
    """What capturing each graph takes: buffers from their shapes, memory and seconds from the costs where there are."""
    candidate, study = tried.candidate, tried.study
    captures = captured_shapes(study.facts, tried.plan.resolved)
    table = {
        "graph": [f"{budget:,}" for budget in candidate.budgets],
        "computes tokens": list(candidate.captured),
        "buffers MiB": [capture.bytes / MIB for capture in captures],
    }
    if isinstance(study, Study) and candidate.capture_bytes is not None:
        table["memory MiB"] = (study.model.bytes_per_capture(candidate.captured) / MIB).tolist()
        table["seconds"] = study.model.seconds_per_capture(candidate.captured).tolist()
    return _table(table)


# Configurations beside each other -------------------------------------------------------------------------------------


def summary(tried: Sequence[Outcome | Candidate]) -> pd.DataFrame:
    """One row per configuration: graphs, items, frames where there are any, predicted times, waste, capture bill."""
    rows = []
    candidates = [one.candidate if isinstance(one, Outcome) else one for one in tried]
    framed = any(candidate.max_frames for candidate in candidates)
    for candidate in candidates:
        timed = candidate.prediction
        memory = candidate.capture_bytes
        frames = {"max frames": candidate.max_frames, "computes tokens": listed(candidate.captured)} if framed else {}
        rows.append(
            {
                "configuration": candidate.name,
                "max items": candidate.max_items,
                "graphs": len(candidate.budgets),
                "mean ms": None if timed is None else timed.mean_us / 1e3,
                "median ms": None if timed is None else timed.median_us / 1e3,
                "P99 ms": None if timed is None else timed.p99_us / 1e3,
                "waste": candidate.waste,
                "memory MiB": None if memory is None else memory / MIB,
                "capture s": candidate.capture_seconds,
                "budgets": listed(candidate.budgets),
                **frames,
                "refused": candidate.refused or "",
            }
        )
    return _table(rows)


def frames_axis(study: Setting, chosen: Configuration, frames: Iterable[int] = ()) -> pd.DataFrame:
    """What max frames does to `chosen`, one row each: the value chosen, vLLM's own, those between, and `frames`.

    `computed` is the tokens that all replays compute over the tokens of their budgets: 1 where frames cost nothing.
    `fails` is the replays that vLLM raises on (D4), `findings` the linter's rules above information. Predicted times
    and memory only with costs.
    """
    inferred = resolve(replace(chosen, max_frames=None), study.limits)
    default, doubled = inferred.max_frames, []
    between = inferred.max_items
    while between < default:
        doubled.append(between)
        between *= 2
    wanted = {*frames, *doubled, default, *([] if chosen.max_frames is None else [chosen.max_frames])}
    return _table(
        [
            _frames_row(study, replace(chosen, max_frames=value)) | {"vLLM's own": value == default}
            for value in sorted(wanted)
        ]
    )


def _frames_row(study: Setting, configuration: Configuration) -> dict[str, object]:
    tried = outcome(study, configuration, "")
    candidate, plan = tried.candidate, tried.plan
    held = ~plan.fallback
    computed = np.array([*candidate.captured, 0])[plan.budget_index]
    found = lint(study.facts, configuration, study.limits, study.workload).findings
    rules = sorted({finding.rule for finding in found if finding.severity != "info"})
    timed, memory = candidate.prediction, candidate.capture_bytes
    return {
        "max frames": candidate.max_frames,
        "largest graph, tokens": max(candidate.captured),
        "computed": float(computed[held].sum() / max(plan.budget[held].sum(), 1)),
        "buffers MiB": candidate.buffer_bytes / MIB,
        "memory MiB": None if memory is None else memory / MIB,
        "mean ms": None if timed is None else timed.mean_us / 1e3,
        "fails": int(plan.over_frames.sum()),
        "findings": ", ".join(rules),
    }


def named(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One table of several, with the name of each in front."""
    return pd.concat([table.assign(configuration=name) for name, table in tables.items()], ignore_index=True)[
        ["configuration", *next(iter(tables.values())).columns]
    ]


def beside(tables: Mapping[str, pd.DataFrame], index: Sequence[str], column: str) -> pd.DataFrame:
    """One column of several tables side by side, where any of them is not zero."""
    keys = list(index)
    joined = pd.concat({name: table.set_index(keys)[column] for name, table in tables.items()}, axis=1)
    return joined[(joined != 0).any(axis=1)].reset_index()


def eager_faster(advices: Sequence[Advice]) -> pd.DataFrame:
    """Items that eager as served encodes faster than their graph."""
    return _table(
        [
            {
                "workload": advice.workload,
                "tokens": item.tokens,
                "items": item.items,
                "budget": item.budget,
                "graph ms": item.graph_us / 1e3,
                "eager as served ms": item.eager_us / 1e3,
            }
            for advice in advices
            for item in advice.eager_faster
        ]
    )


def fallback_share(tried: Sequence[Outcome]) -> pd.DataFrame:
    """Share of items, tokens and calls that run eagerly because no budget holds them."""
    rows = []
    for one in tried:
        plan, fallback = one.plan, one.plan.fallback
        calls = max(int((np.diff(plan.arrangement.offsets) > 0).sum()), 1)
        rows.append(
            {
                "configuration": one.name,
                "largest budget": one.candidate.budgets[-1],
                "items": int(fallback.sum()) / max(len(plan.arrangement.tokens), 1),
                "tokens": int(plan.tokens[fallback].sum()) / max(int(plan.tokens.sum()), 1),
                "calls": _calls_with(plan, fallback) / calls,
                "served": one.candidate.refused is None,
            }
        )
    return _table(rows)


def graphs_by_items(study: Study, items: Sequence[int] = ITEMS) -> pd.DataFrame:
    """The best predicted objective for every number of graphs and max items, budgets by dynamic programming."""
    found = best_by_size(study.space, items)
    rows = []
    for (graphs, max_items), (budgets, _) in sorted(found.items()):
        value = study.space.score((budgets, max_items), study.space.queues)[0]
        row = {"graphs": graphs, "max items": max_items, "ms": value / 1e3, "budgets": listed(budgets)}
        rows.append(row)
    if not rows:
        raise WorkbenchError("no configuration meets the constraints, so there is no map; allow more")
    return _table(rows)


def graphs_allowed(workload: Workload, model: CostModel, graphs: Sequence[int] = GRAPHS) -> pd.DataFrame:
    """The advice under each limit on the number of graphs, one row each.

    `of the room` is the share of the predicted time between vLLM's own budgets and the bound that the answer wins;
    None where vLLM's own are refused, or leave less than a thousandth to win.
    """
    rows = []
    for most in graphs:
        found = advise(workload, model, constraints=Constraints(max_graphs=most))
        auto = next(one.prediction for one in found.baselines if one.name == AUTO)
        answer, timed = found.answer, found.answer.prediction
        room = 0.0 if auto is None else auto.mean_us - found.bound_us
        won = None
        if auto is not None and timed is not None and room > found.bound_us / 1000:
            won = (auto.mean_us - timed.mean_us) / room
        memory = answer.capture_bytes
        rows.append(
            {
                "graphs allowed": most,
                "graphs": len(answer.budgets),
                "max items": answer.max_items,
                "mean ms": None if timed is None else timed.mean_us / 1e3,
                "of the room": won,
                "memory MiB": None if memory is None else memory / MIB,
                "capture s": answer.capture_seconds,
                "budgets": listed(answer.budgets),
            }
        )
    return _table(rows)


def reasons(advice: Advice) -> pd.DataFrame:
    """Why each budget of the answer is there."""
    return _table(
        [
            {
                "budget": reason.budget,
                "calls": reason.calls,
                "replays": reason.replays,
                "items": reason.items,
                "fill": reason.fill,
                "tokens": f"{reason.smallest:,} to {reason.largest:,}",
                "usual batch": " + ".join(map(str, reason.common[:8])) + (" + ..." if len(reason.common) > 8 else ""),
                "its share": reason.common_share,
                "slower without, %": None if reason.without is None else 100 * reason.without,
            }
            for reason in advice.reasons
        ]
    )


# Measured -------------------------------------------------------------------------------------------------------------


def replay_costs(model: CostModel) -> pd.DataFrame:
    """GPU time of a replay by budget: measured samples' median, and per token, for one item that fills it."""
    budgets = model.replay.budgets
    full = (4.0 * budgets) ** 2
    time = model.replay.time_us(budgets, full)
    return _table(
        {
            "budget": budgets,
            "ms": time / 1e3,
            "without attention ms": model.replay.base / 1e3,
            "us per token": time / budgets,
        }
    )


def frames_measured(model: CostModel) -> pd.DataFrame:
    """What frames do to graphs of videos that were captured alone; None without a measurement or beyond its range."""
    largest = int(model.replay.budgets[-1])
    rows = []
    for point in model.profile.frames:
        squares = sum(n * n for n in point.sequences)
        inside = point.computed <= largest
        rows.append(
            {
                "budget": point.budget,
                "max items": point.max_items,
                "max frames": point.max_frames,
                "computes tokens": point.computed,
                "times its budget": point.computed / point.budget,
                "replay ms": float(np.median(point.gpu_us)) / 1e3,
                "predicted ms": float(model.replay.time_us(point.computed, squares)) / 1e3 if inside else None,
                "capture s": point.seconds,
                "memory MiB": None if point.bytes is None else point.bytes / MIB,
            }
        )
    return _table(rows)


def held_out(model: CostModel, comparisons: Comparisons) -> pd.DataFrame:
    """Predicted beside measured, one row per configuration and workload; calls that only replay."""
    rows = check(model, comparisons, replays_only=True)
    return _table(
        [
            {
                "workload": row.workload,
                "configuration": row.configuration,
                "budgets": listed(row.budgets),
                "max items": row.max_items,
                "calls": row.calls,
                "measured ms": row.measured_mean_us / 1e3,
                "predicted ms": row.predicted_mean_us / 1e3,
                "error": row.error,
                "median error of a call": row.call_error,
            }
            for row in rows
        ]
    )


def validation(model: CostModel, comparisons: Comparisons) -> pd.DataFrame:
    """Measured configurations with predictions beside, one row each; eager as served among them.

    `bound ms` is the mean that no configuration goes below (`workbench.search_loops.bound`) on the calls that were
    timed, for every row of a workload. `wrong`, where frames matter, names the items whose embeddings
    are.
    """
    checked = {(row.workload, row.configuration): row for row in check(model, comparisons)}
    rows = []
    framed = any(timing.max_frames for comparison in comparisons.comparisons for timing in comparison.configurations)
    for comparison in comparisons.comparisons:
        least = _bound_us(model, comparison.configurations[0].calls)
        if comparison.eager_served:
            rows.append({"workload": comparison.workload, "configuration": "eager as served"}
                        | _measured(comparison.eager_served) | {"bound ms": least / 1e3})  # fmt: skip
        for timing in comparison.configurations:
            row = checked.get((comparison.workload, timing.name))
            rows.append(
                {
                    "workload": comparison.workload,
                    "configuration": timing.name,
                    **_measured(timing.calls),
                    "predicted mean ms": None if row is None else row.predicted_mean_us / 1e3,
                    "error": None if row is None else row.error,
                    "predicted P99 ms": None if row is None else row.predicted_p99_us / 1e3,
                    "bound ms": least / 1e3,
                    **_planned(timing),
                    **({"max frames": timing.max_frames, "wrong": _wrong(comparison, timing)} if framed else {}),
                }
            )
    return _table(rows)


def _wrong(comparison: Comparison, timing: ConfigurationTiming) -> str | None:
    """Say which items of the timed calls are encoded wrongly, which a clock does not show."""
    images = any(not call.frames or min(call.frames) == 1 for call in timing.calls)
    return "images (D6)" if zeroed_tail(model_facts(comparison.model.key), timing.resolved, images) else None


def won(comparisons: Comparisons, table: pd.DataFrame, advised: str = "advised") -> pd.DataFrame:
    """The advised configuration beside the best of the others, one row per workload that has one.

    The best other is the fastest whose outputs are right. `faster` is the ratio of their mean times (above 1: the
    advised one is faster) with its 95 % interval from `low` to `high`, repeats resampled within each call. `won` is the
    share of the time between the best other and the bound that the advised one wins; None where it is not faster for
    certain, or where the bound, a prediction, is above what was measured. Graphs and memory are those that were
    captured for each.

    Args:
        table: of the same comparisons, from `validation`.
    """
    rows = []
    for comparison in comparisons.comparisons:
        mine = table[(table["workload"] == comparison.workload) & table["graphs"].notna()].set_index("configuration")
        right = mine["wrong"].isna() if "wrong" in mine else mine["graphs"].notna()
        means = mine.loc[right | (mine.index == advised), "measured mean ms"].dropna()
        if advised not in means or len(means) < 2:
            continue
        best = str(means.drop(advised).idxmin())
        graphs, memory = mine["graphs"].astype(int).to_dict(), mine["memory MiB"].to_dict()
        timings = {timing.name: timing.calls for timing in comparison.configurations}
        ratio = _paired_ratio(timings[best], timings[advised])
        room = float(means[best]) - float(mine["bound ms"].iloc[0])
        rows.append(
            {
                "workload": comparison.workload,
                "best other": best,
                "best other ms": float(means[best]),
                "advised ms": float(means[advised]),
                "faster": ratio[0],
                "low": ratio[1],
                "high": ratio[2],
                "bound ms": float(mine["bound ms"].iloc[0]),
                "won": float(means[best] - means[advised]) / room if room > 0 and ratio[1] > 1 else None,
                "graphs": graphs[advised],
                "best other graphs": graphs[best],
                "memory MiB": memory[advised],
                "best other MiB": memory[best],
            }
        )
    return _table(rows)


def _paired_ratio(slower: Sequence[CallTiming], faster: Sequence[CallTiming]) -> tuple[float, float, float]:
    """Ratio of the mean times of the same calls, and its 95 % bootstrap interval."""
    random = np.random.default_rng(0)
    sums = []
    for side in (slower, faster):
        total = np.zeros(DRAWS + 1)  # the measured one, then the resampled ones
        for call in side:
            samples = np.asarray(call.wall_us)
            drawn = samples[random.integers(0, len(samples), (DRAWS, len(samples)))].mean(axis=1)
            total += np.concatenate([[samples.mean()], drawn])
        sums.append(total)
    ratios = sums[0] / sums[1]
    low, high = np.percentile(ratios[1:], (2.5, 97.5))
    return float(ratios[0]), float(low), float(high)


def _bound_us(model: CostModel, calls: Sequence[CallTiming]) -> float:
    arrangement = arrange_calls(calls)
    queues = distinct(arrangement, sequence_squares(arrangement))
    largest = int(arrangement.tokens.max())
    tables = cost_tables(model, "mean", largest, model_facts(model.profile.model.key), covers=True)
    return float(np.average(bound(queues, tables), weights=queues.weight))


def _measured(calls: Sequence[CallTiming]) -> dict[str, object]:
    samples = [np.asarray(call.wall_us) for call in calls if call.wall_us]
    failed = sum(not call.wall_us for call in calls)
    every = np.concatenate(samples) / 1e3 if samples else None
    return {
        "calls": len(calls),
        "failed calls": failed,
        "measured mean ms": None if every is None or failed else float(every.mean()),
        "measured P99 ms": None if every is None or failed else float(np.percentile(every, 99)),
    }


def _planned(timing: ConfigurationTiming) -> dict[str, object]:
    made = pack(arrange_calls(timing.calls), timing.resolved)
    replayed = int(made.budget[~made.fallback].sum())
    memory = [cost.pool_bytes for cost in timing.capture]
    return {
        "graphs": len(timing.budgets),
        "max items": timing.max_items,
        "budgets": listed(timing.budgets),
        "replays per call": float((~made.fallback).sum() / max(len(timing.calls), 1)),
        "waste": 1 - int(made.tokens[~made.fallback].sum()) / replayed if replayed else None,
        "capture s": sum(cost.seconds for cost in timing.capture),
        "memory MiB": None if None in memory else sum(n for n in memory if n is not None) / MIB,
    }
