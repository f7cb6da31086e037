"""Headless Chromium, where one is installed: pictures of the report for README and for a reviewer's eye."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.files import replacing

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120


def find_chromium() -> str | None:
    """Return the Chromium or Chrome on PATH, if any."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def chromium_command(profile: Path, *arguments: str) -> list[str]:
    """Return a command line for one headless page that talks to nobody.

    Args:
        profile: an empty folder for the browser's profile.

    Raises:
        WorkbenchError: no Chromium on PATH.
    """
    chromium = find_chromium()
    if chromium is None:
        raise WorkbenchError(f"no Chromium on PATH (looked for {', '.join(NAMES)}); install Chromium or Chrome")
    return [
        chromium,
        "--headless",
        "--no-sandbox",  # the page is our own file; root, as in containers, has no sandbox
        "--disable-gpu",
        "--disable-quic",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own calls home end here
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=30000",
        *arguments,
    ]


def take_screenshot(page: Path, png: Path, width: int = 1280, height: int = 1600) -> None:
    """Write a PNG of the top of an HTML file, after its figures are drawn.

    Args:
        width, height: size of the picture in pixels.

    Raises:
        WorkbenchError: no Chromium, it fails, or `png` cannot be written.
    """
    with tempfile.TemporaryDirectory() as profile, replacing(png) as temporary:
        picture = Path(profile) / "page.png"
        command = chromium_command(
            Path(profile), f"--screenshot={picture}", f"--window-size={width},{height}", page.resolve().as_uri()
        )
        try:
            subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        except subprocess.SubprocessError as error:
            raise WorkbenchError(f"Chromium made no picture of {page}: {type(error).__name__}") from error
        shutil.copyfile(picture, temporary)
