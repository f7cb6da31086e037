"""One reader of a trace, measured in the process it is run in; `benchmarks.trace_reader` starts it.

    python benchmarks/readers.py READER TRACE [TRACE ...]

Only the standard library is imported at the top, so that a reader's own Python can run it. The last
line printed is a JSON object; `busy_us` is the busy time the reader finds between the first GPU op
and the last.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Clock:
    """Wall and CPU seconds since the reader's imports were done, and the memory they took."""

    def __init__(self) -> None:
        self.imported_bytes = peak_bytes()
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def result(self, name: str) -> Result:
        """The seconds so far, as two fields."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return {f"{name}_s": wall, f"{name}_cpu_s": cpu, "imported_bytes": self.imported_bytes}


def peak_bytes() -> int:
    """Largest resident size of this process so far (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def workbench(paths: list[str]) -> Result:
    """This project: columns, then windows, gaps, phases, kernels and replays."""
    from pathlib import Path

    from workbench import scan  # noqa: F401  loads the compiled code
    from workbench.gaps import analyze
    from workbench.trace import read_traces

    clock = Clock()
    traces = read_traces([Path(path) for path in paths])
    loaded = clock.result("load")
    analyses = [analyze(trace) for trace in traces]
    return {
        **loaded,
        **clock.result("table"),
        "kept_events": sum(map(len, traces)),
        "busy_us": sum(analysis.total.busy_us for analysis in analyses),
    }


def json_load(paths: list[str]) -> Result:
    """Python's json, then a loop for the busy time (floats, as it reads them)."""
    clock = Clock()
    busy = 0.0
    loaded: Result = {}
    for path in paths:
        with open(path, encoding="utf-8") as handle:
            events = json.load(handle)["traceEvents"]
        loaded = clock.result("load")
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in GPU)
        reach = spans[0][0]
        for start, end in spans:
            busy += max(end - max(start, reach), 0)
            reach = max(reach, end)
    return {**loaded, **clock.result("table"), "busy_us": busy}


def hta(paths: list[str]) -> Result:
    """HolisticTraceAnalysis: load, then its temporal and idle breakdowns."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found, unused-ignore]

    clock = Clock()
    analysis = TraceAnalysis(trace_files=dict(enumerate(paths)), trace_dir="")
    loaded = clock.result("load")
    times = analysis.get_temporal_breakdown(visualize=False)
    analysis.get_idle_time_breakdown(visualize=False)
    whole, idle = times["kernel_time(us)"].sum(), times["idle_time(us)"].sum()
    return {**loaded, **clock.result("table"), "busy_us": float(whole - idle)}


def perfetto(paths: list[str]) -> Result:
    """Perfetto's TraceProcessor: load, then the sum of GPU slices (it has no union of its own)."""
    from perfetto.trace_processor import TraceProcessor  # type: ignore[import-not-found, unused-ignore]

    clock = Clock()
    try:
        processor = TraceProcessor(trace=paths[0])
    except subprocess.CalledProcessError:
        raise RuntimeError("it downloads its binary at first use, which failed here") from None
    with processor:
        loaded = clock.result("load")
        rows = processor.query(f"select sum(dur) as busy from slice where category in {GPU}")
        total = next(iter(rows)).busy
    return {**loaded, **clock.result("table"), "summed_us": total / 1000}


READERS: dict[str, Callable[[list[str]], Result]] = {
    "workbench": workbench,
    "json.load": json_load,
    "HolisticTraceAnalysis": hta,
    "Perfetto TraceProcessor": perfetto,
}


def main() -> None:
    """Run one reader and print what it took."""
    try:
        result = READERS[sys.argv[1]](sys.argv[2:])
    except ImportError as error:
        result = {"missing": str(error)}
    except MemoryError:
        result = {"failed": "out of memory"}
    except Exception as error:  # noqa: BLE001  another project's failure is a row of the table
        result = {"failed": f"{type(error).__name__}: {error}"[:300]}
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(json.dumps({**result, "peak_bytes": max(peak_bytes(), children)}))


if __name__ == "__main__":
    main()
