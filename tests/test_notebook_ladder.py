"""The cells of notebook 01 that show a ladder and counters, on made-up ones: whole, of a CPU, empty, and none."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.ladders import make_counters, make_ladder
from workbench import capturable
from workbench.capturable import LADDER_FILE, Ladder
from workbench.encoder import counters
from workbench.files import write_json
from workbench.models import model_facts
from workbench.views import report, theme

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "01_capture_boundary.ipynb"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """What the cells show; no recording is there."""
    bundles: list[Mapping[str, Any]] = []
    monkeypatch.setattr(theme, "publish", bundles.append)
    for module in (capturable, counters):
        monkeypatch.setattr(module, "RECORDINGS", tmp_path / "none")
    return bundles


def run_cells(folder: Path, model: str = "ernie45_vl") -> None:
    """Run the cells that look for a ladder or counters in `folder`."""
    names: dict[str, Any] = {"theme": theme, "note_source": report.note_source, "facts": model_facts(model)}
    names["subject"] = SimpleNamespace(folder=folder)
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = [text for text in code if "climbed" in text or "counted" in text]
    assert len(found) == 4
    for text in found:
        exec(compile(text, NOTEBOOK.name, "exec"), names)


def said(shown: list[Mapping[str, Any]]) -> str:
    return "\n".join(bundle["text/markdown"] for bundle in shown if "text/markdown" in bundle)


def titles(shown: list[Mapping[str, Any]]) -> list[str]:
    return [str(bundle["text/plain"]) for bundle in shown if theme.PLOTLY_MIME in bundle]


def test_a_whole_ladder_has_every_figure(shown: list[Mapping[str, Any]], tmp_path: Path) -> None:
    write_json(tmp_path / LADDER_FILE, make_ladder())
    write_json(tmp_path / "counters" / counters.RESULT_FILE, make_counters())
    run_cells(tmp_path)
    assert titles(shown) == [
        "A call by what the graph holds",
        "A replay by module and kernel family: area is time",
        "How far each module is from the roofline",
        "How much of the hardware each family uses",
        "One call of 64 tokens, step by step",
        "What the GPU does in such a call",
        "Every call",
        "Do the outputs agree",
    ]
    assert "nan" not in said(shown).lower()


def replaced(**changes: Any) -> Ladder:
    return msgspec.structs.replace(make_ladder(), **changes)


@pytest.mark.parametrize(
    ("ladder", "words", "figures"),
    [
        (replaced(replay="static_replay", maps=[], boundaries=[]), "their times say nothing about CUDA graphs", 1),
        (replaced(cases=[], maps=[], boundaries=[], notes=["time ran out"]), "not whole: time ran out", 0),
        (replaced(cases=make_ladder().cases[:1]), "Not every step could be timed", 7),
        (replaced(maps=make_ladder().maps[2:]), "No graph of this ladder has a map: why.", 5),
    ],
    ids=["cpu", "empty", "video only", "no map"],
)
def test_what_a_ladder_lacks_is_said(
    shown: list[Mapping[str, Any]], tmp_path: Path, ladder: Ladder, words: str, figures: int
) -> None:
    write_json(tmp_path / LADDER_FILE, ladder)
    run_cells(tmp_path)
    assert words in said(shown)
    assert len(titles(shown)) == figures


@pytest.mark.parametrize("model", ["ernie45_vl", "glm4_1v"])
def test_nothing_is_invented_where_none_is_recorded(shown: list[Mapping[str, Any]], tmp_path: Path, model: str) -> None:
    run_cells(tmp_path, model)
    title = model_facts(model).title
    assert said(shown).count(f"No ladder of {title} is recorded here") == 3
    assert f"No hardware counters of {title} are recorded here" in said(shown)
    assert [bundle for bundle in shown if "text/html" in bundle] == []
