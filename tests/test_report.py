"""The report: notebooks run as copies, one page without network, failures named; the theme's outputs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import nbformat
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from tests.chromium import opened
from workbench.cli import app
from workbench.errors import WorkbenchError
from workbench.run import ARMS
from workbench.views import report, theme
from workbench.views.browser import chromium_command, find_chromium, take_screenshot
from workbench.views.report import (
    Answer,
    CellFailure,
    Source,
    Summary,
    find_notebooks,
    make_report,
    note_answer,
    note_source,
)
from workbench.views.tables import MISSING

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no Chromium on PATH")

GOOD = [
    "# A good notebook\n\nText with **weight**.\n\n## A <i>part</i> & more\n\n| a | b |\n|---|---|\n| 1 | 2 |",
    "from workbench.views.report import note_source\n"
    "note_source('recorded', 'H200 <2026>', {'graph, mean (ms)': 4.98})\n"
    "note_source('static_replay', 'this CPU')",
    "import pandas as pd, plotly.graph_objects as go\n"
    "from workbench.views import theme\n"
    "figure = go.Figure(go.Scattergl(x=[1, 2, 3], y=[3, 1, 2]), layout={'title': {'text': 'Title </script> end'}})\n"
    "theme.show(figure, pd.DataFrame({'x (us)': [1.25, 22.5]}), 'It is **2** times as fast.')",
    "import sys, pathlib\nprint('to stdout'); print('to stderr', file=sys.stderr)\n"
    "print(sys.executable); print(pathlib.Path.cwd())\n'<raw & text>'",
    "from IPython.display import HTML\n"
    'HTML(\'<img src="http://127.0.0.1:9/leak.png"><script>fetch("http://127.0.0.1:9/leak").catch(() => 0)</script>\')',
]
BAD = ["# A bad notebook", "x = 1", "1 / 0", "print('never reached')"]


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    made = [
        nbformat.v4.new_markdown_cell(text) if text.startswith("#") else nbformat.v4.new_code_cell(text)
        for text in cells
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


class Page(HTMLParser):
    """What a page holds: text by tag, and everything it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values.get("href", ""))
        else:
            self.loads += [values[name] for name in ("src", "href") if name in values]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A report of a good and a bad notebook, made by the command line."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "notebooks").mkdir()
    write_notebook(folder / "notebooks" / "01_good.ipynb", GOOD)
    write_notebook(folder / "notebooks" / "02_bad.ipynb", BAD)
    write_notebook(folder / "notebooks" / "03_last.ipynb", ["# Last", "note = 7 * 6\nnote"])
    before = {path: path.read_bytes() for path in folder.rglob("*.ipynb")}
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "report", "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert {path: path.read_bytes() for path in folder.rglob("*.ipynb")} == before
    return folder, done


def summary_of(folder: Path) -> Summary:
    return msgspec.json.decode((folder / "report" / "summary.json").read_bytes(), type=Summary)


def html_of(folder: Path) -> str:
    return (folder / "report" / "index.html").read_text("utf-8")


