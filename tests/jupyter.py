"""A JupyterLab of this checkout, with no settings of the person's, that serves one notebook."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

from tests.chromium import SECONDS, Page

ROOT = Path(__file__).resolve().parents[1]
IDLE = "window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RUN_ALL = "window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)"

# A widget's figure; other figures are drawn from outputs.
FIGURE = "document.querySelector('.jupyter-widgets .js-plotly-plot')"


def focus(page: Page, label: str, part: str) -> None:
    """Put the focus on a part of a widget, found by the widget's label."""
    page.evaluate(
        f"""(() => {{
            const labels = [...document.querySelectorAll('.widget-label')];
            const box = labels.find(one => one.textContent === {json.dumps(label)}).parentElement;
            box.querySelector({json.dumps(part)}).focus();
        }})()"""
    )


@contextmanager
def jupyterlab(folder: Path, name: str, notebook: Any) -> Iterator[str]:
    """Yield the address of `notebook`, an nbformat node, saved without outputs as `folder`/notebooks/`name`."""
    served = folder / "notebooks"
    served.mkdir()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, served / name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(8)
    homes = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "HOME")
    environment = os.environ | {name: str(folder / name.lower()) for name in homes}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
               "--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={token}",
               "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
               f"--ServerApp.root_dir={served}"]  # fmt: skip
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={token}")
        yield f"http://127.0.0.1:{port}/lab/tree/{name}?token={token}"
    finally:
        server.terminate()
        server.wait(timeout=SECONDS)


def _wait_for(address: str) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(address).close()
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise AssertionError("JupyterLab did not start")
