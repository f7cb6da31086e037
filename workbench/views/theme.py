"""One look for every figure and table, and the way notebooks show them.

    from workbench.views import theme
    theme.show(figure, table, "Graphs encode this image 4.9 times as fast as eager as served.")

Importing this module registers the plotly template `workbench` and makes it the default, with a renderer whose
output is the same in every run, so that nbval can compare it. The MIME bundle of a figure has plotly's JSON (drawn
by JupyterLab offline, and by `workbench report`) and HTML for other exports, which loads plotly.js from its CDN.
"""

import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs_version

from workbench.run import Arm
from workbench.views.tables import cells

TEMPLATE = "workbench"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, MUTED, GRID, PAPER = "#1f2933", "#5f6c7b", "#e4e7eb", "#ffffff"

# The palette of Okabe and Ito, told apart with any colour vision; yellow is left out (too light on white).
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#e69f00",
    "#cc79a7",
    "#56b4e9",
    "#000000",
)
COLORWAY = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
ARM_COLORS: dict[Arm, str] = {"eager_served": BLUE, "eager_fallback": VERMILION, "graph": GREEN}
FAMILY_COLORS = {"gemm": BLUE, "attention": GREEN, "norm": ORANGE, "glue": VERMILION, "memcpy": PURPLE}

PLOTLY_MIME = "application/vnd.plotly.v1+json"
CONFIG = {"displaylogo": False, "responsive": True}
_CONNECTED = """<div id="{id}"></div>
<script src="https://cdn.plot.ly/plotly-{version}.min.js"></script>
<script>Plotly.newPlot("{id}", {figure});</script>"""
MAX_TABLE_ROWS = 200


def _template() -> go.layout.Template:
    axis = {
        "gridcolor": GRID,
        "linecolor": MUTED,
        "ticks": "outside",
        "tickcolor": MUTED,
        "zerolinecolor": GRID,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": 13, "color": INK},
            # At the top of the margin, so that one row of legend fits between title and plot.
            "title": {
                "font": {"size": 16},
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"t": 16},
            },
            "paper_bgcolor": PAPER,
            "plot_bgcolor": PAPER,
            "colorway": list(COLORWAY),
            "margin": {"l": 64, "r": 24, "t": 72, "b": 48},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 12}},
            "hoverlabel": {"font": {"family": FONT, "size": 12}},
            "xaxis": axis,
            "yaxis": axis,
            "bargap": 0.25,
        }
    )


class StableRenderer(pio.base_renderers.MimetypeRenderer):  # type: ignore[misc]
    """plotly's JSON, and HTML for exports, with an id made from the content and nothing random."""

    def to_mimebundle(self, fig_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the MIME bundle of a figure given as a dictionary."""
        text = pio.to_json({**fig_dict, "config": CONFIG}, validate=False)
        figure_id = f"figure-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        # plotly writes "<" and "/" as escapes, so that no text ends the script element.
        connected = _CONNECTED.format(id=figure_id, version=get_plotlyjs_version(), figure=text)
        return {PLOTLY_MIME: json.loads(text), "text/html": connected}


pio.templates[TEMPLATE] = _template()
pio.templates.default = TEMPLATE
pio.renderers[TEMPLATE] = StableRenderer()
pio.renderers.default = TEMPLATE


def show(figure: go.Figure, table: pd.DataFrame | Sequence[dict[str, object]], sentence: str) -> None:
    """Show a computed sentence, a figure, and the figure's numbers as a table, in a notebook.

    Args:
        figure: a `Figure`, not a `FigureWidget` (which would put megabytes into a saved notebook).
        table: the numbers that the figure draws; column names carry the units.
        sentence: what the figure means, computed from the data; Markdown without HTML.
    """
    if isinstance(figure, go.FigureWidget):
        raise TypeError("show() takes a Figure; a FigureWidget does not belong in a saved notebook")
    say(sentence)
    bundle = StableRenderer().to_mimebundle(figure.to_dict())
    publish({**bundle, "text/plain": figure.layout.title.text or "figure"})
    show_table(table)


def say(sentence: str) -> None:
    """Show one sentence, computed from the data; Markdown without HTML."""
    publish({"text/markdown": sentence, "text/plain": sentence})


def show_table(table: pd.DataFrame | Sequence[dict[str, object]]) -> None:
    """Show a table alone, in a notebook."""
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(list(table))
    publish({"text/html": table_html(frame), "text/plain": f"table, {len(frame):,} rows: {', '.join(map(str, frame))}"})


def publish(bundle: Mapping[str, object]) -> None:
    """Show a MIME bundle as the output of a notebook's cell."""
    from IPython.display import display

    display(dict(bundle), raw=True)  # type: ignore[no-untyped-call]


def table_html(frame: pd.DataFrame) -> str:
    """Return `frame` as an HTML table: numbers aligned, equal decimals in a column, every text escaped.

    A plain 0, 1, 2 … index is left out. At most MAX_TABLE_ROWS rows are kept; a last line says how many are not.
    """
    if not isinstance(frame.index, pd.RangeIndex):
        frame = frame.reset_index()
    shown = frame.head(MAX_TABLE_ROWS)
    columns = [_escaped(*cells(shown.iloc[:, position])) for position in range(shown.shape[1])]
    heads = "".join(
        f'<th class="{kind}" scope="col">{html.escape(str(name))}</th>'
        for name, (kind, _) in zip(frame.columns, columns, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(f'<td class="{kind}">{texts[row]}</td>' for kind, texts in columns) + "</tr>"
        for row in range(len(shown))
    )
    rest = len(frame) - len(shown)
    more = f'\n<tr><td colspan="{len(columns)}">{rest:,} more rows</td></tr>' if rest else ""
    return (
        f'<table class="dataframe workbench"><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}{more}\n</tbody></table>'
    )


def _escaped(numbers: bool, texts: list[str]) -> tuple[str, list[str]]:
    """Return the class of a column's cells and their HTML."""
    return "number" if numbers else "text", [html.escape(text) for text in texts]
