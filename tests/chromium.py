"""A page in headless Chromium, driven by its DevTools protocol over one web socket: look, press a key, wait."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.views.browser import find_chromium

SECONDS = 90.0  # that a page may take on a busy machine


class Page:
    """One tab."""

    def __init__(self, address: str) -> None:
        import websocket  # comes with JupyterLab's server

        self._socket: Any = websocket.create_connection(address, timeout=SECONDS, suppress_origin=True)
        self._sent = 0
        self.call("Runtime.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send one command and return its result; events are skipped."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._sent:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, its promise awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the expression's value once it is true."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            value = self.evaluate(script)
            if value:
                return value
            time.sleep(0.2)
        raise AssertionError(f"never true: {script}")

    def press(self, key: str, code: int) -> None:
        """Press one key of the keyboard, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def write(self, text: str) -> None:
        """Type text where the focus is."""
        self.call("Input.insertText", text=text)


@contextmanager
def opened(address: str, folder: Path) -> Iterator[Page]:
    """Open a page of this machine; anything else is not resolved. `folder` is empty, for the browser's profile."""
    chromium = find_chromium()
    assert chromium is not None
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder}",
        "--remote-debugging-port=0",
        "--window-size=1600,1400",
        address,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Page(_tab(folder / "DevToolsActivePort", address))
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)


def _tab(file: Path, address: str) -> str:
    """The web socket of the tab that shows `address`."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if file.is_file() and (lines := file.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = json.load(answer)
            for tab in tabs:
                if tab["type"] == "page" and tab["url"].startswith(address[:30]):
                    return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.2)
    raise AssertionError("Chromium did not open the page")
