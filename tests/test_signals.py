"""A command that is ended by a signal leaves nothing half made; one whose reader leaves ends quietly."""

import os
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


ROOT = Path(__file__).resolve().parents[1]
PRINTING = {
    "typer's help": ["--help"],
    "rich's table": ["env"],
    "one line": ["env", "--json"],
}


@pytest.mark.parametrize("arguments", PRINTING.values(), ids=PRINTING)
def test_a_reader_that_leaves_ends_a_command_quietly(arguments: list[str]) -> None:
    """As `workbench ... | head -1`: 128 + SIGPIPE, and not 1, which says that something was found."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "workbench", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_onto_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "workbench", "--help"], stdout=full, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith(b"workbench: cannot write: No space left on device")
    assert done.stderr.count(b"\n") == 1
