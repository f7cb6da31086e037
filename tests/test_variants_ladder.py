"""The ladder: every column on the same calls, what failed named, and a file that is whole after every part."""

import gc
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.ladders import make_glm_ladder, make_ladder
from workbench.capturable import ALL, FALLBACK, GRAPH, LADDER_FILE, SERVED, Ladder, read_ladder
from workbench.cli import app
from workbench.errors import WorkbenchError
from workbench.files import write_json

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.encoder import engine  # noqa: E402 - needs an engine

engine.require_vllm()

from workbench.encoder.session import SessionOptions  # noqa: E402 - needs vLLM
from workbench.encoder.variants import measure as measuring  # noqa: E402
from workbench.encoder.variants import names_for  # noqa: E402
from workbench.encoder.variants.fused import Fused  # noqa: E402
from workbench.encoder.variants.measure import (  # noqa: E402
    IMAGE_CASES,
    Cases,
    Effort,
    cases_for,
    measure,
)
from workbench.ladder import one_image  # noqa: E402
from workbench.models import MODELS, model_facts  # noqa: E402

OPTIONS = SessionOptions(depth=1, width=80, device="cpu")
CASES = Cases({"one": [(1, 4, 4)], "over": [(1, 16, 18)]}, {"clip": [(4, 4, 4)]})
ONE = Cases({"one": [(1, 4, 4)]})
NAMES = names_for("ernie45_vl")


@pytest.fixture(scope="module")
def written() -> list[Ladder]:
    """Every state of a ladder; the last is the result."""
    states: list[Ladder] = []
    result = measure(OPTIONS, (16, 32, 64), CASES, Effort(repeats=3, warmup=0), on_case=states.append)
    assert states[-1] == result
    return states


def test_every_column_runs_every_case(written: list[Ladder]) -> None:
    clip, one, _ = written[-1].cases
    assert {SERVED, FALLBACK, GRAPH, ALL, *NAMES} <= {column.name for column in one.columns}
    for column in one.columns:
        assert column.error is None
        assert len(column.wall_us) == len(column.order) == 3
        assert all(item.bit_equal for item in column.parity + column.against_graph)
        assert column.nodes is None
        assert column.busy_us is None
    positions = sorted(place for column in one.columns for place in column.order)
    assert positions == list(range(3 * len(one.columns)))
    first, last = one.columns[0], one.columns[-1]
    assert first.order[0] < last.order[0] < last.order[1] < first.order[1]  # forwards, then backwards
    assert clip.modality == "video"
    assert {"resampler", ALL} < {column.name for column in clip.columns}
    assert GRAPH not in {column.name for column in clip.columns}
    for case in written[-1].cases:  # other inputs for the float32 encoder would be far away
        assert case.noise_rms is not None
        assert 0 < case.noise_rms < 0.1


def test_a_column_that_fails_is_named_and_not_timed(written: list[Ladder]) -> None:
    columns = {column.name: column for column in written[-1].cases[2].columns}
    for name in (GRAPH, "fused", "one_pass", "metadata_cache"):
        assert "cannot be multiplied" in (columns[name].error or "")  # D1
        assert columns[name].wall_us == []
    for name in ("fallback", "resampler", ALL):
        assert columns[name].error is None
        assert columns[name].budgets == [None]


def test_it_is_handed_on_after_every_part(written: list[Ladder], tmp_path: Path) -> None:
    assert [len(state.cases) for state in written] == sorted(len(state.cases) for state in written)
    assert not any(state.complete for state in written[:-1])
    assert written[-1].complete
    assert {boundary.name for boundary in written[-1].boundaries} >= {"vit", "vit+resampler", *NAMES}
    for state in written:
        write_json(tmp_path / LADDER_FILE, state)
        assert read_ladder(tmp_path) == state


