"""Which model a notebook explains."""

import os

import pytest

from workbench.errors import WorkbenchError
from workbench.views import subject
from workbench.views.subject import MODEL_VARIABLE, choose_model

OFFERED = ("ernie45_vl", "glm4_1v")


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the notebook showed."""
    texts: list[str] = []
    monkeypatch.setattr(subject, "say", texts.append)
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)
    return texts


def test_the_first_is_the_default_and_the_others_are_named(said: list[str]) -> None:
    assert choose_model(OFFERED).key == "ernie45_vl"
    assert said == ["This notebook explains **ERNIE-4.5-VL**. Start it with `WORKBENCH_MODEL=glm4_1v` for GLM-4.1V."]


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setenv(MODEL_VARIABLE, "glm4_1v")
    assert choose_model(OFFERED).key == "glm4_1v"
    assert "`WORKBENCH_MODEL=ernie45_vl` for ERNIE-4.5-VL" in said[0]


def test_one_model_needs_no_words(said: list[str]) -> None:
    assert choose_model(["glm4_1v"]).key == "glm4_1v"
    assert said == []


@pytest.mark.parametrize("named", ["qwen3_vl", "nonsense"])
def test_a_model_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv(MODEL_VARIABLE, named)
    with pytest.raises(WorkbenchError, match=f"'{named}', for which nothing is here; use ernie45_vl or glm4_1v"):
        choose_model(OFFERED)


def test_picking_sets_the_variable_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv(MODEL_VARIABLE, "ernie45_vl")  # so that it is as before afterwards
    choice, told = subject.dropdown("ernie45_vl", OFFERED).children
    choice.value = "glm4_1v"
    assert os.environ[MODEL_VARIABLE] == "glm4_1v"
    assert told.value == "Run all cells again."
    choice.value = "ernie45_vl"
    assert (os.environ[MODEL_VARIABLE], told.value) == ("ernie45_vl", "")
