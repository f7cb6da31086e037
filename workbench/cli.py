"""The `workbench` command. Exit codes: 0 done, 1 found something, 2 bad input."""

import errno
import signal
import sys
from importlib import import_module
from types import FrameType

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


def main() -> None:
    """Run the command line; a `WorkbenchError` is one sentence on stderr and exit code 2, SIGTERM is 143."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # not where whoever started this ignores it
        signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"workbench: cannot write: {error.strerror}; free some room and run this again", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print("workbench: this does not fit into memory; give less at once, or use a larger machine", file=sys.stderr)
        sys.exit(2)
