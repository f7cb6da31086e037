"""HTML and SVG as nested calls; text is escaped unless it was made here.

    element("td", name, class_="number")
    emphasised("**2.4 times** as fast as *graph*")

There is no way to write raw HTML from data, so nothing a stranger named can become markup.
"""

import html
import re
from collections.abc import Container, Iterable, Sequence

from workbench.archive import printable

_VOID = {"meta", "br", "col", "line", "rect", "circle"}
_EMPHASIS = re.compile(r"\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|`([^`]+)`")
_LONGEST_LINE, _MOST_LINES = 2_000, 100
Child = object


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """One element; children that are no `Markup` are escaped, None is left out, lists are spread.

    `class_` is the attribute `class`; an underscore in other names becomes a dash.
    """
    told = "".join(
        f' {"class" if name == "class_" else name.replace("_", "-")}="{_escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{told}>" if tag in {"meta", "br", "col"} else f"<{tag}{told}/>")
    return Markup(f"<{tag}{told}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Several children one after the other."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, list | tuple):
            parts.append(join(child))
        elif child is not None:
            parts.append(_escaped(child))
    return Markup("".join(parts))


def table(head: Sequence[str], rows: Iterable[Sequence[Child]], *, text_columns: int | Container[int] = 1) -> Markup:
    """A table whose first `text_columns` columns, or those at such places, are text, the others numbers."""
    text = range(text_columns) if isinstance(text_columns, int) else text_columns
    body = [
        element(
            "tr",
            [element("td", cell, class_=None if place in text else "n") for place, cell in enumerate(row)],
        )
        for row in rows
    ]
    titles = [element("th", title, class_=None if place in text else "n") for place, title in enumerate(head)]
    return element(
        "div", element("table", element("thead", element("tr", titles)), element("tbody", body)), class_="wide"
    )


def emphasised(text: str) -> Markup:
    """A sentence with the marks that notebooks' sentences have: strong, emphasised, code."""
    parts: list[Child] = []
    position = 0
    for match in _EMPHASIS.finditer(text):
        tag = ("strong", "em", "code")[(match.lastindex or 1) - 1]
        parts += [text[position : match.start()], element(tag, match[match.lastindex or 1])]
        position = match.end()
    return join([*parts, text[position:]])


def unmarked(text: str) -> str:
    """The same sentence without its marks."""
    return _EMPHASIS.sub(lambda match: match[match.lastindex or 1], text)


def bullets(title: str, items: Sequence[str], class_: str | None = None) -> Markup | None:
    """A titled list, cut where it is very long; None for no items."""
    if not items:
        return None
    shown = [element("li", item[:_LONGEST_LINE]) for item in items[:_MOST_LINES]]
    if len(items) > _MOST_LINES:
        shown.append(element("li", f"and {len(items) - _MOST_LINES} more"))
    return element("div", element("h3", title), element("ul", shown), class_=class_)


def foldout(title: str, *children: Child) -> Markup:
    """What is read on demand, behind its title."""
    return element("details", element("summary", title), list(children))


def page(title: str, body: Sequence[Child], style: str) -> str:
    """A whole document that can neither run a script nor load anything."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        Markup(f"<style>{style}</style>"),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', list(body)), lang='en')}\n"


def _escaped(value: object) -> str:
    return html.escape(printable(str(value)), quote=True)
