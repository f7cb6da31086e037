"""A Kineto (torch.profiler) trace as numpy columns, read as a stream.

Accepted: the object form or a bare array of events, plain or gzip, of any torch version on CUDA or
ROCm. Times are exact integer nanoseconds, parsed from the decimal text: the Trace Event Format
gives `ts` and `dur` in microseconds, whatever `displayTimeUnit` says (that is for the viewer).

What is kept: complete events (`ph` X) of the categories in `Category`. Flow arrows, metadata and
instant events are left out, Python frames too unless asked for. Memory is about 100 bytes per kept
event while the text of one is 200 to 600; the text itself passes through a buffer of 4 MB.
"""

import queue
import secrets
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError

Ints = NDArray[np.int64]

CHUNK = 4 * 2**20
LARGEST_VALUE = 64 * 2**20  # one event or metadata value above this is not a trace
_ROWS = 2**15  # events per call of the scanner
_GZIP_MAGIC = b"\x1f"  # and no JSON begins so; the second byte may be cut off
_GZIP_WINDOW = 31  # zlib: gzip header, largest window
_MAKE_ONE = "export one with torch.profiler's export_chrome_trace or `workbench capture`"


class Category(IntEnum):
    """What an event is. `OTHER` is counted, never kept."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    RUNTIME = 3
    DRIVER = 4
    CPU_OP = 5
    USER_ANNOTATION = 6
    GPU_USER_ANNOTATION = 7
    PYTHON_FUNCTION = 8
    OVERHEAD = 9
    OTHER = 10


# Names by torch version: lower case since 1.12, capitals before; ROCm builds write the CUDA names,
# newer ones their own.
_CATEGORY_NAMES: dict[str, Category] = {
    "kernel": Category.KERNEL,
    "cpu_op": Category.CPU_OP,
    "cuda_runtime": Category.RUNTIME,
    "user_annotation": Category.USER_ANNOTATION,
    "cuda_driver": Category.DRIVER,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "gpu_user_annotation": Category.GPU_USER_ANNOTATION,
    "python_function": Category.PYTHON_FUNCTION,
    "overhead": Category.OVERHEAD,
    "hip_runtime": Category.RUNTIME,
    "hip_driver": Category.DRIVER,
    "Kernel": Category.KERNEL,
    "Operator": Category.CPU_OP,
    "Runtime": Category.RUNTIME,
    "Memcpy": Category.MEMCPY,
    "Memset": Category.MEMSET,
    "Overhead": Category.OVERHEAD,
}


class Copy(IntEnum):
    """Direction of a memcpy, from its name."""

    NONE = 0
    HTOD = 1
    DTOH = 2
    DTOD = 3
    OTHER = 4


@dataclass(frozen=True)
class TraceInfo:
    """Metadata beside the events. `base_ns` + a timestamp is nanoseconds since the epoch."""

    rank: int | None = None
    world_size: int | None = None
    schema_version: int | None = None
    trace_name: str | None = None
    display_unit: str | None = None
    base_ns: int = 0
    devices: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """Columns of one trace, in file order; all of length n, -1 where the file says nothing.

    Attributes:
        source: name of the file, for messages.
        start_ns, duration_ns: exact nanoseconds, relative to `info.base_ns`.
        category: `Category` codes (uint8).
        name: index into `names`.
        device, stream: GPU events only; older files give the device as the pid.
        pid, tid: a textual id is -2 minus its index in `names`.
        correlation: joins a GPU op to the runtime call that launched it.
        external: joins a runtime call or GPU op to its CPU operator.
        graph, graph_node: CUDA graph ids where the profiler wrote them.
        bytes: size of a memcpy or memset.
        dropped: complete events not kept, by category.
        warnings: sentences a person should read with any number from this trace.
        cut: the file ends early, so that events are missing.
    """

    source: str
    start_ns: Ints
    duration_ns: Ints
    category: NDArray[np.uint8]
    name: NDArray[np.int32]
    names: list[str]
    device: NDArray[np.int32]
    stream: Ints
    pid: Ints
    tid: Ints
    correlation: Ints
    external: Ints
    graph: Ints
    graph_node: Ints
    bytes: Ints
    info: TraceInfo
    dropped: dict[str, int]
    warnings: list[str]
    cut: bool = False

    def __len__(self) -> int:
        return int(self.start_ns.size)

    @property
    def end_ns(self) -> Ints:
        """Ends of all events."""
        return self.start_ns + self.duration_ns

    def rows(self, *categories: Category) -> Ints:
        """Indices of the events of the given categories, in file order."""
        wanted = np.zeros(len(Category), np.bool_)
        wanted[list(categories)] = True
        return np.flatnonzero(wanted[self.category])

    def gpu_rows(self) -> Ints:
        """Indices of GPU work: kernels, copies, memsets (annotations on the GPU are not work)."""
        return np.flatnonzero(self.category <= Category.MEMSET)

    def copies(self) -> NDArray[np.uint8]:
        """`Copy` code of every event; NONE for what is not a memcpy."""
        by_name = np.array([int(_copy_kind(text)) for text in self.names] or [0], np.uint8)
        codes = by_name[self.name]
        codes[self.category != Category.MEMCPY] = Copy.NONE
        return codes


def _copy_kind(name: str) -> Copy:
    """Direction in "Memcpy HtoD (Pageable -> Device)" (CUDA) or "CopyHostToDevice" (ROCm)."""
    for kind, marks in (
        (Copy.HTOD, ("HtoD", "HostToDevice")),
        (Copy.DTOH, ("DtoH", "DeviceToHost")),
        (Copy.DTOD, ("DtoD", "DeviceToDevice", "PtoP")),
    ):
        if any(mark in name for mark in marks):
            return kind
    return Copy.OTHER


def read_trace(path: Path, *, python: bool = False) -> Trace:
    """Read one trace file.

    Args:
        path: Kineto JSON, plain or gzip (told by content, not by name).
        python: keep `python_function` events.

    Raises:
        WorkbenchError: missing, empty, damaged, not JSON, no Kineto trace, or more events than fit into
            memory. A file cut in the middle is read up to its last whole event, with a warning.
    """
    try:
        with path.open("rb") as handle:
            return _Reader(path.name, _Pieces(path, handle), python).read()
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}; give the path of a trace file") from error
    except MemoryError:
        raise WorkbenchError(
            f"the events of {path} do not fit into memory (about 100 bytes each); trace fewer calls, or read it on a "
            "larger machine"
        ) from None


def read_traces(paths: Sequence[Path], *, python: bool = False, workers: int = 2) -> list[Trace]:
    """Read several ranks' traces in parallel threads, ordered by rank, then as given.

    Raises:
        WorkbenchError: as `read_trace`, for the first file that fails.
    """
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        traces = list(pool.map(lambda path: read_trace(path, python=python), paths))
    return sorted(traces, key=lambda trace: -1 if trace.info.rank is None else trace.info.rank)


class _Pieces:
    """The uncompressed bytes of a file in pieces; `cut` tells that a gzip stream ended early.

    A gzip file is decompressed in a thread of its own, so that reading goes as fast as zlib does.
    """

    def __init__(self, path: Path, handle: BinaryIO) -> None:
        self.path = path
        self.handle = handle
        self.cut = False
        magic = handle.read(1)
        handle.seek(0)
        self.compressed = magic == _GZIP_MAGIC

    def __iter__(self) -> Iterator[bytes]:
        if self.compressed:
            yield from _read_ahead(self._inflated())
        else:
            while piece := self.handle.read(CHUNK):
                yield piece

    def _inflated(self) -> Iterator[bytes]:
        """Decompress member after member; what precedes a cut is delivered, unlike by `gzip`."""
        inflater = zlib.decompressobj(_GZIP_WINDOW)
        try:
            while data := self.handle.read(CHUNK // 16):
                while data:
                    if inflater.eof:
                        inflater = zlib.decompressobj(_GZIP_WINDOW)
                    if piece := inflater.decompress(data, CHUNK):
                        yield piece
                    # Zeros may follow a member as padding.
                    data = inflater.unused_data.lstrip(b"\0") if inflater.eof else inflater.unconsumed_tail
        except zlib.error as error:
            raise WorkbenchError(
                f"{self.path} is damaged gzip data ({error}); copy it again from where it was made"
            ) from error
        self.cut = not inflater.eof


def _read_ahead(items: Iterator[bytes], depth: int = 4) -> Iterator[bytes]:
    """Run `items` in a thread, at most `depth` ahead; its exception is raised here."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: bytes | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001  raised again in the reading thread
            put(error)

    worker = threading.Thread(target=produce, daemon=True)
    worker.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        worker.join()


