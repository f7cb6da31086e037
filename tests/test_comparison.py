"""Predictions beside measurements: what the check reports, and what it refuses."""

from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from tests.comparisons import MODEL, make_comparisons
from tests.profiles import FIRST_BYTES, RATE, SLOPE, call_us, make_profile
from workbench import outcomes
from workbench.budgets import Configuration
from workbench.commands.costs import _show_measured
from workbench.comparison import Comparisons, check, predicted_calls, read_comparisons
from workbench.costs import CostModel
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.views import budget_words

CALLS = [[64], [300, 40], [1000, 64, 900], [4000]]
SMALL = [[16] * 12, [64] * 20]
WIDE = Configuration((64, 512, 2048, 4096), 4)
GOOD = Configuration((64, 384, 1024, 2048, 4096), 3)
NARROW = Configuration((2048,), 4)


def test_a_perfect_model_has_no_error() -> None:
    rows = check(MODEL, make_comparisons({"a": (CALLS, {"wide": WIDE}), "b": (SMALL, {"wide": WIDE})}))
    assert [(row.workload, row.configuration, row.calls) for row in rows] == [("a", "wide", 4), ("b", "wide", 2)]
    for row in rows:
        assert row.error == pytest.approx(0, abs=1e-9)
        assert row.call_error == pytest.approx(0, abs=1e-9)
        assert row.predicted_p99_us == pytest.approx(row.measured_p99_us, rel=0.02)
        assert row.failed_calls == row.fallback_calls == 0


@pytest.mark.parametrize("off", [-0.1, 0.25])
def test_an_error_is_seen(off: float) -> None:
    (row,) = check(MODEL, make_comparisons({"a": (CALLS, {"wide": WIDE})}, off=off))
    assert row.error == pytest.approx(1 / (1 + off) - 1)
    assert row.call_error == pytest.approx(abs(1 / (1 + off) - 1))


def test_noise_does_not_bias() -> None:
    (row,) = check(MODEL, make_comparisons({"a": (CALLS * 30, {"wide": WIDE})}, noise=0.03))
    assert abs(row.error) < 0.01
    assert 0.001 < row.call_error < 0.05


def test_failed_calls_and_fallbacks_are_counted_apart() -> None:
    comparisons = make_comparisons({"a": (CALLS, {"narrow": NARROW, "wide": WIDE})}, fails={"wide": 0})
    narrow, wide = check(MODEL, comparisons)
    assert (narrow.calls, narrow.fallback_calls, narrow.failed_calls) == (4, 1, 0)
    assert (wide.calls, wide.fallback_calls, wide.failed_calls) == (3, 0, 1)
    replays, _ = check(MODEL, comparisons, replays_only=True)
    assert (replays.calls, replays.fallback_calls) == (3, 0)


def test_a_configuration_of_which_nothing_ran_has_no_row() -> None:
    assert check(MODEL, make_comparisons({"a": ([[64]], {"wide": WIDE})}, fails={"wide": 0})) == []


def test_another_encoder_is_refused() -> None:
    comparisons = make_comparisons({"a": (CALLS, {"wide": WIDE})})
    with pytest.raises(WorkbenchError, match=r"ran ernie45_vl at depth 32, the profile glm4_1v"):
        check(CostModel(make_profile(model="glm4_1v")), comparisons)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "comparisons.json"
    comparisons = make_comparisons({"a": (CALLS, {"wide": WIDE})})
    write_json(path, comparisons)
    assert read_comparisons(path) == comparisons
    write_json(path, msgspec.structs.replace(comparisons, schema_version=9))
    with pytest.raises(WorkbenchError, match="version 9"):
        read_comparisons(path)
    path.write_text("[]")
    with pytest.raises(WorkbenchError, match="not what this command reads"):
        read_comparisons(path)


def test_the_validation_table_has_eager_bound_and_bill() -> None:
    workloads = {"a": (CALLS, {"auto": Configuration(), "advised": WIDE})}
    table = outcomes.validation(MODEL, make_comparisons(workloads)).set_index("configuration")
    assert list(table.index) == ["eager as served", "auto", "advised"]
    assert table.loc["auto", "graphs"] == 8
    assert table.loc["advised", "capture s"] == pytest.approx(0.4)
    assert table.loc["advised", "memory MiB"] == 4
    assert (table["bound ms"] <= table["measured mean ms"]).all()
    assert table.loc["auto", "error"] == pytest.approx(0, abs=1e-6)
    assert table.loc["eager as served", "measured mean ms"] == pytest.approx(24 + 12 * 6368 / 4000)


