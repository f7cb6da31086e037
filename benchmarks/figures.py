"""A timeline of a million spans as a figure, and the first figure of a trace of 1 GB: seconds, bytes of the page.

Measured: wall and CPU seconds from the table of spans to the drawn level of detail, and from there to HTML with
plotly.js inside, as the report has it. And from the trace file on disk (in the page cache) to such a page of its first
call.

Not measured: imports, the one-time compilation of the scanner, the browser.

    python -m benchmarks.figures --out figures.json
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.trace_reader import scale, source_text, write_small
from tests.test_detail import spans
from workbench import explain
from workbench.detail import level_of_detail
from workbench.files import write_json
from workbench.gaps import analyze
from workbench.trace import read_trace
from workbench.views.boundary import timelines

SPANS = 1_000_000
EVENTS = 4_000_000  # a file of 1 GB
FIGURE_LIMIT_S = 15.0
PIXELS = 1500


def measure() -> dict[str, Any]:
    """Return seconds and sizes."""
    table = spans(SPANS)
    level_of_detail(table.head(1000), PIXELS)
    wall, cpu = time.perf_counter(), time.process_time()
    drawn = level_of_detail(table, PIXELS)
    reduced = time.perf_counter() - wall
    page = timelines({"eager as served": table}).to_html(include_plotlyjs=True)
    return {
        "spans": len(table),
        "drawn": len(drawn),
        "detail_s": reduced,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "html_bytes": len(page.encode()),
    }


def first_figure(path: Path) -> str:
    """From a trace's file to a page with the timeline of its first call."""
    trace = read_trace(path)
    one = explain.Traced("eager_fallback", (), trace, analyze(trace, "call#*"))
    page: str = timelines({"eager fallback": explain.timeline(one)}).to_html(include_plotlyjs=True)
    return page


def measure_first(events: int) -> dict[str, Any]:
    """Return seconds of `first_figure` on a recorded trace repeated to `events`."""
    text, source = source_text(None)
    with tempfile.TemporaryDirectory() as folder:
        first_figure(write_small(text, Path(folder)))
        scaled = scale(text, events, Path(folder) / "scaled.json")
        wall, cpu = time.perf_counter(), time.process_time()
        first_figure(scaled.path)
        return {
            "first_source": source,
            "first_events": scaled.events,
            "first_bytes": scaled.bytes,
            "first_wall_s": time.perf_counter() - wall,
            "first_cpu_s": time.process_time() - cpu,
            "first_limit_s": FIGURE_LIMIT_S,
        }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--events", type=int, default=EVENTS, help="of the trace for the first figure")
    options = parser.parse_args(arguments)
    result = measure() | measure_first(options.events)
    write_json(options.out, result)
    print(result)


if __name__ == "__main__":
    main()
