"""Writes traces as torch's Kineto does, from a script of launches: the tests' own instrument.

Times are integer nanoseconds. Layout, key names and their order follow the traces of torch 2.11 on
CUDA: one key per line, microseconds with three decimals, all nodes of a graph replay under the
correlation of its `cudaGraphLaunch`, flow arrows and process metadata between the events. Graph ids,
which newer versions of Kineto add, are written for a `graph` other than 0.
"""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PID = 4242
GEMM = (
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<"
    "cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gemm::collective::"
    "CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4>>>>>(Params)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)


def microseconds(ns: int) -> str:
    """Kineto's spelling: whole microseconds, a point, three digits."""
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


@dataclass
class Kineto:
    """A trace in the making. Every method that adds an op returns its correlation."""

    rank: int | None = 0
    events: list[str] = field(default_factory=list)
    correlation: int = 100

    def event(self, cat: str, name: str, start: int, dur: int, pid: object, tid: object, args: dict[str, Any]) -> None:
        """Add a complete event."""
        inside = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in args.items())
        self.events.append(
            f'  {{\n    "ph": "X",\n    "cat": "{cat}",\n    "name": {json.dumps(name)},\n'
            f'    "pid": {json.dumps(pid)},\n    "tid": {json.dumps(tid)},\n'
            f'    "ts": {microseconds(start)},\n    "dur": {microseconds(dur)}\n    ,\n'
            f'    "args": {{\n      {inside}\n    }}\n  }}'
        )

    def arrow(self, start: int, correlation: int, pid: int, tid: int, phase: str) -> None:
        """Add one end of a flow arrow from a launch to its op."""
        bound = ', "bp": "e"' if phase == "f" else ""
        self.events.append(
            f'  {{\n    "ph": "{phase}", "id": {correlation}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {microseconds(start)},\n    "cat": "ac2g", "name": "ac2g"{bound}\n  }}'
        )

    def annotate(self, name: str, start: int, end: int, tid: int = PID) -> None:
        """Add a `record_function` range."""
        self.event("user_annotation", name, start, end - start, PID, tid, {"External id": 1, "Ev Idx": 0})

    def cpu_op(self, name: str, start: int, end: int, tid: int = PID) -> None:
        """Add an operator with the arguments that `record_shapes` writes."""
        shapes = {"Input type": ["c10::BFloat16", ""], "Input Dims": [[256, 1280], []], "Ev Idx": 7}
        self.event("cpu_op", name, start, end - start, PID, tid, {"External id": 2, "Record function id": 0, **shapes})

    def runtime(self, name: str, start: int, dur: int, tid: int = PID, cat: str = "cuda_runtime") -> int:
        """Add a runtime call under a new correlation."""
        self.correlation += 1
        self.event(cat, name, start, dur, PID, tid, {"External id": 3, "cbid": 211, "correlation": self.correlation})
        return self.correlation

    def sync(self, start: int, dur: int, name: str = "cudaStreamSynchronize", tid: int = PID) -> int:
        """Add a blocking call."""
        return self.runtime(name, start, dur, tid)

    def gpu(
        self,
        start: int,
        dur: int,
        correlation: int | None,
        name: str = ADD,
        cat: str = "kernel",
        *,
        device: int = 0,
        stream: int = 7,
        node: int = 0,
        graph: int = 0,
    ) -> None:
        """Add a GPU op; `correlation` None leaves it out."""
        args: dict[str, Any] = {"External id": 3, "device": device, "context": 1, "stream": stream}
        if correlation is not None:
            args["correlation"] = correlation
        if cat == "kernel":
            args |= {
                "queued": 0, "registers per thread": 32, "shared memory": 0, "blocks per SM": 4.8,
                "warps per SM": 19.4, "grid": [640, 1, 1], "block": [128, 1, 1],
                "est. achieved occupancy %": 30,
            }  # fmt: skip
        else:
            args |= {"bytes": 2048, "memory bandwidth (GB/s)": 1.5}
        if node:
            args |= {"graph id": graph, "graph node id": node}
        self.event(cat, name, start, dur, device, stream, args)
        if correlation is not None:
            self.arrow(start, correlation, device, stream, "f")

    def kernel(self, launch: int, start: int, dur: int, name: str = ADD, *, device: int = 0, stream: int = 7) -> int:
        """Add a launch call of 4 us and its kernel."""
        correlation = self.runtime("cudaLaunchKernel", launch, 4000)
        self.arrow(launch, correlation, PID, PID, "s")
        self.gpu(start, dur, correlation, name, device=device, stream=stream)
        return correlation

    def copy(self, launch: int, start: int, dur: int, kind: str = "HtoD", *, device: int = 0) -> int:
        """Add an asynchronous copy; `kind` as Kineto spells it: HtoD, DtoH, DtoD."""
        ends = {"HtoD": "Pageable -> Device", "DtoH": "Device -> Pageable", "DtoD": "Device -> Device"}[kind]
        correlation = self.runtime("cudaMemcpyAsync", launch, 4000)
        self.gpu(start, dur, correlation, f"Memcpy {kind} ({ends})", "gpu_memcpy", device=device)
        return correlation

    def memset(self, launch: int, start: int, dur: int, *, device: int = 0) -> int:
        """Add an asynchronous memset."""
        correlation = self.runtime("cudaMemsetAsync", launch, 4000)
        self.gpu(start, dur, correlation, "Memset (Device)", "gpu_memset", device=device)
        return correlation

    def replay(
        self,
        launch: int,
        dur: int,
        nodes: list[tuple[int, int]],
        *,
        graph: int = 11,
        name: str = "cudaGraphLaunch",
        device: int = 0,
    ) -> int:
        """Add a graph launch and its kernels, each (start, duration)."""
        correlation = self.runtime(name, launch, dur)
        for index, (start, length) in enumerate(nodes):
            node = (graph << 32) + index + 1 if graph else 0
            self.gpu(start, length, correlation, GEMM, device=device, node=node, graph=graph)
        return correlation

    def text(self, form: str = "object", unit: str = "ms") -> str:
        """The whole file, as an object or a bare array."""
        meta = [
            f'  {{\n    "ph": "M",\n    "name": "process_name",\n    "ts": 0.000,\n    "pid": {PID},\n'
            '    "tid": 0,\n    "args": {\n      "name": "python"\n    }\n  }'
        ]
        end = ['  {\n    "ph": "i",\n    "s": "g",\n    "name": "Record Window End",\n    "pid": "",\n'
               '    "tid": "",\n    "ts": 1.000\n  }']  # fmt: skip
        body = ",\n".join(meta + self.events + end)
        if form == "array":
            return f"[\n{body}\n]\n"
        distributed = (
            f'"distributedInfo": {{"backend": "nccl", "rank": {self.rank}, "world_size": 2}},\n'
            if self.rank is not None
            else ""
        )
        return (
            ' {\n    "schemaVersion": 1,\n    "deviceProperties": [\n    {"id": 0, "name": "NVIDIA H200", '
            f'"numSms": 132}}\n    ],\n    {distributed}    "displayTimeUnit": "{unit}",\n'
            '    "baseTimeNanoseconds": 1790857026000000000,\n    "traceEvents": [\n    \n'
            f'{body}\n  ],"traceName": "trace.json" }}'
        )

    def write(self, path: Path, form: str = "object") -> Path:
        """Write the trace; gzip when the name ends in .gz."""
        data = self.text(form).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path


def workload(calls: int, kernels: int = 100, nodes: int = 100) -> Kineto:
    """`calls` eager calls (host-bound, a sync each) and as many graph calls; about
    calls * (4 * kernels + 2 * nodes) events with arrows and operators."""
    trace, now = Kineto(), 5_119_820_687_000
    for call in range(calls):
        begin = now
        for index in range(kernels):
            trace.cpu_op("aten::add", now, now + 9000)
            trace.kernel(now + 2000, now + 8000, 2345, GEMM if index % 4 == 0 else ADD)
            now += 10_000
        trace.sync(now, 5000)
        now += 6000
        trace.annotate(f"eager#{call}", begin, now)
        begin = now + 1000
        trace.copy(begin, begin + 5000, 1100)
        trace.replay(begin + 9000, 20_000, [(begin + 12_000 + 3000 * i, 2501 + i % 7) for i in range(nodes)])
        now = begin + max(12_000 + 3000 * nodes, 31_000)
        trace.sync(begin + 30_000, now - begin - 30_000)
        now += 1000
        trace.annotate(f"graph#{call}", begin, now)
        now += 1000
    return trace
