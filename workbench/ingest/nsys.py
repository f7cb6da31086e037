"""Nsight Systems SQLite exports as the columns of `workbench.trace.Trace`.

Make one with `nsys profile --cuda-graph-trace=node … ` and `nsys export --type sqlite`. NVTX ranges
become user annotations, so windows work as they do on Kineto traces.

The file is opened read-only and nothing in its schema is trusted: only plain tables are read, by
queries of this module alone, with limits on rows, text and work.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from workbench.errors import WorkbenchError
from workbench.trace import Category, Trace, TraceInfo

MOST_ROWS = 20_000_000
_MOST_WORK = 20_000  # times a million steps of SQLite's machine
_LONGEST_TEXT = 1 << 20
_BLOCK = 65_536
_EXPORT = "export it again with `nsys export --type sqlite`"
_PUSH_POP, _START_END = 59, 60  # NVTX event types that are ranges
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_PLACES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
_READ = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_PRAGMA}


def is_sqlite(path: Path) -> bool:
    """Whether the file begins like a SQLite database."""
    with path.open("rb") as handle:
        return handle.read(16) == b"SQLite format 3\0"


def nsys_trace(path: Path) -> Trace:
    """Read an Nsight Systems export.

    Raises:
        WorkbenchError: not such a database, without CUDA activity, damaged, or beyond the limits.
    """
    try:
        with _connection(path) as database:
            return _Reader(path, database).read()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # damage reaches even the texts of SQLite's errors
        raise WorkbenchError(f"{path} cannot be read as an Nsight Systems export ({error}); {_EXPORT}") from error
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}") from error


@contextmanager
def _connection(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, and gives up on endless work."""
    with path.open("rb"):  # a clear error when it cannot be opened
        pass
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    steps = 0

    def too_much() -> int:
        nonlocal steps
        steps += 1
        return int(steps > _MOST_WORK)

    try:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_TEXT)
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA cell_size_check = ON")
        database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READ else sqlite3.SQLITE_DENY)
        database.set_progress_handler(too_much, 1_000_000)
        database.text_factory = lambda data: data.decode("utf-8", "replace")
        yield database
    finally:
        database.close()


@dataclass
class _Columns:
    """Rows of the trace in the making, one list of arrays per column."""

    parts: dict[str, list[np.ndarray[Any, np.dtype[np.int64]]]] = field(default_factory=dict)
    rows: int = 0

    def add(self, count: int, **values: Any) -> None:
        for key in _FIELDS:
            value = values.get(key, -1)
            column = np.full(count, value, np.int64) if np.isscalar(value) else np.asarray(value, np.int64)
            self.parts.setdefault(key, []).append(column)
        self.rows += count

    def column(self, key: str, kind: Any = np.int64) -> Any:
        return np.concatenate(self.parts[key]).astype(kind)


_FIELDS = (
    *("start", "end", "category", "name", "device", "stream", "pid", "tid", "correlation", "graph"),
    *("graph_node", "bytes"),
)


