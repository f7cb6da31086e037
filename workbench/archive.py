"""A zip archive that is written one way only, and read only when it was written that way.

A zip file can lie in many places: two names for one member, members that overlap, sizes that differ
between its two directories, links, text before or after the archive. Here every byte is accounted for:
members lie one after the other from the first byte, the directory follows, nothing else. Whatever
deviates is refused with the reason, before a byte is unpacked. Python's `zipfile` writes; reading is
done here, because `zipfile` reads generously.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from workbench.errors import WorkbenchError

LARGEST_ARCHIVE = 512 << 20
MOST_MEMBERS = 1_000
LARGEST_TOTAL = 1 << 30  # unpacked, all members together
LARGEST_RATIO = 300  # unpacked to packed, where it matters:
RATIO_FREE = 1 << 20  # below this size any ratio is harmless
_MADE_AGAIN = "ask its author for the file again, made with `workbench bundle create`"

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_STORED, _DEFLATED = 0, 8
_VERSION, _UNIX = 20, 3 << 8
_STAMP = (0, 0x21)  # 1 January 1980, midnight
_PLAIN_FILE = 0o100644 << 16
_PIECE = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)


# Control characters (which a terminal obeys) and those that reorder or hide text.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """`text` from a stranger, safe to show in a terminal or page: what is not seen becomes a visible mark."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True)
class Entry:
    """One member: where its packed bytes lie, and what they must unpack to."""

    name: str
    start: int
    packed: int
    size: int
    crc: int
    method: int


class Writer:
    """Writes members in the order given, with fixed time stamps: the same members, the same bytes."""

    def __init__(self, target: Path | BytesIO) -> None:
        self._zip = zipfile.ZipFile(target, "w")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def add(self, name: str, data: bytes, *, packed: bool) -> None:
        """Append one member; `packed` says that `data` is compressed already."""
        info = zipfile.ZipInfo(name, _EPOCH)
        info.create_system = _UNIX >> 8
        info.external_attr = _PLAIN_FILE
        info.compress_type = zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED
        self._zip.writestr(info, data, compresslevel=None if packed else 9)


