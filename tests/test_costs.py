"""The cost model on profiles of a known formula: what it must recover, interpolate, and refuse."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import profiles
from tests.profiles import call_us, make_profile
from workbench import costs
from workbench.budgets import Resolved
from workbench.costs import CostModel, CostProfile, ReplayModel, fit_host, read_profile
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.planner import Plan, plan

MODEL = CostModel(make_profile())
BUDGETS = (64, 256, 1024, 4096)


def planned(calls: list[list[int]], budgets: tuple[int, ...] = BUDGETS, max_items: int = 4) -> Plan:
    tokens = np.array([n for call in calls for n in call], np.int64)
    return plan(tokens, np.cumsum([0, *map(len, calls)]), Resolved(budgets, max_items, 0))


def formula(calls: list[list[int]], budgets: tuple[int, ...] = BUDGETS, max_items: int = 4) -> list[float]:
    """The stated formula over the planner's own batches."""
    made = planned(calls, budgets, max_items)
    per_call: list[list[tuple[int, list[int]]]] = [[] for _ in calls]
    for call, budget, first, end in zip(made.call, made.budget, made.first, made.first[1:], strict=False):
        per_call[call].append((int(budget), made.arrangement.tokens[first:end].tolist()))
    return [call_us(batches) if batches else 0.0 for batches in per_call]


def test_host_terms_are_recovered() -> None:
    assert MODEL.host.call_us == pytest.approx(profiles.CALL, abs=0.01)
    assert MODEL.host.batch_us == pytest.approx(profiles.BATCH, abs=0.01)
    assert MODEL.host.item_us == pytest.approx(profiles.ITEM, abs=0.01)
    assert abs(MODEL.host.residual_low) < 1e-6
    assert abs(MODEL.host.residual_high) < 1e-6


def test_the_interval_is_as_wide_as_the_noise() -> None:
    host = CostModel(make_profile(noise=0.02)).host
    assert -0.06 < host.residual_low < -0.004
    assert 0.004 < host.residual_high < 0.06


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 4096), max_size=9), min_size=1, max_size=6).filter(any))
def test_calls_cost_what_the_formula_says(calls: list[list[int]]) -> None:
    predicted = MODEL.call_costs(planned(calls))
    np.testing.assert_allclose(predicted.wall_us, formula(calls), rtol=1e-6, atol=1e-6)
    assert predicted.replays_only.all()
    assert (predicted.gpu_us <= predicted.wall_us).all()


def test_statistics_leave_empty_calls_out() -> None:
    calls = [[64], [], [300, 300], [4000]]
    prediction = MODEL.predict(planned(calls))
    times = [formula([call])[0] for call in calls if call]
    assert prediction.calls == 3
    assert prediction.mean_us == pytest.approx(np.mean(times))
    assert prediction.median_us == pytest.approx(np.median(times))
    assert prediction.p99_us == pytest.approx(np.percentile(times, 99))
    assert prediction.low_us == pytest.approx(prediction.mean_us)
    assert prediction.gpu_mean_us < prediction.mean_us
    with pytest.raises(WorkbenchError, match="no item"):
        MODEL.predict(planned([[], []]))


def test_fallbacks_are_priced_and_counted() -> None:
    prediction = MODEL.predict(planned([[64], [5000]]))
    eager = profiles.CALL + profiles.EAGER + profiles.EAGER_RATE * 5000
    assert prediction.fallback_calls == 1
    assert prediction.mean_us == pytest.approx((formula([[64]])[0] + eager) / 2)


def test_replays_between_measured_budgets_are_interpolated() -> None:
    # 1,100 lies between 1,024 and 1,280; the formula is linear, so interpolation is exact.
    assert MODEL.replay.time_us(1100, 16e6)[()] == pytest.approx(profiles.base_us(1100) + profiles.SLOPE * 16e6)


def test_the_slope_of_attention_is_never_negative() -> None:
    points = [
        costs.ReplayPoint(budget=64, sequences=[256], gpu_us=[100.0]),
        costs.ReplayPoint(budget=64, sequences=[64] * 4, gpu_us=[101.0]),
    ]
    fitted = ReplayModel.fit(points)
    assert fitted.slope.tolist() == [0.0]
    assert fitted.base.tolist() == [100.5]


def test_a_host_term_that_would_be_negative_is_zero() -> None:
    profile = make_profile()
    # Items that make calls cheaper: the fit must not believe it.
    calls = [
        msgspec.structs.replace(call, wall_us=[t - 100 * sum(b.items for b in call.batches) for t in call.wall_us])
        for call in profile.calls
    ]
    host = fit_host(calls, profile.replays, profile.tails)
    assert host.item_us == 0.0
    assert host.call_us >= 0.0


def test_captures_cost_one_first_and_the_rest_beside_it() -> None:
    budgets = (64, 256, 1024)
    later = sum(profiles.LATER_BYTES + profiles.LATER_RATE * b for b in budgets[:-1])
    assert MODEL.capture_bytes(budgets) == pytest.approx(profiles.FIRST_BYTES * 1024 + later, abs=2)
    seconds = sum(map(profiles.later_seconds, budgets))
    assert MODEL.capture_seconds(budgets) == pytest.approx(seconds)


