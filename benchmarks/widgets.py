"""The instrument of notebook 02 on a million items: how long a person waits between a slider's move and the new figure.

Measured: in headless Chromium on JupyterLab, from the key press on the slider "graphs" to the frame after plotly has
drawn the figure; the kernel plans and prices every item in between. Beside it the kernel's part alone, in this process.
The workload is drawn as vLLM's random-mm draws one: 500 sizes, one to three images a request.

Not measured: the time to load the file, and a screen.

    python -m benchmarks.widgets --out widgets.json [--items 1000000]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
import numpy as np

from tests.chromium import Page, opened
from tests.jupyter import FIGURE, IDLE, RUN_ALL, focus, jupyterlab
from workbench.files import write_json
from workbench.random_mm import Bucket, RandomMM, sample
from workbench.views.browser import find_chromium

ITEMS = 1_000_000
SIZES = 500
MOVES = 20
LIMIT_MS = 250.0
LEFT, RIGHT = ("ArrowLeft", 37), ("ArrowRight", 39)
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
CELL = """
from workbench.views.widgets import BudgetInstrument
BudgetInstrument({file!r}).box
"""
# Moves that begin with a key press, in ms to the second frame after plotly has drawn other graphs than before.
WATCH = f"""(() => {{
    const figure = {FIGURE};
    let pressed = null, before = null;
    window.moves = [];
    document.addEventListener('keydown', () => {{
        pressed = performance.now();
        before = String(figure.data[0].x);
    }}, true);
    figure.on('plotly_afterplot', () => {{
        if (pressed === null || String(figure.data[0].x) === before) return;
        const since = pressed;
        pressed = null;
        const done = () => window.moves.push(performance.now() - since);
        requestAnimationFrame(() => requestAnimationFrame(done));
    }});
    return true;
}})()"""


def write_workload(file: Path, items: int) -> int:
    """Write `items` sizes as Parquet; return how many were drawn, about as many."""
    import pandas as pd

    sides = np.random.default_rng(0).integers(28, 1500, (SIZES, 2))
    buckets: dict[Bucket, float] = {(int(height), int(width), 1): 1 / SIZES for height, width in sides}
    setting = RandomMM(buckets, requests=items // 2, base_items=2, range_ratio=0.5, limit={"image": 3})
    sizes, offsets = sample(setting)
    call = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pd.DataFrame({"height": sizes[:, 0], "width": sizes[:, 1], "call": call}).to_parquet(file)
    return len(sizes)


def in_kernel(file: Path) -> list[float]:
    """Return ms per move of the slider without a browser."""
    from workbench.views.widgets import BudgetInstrument

    instrument = BudgetInstrument(str(file))
    taken = []
    for move in range(MOVES + 1):
        begin = time.perf_counter()
        instrument.graphs.value += -1 if move % 2 == 0 else 1
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken[1:]


def in_browser(page: Page) -> list[float]:
    """Return ms per move of the slider, as the page sees it."""
    page.wait(IDLE)
    page.evaluate(RUN_ALL)
    page.wait(f"{FIGURE}?.data?.[0]?.x?.length > 0")
    page.wait(IDLE)
    page.evaluate(WATCH)
    focus(page, "graphs", "[role=slider]")
    for move in range(MOVES + 1):
        page.press(*(LEFT if move % 2 == 0 else RIGHT))
        page.wait(f"window.moves.length > {move}")
        time.sleep(0.2)  # a person looks
    moves: list[float] = page.evaluate("window.moves")
    return moves[1:]


def measure(items: int) -> dict[str, Any]:
    """Return ms per move, in the browser and in the kernel alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "sizes.parquet"
        drawn = write_workload(file, items)
        kernel = in_kernel(file)
        if find_chromium() is None:
            missing = {"what": "browser", "missing": "no Chromium on PATH"}
            return {"items": drawn, "limit_ms": LIMIT_MS, "rows": [missing, _row("kernel alone", kernel)]}
        cells = [nbformat.v4.new_code_cell(CELL.format(file=str(file)))]
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
        with jupyterlab(folder, "widgets.ipynb", notebook) as address, opened(address, folder / "browser") as page:
            browser = in_browser(page)
    return {"items": drawn, "limit_ms": LIMIT_MS, "rows": [_row("browser", browser), _row("kernel alone", kernel)]}


def _row(what: str, taken: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "moves": len(taken),
        "median_ms": statistics.median(taken),
        "least_ms": min(taken),
        "most_ms": max(taken),
        "all_ms": taken,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=ITEMS)
    options = parser.parse_args(arguments)
    result = measure(options.items)
    write_json(options.out, result)
    for row in result["rows"]:
        print(
            row.get("missing")
            or f"{row['what']:<14}{row['least_ms']:.0f} {row['median_ms']:.0f} {row['most_ms']:.0f} ms"
        )


if __name__ == "__main__":
    main()
