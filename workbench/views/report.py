"""The report: every notebook run here and now, as one HTML file that needs no network, and a summary for machines.

A notebook says where its numbers come from with `note_source`; the report repeats that at its top:

    from workbench.views.report import note_source
    note_source("recorded", "H200, vLLM 0.33.0, recorded 2026-01-01", {"graph, mean (ms)": 4.98})
    note_source("live", "this machine's CPU, depth 2", {"worst relative RMS": 0.0})

and answers a question that the report asks first with `note_answer`, which the top repeats with a link:

    note_answer("speed", "The graph takes 4.97 ms instead of 25.19.")

Notebooks run side by side, each in a process of its own, with the cores shared among them. They run as copies: the
files themselves change only when asked to. Formulas in Markdown stay as typed: the page loads no MathJax.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import msgspec

import workbench
from workbench.environment import Capability, Mode, capability, environment
from workbench.errors import WorkbenchError
from workbench.files import write_bytes, write_json
from workbench.progress import Progress, silent
from workbench.run import Environment, Record

SCHEMA_VERSION = 1
SOURCE_MIME = "application/vnd.workbench.source+json"
ANSWER_MIME = "application/vnd.workbench.answer+json"
HTML_FILE, SUMMARY_FILE = "index.html", "summary.json"
CELL_SECONDS = 600

Kind = Literal["live", "static_replay", "recorded", "published"]
KIND_TITLES: dict[Kind, str] = {
    "live": "live, this machine's GPU",
    "static_replay": "live, static replay on this CPU",
    "recorded": "recorded",
    "published": "published by others",
}


class Source(Record, frozen=True):
    """Where some numbers of a notebook come from."""

    kind: Kind
    text: str
    numbers: dict[str, float] = msgspec.field(default_factory=dict)


Question = Literal["speed", "budgets", "safety"]
QUESTIONS: dict[Question, str] = {
    "speed": "Where does the time go, and what do graphs win?",
    "budgets": "Which budgets should I set?",
    "safety": "Is it safe?",
}


class Answer(Record, frozen=True):
    """A notebook's answer to one of `QUESTIONS`; None where its cells would have said it and did not."""

    question: Question
    sentence: str | None


class CellFailure(Record, frozen=True):
    """The cell that ended a notebook. `cell` counts all cells from 1, as JupyterLab lists them."""

    cell: int
    error: str
    message: str


class NotebookSummary(Record, frozen=True):
    """One notebook of the report."""

    file: str
    title: str
    seconds: float
    code_cells: int
    failure: CellFailure | None
    sources: list[Source]
    answers: list[Answer] = []


class Summary(Record, frozen=True):
    """`summary.json`."""

    schema_version: int
    workbench: str
    created: str  # ISO 8601, UTC
    passed: bool
    mode: Mode
    reason: str
    environment: Environment
    notebooks: list[NotebookSummary]


@dataclass(frozen=True)
class Executed:
    """A notebook's copy after its run: an nbformat node, and what `Summary` says of it."""

    notebook: Any
    summary: NotebookSummary


def note_source(kind: Kind, text: str, numbers: Mapping[str, float] | None = None) -> None:
    """Say in a notebook, and at the top of the report, where numbers come from.

    Args:
        kind: `live` (measured now on this machine's GPU), `static_replay` (run now on the CPU, no launch timing),
            `recorded` (a run folder measured before) or `published` (somebody else's figures).
        text: machine, software and date, in a few words.
        numbers: the notebook's headline numbers by name; the name carries the unit.

    Raises:
        ValueError: an unknown kind, or a number that is NaN or infinite.
    """
    import math

    from workbench.views.theme import publish

    if kind not in KIND_TITLES:
        raise ValueError(f"{kind!r} is not one of {', '.join(KIND_TITLES)}")
    source = Source(kind=kind, text=text, numbers={name: float(value) for name, value in (numbers or {}).items()})
    if bad := [name for name, value in source.numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"not a finite number: {', '.join(bad)}")
    lines = [f"{KIND_TITLES[kind]}: {text}", *(f"{name}: {value:.4g}" for name, value in source.numbers.items())]
    publish({SOURCE_MIME: msgspec.to_builtins(source), "text/plain": "\n".join(lines)})


def note_answer(question: Question, sentence: str) -> None:
    """Answer one of the report's questions in a notebook; the report's top repeats it with a link to this section.

    Args:
        sentence: computed from the notebook's data; plain text.

    Raises:
        ValueError: an unknown question.
    """
    from workbench.views.theme import publish

    if question not in QUESTIONS:
        raise ValueError(f"{question!r} is not one of {', '.join(QUESTIONS)}")
    answer = Answer(question=question, sentence=sentence)
    publish({ANSWER_MIME: msgspec.to_builtins(answer), "text/plain": f"{QUESTIONS[question]} {sentence}"})


def find_notebooks(paths: Sequence[Path]) -> list[Path]:
    """Return the notebooks that `paths` name: files, or folders whose *.ipynb are taken in name order.

    Raises:
        WorkbenchError: a path that does not exist or holds no notebook.
    """
    found: list[Path] = []
    for path in paths:
        here = sorted(path.glob("*.ipynb")) if path.is_dir() else [path] if path.is_file() else []
        if not here:
            raise WorkbenchError(
                f"there is no notebook at {path}; run this in the project's folder, or name notebooks with --notebooks"
            )
        found += here
    return list(dict.fromkeys(found))


