"""The set-up script: what it chooses, what it would do, how it recovers. Nothing is installed here."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workbench_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, for a project folder of its own; torch's index is never asked."""
    module = load()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    monkeypatch.setattr(module, "torch_index_reached", lambda: False)
    return module


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!{sys.executable}\n{script}\n", "utf-8")
    path.chmod(0o755)


def fake_venv(project: Path, pip: str = "print('pip 25')") -> Path:
    """A .venv whose python answers `-m pip --version` and `-c` as `pip` says."""
    (project / ".venv" / "bin").mkdir(parents=True)
    executable(project / ".venv" / "bin" / "python", pip)
    return project / ".venv"


@pytest.mark.parametrize(
    ("listing", "engine"),
    [
        ("print('GPU 0: NVIDIA H200 (UUID: GPU-1)')", "gpu"),
        ("print('No devices were found')", "cpu"),
        ("exit(9)", "cpu"),
    ],
)
def test_the_engine_follows_the_driver(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str, engine: str
) -> None:
    executable(tmp_path / "nvidia-smi", listing)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup.sys, "platform", "linux")
    assert setup.choose_engine("auto") == engine
    assert setup.choose_engine("none") == "none"


def test_without_linux_only_recordings(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup.sys, "platform", "darwin")
    assert setup.choose_engine("auto") == "none"


def dry_run(setup: ModuleType, capsys: pytest.CaptureFixture[str], engine: str = "cpu") -> str:
    setup.set_up(engine, dry_run=True)
    return capsys.readouterr().out


