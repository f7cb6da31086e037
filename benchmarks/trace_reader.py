"""Events per second, peak memory and time to the first table of trace readers on the same file.

A recorded trace (or a synthetic one) is repeated, each copy later and under new correlations, until it
has the wanted number of events. Every reader then runs in a process of its own, alone, from the
file on disk (in the page cache) to the table a first figure needs: busy and idle time of the whole
span. Seconds count from after the imports; memory is the process's largest resident size, imports
included, with what they took beside it. A reader that needs more than is available when it begins, less
2 GiB, or longer than 15 minutes, is ended, and its row says so.

Not measured: imports, the one-time compilation of the workbench's scanner (done before), drawing.

HolisticTraceAnalysis and Perfetto are no dependencies: `--peers FOLDER` makes a virtual environment with
both there, or uses the one it finds; without it they count as missing where they are not importable.

    python -m benchmarks.trace_reader --events 1000000 --peers build/peers --out trace_reader.json
"""

import argparse
import gzip
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.readers import READERS
from workbench.files import write_json

EVENTS = 1_000_000
RECORDINGS = Path(__file__).parents[1] / "workbench" / "recordings"
RECORDED_EAGER = "*-224/traces/eager_*.json.gz"  # the pull request's workload: one 224 x 224 image a call
TIME_LIMIT_S = 900
SPARED_BYTES = 2 * 2**30  # of the memory that is available, left to whatever else runs
# HTA 0.5.0 stores wide numbers into narrow columns, which pandas 3 refuses.
PEERS = ("HolisticTraceAnalysis==0.5.*", "pandas<3", "perfetto")
KEPT = re.compile(
    r'"cat":\s*"(kernel|gpu_memcpy|gpu_memset|cuda_runtime|cuda_driver|cpu_op|user_annotation|gpu_user_annotation)"'
)
# What differs between two copies: times (a point inside) and ids.
_VARYING = re.compile(r'("ts":\s*)(\d+)\.(\d{3})|("(?:correlation|External id|id)":\s*)(\d+)')
_GAP_NS = 1_000_000  # between copies


@dataclass(frozen=True)
class Scaled:
    """A trace file made for the benchmark; `kept_bytes` is the text of the events the reader keeps."""

    path: Path
    events: int
    kept_bytes: int
    bytes: int


def source_text(path: Path | None) -> tuple[str, str]:
    """Text of the trace to repeat and where it comes from: as given, the recorded eager one, synthetic."""
    if path is None:
        path = max(RECORDINGS.glob(RECORDED_EAGER), key=lambda recorded: recorded.stat().st_size, default=None)
    if path is None:
        from tests.kineto import workload

        return workload(40).text(), "synthetic (tests.kineto.workload)"
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode(), path.name


def split_events(text: str) -> tuple[str, list[str]]:
    """The text before the first event and the text of every event."""
    begin = text.index("[", text.index('"traceEvents"')) + 1
    decoder, position = json.JSONDecoder(), begin
    events: list[str] = []
    while True:
        position = re.compile(r"[\s,]*").match(text, position).end()  # type: ignore[union-attr]
        if text[position] == "]":
            return text[:begin], events
        _, end = decoder.raw_decode(text, position)
        events.append(text[position:end])
        position = end


