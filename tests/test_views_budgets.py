"""Tables and figures of notebook 02: right numbers, and figures that draw exactly their tables."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from tests.comparisons import make_comparisons
from tests.profiles import make_profile
from workbench import outcomes
from workbench.advisor import Constraints, Study, advise, open_setting, open_study
from workbench.budgets import Configuration
from workbench.costs import CostModel
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.models import model_facts
from workbench.sources import load_workload
from workbench.views import budget_words
from workbench.views import budgets as figures

ERNIE, GLM = model_facts("ernie45_vl"), model_facts("glm4_1v")
MODEL = CostModel(make_profile())


@pytest.fixture(scope="module")
def study() -> Study:
    return open_study(load_workload("mixed", ERNIE), MODEL)


@pytest.fixture(scope="module")
def auto(study: Study) -> outcomes.Outcome:
    return outcomes.outcome(study, Configuration(), "vLLM auto")


@pytest.fixture(scope="module")
def crashing(study: Study) -> outcomes.Outcome:
    return outcomes.outcome(study, Configuration((128, 2048), 4), "crashing")


# Tables ---------------------------------------------------------------------------------------------------------------


def test_the_graphs_add_up_to_the_plan(auto: outcomes.Outcome) -> None:
    table = outcomes.per_budget(auto)
    assert table["budget"].tolist() == list(auto.candidate.budgets)
    assert table["items"].sum() == len(auto.study.arrangement.tokens)
    assert table["tokens"].sum() == auto.study.workload.tokens.sum()
    waste = table["padding tokens"].sum() / (table["padding tokens"].sum() + table["tokens"].sum())
    assert waste == pytest.approx(auto.candidate.waste)
    used = table[table["replays"] > 0]
    np.testing.assert_allclose(used["fill"], used["tokens"] / (used["budget"] * used["replays"]), rtol=1e-5)
    calls = [len(set(auto.plan.call[auto.plan.budget == budget].tolist())) for budget in table["budget"]]
    np.testing.assert_allclose(table["calls"], np.array(calls) / len(auto.study.workload), rtol=1e-5)


def test_eager_fallbacks_have_their_own_row(crashing: outcomes.Outcome) -> None:
    row = outcomes.per_budget(crashing).iloc[-1]
    assert row["graph"] == "eager"
    assert row["replays"] == (crashing.study.workload.tokens > 2048).sum()
    assert row["padding tokens"] == 0
    shares = outcomes.fallback_share([crashing]).iloc[0]
    tokens = crashing.study.workload.tokens
    assert shares["items"] == pytest.approx((tokens > 2048).mean(), rel=1e-5)
    assert shares["tokens"] == pytest.approx(tokens[tokens > 2048].sum() / tokens.sum(), rel=1e-5)
    assert not shares["served"]


def test_a_configuration_that_cannot_serve_is_shown_without_times(
    auto: outcomes.Outcome, crashing: outcomes.Outcome
) -> None:
    assert set(outcomes.latency([auto, crashing])["configuration"]) == {"vLLM auto"}
    assert outcomes.latency([crashing]).empty
    row = outcomes.summary([crashing]).iloc[0]
    assert "D1" in row["refused"]
    assert pd.isna(row["mean ms"])


def test_histograms_hold_every_replay_and_call(auto: outcomes.Outcome) -> None:
    fill = outcomes.fill_histogram(auto)
    assert fill["replays"].sum() == (~auto.plan.fallback).sum()
    assert fill["share"].sum() == pytest.approx(1, abs=1e-4)
    times = outcomes.latency([auto])
    assert times["calls"].sum() == len(auto.study.workload)
    assert auto.candidate.prediction is not None
    middle = ((times["from ms"] + times["to ms"]) / 2 * times["share"]).sum()
    assert middle == pytest.approx(auto.candidate.prediction.mean_us / 1e3, rel=0.03)


def test_the_bill_adds_up(auto: outcomes.Outcome) -> None:
    table = outcomes.bill(auto)
    assert auto.candidate.capture_bytes is not None
    assert table["memory MiB"].sum() == pytest.approx(auto.candidate.capture_bytes / 2**20, rel=1e-4)
    assert table["seconds"].sum() == pytest.approx(auto.candidate.capture_seconds, rel=1e-4)
    assert table["memory MiB"].idxmax() == len(table) - 1


def test_the_map_gets_no_worse_with_more_graphs(study: Study) -> None:
    table = outcomes.graphs_by_items(study, items=(1, 4))
    for _, group in table.groupby("max items"):
        assert (np.diff(group.sort_values("graphs")["ms"]) <= 1e-9).all()
    row = table.iloc[-1]
    budgets = tuple(map(int, row["budgets"].split(",")))
    tried = outcomes.outcome(study, Configuration(budgets, int(row["max items"])), "again")
    assert tried.candidate.objective_us == pytest.approx(1e3 * row["ms"], rel=1e-5)
    answer = advise(study.workload, MODEL).answer
    assert answer.objective_us is not None
    assert answer.objective_us <= 1e3 * table["ms"].min() * 1.0001


def test_more_graphs_win_more_of_the_room(study: Study, auto: outcomes.Outcome) -> None:
    table = outcomes.graphs_allowed(study.workload, MODEL, graphs=(4, 8, 16))
    assert table["graphs allowed"].tolist() == [4, 8, 16]
    assert (table["graphs"] <= table["graphs allowed"]).all()
    advice = advise(study.workload, MODEL, constraints=Constraints(max_graphs=8))
    row = table.iloc[1]
    assert advice.answer.prediction is not None
    assert auto.candidate.prediction is not None
    assert row["mean ms"] == pytest.approx(advice.answer.prediction.mean_us / 1e3, rel=1e-5)
    room = auto.candidate.prediction.mean_us - advice.bound_us
    won = auto.candidate.prediction.mean_us - advice.answer.prediction.mean_us
    assert row["of the room"] == pytest.approx(won / room, rel=1e-4)
    assert (np.diff(table["of the room"]) > 0).all()
    assert table["of the room"].between(0, 1).all()
    text = budget_words.graphs_allowed("mixed", table)
    assert f"with up to 8 graphs {won / room:.0%}, with up to 16 graphs" in text
    single = outcomes.graphs_allowed(load_workload("pull-request", ERNIE), MODEL, graphs=(1, 2))
    assert single["of the room"].isna().all()  # vLLM's own budget 64 is the image's
    assert "nothing to win" in budget_words.graphs_allowed("pull-request", single)


def test_a_map_of_nothing_is_refused(study: Study) -> None:
    impossible = open_study(study.workload, MODEL, constraints=Constraints(max_bytes=1))
    with pytest.raises(WorkbenchError, match="no map"):
        outcomes.graphs_by_items(impossible, items=(1,))


def test_the_profile_of_the_environment_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "profile.json", make_profile())
    monkeypatch.setenv(outcomes.SOURCE_VARIABLE, str(tmp_path / "profile.json"))
    assert getattr(outcomes.measured("ernie45_vl"), "validation", "") is None
    write_json(tmp_path / outcomes.VALIDATION, make_comparisons({"a": ([[64]], {"one": Configuration((64,), 1)})}))
    assert getattr(outcomes.measured("ernie45_vl"), "validation", None) is not None
    with pytest.raises(WorkbenchError, match="not glm4_1v"):
        outcomes.measured("glm4_1v")


def test_a_model_without_a_profile_has_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(outcomes.SOURCE_VARIABLE, raising=False)
    monkeypatch.setattr(outcomes, "SHIPPED", {})
    assert outcomes.measured("glm4_1v") is None


def test_without_costs_there_are_no_times() -> None:
    tried = outcomes.outcome(open_setting(load_workload("glm-video", GLM)), Configuration((64, 256), 4, 8), "mine")
    assert tried.costs is None
    row = outcomes.summary([tried]).iloc[0]
    assert (row["max frames"], row["refused"]) == (8, "")
    assert pd.isna([row["mean ms"], row["memory MiB"], row["capture s"]]).all()
    assert outcomes.latency([tried]).empty
    assert list(outcomes.bill(tried).columns) == ["graph", "computes tokens", "buffers MiB"]
    assert len(figures.bill({"mine": outcomes.bill(tried)}).data) == 1


@pytest.mark.parametrize("priced", [True, False])
def test_max_frames_cost_what_their_shapes_say(priced: bool) -> None:
    videos = load_workload("glm-video", GLM)
    model = CostModel(make_profile(model="glm4_1v"))
    study = open_study(videos, model) if priced else open_setting(videos)
    chosen = study.with_frames((64, 256), 4)
    table = outcomes.frames_axis(study, chosen, [3])
    assert chosen.max_frames in table["max frames"].tolist()
    # A call is one video of 4 frames and 256 tokens, so every replay is of budget 256, 64 tokens an item.
    for row in table.to_dict("records"):
        share = max(1, row["max frames"] // 4)
        assert row["computed"] == pytest.approx(4 * share * -(-64 // share) / 256, rel=1e-5)
        assert row["fails"] == 0
    own = table[table["vLLM's own"]].to_dict("records")
    assert [(row["max frames"], row["computed"]) for row in own] == [(2400, 9.375)]  # 600 frames for each of 4 items
    assert "oversized-buffer" in own[0]["findings"]
    assert table["buffers MiB"].is_monotonic_increasing
    assert table["mean ms"].isna().all() != priced
    if priced:  # by what the graph computes
        assert own[0]["mean ms"] > 3 * table["mean ms"].min()


def test_too_few_frames_are_counted_and_marked() -> None:
    videos = load_workload("{(224, 224, 16): 1.0}", GLM)
    study = open_setting(videos)
    assert set(videos.frames) == {8}
    chosen = study.with_frames((1024,), 2)
    table = outcomes.frames_axis(study, chosen)
    assert chosen.max_frames == 8
    short = table[table["max frames"] < 8]
    assert short["fails"].tolist() == [len(videos)] * len(short)
    assert (table[table["max frames"] >= 8]["fails"] == 0).all()
    drawn = {trace.name: list(trace.x) for trace in figures.frames_axis(table, chosen.max_frames or 0).data[:4]}
    assert drawn["a batch does not fit: vLLM raises"] == short["max frames"].tolist()
    assert drawn["chosen"] == [8]


# Figures --------------------------------------------------------------------------------------------------------------


def values(figure: go.Figure) -> str:
    return json.dumps(figure.to_plotly_json(), default=lambda value: getattr(value, "tolist", lambda: str(value))())


def test_padding_draws_the_table(auto: outcomes.Outcome, crashing: outcomes.Outcome) -> None:
    tables = {one.name: outcomes.per_budget(one) for one in (auto, crashing)}
    figure = figures.padding(tables)
    assert [list(trace.y) for trace in figure.data] == [
        (table[column] / 1e6).tolist() for table in tables.values() for column in ("tokens", "padding tokens")
    ]
    assert list(figure.data[2].x)[-1] == "eager"


def test_latency_rises_to_all_calls(auto: outcomes.Outcome) -> None:
    (trace,) = figures.latency(outcomes.latency([auto])).data
    assert (np.diff(trace.y) >= 0).all()
    assert trace.y[-1] == pytest.approx(1, abs=1e-4)


def test_the_heat_map_has_every_cell(study: Study) -> None:
    table = outcomes.graphs_by_items(study, items=(1, 4))
    (trace,) = figures.graphs_by_items(table).data
    cells = {
        (int(y), int(x)): value
        for y, row in zip(trace.y, trace.z, strict=True)
        for x, value in zip(trace.x, row, strict=True)
    }
    for row in table.to_dict("records"):
        assert cells[row["graphs"], row["max items"]] == row["ms"]


@pytest.fixture(scope="module")
def every_figure(
    study: Study, auto: outcomes.Outcome, crashing: outcomes.Outcome
) -> dict[str, Callable[[], go.Figure]]:
    calls = study.workload.calls()[:12]
    pair = {"vLLM auto": Configuration(), "advised": Configuration((256, 1024, 4096), 4)}
    compared = make_comparisons({"mixed": (calls, pair)}, noise=0.02)
    two = {one.name: one for one in (auto, crashing)}
    return {
        "items": lambda: figures.items(outcomes.items([study.workload])),
        "padding": lambda: figures.padding({name: outcomes.per_budget(one) for name, one in two.items()}),
        "fill": lambda: figures.fill({name: outcomes.fill_histogram(one) for name, one in two.items()}),
        "fallbacks": lambda: figures.fallbacks(outcomes.fallback_share(list(two.values()))),
        "latency": lambda: figures.latency(outcomes.latency(list(two.values()))),
        "bill": lambda: figures.bill({name: outcomes.bill(one) for name, one in two.items()}),
        "replays": lambda: figures.replay_costs(outcomes.replay_costs(MODEL)),
        "configurations": lambda: figures.configurations(outcomes.summary(list(two.values())), 50.0),
        "held-out": lambda: figures.predicted_beside_measured(outcomes.held_out(MODEL, compared)),
        "validation": lambda: figures.validation(outcomes.validation(MODEL, compared)),
    }


FIGURES = ("items", "padding", "fill", "fallbacks", "latency", "bill", "replays", "configurations", "held-out",
           "validation")  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_plain_titled_and_the_same_twice(
    every_figure: dict[str, Callable[[], go.Figure]], name: str
) -> None:
    figure = every_figure[name]()
    assert type(figure) is go.Figure
    assert figure.layout.title.text
    assert figure.data
    assert values(figure) == values(every_figure[name]())
    assert "NaN" not in values(figure).replace('"NaN"', "")


def test_every_figure_is_tested(every_figure: dict[str, Callable[[], go.Figure]]) -> None:
    assert set(every_figure) == set(FIGURES)


def test_the_advised_configuration_has_one_color() -> None:
    shades = figures.colors(["vLLM auto", "advised", "pull request"])
    assert shades["advised"] == figures.colors(["advised"])["advised"]
    assert len(set(shades.values())) == 3


def test_the_table_of_workloads_counts_calls_of_one_modality() -> None:
    """As the advice does: a request with images and videos is two calls of the encoder."""
    mixed = load_workload("glm-mixed", model_facts("glm4_1v"))
    (row,) = outcomes.workloads_table([mixed]).to_dict("records")
    assert (len(mixed), row["calls"], row["items"]) == (500, len(open_setting(mixed).workload), mixed.items)
    assert row["calls"] > 500
