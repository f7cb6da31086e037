"""Commands that end with the process that started them: how they end, told on; and one whose parent is gone already."""

import os
import signal
import subprocess
import sys

import pytest

from workbench.lifeline import bound


def run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        bound([sys.executable, "-c", code]),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("code", [0, 3])
def test_the_code_and_the_words_of_the_command_are_told_on(code: int) -> None:
    done = run(f"import sys; print('said', sys.stdin.read()); sys.exit({code})")
    assert (done.returncode, done.stdout) == (code, "said \n")


def test_a_command_ended_by_a_signal_is_told_as_shells_do() -> None:
    assert run("import os; os.kill(os.getpid(), 9)").returncode == 128 + signal.SIGKILL


def test_the_command_has_time_to_end_itself() -> None:
    """SIGTERM reaches it, and what it does then is waited for."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('ended', flush=True), sys.exit(5)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    command = bound([sys.executable, "-c", code])
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
    assert process.returncode == 5


def test_a_parent_that_is_gone_before_the_command_begins() -> None:
    command = bound([sys.executable, "-c", "print('begun')"])
    command[3] = "1" if os.getpid() != 1 else "2"  # another than the parent, as after its end
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
