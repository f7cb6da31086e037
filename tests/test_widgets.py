"""The instrument of notebook 02: what its controls do, and a person's hands on it in JupyterLab."""

import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("ipywidgets")

from tests.chromium import opened
from tests.jupyter import FIGURE, IDLE, RUN_ALL, focus, jupyterlab
from tests.profiles import make_profile
from workbench import outcomes
from workbench.advisor import advise
from workbench.budgets import Configuration, parse_compilation_config
from workbench.costs import CostModel
from workbench.errors import WorkbenchError
from workbench.views.browser import find_chromium
from workbench.views.subject import live
from workbench.views.widgets import BudgetInstrument

MODEL = CostModel(make_profile())
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def instrument() -> BudgetInstrument:
    return BudgetInstrument("mixed", costs=MODEL)


def shown(instrument: BudgetInstrument) -> list[str]:
    """The graphs of the first panel."""
    return list(instrument.figure.data[0].x)


def test_it_opens_with_a_configuration_that_serves(instrument: BudgetInstrument) -> None:
    assert instrument.tried is not None
    assert instrument.tried.candidate.refused is None
    assert shown(instrument) == ["128", "256", "512", "1,024", "2,048", "4,096"]
    assert "padding waste" in instrument.message.value


def test_a_slider_changes_list_figure_and_text(instrument: BudgetInstrument) -> None:
    before = instrument.message.value, instrument.config.value
    instrument.graphs.value = 3
    assert shown(instrument) == ["1,024", "2,048", "4,096"]
    assert instrument.budgets.value == "1024, 2048, 4096"
    assert (instrument.message.value, instrument.config.value) != before
    instrument.spacing.value = "equal"
    assert instrument.budgets.value == "1365, 2731, 4096"


def test_the_figure_holds_the_tables(instrument: BudgetInstrument) -> None:
    instrument.budgets.value = "100, 900, 4096"
    instrument.max_items.value = 2
    tried = outcomes.outcome(instrument.study, Configuration((100, 900, 4096), 2), "this")
    graphs, fill = outcomes.per_budget(tried), outcomes.fill_histogram(tried)
    data = instrument.figure.data
    assert list(data[0].y) == (graphs["tokens"] / 1e6).tolist()
    assert list(data[1].y) == (graphs["padding tokens"] / 1e6).tolist()
    assert list(data[2].y) == fill["share"].tolist()
    assert data[4].y[-1] == pytest.approx(1.0)
    assert list(data[5].y) == outcomes.bill(tried)["memory MiB"].tolist()


def test_advise_fills_in_the_answer(instrument: BudgetInstrument) -> None:
    instrument.graphs.value = 4
    instrument.advise.click()
    assert instrument.tried is not None
    text = instrument.config.value
    copied = parse_compilation_config(text[text.index("{") : text.rindex("}") + 1])
    assert copied == instrument.tried.candidate.configuration
    assert len(copied.budgets) <= 4
    answer = advise(instrument.study.workload, MODEL).answer
    assert answer.objective_us is not None
    assert instrument.tried.candidate.objective_us is not None
    assert instrument.tried.candidate.objective_us >= answer.objective_us


def test_other_workloads(instrument: BudgetInstrument, tmp_path: Path) -> None:
    instrument.preset.value = "pull-request"
    assert instrument.study.workload.name == "pull-request"
    instrument.per_call.value = 5
    assert len(instrument.study.workload) == 200
    file = tmp_path / "mine.csv"
    file.write_text("width,height\n224,224\n1000,500\n")
    instrument.file.value = str(file)
    assert instrument.study.workload.name == "mine"
    assert instrument.study.workload.items == 2


def test_any_workload_from_the_start_is_whole_in_the_first_state(tmp_path: Path) -> None:
    """A browser gets the widget's first state and later changes, but loses changes before plotly is loaded."""
    one = BudgetInstrument("{(224, 224, 1): 1.0}", costs=MODEL)
    assert one.file.value == "{(224, 224, 1): 1.0}"
    state = one.figure.get_state()["_widget_data"]
    assert [len(trace["x"]) for trace in state[:3]] == [6, 6, 20]
    assert len(state[3]["x"]) == len(state[4]["x"]) == outcomes.TIME_BINS
    with pytest.raises(WorkbenchError, match="no workload"):
        BudgetInstrument(str(tmp_path / "none.csv"), costs=MODEL)


@pytest.mark.parametrize(
    ("control", "value", "message"),
    [
        ("budgets", "128, many", "not a whole number"),
        ("budgets", "2, 4096", "max items 4 is above the smallest budget 2"),
        ("budgets", "128, 2048", "D1"),
        ("budgets", "128, -1", "not positive"),
        ("file", "no such file", "no workload"),
        ("file", "{(224, 224, 1): __import__('os')}", "literal"),
        ("file", "<img src=x onerror=alert(1)>", "&lt;img"),
    ],
)
def test_mistakes_are_sentences(instrument: BudgetInstrument, control: str, value: str, message: str) -> None:
    getattr(instrument, control).value = value
    assert message in instrument.message.value
    assert "<img" not in instrument.message.value
    instrument.file.value = ""
    instrument.budgets.value = "512, 4096"
    assert "padding waste" in instrument.message.value


def test_a_kernel_of_nbclient_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert not live()
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    assert live()


# In JupyterLab --------------------------------------------------------------------------------------------------------

NOTEBOOK = ROOT / "notebooks" / "02_budget_sweep.ipynb"
_GRAPHS = f"Array.from({FIGURE}?.data?.[0]?.x ?? [])"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab with notebook 02, its outputs taken out."""
    pytest.importorskip("jupyterlab")
    with jupyterlab(tmp_path, NOTEBOOK.name, nbformat.read(NOTEBOOK, as_version=4)) as address:
        yield address


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_in_jupyterlab_a_slider_moves_the_figure(lab: str, tmp_path: Path) -> None:
    with opened(lab, tmp_path / "browser") as page:
        page.wait(IDLE)
        page.evaluate(RUN_ALL)
        page.wait(f"{_GRAPHS}.length === 6")
        drawn = f"{FIGURE}.querySelectorAll('.bars .point path').length"
        bars = page.wait(drawn)

        focus(page, "graphs", "[role=slider]")
        page.press("ArrowLeft", 37)
        page.press("ArrowLeft", 37)
        page.wait(f"{_GRAPHS}.length === 4")
        assert page.evaluate(_GRAPHS) == ["512", "1,024", "2,048", "4,096"]
        assert page.wait(drawn) < bars

        focus(page, "budgets", "input")
        page.evaluate("document.activeElement.select()")
        page.write("700, 4096")
        page.press("Enter", 13)
        page.wait(f"{_GRAPHS}[0] === '700'")
        text = "[...document.querySelectorAll('textarea')].map(one => one.value).join()"
        assert "[700,4096]" in page.evaluate(text)

        page.evaluate("[...document.querySelectorAll('button')].find(one => one.textContent === 'Advise').click()")
        page.wait(f"{_GRAPHS}.length > 2")

        page.evaluate("window.jupyterapp.commands.execute('docmanager:save').then(() => true)")
    saved = tmp_path / "notebooks" / NOTEBOOK.name
    assert saved.stat().st_size < 1_500_000  # no plotly.js, of which a FigureWidget brings 5 MB
    assert "widgets" not in json.loads(saved.read_text())["metadata"]
    outputs = [output for cell in nbformat.read(saved, 4).cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" for output in outputs)