def make_report(notebooks: Sequence[Path], out: Path, progress: Progress = silent, *, save: bool = False) -> Summary:
    """Run the notebooks and write `out`/index.html and `out`/summary.json.

    A notebook whose cell fails ends there; what ran is in the report, and the other notebooks run all the same.

    Args:
        save: also write the outputs into the notebooks in which no cell failed, as they are committed.

    Raises:
        WorkbenchError: a file that is not a notebook, or a folder that cannot be written; nothing is written then.
    """
    import nbformat

    from workbench.views.page import render

    loaded = [read_notebook(path) for path in notebooks]
    machine = environment()
    can: Capability = capability(machine)
    shares, telling = [0.0] * len(notebooks), Lock()

    def run(position: int) -> Executed:
        path = notebooks[position]

        def step(cell: int, cells: int) -> None:
            with telling:
                shares[position] = cell / (cells + 1)
                progress(f"{path.name}, cell {cell} of {cells}", sum(shares) / len(shares))

        executed = execute(path, loaded[position], step, threads)
        shares[position] = 1.0
        return executed

    # Each notebook has a process of its own, so they run side by side and share the cores.
    workers = max(1, min(len(notebooks), machine.cpu_count))
    threads = max(1, machine.cpu_count // workers)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        # The last is the longest; begun first, it ends with the others.
        done = list(pool.map(run, reversed(range(len(notebooks)))))[::-1]
    progress("writing the page", 1.0)
    summary = Summary(
        schema_version=SCHEMA_VERSION,
        workbench=workbench.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        passed=all(one.summary.failure is None for one in done),
        mode=can.mode,
        reason=can.reason,
        environment=machine,
        notebooks=[one.summary for one in done],
    )
    write_bytes(out / HTML_FILE, render(summary, [one.notebook for one in done]).encode())
    write_json(out / SUMMARY_FILE, summary)
    if save:
        for path, one in zip(notebooks, done, strict=True):
            if one.summary.failure is None:
                write_bytes(path, f"{nbformat.writes(one.notebook)}\n".encode())
    return summary


def read_notebook(path: Path) -> Any:
    """Return the notebook at `path` as an nbformat 4 node.

    Raises:
        WorkbenchError: it cannot be read, or is no notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # nbformat raises many kinds for malformed files
        raise WorkbenchError(
            f"{path} is not a Jupyter notebook ({type(error).__name__}); give a file that JupyterLab opens"
        ) from error


def execute(
    path: Path,
    notebook: Any,
    step: Callable[[int, int], None] = lambda _cell, _cells: None,
    threads: int | None = None,
) -> Executed:
    """Run a notebook's cells with this interpreter, in the folder where the notebook lies.

    Args:
        notebook: the node that `read_notebook` gave; its outputs are replaced.
        step: called with a cell's number (from 1) and the number of cells before each cell.
        threads: of the notebook's linear algebra, where OMP_NUM_THREADS is not set; None: its own choice.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    current = 0

    def on_start(cell: Any, cell_index: int) -> None:
        nonlocal current
        current = cell_index + 1
        step(current, len(notebook.cells))

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    failure = None
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as sockets:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            # No kernel folders: the kernel is then this interpreter, whatever kernels the person has installed.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            transport="ipc",  # no port that others on this machine could reach
            ip=f"{sockets}/kernel",
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": str(path.resolve().parent)}},
            on_cell_start=on_start,
            # Both would be different in every saved copy.
            record_timing=False,
            store_widget_state=False,
        )
        try:
            client.execute(cleanup_kc=True, env=_environment(threads))  # also ends the kernel's process
        except CellExecutionError as error:
            failure = CellFailure(cell=current, error=error.ename, message=error.evalue)
        except DeadKernelError:
            failure = CellFailure(cell=current, error="DeadKernelError", message="the notebook's process died")
        except CellTimeoutError:
            message = f"the cell ran for more than {CELL_SECONDS} s"
            failure = CellFailure(cell=current, error="CellTimeoutError", message=message)
    summary = NotebookSummary(
        file=path.name,
        title=_title(notebook) or path.stem,
        seconds=round(time.perf_counter() - start, 2),
        code_cells=len(code),
        failure=failure,
        sources=_sources(notebook),
        answers=_answers(notebook),
    )
    return Executed(notebook, summary)


def _environment(threads: int | None) -> dict[str, str]:
    """This process's environment, with the threads that a notebook may take for itself."""
    return ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | dict(os.environ)


def _title(notebook: Any) -> str | None:
    """Return the first Markdown heading of level 1."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return str(line[2:].strip())
    return None


def _sources(notebook: Any) -> list[Source]:
    """Return what `note_source` said in the notebook, in order."""
    return [msgspec.convert(data, Source) for data in _published(notebook, SOURCE_MIME)]


def _answers(notebook: Any) -> list[Answer]:
    """Return what `note_answer` said in the notebook, and what its cells would have said."""
    said = [msgspec.convert(data, Answer) for data in _published(notebook, ANSWER_MIME)]
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    meant = [question for question in QUESTIONS if re.search(rf"""note_answer\(\s*["']{question}["']""", code)]
    return said + [Answer(question, None) for question in meant if question not in {one.question for one in said}]


def _published(notebook: Any, mime: str) -> list[Any]:
    """Return the notebook's outputs of one MIME type, in order."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    shown = (output.get("data", {}) for output in outputs)
    return [data[mime] for data in shown if mime in data]
