"""The advisor: optimal where it says so, below every baseline, above its bound, within its limits."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.profiles import RATE, base_us, make_profile
from workbench import search_loops as loops
from workbench.advisor import Constraints, advise, configurations_for, open_setting, open_study
from workbench.budgets import Configuration, Limits, parse_compilation_config, resolve
from workbench.cli import app
from workbench.commands.advise import _why_above
from workbench.costs import CostModel, Objective
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.lint import lint
from workbench.models import model_facts
from workbench.planner import plan
from workbench.sources import load_workload
from workbench.workload import ItemsPerCall, Workload, group

ERNIE = model_facts("ernie45_vl")
MODEL = CostModel(make_profile())
PRESETS = ("pull-request", "mixed", "small-many")


def workload(calls: Sequence[Sequence[int]], model: str = "ernie45_vl", frames: int = 1) -> Workload:
    """Calls of items of these tokens; a video's grid has `frames` rows of time."""
    tokens = np.array([n for call in calls for n in call], np.int64)
    grids = np.column_stack([np.full_like(tokens, frames), np.full_like(tokens, 2), 2 * tokens // frames])
    return Workload(
        name="test",
        model=model,
        source="a test",
        sizes=np.column_stack([tokens, tokens, np.full_like(tokens, frames)]).astype(np.int32),
        grids=grids.astype(np.int32),
        tokens=tokens,
        offsets=np.cumsum([0, *map(len, calls)]).astype(np.int64),
    )


def priced(calls: Workload, budgets: Sequence[int], max_items: int, objective: Objective = "mean") -> float:
    """The objective by the cost model and the planner alone, without the advisor's own loops."""
    resolved = resolve(Configuration(tuple(budgets), max_items), Limits(video_limit=0))
    made = plan(calls.tokens, calls.offsets, resolved)
    prediction = MODEL.predict(made)
    return {"mean": prediction.mean_us, "p99": prediction.p99_us, "gpu": prediction.gpu_mean_us}[objective]


# Calls of one item ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 3), st.sampled_from(["mean", "gpu"]))
def test_one_item_calls_are_solved_exactly(tokens: list[int], graphs: int, objective: Objective) -> None:
    calls = workload([[n] for n in tokens])
    advice = advise(calls, MODEL, objective=objective, constraints=Constraints(max_graphs=graphs))
    assert advice.exact
    # Every choice of budgets among a grid that is finer than the items and among the items themselves.
    largest = max(64, *tokens)
    inner = sorted({*range(64, largest, 16), *(n for n in tokens if 64 <= n < largest)})
    best = min(
        priced(calls, (*chosen, largest), 1, objective)
        for count in range(graphs)
        for chosen in itertools.combinations(inner if count < 2 else inner[::4], count)
    )
    assert advice.answer.objective_us is not None
    assert advice.answer.objective_us <= best * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(64, 2000), min_size=1, max_size=40), st.integers(1, 5))
def test_optimal_budgets_are_token_counts(tokens: list[int], graphs: int) -> None:
    advice = advise(workload([[n] for n in tokens]), MODEL, constraints=Constraints(max_graphs=graphs))
    assert set(advice.answer.budgets) <= set(tokens)


def test_a_profile_that_gets_cheaper_by_a_larger_budget_is_used() -> None:
    # Budgets 512 to 640 take longer than 704: a staircase that falls, as tile sizes can make one.
    model = CostModel(make_profile(base=lambda b: base_us(b) + (4000 if 512 <= b <= 640 else 0)))
    advice = advise(workload([[600]] * 3), model, constraints=Constraints(max_graphs=1))
    assert advice.exact
    assert advice.answer.budgets == (704,)