def test_first_run_makes_a_venv_and_installs_one_engine(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    plan = dry_run(setup, capsys).splitlines()
    assert plan[0].endswith("-m venv .venv")
    assert plan[1].endswith("--editable .[cpu,lab,dev]")
    assert plan[2] == "import vLLM once"
    assert "[gpu,lab,dev]" in dry_run(setup, capsys, "gpu")


def test_torchs_index_is_named_only_where_it_answers(
    setup: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setup.TORCH_CPU_INDEX not in dry_run(setup, capsys)
    monkeypatch.setattr(setup, "torch_index_reached", lambda: True)
    monkeypatch.setattr(setup.sys, "platform", "linux")
    assert f"--extra-index-url {setup.TORCH_CPU_INDEX}" in dry_run(setup, capsys)
    assert setup.TORCH_CPU_INDEX not in dry_run(setup, capsys, "gpu")


def test_probe_ends_in_time_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    over = module.threading.Event()

    def silent(*_args: object, **_named: object) -> None:
        over.wait(30)
        raise TimeoutError

    monkeypatch.setattr(module, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(module.urllib.request, "urlopen", silent)
    assert not module.torch_index_reached()
    over.set()


def test_second_run_has_nothing_to_do(setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv = fake_venv(tmp_path)
    installed = setup.install_key("cpu")
    setup.write_state(venv, {"installed": installed, "checked": setup.check_key(installed)})
    assert dry_run(setup, capsys) == "nothing to do\n"
    # another engine, other requirements, a .venv whose Python went away: each is a reason to install again
    assert "[gpu,lab,dev]" in dry_run(setup, capsys, "gpu")
    (venv / "bin" / "python").unlink()
    assert "-m venv --clear .venv" in dry_run(setup, capsys)


def test_changed_requirements_install_again_and_other_edits_do_not(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = fake_venv(tmp_path)
    installed = setup.install_key("cpu")
    setup.write_state(venv, {"installed": installed, "checked": setup.check_key(installed)})
    project = tmp_path / "pyproject.toml"
    text = project.read_text("utf-8")
    project.write_text(f"{text}\n[tool.other]\nkey = 1\n", "utf-8")
    assert dry_run(setup, capsys) == "nothing to do\n"
    project.write_text(text.replace('"msgspec>=', '"msgspec>=0.18.9,>='), "utf-8")
    assert "--editable" in dry_run(setup, capsys)


def test_vllm_is_imported_again_when_its_preparation_changed(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = fake_venv(tmp_path)
    installed = setup.install_key("cpu")
    setup.write_state(venv, {"installed": installed, "checked": setup.check_key(installed)})
    (tmp_path / "workbench" / "encoder").mkdir(parents=True)
    (tmp_path / "workbench" / "encoder" / "bootstrap.py").write_text("def prepare(): ...", "utf-8")
    assert dry_run(setup, capsys) == "import vLLM once\n"


def test_an_interrupted_install_is_made_anew(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = fake_venv(tmp_path)
    monkeypatch.setattr(setup, "check_disk", lambda _engine: None)

    def interrupted(_command: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "run_pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.set_up("cpu", dry_run=False)
    assert setup.read_state(venv) == {}
    assert "-m venv --clear .venv" in dry_run(setup, capsys)


def test_a_venv_of_somebody_elses_is_kept(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_venv(tmp_path)
    assert "-m venv" not in dry_run(setup, capsys)


def test_half_written_state_is_no_state(setup: ModuleType, tmp_path: Path) -> None:
    venv = fake_venv(tmp_path)
    for text in ('{"installed": "ab', "[]", ""):
        (venv / setup.STATE_FILE).write_text(text, "utf-8")
        assert setup.read_state(venv) == {}


def test_too_little_disk_is_said_before_anything_is_made(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 10**9}))
    with pytest.raises(setup.SetupError, match=r"1\.0 GB are free.*20 GB.*ENGINE=none"):
        setup.set_up("gpu", dry_run=False)
    assert not (tmp_path / ".venv").exists()


def test_no_venv_module_is_one_sentence(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "python3", "import sys; sys.exit('No module named venv')")
    monkeypatch.setattr(setup.sys, "executable", str(tmp_path / "python3"))
    with pytest.raises(setup.SetupError, match="install python3-venv"):
        setup.make_venv(tmp_path / ".venv", clear=False)


@pytest.mark.parametrize(
    ("printed", "remedy"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "no index .* has the CPU build of torch"),
        ("ERROR: something else", "read its last lines above"),
    ],
)
def test_pips_failures_name_a_remedy(setup: ModuleType, printed: str, remedy: str) -> None:
    command = [sys.executable, "-c", f"print({printed!r}); raise SystemExit(1)"]
    with pytest.raises(setup.SetupError, match=f"(?s){re.escape(printed)}.*{remedy}"):
        setup.run_pip(command)


def test_a_killed_pip_is_said_as_such(setup: ModuleType) -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(setup.SetupError, match="ended by signal 9; run this again"):
        setup.run_pip(command)


def test_vllm_that_does_not_import_is_an_error_and_is_tried_again(setup: ModuleType, tmp_path: Path) -> None:
    venv = fake_venv(tmp_path, "import sys; sys.exit('undefined symbol') if 'vllm' in sys.argv[-1] else print(1)")
    setup.write_state(venv, {"installed": setup.install_key("cpu")})
    for _ in range(2):
        with pytest.raises(setup.SetupError, match=r"(?s)undefined symbol.*does not import"):
            setup.set_up("cpu", dry_run=False)
    assert "checked" not in setup.read_state(venv)


def test_an_old_python_finds_a_newer_one_or_says_what_it_needs(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "OLDEST_PYTHON", (3, 99))
    monkeypatch.setattr(setup, "NEXT_PYTHON", (3, 100))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup.SetupError, match=r"needs Python 3\.11 to 3\.14"):
        setup.find_python()
    executable(tmp_path / "python3.12", "raise SystemExit('not installed')")  # a version manager's stub
    executable(tmp_path / "python3.13", "print('/opt/python3.13')")
    assert setup.find_python() == "/opt/python3.13"


def test_a_bad_engine_is_refused() -> None:
    environment = {**os.environ, "WORKBENCH_ENGINE": "tpu"}
    command = [sys.executable, str(ROOT / "scripts" / "setup.py"), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "WORKBENCH_ENGINE is 'tpu'" in done.stderr


def test_conda_environment_has_the_ranges_of_pyproject() -> None:
    """environment.yml is read without a YAML parser: its lists are one item a line."""
    lines = (ROOT / "environment.yml").read_text("utf-8").splitlines()
    items = [line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- ")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    allowed = {item for extra in ("gpu", "lab", "counters", "dev") for item in extras[extra]}
    python = next(item for item in items if item.startswith("python"))
    assert python.startswith(f"python{project['requires-python']}")
    assert "-e .[gpu,lab,counters,dev]" in items
    packages = {re.split(r"[<>=!~]", item)[0]: item for item in items}
    card = {"torch", "vllm", "jupyterlab", "nsight-python", "plotly", "ipywidgets", "nbval"}
    assert card <= packages.keys()
    assert packages["torch"] == "torch"  # vLLM names the version
    for name in card - {"torch"}:
        assert packages[name] in allowed


def test_state_file_is_json(setup: ModuleType, tmp_path: Path) -> None:
    venv = fake_venv(tmp_path)
    setup.write_state(venv, {"installed": "x"})
    assert json.loads((venv / setup.STATE_FILE).read_text("utf-8")) == {"installed": "x"}
