"""The definitions of `workbench.gaps` computed the slow way, from the text: no numpy, no sharing.

Times come from `json` with `Decimal`, intervals are walked one by one, every count is a set or a
loop over all events. Quadratic; for small traces.
"""

import fnmatch
import gzip
import json
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
SYNC_NAMES = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
    "hipDeviceSynchronize", "hipEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize",
)  # fmt: skip
GRAPH_NAMES = ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")


@dataclass
class Op:
    """One event, with its place in the file."""

    index: int
    cat: str
    name: str
    start: int
    end: int
    thread: tuple[Any, Any]
    args: dict[str, Any]
    call: "Op | None" = None
    key: object = None  # identity of the launch
    graph: bool = False

    @property
    def device(self) -> int:
        return int(self.args["device"])


def load(path: Path) -> list[Op]:
    """Complete events of a file, times in exact nanoseconds."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    content = json.loads(text, parse_float=Decimal)
    events = content["traceEvents"] if isinstance(content, dict) else content
    ops = []
    for index, event in enumerate(events):
        if event.get("ph") == "X":
            start, length = int(Decimal(event["ts"]) * 1000), int(Decimal(event["dur"]) * 1000)
            thread = (event["pid"], event["tid"])
            ops.append(Op(index, event["cat"], event["name"], start, start + length, thread, event.get("args", {})))
    return ops


def join(events: list[Op]) -> list[Op]:
    """GPU ops with their launch calls."""
    calls: dict[int, Op] = {}
    for event in sorted(events, key=lambda e: (e.start, e.index)):
        if event.cat in CALLS and event.args.get("correlation", 0) > 0:
            calls.setdefault(event.args["correlation"], event)
    ops = [event for event in events if event.cat in GPU]
    for op in ops:
        correlation = op.args.get("correlation", 0)
        op.call = calls.get(correlation) if correlation > 0 else None
        op.key = ("launch", correlation) if correlation > 0 else ("alone", op.index)
        op.graph = op.call.name in GRAPH_NAMES if op.call else op.args.get("graph node id", 0) > 0
    return ops


def rows(path: Path, pattern: str | None) -> list[dict[str, Any]]:
    """What `workbench analyze` must say about each window and device, times in nanoseconds."""
    events = load(path)
    ops = join(events)
    if pattern is None:
        spans = [("whole", min(op.start for op in ops), max(op.end for op in ops), 1)]
    else:
        found = [e for e in events if e.cat == "user_annotation" and fnmatch.fnmatchcase(e.name, pattern)]
        found.sort(key=lambda e: (e.start, e.index))
        spans = [(e.name, e.start, e.end, 0) for e in found]
    waits = [event for event in events if event.cat in CALLS and event.name in SYNC_NAMES]
    result = []
    for name, start, end, closed in spans:
        for device in sorted({op.device for op in ops}):
            here = [op for op in ops if op.device == device]
            row: dict[str, Any] = {"name": name, "device": device, "wall": end - start}
            row |= times(here, start, end) | counts(here, start, end + closed)
            row["syncs"] = sum(
                start <= wait.start < end + closed and waited_device(wait, ops) == device for wait in waits
            )
            result.append(row)
    return result


def times(ops: list[Op], start: int, end: int) -> dict[str, int]:
    """Busy and idle of one device between start and end."""
    result = dict.fromkeys(("busy", "lead", "launch_gap", "queue_gap", "intra_graph_gap", "tail"), 0)
    touching = [op for op in ops if op.end > start and op.start < end]
    if not touching:
        return result | {"lead": end - start, "idle": end - start}
    first = min(max(op.start, start) for op in touching)
    last = max(min(op.end, end) for op in touching)
    result["lead"], result["tail"] = first - start, end - last
    points = sorted({first, last} | {p for op in touching for p in (op.start, op.end) if first <= p <= last})
    for left, right in pairwise(points):
        if any(op.start <= left and op.end >= right for op in touching):
            result["busy"] += right - left
        else:
            result[cause(ops, left, right)] += right - left
    return result | {"idle": end - start - result["busy"]}


def cause(ops: list[Op], left: int, right: int) -> str:
    """Why the device is idle from left to right."""
    for key in {op.key for op in ops if op.graph}:
        nodes = [op for op in ops if op.graph and op.key == key]
        if min(op.start for op in nodes) <= left and max(op.end for op in nodes) >= right:
            return "intra_graph_gap"
    following = min((op for op in ops if op.start >= right), key=lambda op: (op.start, op.index))
    waited = following.call is not None and following.call.start > left
    return "launch_gap" if waited else "queue_gap"


def counts(ops: list[Op], start: int, stop: int) -> dict[str, int]:
    """Ops that start in the window, by kind; launches; ops that were launched in it and start later."""
    inside = [op for op in ops if start <= op.start < stop]
    return {
        "gpu_ops": len(inside),
        "kernels": sum(op.cat == "kernel" for op in inside),
        "memcpy_h2d": sum("HtoD" in op.name or "HostToDevice" in op.name for op in inside),
        "memcpy_d2h": sum("DtoH" in op.name or "DeviceToHost" in op.name for op in inside),
        "memset": sum(op.cat == "gpu_memset" for op in inside),
        "launches": len({op.key for op in inside}),
        "graph_launches": len({op.key for op in inside if op.graph}),
        "spilled_ops": sum(op.call is not None and start <= op.call.start < stop and op.start >= stop for op in ops),
    }


def waited_device(wait: Op, ops: list[Op]) -> int:
    """Device the waiting thread last launched on; the lowest one before any launch."""
    latest: tuple[int, int, int] | None = None
    for op in ops:
        call = op.call
        if call is not None and call.thread == wait.thread and call.start <= wait.start:
            candidate = (call.start, call.index, -op.device)
            latest = candidate if latest is None else max(latest, candidate)
    return min(op.device for op in ops) if latest is None else -latest[2]
