"""The `workbench` command. Exit codes: 0 done, 1 found something, 2 bad input."""

import errno
import io
import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any, TextIO

import typer

from workbench.errors import WorkbenchError

# One module per group of verbs; each has `register(app)`. They import nothing heavy at the top.
GROUPS: tuple[str, ...] = (
    "workload",
    "checkpoint",
    "capture",
    "analyze",
    "costs",
    "sweep",
    "plan",
    "advise",
    "env",
    "report",
    "bundle",
    "parity",
    "boundary",
    "engine_bench",
    "parallel",
    "counters",
)

# Packages that come with an extra only, and which.
_ENGINE = "an engine: install the extra `gpu` or `cpu`, as `make setup` does"
_EXTRAS = dict.fromkeys(("torch", "vllm", "transformers", "safetensors"), _ENGINE) | {
    name: f"{name}: install the extra `lab`" for name in ("plotly", "ipywidgets", "nbclient", "nbconvert", "nbformat")
}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # wherever a command writes: disk, quota, largest file

app = typer.Typer(
    name="workbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _group() -> None:
    """Profile, tune and review vLLM's vision-encoder CUDA graphs."""


for group in GROUPS:
    import_module(f"workbench.commands.{group}").register(app)


def _end(number: int, _frame: FrameType | None) -> None:
    """Unwind as Ctrl-C does, so that partial files and child processes go too; a second signal ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


class _Output(io.FileIO):
    """Standard output; when its reader leaves, as `head` does, the command ends quietly with 141, as Unix tools do.

    Here and not around the command, because rich and typer make it exit code 1, which says "found something". The
    signal itself stays ignored: a child process or a Ray cluster that goes away would end the command too.
    """

    def write(self, data: Any, /) -> int:
        """Write `data`, or end the command."""
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # Python writes what is still buffered at its end
            if error.errno == errno.EPIPE:
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise


def _ending_with_reader(stream: TextIO) -> TextIO:
    """Return `stream` with `_Output` below it; one that is no open file (tests, notebooks) as it is."""
    try:
        raw = _Output(stream.fileno(), "wb", closefd=False)
    except (AttributeError, OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=raw.isatty()
    )


def _run() -> None:
    sys.stdout = _ending_with_reader(sys.stdout)
    try:
        app()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # else a reader that has left, or a full disk, shows only when Python ends


def main() -> None:
    """Run the command line; a `WorkbenchError` is one sentence on stderr and exit code 2, SIGTERM is 143."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # not where whoever started this ignores it
        signal.signal(signal.SIGTERM, _end)
    try:
        _run()
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        needed = _EXTRAS.get((error.name or "").partition(".")[0])
        if needed is None:
            raise
        print(f"workbench: this command needs {needed}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"workbench: cannot write: {error.strerror}; free some room and run this again", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("workbench: this does not fit into memory; give less at once, or use a larger machine", file=sys.stderr)
        sys.exit(2)
