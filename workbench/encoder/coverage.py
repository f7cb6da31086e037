"""Which of vLLM's models with encoder graphs the workbench can build, plan and lint, and why not the others.

    from workbench.encoder.coverage import coverage

    for row in coverage():
        print(row.model_class, row.built, row.reason)

Every class that the installed vLLM registers is asked whether it implements `SupportsEncoderCudaGraph`; what a model's
protocol uses is read off its own `get_encoder_cudagraph_config`.
"""

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.encoder import engine
from workbench.models import MODELS
from workbench.shapes import has_shapes


@dataclass(frozen=True)
class Coverage:
    """One of vLLM's model classes.

    Attributes:
        model_class: its name; `module` the last part of its module's name.
        protocol: the class that implements its graphs: itself, or one it inherits from.
        built: the encoder can be built and its graphs run.
        planned: workloads can be planned. `linted`: its captured shapes are known.
        reason: what is missing; empty where nothing is.
    """

    model_class: str
    module: str
    protocol: str
    built: bool
    planned: bool
    linted: bool
    reason: str


def coverage() -> list[Coverage]:
    """Walk vLLM's registered models, by protocol and name. Imports them all: some 20 seconds.

    A module that does not import here (a package or a GPU is missing) cannot be asked; where its source names the
    protocol, its models are among the rows and the reason says so.

    Raises:
        WorkbenchError: no supported vLLM.
    """
    engine.require_vllm()
    from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
    from vllm.model_executor.models.registry import ModelRegistry

    places = {(entry.module_name, entry.class_name) for entry in ModelRegistry.models.values()}
    rows = []
    for module_name, class_name in sorted(places):
        try:
            model_class = getattr(importlib.import_module(module_name), class_name)
        except Exception as error:  # noqa: BLE001  whatever a foreign module raises, it cannot be asked
            if _names_protocol(module_name):
                rows.append(_unasked(module_name, class_name, error))
            continue
        if supports_encoder_cudagraph(model_class):
            rows.append(_row(model_class))
    return sorted(set(rows), key=lambda row: (not row.built, row.protocol, row.model_class))


def _names_protocol(module_name: str) -> bool:
    """Whether a module's source names the protocol; it is found without being imported."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # a package above it fails
        return False
    return spec is not None and spec.origin is not None and "SupportsEncoderCudaGraph" in Path(spec.origin).read_text()


def _unasked(module_name: str, class_name: str, error: Exception) -> Coverage:
    return Coverage(
        model_class=class_name,
        module=module_name.rsplit(".", 1)[-1],
        protocol=class_name,
        built=False,
        planned=False,
        linted=False,
        reason=f"its module does not import here ({type(error).__name__})",
    )


def _row(model_class: Any) -> Coverage:
    from workbench.encoder.registry import BUILDERS

    name, protocol = model_class.__name__, _protocol(model_class)
    key = next((key for key, facts in MODELS.items() if facts.architecture == name), None)
    built, linted = key in BUILDERS, key is not None and has_shapes(key)
    return Coverage(
        model_class=name,
        module=model_class.__module__.rsplit(".", 1)[-1],
        protocol=protocol.__name__,
        built=built,
        planned=key is not None,
        linted=linted,
        reason="" if built and linted else _reason(name, protocol),
    )


def _protocol(model_class: Any) -> Any:
    """The class in whose body the model's graph configuration is written."""
    return next(base for base in model_class.__mro__ if "get_encoder_cudagraph_config" in vars(base))


def _reason(name: str, protocol: Any) -> str:
    known = {facts.architecture: facts.title for facts in MODELS.values()}
    source = inspect.getsource(protocol.get_encoder_cudagraph_config)
    if "capture_axes=" in source:
        return "captures one graph per budget and axis key, which the planner does not count"
    if "paths=" in source:
        return "has several encoder paths with budgets of their own; the planner packs one"
    if protocol.__name__ in known:
        return f"graphs of {known[protocol.__name__]}; its own dimensions need an entry"
    if protocol.__name__ != name:
        return f"graphs of {protocol.__name__}, which has no entry"
    return "no entry"


def table() -> str:
    """Return the Markdown table of docs/models.md."""
    lines = ["| vLLM's class | graphs written in | build | plan | lint | what is missing |", "| --- " * 6 + "|"]
    for row in coverage():
        marks = ("yes" if done else "no" for done in (row.built, row.planned, row.linted))
        inherited = "itself" if row.protocol == row.model_class else f"`{row.protocol}`"
        lines.append(f"| `{row.model_class}` | {inherited} | {' | '.join(marks)} | {row.reason} |")
    return "\n".join(lines) + "\n"