class Archive:
    """An archive opened for reading, its directory checked.

    `allowed` maps a pattern of member names to the largest size such a member may have.

    Raises:
        WorkbenchError: the file cannot be read, or deviates in any way from what `Writer` writes.
    """

    def __init__(self, path: Path, allowed: Mapping[re.Pattern[str], int]) -> None:
        self.path = path
        self._allowed = allowed
        try:
            with path.open("rb") as handle:
                size = path.stat().st_size
                if size > LARGEST_ARCHIVE:
                    raise self.refusal(f"it has {size:,} bytes, more than {LARGEST_ARCHIVE:,}")
                self.entries = self._directory(handle, size)
        except OSError as error:
            raise WorkbenchError(f"cannot read {path}: {error.strerror or error}; give the path of a bundle") from error

    def refusal(self, reason: str) -> WorkbenchError:
        """The sentence that refuses this archive."""
        return WorkbenchError(f"{self.path} is not a bundle to trust: {printable(reason)}; {_MADE_AGAIN}")

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield a member's unpacked bytes in pieces, never more than its declared size.

        Raises:
            WorkbenchError: no such member, or its bytes do not unpack to what the directory declares.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise self.refusal(f"it has no member {name}")
        try:
            with self.path.open("rb") as handle:
                handle.seek(entry.start)
                total, crc = 0, 0
                for piece in self._unpacked(handle, entry):
                    total, crc = total + len(piece), zlib.crc32(piece, crc)
                    yield piece
        except OSError as error:
            raise WorkbenchError(f"cannot read {self.path}: {error.strerror or error}") from error
        except zlib.error as error:
            raise self.refusal(f"its member {name} does not unpack ({error})") from error
        if total != entry.size or crc != entry.crc:
            raise self.refusal(f"its member {name} was altered: size or checksum differ")

    def read(self, name: str) -> bytes:
        """Return a whole member; see `pieces`."""
        return b"".join(self.pieces(name))

    def _unpacked(self, handle: BinaryIO, entry: Entry) -> Iterator[bytes]:
        left, room = entry.packed, entry.size
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS) if entry.method == _DEFLATED else None
        while left and (data := handle.read(min(left, _PIECE))):
            left -= len(data)
            while data:
                piece = unpacker.decompress(data, min(room + 1, _PIECE)) if unpacker else data
                room -= len(piece)
                if room < 0:
                    raise self.refusal(f"its member {entry.name} unpacks to more than it declares")
                yield piece
                data = unpacker.unconsumed_tail if unpacker else b""
                if unpacker and unpacker.eof and (data or unpacker.unused_data or left):
                    raise self.refusal(f"its member {entry.name} has bytes after its end")
        if unpacker and not unpacker.eof:
            raise self.refusal(f"its member {entry.name} is cut off")

    def _directory(self, handle: BinaryIO, size: int) -> dict[str, Entry]:
        start, count = self._end_record(handle, size)
        handle.seek(start)
        directory = handle.read(size - _END.size - start)
        entries: dict[str, Entry] = {}
        position, expected, total, folded = 0, 0, 0, set()
        for _ in range(count):
            entry, position = self._entry(directory, position, expected, handle)
            expected = entry.start + entry.packed
            total += entry.size
            if entry.name.lower() in folded:
                raise self.refusal(f"it holds {entry.name} twice")
            folded.add(entry.name.lower())
            entries[entry.name] = entry
        if position != len(directory) or expected != start:
            raise self.refusal("it holds bytes that belong to no member")
        if total > LARGEST_TOTAL:
            raise self.refusal(f"it unpacks to {total:,} bytes, more than {LARGEST_TOTAL:,}")
        return entries

    def _end_record(self, handle: BinaryIO, size: int) -> tuple[int, int]:
        """Offset of the directory and number of members, from the last 22 bytes."""
        if size < _END.size:
            raise self.refusal("it is too short for a zip archive" if size else "it is empty")
        handle.seek(size - _END.size)
        magic, disk, first, here, count, length, start, comment = _END.unpack(handle.read(_END.size))
        if magic != b"PK\5\6":
            raise self.refusal("it does not end like a zip archive (truncated, altered, or another kind of file)")
        if disk or first or here != count or comment or start + length != size - _END.size:
            raise self.refusal("its end record does not describe the file")
        if count > MOST_MEMBERS:
            raise self.refusal(f"it has {count} members, more than {MOST_MEMBERS}")
        return start, count

    def _entry(self, directory: bytes, position: int, offset: int, handle: BinaryIO) -> tuple[Entry, int]:
        """Read one directory entry, and hold the local header at `offset` against it.

        What does not vary between the members of an archive is compared as a whole.
        """
        if position + _ENTRY.size > len(directory):
            raise self.refusal("its directory is cut off")
        fields = _ENTRY.unpack_from(directory, position)
        flags, method, time, date, crc, packed, size, name_size = fields[3:11]
        raw = directory[position + _ENTRY.size : position + _ENTRY.size + name_size]
        name = self._name(raw)
        if flags or method not in (_STORED, _DEFLATED):
            raise self.refusal(f"{name} is encrypted, or packed in a way that is not read here")
        if fields[15] != _PLAIN_FILE:
            raise self.refusal(f"{name} is not a plain file (a link, a folder or a device)")
        fixed = (b"PK\1\2", _UNIX | _VERSION, _VERSION, *_STAMP, 0, 0, 0, 0, offset)
        if (*fields[:3], time, date, *fields[11:15], fields[16]) != fixed:
            raise self.refusal(f"the directory entry of {name} is not one that this workbench writes")
        self._check_size(name, size, packed, method)
        handle.seek(offset)
        local = handle.read(_LOCAL.size + len(raw))
        expected = _LOCAL.pack(b"PK\3\4", _VERSION, 0, method, *_STAMP, crc, packed, size, len(raw), 0) + raw
        if local != expected:
            raise self.refusal(f"the two headers of {name} contradict each other")
        entry = Entry(name, offset + len(local), packed, size, crc, method)
        return entry, position + _ENTRY.size + name_size

    def _name(self, raw: bytes) -> str:
        name = raw.decode("ascii", "backslashreplace")
        if not any(pattern.fullmatch(name) for pattern in self._allowed):
            raise self.refusal(f"it has a member {name[:120]!r}, which no bundle has")
        return name

    def _check_size(self, name: str, size: int, packed: int, method: int) -> None:
        limit = next(limit for pattern, limit in self._allowed.items() if pattern.fullmatch(name))
        if size > limit:
            raise self.refusal(f"{name} has {size:,} bytes, more than {limit:,}")
        if method == _STORED and size != packed:
            raise self.refusal(f"{name} declares two sizes")
        if size > RATIO_FREE and size > packed * LARGEST_RATIO:
            raise self.refusal(f"{name} unpacks to more than {LARGEST_RATIO} times its size")
