"""Calibration and comparison on vLLM's own classes, by static replays of a tiny encoder; no launch timing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests import profiles
from workbench.budgets import Configuration, Resolved
from workbench.comparison import check
from workbench.costs import BatchShape, CallPoint, CostModel, read_profile
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.planner import plan

if TYPE_CHECKING:
    from workbench.comparison import Comparison, Comparisons
    from workbench.costs import CostProfile
    from workbench.encoder.session import EncoderSession

pytestmark = pytest.mark.engine
BUDGETS = (64, 96, 128)


@pytest.fixture(scope="module")
def profile(ernie: "EncoderSession") -> "CostProfile":
    from workbench.encoder.calibrate import Effort, calibrate

    effort = Effort(samples=2, warmup=1, configurations=3, calls=4, call_samples=2)
    return calibrate(ernie, BUDGETS, effort=effort, seed=3)


def test_a_profile_has_a_sample_of_everything(profile: "CostProfile", ernie: "EncoderSession") -> None:
    assert profile.replay_kind == "static_replay"
    assert profile.model == ernie.model_record
    assert {point.budget for point in profile.replays} == set(BUDGETS)
    assert [len(point.sequences) for point in profile.replays] == [1, 1, 16] * len(BUDGETS)
    for point in profile.replays:
        assert sum(point.sequences) <= 4 * point.budget
    assert {point.arm for point in profile.eager} == {"eager_served", "eager_fallback"}
    assert [point.budget for point in profile.captures] == sorted(BUDGETS, reverse=True)
    assert len(profile.calls) == 12
    samples = [point.gpu_us for point in profile.replays]
    for timed in (profile.tails, profile.eager, profile.calls):
        samples += [point.wall_us for point in timed]
    assert all(len(one) == 2 and min(one) > 0 for one in samples)
    assert all(np.less_equal(call.host_us, call.wall_us).all() for call in profile.calls)


def test_the_batches_of_calls_are_those_of_the_planner(profile: "CostProfile") -> None:
    for call in profile.calls:
        assert all(batch.budget > 0 for batch in call.batches)  # nothing fell back
        assert all(batch.tokens <= batch.budget for batch in call.batches)
        for batch in call.batches:
            assert batch.squares <= (4 * batch.tokens) ** 2
            assert batch.squares * batch.items >= (4 * batch.tokens) ** 2 * 0.999


def test_a_profile_predicts_and_survives_its_file(profile: "CostProfile", tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_json(path, profile)
    model = CostModel(read_profile(path, "ernie45_vl"))
    assert model.host.call_us >= 0
    made = plan(np.array([64, 30, 20]), np.array([0, 1, 3]), Resolved((64, 96), 2, 0))
    prediction = model.predict(made)
    assert prediction.calls == 2
    assert prediction.gpu_mean_us > 0
    with pytest.raises(WorkbenchError, match="capture memory"):
        model.capture_bytes((64,))  # a CPU has no pool


def test_the_session_is_left_as_it_was(profile: "CostProfile", ernie: "EncoderSession") -> None:
    assert ernie.configuration == Configuration((64, 128, 256), 4)
    assert list(ernie.manager.token_budgets) == [64, 128, 256]


def test_configurations_are_timed_on_the_same_calls(ernie: "EncoderSession") -> None:
    from workbench.encoder.calibrate import compare

    calls = [[(1, 16, 16)], [(1, 8, 8)] * 5]
    named = {"two": Configuration((64, 128), 2), "one": Configuration((80,), 8)}
    comparison = compare(ernie, named, calls, repeats=3, warmup=1, workload="tiny")
    assert [one.name for one in comparison.configurations] == ["two", "one"]
    assert [one.budgets for one in comparison.configurations] == [[64, 128], [80]]
    for timings in (comparison.eager_served, *(one.calls for one in comparison.configurations)):
        assert [call.tokens for call in timings] == [[64], [16] * 5]
        assert all(len(call.wall_us) == 3 for call in timings)
    assert [cost.budget for cost in comparison.configurations[0].capture] == [128, 64]


def test_a_call_that_vllm_cannot_serve_has_no_samples(ernie: "EncoderSession") -> None:
    from workbench.encoder.calibrate import compare

    comparison = compare(ernie, {"small": Configuration((64,), 2)}, [[(1, 32, 32)], [(1, 8, 8)]], repeats=2)
    large, small = comparison.configurations[0].calls
    assert large.wall_us == []  # D1: 256 tokens above the largest budget
    assert len(small.wall_us) == 2
    assert all(call.wall_us for call in comparison.eager_served)


def test_the_held_out_check_uses_other_calls(ernie: "EncoderSession") -> None:
    from workbench.encoder.calibrate import check_held_out

    comparisons = check_held_out(ernie, (64, 256), configurations=1, calls=3, repeats=1, seed=5)
    assert [one.workload for one in comparisons] == ["thumbnails"]  # photographs are above 256 tokens
    (timing,) = comparisons[0].configurations
    assert all(max(call.tokens) <= timing.budgets[-1] for call in timing.calls)


def test_bad_budgets_are_refused() -> None:
    from workbench.encoder.calibrate import check_budgets

    for budgets in ((), (64,), (64, 64), (0, 64)):
        with pytest.raises(WorkbenchError, match="at least two"):
            check_budgets(budgets)


# Videos ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def films(glm: "EncoderSession") -> "CostProfile":
    """A profile of GLM-4.1V: images and videos."""
    from workbench.encoder.calibrate import Effort, calibrate

    effort = Effort(samples=2, configurations=3, calls=4, call_samples=2, most_computed=300)
    return calibrate(glm, (64, 96, 256), effort=effort, seed=3)


def test_replays_of_videos_have_a_sequence_a_frame(films: "CostProfile") -> None:
    of_64 = [point.sequences for point in films.replays if point.budget == 64]
    assert of_64 == [[256], [128], [16] * 16, [32] * 8]
    # As vLLM captured them: frames equal to items, so that no graph computes more than its budget.
    assert {point.budget for point in films.replays} == {64, 96, 256}


def test_frames_are_studied_where_their_graphs_are_small_enough(films: "CostProfile", glm: "EncoderSession") -> None:
    from workbench.encoder.calibrate import frames_studied

    shown = [(one.budget, one.max_items, one.max_frames, one.computed) for one in films.frames]
    assert shown == [(b, 4, frames, b) for b in (64, 256) for frames in (4, 16, 64)]
    assert {tuple(one.sequences) for one in films.frames} == {(64,) * 4, (256,) * 4}  # one video in all of a budget
    assert all(one.seconds > 0 and one.bytes is None and min(one.gpu_us) > 0 for one in films.frames)
    every = {(one.budgets[0], one.max_items, one.max_frames): computed for one, computed in frames_studied(glm, 10**6)}
    assert every[64, 4, 2400] == every[256, 4, 2400] == 2400  # vLLM's own frames
    assert every[64, 64, 38_400] == 600 * 64  # and everything left to it: D2


def test_frames_are_what_vllm_captures(glm: "EncoderSession") -> None:
    """The tokens that the study says a graph computes are the rows of the buffer that vLLM made."""
    from workbench.encoder.calibrate import frames_studied

    for configuration, computed in frames_studied(glm, 256):
        with glm.alongside(configuration) as manager, glm.using(manager, configuration):
            glm.capture()
            (budget,) = configuration.budgets
            buffers = manager.budget_graphs["default"][budget].input_buffers
            assert buffers["pixel_values"].shape[0] == 4 * computed
            assert buffers["cu_seqlens"].numel() == (configuration.max_frames or 0) + 1


def test_calls_of_videos_are_calibrated_and_predicted(films: "CostProfile", glm: "EncoderSession") -> None:
    shapes = [batch for call in films.calls for batch in call.batches]
    assert all(batch.tokens <= batch.budget for batch in shapes)
    # Of one sequence a frame: below the squares of images of as many tokens in as many items.
    assert any(batch.squares * batch.items < (4 * batch.tokens) ** 2 * 0.9 for batch in shapes)
    model = CostModel(films)
    made = plan(np.array([64, 64]), np.array([0, 1, 2]), Resolved((64,), 4, 4), np.array([1, 4]))
    image, video = model.call_costs(made).gpu_us
    assert video <= image  # attention over four short sequences instead of a long one
    assert not glm.findings  # no replay met a zeroed tail: D6


def test_images_and_videos_are_compared_and_checked(films: "CostProfile", glm: "EncoderSession") -> None:
    from workbench.encoder.calibrate import compare, without_videos

    calls = [[(1, 16, 16)], [(4, 8, 8), (2, 8, 16)]]
    named = {"held": Configuration((64, 256), 4, 16), "short": Configuration((128,), 2, 2)}
    comparison = compare(glm, named, calls, modalities=["image", "video"], repeats=2, warmup=1, workload="both")
    held, short = comparison.configurations
    assert [(call.tokens, call.frames) for call in held.calls] == [([64], []), ([64, 64], [4, 2])]
    assert (held.max_frames, short.max_frames) == (16, 2)
    assert [len(call.wall_us) for call in held.calls] == [2, 2]
    assert [len(call.wall_us) for call in short.calls] == [2, 0]  # 6 frames, and the graph holds 2: D4
    stored = comparison_file(comparison, films)
    rows = {row.configuration: row for row in check(CostModel(films), stored)}
    assert (rows["held"].calls, rows["held"].fallback_calls) == (2, 0)
    assert rows["short"].failed_calls == 1
    assert without_videos(named)["held"] == Configuration((64, 256), 4, 0)


def comparison_file(comparison: "Comparison", profile: "CostProfile") -> "Comparisons":
    from workbench.encoder.calibrate import stored

    return stored("compare", profile.environment, [comparison])


def test_frames_that_exceed_what_was_measured_have_no_prediction(films: "CostProfile", glm: "EncoderSession") -> None:
    from workbench.encoder.calibrate import compare

    # 64 frames for each of 8 items: every graph computes 512 tokens, the profile ends at 256.
    named = {"lean": Configuration((64,), 8, 8), "wide": Configuration((64,), 8, 512)}
    comparison = compare(glm, named, [[(4, 8, 8)]], modalities=["video"], repeats=1, warmup=1, workload="film")
    assert all(call.wall_us for one in comparison.configurations for call in one.calls)
    assert [row.configuration for row in check(CostModel(films), comparison_file(comparison, films))] == ["lean"]


def test_the_held_out_check_has_clips_where_videos_are_served(films: "CostProfile", glm: "EncoderSession") -> None:
    from workbench.encoder.calibrate import CLIPS, check_held_out, held_out_calls
    from workbench.models import model_facts

    assert CLIPS not in held_out_calls(1, 1, "ernie45_vl")
    comparisons = check_held_out(glm, (64, 256), configurations=1, calls=2, repeats=1, seed=5)
    facts = model_facts("glm4_1v")
    asked = held_out_calls(5, 2, "glm4_1v")
    assert {one.workload: [call.tokens for call in one.configurations[0].calls] for one in comparisons} == {
        name: [[facts.tokens(grid) for grid in call] for call in calls] for name, calls in asked.items()
    }
    clips = comparisons[-1]
    assert clips.workload == CLIPS
    (timing,) = clips.configurations
    assert timing.max_frames == 8 * timing.max_items
    assert all(call.frames and call.wall_us for call in timing.calls)
    (row,) = check(CostModel(films), comparison_file(clips, films))
    assert (row.calls, row.failed_calls) == (2, 0)


def test_a_profile_of_glm_is_found_and_advises_frames(
    films: "CostProfile", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench import costs, outcomes
    from workbench.cli import app

    path = tmp_path / "profile.json"
    write_json(path, films)
    monkeypatch.setitem(costs.SHIPPED, "glm4_1v", path)
    assert costs.choose_profile("glm4_1v") == films
    monkeypatch.delenv(outcomes.SOURCE_VARIABLE, raising=False)
    shown = outcomes.measured("glm4_1v")  # what notebook 02 reads
    assert shown is not None
    assert shown.model.profile == films
    assert len(outcomes.frames_measured(shown.model)) == len(films.frames)
    workload = "{(224, 224, 8): 1.0}"
    result = CliRunner().invoke(app, ["advise", "--model", "glm4_1v", "--workload", workload, "--json"])
    assert result.exit_code == 0, result.output
    advice = json.loads(result.stdout)
    assert advice["answer"]["budgets"] == [256]
    assert advice["compilation_config"]["encoder_cudagraph_max_frames_per_batch"] >= 4
    assert advice["answer"]["captured"] == [256]
    auto = next(one for one in advice["baselines"] if one["name"] == "vLLM auto")
    assert "(D2)" in auto["refused"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(64, 4096), (64, 128), (64, 96, 256), (80, 1000)]))
def test_random_configurations_hold_what_their_budgets_say(seed: int, budgets: tuple[int, ...]) -> None:
    from workbench.encoder.calibrate import CALL_ITEMS, random_configuration, random_videos

    random = np.random.default_rng(seed)
    for items in (0, *CALL_ITEMS):
        drawn = random_configuration(random, budgets, items)
        assert budgets[0] <= drawn.budgets[0] <= drawn.budgets[-1] <= budgets[-1]
        assert drawn.max_items == items or items == 0
        assert all(budget % drawn.max_items == 0 for budget in drawn.budgets)
    tokens, frames = random_videos(random, budgets[-1])
    for n, t in zip(tokens, frames, strict=True):
        assert 0 < n <= budgets[-1]
        assert n % t == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_calls_tell_what_an_item_costs(seed: int) -> None:
    """32 small images in one replay are predicted by calls as calibration draws them, timed with 3 % noise."""
    from workbench.encoder.calibrate import CALL_ITEMS, random_call, random_configuration

    random = np.random.default_rng(seed)
    profile = profiles.make_profile()
    calls = []
    for items in CALL_ITEMS:
        configuration = random_configuration(random, profiles.BUDGETS[:-2], items)
        for index in range(16):
            tokens = np.array(random_call(random, configuration.budgets[-1], many=index % 3 == 2))
            made = plan(tokens, np.array([0, len(tokens)]), Resolved(configuration.budgets, items, 0))
            batches = [
                (int(budget), made.arrangement.tokens[first:end].tolist())
                for budget, first, end in zip(made.budget, made.first, made.first[1:], strict=False)
            ]
            shapes = [
                BatchShape(budget=b, items=len(n), tokens=sum(n), squares=sum((4 * one) ** 2 for one in n))
                for b, n in batches
            ]
            wall = profiles.call_us(batches) * (1 + 0.03 * random.standard_normal(5))
            calls.append(CallPoint(batches=shapes, wall_us=wall.tolist(), host_us=wall.tolist()))
    model = CostModel(msgspec.structs.replace(profile, calls=calls))
    shapes = [batch for call in calls for batch in call.batches]
    assert sum(batch.items > 8 for batch in shapes) >= 4
    made = plan(np.full(32, 24), np.array([0, 32]), Resolved((768,), 32, 0))
    assert model.call_costs(made).wall_us[0] == pytest.approx(profiles.call_us([(768, [24] * 32)]), rel=0.05)


def test_every_graph_of_a_profile_holds_its_budget() -> None:
    from workbench.encoder.calibrate import BUDGETS, shared_items

    asked = {BUDGETS: 16, (64, 96): 16, (100, 130): 10, (64, 97): 1, (8, 8): 8}
    assert {budgets: shared_items(budgets) for budgets in asked} == asked


def test_first_calls_keep_equal_ones_and_leave_videos_out() -> None:
    from workbench.encoder.calibrate import first_calls, first_calls_of_both
    from workbench.models import model_facts
    from workbench.sources import load_workload

    ernie = load_workload("pull-request", model_facts("ernie45_vl"))
    assert first_calls(ernie, 3) == [[(1, 16, 16)]] * 3
    videos = load_workload("glm-video", model_facts("glm4_1v"))
    with pytest.raises(WorkbenchError, match=r"no call of images.*`workbench compare`"):
        first_calls(videos, 3)
    assert first_calls_of_both(videos, 2) == ([[(4, 16, 16)]] * 2, ["video"] * 2)
    both = load_workload("glm-mixed", model_facts("glm4_1v"))
    grids, modalities = first_calls_of_both(both, 60)
    assert set(modalities) == {"image", "video"}
    for call, modality in zip(grids, modalities, strict=True):
        assert {t > 1 for t, _, _ in call} == {modality == "video"}  # one modality a call, as vLLM encodes them


def test_named_configurations() -> None:
    from workbench.commands.costs import parse_named

    assert parse_named("a b=128,256:4") == ("a b", Configuration((128, 256), 4))
    assert parse_named("x=auto") == ("x", Configuration())
    assert parse_named("x=advised") == ("x", None)
    for text in ("128", "=128", "x=128:many", "x=12a"):
        with pytest.raises(WorkbenchError):
            parse_named(text)
