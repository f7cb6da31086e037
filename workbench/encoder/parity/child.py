"""A scenario in a child process, for what may end the process it runs in.

The child has the same encoder: a fork of the parent's where that is safe, on the CPU with one thread; else built anew
from the same options. It takes the parent's noise floor, runs one scenario and writes its part of the matrix as JSON to
a file. A child that dies is a result: a cell with status "error" and the signal.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from workbench.budgets import Configuration
from workbench.encoder.session import SessionOptions
from workbench.parity import Cell, Finding, ItemResult, Noise

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab

TIME_LIMIT_S = 300


class Task(msgspec.Struct, frozen=True):
    """What the child is to run. `options` are those of the session, see `SessionOptions.plain`."""

    scenario: str
    variants: tuple[str, ...]
    options: dict[str, Any]
    configuration: Configuration
    noise: Noise
    seed: int


class Part(msgspec.Struct, frozen=True):
    """What one scenario showed."""

    cells: list[Cell]
    items: list[ItemResult]
    findings: list[Finding]


def run(lab: "Lab", scenario: str) -> Part:
    """Run `scenario` in a child process on an encoder like that of `lab`."""
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        made = Path(folder, "part.json")
        code, stderr = (_forked if _can_fork(lab) else _started)(lab, scenario, made)
        if code is None:
            return _died(scenario, f"the child process did not end within {TIME_LIMIT_S} s")
        if code == 0 and made.is_file():
            return msgspec.json.decode(made.read_bytes(), type=Part)
        return _died(scenario, _last_words(code, stderr))


def _started(lab: "Lab", scenario: str, made: Path) -> tuple[int | None, str]:
    """Run a new interpreter; return its exit code, None after the time limit, and what it wrote to stderr."""
    assert lab.noise is not None
    session = lab.session
    task = Task(scenario, lab.variants, session.options.plain(), session.configuration, lab.noise, lab.seed)
    given = made.with_name("task.json")
    given.write_bytes(msgspec.json.encode(task))
    command = [sys.executable, "-m", __spec__.name, str(given), str(made)]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return finished.returncode, finished.stderr


def _can_fork(lab: "Lab") -> bool:
    """A fork has neither the CUDA context nor the threads of its parent."""
    import torch

    return sys.platform == "linux" and lab.session.device.type == "cpu" and torch.get_num_threads() == 1


def _forked(lab: "Lab", scenario: str, made: Path) -> tuple[int | None, str]:
    """The same as `_started`, in a copy of this process, which saves importing vLLM and building the encoder."""
    from workbench.encoder.parity.lab import Lab

    words = made.with_name("stderr")
    pid = os.fork()
    if pid == 0:  # nothing of the parent's may run here: neither its handlers at exit nor what its caller does next
        code = 1
        try:
            with words.open("wb") as file:
                os.dup2(file.fileno(), 2)
            copy = Lab(lab.session, lab.seed, lab.variants, lab.plain)
            copy.noise, copy.baked = lab.noise, lab.baked
            made.write_bytes(msgspec.json.encode(observe(copy, scenario)))
            code = 0
        except BaseException:  # noqa: BLE001  the parent reads it
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    limit = time.monotonic() + TIME_LIMIT_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, ""
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1]), words.read_text("utf-8", "replace") if words.exists() else ""


def _last_words(code: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if code < 0:
        return f"the child process was ended by {signal.Signals(-code).name}{last}"
    return f"the child process ended with exit code {code}{last}"


def _died(scenario: str, reason: str) -> Part:
    finding = Finding(suspect="fallback", severity="mismatch", scenario=scenario, budget=None, message=reason)
    return Part([Cell(scenario=scenario, budget=None, status="error", reason=reason)], [], [finding])


def observe(lab: "Lab", scenario: str) -> Part:
    """Run one scenario, in the process whose end is the child's."""
    from workbench.encoder.parity.matrix import Matrix, run_cell
    from workbench.encoder.parity.scenarios import SCENARIOS

    matrix = Matrix()
    run_cell(lab, SCENARIOS[scenario], None, matrix)
    return Part(matrix.cells, matrix.items, matrix.findings)


def main(given: Path, made: Path) -> None:
    """Run the task in `given` and write the part to `made`."""
    from workbench.encoder.parity.lab import Lab, open_with_variants

    task = msgspec.json.decode(given.read_bytes(), type=Task)
    options = SessionOptions.from_plain(task.options)
    with open_with_variants(options, task.configuration, task.variants) as (session, _):
        lab = Lab(session, task.seed, task.variants)
        lab.noise = task.noise
        lab.capture()
        made.write_bytes(msgspec.json.encode(observe(lab, task.scenario)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
