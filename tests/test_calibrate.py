"""Calibration and comparison on vLLM's own classes, by static replays of a tiny encoder; no launch timing."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from workbench.budgets import Configuration, Resolved
from workbench.costs import CostModel, read_profile
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.planner import plan

if TYPE_CHECKING:
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


def test_first_calls_keep_equal_ones_and_leave_videos_out() -> None:
    from workbench.encoder.calibrate import first_calls
    from workbench.models import model_facts
    from workbench.sources import load_workload

    ernie = load_workload("pull-request", model_facts("ernie45_vl"))
    assert first_calls(ernie, 3) == [[(1, 16, 16)]] * 3
    videos = load_workload("glm-video", model_facts("glm4_1v"))
    with pytest.raises(WorkbenchError, match="no call of images"):
        first_calls(videos, 3)


def test_named_configurations() -> None:
    from workbench.commands.costs import parse_named

    assert parse_named("a b=128,256:4") == ("a b", Configuration((128, 256), 4))
    assert parse_named("x=auto") == ("x", Configuration())
    assert parse_named("x=advised") == ("x", None)
    for text in ("128", "=128", "x=128:many", "x=12a"):
        with pytest.raises(WorkbenchError):
            parse_named(text)
