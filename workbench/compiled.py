"""The decorator of compiled loops: machine code is kept on disk where a folder can be written, else made anew.

Imported only by modules of loops, because numba is slow to import. numba keeps the code in `__pycache__` beside the
module, in NUMBA_CACHE_DIR, or in the user's cache folder, whichever it may write; a read-only installation without a
home, or a full disk, must cost a process some seconds of compilation, never an error.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba


def compiled(function: Callable[..., object]) -> Any:
    """Compile `function` on first use, free of the interpreter's lock; numba infers its types from the arguments."""
    try:
        dispatcher: Any = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder can be written
        dispatcher = numba.njit(nogil=True)(function)
    else:
        _forgive(dispatcher._cache)
    return dispatcher


def _forgive(cache: Any) -> None:
    """Let a failing read or write of the cache pass: the code is compiled, or is in memory already."""
    load, save = cache.load_overload, cache.save_overload

    def load_overload(signature: object, context: object) -> object:
        try:
            return load(signature, context)
        except Exception:  # noqa: BLE001  a file cut where a disk was full unpickles to any error
            with suppress(OSError):
                cache.flush()  # begin anew
            return None

    def save_overload(signature: object, data: object) -> None:
        with suppress(OSError):
            save(signature, data)

    cache.load_overload, cache.save_overload = load_overload, save_overload