def test_what_is_won_is_a_share_of_the_room_above_the_bound() -> None:
    workloads = {"a": (CALLS, {"wide": WIDE, "poor": Configuration((4096,), 4), "advised": GOOD})}
    comparisons = make_comparisons(workloads, noise=0.002)
    table = outcomes.validation(MODEL, comparisons)
    (row,) = outcomes.won(comparisons, table).to_dict("records")
    times = table.set_index("configuration")["measured mean ms"]
    assert row["best other"] == "wide"
    room = times["wide"] - table["bound ms"].iloc[0]
    assert row["won"] == pytest.approx((times["wide"] - times["advised"]) / room, rel=1e-4)
    assert row["faster"] == pytest.approx(times["wide"] / times["advised"], rel=1e-4)
    assert 1 < row["low"] < row["faster"] < row["high"] < 1.1 * row["low"]
    assert (row["graphs"], row["best other graphs"]) == (5, 4)
    text = budget_words.gain(row)
    assert f"{row['faster']:.3f} times ({row['low']:.3f} to {row['high']:.3f}), {row['won']:.0%} of what" in text
    assert text.endswith("with 5 graphs of 5 MiB instead of 4 graphs of 4 MiB.")


def test_what_is_slower_or_alike_wins_no_share() -> None:
    workloads = {
        "a": (CALLS, {"good": GOOD, "advised": WIDE}),
        "b": (CALLS, {"same": WIDE, "advised": WIDE}),
    }
    comparisons = make_comparisons(workloads, noise=0.002)
    slower, alike = outcomes.won(comparisons, outcomes.validation(MODEL, comparisons)).to_dict("records")
    assert slower["high"] < 1
    assert slower["won"] is alike["won"] is None
    assert ", slower, with 4 graphs" in budget_words.gain(slower)
    assert alike["low"] < 1 < alike["high"]
    assert "no difference beyond the noise, with 4 graphs" in budget_words.gain(alike)


def test_a_configuration_that_spoils_images_is_no_rival() -> None:
    """D6, which a clock does not show: more frames than items, and images among the calls."""
    configurations = {"poor": Configuration((4096,), 4), "spoils": WIDE, "advised": WIDE}
    made = make_comparisons({"films": ([[256, 256], [64]], configurations)})
    (base,) = made.comparisons
    model = CostModel(make_profile(model="glm4_1v"))

    def filmed(calls: list[list[int]]) -> Comparisons:
        timings = [
            msgspec.structs.replace(
                timing,
                calls=[msgspec.structs.replace(c, frames=f) for c, f in zip(timing.calls, calls, strict=True)],
                max_frames=32 if timing.name == "spoils" else timing.max_items,
            )
            for timing in base.configurations
        ]
        videos = msgspec.structs.replace(base, model=model.profile.model, configurations=timings)
        return msgspec.structs.replace(made, comparisons=[videos])

    for calls, best in (([[4, 4], [1]], "poor"), ([[4, 4], [4]], "spoils")):
        comparisons = filmed(calls)
        table = outcomes.validation(model, comparisons)
        gains = outcomes.won(comparisons, table)
        assert gains["best other"].tolist() == [best]
        said = budget_words.validation(model.profile, comparisons, table)
        assert ("On *films* spoils is left out, since images come out wrong (D6)." in said) == (best == "poor")


def test_errors_are_told_over_all_and_of_each_workload() -> None:
    table = outcomes.held_out(
        MODEL, make_comparisons({"a": (CALLS, {"wide": WIDE}), "b": (SMALL, {"wide": WIDE})}, off=1)
    )
    assert budget_words.held_out(table) == (
        "Over 2 pairs of configuration and workload, on calls that only replay, the predicted mean is off by "
        "**50.0% in the median and 50.0% at worst** (*a* 50.0% and 50.0%, *b* 50.0% and 50.0%)."
    )


