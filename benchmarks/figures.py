"""A timeline of a million spans as a figure: seconds of a process, and bytes of the page.

Measured: wall and CPU seconds from the table of spans to the drawn level of detail, and from there to HTML with
plotly.js inside, as the report has it.

Not measured: the browser.

    python -m benchmarks.figures --out figures.json
"""

import argparse
import time
from pathlib import Path
from typing import Any

from tests.test_detail import spans
from workbench.detail import level_of_detail
from workbench.files import write_json
from workbench.views.boundary import timelines

SPANS = 1_000_000
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


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    result = measure()
    write_json(parser.parse_args(arguments).out, result)
    print(result)


if __name__ == "__main__":
    main()