class _Buffer:
    """A window on the text: `data[position:end]` is unread, zeros follow `end`."""

    def __init__(self, pieces: _Pieces) -> None:
        from workbench import scan

        self.skip_space = scan.skip_space
        self.padding = scan.PADDING
        self.source = pieces
        self.pieces = iter(pieces)
        self.data: NDArray[np.uint8] = np.zeros(2 * CHUNK + self.padding, np.uint8)
        self.position = 0
        self.end = 0
        self.consumed = 0  # bytes of the file before data[0]
        self.finished = False

    def more(self) -> bool:
        """Append the next piece, dropping what was read; False at the end of the file.

        Raises:
            WorkbenchError: what is unread has grown past `LARGEST_VALUE` without becoming whole.
        """
        piece = next(self.pieces, None)
        if piece is None:
            self.finished = True
            return False
        unread = self.end - self.position
        if unread > LARGEST_VALUE:
            raise WorkbenchError(
                f"{self.source.path} holds a single value of more than {LARGEST_VALUE:,} bytes at byte "
                f"{self.consumed + self.position:,}, so it is no Kineto trace; {_MAKE_ONE}"
            )
        self.consumed += self.position
        needed = unread + len(piece) + self.padding
        target = self.data if needed <= self.data.size else np.zeros(2 * needed, np.uint8)
        target[:unread] = self.data[self.position : self.end]
        target[unread : unread + len(piece)] = np.frombuffer(piece, np.uint8)
        self.data, self.position, self.end = target, 0, unread + len(piece)
        self.data[self.end : self.end + self.padding] = 0
        return True

    def peek(self) -> int:
        """The next byte that is not white space, unread; 0 at the end of the file."""
        while True:
            self.position = self.skip_space(self.data, self.position)
            if self.position < self.end:
                return int(self.data[self.position])
            if not self.more():
                return 0


