"""The ladder: every column on the same calls, what failed named, and a file that is whole after every part."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from typer.testing import CliRunner

from workbench.capturable import ALL, FALLBACK, GRAPH, LADDER_FILE, SERVED, Ladder, read_ladder
from workbench.cli import app
from workbench.errors import WorkbenchError
from workbench.files import write_json

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.encoder import engine  # noqa: E402 - needs an engine

engine.require_vllm()

from workbench.encoder.session import SessionOptions  # noqa: E402 - needs vLLM
from workbench.encoder.variants import names_for  # noqa: E402
from workbench.encoder.variants.fused import Fused  # noqa: E402
from workbench.encoder.variants.measure import (  # noqa: E402
    IMAGE_CASES,
    VIDEO_CASES,
    Effort,
    cases_for,
    measure,
)

OPTIONS = SessionOptions(depth=1, width=80, device="cpu")
IMAGES = {"one": [(1, 4, 4)], "over": [(1, 16, 18)]}
VIDEOS = {"clip": [(4, 4, 4)]}
NAMES = names_for("ernie45_vl")


@pytest.fixture(scope="module")
def written() -> list[Ladder]:
    """Every state of a ladder; the last is the result."""
    states: list[Ladder] = []
    result = measure(OPTIONS, (16, 32, 64), IMAGES, VIDEOS, Effort(repeats=3, warmup=0), on_case=states.append)
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
    assert one.noise_rms is not None
    assert one.noise_rms > 0


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


def test_when_time_runs_out_it_says_what_is_missing() -> None:
    found = measure(
        OPTIONS, (16,), {"one": [(1, 4, 4)]}, {}, Effort(repeats=1, warmup=0, seconds=1e-9), variants=["fused"]
    )
    assert not found.complete
    assert found.cases == []
    assert "time ran out before one" in found.notes


def test_a_variant_that_cannot_be_captured_costs_only_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Fused, *_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Fused, "tower", broken)
    monkeypatch.setattr("workbench.encoder.variants.measure._boundaries", lambda *_: None)
    found = measure(
        OPTIONS, (16,), {"one": [(1, 4, 4)]}, {}, Effort(repeats=1, warmup=0), variants=["resampler", "fused"]
    )
    assert [note.split(":")[0] for note in found.notes] == [
        "fused could not be captured",
        f"{ALL} could not be captured",
    ]
    assert {column.name for column in found.cases[0].columns} >= {GRAPH, "resampler"}


def test_cases_fit_the_budgets_and_one_does_not() -> None:
    assert [sum(t * h * w for t, h, w in grids) // 4 for grids in IMAGE_CASES.values()] == [
        64, 391, 2048, 256, 1391, 128, 1024,
    ]  # fmt: skip
    images, videos = cases_for(2048)
    assert (list(images)[:-1], videos) == (list(IMAGE_CASES), VIDEO_CASES)
    for largest in (16, 64, 2048):
        images, videos = cases_for(largest)
        *fitting, above = [*videos.values(), *images.values()]
        assert all(t * h * w <= 4 * largest for grids in fitting for t, h, w in grids)
        ((t, h, w),) = above
        assert 4 * largest < t * h * w
        assert h % 2 == w % 2 == 0
        assert len(fitting) > 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", "0"], "measure nothing"),
        (["--seconds", "0"], "measure nothing"),
        (["--budgets", "64,x"], "are not positive numbers"),
        (["--budgets", "0"], "are not positive numbers"),
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
    assert rows[3][3] == "fails"  # D1
    assert float(rows[2][1]) > 0
