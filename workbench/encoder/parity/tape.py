"""What passes through the graph manager during one call: items, budgets, buffers, raw outputs, the phase of an error.

A tape wraps methods of one manager and one model object while its block lasts. Planted faults wrap the same methods
further inside, so a tape sees what they hand on.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from workbench.encoder.instruments import wrapped

# Looks at, or changes, the captured budget between the copy into its buffers and its replay.
BeforeReplay = Callable[[Any], None]


@dataclass
class TapedBatch:
    """One replay or fallback.

    Attributes:
        items: indices into the call, in the order of the rows.
        selected: the arguments that the manager selected for these items.
        budget: token budget that was chosen, None for an eager fallback.
        buffers: the input buffers as the replay finds them, cloned; empty for a fallback or an error before.
        raw: the output buffer, cloned.
        made: what postprocessing made of it, by item, cloned.
    """

    items: list[int]
    selected: dict[str, Any]
    budget: int | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    raw: torch.Tensor | None = None
    made: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Tape:
    """One call. `phase` is the last one entered; `given` the arguments that reached the manager's packing."""

    given: dict[str, Any] = field(default_factory=dict)
    batches: list[TapedBatch] = field(default_factory=list)
    phase: str = "start"


class _HookedGraph:
    """A captured graph that calls `before` ahead of each replay."""

    def __init__(self, graph: Any, before: Callable[[], None]) -> None:
        self._graph = graph
        self._before = before

    def replay(self) -> None:
        self._before()
        self._graph.replay()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


class _Recorder:
    """The wrappers that write on a tape, one per method of the manager or model."""

    def __init__(self, tape: Tape, before_replay: BeforeReplay | None) -> None:
        self._tape = tape
        self._before_replay = before_replay

    def packing(self, original: Any) -> Any:
        def execute(mm_kwargs: dict[str, Any]) -> Any:
            self._tape.phase = "packing"
            self._tape.given = dict(mm_kwargs)
            return original(mm_kwargs)

        return execute

    def selection(self, original: Any) -> Any:
        def select(mm_kwargs: Any, indices: list[int]) -> Any:
            self._tape.phase = "selection"
            batch = TapedBatch(items=list(indices), selected={})
            self._tape.batches.append(batch)
            result = original(mm_kwargs, indices)
            batch.selected = dict(result[0])
            return result

        return select

    def graph(self, original: Any) -> Any:
        def run(mm_kwargs: Any, token_budget: int, *args: Any, **kwargs: Any) -> Any:
            batch = self._tape.batches[-1]
            batch.budget = token_budget
            output = original(mm_kwargs, token_budget, *args, **kwargs)
            batch.raw = None if output is None else output.clone()
            return output

        return run

    def copies(self, original: Any) -> Any:
        return self._entering("copies", original)

    def fallback(self, original: Any) -> Any:
        return self._entering("fallback", original)

    def _entering(self, phase: str, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._tape.phase = phase
            return original(*args, **kwargs)

        return run

    def postprocess(self, original: Any) -> Any:
        def run(outputs: Any, indices: list[int], tokens: Any, dest: Any, *args: Any, **kwargs: Any) -> None:
            self._tape.phase = "postprocess"
            original(outputs, indices, tokens, dest, *args, **kwargs)
            self._tape.batches[-1].made = {index: dest[index].clone() for index in indices}

        return run

    def replay(self, captured: Any) -> None:
        self._tape.phase = "replay"
        if self._before_replay is not None:
            self._before_replay(captured)
        self._tape.batches[-1].buffers = {
            key: buffer.clone() for key, buffer in captured.input_buffers.items() if buffer is not None
        }


@contextmanager
def taping(manager: Any, before_replay: BeforeReplay | None = None) -> Iterator[Tape]:
    """Yield a tape of the calls that `manager` executes while the block lasts."""
    tape, model = Tape(), manager.model
    recorder = _Recorder(tape, before_replay)
    with ExitStack() as stack:
        for owner, name, wrap in (
            (manager, "_execute_local", recorder.packing),
            (manager, "_select_items", recorder.selection),
            (manager, "_run_budget_graph", recorder.graph),
            (model, "prepare_encoder_cudagraph_replay_buffers", recorder.copies),
            (model, "encoder_eager_forward", recorder.fallback),
            (model, "postprocess_encoder_output", recorder.postprocess),
        ):
            stack.enter_context(wrapped(owner, name, wrap))
        for captured in captured_budgets(manager).values():
            stack.callback(setattr, captured, "graph", captured.graph)
            captured.graph = _HookedGraph(captured.graph, partial(recorder.replay, captured))
        yield tape


def captured_budgets(manager: Any) -> dict[int, Any]:
    """Return vLLM's `BudgetGraphMetadata` per token budget, of the one path that these models have."""
    return dict(manager.budget_graphs.get("default", {}))


def selected_tensors(selected: dict[str, Any]) -> tuple[torch.Tensor, list[list[int]]]:
    """Return (pixel rows, grids) of what a model selects, whichever its modality and container."""
    pixels = selected["pixel_values"] if "pixel_values" in selected else selected["pixel_values_videos"]
    grids = selected["image_grid_thw"] if "image_grid_thw" in selected else selected["video_grid_thw"]
    return pixels, [list(map(int, grid)) for grid in (grids.tolist() if hasattr(grids, "tolist") else grids)]
