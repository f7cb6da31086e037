"""The catalogue's register, and the ways to change a model object or a manager object for the time of a block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.lab import Lab
from workbench.encoder.parity.tape import selected_tensors

Plant = Callable[[Lab], AbstractContextManager[None]]
Values = dict[str, torch.Tensor]
BOTH = ("ernie45_vl", "glm4_1v")


@dataclass(frozen=True)
class Fault:
    """One mutation.

    Attributes:
        title: what is wrong, for the table.
        expected: suspects (keys of `workbench.parity.SUSPECTS`) of which the lab must name one.
        needs: "cuda" where a static replay cannot show it.
        models: registry keys of the models that it can exist in.
        backends: attention backends that it can exist in; empty: all.
        variants: those whose code it spoils; empty: vLLM's own.
        absent: variants in which the code it spoils is not there, or its effect does not reach the graph's output.
        absent_on_cuda: the same, where a variant calls a kernel in place of a module that the fault hooks.
    """

    name: str
    title: str
    plant: Plant
    expected: tuple[str, ...]
    needs: Literal["cpu", "cuda"] = "cpu"
    models: tuple[str, ...] = BOTH
    backends: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    absent_on_cuda: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}


def fault(title: str, *expected: str, **options: Any) -> Callable[[Callable[[Lab], Iterator[None]]], Plant]:
    """Register a fault under the function's name; the function patches, yields, and mends."""

    def register(plant: Callable[[Lab], Iterator[None]]) -> Plant:
        name = plant.__name__.replace("_", "-")
        manager = contextmanager(plant)
        FAULTS[name] = Fault(name=name, title=title, plant=manager, expected=expected, **options)
        return manager

    return register


# Ways to patch -----------------------------------------------------------------------------------------------------


@contextmanager
def changed_values(lab: Lab, change: Callable[[Values, list[list[int]]], None]) -> Iterator[None]:
    """Let `change` alter what the model prepares for a replay, given the batch's grids."""

    def wrap(original: Any) -> Any:
        def prepare(mm_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(mm_kwargs, *args, **kwargs)
            change(result.values, selected_tensors(mm_kwargs)[1])
            return result

        return prepare

    with wrapped(lab.model, "prepare_encoder_cudagraph_replay_buffers", wrap):
        yield


@contextmanager
def dropped_values(lab: Lab, *keys: str) -> Iterator[None]:
    """Let the manager not copy these buffers: they keep what an earlier replay, or the capture, left."""

    def change(values: Values, _grids: list[list[int]]) -> None:
        for key in keys:
            values.pop(key, None)

    with changed_values(lab, change):
        yield


@contextmanager
def changed_capture(lab: Lab, change: Callable[[int, Values], None]) -> Iterator[None]:
    """Let `change` alter what a budget is captured with."""

    def wrap(original: Any) -> Any:
        def prepare(token_budget: int, *args: Any, **kwargs: Any) -> Any:
            result = original(token_budget, *args, **kwargs)
            change(token_budget, result.values)
            return result

        return prepare

    with wrapped(lab.model, "prepare_encoder_cudagraph_capture_inputs", wrap):
        yield


@contextmanager
def inside_graph(lab: Lab, *hooks: tuple[torch.nn.Module, Callable[..., Any], bool]) -> Iterator[None]:
    """Attach hooks that act only while the captured forward runs.

    Args:
        hooks: (module, function, before). Before: gets (arguments, keyword arguments) and returns both, changed. After:
            gets (arguments, output) and returns the output, changed.
    """
    active = [False]

    def wrap(original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            active[0] = True
            try:
                return original(*args, **kwargs)
            finally:
                active[0] = False

        return forward

    with ExitStack() as stack:
        stack.enter_context(wrapped(lab.model, "encoder_cudagraph_forward", wrap))
        for module, function, before in hooks:
            if before:

                def pre(_module: Any, args: Any, kwargs: Any, function: Callable[..., Any] = function) -> Any:
                    return function(args, kwargs) if active[0] else None

                stack.callback(module.register_forward_pre_hook(pre, with_kwargs=True).remove)
            else:

                def post(_module: Any, args: Any, output: Any, function: Callable[..., Any] = function) -> Any:
                    return function(args, output) if active[0] else None

                stack.callback(module.register_forward_hook(post).remove)
        yield


@contextmanager
def changed_postprocess(lab: Lab, call: Callable[..., None]) -> Iterator[None]:
    """Replace postprocessing by `call(original, outputs, indices, tokens, dest, clone, batch)`."""

    def wrap(original: Any) -> Any:
        def postprocess(
            outputs: Any, indices: Any, tokens: Any, dest: Any, clone: bool = False, batch_mm_kwargs: Any = None
        ) -> None:
            call(original, outputs, indices, tokens, dest, clone, batch_mm_kwargs)

        return postprocess

    with wrapped(lab.model, "postprocess_encoder_output", wrap):
        yield


@contextmanager
def after_capture(lab: Lab, change: Callable[[], None]) -> Iterator[None]:
    """Run `change` once the manager has captured."""

    def wrap(original: Any) -> Any:
        def capture(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            change()
            return result

        return capture

    with wrapped(lab.manager, "capture", wrap):
        yield


def last_attention(lab: Lab) -> torch.nn.Module:
    module: torch.nn.Module = lab.tower.blocks[-1].attn.attn
    return module


def head(lab: Lab) -> torch.nn.Module:
    module: torch.nn.Module = lab.tower.merger if hasattr(lab.tower, "merger") else lab.tower.ln
    return module
