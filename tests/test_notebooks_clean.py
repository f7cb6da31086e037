"""The notebooks in git were run, without errors, and carry no widget state."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 1_500_000  # a notebook that a browser and a diff can still show


def faults(notebook: dict[str, Any]) -> list[str]:
    """Return what a reader of the committed file, or nbval, would stumble over.

    nbval passes a cell that was never run without a word.
    """
    found = []
    if "widgets" in notebook.get("metadata", {}):
        found.append("metadata.widgets is saved")
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        if cell.get("execution_count") is None:
            found.append(f"cell {number} was never run")
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                found.append(f"cell {number} has a saved error")
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}) and not skipped(cell):
                found.append(f"cell {number} saves a widget's random id and is compared")
    return found


def skipped(cell: dict[str, Any]) -> bool:
    """Whether nbval leaves the cell's output uncompared."""
    tags = cell.get("metadata", {}).get("tags", [])
    return "NBVAL_IGNORE_OUTPUT" in "".join(cell["source"]) or "nbval-ignore-output" in tags


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_notebook_is_clean(path: Path) -> None:
    assert faults(json.loads(path.read_text("utf-8"))) == []
    assert path.stat().st_size < MAX_BYTES


def cell(**changes: Any) -> dict[str, Any]:
    return {"cell_type": "code", "source": ["1"], "execution_count": 1, "outputs": [], "metadata": {}, **changes}


WIDGET = {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}}}


@pytest.mark.parametrize(
    ("notebook", "fault"),
    [
        ({"metadata": {"widgets": {}}, "cells": []}, "metadata.widgets is saved"),
        ({"cells": [cell(execution_count=None)]}, "cell 1 was never run"),
        ({"cells": [cell(), cell(outputs=[{"output_type": "error"}])]}, "cell 2 has a saved error"),
        ({"cells": [cell(outputs=[WIDGET])]}, "cell 1 saves a widget's random id and is compared"),
    ],
)
def test_planted_faults_are_seen(notebook: dict[str, Any], fault: str) -> None:
    assert faults(notebook) == [fault]


def test_clean_cells_pass() -> None:
    ignored = cell(source=["# NBVAL_IGNORE_OUTPUT\n", "show()"], outputs=[WIDGET])
    assert faults({"cells": [cell(), cell(source=[], execution_count=None), ignored, {"cell_type": "markdown"}]}) == []