# Calls of several items -----------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@example([[64], [64], [64, 150, 150, 230], [100], [150]])  # both budgets must move at once
@given(st.lists(st.lists(st.sampled_from([64, 100, 150, 230]), min_size=1, max_size=4), min_size=1, max_size=5))
def test_small_problems_are_solved_as_well_as_by_trying_everything(calls: list[list[int]]) -> None:
    given_calls = workload(calls)
    advice = advise(given_calls, MODEL, constraints=Constraints(max_graphs=2))
    top = max(n for call in calls for n in call)
    sums = sorted(
        {sum(sorted(call)[i:j]) for call in calls for i in range(len(call)) for j in range(i + 1, len(call) + 1)}
    )
    every = [
        (tuple(-(-n // items) * items for n in chosen), items)
        for items in (1, 2, 3, 4)
        for count in (1, 2)
        for chosen in itertools.combinations(sums, count)
        if chosen[-1] >= top
    ]
    best = min(priced(given_calls, budgets, items) for budgets, items in every)
    assert advice.answer.objective_us is not None
    assert advice.answer.objective_us <= best * 1.01


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("objective", ["mean", "p99", "gpu"])
def test_presets_beat_every_baseline(name: str, objective: Objective) -> None:
    calls = load_workload(name, ERNIE)
    advice = advise(calls, MODEL, objective=objective)
    answer = advice.answer
    assert answer.objective_us == pytest.approx(priced(calls, answer.budgets, answer.max_items, objective))
    assert answer.refused is None
    assert len(advice.baselines) >= 4
    value = answer.objective_us
    assert value is not None
    for baseline in advice.baselines:
        assert baseline.objective_us is None or value <= baseline.objective_us * (1 + 1e-9), baseline.name
    assert advice.bound_us <= value * (1 + 1e-9)
    assert not [finding for finding in advice.findings if finding.severity == "error"]


def test_the_same_question_gets_the_same_answer() -> None:
    calls = load_workload("mixed", ERNIE)
    assert advise(calls, MODEL).record() == advise(calls, MODEL).record()


def test_a_large_workload_is_searched_on_a_part_and_priced_on_all() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(64, 1500, 60_000)
    calls = group(workload([[int(n)] for n in tokens]), ItemsPerCall(3))
    advice = advise(calls, MODEL)
    assert not advice.exact
    assert advice.answer.objective_us == pytest.approx(priced(calls, advice.answer.budgets, advice.answer.max_items))
    assert advice.answer.budgets[-1] >= tokens.max()
    others = [baseline.objective_us for baseline in advice.baselines if baseline.objective_us is not None]
    assert priced(calls, advice.answer.budgets, advice.answer.max_items) < min(others)


# As many items as change nothing --------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@example([[64]] * 3)  # the pull request's workload
@example([[64], [64], [64, 150, 150, 230], [100], [150]])
@example([[17] * 3, [40, 40]])
@given(st.lists(st.lists(st.sampled_from([17, 40, 64, 128, 150]), min_size=1, max_size=5), min_size=1, max_size=5))
def test_max_items_are_as_many_as_change_nothing(calls: list[list[int]]) -> None:
    given_calls = workload(calls)
    advice = advise(given_calls, MODEL, constraints=Constraints(max_graphs=2))
    answer, found = advice.answer, advice.searched_items
    budgets, items = answer.budgets, answer.max_items
    assert found <= items <= budgets[0]
    assert answer.captured == budgets
    assert all(budget % items == 0 for budget in budgets)
    # Never slower, and never against the linter.
    value = priced(given_calls, budgets, items)
    assert value <= priced(given_calls, budgets, found) + 1e-6
    limits = Limits.of(ERNIE, max_model_len=16_384, max_num_batched_tokens=8_192, video_limit=0)

    def concerns(most: int) -> set[str]:
        found = lint(ERNIE, Configuration(budgets, most), limits, given_calls).findings
        return {finding.rule for finding in found if finding.severity != "info"}

    assert concerns(items) <= concerns(found)
    # No more would do: another count is no divisor, too many for the largest budget, or slower.
    smallest = min(4, *given_calls.tokens)  # 56 x 56 pixels make 4 tokens
    for more in range(items + 1, min(budgets[0], budgets[-1] // smallest) + 1):
        if all(budget % more == 0 for budget in budgets):
            assert priced(given_calls, budgets, more) > value + 1e-7
    assert (advice.items_reason is None) == (items == found)


def test_one_image_a_call_is_advised_room_for_a_busy_server() -> None:
    advice = advise(load_workload("pull-request", ERNIE), MODEL)
    assert (advice.answer.budgets, advice.searched_items) == ((64,), 1)
    assert advice.answer.max_items == 16  # 64 tokens hold 16 of the smallest images
    assert "max items 16 instead of 1" in (advice.items_reason or "")
    assert advice.record()["items_reason"] == advice.items_reason
    assert advice.exact
    assert not [finding for finding in advice.findings if finding.severity != "info"]


def test_items_that_make_a_call_slower_are_not_taken() -> None:
    # With two items a replay, two images of 64 tokens would share the graph of 128, which takes five times as long.
    model = CostModel(make_profile(base=lambda b: base_us(b) * (1 if b < 128 else 5)))
    advice = advise(workload([[64, 64]] * 5 + [[128]]), model, constraints=Constraints(max_graphs=2))
    assert advice.answer.budgets == (64, 128)
    assert advice.answer.max_items == advice.searched_items == 1
    assert advice.items_reason is None


# The bound ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=7), min_size=1, max_size=4),
    st.lists(st.integers(64, 3000), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from(["mean", "p99", "gpu"]),
)
def test_no_configuration_goes_below_the_bound(
    calls: list[list[int]], budgets: list[int], max_items: int, objective: Objective
) -> None:
    given_calls = workload(calls)
    bound = advise(given_calls, MODEL, objective=objective, constraints=Constraints(max_graphs=1)).bound_us
    chosen = sorted({*budgets, max(900, *budgets)})
    assert bound <= priced(given_calls, chosen, max_items, objective) * (1 + 1e-9)


def test_the_bound_is_reached_without_padding() -> None:
    advice = advise(load_workload("pull-request", ERNIE), MODEL)
    assert advice.answer.budgets == (64,)
    assert advice.above_bound == pytest.approx(0, abs=1e-9)


# Limits ---------------------------------------------------------------------------------------------------------------


def test_limits_are_kept() -> None:
    calls = load_workload("mixed", ERNIE)
    free = advise(calls, MODEL).answer
    assert free.capture_bytes is not None
    assert free.capture_seconds is not None
    fewer = advise(calls, MODEL, constraints=Constraints(max_graphs=3)).answer
    assert len(fewer.budgets) <= 3
    most = free.capture_bytes - 10 * 2**20
    smaller = advise(calls, MODEL, constraints=Constraints(max_bytes=most)).answer
    assert smaller.capture_bytes is not None
    assert smaller.capture_bytes <= most
    quicker = advise(calls, MODEL, constraints=Constraints(max_capture_seconds=0.3)).answer
    assert quicker.capture_seconds is not None
    assert quicker.capture_seconds <= 0.3
    for limited in (fewer, smaller, quicker):
        assert limited.objective_us is not None
        assert free.objective_us is not None
        assert limited.objective_us >= free.objective_us


def test_limits_may_leave_glms_largest_items_to_eager() -> None:
    """All starts of the search hold the largest item; a limit that none of them keeps has answers all the same."""
    model = CostModel(make_profile(model="glm4_1v"))
    calls = workload([[n, n + 7] for n in range(70, 1000, 30)] + [[4000]], "glm4_1v")
    most = model.capture_bytes((1024,))
    assert most < model.capture_bytes((4000,))
    limited = advise(calls, model, constraints=Constraints(max_bytes=most)).answer
    assert limited.capture_bytes is not None
    assert limited.capture_bytes <= most
    study = open_study(calls, model)
    by_hand = [study.candidate("by hand", Configuration(budgets, 2)).objective_us for budgets in ((1000,), (256, 1000))]
    assert limited.objective_us is not None
    assert all(value is not None and limited.objective_us <= value for value in by_hand)


def test_a_limit_that_nothing_keeps_does_not_ask_glm_to_hold_the_largest_item() -> None:
    model = CostModel(make_profile(model="glm4_1v"))
    with pytest.raises(WorkbenchError, match="8 graphs is within the limits"):
        advise(workload([[64, 300]], "glm4_1v"), model, constraints=Constraints(max_bytes=1))


def test_the_source_of_a_workload_with_videos_says_no_other_grouping_than_its_own() -> None:
    glm = model_facts("glm4_1v")
    calls = load_workload("glm-mixed", glm)
    assert open_setting(calls).workload.source == calls.source
    assert open_setting(group(calls, ItemsPerCall(4))).workload.source == f"{calls.source}; 4 items a call"


def test_a_limit_on_memory_makes_one_item_answers_a_search() -> None:
    calls = workload([[n] for n in range(100, 1000, 30)])
    free = advise(calls, MODEL)
    assert free.exact
    assert free.answer.capture_bytes is not None
    limited = advise(calls, MODEL, constraints=Constraints(max_bytes=free.answer.capture_bytes - 2**20))
    assert not limited.exact
    assert limited.answer.capture_bytes is not None
    assert limited.answer.capture_bytes < free.answer.capture_bytes


@pytest.mark.parametrize(
    ("calls", "constraints", "message"),
    [
        ([[100], [9000]], Constraints(), "9,000 tokens is above the largest budget of the cost profile, 8,192"),
        ([[100]], Constraints(max_bytes=1), "within the limits"),
        ([[100, 100]], Constraints(max_capture_seconds=0.001), "within the limits"),
        ([[100]], Constraints(max_graphs=0), "at least 1"),
        ([[]], Constraints(), "no item"),
    ],
)
def test_what_cannot_be_answered_is_refused(calls: list[list[int]], constraints: Constraints, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message):
        advise(workload(calls), MODEL, constraints=constraints)


def test_videos_for_a_model_of_images_are_refused() -> None:
    with pytest.raises(WorkbenchError, match="images only"):
        advise(workload([[100]], frames=4), MODEL)


# What is said beside the answer ---------------------------------------------------------------------------------------


def test_every_budget_has_its_reason() -> None:
    calls = load_workload("mixed", ERNIE)
    advice = advise(calls, MODEL)
    resolved = resolve(advice.answer.configuration, Limits.of(ERNIE, video_limit=0))
    made = plan(calls.tokens, calls.offsets, resolved)
    assert [reason.budget for reason in advice.reasons] == list(advice.answer.budgets)
    for reason in advice.reasons:
        rows = made.budget == reason.budget
        assert reason.replays == rows.sum()
        assert reason.items == made.items[rows].sum()
        assert reason.fill == pytest.approx(made.fill[rows].mean())
        assert reason.calls == pytest.approx(len(set(made.call[rows].tolist())) / len(calls))
        assert reason.smallest <= sum(reason.common) <= reason.largest <= reason.budget
        if reason.without is not None:
            rest = [budget for budget in advice.answer.budgets if budget != reason.budget]
            assert advice.answer.objective_us is not None
            assert priced(calls, rest, advice.answer.max_items) / advice.answer.objective_us - 1 == pytest.approx(
                reason.without
            )
            assert reason.without >= 0
    assert advice.reasons[-1].without is None  # without it, items of 4,096 tokens crash Ernie


def test_the_pull_requests_budgets_crash_on_large_images() -> None:
    advice = advise(load_workload("mixed", ERNIE), MODEL)
    by_name = {baseline.name: baseline for baseline in advice.baselines}
    assert "D1" in (by_name["pull request"].refused or "")
    assert by_name["pull request and 4096"].refused is None


def test_a_server_for_which_vllm_infers_nothing_still_gets_advice() -> None:
    limits = Limits.of(ERNIE, max_model_len=16_384, max_num_batched_tokens=32, video_limit=0)
    advice = advise(workload([[64], [100]]), MODEL, limits)
    auto = advice.baselines[0]
    assert "smallest budget 64 is above the largest" in (auto.refused or "")
    assert advice.answer.budgets == (64, 100)


def test_items_that_eager_encodes_faster_are_named() -> None:
    # Replays five times slower than the formula's: eager as served wins for large images.
    model = CostModel(make_profile(base=lambda b: 5 * base_us(b)))
    advice = advise(workload([[64], [64], [1500]]), model)
    assert [(item.tokens, item.items, item.budget) for item in advice.eager_faster] == [(1500, 1, 1500)]
    assert advice.eager_faster[0].eager_us < advice.eager_faster[0].graph_us
    assert advise(workload([[64], [1500]]), MODEL).eager_faster == ()


def test_the_config_is_what_vllm_reads() -> None:
    advice = advise(load_workload("small-many", ERNIE), MODEL)
    assert parse_compilation_config(advice.compilation_config) == advice.answer.configuration
    assert advice.serve_line.startswith("vllm serve MODEL --compilation-config '{")
    assert all(budget % advice.answer.max_items == 0 for budget in advice.answer.budgets)  # no D3, no excess rows


def test_glm_switches_videos_off_and_passes_the_linter() -> None:
    glm = model_facts("glm4_1v")
    model = CostModel(make_profile(model="glm4_1v"))
    calls = load_workload("mixed", glm)
    advice = advise(calls, model)
    assert advice.video_limit == 0
    assert "--limit-mm-per-prompt '{\"video\": 0}'" in advice.serve_line
    limits = Limits.of(glm, video_limit=0)
    assert not lint(glm, advice.answer.configuration, limits, group(calls, ItemsPerCall(4))).failed


def test_glm_videos_get_frames_that_hold_their_batches() -> None:
    calls = workload([[64, 128], [256], [64, 64, 64]], "glm4_1v", frames=4)
    advice = advise(calls, CostModel(make_profile(model="glm4_1v")))
    frames = advice.answer.configuration.max_frames
    assert frames is not None
    resolved = resolve(advice.answer.configuration, Limits.of(model_facts("glm4_1v")))
    assert not plan(calls.tokens, calls.offsets, resolved, calls.frames).over_frames.any()
    assert not any(finding.rule == "frames-beyond-capture" for finding in advice.findings)


def test_videos_that_may_meet_on_a_busy_server_are_warned_of() -> None:
    """Two videos of 4 frames fit the largest budget together, and the answer for calls of one holds 4 or 5 frames."""
    model = CostModel(make_profile(model="glm4_1v"))
    advice = advise(filmed([[(64, 1)], [(250, 4)], [(503, 1)]]), model)
    assert advice.answer.max_frames < 8 <= advice.answer.max_items * 4
    assert advice.crowded_frames == 8
    assert "a batch can have 8, and vLLM raises (D4)" in str(advice.record()["frames_warning"])
    resolved = resolve(advice.answer.configuration, Limits.of(model_facts("glm4_1v")))
    meeting = filmed([[(250, 4), (250, 4)]])
    assert plan(meeting.tokens, meeting.offsets, resolved, meeting.frames).over_frames.any()

    held = advise(filmed([[(256, 4)], [(256, 4)]]), model)
    assert held.crowded_frames is None
    assert held.frames_warning is None
    assert advise(workload([[64], [300]], "glm4_1v"), model).frames_warning is None


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([16, 48, 64, 96, 256]), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
)
def test_no_max_frames_compute_less_and_hold_every_batch(calls: list[list[int]], frames: int, items: int) -> None:
    tokens = [[n * frames for n in call] for call in calls]  # so that a video's frames are whole
    setting = open_setting(workload(tokens, "glm4_1v", frames=frames))
    budgets = tuple(sorted({items * 32, 2048}))
    chosen = setting.with_frames(budgets, items)
    if frames == 1:  # images
        assert chosen.max_frames is None
        return

    def computed(most: int) -> int | None:
        made = setting.plan(replace(chosen, max_frames=most))
        if made.over_frames.any():
            return None
        held = made.budget_index[~made.fallback]
        return int(np.array(setting.captured(made.resolved))[held].sum())

    every = {most: computed(most) for most in range(items, items * 40)}
    assert chosen.max_frames is not None
    best = computed(chosen.max_frames)
    assert best is not None
    assert best <= min(value for value in every.values() if value is not None)


def test_frames_that_make_graphs_large_are_priced_or_refused_by_name() -> None:
    calls = workload([[64], [128], [256]], "glm4_1v", frames=4)
    study = open_study(calls, CostModel(make_profile(model="glm4_1v")))
    lean, wide = (study.candidate("", Configuration((64, 256), 4, frames)) for frames in (4, 1024))
    assert lean.captured == lean.budgets == (64, 256)
    assert wide.captured == (1024, 1024)
    assert lean.objective_us is not None
    assert wide.objective_us is not None
    # All three replays compute 1,024 tokens in place of 64, 256 and 256.
    assert wide.objective_us - lean.objective_us == pytest.approx((3 * 1024 - 64 - 256 - 256) * RATE / 3)
    assert wide.capture_bytes > lean.capture_bytes  # type: ignore[operator]  # both are known
    auto = study.candidate("vLLM auto", Configuration())
    assert auto.captured == (38_400,) * len(auto.budgets)
    assert "38,400 frames make the graph of budget 64 compute 38,400 tokens (D2)" in (auto.refused or "")
    assert auto.capture_bytes is None
    published = {one.name: one for one in study.baselines()}["pull request"]
    assert (published.max_frames, published.captured) == (32, published.budgets)
    short = study.candidate("short", Configuration((64, 256), 1, 3))
    assert "3 of 3 replays have up to 4 frames and the graphs hold 3: vLLM's copy raises (D4)" in (short.refused or "")
    images = open_study(workload([[97]], "glm4_1v"), CostModel(make_profile(model="glm4_1v")))
    assert "(D3)" in (images.candidate("", Configuration((64, 100), 8)).refused or "")


def filmed(calls: Sequence[Sequence[tuple[int, int]]]) -> Workload:
    """Calls of GLM-4.1V of (tokens, frames); one frame is an image."""
    made = workload([[tokens for tokens, _ in call] for call in calls], "glm4_1v")
    frames = np.array([t for call in calls for _, t in call])
    made.sizes[:, 2] = 2 * frames - (frames == 1)
    made.grids[:, 0] = frames
    made.grids[:, 2] = 2 * made.tokens // frames
    return made


@settings(max_examples=15, deadline=None)
@example([[(64, 1), (256, 4)], [(128, 1)]])
@example([[(128, 2)], [(128, 2), (128, 2), (128, 2)]])
@given(
    st.lists(
        st.lists(st.sampled_from([(64, 1), (150, 1), (128, 2), (256, 4), (96, 6)]), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_images_beside_videos_are_encoded_rightly(calls: list[list[tuple[int, int]]]) -> None:
    given_calls = filmed(calls)
    advice = advise(given_calls, CostModel(make_profile(model="glm4_1v")), constraints=Constraints(max_graphs=3))
    answer = advice.answer
    assert answer.refused is None
    assert not [finding for finding in advice.findings if finding.severity == "error"]
    videos = given_calls.is_video
    if videos.any() and not videos.all():
        assert answer.max_frames == answer.max_items  # D6
        published = {one.name: one for one in advice.baselines}["pull request"]
        assert "(D6)" in (published.refused or "")
        assert answer.captured == answer.budgets
    # Of videos alone there may be more frames than items, and graphs are whole multiples of either (D3).
    assert all(
        0 <= size - budget < answer.max_frames or size == budget
        for size, budget in zip(answer.captured, answer.budgets, strict=True)
    )


@pytest.mark.parametrize("calls", [[[4999]], [[64], [7400]], [[4096, 5000]] * 2 + [[64, 64]]])
def test_no_graph_of_glm_is_wider_than_its_position_table(calls: list[list[int]]) -> None:
    advice = advise(workload(calls, "glm4_1v"), CostModel(make_profile(model="glm4_1v")))
    assert not [finding.rule for finding in advice.findings if finding.severity == "error"]  # D7
    assert advice.answer.budgets[-1] // advice.answer.max_items <= 4096


def test_a_film_beside_images_that_no_budget_holds_is_refused() -> None:
    with pytest.raises(WorkbenchError, match=r"a call has 9,000 frames.*D6"):
        advise(filmed([[(64, 1)], [(9000, 9000)]]), CostModel(make_profile(model="glm4_1v")))


def test_glm_may_leave_large_items_to_eager() -> None:
    # Eager is cheap here, and a graph of 4,096 is not: the best budgets end below the largest item.
    profile = make_profile(model="glm4_1v", base=lambda b: base_us(b) * (1 if b <= 512 else 100))
    advice = advise(workload([[100]] * 50 + [[4000]], "glm4_1v"), CostModel(profile))
    assert advice.answer.budgets[-1] < 4000
    assert advice.answer.prediction is not None
    assert advice.answer.prediction.fallback_calls == 1
    assert advice.bound_us <= (advice.answer.objective_us or 0)


def test_configurations_to_compare() -> None:
    named = {"auto": Configuration(), "hand": Configuration((128, 2048), 4), "best": None}
    limits = Limits.of(ERNIE, max_model_len=16_384, max_num_batched_tokens=8_192, video_limit=0)
    calls = load_workload("mixed", ERNIE)
    chosen = configurations_for(calls, named, MODEL, limits, cover=True)
    assert chosen["auto"] == Configuration()
    assert chosen["hand"].budgets == (128, 2048, 4096)
    assert chosen["best"] == advise(calls, MODEL, limits).answer.configuration
    assert configurations_for(calls, {"hand": named["hand"]}, None, limits)["hand"] == named["hand"]
    with pytest.raises(WorkbenchError, match="--profile"):
        configurations_for(calls, named, None, limits)


# Parts ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9)), min_size=1, max_size=30),
    st.sampled_from([0.0, 50.0, 99.0, 100.0]),
)
def test_weighted_percentile_is_that_of_the_repeated_values(rows: list[tuple[float, int]], percent: float) -> None:
    values, weights = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    wanted = np.percentile(np.repeat(values, weights), percent)
    assert loops.weighted_percentile(values, weights, percent) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_a_sample_holds_whole_calls() -> None:
    random = np.random.default_rng(1)
    calls = [random.integers(1, 99, int(n)).tolist() for n in random.integers(1, 5, 500)]
    given_calls = workload(calls)
    made = plan(given_calls.tokens, given_calls.offsets, resolve(Configuration((99,), 1), Limits()))
    queues = loops.distinct(made.arrangement, made.arrangement.tokens.astype(float))
    assert queues.weight.sum() == 500
    drawn = loops.sample(queues, 200, seed=0)
    assert 150 < len(drawn.tokens) <= 210
    whole = {tuple(part.tolist()) for part in np.split(queues.tokens, queues.first[1:-1])}
    assert {tuple(part.tolist()) for part in np.split(drawn.tokens, drawn.first[1:-1])} <= whole


def test_the_budgets_chosen_for_fixed_batches_are_the_cheapest() -> None:
    random = np.random.default_rng(3)
    sums = random.integers(64, 700, 60)
    areas, weights = np.asarray((4.0 * sums) ** 2, np.float64), random.integers(1, 4, 60)
    every = np.arange(8193)
    tables = loops.Tables(
        base=np.interp(every, MODEL.replay.budgets, MODEL.replay.base),
        slope=np.interp(every, MODEL.replay.budgets, MODEL.replay.slope),
        tail=np.zeros(8193),
        eager=np.full(8193, math.inf),
        call_us=0.0,
        batch_us=0.0,
        item_us=0.0,
        low=64,
        high=8192,
    )
    candidates = np.unique(sums)
    chosen = loops.choose_budgets(sums, areas, weights, candidates, tables, 3, open_end=False)

    def cost(budgets: Sequence[int]) -> float:
        held = np.array(sorted(budgets))[np.searchsorted(sorted(budgets), sums)]
        return float((weights * (tables.base[held] + tables.slope[held] * areas)).sum())

    assert [len(choice) for choice in chosen] == [1, 2, 3]
    for count, choice in enumerate(chosen, start=1):
        others = itertools.combinations(candidates[:-1].tolist(), count - 1)
        assert cost(choice.tolist()) == pytest.approx(min(cost((*other, candidates[-1])) for other in others))


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    write_json(path, make_profile())
    return path


Run = Callable[..., str]


@pytest.fixture
def run(profile_file: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("workbench.environment.gpus", list)

    def invoke(*options: str, fails: bool = False) -> str:
        result = CliRunner().invoke(app, ["advise", "--profile", str(profile_file), *options])
        if fails:
            assert isinstance(result.exception, WorkbenchError), result.output
            return str(result.exception)
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


def test_the_command_prints_one_json_object(run: Run) -> None:
    record = json.loads(run("--workload", "mixed", "--max-graphs", "5", "--json"))
    assert record["compilation_config"]["cudagraph_mm_encoder"] is True
    budgets = record["compilation_config"]["encoder_cudagraph_token_budgets"]
    assert budgets == record["answer"]["budgets"] == [reason["budget"] for reason in record["reasons"]]
    assert len(budgets) <= 5
    assert record["bound_us"] <= record["answer"]["objective_us"]
    assert record["profile"] == "ernie45_vl on NVIDIA H200"
    assert {"vLLM auto", "pull request", "powers of two", "equal steps"} <= {b["name"] for b in record["baselines"]}


def test_the_command_prints_for_people(run: Run) -> None:
    shown = run("--workload", "{(224, 224, 1): 1.0}", "--objective", "p99", "--grouping", "3")
    assert "vllm serve MODEL --compilation-config '{" in shown
    assert "NVIDIA H200" in shown
    assert "99th percentile" in shown


def test_a_workload_of_images_is_of_a_server_without_videos_and_the_notebook_says_so() -> None:
    calls, glm = workload([[64]], "glm4_1v"), model_facts("glm4_1v")
    silent = Limits.of(glm, max_model_len=16_384, max_num_batched_tokens=8_192)
    first = [open_setting(calls, limits).candidate("", Configuration()).captured[0] for limits in (None, silent)]
    assert first == [64, 38_400]
    notebook = Path(__file__).resolve().parents[1] / "notebooks" / "02_budget_sweep.ipynb"
    assert "the server allows no videos, as the workload has none" in notebook.read_text("utf-8")


def test_a_distance_from_the_bound_without_padding_is_explained() -> None:
    advice = advise(workload([[256]]), CostModel(make_profile()))
    assert advice.answer.waste == 0
    above = replace(advice, bound_us=advice.answer.objective_us * 0.98)  # type: ignore[operator]  # it has a price
    assert "larger budget may be cheaper" in _why_above(above)
    assert _why_above(replace(advice, bound_us=advice.answer.objective_us)) == ""  # type: ignore[arg-type]
    assert _why_above(replace(above, answer=replace(advice.answer, waste=0.1))) == ""


def test_the_command_refuses_limits_that_vllm_refuses(run: Run) -> None:
    for option, value, message in (
        ("--max-model-len", "-5", "not positive"),
        ("--max-num-batched-tokens", str(10**20), "larger than any encoder call"),
    ):
        assert message in run("--workload", "pull-request", option, value, fails=True)


def test_the_scheduler_puts_many_images_into_a_call(run: Run) -> None:
    record = json.loads(run("--workload", "pull-request", "--grouping", "scheduler", "--json"))
    assert "scheduler model" in record["source"]
    assert record["answer"]["max_items"] > 1


def test_the_command_refuses_bad_input(run: Run, tmp_path: Path) -> None:
    assert "measured for ernie45_vl, not glm4_1v" in run("--workload", "mixed", "--model", "glm4_1v", fails=True)
    assert "no workload" in run("--workload", "nothing", fails=True)
    assert "grouping 'x'" in run("--workload", "mixed", "--grouping", "x", fails=True)
    assert "within the limits" in run("--workload", "mixed", "--max-memory", "1", fails=True)
    assert "above 0" in run("--workload", "mixed", "--max-memory", "nan", fails=True)
    json.loads(run("--workload", "glm-image", "--model", "glm4_1v", "--any-profile", "--json"))
