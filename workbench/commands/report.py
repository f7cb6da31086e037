"""`workbench report` and `workbench lab`: the notebooks as one page, or open in JupyterLab."""

from pathlib import Path
from typing import Annotated

import typer

NOTEBOOKS = Path("notebooks")


def register(app: typer.Typer) -> None:
    """Add the verbs `report` and `lab`."""
    app.command("report")(report)
    app.command("lab")(lab)


def report(
    notebooks: Annotated[
        list[Path] | None,
        typer.Option("--notebooks", help="A notebook or a folder of them; may be repeated.", show_default="notebooks"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for index.html and summary.json.")] = Path("report"),
    screenshot: Annotated[
        Path | None, typer.Option("--screenshot", help="Also write a PNG of the page's top (needs Chromium).")
    ] = None,
    save: Annotated[bool, typer.Option("--save", help="Save the outputs in the notebooks themselves, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json.")] = False,
) -> None:
    """Run the notebooks and write one HTML page that works offline; exit 1 when a cell failed."""
    import sys

    from workbench.progress import progress_bar
    from workbench.views.report import HTML_FILE, SUMMARY_FILE, find_notebooks, make_report

    found = find_notebooks(notebooks or [NOTEBOOKS])
    with progress_bar() as progress:
        summary = make_report(found, out, progress, save=save)
    page = out / HTML_FILE
    if screenshot:
        from workbench.views.browser import take_screenshot

        take_screenshot(page, screenshot)
    if as_json:
        print((out / SUMMARY_FILE).read_text("utf-8"), end="")
    else:
        print(f"{page} ({page.stat().st_size / 1e6:.1f} MB), {out / SUMMARY_FILE}")
    for notebook in summary.notebooks:
        if notebook.failure:
            failure = notebook.failure
            print(
                f"{notebook.file}: cell {failure.cell} failed with {failure.error}: {failure.message[:300]}",
                file=sys.stderr,
            )
    raise typer.Exit(0 if summary.passed else 1)


def lab(
    notebook: Annotated[Path, typer.Argument(help="A notebook or a folder.")] = NOTEBOOKS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the command that would be run.")] = False,
) -> None:
    """Open the notebooks in JupyterLab; this process becomes the server."""
    import importlib.util
    import json
    import os
    import sys

    from workbench.errors import WorkbenchError

    if not notebook.exists():
        raise WorkbenchError(f"there is no {notebook}; run this in the project's folder, or name a notebook")
    if importlib.util.find_spec("jupyterlab") is None:
        raise WorkbenchError("JupyterLab is not installed; run `make setup`, or install this package's extra `lab`")
    command = [sys.executable, "-m", "jupyterlab", str(notebook)]
    if as_json:
        print(json.dumps(command))
        return
    os.execv(sys.executable, command)  # noqa: S606
