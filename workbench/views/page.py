"""Executed notebooks as one HTML page that needs no network.

plotly.js and the figures' data lie in the file, compressed; the page's content security policy forbids it to load
anything. A browser without JavaScript, or older than DecompressionStream (2023), still shows every table.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.environment import MODE_TITLES, describe
from workbench.views.report import (
    ANSWER_MIME,
    KIND_TITLES,
    QUESTIONS,
    SOURCE_MIME,
    CellFailure,
    NotebookSummary,
    Question,
    Summary,
)
from workbench.views.theme import PLOTLY_MIME

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


@dataclass
class Part:
    """One notebook of the page: its headings (level, id, text), its cells, and the ids of headings above answers."""

    id: str
    title: str
    headings: list[tuple[int, str, str]] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)


def render(summary: Summary, notebooks: Sequence[Any]) -> str:
    """Return the page.

    Args:
        summary: what the top of the page says.
        notebooks: the executed nbformat nodes, in the order of `summary.notebooks`.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    writer = PageWriter()
    parts = [
        writer.part(f"n{number}", one.title, node, one.failure)
        for number, (one, node) in enumerate(zip(summary.notebooks, notebooks, strict=True), 1)
    ]
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("workbench.views", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return templates.get_template("report.html.j2").render(
        summary=summary,
        mode_title=MODE_TITLES[summary.mode],
        kind_titles=KIND_TITLES,
        answers=top_answers(summary, parts),
        facts=describe(summary.environment),
        parts=parts,
        figures=writer.figures,
        plotly=_packed(get_plotlyjs()) if writer.figures else "",
        code_style=writer.code_style(),
    )


@dataclass(frozen=True)
class TopAnswer:
    """One line of the page's top. `link` is an id of the page; None: no notebook answers. `said`: it is an answer."""

    question: str
    sentence: str
    link: str | None
    said: bool


def top_answers(summary: Summary, parts: Sequence[Part]) -> list[TopAnswer]:
    """Return an answer to each question from each notebook that has one, or why there is none."""
    lines = []
    for question, title in QUESTIONS.items():
        of_it = [
            _top_answer(question, answer.sentence, one, part)
            for one, part in zip(summary.notebooks, parts, strict=True)
            for answer in one.answers
            if answer.question == question
        ]
        lines += of_it or [TopAnswer(title, "No notebook of this report answers this.", None, said=False)]
    return lines


def _top_answer(question: Question, sentence: str | None, notebook: NotebookSummary, part: Part) -> TopAnswer:
    failure = notebook.failure
    where = f"stopped at cell {failure.cell} ({failure.error})" if failure else "ran"
    if sentence is None:
        why = f"No answer: {notebook.file} {where} {'before it' if failure else 'and never'} said so."
        return TopAnswer(QUESTIONS[question], why, part.id, said=False)
    later = f" ({notebook.file} {where} later.)" if failure else ""
    return TopAnswer(QUESTIONS[question], sentence + later, part.answers.get(question, part.id), said=True)


class PageWriter:
    """Turns cells into HTML and collects the figures' data."""

    def __init__(self) -> None:
        from nbconvert.filters import Highlight2HTML

        self.figures: list[str] = []
        self._highlight = Highlight2HTML(pygments_lexer="ipython3")

    @staticmethod
    def code_style() -> str:
        """Return the style sheet of highlighted code."""
        from pygments.formatters import HtmlFormatter

        return str(HtmlFormatter(style="friendly").get_style_defs(".highlight"))

    def part(self, part_id: str, title: str, notebook: Any, failure: CellFailure | None) -> Part:
        """Return one notebook as HTML; the cells after `failure` are left out and counted."""
        part = Part(id=part_id, title=title)
        for number, cell in enumerate(notebook.cells, 1):
            if cell.cell_type == "markdown":
                part.cells.append(self._markdown(cell.source, part))
            elif cell.cell_type == "code" and cell.source.strip():
                part.cells.append(self._code(cell, part))
            if failure and number == failure.cell:
                rest = len(notebook.cells) - number
                part.cells.append(
                    f'<p class="failure">Cell {number} failed with {html.escape(failure.error)}: '
                    f"{html.escape(failure.message[:500])}. Cells after it, not run: {rest}.</p>"
                )
                break
        return part

    def _markdown(self, source: str, part: Part) -> str:
        from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

        class Renderer(IPythonRenderer):  # type: ignore[misc]
            def heading(self, text: str, level: int, **_attributes: object) -> str:
                anchor = f"{part.id}-{len(part.headings) + 1}"
                part.headings.append((level, anchor, html.unescape(re.sub(r"<[^>]*>", "", text))))
                return f'<h{min(level + 1, 6)} id="{anchor}">{text}</h{min(level + 1, 6)}>\n'

        return f'<div class="prose">{MarkdownWithMath(renderer=Renderer(escape=False)).render(source)}</div>'

    def _code(self, cell: Any, part: Part) -> str:
        code = self._highlight(cell.source)
        outputs = "\n".join(filter(None, (self._output(output, part) for output in cell.outputs)))
        return (
            f'<div class="cell"><details class="code"><summary>code</summary>{code}</details>\n'
            f'<div class="outputs">{outputs}</div></div>'
        )

    def _output(self, output: Any, part: Part) -> str:
        from nbconvert.filters import ansi2html

        if output.output_type == "stream":
            text = f"<pre>{ansi2html(output.text)}</pre>"
            return text if output.name == "stdout" else f"<details><summary>messages</summary>{text}</details>"
        if output.output_type == "error":
            trace = ansi2html("\n".join(output.traceback))
            return f'<details open class="error"><summary>error</summary><pre>{trace}</pre></details>'
        return self._data(output.data, part)

    def _data(self, data: Any, part: Part) -> str:
        """Return the richest form of a MIME bundle that works in a file without network."""
        if SOURCE_MIME in data:
            source = data[SOURCE_MIME]
            kind = source["kind"]
            badge = f'<span class="kind {kind}">{KIND_TITLES[kind]}</span>'
            return f'<p class="source">{badge} {html.escape(source["text"])}</p>'
        if ANSWER_MIME in data:
            part.answers[data[ANSWER_MIME]["question"]] = part.headings[-1][1] if part.headings else part.id
            return f'<p class="answer">{html.escape(data[ANSWER_MIME]["sentence"])}</p>'
        if PLOTLY_MIME in data:
            return self._figure(data[PLOTLY_MIME])
        if WIDGET_MIME in data:
            return '<p class="muted">An interactive control: <code>make lab</code> and open this notebook.</p>'
        if "text/html" in data:
            return f'<div class="html">{data["text/html"]}</div>'
        if "image/svg+xml" in data:
            return f'<div class="html">{data["image/svg+xml"]}</div>'
        for mime in ("image/png", "image/jpeg"):
            if mime in data:
                return f'<img alt="" src="data:{mime};base64,{"".join(data[mime].split())}">'
        if "text/markdown" in data:
            return self._markdown(data["text/markdown"], part)
        return f"<pre>{html.escape(data.get('text/plain', ''))}</pre>"

    def _figure(self, figure: dict[str, Any]) -> str:
        layout = figure.get("layout", {})
        height = int(layout.get("height") or 420)
        title = layout.get("title") or {}
        label = html.escape(re.sub(r"<[^>]*>", " ", str(title.get("text", "") if isinstance(title, dict) else title)))
        self.figures.append(_packed(json.dumps(figure, separators=(",", ":"))))
        attributes = f'id="figure-{len(self.figures)}" role="img" aria-label="{label}"'
        return f'<div class="figure" {attributes} style="min-height:{height}px"></div>'


def _packed(text: str) -> str:
    """Return gzip in base64, the same bytes for the same text."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