class _Reader:
    """Reads one export table by table."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        self.columns = _Columns()
        self.names: dict[str, int] = {}
        self.warnings: list[str] = []
        rows = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        self.tables = {str(name) for name, sql in rows if re.match(r"(?i)\s*create\s+table\b", sql or "")}

    def read(self) -> Trace:
        if "StringIds" not in self.tables:
            raise WorkbenchError(f"{self.path} is a database but no Nsight Systems export; {_EXPORT}")
        self._kernels()
        self._memory()
        self._graphs()
        operations = self.columns.rows
        if operations == 0:
            raise WorkbenchError(
                f"{self.path} has no GPU work; profile with `--trace=cuda,nvtx --cuda-graph-trace=node`"
            )
        self._runtime()
        self._ranges()
        return self._trace()

    def _there(self, table: str) -> set[str]:
        """Columns of a table; they vary with the version of Nsight Systems."""
        if table not in self.tables:
            return set()
        return {str(row[1]) for row in self.database.execute(f"PRAGMA table_info({table})")}

    def _rows(self, table: str, wanted: dict[str, str], where: str = "") -> Iterator[list[tuple[Any, ...]]]:
        """Yield blocks of rows; a column the export lacks is the constant -1.

        `wanted` maps a column to the expression that is read where the column is there.
        """
        there = self._there(table)
        if not there:
            return
        if not {"start", "end"} <= there:
            raise WorkbenchError(f"{self.path} has a table {table} without start and end; {_EXPORT}")
        parts = [expression if column in there else "-1" for column, expression in wanted.items()]
        query = f"SELECT {', '.join(parts)} FROM {table} {where} LIMIT {MOST_ROWS + 1}"  # noqa: S608  fixed names
        cursor = self.database.execute(query)
        while block := cursor.fetchmany(_BLOCK):
            if self.columns.rows + len(block) > MOST_ROWS:
                raise WorkbenchError(f"{self.path} has more than {MOST_ROWS:,} events; profile a shorter stretch")
            yield block

    def _ints(self, block: list[tuple[Any, ...]], count: int) -> Any:
        try:
            table = [[-1 if value is None else int(value) for value in row[:count]] for row in block]
            return np.array(table, np.int64).T
        except (TypeError, ValueError, OverflowError) as error:
            raise WorkbenchError(f"{self.path} holds {error} where a number should stand; {_EXPORT}") from error

    def _number(self, name: object) -> int:
        return self.names.setdefault(str(name)[:65_536], len(self.names))

    def _text_of(self, column: str) -> str:
        return f"(SELECT value FROM StringIds WHERE id = {column})"  # noqa: S608  fixed names

    def _kernels(self) -> None:
        table = "CUPTI_ACTIVITY_KIND_KERNEL"
        name = next((name for name in ("demangledName", "shortName") if name in self._there(table)), "mangledName")
        wanted = {
            **{key: key for key in ("start", "end", "deviceId", "streamId", "correlationId", "graphNodeId")},
            **{"graphId": "graphId", "globalPid": "globalPid"},
            name: self._text_of(name),
        }
        for block in self._rows(table, wanted):
            start, end, device, stream, correlation, node, graph, place = self._ints(block, 8)
            self.columns.add(
                len(block), start=start, end=end, category=int(Category.KERNEL), device=device, stream=stream,
                correlation=correlation, graph_node=_node(node), graph=graph, pid=_pid(place),
                name=[self._number(row[8] if isinstance(row[8], str) else "kernel without a name") for row in block],
            )  # fmt: skip

    def _memory(self) -> None:
        wanted = {
            **{key: key for key in ("start", "end", "deviceId", "streamId", "correlationId", "graphNodeId")},
            **{key: key for key in ("bytes", "globalPid", "copyKind", "srcKind", "dstKind")},
        }
        for table, category in (("MEMCPY", Category.MEMCPY), ("MEMSET", Category.MEMSET)):
            for block in self._rows(f"CUPTI_ACTIVITY_KIND_{table}", wanted):
                ints = self._ints(block, 11)
                start, end, device, stream, correlation, node, size, place = ints[:8]
                names = [self._number(_copy_name(category, *row)) for row in ints[8:].T.tolist()]
                self.columns.add(
                    len(block), start=start, end=end, category=int(category), device=device, stream=stream,
                    correlation=correlation, graph_node=_node(node), bytes=size, pid=_pid(place), name=names,
                )  # fmt: skip

    def _graphs(self) -> None:
        """Graphs traced as a whole: one operation a replay, which hides the nodes and the idle between."""
        wanted = {
            **{key: key for key in ("start", "end", "deviceId", "streamId", "correlationId", "graphId")},
            "globalPid": "globalPid",
        }
        count = 0
        for block in self._rows("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", wanted):
            start, end, device, stream, correlation, graph, place = self._ints(block, 7)
            count += len(block)
            self.columns.add(
                len(block), start=start, end=end, category=int(Category.KERNEL), device=device, stream=stream,
                correlation=correlation, graph=graph, pid=_pid(place),
                name=[self._number(f"CUDA graph {number}, traced as a whole") for number in graph.tolist()],
            )  # fmt: skip
        if count:
            self.warnings.append(
                f"{self.path.name}: {count:,} graph replays were traced as a whole, so their kernels and the idle "
                "between are not seen; profile with `--cuda-graph-trace=node`"
            )

    def _runtime(self) -> None:
        wanted = {
            **{key: key for key in ("start", "end", "correlationId", "globalTid")},
            "nameId": self._text_of("nameId"),
        }
        for block in self._rows("CUPTI_ACTIVITY_KIND_RUNTIME", wanted):
            start, end, correlation, place = self._ints(block, 4)
            names = [re.sub(r"_v\d+$", "", str(row[4])) for row in block]
            driver = np.array([bool(re.match(r"cu[A-Z]", name)) for name in names])
            self.columns.add(
                len(block), start=start, end=end, correlation=correlation, pid=_pid(place), tid=_tid(place),
                category=np.where(driver, Category.DRIVER, Category.RUNTIME),
                name=[self._number(name) for name in names],
            )  # fmt: skip

    def _ranges(self) -> None:
        wanted = {
            **{"start": "start", "end": "end", "globalTid": "globalTid", "text": "text"},
            "textId": self._text_of("textId"),
        }
        where = "WHERE end IS NOT NULL AND end >= start"
        if "eventType" in self._there("NVTX_EVENTS"):
            where += f" AND eventType IN ({_PUSH_POP}, {_START_END})"
        for block in self._rows("NVTX_EVENTS", wanted, where):
            start, end, place = self._ints(block, 3)
            texts = [next((text for text in row[3:] if isinstance(text, str)), "") for row in block]
            self.columns.add(
                len(block), start=start, end=end, pid=_pid(place), tid=_tid(place),
                category=int(Category.USER_ANNOTATION), name=[self._number(text) for text in texts],
            )  # fmt: skip

    def _trace(self) -> Trace:
        columns = self.columns
        start, end, device = columns.column("start"), columns.column("end"), columns.column("device")
        if (end < start).any():
            raise WorkbenchError(f"{self.path} holds an event that ends before it starts; {_EXPORT}")
        return Trace(
            source=self.path.name,
            start_ns=start,
            duration_ns=end - start,
            category=columns.column("category", np.uint8),
            name=columns.column("name", np.int32),
            names=list(self.names),
            device=np.where(columns.column("category") <= Category.MEMSET, device.clip(min=0), -1).astype(np.int32),
            stream=columns.column("stream"),
            pid=columns.column("pid"),
            tid=columns.column("tid"),
            correlation=columns.column("correlation"),
            external=np.full(columns.rows, -1, np.int64),
            graph=columns.column("graph"),
            graph_node=columns.column("graph_node"),
            bytes=columns.column("bytes"),
            info=TraceInfo(trace_name=self.path.name),
            dropped={},
            warnings=self.warnings,
        )


def _node(values: Any) -> Any:
    """Graph node ids; nsys writes 0 or nothing for work outside graphs."""
    return np.where(values <= 0, -1, values)


def _pid(place: Any) -> Any:
    """Process of a `globalPid` or `globalTid`: bits 24 to 47."""
    return np.where(place < 0, -1, place >> 24 & 0xFFFFFF)


def _tid(place: Any) -> Any:
    """Thread of a `globalTid`: its low 24 bits."""
    return np.where(place < 0, -1, place & 0xFFFFFF)


def _copy_name(category: Category, kind: int, source: int, target: int) -> str:
    """The name Kineto gives such an operation."""
    if category == Category.MEMSET:
        return "Memset (Device)"
    places = f"{_PLACES.get(source, 'Unknown')} -> {_PLACES.get(target, 'Unknown')}"
    return f"Memcpy {_COPIES.get(kind, 'Unknown')} ({places})"