def test_a_failed_cell_is_named_and_the_rest_is_written(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = made
    assert done.returncode == 1
    assert "02_bad.ipynb: cell 3 failed with ZeroDivisionError: division by zero" in done.stderr
    assert sorted(path.name for path in (folder / "report").iterdir()) == ["index.html", "summary.json"]
    page = html_of(folder)
    assert "Cells after it, not run: 1." in page
    assert "never reached" not in page
    assert ">42<" in page


def test_summary_says_what_ran(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = made
    summary = summary_of(folder)
    assert json.loads(done.stdout) == json.loads((folder / "report" / "summary.json").read_text("utf-8"))
    assert not summary.passed
    good, bad, last = summary.notebooks
    assert (good.title, good.failure, good.code_cells) == ("A good notebook", None, 4)
    assert good.sources == [
        Source(kind="recorded", text="H200 <2026>", numbers={"graph, mean (ms)": 4.98}),
        Source(kind="static_replay", text="this CPU"),
    ]
    assert bad.failure == CellFailure(cell=3, error="ZeroDivisionError", message="division by zero")
    assert (last.title, last.failure) == ("Last", None)


def test_the_top_says_which_numbers_are_recorded(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    page = html_of(made[0])
    top = page[page.index("<main") : page.index('<section id="n1"')]
    assert "H200 &lt;2026&gt;" in top
    assert "graph, mean (ms)" in top
    assert "4.98" in top
    assert report.KIND_TITLES["recorded"] in top
    assert "02_bad.ipynb</strong> stopped at cell 3" in top


def test_notebooks_run_with_this_python_in_their_own_folder(
    made: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    page = html_of(made[0])
    assert sys.executable in page
    assert str(made[0] / "notebooks") in page


def test_outputs_are_shown_and_texts_escaped(made: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    page = html_of(made[0])
    for text in ("&lt;raw &amp; text&gt;", "to stdout", "<summary>messages</summary>", "<strong>2</strong> times"):
        assert text in page
    assert page.count('<div class="figure"') == 1
    assert "</script> end" not in page


def test_the_page_loads_nothing_and_its_links_lead_somewhere(
    made: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    page = Page(html_of(made[0]))
    assert [load for load in page.loads if not load.startswith("data:")] == ["http://127.0.0.1:9/leak.png"]  # planted
    assert len(set(page.ids)) == len(page.ids)
    assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
    assert (made[0] / "report" / "index.html").stat().st_size < 6_000_000


ANSWERING = [
    "# Speed",
    "## 1 · How fast",
    "from workbench.views.report import note_answer\nnote_answer('speed', 'Graphs take 4 ms & win.')",
    "## 2 · Later",
    "1 / 0",
]
SILENT = ["# Budgets", "1 / 0", "from workbench.views.report import note_answer\nnote_answer('budgets', 'never said')"]


def test_the_top_answers_three_questions_or_says_why_not(tmp_path: Path) -> None:
    paths = [
        write_notebook(tmp_path / "speed.ipynb", ANSWERING),
        write_notebook(tmp_path / "budgets.ipynb", SILENT),
    ]
    summary = make_report(paths, tmp_path / "out")
    assert [one.answers for one in summary.notebooks] == [
        [Answer(question="speed", sentence="Graphs take 4 ms & win.")],
        [Answer(question="budgets", sentence=None)],
    ]
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    top = page[page.index('<dl class="answers">') : page.index("</dl>")]
    assert top.count("<dt>") == len(report.QUESTIONS) == 3
    assert "Graphs take 4 ms &amp; win. (speed.ipynb stopped at cell 5 (ZeroDivisionError) later.)" in top
    assert "No answer: budgets.ipynb stopped at cell 2 (ZeroDivisionError) before it said so." in top
    assert "never said" not in top
    assert "No notebook of this report answers this." in top
    heading = Page(top).links[0].removeprefix("#")
    assert f'id="{heading}">1 · How fast<' in page
    assert Page(top).links[1:] == ["#n2"]


def test_an_unknown_question_is_refused() -> None:
    with pytest.raises(ValueError, match="'price' is not one of speed, budgets, safety"):
        note_answer("price", "It costs.")  # type: ignore[arg-type]


def test_the_committed_notebooks_answer_every_question() -> None:
    notebooks = Path(__file__).parents[1] / "notebooks"
    answers = [one for path in find_notebooks([notebooks]) for one in report._answers(report.read_notebook(path))]
    assert [one.question for one in answers] == list(report.QUESTIONS)
    assert all(one.sentence for one in answers)


def browse(page: Path, folder: Path) -> tuple[str, list[str], list[str]]:
    """Open `page` in headless Chromium: its final DOM, its console, and what it asked the network for."""
    log = folder / "net.json"
    command = chromium_command(
        folder / "profile", "--enable-logging=stderr", f"--log-net-log={log}", "--dump-dom", page.as_uri()
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line and "WebGL" not in line]
    net = json.loads(log.read_text("utf-8"))
    start = net["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    requests = [event.get("params", {}) for event in net["events"] if event["type"] == start]
    # Chromium's own calls have no origin; a page's have one.
    asked = [one["url"] for one in requests if one.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, console, asked


@pytest.mark.browser
@needs_chromium
def test_the_browser_draws_every_figure_and_asks_nobody(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    dom, console, asked = browse(made[0] / "report" / "index.html", tmp_path)
    assert 'data-drawn="1"' in dom
    assert "main-svg" in dom
    assert asked == []
    refused = [line for line in console if "Content Security Policy" in line]
    assert len(refused) >= 2  # the planted image and fetch
    assert [line for line in console if line not in refused] == []


@pytest.mark.browser
@needs_chromium
def test_a_narrow_page_does_not_scroll_sideways(tmp_path: Path) -> None:
    long = "vllm/model_executor/models/" + "a_long_name_" * 6 + ".py"
    cells = [
        f"# Narrow\n\nSee `{long}`.",
        GOOD[1].replace("H200", long).replace("graph, mean", "one headline of many words, and more, mean"),
        GOOD[2],
        f"from workbench.views.report import note_answer\nnote_answer('safety', 'See {long}.')",
    ]
    make_report([write_notebook(tmp_path / "narrow.ipynb", cells)], tmp_path / "out")
    with opened((tmp_path / "out" / "index.html").as_uri(), tmp_path / "profile") as page:
        for width, toolbars in ((400, 0), (1600, 1)):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            page.call("Page.reload")
            page.wait(f"innerWidth === {width} && document.body && document.body.dataset.drawn === '1'")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate("document.querySelectorAll('.modebar').length") == toolbars
            shown = "[...document.querySelectorAll('.modebar')].filter(e => getComputedStyle(e).opacity !== '0').length"
            assert page.evaluate(shown) == 0  # the pointer is elsewhere
            inside = "[...document.querySelectorAll('.sources td')].every(e => e.scrollWidth <= e.clientWidth + 1)"
            assert width > 400 or page.evaluate(inside)


@pytest.mark.browser
@needs_chromium
def test_a_page_that_asks_is_seen(made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    open_page = tmp_path / "open.html"
    open_page.write_text(html_of(made[0]).replace("Content-Security-Policy", "no-policy"), "utf-8")
    _, _, asked = browse(open_page, tmp_path)
    assert sorted(asked) == ["http://127.0.0.1:9/leak", "http://127.0.0.1:9/leak.png"]


@pytest.mark.browser
@needs_chromium
def test_the_screenshot_is_a_picture_of_the_page(
    made: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    picture = tmp_path / "report.png"
    take_screenshot(made[0] / "report" / "index.html", picture, width=800, height=600)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (800, 600)
    blank = tmp_path / "blank.html"
    blank.write_text("<html></html>", "utf-8")
    take_screenshot(blank, tmp_path / "blank.png", width=800, height=600)
    assert len(data) > 4 * (tmp_path / "blank.png").stat().st_size


def test_without_chromium_a_screenshot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkbenchError, match="no Chromium on PATH"):
        take_screenshot(tmp_path / "page.html", tmp_path / "page.png")
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_that_dies_and_a_cell_that_hangs_end_their_notebook_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CELL_SECONDS", 3)
    paths = [
        write_notebook(tmp_path / "dies.ipynb", ["import os\nos._exit(3)", "1"]),
        write_notebook(tmp_path / "hangs.ipynb", ["import time\ntime.sleep(60)", "1"]),
        write_notebook(tmp_path / "works.ipynb", ["1"]),
    ]
    seen: list[tuple[str, float]] = []
    summary = make_report(paths, tmp_path / "out", lambda what, share: seen.append((what, share)))
    dies, hangs, works = summary.notebooks
    assert dies.failure == CellFailure(cell=1, error="DeadKernelError", message="the notebook's process died")
    assert hangs.failure == CellFailure(cell=1, error="CellTimeoutError", message="the cell ran for more than 3 s")
    assert works.failure is None
    assert not msgspec.json.decode((tmp_path / "out" / "summary.json").read_bytes(), type=Summary).passed
    # They run side by side, so their order is anybody's.
    *cells, last = [what for what, _ in seen]
    assert sorted(cells) == ["dies.ipynb, cell 1 of 2", "hangs.ipynb, cell 1 of 2", "works.ipynb, cell 1 of 1"]
    assert last == "writing the page"
    assert [share for _, share in seen] == sorted(share for _, share in seen)


def test_save_writes_outputs_that_do_not_change_and_leaves_failed_notebooks(tmp_path: Path) -> None:
    good = write_notebook(tmp_path / "good.ipynb", ["# Good", "print(6 * 7)"])
    bad = write_notebook(tmp_path / "bad.ipynb", ["1 / 0"])
    before = bad.read_bytes()
    make_report([good, bad], tmp_path / "out", save=True)
    saved = good.read_bytes()
    assert "42" in str(nbformat.read(good, as_version=4).cells[1].outputs)
    assert bad.read_bytes() == before
    make_report([good], tmp_path / "out", save=True)
    assert good.read_bytes() == saved


@pytest.mark.parametrize("last", ["1", "1 / 0"])
def test_no_kernel_stays_behind(tmp_path: Path, last: str) -> None:
    path = write_notebook(tmp_path / "pid.ipynb", ["import os\nprint(os.getpid())", last])
    done = report.execute(path, report.read_notebook(path))
    process = int(done.notebook.cells[0].outputs[0].text)
    assert process != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, said in (
        (["--notebooks", str(tmp_path / "nowhere")], "there is no notebook at"),
        (["--notebooks", str(tmp_path)], "there is no notebook at"),
    ):
        result = runner.invoke(app, ["report", "--out", str(tmp_path / "out"), *arguments])
        assert isinstance(result.exception, WorkbenchError)
        assert said in str(result.exception)
    for name, content in (("text.ipynb", "not json"), ("list.ipynb", "[1]"), ("empty.ipynb", "")):
        (tmp_path / name).write_text(content, "utf-8")
        with pytest.raises(WorkbenchError, match=f"{name} is not a Jupyter notebook"):
            make_report([tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_old_report_stays_when_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = write_notebook(tmp_path / "one.ipynb", ["# One"])
    make_report([notebook], tmp_path / "out")
    before = (tmp_path / "out" / "index.html").read_bytes()

    def full(*_arguments: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WorkbenchError, match="No space left on device"):
        make_report([notebook], tmp_path / "out")
    monkeypatch.undo()
    assert (tmp_path / "out" / "index.html").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.html", "summary.json"]


def test_notebooks_are_found_in_name_order_and_once(tmp_path: Path) -> None:
    for name in ("b.ipynb", "a.ipynb", "notes.txt"):
        (tmp_path / name).write_text("", "utf-8")
    found = find_notebooks([tmp_path, tmp_path / "a.ipynb"])
    assert [path.name for path in found] == ["a.ipynb", "b.ipynb"]


def test_lab_names_the_command_or_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert isinstance(runner.invoke(app, ["lab"]).exception, WorkbenchError)
    (tmp_path / "notebooks").mkdir()
    command = json.loads(runner.invoke(app, ["lab", "--json"]).stdout)
    assert command == [sys.executable, "-m", "jupyterlab", "notebooks"]


def test_note_source_refuses_what_a_reader_could_not_use() -> None:
    with pytest.raises(ValueError, match="'guessed' is not one of live"):
        note_source("guessed", "nowhere")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a finite number: a"):
        note_source("live", "here", {"a": float("nan"), "b": 1})


def bundle(figure: go.Figure) -> dict[str, Any]:
    return theme.StableRenderer().to_mimebundle(figure.to_dict())


def test_the_same_figure_gives_the_same_output() -> None:
    def figure() -> go.Figure:
        return go.Figure(go.Scatter(y=np.arange(3.0)), layout={"title": {"text": "a</script>b"}})

    assert bundle(figure()) == bundle(figure())
    assert bundle(figure()) != bundle(go.Figure(go.Scatter(y=[1, 2])))
    html = bundle(figure())["text/html"]
    assert html.count("</script>") == 2
    assert "a</script>b" not in html


def test_figures_take_the_theme_by_default() -> None:
    assert go.Figure().layout.template.layout.colorway == theme.COLORWAY
    assert set(theme.ARM_COLORS) == set(ARMS)
    assert set(theme.ARM_COLORS.values()) <= set(theme.COLORWAY)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.1."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_arms_stand_out_on_white_and_text_is_readable() -> None:
    for color in theme.ARM_COLORS.values():
        assert 1.05 / (luminance(color) + 0.05) >= 3  # WCAG 1.4.11, graphical objects
    for color in (theme.INK, theme.MUTED):
        assert 1.05 / (luminance(color) + 0.05) >= 4.5  # WCAG 1.4.3, text


def test_figure_widgets_are_refused() -> None:
    with pytest.raises(TypeError, match="FigureWidget"):
        theme.show(go.FigureWidget(), pd.DataFrame(), "")


def test_table_formats_escapes_and_counts() -> None:
    frame = pd.DataFrame(
        {
            "<b>name</b>": ["a & b", None],
            "mean (us)": [12.3456, float("nan")],
            "n": [1000, 2],
            "hit": [True, False],
            "mixed": ["x", 1.23456],
        },
        index=["first", "second"],
    )
    html = theme.table_html(frame)
    for text in (
        "&lt;b&gt;name&lt;/b&gt;",
        "a &amp; b",
        '<td class="number">12.35</td>',
        '<td class="number">1,000</td>',
        '<td class="text">yes</td>',
        '<td class="text">1.235</td>',
        '<td class="text">first</td>',
        f'<td class="number">{MISSING}</td>',
    ):
        assert text in html
    assert "7 more rows" in theme.table_html(pd.DataFrame({"a": range(theme.MAX_TABLE_ROWS + 7)}))
    assert "0.00" not in theme.table_html(pd.DataFrame({"a": [1234.5, 0.5]})).replace("1,234", "")


def test_what_a_notebook_shows_is_equal_in_every_run(tmp_path: Path) -> None:
    """nbval, which compares exactly, passes what `show` and `note_source` saved, and sees a changed number."""
    path = write_notebook(tmp_path / "stable.ipynb", GOOD[1:3])
    done = report.execute(path, report.read_notebook(path))
    assert done.summary.failure is None
    nbformat.write(done.notebook, path)
    saved = path.read_text("utf-8")
    assert "22.50" in saved
    (tmp_path / "changed.ipynb").write_text(saved.replace("22.50", "22.51"), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    command += [
        "--rootdir",
        str(tmp_path),
        "--nbval-sanitize-with",
        str(Path(__file__).parent / "nbval.cfg"),
        str(tmp_path),
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    results = [line for line in ran.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert [line.partition(" - ")[0] for line in results] == [
        "PASSED changed.ipynb::Cell 0",
        "PASSED stable.ipynb::Cell 0",
        "PASSED stable.ipynb::Cell 1",
        "FAILED changed.ipynb::Cell 1",
    ], ran.stdout