def test_calls_that_cannot_tell_terms_apart_are_refused() -> None:
    profile = make_profile()
    one_kind = [call for call in profile.calls if len(call.batches) == 1 and call.batches[0].items == 1]
    with pytest.raises(WorkbenchError, match="cannot tell"):
        fit_host(one_kind * 4, profile.replays, profile.tails)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budgets", "outside"), [((32, 4096), "32"), ((64, 9000), "9000")])
def test_budgets_outside_the_profile_are_refused(budgets: tuple[int, ...], outside: str) -> None:
    with pytest.raises(WorkbenchError, match=f"64 to 8192, not {outside}"):
        MODEL.predict(planned([[20], [8500 if outside == "9000" else 20]], budgets, 1))


def test_several_ranks_are_refused() -> None:
    made = plan(np.array([64, 64]), np.array([0, 2]), Resolved((64,), 1, 0), dp=2)
    with pytest.raises(WorkbenchError, match="one GPU"):
        MODEL.call_costs(made)


@pytest.mark.parametrize(
    ("field", "ask", "message"),
    [
        ("eager", lambda model: model.eager_us(64), "eager"),
        ("captures", lambda model: model.capture_bytes((64,)), "memory"),
        ("captures", lambda model: model.capture_seconds((64,)), "capture times"),
        ("calls", lambda model: model.host, "cannot tell"),
    ],
)
def test_what_was_not_measured_is_refused(field: str, ask: object, message: str) -> None:
    model = CostModel(msgspec.structs.replace(make_profile(), **{field: []}))
    assert callable(ask)
    with pytest.raises(WorkbenchError, match=message):
        ask(model)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_json(path, make_profile())
    return path


def test_a_profile_is_read_back(stored: Path) -> None:
    assert read_profile(stored, "ernie45_vl", "NVIDIA H200") == make_profile()
    assert read_profile(stored).title == "ernie45_vl on NVIDIA H200"


def test_another_model_or_gpu_is_refused(stored: Path) -> None:
    with pytest.raises(WorkbenchError, match=r"measured for ernie45_vl, not glm4_1v.*--any-profile"):
        read_profile(stored, "glm4_1v")
    with pytest.raises(WorkbenchError, match=r"measured on NVIDIA H200, not NVIDIA L4.*--any-profile"):
        read_profile(stored, gpu="NVIDIA L4")


def test_a_profile_of_this_machines_gpu_is_asked_for(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_profile(gpu="NVIDIA L4").environment.gpus
    monkeypatch.setattr("workbench.environment.gpus", lambda: other)
    with pytest.raises(WorkbenchError, match="not NVIDIA L4"):
        costs.choose_profile("ernie45_vl", stored)
    assert costs.choose_profile("glm4_1v", stored, any_profile=True).model.key == "ernie45_vl"
    monkeypatch.setattr("workbench.environment.gpus", list)
    assert costs.choose_profile("ernie45_vl", stored).model.key == "ernie45_vl"


def test_another_schema_version_is_refused(stored: Path) -> None:
    write_json(stored, msgspec.structs.replace(make_profile(), schema_version=99))
    with pytest.raises(WorkbenchError, match="version 99"):
        read_profile(stored)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"schema_version": 1}')
    with pytest.raises(WorkbenchError, match="not what this command reads"):
        read_profile(path)


def test_a_model_without_a_shipped_profile_is_told_how_to_measure() -> None:
    with pytest.raises(WorkbenchError, match="calibrate --model qwen3_vl"):
        costs.default_profile("qwen3_vl")


def test_the_shipped_profile_is_of_an_h200() -> None:
    profile: CostProfile = costs.choose_profile("ernie45_vl")
    assert profile.title == "ernie45_vl on NVIDIA H200"
    assert profile.replay_kind == "cuda_graph"
    assert profile.model.depth == 32
    model = CostModel(profile)
    assert int(model.replay.budgets[-1]) >= 6177  # the largest image of ERNIE-4.5-VL
    assert (np.diff(model.replay.base) > -0.05 * model.replay.base[:-1]).all()


def test_an_eager_call_is_bound_by_its_launches_or_by_the_gpu() -> None:
    smallest = min(point.tokens for point in MODEL.profile.eager if point.arm == "eager_served")
    launches = MODEL.eager_us([smallest], "eager_served")[0] + 9 * MODEL.host.item_us
    assert MODEL.served_us([40], [10 * 16.0**2], [10])[0] == pytest.approx(launches)
    rows, squares = 4096.0, 16384.0**2
    work = MODEL.replay.time_us(rows, squares) + MODEL.tail_us(rows)
    assert work > launches
    assert MODEL.served_us([rows], [squares], [10])[0] == pytest.approx(work)
    # Beyond the largest budget more tokens cost more.
    beyond = MODEL.served_us([2 * rows, 3 * rows], [squares, squares], [10, 10])
    assert work < beyond[0] < beyond[1]


def test_an_eager_call_without_eager_times_is_refused() -> None:
    without = CostModel(msgspec.structs.replace(MODEL.profile, eager=[]))
    with pytest.raises(WorkbenchError, match="no eager times"):
        without.served_us([64], [1.0], [1])
