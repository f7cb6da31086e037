"""Start-up: nothing heavy is imported before it is needed, and every verb has help."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from workbench.cli import GROUPS, app

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "vllm", "pandas", "plotly", "numba", "ray"}
LISTING = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def imported(code: str) -> set[str]:
    """Return the top-level modules that a fresh process has after `code`; its last line is the listing."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{LISTING}"], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def command_names() -> list[str]:
    return sorted(typer.main.get_group(app).commands)


def test_import_is_light() -> None:
    assert not imported("import workbench") & HEAVY


def test_help_is_light_and_works() -> None:
    code = "import sys; sys.argv = ['workbench', '--help']\nfrom workbench.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0"
    assert not imported(code) & HEAVY


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("import workbench", 120),
        ("from workbench.cli import app", 300),
    ],
)
def test_few_modules_are_imported(code: str, most: int) -> None:
    """Start-up time follows the number of modules: it was 69 for the package, 196 for the command line."""
    count = "import sys; print(len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{count}"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < most


def test_env_needs_no_engine() -> None:
    code = "from workbench.environment import capability, environment\ncapability(environment())"
    assert not imported(code) & HEAVY


def test_the_listing_sees_a_heavy_import() -> None:
    assert "pandas" in imported("import pandas") & HEAVY


def test_groups_are_named_once() -> None:
    assert len(set(GROUPS)) == len(GROUPS)


@pytest.mark.parametrize("name", command_names())
def test_every_verb_has_help_and_json(name: str) -> None:
    command = typer.main.get_group(app).commands[name]
    leaves = getattr(command, "commands", {name: command}).values()
    for leaf in leaves:
        assert leaf.help, f"{leaf.name} says nothing about itself"
        options = {option for parameter in leaf.params for option in parameter.opts}
        assert "--json" in options, f"{leaf.name} has no --json"
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["capture", "--workload", "pull-request", "--out", "run"], "`gpu` or `cpu`"),
        (["sweep", "--workload", "mixed", "--config", "a=auto", "--out", "run"], "`gpu` or `cpu`"),
        (["parallel", "--call", "56x56", "--out", "run"], "`gpu` or `cpu`"),
        (["parity"], "`gpu` or `cpu`"),
        (["boundary"], "`gpu` or `cpu`"),
        (["report", "--notebooks", str(ROOT / "notebooks"), "--out", "run"], "`lab`"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_without_an_extra_there_is_a_sentence(tmp_path: Path, arguments: list[str], extra: str) -> None:
    """An installation for recordings only, or of the core only."""
    without = ("torch", "vllm", "transformers", "plotly", "nbclient", "nbconvert", "nbformat", "ipywidgets")
    code = (
        f"import sys\nfor name in {without}: sys.modules[name] = None\nsys.argv[1:] = {arguments}\n"
        "from workbench.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert extra in done.stderr
    assert list(tmp_path.iterdir()) == []
