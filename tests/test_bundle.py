"""Bundles: what goes in comes out, deterministic, atomic, and hostile ones are refused or inert."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.hostile.corpus import inert, members_of, refused
from tests.runs import make_run, small_run, write_run
from workbench.bundle import Bundle, create, opened, read_source
from workbench.cli import app
from workbench.diff import compare_files
from workbench.errors import WorkbenchError
from workbench.run import recording_folder, recording_names


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run folder with a note and lint findings."""
    folder = small_run(tmp_path_factory.mktemp("runs") / "a", repeats=20)
    (folder / "note.md").write_text("Look at **call 1**; made in /home/bob/x with hf_QwErTyUiOpAsDfGhJkLzXcVbNm12\n")
    (folder / "lint.json").write_text(json.dumps({"findings": [{"rule": "unreachable-budget", "budget": 2048}]}))
    return folder


@pytest.fixture(scope="module")
def good(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a valid bundle."""
    path = tmp_path_factory.mktemp("good") / "a.wbz"
    create([run_folder], path)
    return path.read_bytes()


def test_round_trip(run_folder: Path, tmp_path: Path) -> None:
    made = create([run_folder], tmp_path / "a.wbz")
    bundle = Bundle(tmp_path / "a.wbz")
    bundle.verify(made.digest)
    bundle.verify(made.digest[:12].upper())
    (content,) = bundle.contents()
    source = read_source(run_folder)
    assert content.run == source.run
    assert content.findings == source.findings
    assert content.note == "Look at **call 1**; made in <path> with <token>\n"
    traces = bundle.extract(tmp_path / "out")
    assert [path.name for path in traces] == ["graph.json.gz", "eager_served.json.gz"]
    again = create([tmp_path / "out" / content.entry.folder], tmp_path / "b.wbz")
    assert again.findings == []
    assert Bundle(tmp_path / "b.wbz").contents()[0].run == content.run


def test_the_same_inputs_give_the_same_bytes(run_folder: Path, tmp_path: Path) -> None:
    create([run_folder, run_folder], tmp_path / "a.wbz")
    os.utime(run_folder / "run.json", (1, 1))
    create([run_folder, run_folder], tmp_path / "b.wbz")
    assert (tmp_path / "a.wbz").read_bytes() == (tmp_path / "b.wbz").read_bytes()
    assert [entry.folder for entry in Bundle(tmp_path / "a.wbz").manifest.entries] == [
        "runs/00-ernie-base",
        "runs/01-ernie-base",
    ]


def test_traces_keep_every_number(run_folder: Path, tmp_path: Path) -> None:
    create([run_folder], tmp_path / "a.wbz")
    before = json.loads(gzip.decompress((run_folder / "traces/graph.json.gz").read_bytes()))
    with opened(tmp_path / "a.wbz") as (content,), content.open_trace("traces/graph.json.gz") as path:
        after = json.loads(gzip.decompress(path.read_bytes()))
    assert before["traceEvents"][2:] == after["traceEvents"][2:]
    assert after["traceEvents"][0]["args"] == {"name": "<process>"}
    assert after["traceName"] == "<path>/trace.json"


def test_without_redaction_everything_stays(run_folder: Path, tmp_path: Path) -> None:
    made = create([run_folder], tmp_path / "a.wbz", redact=False)
    assert made.manifest.redactions is None
    assert "/home/bob" in (Bundle(tmp_path / "a.wbz").contents()[0].note or "")


def test_fingerprints_tell_what_changed(tmp_path: Path) -> None:
    base = small_run(tmp_path / "base")
    other = small_run(tmp_path / "other", budgets=(64, 128))
    create([base, other], tmp_path / "a.wbz")
    left, right = Bundle(tmp_path / "a.wbz").manifest.entries
    assert (left.weights, left.inputs) == (right.weights, right.inputs)
    assert left.configuration != right.configuration


@pytest.mark.parametrize("name", recording_names() or ["none shipped"])
def test_a_shipped_recording_is_small_and_fast(name: str, tmp_path: Path) -> None:
    if name not in recording_names():
        pytest.skip("no recording is shipped yet")
    made = create([recording_folder(name)], tmp_path / "a.wbz")
    assert made.bytes < 1_000_000
    Bundle(tmp_path / "a.wbz").verify(made.digest)


def test_every_hostile_bundle_is_refused_in_one_sentence(good: bytes, tmp_path: Path) -> None:
    path, names = tmp_path / "hostile.wbz", set()
    for name, data in refused(good):
        names.add(name)
        path.write_bytes(data)
        started = time.monotonic()
        message = _refusal(path, tmp_path / "out")
        assert message.startswith(str(path)), name
        assert message.isprintable(), name
        assert len(message) < 800, name
        assert time.monotonic() - started < 5, name
        assert list(tmp_path.iterdir()) == [path], name
    assert len(names) >= 40


def test_hostile_text_is_data(good: bytes, tmp_path: Path) -> None:
    for number, (_, data) in enumerate(inert(good)):
        path = tmp_path / f"{number}.wbz"
        path.write_bytes(data)
        Bundle(path).verify()
        result = CliRunner().invoke(app, ["bundle", "show", str(path)])
        assert result.exit_code == 0
        assert not set(result.output) & set("\x1b\x07\x9b\u202e\u2066\u200b")


def _refusal(path: Path, folder: Path) -> str:
    try:
        Bundle(path).extract(folder)
    except WorkbenchError as error:
        return str(error)
    return "accepted"


def _is_refused_or_the_same(path: Path, members: dict[str, bytes]) -> bool:
    """Bits that pad a compressed stream to whole bytes may differ; nothing else may."""
    try:
        bundle = Bundle(path)
        bundle.verify()
    except WorkbenchError:
        return True
    return {name: bundle.archive.read(name) for name in bundle.archive.entries} == members


def test_no_byte_can_change_unseen(good: bytes, tmp_path: Path) -> None:
    path, generator, members = tmp_path / "a.wbz", random.Random(3), members_of(good)
    headers = range(len(good) - 1500, len(good))  # the directory
    for at in [*headers, *(generator.randrange(len(good)) for _ in range(1500))]:
        data = bytearray(good)
        data[at] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        assert _is_refused_or_the_same(path, members), at


def test_fuzzed_bundles_never_crash(good: bytes, tmp_path: Path) -> None:
    path, generator, members = tmp_path / "a.wbz", random.Random(11), members_of(good)
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(generator.randint(1, 8)):
            at, length = generator.randrange(len(data)), generator.randint(1, 64)
            kind = generator.randrange(4)
            if kind == 0:
                data[at : at + length] = generator.randbytes(length)
            elif kind == 1:
                del data[at : at + length]
            elif kind == 2:
                data[at:at] = generator.randbytes(length)
            else:
                source = generator.randrange(len(data))
                data[at : at + length] = data[source : source + length]
        path.write_bytes(data)
        assert _is_refused_or_the_same(path, members)


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from workbench.bundle import create
runs, target = [Path(sys.argv[1])], Path(sys.argv[2])
started = time.monotonic()
create(runs, target.with_suffix(".probe"))
span = time.monotonic() - started
for delay in map(float, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        create(runs, target, overwrite=True)
        os._exit(0)
    time.sleep(delay * span * 1.3)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.WIFSIGNALED(status), target.read_bytes().hex(), flush=True)
"""


def test_killed_at_any_moment_the_old_or_the_new_file_is_whole(run_folder: Path, good: bytes, tmp_path: Path) -> None:
    target = tmp_path / "a.wbz"
    other = small_run(tmp_path / "other", "older", repeats=10)
    create([other], target)
    old = target.read_bytes()
    generator = random.Random(5)
    delays = [str(generator.random()) for _ in range(50)]
    command = [sys.executable, "-c", _KILLED, str(run_folder), str(target), *delays]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    outcomes = [line.split() for line in result.stdout.splitlines()]
    assert len(outcomes) == 50
    assert {data for _, data in outcomes} <= {old.hex(), good.hex()}
    assert sum(killed == "True" for killed, _ in outcomes) >= 25  # most children were killed at work


def test_a_full_disk_leaves_the_old_file(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.wbz"
    target.write_bytes(b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.archive.Writer.add", full)
    with pytest.raises(WorkbenchError, match="No space left"):
        create([run_folder], target, overwrite=True)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_bundle_that_is_there_is_replaced_only_when_told(run_folder: Path, good: bytes, tmp_path: Path) -> None:
    target, link = tmp_path / "a.wbz", tmp_path / "link.wbz"
    target.write_bytes(b"old")
    link.symlink_to(tmp_path / "nowhere")
    for taken in (target, link):
        with pytest.raises(WorkbenchError, match=r"exists; choose another name, or pass --overwrite"):
            create([run_folder], taken)
        refused = CliRunner().invoke(app, ["bundle", "create", str(run_folder), "-o", str(taken)])
        assert isinstance(refused.exception, WorkbenchError)
    assert target.read_bytes() == b"old"
    with pytest.raises(WorkbenchError, match="is a folder"):
        create([run_folder], tmp_path, overwrite=True)
    create([run_folder], target, overwrite=True)
    assert target.read_bytes() == good


def test_bad_input_is_one_sentence(run_folder: Path, good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wbz"
    path.write_bytes(good)
    with pytest.raises(WorkbenchError, match="at least one run"):
        create([], path)
    with pytest.raises(WorkbenchError, match="not a run folder"):
        create([tmp_path], path, overwrite=True)
    with pytest.raises(WorkbenchError, match="its digest is"):
        Bundle(path).verify("0" * 64)
    with pytest.raises(WorkbenchError, match="its digest is"):
        Bundle(path).verify("")
    with pytest.raises(WorkbenchError, match="not empty"):
        Bundle(path).extract(tmp_path)
    with pytest.raises(WorkbenchError, match="cannot read"):
        Bundle(tmp_path / "none.wbz")
    run = make_run("a")
    broken = write_run(tmp_path / "broken", run)
    (broken / "plan.json").write_text('{"x": NaN}')
    with pytest.raises(WorkbenchError, match=r"plan\.json"):
        create([broken], path, overwrite=True)
    assert path.read_bytes() == good


def test_a_run_cannot_pull_other_files_into_a_bundle(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    (tmp_path / "secret.json.gz").write_bytes(gzip.compress(b"[]"))
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace("traces/graph.json.gz", "traces/../../secret.json.gz"))
    with pytest.raises(WorkbenchError, match="rename it"):
        create([folder], tmp_path / "a.wbz")
    (folder / "run.json").write_text(text)
    (folder / "traces/graph.json.gz").unlink()
    (folder / "traces/graph.json.gz").symlink_to(tmp_path / "secret.json.gz")
    with pytest.raises(WorkbenchError, match="not there"):
        create([folder], tmp_path / "a.wbz")


def test_a_truncated_trace_is_kept_with_a_warning(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    trace = folder / "traces/graph.json.gz"
    trace.write_bytes(trace.read_bytes()[:-30])
    made = create([folder], tmp_path / "a.wbz")
    assert any("ends early" in warning for warning in made.manifest.warnings)
    Bundle(tmp_path / "a.wbz").verify()


def test_the_command_line(run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.wbz"

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["bundle", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "hf_Q… (31 characters)" in run("create", run_folder, "--show-redactions")
    assert not target.exists()
    made = json.loads(run("create", run_folder, "-o", target, "--json"))
    assert made["manifest"]["entries"][0]["name"] == "ernie-base"
    assert made["digest"] in run("create", run_folder, "-o", target, "--overwrite")
    assert json.loads(run("verify", target, "--expect", made["digest"], "--json"))["whole"]
    assert "is whole" in run("verify", target)
    assert json.loads(run("show", target, "--json"))["digest"] == made["digest"]
    assert "Look at **call 1**" not in run("show", target)  # the note of a run is not that of the bundle
    assert "perfetto" in run("extract", target, tmp_path / "out")
    extracted = json.loads(run("extract", target, tmp_path / "out", "--overwrite", "--json"))
    assert all(Path(path).is_file() for path in extracted["traces"])


def test_an_altered_bundle_ends_the_command_with_2(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wbz"
    path.write_bytes(good[:-30])
    result = subprocess.run(
        [sys.executable, "-m", "workbench", "bundle", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_no_way_in_takes_a_bundle_whose_unread_members_are_altered(run_folder: Path, tmp_path: Path) -> None:
    """A diff reads no more than one trace per arm; what it does not read must be whole all the same."""
    path, altered = tmp_path / "a.wbz", tmp_path / "b.wbz"
    create([run_folder], path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(altered, "w") as copy:
        for member in archive.infolist():
            data = archive.read(member)
            copy.writestr(member, data[:-1] + bytes([data[-1] ^ 1]) if member.filename.endswith(".gz") else data)
    with pytest.raises(WorkbenchError, match=r"not a bundle to trust.*\.json\.gz"), opened(altered):
        pass
    with pytest.raises(WorkbenchError, match=r"not a bundle to trust.*\.json\.gz"):
        compare_files(path, altered)
