"""Run folders made up for tests: the stored schema filled with plausible numbers, and small Kineto traces.

The shapes are those of a real capture; the numbers come from a seeded generator, so a test may ask for
"the same run again", "the same run 10 % slower" or "the same run with one kernel more".
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.files import write_json
from workbench.run import (
    RUN_FILE,
    SCHEMA_VERSION,
    Arm,
    Batch,
    Call,
    CaptureCost,
    ConfigRecord,
    Environment,
    Equality,
    GpuState,
    ModelRecord,
    Run,
    Timing,
    TraceFile,
)

BASE_NS = 1_780_000_000_000_000_000  # an epoch time stamp, as Kineto writes them
KERNELS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
    "nvjet_tst_128x64_64x8_2x1_v_bz_TNT",
    "void flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<128>>>>(Params)",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
)
MEAN_US: dict[Arm, float] = {"eager_served": 24_000.0, "eager_fallback": 28_000.0, "graph": 4_800.0}


def make_environment(**changes: Any) -> Environment:
    """A machine with one H200; `changes` go to the GPU state when it has such a field."""
    gpu: dict[str, Any] = {
        "name": "NVIDIA H200",
        "driver": "580.95.05",
        "cuda_driver": "13.0",
        "compute_capability": "9.0",
        "memory_bytes": 150_754_820_096,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "max_sm_clock_mhz": 1980,
        "power_limit_w": 700.0,
        "power_w": 120.0,
        "temperature_c": 38,
        "other_processes": 0,
    }
    top: dict[str, Any] = {
        "python": "3.12.3",
        "system": "Linux 6.8 x86_64",
        "cpu": "Intel Xeon Platinum 8480C",
        "cpu_count": 16,
        "torch": "2.11.0",
        "cuda_runtime": "13.0",
        "vllm": "0.33.0",
        "vllm_distribution": "vllm",
        "vllm_commit": "0" * 7 + "a" * 33,
        "packages": {"numpy": "2.3.5", "nvidia-cudnn-cu12": "9.10.2.21"},
    }
    for key, value in changes.items():
        (gpu if key in gpu else top)[key] = value
    return Environment(**top, gpus=[GpuState(**gpu)])


def make_run(
    name: str = "ernie-base",
    *,
    seed: int = 0,
    repeats: int = 120,
    calls: int = 2,
    budgets: Sequence[int] = (128, 256, 512, 1024, 2048),
    scale: Mapping[Arm, float] | None = None,
    environment: Environment | None = None,
    traces: Sequence[TraceFile] = (),
    **changes: Any,
) -> Run:
    """A run of `calls` one-image calls with `repeats` samples per arm.

    `scale` multiplies an arm's mean; `changes` replace fields of the finished `Run`.
    """
    generator = np.random.default_rng(seed)
    timings: list[Timing] = []
    for call in range(calls):
        for position, (arm, mean) in enumerate(MEAN_US.items()):
            centre = mean * (scale or {}).get(arm, 1.0) * (1.0 + 0.5 * call)
            wall = centre * (1 + generator.gamma(2.0, 0.01, repeats))
            timings.append(
                Timing(
                    arm=arm,
                    call=call,
                    wall_us=[round(float(value), 3) for value in wall],
                    gpu_us=[round(float(value) * 0.9, 3) for value in wall],
                    order=[position + len(MEAN_US) * index for index in range(repeats)],
                )
            )
    tokens = [64 * (call + 1) for call in range(calls)]
    fitting = [min(budget for budget in budgets if budget >= count) for count in tokens]
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "workbench": "0.1.0",
        "created": "2026-11-29T12:00:00Z",
        "name": name,
        "replay": "cuda_graph",
        "environment": environment or make_environment(),
        "model": ModelRecord(
            key="ernie45_vl",
            architecture="Ernie4_5_VLMoeForConditionalGeneration",
            depth=32,
            width=1280,
            dtype="bfloat16",
            attention_backend="FLASH_ATTN",
            weights="dummy seed 0",
            weights_fingerprint="5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef",
            out_width=2560,
        ),
        "config": ConfigRecord(
            requested_budgets=list(budgets),
            requested_max_items=4,
            requested_max_frames=None,
            budgets=list(budgets),
            max_items=4,
            max_frames=0,
            min_budget=64,
            max_model_len=4096,
            max_num_batched_tokens=4096,
        ),
        "workload": "224x224, one image a call",
        "calls": [
            Call(
                modality="image",
                sizes=[(224, 224 * (call + 1), 1)],
                grids=[(1, 16 * (call + 1), 16)],
                tokens=[tokens[call]],
            )
            for call in range(calls)
        ],
        "batches": [Batch(call=call, items=[0], tokens=tokens[call], budget=fitting[call]) for call in range(calls)],
        "capture": [
            CaptureCost(budget=budget, seconds=0.08, pool_bytes=1 << 22, allocated_bytes=1 << 20, nodes=674)
            for budget in budgets
        ],
        "timings": timings,
        "phases": [],
        "traces": list(traces),
        "equality": [
            Equality(
                call=call,
                baseline="eager_served",
                bit_equal=call == 0,
                max_abs=0.0 if call == 0 else 0.03,
                relative_rms=0.0 if call == 0 else 0.004,
                min_cosine=1.0,
                finite=True,
            )
            for call in range(calls)
        ],
        "failures": [],
        "graph_hits": calls,
        "graph_misses": 0,
        "warmup": 5,
        "seed": 0,
    }
    return Run(**(fields | changes))


def kineto_events(
    kernels: Sequence[str],
    *,
    window: str,
    calls: int = 1,
    repeats: int = 2,
    graph: bool = False,
    syncs: int = 0,
    kernel_us: float = 4.0,
) -> list[dict[str, Any]]:
    """Events of `repeats` rounds over `calls` calls, each call running `kernels` in order.

    With `graph` all kernels of a call share the correlation of one `cudaGraphLaunch`.
    """
    events: list[dict[str, Any]] = [
        {
            "name": "process_name",
            "ph": "M",
            "ts": BASE_NS / 1000,
            "pid": 77,
            "tid": 0,
            "args": {"name": "python3"},
        },
        {
            "name": "process_labels",
            "ph": "M",
            "ts": BASE_NS / 1000,
            "pid": 0,
            "tid": 0,
            "args": {"labels": "GPU 0"},
        },
    ]

    def add(cat: str, name: str, ts: float, dur: float, gpu: bool, **args: Any) -> None:
        place = {"pid": 0, "tid": 7} if gpu else {"pid": 77, "tid": 77}
        stamp = round(BASE_NS / 1000 + ts, 3)
        events.append({"ph": "X", "cat": cat, "name": name, **place, "ts": stamp, "dur": round(dur, 3), "args": args})

    clock, correlation = 10.0, 100
    for _ in range(repeats):
        for call in range(calls):
            start, label = clock, f"{window}#{call}"
            clock += 5.0
            gpu_clock = clock + 8.0
            if graph:
                correlation += 1
                add("cuda_runtime", "cudaGraphLaunch", clock, 6.0, False, cbid=311, correlation=correlation)
            for node, kernel in enumerate(kernels):
                if not graph:
                    correlation += 1
                    add(
                        "cuda_runtime",
                        "cudaLaunchKernel",
                        clock,
                        3.0,
                        False,
                        cbid=211,
                        correlation=correlation,
                    )
                    clock += 7.0
                    gpu_clock = max(gpu_clock, clock)
                duration = kernel_us + 0.001 * node
                extra = {"graph node id": 1000 + node, "graph id": 3} if graph else {}
                add(
                    "kernel", kernel, gpu_clock, duration, True, device=0, stream=7, context=1,
                    correlation=correlation, grid=[8, 1, 1], block=[128, 1, 1], **extra,
                )  # fmt: skip
                gpu_clock += duration + 1.0
            for _ in range(syncs):
                correlation += 1
                add(
                    "cuda_runtime",
                    "cudaStreamSynchronize",
                    clock,
                    4.0,
                    False,
                    cbid=131,
                    correlation=correlation,
                )
                clock += 6.0
            clock = max(clock, gpu_clock) + 3.0
            add("user_annotation", label, start, clock - start, False)
            add("gpu_user_annotation", label, start + 13.0, gpu_clock - start - 14.0, True)
            clock += 20.0
    return events


def kineto_trace(events: Sequence[Mapping[str, Any]]) -> bytes:
    """A Kineto JSON document around `events`, as torch.profiler writes it."""
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132, "computeMajor": 9}],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "trace_id": "0C2A6F4E53D94D6FB0F1C7BE1BB9A5D1",
        "traceEvents": list(events),
        "traceName": "/home/alice/work/trace.json",
    }
    return json.dumps(document).encode()


def write_run(folder: Path, run: Run, traces: Mapping[str, bytes] | None = None) -> Path:
    """Write `run` and its traces (file name to JSON bytes; `.gz` names are compressed) as a run folder."""
    write_json(folder / RUN_FILE, run)
    for name, data in (traces or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return folder


def small_run(
    folder: Path,
    name: str = "ernie-base",
    *,
    graph_kernels: Sequence[str] = KERNELS * 8,
    eager_syncs: int = 0,
    **options: Any,
) -> Path:
    """A complete run folder: `make_run(name, **options)` with one graph and one eager trace."""
    calls = int(options.get("calls", 2))
    records, files = [], {}
    for arm, graph, syncs in (("graph", True, 0), ("eager_served", False, eager_syncs)):
        file, window = f"traces/{arm}.json.gz", f"encoder.{arm}"
        kernels = graph_kernels if graph else [*KERNELS, *graph_kernels]
        files[file] = kineto_trace(kineto_events(kernels, window=window, calls=calls, graph=graph, syncs=syncs))
        records.append(
            TraceFile(
                file=file,
                arm="graph" if graph else "eager_served",
                activities=["cpu", "cuda"],
                repeats=2,
                window=window,
                wall_us=[5100.0, 5080.0],
            )
        )
    return write_run(folder, make_run(name, traces=records, **options), files)
