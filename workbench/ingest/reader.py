"""Tell a foreign file by its content, and read it."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from workbench.errors import WorkbenchError
from workbench.ingest import bench, evaluation
from workbench.ingest.external import SCHEMA_VERSION, External, KernelCount, Source
from workbench.ingest.nsys import is_sqlite, nsys_trace
from workbench.trace import Trace, read_trace

LARGEST_DOCUMENT = 256 << 20
LONGEST_SEQUENCE = 20_000
_HEAD = 1 << 16
_LONGEST_NUMBER = 300  # digits; a float ends at 309
_KNOWN = (
    "the JSON of `vllm bench mm-processor`, `serve` or `sweep`, lmms-eval results, an Nsight Systems SQLite export "
    "or a Kineto trace"
)


def read_external(path: Path) -> External:
    """Read a result that another tool wrote.

    Raises:
        WorkbenchError: missing, unreadable, or of no known kind.
    """
    try:
        if is_sqlite(path):
            return of_trace(nsys_trace(path), path, "nsys")
        head = _head(path)
        if _looks_like_trace(head):
            return of_trace(read_trace(path), path, "kineto")
        return of_document(_document(path), path)
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}; give the path of a result") from error


def of_document(document: Any, path: Path) -> External:
    """Read a decoded JSON document.

    Raises:
        WorkbenchError: of no known kind.
    """
    readers: tuple[tuple[Callable[[object], bool], Callable[[Any, str], External]], ...] = (
        (bench.is_mm_processor, bench.mm_processor),
        (bench.is_serve, bench.serve),
        (bench.is_sweep, bench.sweep),
        (evaluation.is_evaluation, evaluation.evaluation),
    )
    for is_kind, reader in readers:
        if is_kind(document):
            return reader(document, path.stem)
    raise WorkbenchError(f"{path} is JSON, but no result that is known here; give {_KNOWN}")


def of_trace(trace: Trace, path: Path, source: Source) -> External:
    """Summarise a whole trace: operations by name and in order, launches, waits, busy and idle time.

    Raises:
        WorkbenchError: it has no GPU work.
    """
    from workbench.gaps import COUNTS, TIMES, analyze

    analysis = analyze(trace)
    kernels = [KernelCount(name=row.name, count=row.count, total_us=row.total_us) for row in analysis.kernels]
    numbers = {row.name: index for index, row in enumerate(kernels)}
    rows = trace.gpu_rows()
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    notes = list(trace.warnings)
    if rows.size > LONGEST_SEQUENCE:
        notes.append(f"{rows.size:,} GPU operations are too many to compare in order; they are compared by name")
        rows = rows[:0]
    return External(
        schema_version=SCHEMA_VERSION,
        source=source,
        name=path.name.split(".")[0] or path.name,
        kernels=kernels,
        sequence=[numbers[trace.names[index]] for index in trace.name[rows].tolist()],
        counts={key: int(getattr(analysis.total, key)) for key in COUNTS},
        times_us={key: float(getattr(analysis.total, f"{key}_us")) for key in TIMES},
        notes=notes,
    )


def _integer(text: str) -> int | None:
    """A whole number; None, like NaN, for one that no float holds."""
    return int(text) if len(text) <= _LONGEST_NUMBER else None


def _head(path: Path) -> bytes:
    with path.open("rb") as raw:
        head = raw.read(_HEAD)
    if head[:2] != b"\x1f\x8b":
        return head
    try:
        with gzip.open(path) as packed:
            return packed.read1(_HEAD)
    except (EOFError, gzip.BadGzipFile) as error:
        raise WorkbenchError(f"{path} is damaged gzip data ({error}); copy it again") from error


def _looks_like_trace(head: bytes) -> bool:
    """Kineto's object form names its events or schema early; the bare array starts with an event."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        return b'"ph"' in head
    return b'"traceEvents"' in head or b'"deviceProperties"' in head


def _document(path: Path) -> Any:
    """Decode JSON as Python wrote it: NaN and Infinity become None; appended documents become a list."""
    size = path.stat().st_size
    if size > LARGEST_DOCUMENT:
        raise WorkbenchError(
            f"{path} has {size:,} bytes, more than the {LARGEST_DOCUMENT:,} of a result; give {_KNOWN}"
        )
    if size == 0:
        raise WorkbenchError(f"{path} is empty; give {_KNOWN}")
    try:
        text = path.read_text("utf-8-sig")
        try:
            return json.loads(text, parse_constant=lambda _: None, parse_int=_integer)
        except json.JSONDecodeError as error:
            lines = [line for line in text.splitlines() if line.strip()]
            if error.msg != "Extra data" or len(lines) < 2:
                raise
            return [json.loads(line, parse_constant=lambda _: None, parse_int=_integer) for line in lines]
    except (ValueError, RecursionError) as error:
        _refuse(path, error)


def _refuse(path: Path, error: Exception) -> NoReturn:
    reason = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)[:120]
    raise WorkbenchError(f"{path} is not a result that can be read ({reason}); give {_KNOWN}") from error
