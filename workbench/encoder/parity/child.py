"""A scenario in a child process, for what may end the process it runs in.

The child builds the same encoder from the same options, takes the parent's noise floor, runs one scenario and writes
its part of the matrix as JSON to a file. A child that dies is a result: a cell with status "error" and the signal.
"""

import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
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
    """What the child is to run. `options` and `configuration` are the fields of the two classes."""

    scenario: str
    options: dict[str, Any]
    configuration: dict[str, Any]
    noise: Noise
    seed: int


class Part(msgspec.Struct, frozen=True):
    """What one scenario showed."""

    cells: list[Cell]
    items: list[ItemResult]
    findings: list[Finding]


def run(lab: "Lab", scenario: str) -> Part:
    """Run `scenario` in a child process on an encoder like that of `lab`."""
    assert lab.noise is not None
    options = asdict(lab.session.options)
    options["checkpoint"] = str(options["checkpoint"]) if options["checkpoint"] else None
    task = Task(scenario, options, asdict(lab.session.configuration), lab.noise, lab.seed)
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        given, made = Path(folder, "task.json"), Path(folder, "part.json")
        given.write_bytes(msgspec.json.encode(task))
        command = [sys.executable, "-m", __spec__.name, str(given), str(made)]
        try:
            finished = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return _died(scenario, f"the child process did not end within {TIME_LIMIT_S} s")
        if finished.returncode == 0 and made.is_file():
            return msgspec.json.decode(made.read_bytes(), type=Part)
        return _died(scenario, _last_words(finished.returncode, finished.stderr))


def _last_words(code: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if code < 0:
        return f"the child process was ended by {signal.Signals(-code).name}{last}"
    return f"the child process ended with exit code {code}{last}"


def _died(scenario: str, reason: str) -> Part:
    finding = Finding(suspect="fallback", severity="mismatch", scenario=scenario, budget=None, message=reason)
    return Part([Cell(scenario=scenario, budget=None, status="error", reason=reason)], [], [finding])


def main(given: Path, made: Path) -> None:
    """Run the task in `given` and write the part to `made`."""
    from workbench.encoder.parity.lab import Lab
    from workbench.encoder.parity.matrix import Matrix, run_cell
    from workbench.encoder.parity.scenarios import SCENARIOS
    from workbench.encoder.session import open_session

    task = msgspec.json.decode(given.read_bytes(), type=Task)
    checkpoint = task.options["checkpoint"]
    options = SessionOptions(**task.options | {"checkpoint": Path(checkpoint) if checkpoint else None})
    configuration = Configuration(**task.configuration | {"budgets": tuple(task.configuration["budgets"])})
    matrix = Matrix()
    with open_session(options, configuration) as session:
        lab = Lab(session, task.seed)
        lab.noise = task.noise
        lab.capture()
        run_cell(lab, SCENARIOS[task.scenario], None, matrix)
    made.write_bytes(msgspec.json.encode(Part(matrix.cells, matrix.items, matrix.findings)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
