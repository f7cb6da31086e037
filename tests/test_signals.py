"""A command that is ended by a signal leaves nothing half made."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAITING = """
import subprocess, sys, time
from pathlib import Path
from workbench import cli
from workbench.files import replacing_folder

@cli.app.command("wait")
def wait(out: Path) -> None:
    with replacing_folder(out) as folder:
        (folder / "part").write_text("half")
        print("ready", flush=True)
        time.sleep(60)

cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_ended_command_leaves_no_part(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-c", WAITING, "wait", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.argv = ['workbench', '--help']\n"
        "from workbench import cli\n"
        "try: cli.main()\n"
        "finally: print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
