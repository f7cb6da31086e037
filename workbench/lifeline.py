"""Processes that end with the one that started them, even when that one is killed and can end nothing itself.

    from workbench.lifeline import bound

    process = subprocess.Popen(bound(["vllm", "serve", "model"]), start_new_session=True)

The command and all that it starts, as far as they stay in its process group, end with this process. The kernel of Linux
sees to it: it signals a process whose parent is gone.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# From SIGTERM to SIGKILL. Python's resource tracker, which outlives SIGTERM, removes shared memory meanwhile.
_PATIENCE_SECONDS = 3.0


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process signalled when `parent`, the process that started it, is gone.

    The kernel goes by the thread that started it, which must live as long.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # gone before the kernel was told
        os.kill(os.getpid(), number)


def bound(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` until this process is gone; start it in a session of its own.

    It ends with the exit code of `command`, with 128 and the signal's number where a signal ended that.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def _end_group(*_: object) -> None:
    os.killpg(0, signal.SIGTERM)
    time.sleep(_PATIENCE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _run(parent: int, command: Sequence[str]) -> int:
    signal.signal(signal.SIGHUP, _end_group)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is for the command, which gets it too and says how it ended
    end_with(parent, signal.SIGHUP)
    code = subprocess.call(command)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_run(int(sys.argv[1]), sys.argv[2:]))