def test_frames_that_were_measured_stand_beside_their_prediction() -> None:
    table = outcomes.frames_measured(CostModel(make_profile(model="glm4_1v")))
    assert table["computes tokens"].tolist() == [64, 64, 2400, 40_000]
    assert table["times its budget"].tolist() == [1, 1, 37.5, 625]
    # The largest is beyond the largest measured budget.
    assert table["predicted ms"].isna().tolist() == [False] * 3 + [True]
    known = table.iloc[:3]
    assert known["predicted ms"].tolist() == pytest.approx(known["replay ms"].tolist(), rel=1e-5)
    assert table["memory MiB"].iloc[2] == pytest.approx(FIRST_BYTES * 2400 / 2**20, rel=1e-5)


def test_calls_of_videos_are_predicted_by_their_frames() -> None:
    profile = make_profile(model="glm4_1v")
    (base,) = make_comparisons({"films": ([[256, 256]], {"four": Configuration((512,), 4)})}).comparisons
    (timing,) = base.configurations
    call = msgspec.structs.replace(timing.calls[0], frames=[4, 4])
    filmed = msgspec.structs.replace(timing, calls=[call], max_frames=64)  # 16 frames an item: 128 tokens hold them
    videos = msgspec.structs.replace(base, model=profile.model, configurations=[filmed])
    model = CostModel(profile)
    images = call_us([(512, [256, 256])])
    assert predicted_calls(model, filmed).wall_us[0] == pytest.approx(images - SLOPE * 2 * (1024**2 - 4 * 256**2))
    comparisons = msgspec.structs.replace(make_comparisons({}), comparisons=[videos])
    _, row = outcomes.validation(model, comparisons).to_dict("records")  # the first is eager as served
    assert row["max frames"] == 64
    assert row["bound ms"] <= row["predicted mean ms"] * (1 + 1e-9)
    # 4,096 frames for 4 items make the graph compute 4,096 tokens, not 512.
    wide = predicted_calls(model, msgspec.structs.replace(filmed, max_frames=4096)).wall_us[0]
    assert wide - predicted_calls(model, filmed).wall_us[0] == pytest.approx(RATE * (4096 - 512))


def test_a_failed_configuration_has_no_mean_and_is_no_rival() -> None:
    workloads = {"a": (CALLS, {"auto": Configuration(), "failing": WIDE, "advised": WIDE})}
    comparisons = make_comparisons(workloads, fails={"failing": 1})
    table = outcomes.validation(MODEL, comparisons)
    failing = table.set_index("configuration").loc["failing"]
    assert failing["failed calls"] == 1
    assert failing["measured mean ms"] != failing["measured mean ms"]
    assert outcomes.won(comparisons, table)["best other"].tolist() == ["auto"]


def test_without_an_advised_configuration_nothing_is_won() -> None:
    comparisons = make_comparisons({"a": (CALLS, {"auto": Configuration()})})
    assert outcomes.won(comparisons, outcomes.validation(MODEL, comparisons)).empty


def test_compare_prints_what_was_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cost profile, too."""
    monkeypatch.setenv("COLUMNS", "120")
    made = make_comparisons({"a": (CALLS, {"wide": WIDE}), "b": (SMALL, {"wide": WIDE})})
    (timed,) = made.comparisons[1].configurations
    broken = msgspec.structs.replace(timed, calls=[timed.calls[0], msgspec.structs.replace(timed.calls[1], wall_us=[])])
    second = msgspec.structs.replace(made.comparisons[1], configurations=[broken])
    _show_measured(msgspec.structs.replace(made, comparisons=[made.comparisons[0], second]))
    printed = [line.split("│") for line in capsys.readouterr().out.splitlines() if "wide" in line]
    pooled = [sample for call in made.comparisons[0].configurations[0].calls for sample in call.wall_us]
    means = [fmean(pooled), fmean(timed.calls[0].wall_us)]
    assert [[cell.strip() for cell in line[1:6]] for line in printed] == [
        ["a", "wide", "4", "0", f"{means[0] / 1e3:.3f}"],
        ["b", "wide", "2", "1", f"{means[1] / 1e3:.3f}"],
    ]