def test_nothing_is_traced_before_everything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first trace slows the launches of the whole process. Sessions of another modality still run by then."""
    cases: list[int] = []

    def traces(run: Any, part: Any) -> None:
        cases.append(len(run.ladder.cases))
        for modality, calls in part.calls.items():
            for name, grids in calls.items():
                case = next(one for one in run.ladder.cases if one.name == name)
                inputs = part.inputs(modality, grids, run.effort.seed)
                assert list(inputs.tokens) == case.tokens
                ran = {column.name for column in case.columns if column.error is None}
                served, *others = [way.run(inputs) for way in part.ways if way.name in ran]
                assert all(torch.equal(a, b) for other in others for a, b in zip(other, served, strict=True))

    monkeypatch.setattr("workbench.encoder.variants.measure._traces", traces)
    measure(OPTIONS, (16, 32, 64), CASES, Effort(repeats=1, warmup=0))
    assert cases == [3, 3]


def test_a_trace_adds_to_the_columns_that_ran(written: list[Ladder], monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(_: object, ways: list[Any], inputs: object) -> dict[str, dict[str, float | int]]:
        case = next(case for case in written[-1].cases if case.grids == inputs)
        assert [way.name for way in ways] == [column.name for column in case.columns if column.error is None]
        if inputs == CASES.images["over"]:
            raise RuntimeError("CUPTI is in use")
        return {way.name: {"ops": 7, "busy_us": 5.0, "idle_us": 2.0, "traced_us": 9.0} for way in ways}

    monkeypatch.setattr(measuring, "_traced", traced)
    monkeypatch.setattr(measuring._Part, "inputs", lambda part, modality, grids, seed: list(grids))
    untraced = msgspec.structs.replace(written[-1], notes=[])
    run = measuring._Run(Effort(), lambda _: None, ladder=untraced)
    ways = [measuring._Way(column.name, lambda _: [], ("image",)) for column in untraced.cases[1].columns]
    session: Any = SimpleNamespace(device=torch.device("cuda"))
    measuring._traces(run, measuring._Part(session, ways, {"image": CASES.images}))
    assert run.ladder is not None
    clip, one, over = run.ladder.cases
    assert clip == untraced.cases[0]
    assert over == untraced.cases[2]
    assert {column.busy_us for column in one.columns} == {5.0}
    assert [column.wall_us for column in one.columns] == [column.wall_us for column in untraced.cases[1].columns]
    assert run.ladder.notes == ["over could not be traced: CUPTI is in use"]


def test_a_case_stops_when_it_has_had_its_time() -> None:
    found = measure(OPTIONS, (16,), ONE, Effort(repeats=9, warmup=0, case_seconds=1e-9), variants=["fused"])
    assert found.complete
    assert {len(column.wall_us) for column in found.cases[0].columns} == {2}


def test_the_heap_is_frozen_while_cases_are_timed() -> None:
    counts: list[int] = []
    effort = Effort(repeats=1, warmup=0)
    measure(OPTIONS, (16,), ONE, effort, variants=["fused"], on_case=lambda _: counts.append(gc.get_freeze_count()))
    captured, case, boundaries, done = counts
    assert captured == boundaries == done == 0
    assert case > 0


def test_when_time_runs_out_it_says_what_is_missing() -> None:
    found = measure(OPTIONS, (16,), ONE, Effort(repeats=1, warmup=0, seconds=1e-9), variants=["fused"])
    assert not found.complete
    assert found.cases == []
    assert "time ran out before one" in found.notes


def test_a_variant_that_cannot_be_captured_costs_only_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Fused, *_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Fused, "tower", broken)
    monkeypatch.setattr("workbench.encoder.variants.measure._boundaries", lambda *_: None)
    found = measure(OPTIONS, (16,), ONE, Effort(repeats=1, warmup=0), variants=["resampler", "fused"])
    assert [note.split(":")[0] for note in found.notes] == [
        "fused could not be captured",
        f"{ALL} could not be captured",
    ]
    assert {column.name for column in found.cases[0].columns} >= {GRAPH, "resampler"}


def test_cases_fit_the_budgets_and_one_does_not() -> None:
    assert [sum(t * h * w for t, h, w in grids) // 4 for grids in IMAGE_CASES.values()] == [
        64, 391, 2048, 256, 1391, 128, 1024,
    ]  # fmt: skip
    ernie = cases_for(model_facts("ernie45_vl"), 2048)
    assert list(ernie.images)[:-1] == list(IMAGE_CASES)
    assert (ernie.videos, ernie.beside) == ({"video of 4 frames": [(4, 16, 16)]}, {})
    glm = cases_for(model_facts("glm4_1v"), 2048)
    assert glm.images == ernie.images
    assert glm.videos == {
        "video of 8 frames": [(4, 16, 16)],  # of two in each temporal patch
        "videos of 8 and 4 frames": [(4, 16, 16), (2, 16, 16)],
    }
    assert glm.beside == {"64 tokens, videos allowed": [(1, 16, 16)]}
    for key in MODELS:
        for largest in (16, 64, 2048):
            cases = cases_for(MODELS[key], largest)
            *fitting, above = [*cases.videos.values(), *cases.beside.values(), *cases.images.values()]
            assert all(t * h * w <= 4 * largest for grids in fitting for t, h, w in grids)
            ((t, h, w),) = above
            assert 4 * largest < t * h * w
            assert h % 2 == w % 2 == 0
            assert len(fitting) > 2


# GLM-4.1V, whose graphs of vLLM take videos -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_glm() -> Ladder:
    options = SessionOptions(model="glm4_1v", depth=1, width=128, device="cpu")
    return measure(options, (16, 32, 64), cases_for(model_facts("glm4_1v"), 64), Effort(repeats=2, warmup=0))


def test_glm_has_vllm_s_graph_for_videos_too(of_glm: Ladder) -> None:
    assert of_glm.complete
    assert of_glm.max_frames == 16
    for case in of_glm.cases:
        assert [column.name for column in case.columns] == [
            SERVED, FALLBACK, GRAPH, "position_cache", "cu_seqlens_tail", ALL,
        ]  # fmt: skip
        assert all(column.error is None and len(column.wall_us) == 2 for column in case.columns)
        assert all(item.bit_equal for column in case.columns for item in column.parity + column.against_graph)
    videos = [case for case in of_glm.cases if case.modality == "video"]
    assert [len(case.grids) for case in videos] == [1, 2]
    assert all(None not in column.budgets for case in videos for column in case.columns)
    assert {boundary.name for boundary in of_glm.boundaries} >= {"vit", "cu_seqlens_tail", "position_cache"}


def test_d6_is_seen_where_videos_are_allowed_and_gone_with_the_variant(of_glm: Ladder) -> None:
    """A static replay stops at the first maximum of the offsets, so outputs agree; what it saw is in the column."""
    seen = [(case.name, column.name) for case in of_glm.cases for column in case.columns if column.findings]
    assert seen == [("64 tokens, videos allowed", GRAPH), ("64 tokens, videos allowed", "position_cache")]
    (beside,) = [case for case in of_glm.cases if case.beside_videos]
    (finding,) = beside.columns[2].findings
    assert finding.startswith("D6: cu_seqlens of budget 64 falls after its maximum ([0, 256, 256, 256, 256, 0,")
    image = one_image(of_glm)
    assert image is not None
    assert image.name == "64 tokens"


def test_an_encoder_without_variants_is_measured(tmp_path: Path) -> None:
    options = SessionOptions(model="qwen2_5_vl", depth=1, width=160, device="cpu")
    found = measure(options, (16,), ONE, Effort(repeats=1, warmup=0))
    assert [column.name for column in found.cases[0].columns] == [SERVED, FALLBACK, GRAPH]
    assert [boundary.name for boundary in found.boundaries] == ["vit"]


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", "0"], "measure nothing"),
        (["--seconds", "0"], "measure nothing"),
        (["--case-seconds", "nan"], "measure nothing"),
        (["--budgets", "64,x"], "are not positive numbers"),
        (["--budgets", "0"], "are not positive numbers"),
        (["--model", "nonsense"], "unknown model"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["ladder", "--device", "cpu", "--out", str(tmp_path), *arguments])
    assert isinstance(done.exception, WorkbenchError), done.output
    assert words in str(done.exception)


def test_a_folder_without_a_ladder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match=r"h200_variants\.sh"):
        read_ladder(tmp_path)
    (tmp_path / LADDER_FILE).write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(WorkbenchError, match="schema version 99"):
        read_ladder(tmp_path)


# The pages' figures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    script = Path(__file__).parents[1] / "scripts" / "variant_pages.py"
    spec = importlib.util.spec_from_file_location("workbench_variant_pages", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_written_from_a_gpus_ladder_only(written: list[Ladder], pages: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="made on a CPU"):
        pages.figures(written[-1], "fused")
    on_gpu = msgspec.structs.replace(written[-1], replay="cuda_graph")
    for name in (*NAMES, "cu_seqlens_tail"):
        (tmp_path / f"{name}.md").write_text("# Variant\n\n## Figures\n\nNot measured yet.\n")
    assert sorted(pages.write(on_gpu, tmp_path)) == sorted(NAMES)
    text = (tmp_path / "resampler.md").read_text()
    assert "Not measured" not in text
    assert text.count("\n| ") == 2 + 2  # heads and rule, the image and the video; D1 leaves no time of the graph
    assert "| clip |" in text
    assert "bit-equal to the graph" in text
    assert "Not measured yet." in (tmp_path / "cu_seqlens_tail.md").read_text()
    fallback = (tmp_path / "fallback.md").read_text()  # what it changes shows above the largest budget only
    assert fallback.count("\n| ") == 2 + 1
    assert "| over |" in fallback
    assert "vLLM's graph ends with `RuntimeError: mat1 and mat2" in fallback
    held = msgspec.structs.replace(on_gpu, cases=on_gpu.cases[:2])
    told = " ".join(pages.figures(held, "fallback").split())
    assert "no call of this session has times of this variant beside eager fallback" in told
    again = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    pages.write(on_gpu, tmp_path)
    assert {page.name: page.read_text() for page in tmp_path.glob("*.md")} == again


def test_the_overview_has_a_row_for_every_call(written: list[Ladder], pages: ModuleType) -> None:
    with pytest.raises(WorkbenchError, match="made on a CPU"):
        pages.overview(written[-1])
    text = pages.overview(msgspec.structs.replace(written[-1], replay="cuda_graph"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert [row[0] for row in rows[2:]] == ["one", "over", "clip"]
    assert rows[2][1] == "3"
    assert float(rows[2][2]) > 0
    assert rows[3][4] == "fails"  # D1


def test_a_page_of_glm_shows_d6_before_and_its_fix(pages: ModuleType, tmp_path: Path) -> None:
    ladder = make_glm_ladder()
    page = tmp_path / "cu_seqlens_tail.md"
    page.write_text("# Variant\n\n## Figures\n\nNot measured yet.\n")
    assert pages.write(ladder, tmp_path) == ["cu_seqlens_tail"]
    text = page.read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    parity = {row[0]: row[-1] for row in cells[2:]}
    assert parity["64 tokens, videos allowed"] == "150 → 0.00"
    assert parity["64 tokens"] == parity["video of 8 frames"] == "bit-equal to the graph"
    assert "where vLLM's graph is wrong, its distance stands in front" in " ".join(text.split())
    assert "Before: vLLM's graph. GPU busy" in text  # which takes videos too


def test_what_a_variant_leaves_wrong_is_the_graph_s(pages: ModuleType) -> None:
    ladder = make_glm_ladder()
    video, beside, image = ladder.cases
    wrong = beside.columns[2].parity
    columns = [*beside.columns[:3], msgspec.structs.replace(beside.columns[3], parity=wrong)]
    left = msgspec.structs.replace(ladder, cases=[video, msgspec.structs.replace(beside, columns=columns), image])
    text = " ".join(pages.figures(left, "cu_seqlens_tail").split())
    assert "It leaves as it is what vLLM's graph has wrong: 64 tokens, videos allowed." in text
    assert "noise floors from eager as served" not in text
    assert "It leaves" not in pages.figures(ladder, "cu_seqlens_tail")


def test_the_overview_has_a_heading_for_each_model(pages: ModuleType) -> None:
    ernie, glm = make_ladder(), make_glm_ladder()
    assert pages.overviews([ernie]) == pages.overview(ernie)
    text = pages.overviews([ernie, glm])
    assert [line for line in text.splitlines() if line[:1] == "#"] == ["### ERNIE-4.5-VL", "### GLM-4.1V"]
    assert "| cu_seqlens_tail ms |" in text
    assert "150 → 0.00" in text
