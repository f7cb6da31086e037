"""Whole files or none: atomic writes, and bounded reads of files that strangers made."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from workbench.errors import WorkbenchError

T = TypeVar("T")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it over `path` when the block ends well.

    A block that raises, or a process killed at any moment, leaves the old `path` untouched.

    Raises:
        WorkbenchError: the folder cannot be written (missing, read-only, disk full).
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with _refusing_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):  # a parent that is a file holds nothing to remove
            temporary.unlink(missing_ok=True)


def refuse_occupied(folder: Path, overwrite: bool) -> None:
    """Refuse a target that holds something, unless `overwrite`; call it before long work.

    Raises:
        WorkbenchError: `folder` is a file, or a folder with content and `overwrite` is false.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise WorkbenchError(f"{folder} exists and is not a folder; choose another name")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise WorkbenchError(f"{folder} is not empty; choose another name, or pass --overwrite")


def refuse_existing(file: Path, overwrite: bool) -> None:
    """Refuse the name of a file that is there, unless `overwrite`; call it before long work.

    Raises:
        WorkbenchError: `file` exists and `overwrite` is false, or it is a folder.
    """
    if file.is_dir():
        raise WorkbenchError(f"{file} is a folder; name a file")
    if not overwrite and (file.exists() or file.is_symlink()):
        raise WorkbenchError(f"{file} exists; choose another name, or pass --overwrite")


@contextmanager
def replacing_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new temporary folder beside `folder`; rename it to `folder` when the block ends well.

    A block that raises, or a process killed at any moment, never leaves a partial `folder`. What was
    there before is removed only after the new one has its name.

    Raises:
        WorkbenchError: `folder` is occupied (see `refuse_occupied`) or cannot be written.
    """
    refuse_occupied(folder, overwrite)
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    old = temporary.with_suffix(".old")
    try:
        with _refusing_os_errors(folder):
            temporary.mkdir(parents=True)
        yield temporary
        refuse_occupied(folder, overwrite)
        with _refusing_os_errors(folder):
            if folder.exists():
                folder.rename(old)
            temporary.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _refusing_os_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkbenchError(
            f"cannot write {target}: {error.strerror or error}; choose a folder with room that you may write"
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Write `value` (msgspec structs, dataclasses, plain data) as indented JSON, atomically."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def read_json(path: Path, kind: type[T], limit: int = 64 * 2**20) -> T:
    """Read `path` as JSON of the msgspec type `kind`; refuse files above `limit` bytes.

    Raises:
        WorkbenchError: the file is missing, too large, not JSON, or of another shape.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise WorkbenchError(
                f"{path} has {size:,} bytes, more than the {limit:,} this kind of file may have; give another"
            )
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise WorkbenchError(
            f"cannot read {path}: {error.strerror or error}; give the path of a readable file"
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WorkbenchError(
            f"{path} is not what this command reads: {error}; give the file that the workbench wrote, or correct it"
        ) from error


def read_versioned(path: Path, kind: type[T], version: int, again: str = "") -> T:
    """Read `path` like `read_json`, once its field `schema_version` is found to be `version`.

    Args:
        again: what to do about another version, as the end of the sentence.

    Raises:
        WorkbenchError: another version or none; see `read_json`.
    """
    found = read_json(path, dict).get("schema_version")
    if found != version:
        raise WorkbenchError(
            f"{path} has schema version {found!r}; this workbench reads {version}" + (f", {again}" if again else "")
        )
    return read_json(path, kind)