class _Reader:
    """Walks the top level of the file; the events themselves go through the compiled scanner."""

    def __init__(self, source: str, pieces: _Pieces, python: bool) -> None:
        from workbench import scan

        self.scan = scan
        self.source = source
        self.path = pieces.path
        self.pieces = pieces
        self.buffer = _Buffer(pieces)
        self.table = scan.NameTable()
        self.state: Ints = np.zeros(len(scan.State), np.int64)
        self.seen: Ints = np.zeros(len(Category), np.int64)
        self.keep = np.ones(len(Category), np.bool_)
        self.keep[Category.OTHER] = False
        self.keep[Category.PYTHON_FUNCTION] = python
        # Random, so that no file can be built to make the name table slow.
        basis = secrets.randbits(64)
        self.basis = np.uint64(basis)
        self.hashes = np.array([scan.text_hash(name.encode(), basis) for name in _CATEGORY_NAMES], np.uint64)
        self.codes = np.array(list(_CATEGORY_NAMES.values()), np.int64)
        self.out: Ints = np.empty((scan.FIELDS, _ROWS), np.int64)
        self.columns: list[list[NDArray[Any]]] = [[] for _ in range(scan.FIELDS)]
        self.metadata: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.found_events = False

    def read(self) -> Trace:
        """Read the whole file."""
        first = self._start()
        if first == ord("["):
            self.buffer.position += 1
            whole = self._events()
        elif first == ord("{"):
            self.buffer.position += 1
            whole = self._members()
        else:
            raise self._malformed("a JSON object or array")
        if whole and self.buffer.peek():
            self.warnings.append(f"{self.source}: text after the end of the trace was ignored")
        return self._trace(whole)

    def _start(self) -> int:
        buffer = self.buffer
        if not buffer.peek():
            cut = " or cut before its first byte" if self.pieces.compressed else ""
            raise WorkbenchError(f"{self.path} is empty{cut}; {_MAKE_ONE}")
        if bytes(buffer.data[buffer.position : buffer.position + 3]) == b"\xef\xbb\xbf":
            buffer.position += 3
        return buffer.peek()

    def _malformed(self, expected: str) -> WorkbenchError:
        at = self.buffer.consumed + self.buffer.position
        return WorkbenchError(
            f"{self.path} is not a Kineto trace: the text near byte {at:,} is malformed where {expected} "
            f"should stand; {_MAKE_ONE}"
        )

    def _members(self) -> bool:
        """Read the members of the top-level object; False when the file ends inside."""
        buffer = self.buffer
        while True:
            byte = buffer.peek()
            if byte == ord(","):
                buffer.position += 1
            elif byte == ord("}"):
                buffer.position += 1
                return True
            elif byte == ord('"'):
                key = self._value()
                if key is None:
                    return False
                byte = buffer.peek()
                if byte == 0:
                    return False
                if byte != ord(":"):
                    raise self._malformed("a colon")
                buffer.position += 1
                if not self._member(key):
                    return False
            elif byte == 0:
                return False
            else:
                raise self._malformed("a quoted name")

    def _member(self, raw_key: bytes) -> bool:
        key = _text(raw_key[1:-1])
        if key == "traceEvents" and self.buffer.peek() == ord("["):
            self.buffer.position += 1
            return self._events()
        if self.buffer.peek() == 0:
            return False
        raw = self._value()
        if raw is None:
            return False
        # Kineto's own writer has produced metadata that is not JSON; the events do not depend on it.
        try:
            self.metadata[key] = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            self.warnings.append(f"{self.source}: the metadata {key[:80]!r} is not valid JSON and was ignored")
        return True

    def _value(self) -> bytes | None:
        """The raw JSON value at the position; None when the file ends inside it."""
        buffer = self.buffer
        while True:
            after = self.scan.skip_value(buffer.data, buffer.position, buffer.end)
            if after >= 0:
                raw = buffer.data[buffer.position : after].tobytes()
                buffer.position = after
                return raw
            if after == -2:
                raise self._malformed("a value nested at most 60 levels deep")
            if not buffer.more():
                return None

    def _events(self) -> bool:
        """Read events up to the closing bracket; False when the file ends before it."""
        scan, buffer, state = self.scan, self.buffer, self.state
        self.found_events = True
        while True:
            state[scan.State.POSITION] = buffer.position
            status = scan.scan(
                buffer.data, buffer.end, state, self.out, self.keep, self.seen, self.hashes, self.codes,
                self.table.names, self.table.slots, self.table.hashes, self.table.arena, self.basis,
            )  # fmt: skip
            buffer.position = int(state[scan.State.POSITION])
            if status == scan.Status.DONE:
                return True
            if status == scan.Status.BAD:
                raise self._malformed("an event")
            if status == scan.Status.FULL:
                self._flush()
                self.table.grow(int(state[scan.State.NAMES]), buffer.end - buffer.position)
            elif not buffer.more():
                return False

    def _flush(self) -> None:
        """Move the scanner's rows to the columns, in each column's own type."""
        count = int(self.state[self.scan.State.COUNT])
        for column, values in enumerate(self.out[:, :count]):
            self.columns[column].append(values.astype(_COLUMN_TYPES.get(column, np.int64)))
        self.state[self.scan.State.COUNT] = 0

    def _column(self, number: int) -> NDArray[Any]:
        parts, self.columns[number] = self.columns[number], []
        return np.concatenate(parts)

    def _trace(self, whole: bool) -> Trace:
        self._flush()
        kept = sum(map(len, self.columns[0]))
        self._check(whole, kept)
        count = int(self.state[self.scan.State.NAMES])
        names, renumber = _names(self.table.texts(count))
        field_ = self.scan.Field
        pid, tid = self._column(field_.PID), self._column(field_.TID)
        for column in (pid, tid):
            textual = column <= -2
            column[textual] = -2 - renumber[np.clip(-2 - column[textual], 0, max(count - 1, 0))]
        category = self._column(field_.CATEGORY)
        device = self._column(field_.DEVICE)
        lacking = (device < 0) & (category <= Category.MEMSET)
        device[lacking] = np.clip(pid[lacking], 0, np.iinfo(np.int32).max)
        return Trace(
            source=self.source,
            start_ns=self._column(field_.START),
            duration_ns=self._column(field_.DURATION),
            category=category,
            name=renumber[self._column(field_.NAME)],
            names=names,
            device=device,
            stream=self._column(field_.STREAM),
            pid=pid,
            tid=tid,
            correlation=self._column(field_.CORRELATION),
            external=self._column(field_.EXTERNAL),
            graph=self._column(field_.GRAPH),
            graph_node=self._column(field_.GRAPH_NODE),
            bytes=self._column(field_.BYTES),
            info=_info(self.metadata),
            dropped={
                category.name.lower(): int(self.seen[category])
                for category in Category
                if self.seen[category] and not self.keep[category]
            },
            warnings=self.warnings,
            cut=self._is_cut(whole),
        )

    def _is_cut(self, whole: bool) -> bool:
        return not whole or self.pieces.cut

    def _check(self, whole: bool, kept: int) -> None:
        """Refuse what holds no Kineto event; warn of what was cut or odd."""
        if kept == 0:
            if not whole:
                raise WorkbenchError(
                    f"{self.path} is cut off before its first whole event; copy it again from where it was made"
                )
            lacking = "events of Kineto's categories" if self.found_events else 'array "traceEvents"'
            raise WorkbenchError(f"{self.path} is JSON but not a Kineto trace: it has no {lacking}; {_MAKE_ONE}")
        if self._is_cut(whole):
            self.warnings.append(f"{self.source}: the file is cut off before its end; {kept:,} whole events were kept")
        odd = int(self.state[self.scan.State.ODD])
        if odd:
            self.warnings.append(f"{self.source}: {odd:,} events without a usable time or duration were left out")


