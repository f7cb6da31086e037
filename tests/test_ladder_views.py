"""Tables and figures of what a graph could hold and of the variants, from a made-up ladder; no engine."""

from pathlib import Path

import msgspec
import pandas as pd
import pytest

from tests.ladders import NOISE, make_counters, make_glm_ladder, make_ladder, write_ladder
from workbench import capturable, ladder
from workbench.capturable import ALL, GRAPH, SERVED, Captured, Ladder, Steps, find_ladder
from workbench.encoder import counters
from workbench.encoder.counters import find_counters
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.models import model_facts
from workbench.stats import summary
from workbench.views import ladder as figures
from workbench.views import ladder_words as words


@pytest.fixture(scope="module")
def made() -> Ladder:
    return make_ladder()


@pytest.fixture(scope="module")
def of_glm() -> Ladder:
    return make_glm_ladder()


@pytest.fixture
def no_recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of the shipped recordings."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    for module in (capturable, counters):
        monkeypatch.setattr(module, "RECORDINGS", folder)
    return folder


def drawn(trace: object, axis: str = "x") -> list[float]:
    """The numbers of a trace."""
    return [float(value) for value in getattr(trace, axis)]


# Where they lie ---------------------------------------------------------------------------------------------------


def test_a_ladder_is_found_by_model_beside_the_run_first(no_recordings: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    assert find_ladder("ernie45_vl", own) is None
    (no_recordings / "variants_ernie45_vl").mkdir()
    shipped = write_ladder(no_recordings / "variants_ernie45_vl")
    assert find_ladder("ernie45_vl", own) == shipped
    assert find_ladder("glm4_1v", own) is None
    mine = msgspec.structs.replace(shipped, notes=["mine"])
    write_json(own / capturable.LADDER_FILE, mine)
    assert find_ladder("ernie45_vl", own) == mine
    assert find_ladder("ernie45_vl") == shipped


def test_counters_are_found_and_shown(no_recordings: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine"
    assert find_counters("ernie45_vl", own) is None
    given = make_counters()
    write_json(own / "counted" / counters.RESULT_FILE, given)
    assert find_counters("ernie45_vl", own) == given
    assert find_counters("glm4_1v", own) is None
    write_json(no_recordings / "counters_ernie45_vl" / counters.RESULT_FILE, given)
    assert find_counters("ernie45_vl") == given
    table = ladder.hardware(given)
    assert list(table["us"]) == [900.0, 800.0, 950.0, 700.0]
    figure = figures.hardware(table)
    assert [list(bar.y) for bar in figure.data] == [["gemm", "glue"], ["gemm", "glue"]]
    assert drawn(figure.data[0]) == [0.5, 0.2]
    write_json(own / "counted" / counters.RESULT_FILE, {"schema_version": 9})
    with pytest.raises(WorkbenchError, match="schema version 9"):
        find_counters("ernie45_vl", own)


# The boundary -----------------------------------------------------------------------------------------------------


def test_candidates_with_their_times_and_obstacles(made: Ladder) -> None:
    table = ladder.boundaries(made.boundaries).set_index("the graph would hold")
    assert list(table["captures"]) == ["yes", "no", "yes"]
    vit = table.loc["ViT, as vLLM captures it"]
    assert (vit["call us"], vit["gain us"], vit["nodes"]) == (4600.0, 15_400.0, 674)
    refused = table.loc["ViT and the resampler as shipped"]
    assert refused["host syncs"] == 2
    assert pd.isna(refused["gain us"])
    why = ladder.obstacles(made.boundaries)
    assert list(why["what"]) == ["CUDA refuses", "reads on the host"]
    assert list(why["at"]) == ["vllm/model_executor/models/ernie45_vl.py:798"] * 2
    assert list(ladder.obstacles(made.boundaries[:1])) == list(why)
    captured, eager, outside = figures.candidates(table.reset_index()).data
    assert drawn(captured) == [2.6, 1.5]
    assert drawn(eager) == [19.0]
    assert drawn(outside) == [2.0, 0.6, 0.2]


def test_a_candidate_that_could_not_be_watched_has_no_count_of_syncs(made: Ladder) -> None:
    blind = msgspec.structs.replace(made.boundaries[0], unwatched="TypeError: no")
    table = ladder.boundaries([blind, *made.boundaries[1:]])
    assert table["host syncs"].isna().tolist() == [True, False, False]
    assert table["not watched"].tolist()[0] == "TypeError: no"


def test_on_a_cpu_only_syncs_are_known(made: Ladder) -> None:
    watched = [
        msgspec.structs.replace(
            one, captured=None, nodes=None, obstacle=None, inside_us=None, eager_us=None, outside_us=None
        )
        for one in made.boundaries
    ]
    assert list(ladder.boundaries(watched)) == ["the graph would hold", "captures", "host syncs"]


# The graph by module ----------------------------------------------------------------------------------------------


def test_blocks_are_taken_together_and_nothing_is_lost(made: Ladder) -> None:
    for mapped in made.maps[:2]:
        table, fine = ladder.modules(mapped), ladder.parts(mapped)
        us = sum(one.us for one in mapped.modules)
        assert table["us"].sum() == fine["us"].sum() == us
        assert table["nodes"].sum() == fine["nodes"].sum() == mapped.nodes
        assert table["share"].sum() == pytest.approx(1)
        attention = table.set_index("module").loc["vision_model.blocks.*.attn.qkv"]
        assert (attention["us"], attention["times roofline"]) == (40.0, 5.0)
        assert table["us"].is_monotonic_decreasing
    told = ladder.graphs(made.maps).set_index("graph")
    assert told.loc["fused", "not mapped"] == "why"
    assert told["us"].isna().to_dict()["fused"]
    assert told.loc["all variants", "times roofline"] == pytest.approx(511 / 12)


def test_the_treemap_adds_up(made: Ladder) -> None:
    tables = [ladder.parts(mapped) for mapped in made.maps[:2]]
    figure = figures.modules_map(tables)
    widths = []
    for trace, table in zip(figure.data, tables, strict=True):
        values = dict(zip(trace.ids, trace.values, strict=True))
        children: dict[str, float] = {}
        for key, parent in zip(trace.ids, trace.parents, strict=True):
            children[parent] = children.get(parent, 0.0) + values[key]
        assert all(children[key] == pytest.approx(values[key]) for key in children if key)
        assert children[""] == table["us"].sum()
        widths.append((trace.domain.x[1] - trace.domain.x[0]) / table["us"].sum())
    assert widths[0] == pytest.approx(widths[1])  # areas of both are in one scale


def test_the_roofline_is_marked_where_there_is_one(made: Ladder) -> None:
    figure = figures.roofline([ladder.modules(mapped) for mapped in made.maps[:2]])
    marks = figure.data[-1]
    assert dict(zip(marks.y, marks.x, strict=True)) == {
        "vision_model.blocks.*.attn": 4.0,
        "vision_model.blocks.*.attn.qkv": 8.0,
    }


# Step by step ------------------------------------------------------------------------------------------------------


def test_steps_are_computed_from_the_samples(made: Ladder) -> None:
    case = ladder.one_image(made)
    assert case is not None
    assert case.name == "64 tokens"
    samples = {column.name: summary(column.wall_us) for column in case.columns}
    table = ladder.steps(case).set_index("step")
    assert table.loc["vLLM's graph", "median ms"] == pytest.approx(samples[GRAPH].median / 1e3)
    assert table.loc["all variants", "vs vLLM's graph"] == pytest.approx(samples[GRAPH].median / samples[ALL].median)
    assert table.loc["all variants", "vs served"] == pytest.approx(samples[SERVED].median / samples[ALL].median)
    assert table.loc["all variants", "parity over noise"] == pytest.approx(0.5)
    assert (table.loc["resampler", "equals the graph"], table.loc["fused", "equals the graph"]) == (True, False)
    assert table["vs served"].isna().to_dict()["eager as served"]


def test_a_failed_column_has_its_error_and_no_numbers(made: Ladder) -> None:
    table = ladder.all_steps(made)
    assert list(dict.fromkeys(table["call"])) == ["64 tokens", "4096 tokens", "video of 4 frames"]
    failed = table[table["failed"].notna()]
    assert set(failed["call"]) == {"4096 tokens"}
    assert failed[["median ms", "P99 ms", "busy ms", "parity over noise"]].isna().all(axis=None)
    assert table[table["failed"].isna()]["median ms"].gt(0).all()


def test_an_item_that_is_not_finite_has_no_parity(made: Ladder) -> None:
    case = made.cases[1]
    bad = msgspec.structs.replace(case.columns[-1].parity[0], finite=False, relative_rms=None)
    column = msgspec.structs.replace(case.columns[-1], parity=[case.columns[-1].parity[0], bad])
    table = ladder.steps(msgspec.structs.replace(case, columns=[column]))
    assert table["parity over noise"].isna().all()


def test_figures_draw_every_column(made: Ladder) -> None:
    case = ladder.one_image(made)
    assert case is not None
    table, every = ladder.steps(case), ladder.all_steps(made)
    bars, marks = figures.steps(table).data
    assert drawn(bars) == list(table["median ms"])
    assert drawn(marks) == list(table["P99 ms"])
    busy, idle = figures.inside_the_call(table).data
    assert [a + b for a, b in zip(drawn(busy), drawn(idle), strict=True)] == pytest.approx(
        (table["busy ms"] + table["idle ms"]).tolist()
    )
    dots = figures.cases(every).data
    assert sum(len(trace.x) for trace in dots) == every[every["step"] != "eager fallback"]["vs served"].notna().sum()
    both = figures.parity(every).data
    assert sum(len(trace.x) for trace in both) == len(every)
    assert set(both[0].customdata) == {"64 tokens", "4096 tokens", "video of 4 frames"}


# In words -----------------------------------------------------------------------------------------------------------


def test_the_boundary_in_words(made: Ladder) -> None:
    table, why_not = ladder.boundaries(made.boundaries), ladder.obstacles(made.boundaries)
    text = words.boundaries(table, why_not)
    assert text.startswith("2 of 3 candidates capture. *ViT and the resampler as shipped*: CUDA refuses at `vllm/")
    assert "and 1 more" in text
    assert "**all variants together** makes the shortest call, 1.50 ms inside and 0.20 ms outside" in text
    watched = [msgspec.structs.replace(one, captured=None, inside_us=None) for one in made.boundaries[:1]]
    assert words.boundaries(ladder.boundaries(watched), ladder.obstacles(watched)) == (
        "Nothing was captured here; 1 candidates were watched for host syncs."
    )


def test_maps_in_words(made: Ladder) -> None:
    text = words.graphs(ladder.graphs(made.maps))
    assert text.startswith("*vLLM's graph* replays 30 nodes in 711 us, of which glue is 85%; *all variants* replays 16")
    assert words.graphs(ladder.graphs(made.maps[2:])) == "No graph of this ladder has a map: why."
    assert words.graphs(ladder.graphs([])).endswith("it needs CUDA.")
    text = words.roofline([ladder.modules(mapped) for mapped in made.maps[:2]])
    farthest = "farthest above its own `vision_model.blocks.*.attn` with 460 us for 4"
    assert f"*all variants* takes 42.6 times its roofline of 12 us, {farthest}" in text


def test_kernels_whose_names_say_nothing_are_a_product_or_told(made: Ladder) -> None:
    module = made.maps[0].modules[0]
    product = msgspec.structs.replace(
        module, module="blocks.0.mlp.fc1", families={"other": (2, 30.0)}, us=30.0, flops=8, weight_bytes=8
    )
    beside = msgspec.structs.replace(
        product, module="", families={"other": (1, 10.0)}, us=10.0, flops=0, weight_bytes=0
    )
    attention = msgspec.structs.replace(beside, module="blocks.0.attn.attn", flops=8)
    mapped = msgspec.structs.replace(made.maps[0], modules=[product, beside, attention], nodes=4)
    assert list(ladder.parts(mapped)["family"]) == ["gemm", "other", "other"]
    table = ladder.graphs([mapped])
    assert list(table["unnamed us"]) == [20.0]
    assert "of which glue is 0% and 40% kernels of no known family. " in words.graphs(table)
    assert "unnamed us" not in ladder.graphs([msgspec.structs.replace(mapped, modules=[product])])


def test_a_roofline_that_is_not_known_is_said(made: Ladder) -> None:
    """Of a GPU that `workbench.roofline` does not have."""
    mapped = made.maps[0]
    bare = [msgspec.structs.replace(one, roofline_us=0.0) for one in mapped.modules]
    table = ladder.modules(msgspec.structs.replace(mapped, modules=bare))
    text = words.roofline([table])
    assert (
        text == f"*{table['graph'].iloc[0]}* takes {table['us'].sum():,.0f} us, on a GPU whose roofline is not known."
    )
    assert len(figures.roofline([table]).data) == 2


def test_steps_in_words(made: Ladder) -> None:
    case = ladder.one_image(made)
    assert case is not None
    table = ladder.steps(case)
    rows = table.set_index("step")
    whole = rows.loc["all variants"]
    assert f"**{whole['vs served']:.1f} times as fast as eager as served" in words.steps(table)
    singles = rows.loc[["resampler", "one_pass", "metadata_cache", "fallback", "fused"]]
    assert f"*{singles['median ms'].idxmin()}* saves most" in words.steps(table)
    assert "the nodes of the graph from 180 to 72" in words.inside_the_call(table)
    alike = words.inside_the_call(table.assign(nodes=7, **{"idle ms": 0.5}))
    assert alike.endswith("its waiting inside the call stays at 0.50 ms, and the graph keeps its 7 nodes.")
    uncounted = words.inside_the_call(table.assign(nodes=None))
    assert uncounted.endswith(" ms.")
    slower = words.inside_the_call(table.assign(**{"traced ms": table["median ms"] * 1.26}))
    assert slower.endswith("these calls took 1.26 and 1.26 times as long as un-profiled.")
    failed = table[table["step"] != "all variants"]
    assert words.steps(failed).startswith("Not every step could be timed")
    assert words.inside_the_call(failed).startswith("Not every step could be traced")


def test_every_call_in_words(made: Ladder) -> None:
    text = words.calls(ladder.all_steps(made))
    assert "on 3 calls" in text
    assert "on the 1 that it runs; slower on none." in text
    assert "On *4096 tokens* vLLM's graph, one_pass, metadata_cache, fused failed: RuntimeError: mat1" in text
    slow = [msgspec.structs.replace(column, wall_us=[9e9]) if column.name == ALL else column
            for column in made.cases[1].columns]  # fmt: skip
    slower = msgspec.structs.replace(made, cases=[msgspec.structs.replace(made.cases[1], columns=slow), made.cases[0]])
    assert "; slower on *64 tokens* (0.00 vs served), *64 tokens* (0.00 vs vLLM's graph)." in words.calls(
        ladder.all_steps(slower)
    )
    videos = msgspec.structs.replace(made, cases=made.cases[:1])
    assert words.calls(ladder.all_steps(videos)).endswith("on 1 calls; slower on none.")


def test_parity_in_words(made: Ladder) -> None:
    text = words.parity(ladder.all_steps(made))
    assert text.startswith("10 of 11 variants' calls equal vLLM's graph bit for bit; none of 14 lie beyond")
    far = msgspec.structs.replace(made.cases[1], noise_rms=NOISE / 5)
    text = words.parity(ladder.all_steps(msgspec.structs.replace(made, cases=[far])))
    assert "7 of 7 lie beyond the noise floor" in text
    assert text.endswith("2.50 times the floor.")
    near = msgspec.structs.replace(made.cases[1], noise_rms=NOISE / 2.5)
    assert "1.25 times the floor, no further than two independent roundings lie apart (√2)." in words.parity(
        ladder.all_steps(msgspec.structs.replace(made, cases=[near]))
    )
    wrong = msgspec.structs.replace(made.cases[1], noise_rms=NOISE / 10)
    text = words.parity(ladder.all_steps(msgspec.structs.replace(made, cases=[wrong])))
    assert "On *64 tokens* vLLM's graph is wrong, 5.0 floors from eager: resampler and one_pass and" in text
    assert text.endswith("leave it so.")
    unknown = msgspec.structs.replace(made.cases[1], noise_rms=None)
    assert words.parity(ladder.all_steps(msgspec.structs.replace(made, cases=[unknown]))).startswith(
        "The outputs have no"
    )


def test_recipes_are_one_row_a_size_and_told(made: Ladder) -> None:
    assert not len(ladder.recipes(made))

    def steps(rows: int, attention: str = "vLLM's", fc2: str = "vLLM's") -> Steps:
        return Steps(rows=rows, attention=attention, qkv="vLLM's", proj="vLLM's", fc1="vLLM's", fc2=fc2)

    planned = Captured(
        column="fused", costs=[], schedules=["once per call"], recipes=[steps(256, "A", "4 parts"), steps(8192)]
    )
    captured = [
        planned,
        Captured(column=ALL, costs=[], schedules=["once per call"], recipes=[steps(256, "B", "4 parts")]),
    ]
    both = msgspec.structs.replace(made, captured=captured)
    small, large = ladder.recipes(both).to_dict("records")
    assert small == {
        "budget": 64, "rows": 256, "qkv": "vLLM's", "attention": "A or B", "proj": "vLLM's", "fc1": "vLLM's",
        "fc2": "4 parts",
    }  # fmt: skip
    assert (large["budget"], large["attention"]) == (2048, "vLLM's")
    text = words.recipes(ladder.recipes(both), ladder.schedules(both))
    assert "At budget 64 some steps are computed in another way than vLLM's." in text
    assert text.endswith("At budget 64 not all captures chose the same. Attention is planned once per call.")
    for recipes, said in (
        ([steps(64)], "Here that is vLLM's way everywhere."),
        ([steps(64, "A")], "At every budget some"),
    ):
        one = msgspec.structs.replace(made, captured=[msgspec.structs.replace(planned, recipes=recipes)])
        assert said in words.recipes(ladder.recipes(one), [])


def test_counters_in_words() -> None:
    text = words.hardware(ladder.hardware(make_counters()))
    assert "*eager as served*: 1,700 us of kernels, 2 MB from memory, 36% of the roofline" in text
    assert "*graph*: 1,650 us of kernels, 2 MB from memory, 36% of the roofline" in text
    nowhere = msgspec.structs.replace(make_counters().environment, gpus=[])
    text = words.hardware(ladder.hardware(msgspec.structs.replace(make_counters(), environment=nowhere)))
    assert "roofline" not in text


def test_what_is_not_there_is_one_sentence() -> None:
    assert ladder.missing(model_facts("glm4_1v")) == (
        "No ladder of GLM-4.1V is recorded here: `bash scripts/h200_variants.sh glm4_1v` makes it on an H200."
    )


# An encoder with one variant, whose graphs of vLLM take videos ------------------------------------------------------


def test_the_only_variant_is_the_last_step(of_glm: Ladder) -> None:
    assert ladder.last_step(["eager as served", "vLLM's graph", "a", "b", "a + b"]) is None
    assert ladder.last_step(["eager as served", "a", "all variants"]) == "all variants"
    case = ladder.one_image(of_glm)
    assert case is not None
    assert case.name == "64 tokens"
    table = ladder.steps(case)
    assert ladder.last_step(table["step"]) == "cu_seqlens_tail"
    assert words.steps(table).startswith("With cu_seqlens_tail the call takes")
    assert "saves most" not in words.steps(table)
    assert words.inside_the_call(table).startswith("From vLLM's graph to cu_seqlens_tail the GPU's work")
    assert words.calls(ladder.all_steps(of_glm)).startswith("*cu_seqlens_tail* is ")
    assert list(ladder.source(of_glm)[2])[-1] == "cu_seqlens_tail, 64 tokens, median ms"


def test_d6_is_told_from_its_distance_and_from_what_a_static_replay_saw(of_glm: Ladder) -> None:
    every = ladder.all_steps(of_glm)
    assert list(dict.fromkeys(every["call"])) == ["64 tokens", "64 tokens, videos allowed", "video of 8 frames"]
    text = words.parity(every)
    assert (
        "On *64 tokens, videos allowed* vLLM's graph is wrong, 150.0 floors from eager: cu_seqlens_tail mends" in text
    )
    assert text.endswith("In the buffers of vLLM's graph on *64 tokens, videos allowed*: D6: offsets fall.")
    assert max(value for trace in figures.parity(every).data for value in drawn(trace)) == pytest.approx(150)


def test_where_a_ladder_comes_from(made: Ladder) -> None:
    kind, text, numbers = ladder.source(made)
    assert (kind, text) == ("recorded", "the variants' ladder, NVIDIA H200, vLLM 0.33.0, 2026-11-29")
    assert list(numbers) == [
        f"{name}, 64 tokens, median ms" for name in ("eager as served", "vLLM's graph", "all variants")
    ]
    kind, _, numbers = ladder.source(msgspec.structs.replace(made, replay="static_replay"))
    assert (kind, numbers) == ("static_replay", {})
    assert ladder.source(msgspec.structs.replace(made, cases=made.cases[:1]))[2] == {}


# How steady the host was --------------------------------------------------------------------------------------------


def timed(made: Ladder, call: int, times: list[float]) -> Ladder:
    """The ladder with such times of eager as served on one call."""
    case = made.cases[call]
    columns = [
        msgspec.structs.replace(column, wall_us=times) if column.name == SERVED else column for column in case.columns
    ]
    cases = [msgspec.structs.replace(case, columns=columns) if one is case else one for one in made.cases]
    return msgspec.structs.replace(made, cases=cases)


def test_a_host_whose_speed_swings_is_told(made: Ladder) -> None:
    assert ladder.unsteady(made) == {}
    steady = timed(made, 0, [1000.0 + 300 * (number % 2) for number in range(100)])  # noise, not a swing
    assert ladder.caveats(steady) == ladder.caveats(made)
    swung = timed(made, 1, [1000.0] * 60 + [1700.0] * 40)
    assert ladder.unsteady(swung) == {made.cases[1].name: pytest.approx(1.7)}
    assert f"unsteady on {made.cases[1].name}" in ladder.caveats(swung)[-1]
    assert "1.7 times as long" in ladder.caveats(swung)[-1]
    assert ladder.unsteady(timed(made, 1, [1000.0] * 6 + [1700.0] * 4)) == {}  # too few to tell
    on_a_cpu = msgspec.structs.replace(swung, replay="static_replay")
    assert not any("unsteady" in caveat for caveat in ladder.caveats(on_a_cpu))
