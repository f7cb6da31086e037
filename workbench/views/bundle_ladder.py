"""A ladder of variants in a bundle's report: the tables and sentences of notebook 01, and one figure without a script.

ladder_section(ladder)     # HTML, for `bundle_report`
ladder_markdown(ladder)    # lines of Markdown, for `bundle_markdown`
"""

import math
import re
from collections.abc import Callable, Sequence

import pandas as pd

from workbench import ladder as tables
from workbench.capturable import GRAPH, Ladder
from workbench.models import MODELS
from workbench.views import ladder_words as words
from workbench.views.markup import Markup, bullets, element, emphasised, foldout, join, table, unmarked
from workbench.views.tables import cells

_MOST_ROWS, _LONGEST_CELL = 300, 300
_MOST_MAPS, _MOST_DRAWN = 12, 40
_RATIOS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)
# As in notebook 01: vLLM's graph, one or some variants, all variants.
_GRAPH_COLOR, _SOME_COLOR, _ALL_COLOR, _EQUAL_COLOR = "#d55e00", "#56b4e9", "#009e73", "#8a93a0"


def ladder_section(ladder: Ladder) -> Markup:
    """The whole section: what was reached, every call and step, the capture boundary, graphs by module."""
    return join(
        [
            element("h3", "The variants' ladder"),
            element("p", "; ".join(_about(ladder)), class_="muted"),
            bullets("Read this with the numbers", tables.caveats(ladder), class_="doubts"),
            _steps(ladder),
            _boundary(ladder),
            _maps(ladder),
        ]
    )


def _about(ladder: Ladder) -> tuple[str, str]:
    """What was measured where, and how."""
    model, (_, source, _) = ladder.model, tables.source(ladder)
    return (
        f"{source}; {model.architecture}, depth {model.depth}, width {model.width}, {model.dtype}, "
        f"{model.attention_backend}, {model.weights}",
        f"budgets {', '.join(map(str, ladder.budgets))}, {ladder.max_items} items a replay; up to {ladder.repeats} "
        "samples of each step on each call, un-profiled, in ABBA order over all steps",
    )


# --- steps -----------------------------------------------------------------------------------------


def _steps(ladder: Ladder) -> Markup | None:
    if not ladder.cases:
        return None
    every = tables.all_steps(ladder)
    image = tables.one_image(ladder)
    one = tables.steps(image or ladder.cases[0])
    timed = ladder.replay == "cuda_graph"
    said = [words.calls(every)] if timed else []
    return join(
        [
            [element("p", emphasised(text), class_="verdict") for text in (*said, words.parity(every))],
            speed_ups(every) if timed else None,
            element("h3", "Every call"),
            _frame(tables.overview(every)),
            element("h3", f"Step by step: {one['call'].iloc[0][:_LONGEST_CELL]}"),
            element("p", emphasised(words.steps(one))) if timed else None,
            _frame(one.drop(columns=["call", "tokens"])),
            _recipes(ladder),
            foldout(f"Every step of every call ({len(every)})", _frame(every.drop(columns="tokens"))),
        ]
    )


def _recipes(ladder: Ladder) -> Markup | None:
    """How graphs compute the steps of a block, where a variant measured that."""
    if ladder.model.key not in MODELS or (found := tables.recipes(ladder)).empty:
        return None
    said = words.recipes(found, tables.schedules(ladder))
    return join([element("h3", "How blocks are computed"), element("p", emphasised(said)), _frame(found)])


def speed_ups(every: pd.DataFrame, width: int = 760) -> Markup | None:
    """Every step of every call as a dot, times as fast as eager as served, on one logarithmic axis.

    `every` is of `ladder.all_steps`. The number at a row's end is that of all variants, or of the only one.
    """
    known = every[every["vs served"].notna()]
    known = known[(known["vs served"] > 0) & (known["vs served"] < math.inf)]
    known = known[~known["step"].isin(tables.BASELINES[:2])]
    calls = list(dict.fromkeys(known["call"]))[:_MOST_DRAWN]
    if not calls:
        return None
    last = tables.last_step(every["step"])
    low, high = min(0.9, float(known["vs served"].min())), max(1.1, float(known["vs served"].max()))
    left, right, line, top = 190, 70, 24, 34
    scale = (width - left - right) / math.log(high / low)

    def x(value: float) -> float:
        return round(left + math.log(value / low) * scale, 1)

    height = top + line * len(calls) + 40
    parts: list[object] = _legend(last)
    parts += _axis([value for value in _RATIOS if low <= value <= high], x, (top - 8, height - 34))
    for place, call in enumerate(calls):
        y = top + 8 + line * place
        parts.append(element("text", call[:28], x=left - 10, y=y + 4, text_anchor="end"))
        rows = known[known["call"] == call]
        for step, value in sorted(zip(rows["step"], rows["vs served"], strict=True), key=lambda row: row[0] == last):
            color, radius = _dot(step, last)
            parts.append(element("circle", cx=x(value), cy=y, r=radius, fill=color))
            if step == last:
                parts.append(element("text", f"{value:.2f}×", x=width - 8, y=y + 4, text_anchor="end"))
    title = "times as fast as eager as served (ratio of medians, logarithmic)"
    parts.append(element("text", title, x=left, y=height - 4))
    return element("svg", parts, viewBox=f"0 0 {width} {height}", width=width, role="img", aria_label=title)


