"""The notebooks for the models beside the default one, which nbval runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.profiles import make_profile
from workbench import outcomes, parity
from workbench.files import write_json
from workbench.models import MODELS, model_facts
from workbench.run import RECORDINGS
from workbench.views import report, theme
from workbench.views.subject import MODEL_VARIABLE

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_capture_boundary.ipynb"
BUDGETS = NOTEBOOK.with_name("02_budget_sweep.ipynb")
PARITY = NOTEBOOK.with_name("03_parity.ipynb")


@pytest.mark.engine
def test_notebook_01_explains_glm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    monkeypatch.delenv("WORKBENCH_RUN", raising=False)
    monkeypatch.setenv(MODEL_VARIABLE, "glm4_1v")
    done = report.execute(NOTEBOOK, report.read_notebook(NOTEBOOK), threads=1)
    assert done.summary.failure is None
    outputs = [output.get("data", {}) for cell in done.notebook.cells for output in cell.get("outputs", [])]
    chosen, *said = [data["text/markdown"] for data in outputs if "text/markdown" in data]
    assert chosen.startswith("This notebook explains **GLM-4.1V**.")
    text = " ".join([*said, *(cell.source for cell in done.notebook.cells if cell.cell_type == "markdown")])
    assert "ERNIE" not in text
    assert "resampler" not in text
    assert "one image of 224 x 224, 64 tokens" in text
    assert "On *64 tokens, videos allowed* vLLM's graph is wrong, 20.6 floors from eager" in text  # D6, as recorded
    assert "cu_seqlens_tail and all variants mend it." in text
    assert text.count("vLLM pull request 40576 reports") == 3  # image, video, two GPUs
    assert {source.text.split(",")[0] for source in done.summary.sources} >= {"glm4_1v"}
    figures = [data for data in outputs if "application/vnd.plotly.v1+json" in data]
    assert len(figures) >= 9


def said_by(notebook: Path, first: str = "") -> tuple[report.Executed, list[str]]:
    """Run a notebook, `first` before its first line, and return its sentences too."""
    read = report.read_notebook(notebook)
    code = next(cell for cell in read.cells if cell.cell_type == "code")
    code.source = first + code.source
    done = report.execute(notebook, read, threads=1)
    assert done.summary.failure is None
    outputs = [output.get("data", {}) for cell in done.notebook.cells for output in cell.get("outputs", [])]
    return done, [data["text/markdown"] for data in outputs if "text/markdown" in data]


def test_notebook_02_without_costs_shows_packing_frames_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    monkeypatch.setenv(outcomes.SOURCE_VARIABLE, "")
    monkeypatch.setenv(MODEL_VARIABLE, "glm4_1v")
    done, said = said_by(BUDGETS, "from workbench.costs import SHIPPED\n\nSHIPPED.clear()\n")
    text = " ".join(said)
    assert said[0].startswith("This notebook explains **GLM-4.1V**.")
    assert "`workbench calibrate --model glm4_1v" in said[1]
    assert "*glm-video*: 1 item to a call" in text
    assert (
        "4 frames hold every batch and compute 1.00 times the tokens of the budgets; vLLM's own 2,400 compute 9.38"
        in text
    )
    assert "600 times too many (defect D2)" in text
    engine = next(one for one in said if " ms a request" in one)
    assert "Predictions are" not in engine
    assert " ms" not in text.replace(engine, "")  # a time nobody measured
    assert len(done.summary.sources) == 1  # the engine's
    assert "ERNIE" not in " ".join(said[1:])


def test_notebook_02_prices_glm_with_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    write_json(tmp_path / "profile.json", make_profile(model="glm4_1v"))
    monkeypatch.setenv(outcomes.SOURCE_VARIABLE, str(tmp_path / "profile.json"))
    monkeypatch.setenv(MODEL_VARIABLE, "glm4_1v")
    done, said = said_by(BUDGETS)
    text = " ".join(said)
    assert "No costs" not in text
    assert "The advised configuration takes" in text
    assert " Predicted: " in text  # of the frames
    assert "*glm-video*: " in text
    assert "ERNIE" not in " ".join(said[1:])
    assert done.summary.sources[0].text.startswith("costs of glm4_1v")


@pytest.mark.engine
def test_notebook_03_explains_glm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    monkeypatch.setenv(MODEL_VARIABLE, "glm4_1v")
    done, said = said_by(PARITY)
    text = " ".join(said)
    assert said[0].startswith("This notebook explains **GLM-4.1V**.")
    assert "Ernie4_5" not in text
    assert "**Recorded.** Glm4vForConditionalGeneration with FLASH_ATTN 3, CUDA graphs" in text
    assert "**Live.** Glm4vForConditionalGeneration with TORCH_SDPA, static replays on the CPU" in text
    assert "bisection names **blocks.1.attn**" in text
    assert "MMStar, average 0.21" in text
    assert "ERNIE" not in " ".join(said[1:])
    assert done.summary.answers[0].sentence is not None
    assert "graph and eager of GLM-4.1V differ in 7 of 74 conditions" in done.summary.answers[0].sentence


def recorded_cells(monkeypatch: pytest.MonkeyPatch, model: str) -> str:
    """Run the cells of notebook 03 that show recordings, and return what they say."""
    bundles: list[Mapping[str, Any]] = []
    monkeypatch.setattr(theme, "publish", bundles.append)
    monkeypatch.setenv(MODEL_VARIABLE, model)
    cells = [cell for cell in json.loads(PARITY.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for text in ("".join(cell["source"]) for cell in cells):
        if "NBVAL_IGNORE_OUTPUT" not in text:
            exec(compile(text, PARITY.name, "exec"), names)
    return "\n".join(bundle["text/markdown"] for bundle in bundles if "text/markdown" in bundle)


@pytest.mark.parametrize("model", MODELS)
def test_notebook_03_shows_what_is_recorded_of_a_model(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    pytest.importorskip("IPython")
    said = recorded_cells(monkeypatch, model)
    names = [one.name for one in parity.recorded(model)]
    assert [f"**{name}**" in said for name in names] == [True] * len(names)
    if not names:
        assert f"No recorded parity session of {model_facts(model).title} ships with this copy" in said


def test_notebook_03_sets_a_session_with_variants_beside_the_one_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("IPython")
    plain = parity.read_parity(RECORDINGS / "parity_glm4_1v")
    monkeypatch.setattr(parity, "RECORDINGS", tmp_path)
    cells = [
        msgspec.structs.replace(cell, status="equal", graph_items=3, graph_equal=3)
        if cell.scenario == "image-beside-video"
        else cell
        for cell in plain.cells
    ]
    rest = [one for one in plain.findings if one.defect != "D6"]
    fixed = msgspec.structs.replace(
        plain, name="parity_glm4_1v-variants", variants=["cu_seqlens_tail"], cells=cells, findings=rest
    )
    for session in (plain, fixed):
        write_json(tmp_path / session.name / parity.PARITY_FILE, session)
    said = recorded_cells(monkeypatch, "glm4_1v")
    assert "**parity_glm4_1v-variants** beside *parity_glm4_1v*: of 74 conditions" in said
    assert " changed, none for the worse; D6 is gone." in said
    write_json(tmp_path / fixed.name / parity.PARITY_FILE, msgspec.structs.replace(fixed, inputs_fingerprint="other"))
    assert "has no recorded session beside it of the same weights and inputs" in recorded_cells(monkeypatch, "glm4_1v")
