"""Hardware counters of an encoder call, per kernel family: bytes from memory, tensor cores, multiprocessors.

    from workbench.encoder.counters import collect, missing

    reason = missing()  # None, or one sentence: what is missing here
    table = collect(SessionOptions(), Configuration((256,), 4), [(1, 16, 16)], Path("counters"))

nsight-python (0.9.6 or 1.x) runs the call under Nsight Compute in child processes of a child process, so notebooks
work; graph replays are profiled by node, Nsight Compute's default. Its report is then read through `ncu --import
--csv`, the same in all versions. Every kernel is replayed several times with cold caches, so durations are those of
kernels alone, longer than in a running server, and gaps between kernels are not in them.

Counters are sums, so they add up over kernels; shares are made from the sums.
"""

import contextlib
import csv
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import workbench
from workbench.errors import WorkbenchError
from workbench.files import read_versioned, refuse_occupied, replacing_folder, write_json
from workbench.kernels import FAMILIES, Family, family, short_name
from workbench.roofline import device
from workbench.run import RECORDINGS, Arm, Environment, Record

if TYPE_CHECKING:
    from workbench.budgets import Configuration
    from workbench.encoder.session import Grid, SessionOptions

SCHEMA_VERSION = 1
RESULT_FILE = "counters.json"
DURATION, DRAM = "gpu__time_duration.sum", "dram__bytes.sum"
TENSOR, ACTIVE, ELAPSED = "sm__pipe_tensor_cycles_active.sum", "sm__cycles_active.sum", "sm__cycles_elapsed.sum"
# Of a multiprocessor; the counter adds up the cycles of each. On an H200 a core does 1,024 bfloat16 operations a cycle
# (989e12 a second, by the data sheet), and a product of 256 x 1280 with 1280 x 3840 counts 2,457,600, exactly as many.
_TENSOR_CORES = 4
METRICS = (DURATION, DRAM, TENSOR, ACTIVE, ELAPSED)
_SCALES = {
    "": 1.0, "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "cycle": 1.0,
}  # fmt: skip
ARMS: tuple[Arm, ...] = ("eager_served", "graph")
_CHILD = "import sys\nfrom workbench.encoder.counters import profile_main\nprofile_main(sys.argv[1])\n"
_PERMISSION = "ERR_NVGPUCTRPERM"


class KernelCounters(Record, frozen=True):
    """One kernel launch, or one kernel node of a graph."""

    name: str
    duration_us: float
    dram_bytes: float
    tensor_cycles: float
    active_cycles: float
    elapsed_cycles: float


class FamilyCounters(Record, frozen=True):
    """The kernels of one family in one arm.

    Attributes:
        tensor: share of the tensor cores' cycles in which they worked.
        active: share of the multiprocessors' cycles in which anything did.
        bandwidth: bytes per second.
        roofline: the larger of `tensor` and bandwidth over the GPU's (`workbench.roofline`, which a kernel that only
            reads may pass by a few percent); None for a GPU that is not known.
    """

    family: Family
    kernels: int
    duration_us: float
    dram_bytes: float
    bandwidth: float
    tensor: float
    active: float
    roofline: float | None


class ArmCounters(Record, frozen=True):
    """One arm: all kernels in launch order."""

    arm: Arm
    kernels: list[KernelCounters]


class Counters(Record, frozen=True):
    """What was counted."""

    schema_version: int
    workbench: str
    environment: Environment
    nsight_python: str
    model: str
    budgets: list[int]
    max_items: int
    grids: list[tuple[int, int, int]]
    arms: list[ArmCounters]

    def families(self, arm: ArmCounters) -> list[FamilyCounters]:
        """Add up the kernels of each family of one of the arms, longest first."""
        gpus = self.environment.gpus
        return by_family(arm.kernels, gpus[0].name if gpus else "")


def read_counters(folder: Path) -> Counters:
    """Read `folder`/counters.json.

    Raises:
        WorkbenchError: no counters there, or of another schema version.
    """
    path = folder / RESULT_FILE
    if not path.is_file():
        raise WorkbenchError(f"{folder} has no {RESULT_FILE}; make one with `workbench counters` on a GPU")
    return read_versioned(path, Counters, SCHEMA_VERSION)


def find_counters(model: str, run_folder: Path | None = None) -> Counters | None:
    """Return the counters in a run's folder or in a folder inside it, else the model's shipped ones, else None.

    Raises:
        WorkbenchError: see `read_counters`.
    """
    own = [] if run_folder is None else [run_folder / RESULT_FILE, *sorted(run_folder.glob(f"*/{RESULT_FILE}"))]
    paths = [*own, *sorted(RECORDINGS.glob(f"*/{RESULT_FILE}"))]
    found = (read_counters(path.parent) for path in paths if path.is_file())
    return next((counters for counters in found if counters.model == model), None)