def _dot(step: str, last: str | None) -> tuple[str, int]:
    if step == tables.title(GRAPH):
        return _GRAPH_COLOR, 6
    return (_ALL_COLOR, 6) if step == last else (_SOME_COLOR, 4)


def _legend(last: str | None) -> list[object]:
    parts: list[object] = []
    for x, (name, (color, radius)) in zip(
        (190, 320, 500),
        (
            (tables.title(GRAPH), (_GRAPH_COLOR, 6)),
            ("one or some variants", (_SOME_COLOR, 4)),
            ((last or "all variants")[:30], (_ALL_COLOR, 6)),
        ),
        strict=True,
    ):
        parts.append(element("circle", cx=x, cy=10, r=radius, fill=color))
        parts.append(element("text", name, x=x + 12, y=14))
    return parts


def _axis(ticks: Sequence[float], x: Callable[[float], float], ends: tuple[int, int]) -> list[object]:
    parts: list[object] = []
    for tick in ticks:
        color, dashes = (_EQUAL_COLOR, "3 3") if tick == 1 else ("#e4e7eb", None)
        parts += [
            element("line", x1=x(tick), x2=x(tick), y1=ends[0], y2=ends[1], stroke=color, stroke_dasharray=dashes),
            element("text", f"{tick:g}×", x=x(tick), y=ends[1] + 14, text_anchor="middle"),
        ]
    return parts


# --- boundary and modules --------------------------------------------------------------------------


def _boundary(ladder: Ladder) -> Markup | None:
    if not ladder.boundaries:
        return None
    held, why_not = tables.boundaries(ladder.boundaries), tables.obstacles(ladder.boundaries)
    return join(
        [
            element("h3", "What a graph could hold"),
            element("p", emphasised(words.boundaries(held, why_not))),
            _frame(held),
            foldout(f"What stands in the way ({len(why_not)})", _frame(why_not)) if len(why_not) else None,
        ]
    )


def _maps(ladder: Ladder) -> Markup | None:
    if not ladder.maps:
        return None
    mapped = [(one, tables.modules(one)) for one in ladder.maps[:_MOST_MAPS] if one.modules]
    said = words.roofline([found for _, found in mapped]) if mapped else ""
    return join(
        [
            element("h3", "Graphs by module"),
            element("p", emphasised(said)) if said else None,
            _frame(tables.graphs(ladder.maps)),
            [
                foldout(f"{tables.title(one.name)} at budget {one.budget}, by module", _frame(found))
                for one, found in mapped
            ],
        ]
    )


def _frame(frame: pd.DataFrame) -> Markup:
    """A table of pandas with the numbers of a notebook's; columns that no row fills are left out."""
    frame = frame.dropna(axis="columns", how="all")
    shown = frame.head(_MOST_ROWS)
    columns = [cells(shown.iloc[:, place]) for place in range(shown.shape[1])]
    rows = [[texts[row][:_LONGEST_CELL] for _, texts in columns] for row in range(len(shown))]
    text_columns = [place for place, (numbers, _) in enumerate(columns) if not numbers]
    cut = element("p", f"{len(frame) - _MOST_ROWS:,} more rows", class_="muted") if len(frame) > _MOST_ROWS else None
    return join([table([str(name) for name in frame], rows, text_columns=text_columns), cut])


# --- Markdown --------------------------------------------------------------------------------------


def ladder_markdown(ladder: Ladder, plain: Callable[[object], str]) -> list[str]:
    """Lines for a pull request: what was run, what was reached, a row per call; `plain` makes text harmless."""
    lines = [
        "; ".join(map(plain, _about(ladder))),
        "",
        *(f"> {plain(caveat)}" for caveat in tables.caveats(ladder)),
        "",
    ]
    if not ladder.cases:
        return lines
    every = tables.all_steps(ladder)
    said = [words.calls(every)] if ladder.replay == "cuda_graph" else []
    lines += [f"- {plain(sentence)}" for text in (*said, words.parity(every)) for sentence in _sentences(text)]
    shown = tables.overview(every).dropna(axis="columns", how="all").head(_MOST_ROWS)
    columns = [cells(shown.iloc[:, place]) for place in range(shown.shape[1])]
    lines += ["", f"| {' | '.join(plain(name) for name in shown)} |"]
    lines.append(f"| {' | '.join('---:' if numbers else '---' for numbers, _ in columns)} |")
    lines += [f"| {' | '.join(plain(texts[row]) for _, texts in columns)} |" for row in range(len(shown))]
    return [*lines, ""]


def _sentences(text: str) -> list[str]:
    """The sentences of a text, without marks; the parts of a number or an error are no sentences."""
    return re.split(r"(?<=\.) (?=On |In the )", unmarked(text))
