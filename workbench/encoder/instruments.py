"""Ways to look into an encoder call: its batches, its phases, its modules.

They wrap methods of one manager or model object, not of vLLM's classes, and only while their block lasts. Work that
the wrappers themselves do falls outside the spans.

Import this module only after `engine.require_vllm`.
"""

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from workbench.run import Batch, CaptureCost

Span = Callable[[str], AbstractContextManager[Any]]

# Phases of `EncoderCudaGraphManager.execute`, in the order of a batch. CLONE lies inside POSTPROCESS, and an
# ITEM_SPECS of the batch follows SELECT_ITEMS.
ITEM_SPECS = "item_specs"  # the grids are read on the host
SELECT_ITEMS = "select_items"  # the rows of the batch's items are gathered
REPLAY_BUFFERS = "replay_buffers"  # rotary embeddings, cu_seqlens and other metadata are computed
BUFFER_COPIES = "buffer_copies"  # the captured buffers are zeroed and filled
REPLAY = "replay"
EAGER_FALLBACK = "eager_fallback"  # instead of the three before, for an item above the largest budget
POSTPROCESS = "postprocess"  # what the model runs after the graph (Ernie-4.5-VL: the resampler)
CLONE = "clone"  # outputs are sliced per item and copied
PHASES = (
    ITEM_SPECS,
    SELECT_ITEMS,
    REPLAY_BUFFERS,
    BUFFER_COPIES,
    REPLAY,
    EAGER_FALLBACK,
    POSTPROCESS,
    CLONE,
)


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace attribute `name` of an object or module by `wrap(attribute)` while the block lasts."""
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class _Watch:
    """Wrappers of a manager's methods that note its batches."""

    def __init__(self, manager: Any) -> None:
        self.batches: list[Batch] = []
        self._model = manager.model
        self._calls = 0
        self._inside = False  # others call the model's methods too
        self._tokens: list[int] = []
        self._items: list[int] = []

    def execute(self, original: Any) -> Any:
        def call(mm_kwargs: Any) -> Any:
            self._tokens = [spec.output_tokens for spec in self._model.get_encoder_cudagraph_item_specs(mm_kwargs)]
            self._inside = True
            try:
                return original(mm_kwargs)
            finally:
                self._inside = False
                self._calls += 1

        return call

    def select(self, original: Any) -> Any:
        def call(mm_kwargs: Any, indices: list[int]) -> Any:
            self._items = list(indices)
            return original(mm_kwargs, indices)

        return call

    def run_graph(self, original: Any) -> Any:
        def call(mm_kwargs: Any, token_budget: int, *args: Any, **kwargs: Any) -> Any:
            self._add(token_budget)
            return original(mm_kwargs, token_budget, *args, **kwargs)

        return call

    def run_eager(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._add(None)
            return original(*args, **kwargs)

        return call

    def _add(self, budget: int | None) -> None:
        if self._inside:
            tokens = sum(self._tokens[i] for i in self._items)
            self.batches.append(Batch(call=self._calls, items=self._items, tokens=tokens, budget=budget))


@contextlib.contextmanager
def watch_batches(manager: Any) -> Iterator[list[Batch]]:
    """Yield a list that grows by one entry per batch the manager runs, in the order it runs them.

    `call` counts the calls since the block began; `items` index into the call; `budget` is None for an eager
    fallback. A batch that raises is listed too.
    """
    watch = _Watch(manager)
    with (
        wrapped(manager, "_execute_local", watch.execute),
        wrapped(manager, "_select_items", watch.select),
        wrapped(manager, "_run_budget_graph", watch.run_graph),
        wrapped(manager.model, "encoder_eager_forward", watch.run_eager),
    ):
        yield watch.batches


class _SpannedReplay:
    """A captured graph whose `replay` ends the copies' span and runs in one of its own."""

    def __init__(self, graph: Any, span: Span, copies: ExitStack) -> None:
        self._graph = graph
        self._span = span
        self._copies = copies

    def replay(self) -> None:
        self._copies.close()
        with self._span(REPLAY):
            self._graph.replay()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def _spanned(span: Span, phase: str) -> Callable[[Any], Any]:
    """Return a wrapper that runs a function inside `span(phase)`."""

    def wrap(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with span(phase):
                return original(*args, **kwargs)

        return run

    return wrap


@contextlib.contextmanager
def _span_copies(manager: Any, span: Span) -> Iterator[None]:
    """Span what lies between two calls: from the end of REPLAY_BUFFERS to the start of REPLAY."""
    copies = ExitStack()

    def then_copies(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with span(REPLAY_BUFFERS):
                result = original(*args, **kwargs)
            copies.enter_context(span(BUFFER_COPIES))
            return result

        return run

    def closing_copies(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with copies:  # a copy that raises ends its span
                return original(*args, **kwargs)

        return run

    with ExitStack() as stack:
        stack.enter_context(wrapped(manager, "_run_budget_graph", closing_copies))
        stack.enter_context(wrapped(manager.model, "prepare_encoder_cudagraph_replay_buffers", then_copies))
        for graphs in manager.budget_graphs.values():
            for captured in graphs.values():
                stack.callback(setattr, captured, "graph", captured.graph)
                captured.graph = _SpannedReplay(captured.graph, span, copies)
        yield


@contextlib.contextmanager
def span_phases(manager: Any, module: str, span: Span) -> Iterator[None]:
    """Enter `span(phase)` around each phase of the manager's calls while the block lasts.

    Args:
        module: name of the model class's module, whose `scatter_output_slices` is the CLONE phase.
    """
    with ExitStack() as stack:
        stack.enter_context(_span_copies(manager, span))
        for owner, name, phase in (
            (manager, "_get_item_specs", ITEM_SPECS),
            (manager, "_select_items", SELECT_ITEMS),
            (manager.model, "encoder_eager_forward", EAGER_FALLBACK),
            (manager.model, "postprocess_encoder_output", POSTPROCESS),
        ):
            stack.enter_context(wrapped(owner, name, _spanned(span, phase)))
        for name in (module, "vllm.model_executor.models.utils"):
            owner = importlib.import_module(name)
            if hasattr(owner, "scatter_output_slices"):
                stack.enter_context(wrapped(owner, "scatter_output_slices", _spanned(span, CLONE)))
        yield


@contextlib.contextmanager
def span_modules(model: torch.nn.Module, parts: tuple[str, ...], span: Span) -> Iterator[None]:
    """Enter `span(name)` around the forward of the encoder's modules while the block lasts.

    Named are each part itself, its children, the blocks, and the children of the blocks, by their dotted names in
    the vLLM model (`vision_model.blocks.0.attn`).
    """
    open_spans = ExitStack()
    entered: list[AbstractContextManager[Any]] = []

    def before(name: str, *_: Any) -> None:
        context = span(name)
        context.__enter__()
        entered.append(context)

    def after(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    with open_spans:
        for part in parts:
            for name, module in getattr(model, part).named_modules(prefix=part):
                if name.count(".") <= 3 and not isinstance(module, torch.nn.ModuleList):
                    hook = module.register_forward_pre_hook(functools.partial(before, name))
                    open_spans.callback(hook.remove)
                    # always_call: a forward that raises ends its span too.
                    open_spans.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


@contextlib.contextmanager
def measured_captures(
    manager: Any, device: torch.device, on_budget: Callable[[CaptureCost], None] | None
) -> Iterator[list[CaptureCost]]:
    """Yield a list that grows by one cost per budget the manager captures while the block lasts."""
    costs: list[CaptureCost] = []
    cuda = device.type == "cuda"

    def measured(original: Any) -> Any:
        def capture(token_budget: int, *args: Any, **kwargs: Any) -> None:
            before = _memory(device)
            start = time.perf_counter()
            original(token_budget, *args, **kwargs)
            if cuda:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            after = _memory(device)
            cost = CaptureCost(
                budget=token_budget,
                seconds=seconds,
                pool_bytes=after[0] - before[0] if cuda else None,
                allocated_bytes=after[1] - before[1] if cuda else None,
                nodes=_CountingGraph.last_nodes if cuda else None,
            )
            costs.append(cost)
            if on_budget is not None:
                on_budget(cost)

        return capture

    with ExitStack() as stack:
        stack.enter_context(wrapped(manager, "_capture_budget_graph", measured))
        if cuda:
            stack.callback(setattr, torch.cuda, "CUDAGraph", torch.cuda.CUDAGraph)
            torch.cuda.CUDAGraph = _CountingGraph  # type: ignore[misc]  # the manager looks it up by this name
        yield costs


def _memory(device: torch.device) -> tuple[int, int]:
    """Reserved and allocated bytes of the caching allocator; zeros on the CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


class _CountingGraph(torch.cuda.CUDAGraph):
    """A CUDA graph that notes how many nodes it has when its capture ends."""

    last_nodes: int | None = None

    def capture_end(self) -> None:
        _CountingGraph.last_nodes = captured_nodes()
        super().capture_end()


def captured_nodes() -> int | None:
    """Number of nodes in the graph that the current stream is capturing; None without cuda-bindings."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    info = runtime.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    status, graph = info[1], info[3]
    if status != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive:
        return None
    return int(runtime.cudaGraphGetNodes(graph, 0)[2])
