"""Run by Python at the start of a process whose PYTHONPATH begins with this folder.

Calls `prepare` of ../bootstrap.py, then runs the `sitecustomize` that would have run without this folder.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def _run(spec: importlib.machinery.ModuleSpec) -> None:
    """Import the module of `spec` under its name."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def _prepare() -> None:
    spec = importlib.util.spec_from_file_location("workbench_bootstrap", _FOLDER.parent / "bootstrap.py")
    assert spec is not None
    _run(spec)
    sys.modules["workbench_bootstrap"].prepare()


def _chain() -> None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None:
        _run(spec)


_prepare()
_chain()