def scale(text: str, wanted: int, path: Path) -> Scaled:
    """Repeat the events of a trace until there are `wanted` complete ones that the reader keeps."""
    head, events = split_events(text)
    kept = [event for event in events if '"ph": "X"' in event and KEPT.search(event)]
    copies = max(1, -(-wanted // len(kept)))
    body = ",\n".join(events)
    pieces, numbers, steps, position = [], [], [], 0
    ids = [int(match[5]) for match in _VARYING.finditer(body) if match[5]]
    times = [int(match[2]) * 1000 + int(match[3]) for match in _VARYING.finditer(body) if match[2]]
    period, stride = max(times) - min(times) + _GAP_NS, max(ids, default=0) + 1
    for match in _VARYING.finditer(body):
        pieces.append(body[position : match.start()].replace("%", "%%"))
        if match[2]:
            pieces.append(match[1] + "%d.%03d")
            numbers += [int(match[2]) * 1000 + int(match[3])] * 2
            steps += [period] * 2
        else:
            pieces.append(match[4] + "%d")
            numbers.append(int(match[5]))
            steps.append(stride)
        position = match.end()
    template = "".join(pieces) + body[position:].replace("%", "%%")
    first, step = np.array(numbers), np.array(steps)
    pairs = np.flatnonzero(step == period)
    whole, part = pairs[::2], pairs[1::2]
    with path.open("w") as handle:
        handle.write(head)
        for copy in range(copies):
            values = first + copy * step
            values[whole] //= 1000
            values[part] %= 1000
            handle.write((",\n" if copy else "") + template % tuple(values.tolist()))
        handle.write('\n],"traceName": "scaled.json"}')
    kept_bytes = copies * sum(map(len, kept))
    return Scaled(path, copies * len(kept), kept_bytes, path.stat().st_size)


def run_reader(reader: str, paths: Sequence[Path], python: str = sys.executable) -> dict[str, Any]:
    """Run one reader in a process of its own with a limit on its memory and time."""
    limit_bytes = _available_bytes() - SPARED_BYTES
    limit = f"{limit_bytes / 2**30:.1f} GiB"
    script = Path(__file__).with_name("readers.py")
    command = [python, *(["-m", "benchmarks.readers"] if python == sys.executable else [str(script)])]

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out all the same, this process goes

    try:
        done = subprocess.run(
            [*command, reader, *map(str, paths)],
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
            cwd=script.parents[1],
            preexec_fn=confine,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {TIME_LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    try:
        result: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        if "MemoryError" in done.stderr or done.returncode in (-signal.SIGKILL, -signal.SIGABRT):
            return {"failed": f"more memory than the {limit} it was given"}
        return {"failed": f"exit code {done.returncode}: {done.stderr.strip()[-200:]}"}
    if "emory" in result.get("failed", ""):
        result["failed"] = f"more memory than the {limit} it was given"
    return result


def row(reader: str, result: dict[str, Any], scaled: Scaled, files: int = 1) -> dict[str, Any]:
    """One row of the table: rates over all complete events that are kept."""
    if "table_s" not in result:
        return {"reader": reader, **result}
    events = files * scaled.events
    return {
        "reader": reader,
        "events_per_s_load": events / result["load_s"],
        "events_per_s_table": events / result["table_s"],
        "events_per_cpu_s_table": events / result["table_cpu_s"],
        "mb_per_s": files * scaled.bytes / result["load_s"] / 1e6,
        "peak_over_kept_text": result["peak_bytes"] / (files * scaled.kept_bytes),
        **result,
    }


def measure(events: int, source: Path | None, folder: Path, peers: str, readers: Sequence[str]) -> dict[str, Any]:
    """Make the file and run every reader on it, then ours on gzip and on two ranks at once."""
    text, name = source_text(source)
    scaled = scale(text, events, folder / "scaled.json")
    run_reader("workbench", [write_small(text, folder)])  # compiles the scanner
    rows = []
    for reader in readers:
        python = sys.executable if reader in ("workbench", "json.load") else peers
        rows.append(row(reader, run_reader(reader, [scaled.path], python), scaled))
    packed = folder / "scaled.json.gz"
    with scaled.path.open("rb") as plain, gzip.open(packed, "wb", compresslevel=5) as target:
        shutil.copyfileobj(plain, target, 2**22)
    gz = run_reader("workbench", [packed])
    rows.append(row("workbench, gzip", gz, scaled))
    both = run_reader("workbench", [scaled.path, scaled.path])
    rows.append(row("workbench, two ranks", both, scaled, files=2))
    return {
        "source": name,
        "events": scaled.events,
        "bytes": scaled.bytes,
        "gzip_bytes": packed.stat().st_size,
        "kept_bytes": scaled.kept_bytes,
        "rows": rows,
        "comparison": compare(rows),
    }


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Ours over HolisticTraceAnalysis: rate to the table, memory, and the busy time it loses."""
    by_name = {row["reader"]: row for row in rows if "table_s" in row}
    ours, theirs = by_name.get("workbench"), by_name.get("HolisticTraceAnalysis")
    if ours is None or theirs is None:
        return {}
    return {
        "rate_over_hta": ours["events_per_s_table"] / theirs["events_per_s_table"],
        "cpu_rate_over_hta": ours["events_per_cpu_s_table"] / theirs["events_per_cpu_s_table"],
        "memory_under_hta": theirs["peak_bytes"] / ours["peak_bytes"],
        "busy_lost_by_hta": 1 - theirs["busy_us"] / ours["busy_us"],
    }


def peers_python(folder: Path | None) -> str:
    """The Python that has the other readers, installed into `folder` when it is new."""
    if folder is None:
        return sys.executable
    python, finished = folder / "bin" / "python", folder / "finished"
    if not finished.exists():  # an install that was stopped half-way is begun anew
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS], check=True)
        finished.touch()
    return str(python)


def write_small(text: str, folder: Path) -> Path:
    """The unscaled trace, for the run that compiles."""
    path = folder / "small.json"
    path.write_text(text)
    return path


def _available_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=EVENTS, help="complete events in the scaled trace")
    parser.add_argument("--source", type=Path, help="trace to repeat; else the recorded eager one")
    parser.add_argument("--peers", type=Path, help="virtual environment with HTA and Perfetto; made if new")
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--folder", type=Path, help="where the scaled files go; else a temporary folder")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        peers = peers_python(options.peers)
        result = measure(options.events, options.source, Path(folder), peers, options.readers)
    write_json(options.out, result)
    for line in result["rows"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()})
    print(result["comparison"])


if __name__ == "__main__":
    main()
