"""The notebooks for the models beside the default one, which nbval runs."""

from pathlib import Path

import pytest

from tests.profiles import make_profile
from workbench import outcomes
from workbench.files import write_json
from workbench.views import report
from workbench.views.subject import MODEL_VARIABLE

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_capture_boundary.ipynb"
BUDGETS = NOTEBOOK.with_name("02_budget_sweep.ipynb")


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
    assert "relative RMS of 0.84" in text  # D6, as recorded
    assert text.count("vLLM pull request 40576 reports") == 3  # image, video, two GPUs
    assert {source.text.split(",")[0] for source in done.summary.sources} >= {"glm4_1v"}
    figures = [data for data in outputs if "application/vnd.plotly.v1+json" in data]
    assert len(figures) >= 9


def said_by(notebook: Path) -> tuple[report.Executed, list[str]]:
    """Run a notebook, and return its sentences too."""
    done = report.execute(notebook, report.read_notebook(notebook), threads=1)
    assert done.summary.failure is None
    outputs = [output.get("data", {}) for cell in done.notebook.cells for output in cell.get("outputs", [])]
    return done, [data["text/markdown"] for data in outputs if "text/markdown" in data]


def test_notebook_02_without_costs_shows_packing_frames_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    monkeypatch.setenv(outcomes.SOURCE_VARIABLE, "")
    monkeypatch.setenv(MODEL_VARIABLE, "glm4_1v")
    if outcomes.measured("glm4_1v") is not None:
        pytest.skip("costs of GLM-4.1V ship now")
    done, said = said_by(BUDGETS)
    text = " ".join(said)
    assert said[0].startswith("This notebook explains **GLM-4.1V**.")
    assert "`workbench calibrate --model glm4_1v" in said[1]
    assert "*glm-video*: 1 item to a call" in text
    assert (
        "4 frames hold every batch and compute 1.00 times the tokens of the budgets; vLLM's own 2,400 compute 9.38"
        in text
    )
    assert "600 times too many (defect D2)" in text
    assert " ms" not in text  # a time nobody measured
    assert done.summary.sources == []
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