_COLUMN_TYPES: dict[int, type[np.integer[Any]]] = {2: np.uint8, 3: np.int32, 6: np.int32}


def _text(raw: bytes) -> str:
    """Decode the inside of a JSON string; broken escapes and bytes are kept visible."""
    if b"\\" in raw:
        try:
            return msgspec.json.decode(b'"' + raw + b'"', type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    return raw.decode("utf-8", "replace")


def _names(raw: list[bytes]) -> tuple[list[str], NDArray[np.int32]]:
    """Decode names; two spellings of one name become one. Returns the names and old → new numbers."""
    numbers: dict[str, int] = {}
    renumber = np.array([numbers.setdefault(_text(item), len(numbers)) for item in raw] or [0], np.int32)
    return list(numbers), renumber


def _info(metadata: dict[str, Any]) -> TraceInfo:
    """Pick what is used from the metadata; values of another type count as absent."""

    def number(value: object) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(key: str) -> str | None:
        value = metadata.get(key)
        return value if isinstance(value, str) else None

    distributed = metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    devices = metadata.get("deviceProperties")
    return TraceInfo(
        rank=number(distributed.get("rank")),
        world_size=number(distributed.get("world_size")),
        schema_version=number(metadata.get("schemaVersion")),
        trace_name=text("traceName"),
        display_unit=text("displayTimeUnit"),
        base_ns=number(metadata.get("baseTimeNanoseconds")) or 0,
        devices=[d for d in devices if isinstance(d, dict)] if isinstance(devices, list) else [],
    )
