"""Notebook 01 for the models beside the default one, which nbval runs."""

from pathlib import Path

import pytest

from workbench.views import report
from workbench.views.subject import MODEL_VARIABLE

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_capture_boundary.ipynb"


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
    assert text.count("vLLM pull request 40576 reports") == 2  # image and video
    assert {source.text.split(",")[0] for source in done.summary.sources} >= {"glm4_1v"}
    figures = [data for data in outputs if "application/vnd.plotly.v1+json" in data]
    assert len(figures) >= 9
