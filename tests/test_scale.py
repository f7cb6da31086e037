"""Large input and small machines: bounded memory, full disks, no cache folder, all cores; counts, no clock."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from workbench.budgets import Configuration, Limits, resolve
from workbench.planner import PlanTotals, arrange, map_totals, plan_totals
from workbench.run import recording_folder

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
# Runs the command line with at most {room} MiB of address space beyond what its imports take.
SMALL_MEMORY = """
import resource, sys
import workbench.scan, workbench.gaps, workbench.trace, workbench.phases, workbench.replays, workbench.kernels
from workbench.cli import main
from pathlib import Path
workbench.trace.read_trace(next(Path(sys.argv[2]).glob("traces/graph.ranges*")))
size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + {room} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.argv = ["workbench", "analyze", sys.argv[1], "--json"]
main()
"""


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process; `environment` replaces all variables but PATH."""
    variables = {
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
    } | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        timeout=300,
    )


def pieces(event: str, copies: int, blocks: int) -> Iterator[bytes]:
    """gzip members that together hold `copies` x `blocks` events."""
    yield gzip.compress(b'{"traceEvents": [')
    block = gzip.compress((event + ",\n").encode() * copies, 1)
    for _ in range(blocks):
        yield block
    yield gzip.compress(event.encode() + b"]}")


def kernel(padding: int) -> str:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    return json.dumps(event | {"args": {"device": 0, "stream": 7, "text": "x" * padding}})


def test_a_trace_larger_than_memory_is_read_as_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "wide.json.gz"
    path.write_bytes(b"".join(pieces(kernel(8000), 1000, 60)))  # 480 MB of text, 60,001 events
    done = run(SMALL_MEMORY.format(room=160), str(path), str(recording_folder("ernie45_vl-224")))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"]["kernels"] == 60_001


def test_more_events_than_fit_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "long.json.gz"
    path.write_bytes(b"".join(pieces(kernel(0), 20_000, 150)))  # 3,000,001 events: 300 MB of columns
    done = run(SMALL_MEMORY.format(room=160), str(path), str(recording_folder("ernie45_vl-224")))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "fit into memory" in done.stderr
    assert not done.stdout


def test_a_gz_cut_in_the_middle_keeps_its_whole_events(tmp_path: Path) -> None:
    source = next(recording_folder("ernie45_vl-224").glob("traces/graph.ranges*"))
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
    done = run("from workbench.cli import main; main()", "analyze", str(cut), "--json")
    assert done.returncode == 0, done.stderr
    (warning,) = (text for text in json.loads(done.stdout)["warnings"] if "cut off" in text)
    assert "whole events were kept" in warning


ONE_CALL = "--workload pull-request --depth 1 --width 160 --max-calls 1 --repeats 1 --profiled-repeats 1 --device cpu"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arguments", "room", "message"),
    [
        (["checkpoint", "glm4_1v"], 2_000, "cannot write .*File too large"),
        (["capture", *ONE_CALL.split(), "--out"], 20_000, "could not write its trace .* TMPDIR"),
    ],
    ids=["checkpoint", "capture"],
)
def test_a_full_disk_under_another_library_is_one_sentence(
    tmp_path: Path, arguments: list[str], room: int, message: str
) -> None:
    """Where it is not Python that writes, no OSError comes."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
        "from workbench.cli import main; main()"
    )
    caches = {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = run(code, *arguments, str(tmp_path / "out" / "made"), **caches)
    assert done.returncode == 2, done.stderr
    assert re.search(f"(?m)^workbench: .*{message}", done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("verb", ["report", "create"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, verb: str) -> None:
    """A limit on the size of one file stands for the disk: the write that crosses it fails likewise."""
    run_folder = recording_folder("ernie45_vl-224")
    whole = tmp_path / "whole.zip"
    made = run("from workbench.cli import main; main()", "bundle", "create", str(run_folder), "--out", str(whole))
    assert made.returncode == 0, made.stderr
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from workbench.cli import main; main()"
    )
    source = str(run_folder if verb == "create" else whole)
    # Python and numba would leave cut files in the caches of this checkout, which Python 3.11 then fails to load.
    caches = {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = run(code, "bundle", verb, source, "--out", str(out / "made"), **caches)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert "File too large" in done.stderr
    assert not list(out.iterdir())


# Compiled code --------------------------------------------------------------------------------------------------------

USE_ALL = """
from pathlib import Path
import sys, workbench
assert Path(workbench.__file__).parent == Path(sys.argv[1]) / "workbench", workbench.__file__
from workbench.budgets import Configuration, Limits, resolve
from workbench.planner import plan
from workbench.trace import read_trace
import workbench.search_loops
made = plan([100, 64, 300], [0, 2, 3], resolve(Configuration((128, 512), 4), Limits()))
print(len(made.tokens), len(read_trace(next(Path(sys.argv[2]).glob("traces/graph.ranges*")))))
"""


@pytest.mark.parametrize("case", ["no folder", "full disk"])
def test_compiled_code_needs_no_cache_folder(tmp_path: Path, case: str) -> None:
    """A copy of the package whose `__pycache__` is no folder, for a user without a home; or whose cache cannot grow."""
    shutil.copytree(
        ROOT / "workbench", tmp_path / "workbench", ignore=shutil.ignore_patterns("__pycache__", "recordings", "views")
    )
    recording = str(recording_folder("ernie45_vl-224"))
    variables = {"PYTHONPATH": str(tmp_path), "HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    code = USE_ALL
    if case == "no folder":
        (tmp_path / "workbench" / "__pycache__").touch()
    else:
        code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n" + USE_ALL
    done = run(code, str(tmp_path), recording, **variables)
    assert done.returncode == 0, done.stderr
    batches, events = map(int, done.stdout.split())
    assert batches == 3
    assert events > 1000
    assert not list(tmp_path.glob("workbench/__pycache__/*.nbc"))


def test_a_damaged_cache_is_compiled_anew(tmp_path: Path) -> None:
    """Cut and empty files in the cache, as a full disk leaves them."""
    code = (
        "from workbench.budgets import *; from workbench.planner import *\n"
        "print(len(plan([100, 64, 300], [0, 2, 3], resolve(Configuration((128, 512), 4), Limits())).tokens))"
    )
    first = run(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.stdout.strip() == "3", first.stderr
    files = sorted(tmp_path.rglob("*.nb?"))
    assert files
    for number, path in enumerate(files):
        path.write_bytes(path.read_bytes()[: 0 if number % 2 else 200])
    again = run(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert again.stdout.strip() == "3", again.stderr


# All cores ------------------------------------------------------------------------------------------------------------


def test_many_configurations_on_all_cores_are_the_same_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(16, 3000, 5000)
    arrangement = arrange(tokens, np.arange(0, 5001, 4))
    configurations = [resolve(Configuration((64, 64 * n, 4096), 4), Limits()) for n in range(2, 40)]

    def sums(totals: PlanTotals) -> dict[str, object]:
        return totals.record()

    wanted = [plan_totals(arrangement, one).record() for one in configurations]
    assert len({record["budget_tokens"] for record in wanted}) > 10
    for workers in (None, 1, 7):
        assert map_totals(arrangement, configurations, sums, workers) == wanted