# Reading and adding up ------------------------------------------------------------------------------------------


def parse_raw(text: str) -> list[KernelCounters]:
    """Read `ncu --import REPORT --csv --page raw`: a row of names, a row of units, a row per kernel.

    Raises:
        WorkbenchError: no such table, a metric that is missing, or a value that is no number.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if '"Kernel Name"' in line), None)
    if start is None or start + 1 >= len(lines):
        raise WorkbenchError(
            "Nsight Compute's report holds no kernel; the call launched none, or the report is damaged"
        )
    rows = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    names, units = rows[0], rows[1]
    absent = [metric for metric in METRICS if metric not in names]
    if absent:
        raise WorkbenchError(
            f"Nsight Compute's report lacks {absent[0]}; this GPU or this ncu does not have the metric"
        )
    places = {metric: names.index(metric) for metric in METRICS}
    kernel = names.index("Kernel Name")
    return [_kernel(row, units, kernel, places) for row in rows[2:] if len(row) == len(names)]


def _kernel(row: Sequence[str], units: Sequence[str], kernel: int, places: Mapping[str, int]) -> KernelCounters:
    values = {}
    for metric, place in places.items():
        unit = units[place]
        try:
            values[metric] = float(row[place].replace(",", "")) * _SCALES[unit]
        except (ValueError, KeyError):
            raise WorkbenchError(
                f"{metric} of kernel {short_name(row[kernel])} is {row[place]!r} in {unit!r}, not a number in a known "
                "unit; profile again"
            ) from None
    return KernelCounters(
        name=row[kernel],
        duration_us=values[DURATION] / 1e3,
        dram_bytes=values[DRAM],
        tensor_cycles=values[TENSOR],
        active_cycles=values[ACTIVE],
        elapsed_cycles=values[ELAPSED],
    )


def by_family(kernels: Iterable[KernelCounters], gpu: str = "") -> list[FamilyCounters]:
    """Add up the kernels of each family, longest first.

    Args:
        gpu: name of the GPU, for what bounds it.
    """
    groups: dict[Family, list[KernelCounters]] = {name: [] for name in FAMILIES}
    for kernel in kernels:
        groups[family(kernel.name)].append(kernel)
    bound = device(gpu)
    peak = None if bound is None else bound.bytes_per_second
    made = [_family(name, group, peak) for name, group in groups.items() if group]
    return sorted(made, key=lambda row: -row.duration_us)


def _family(name: Family, kernels: Sequence[KernelCounters], peak: float | None) -> FamilyCounters:
    duration = sum(kernel.duration_us for kernel in kernels)
    elapsed = sum(kernel.elapsed_cycles for kernel in kernels)
    moved = sum(kernel.dram_bytes for kernel in kernels)
    bandwidth = moved / duration * 1e6 if duration else 0.0
    tensor = sum(kernel.tensor_cycles for kernel in kernels) / (_TENSOR_CORES * elapsed) if elapsed else 0.0
    return FamilyCounters(
        family=name,
        kernels=len(kernels),
        duration_us=duration,
        dram_bytes=moved,
        bandwidth=bandwidth,
        tensor=tensor,
        active=sum(kernel.active_cycles for kernel in kernels) / elapsed if elapsed else 0.0,
        roofline=None if peak is None else max(tensor, bandwidth / peak),
    )


# Collecting -----------------------------------------------------------------------------------------------------


def missing() -> str | None:
    """Return one sentence that says what counters need and this machine has not; None: nothing.

    Whether the driver permits them shows only when they are read; `collect` then says so.
    """
    from workbench.environment import gpus

    if not gpus():
        return "hardware counters need an NVIDIA GPU, and none is visible; run this where one is"
    if importlib.util.find_spec("nsight") is None:
        return "hardware counters need nsight-python; install the extra `counters`"
    if shutil.which("ncu") is None:
        return "hardware counters need Nsight Compute; put its `ncu` on the PATH"
    return None


def collect(
    options: "SessionOptions",
    configuration: "Configuration",
    grids: Sequence["Grid"],
    out: Path,
    *,
    arms: Sequence[Arm] = ARMS,
    overwrite: bool = False,
    seconds: float = 300.0,
) -> Counters:
    """Profile one call of `grids` in every arm and write `out`/counters.json and Nsight Compute's reports.

    Raises:
        WorkbenchError: see `missing`; the driver does not permit counters; the profiled process failed.
    """
    from workbench.environment import environment

    reason = missing()
    if reason is not None:
        raise WorkbenchError(reason)
    refuse_occupied(out, overwrite)
    machine = environment()
    job = _job(options, configuration, grids)
    counted = []
    with replacing_folder(out, overwrite) as folder:
        for arm in arms:
            report = folder / f"{arm}.ncu-rep"
            _profile(job | {"arm": arm}, report, seconds)
            counted.append(ArmCounters(arm=arm, kernels=parse_raw(_imported(report))))
        counters = Counters(
            schema_version=SCHEMA_VERSION,
            workbench=workbench.__version__,
            environment=machine,
            nsight_python=metadata.version("nsight-python"),
            model=options.model,
            budgets=list(configuration.budgets),
            max_items=configuration.max_items,
            grids=list(grids),
            arms=counted,
        )
        write_json(folder / RESULT_FILE, counters)
    return counters


def _job(options: "SessionOptions", configuration: "Configuration", grids: Sequence["Grid"]) -> dict[str, Any]:
    import dataclasses

    return {
        "options": options.plain(),
        "configuration": dataclasses.asdict(configuration),
        "grids": [list(grid) for grid in grids],
    }


def _profile(job: Mapping[str, Any], report: Path, seconds: float) -> None:
    """Run `profile_main` in a process of its own, where nsight-python starts Nsight Compute, and keep its report."""
    with tempfile.TemporaryDirectory() as scratch:
        # Its folder comes first on the path of imports, so its name is no module's: torch imports `profile`.
        script, file = Path(scratch) / "workbench_counters.py", Path(scratch) / "job.json"
        script.write_text(_CHILD)
        file.write_text(json.dumps(job))
        path = os.pathsep.join([str(Path(workbench.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with (Path(scratch) / "told.log").open("wb") as told:
            process = subprocess.Popen(
                [sys.executable, str(script), str(file)],
                cwd=scratch,
                env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)},
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=told,
                start_new_session=True,  # so that ncu ends with it
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise WorkbenchError(
                    f"counting {job['arm']} took more than {seconds:.0f} s; reduce the depth or the items"
                ) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        reports = list(Path(scratch).glob("*.ncu-rep"))
        if not reports:
            logs = sorted(Path(scratch).glob("*.log"))
            raise WorkbenchError(_failure("".join(log.read_text(errors="replace") for log in logs)))
        shutil.move(reports[0], report)


def _failure(told: str) -> str:
    """Say in one sentence why there is no report."""
    if _PERMISSION in told:
        return (
            "the driver does not permit hardware counters to this user; run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "LibraryNotLoaded" in told:
        return "Nsight Compute cannot reach the driver's profiling library here (as under gVisor); use another machine"
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    # What ncu, or else the profiled program, calls an error says more than nsight-python's advice behind it. That the
    # program failed is no reason.
    ncu = [line for line in lines if line.startswith("==ERROR==") and "application returned" not in line]
    raised = [line for line in lines if re.match(r"[\w.]+Error: .", line)]
    said = (ncu or raised or lines or ["it said nothing"])[-1]
    return f"Nsight Compute made no report: {said[:300]}"


def _imported(report: Path) -> str:
    made = subprocess.run(
        ["ncu", "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise WorkbenchError(f"ncu cannot read its own report: {(made.stdout + made.stderr).strip()[-300:]}")
    return made.stdout


def profile_main(job_file: str) -> None:
    """Profile one arm with nsight-python; it starts this script again, under ncu."""
    import nsight

    from workbench.budgets import Configuration
    from workbench.encoder.session import SessionOptions, open_session

    job = json.loads(Path(job_file).read_text())
    asked = job["configuration"]
    configuration = Configuration(tuple(asked["budgets"]), asked["max_items"], asked["max_frames"])

    def encode() -> None:
        with open_session(SessionOptions.from_plain(job["options"]), configuration) as session:
            inputs = session.inputs([tuple(grid) for grid in job["grids"]])
            session.capture()
            for _ in range(2):  # lazily loaded kernels, and cuBLAS's choices
                session.run(job["arm"], inputs)
            session.synchronize()
            with nsight.annotate(job["arm"]):
                session.run(job["arm"], inputs)
                session.synchronize()

    nsight.analyze.kernel(**analyzer_options(nsight.analyze.kernel))(encode)()


def analyzer_options(kernel: Any) -> dict[str, Any]:
    """Return the keyword arguments for the installed `nsight.analyze.kernel`; 1.x renamed `output` to `verbosity`."""
    options: dict[str, Any] = {
        "metrics": list(METRICS),
        "runs": 1,
        "thermal_mode": "off",
        "clock_control": "none",
        "output_prefix": f"{Path.cwd()}/",  # where `_profile` looks for the report and the logs
        "combine_kernel_metrics": lambda a, b: a + b,  # several kernels in the range: its own table, not read here
    }
    known = inspect.signature(kernel).parameters
    if "output" in known:
        options["output"] = "quiet"
    return {name: value for name, value in options.items() if name in known}
