"""A vLLM general plugin that writes a ledger of every encoder call of a server.

Off unless the environment variable WORKBENCH_LEDGER names a file. On, it wraps, when vLLM imports them,

* `GPUModelRunner._execute_mm_encoder` (runner v1) and `EncoderRunner.execute_mm_encoder` (v2): one line a
  call,
* `group_and_batch_mm_kwargs` as those two modules see it: the items vLLM encodes together, and their grids,
* `EncoderCudaGraphManager._execute_local`, `_dp_shard`, `_get_item_specs`, `_select_items`,
  `_run_budget_graph`: batches, their budgets, hits and fallbacks. A batch that is selected and never replayed
  ran eagerly.

It never synchronises: grids are read where they lie on the CPU, and the two CUDA events of a call are read at
a later call, once they are complete. It never breaks serving: whatever fails in here switches recording off
with one line in the log, and the wrapped functions' results and errors pass through unchanged. It imports
neither torch nor vLLM itself, because vLLM loads plugins in processes that need neither.

The names above exist in vLLM 0.32 and 0.33; where one is missing, recording does not start.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import msgspec

import workbench
from workbench.ledger import (
    DEFAULT_MAX_BYTES,
    ENVIRONMENT_VARIABLE,
    LIMIT_VARIABLE,
    SCHEMA_VERSION,
    Batch,
    CallLine,
    FullLine,
    Group,
    Line,
    ManagerLine,
    ProcessLine,
)

_log = logging.getLogger("vllm.workbench_ledger")  # under vLLM's logger, so that it reaches the server's log

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.mm.encoder_runner"
MANAGER = "vllm.v1.worker.encoder_cudagraph"
_MODULES = (RUNNER_V1, RUNNER_V2, MANAGER)
_CHECK_BYTES = 64 * 1024  # written between two looks at the file's size, to which other processes may add
_MAX_PENDING = 256  # calls whose GPU time is awaited; above, the oldest is written without


class _OpenGroup:
    """A group of items while vLLM encodes it."""

    __slots__ = ("batches", "grids", "items", "modality", "route", "shard", "tokens")

    def __init__(self, modality: str, items: int, grids: list[list[int]] | None) -> None:
        self.modality = modality
        self.items = items
        self.grids = grids
        self.route = "eager"
        self.tokens: list[int] | None = None  # of the items in `shard`, from the manager's own specs
        self.shard: list[int] | None = None
        self.batches: list[tuple[list[int], int | None, int]] = []  # local items, budget, start in ns


class _OpenCall:
    """A call while vLLM runs it; afterwards, while its events are awaited."""

    __slots__ = ("events", "grouping", "groups", "line", "order", "phase", "runner", "started_ns", "synchronised", "t")

    def __init__(self, runner: str, phase: str, order: list[int] | None, synchronised: bool) -> None:
        self.runner = runner
        self.phase = phase
        self.order = order
        self.synchronised = synchronised
        self.groups: list[_OpenGroup] = []
        self.grouping = False  # vLLM iterates over the groups
        self.events: tuple[Any, Any] | None = None
        self.line: CallLine | None = None
        self.t = time.time()
        self.started_ns = time.perf_counter_ns()


Method = TypeVar("Method", bound=Callable[..., Any])


def _safe(method: Method) -> Method:
    """Make a recorder's method harmless: None when recording is off, off when it raises. Positional arguments only."""

    def run(self: "Recorder", *args: Any) -> Any:
        if self.off:
            return None
        try:
            return method(self, *args)
        except Exception as error:  # noqa: BLE001  whatever it is, the server goes on
            self.stop(f"{type(error).__name__}: {error}")
            return None

    run.__doc__ = method.__doc__
    return cast(Method, run)


class Recorder:
    """Collects one process's calls and appends them to the ledger file.

    Args:
        path: the ledger.
        max_bytes: recording stops before the file would exceed this, whoever wrote to it (by at most 64 KiB a process
            where several write).
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.off = False
        self.phase = "serve"
        self.call: _OpenCall | None = None
        self._local = False  # inside _execute_local
        self.wants_specs = False  # inside it, before its items' tokens are known
        self._pending: deque[_OpenCall] = deque()
        self._free_events: list[tuple[Any, Any]] = []
        self._file = -1
        self._unchecked = 0
        self._pid = 0
        self._rank = 0
        self._encoder = msgspec.json.Encoder()
        self._managers: set[int] = set()

    def stop(self, reason: str) -> None:
        """Switch recording off for good, with one line in the log."""
        if not self.off:
            self.off = True
            _log.warning("Encoder ledger %s is off from now on: %s", self.path, reason)

    @_safe
    def begin(self, owner: Any, runner: str, order: list[int] | None, synchronised: bool) -> _OpenCall | None:
        """Open a call; None inside another one."""
        if self._pid != os.getpid():
            self._open(owner)
        if self.call is not None:
            return None
        self._drain()
        call = _OpenCall(runner, self.phase, order, synchronised)
        if owner.device.type == "cuda":
            call.events = self._free_events.pop() if self._free_events else _new_events()
            call.events[0].record()
        self.call = call
        return call

    @_safe
    def end(self, call: _OpenCall, outputs: Sequence[Any] | None, error: BaseException | None) -> None:
        """Close a call with what it returned (one tensor of tokens x width per item) or raised."""
        ended_ns = time.perf_counter_ns()
        self.call, self._local, self.wants_specs = None, False, False
        if call.events is not None and error is None:
            call.events[1].record()
        if not call.groups and error is None:
            self._release(call)
            return  # nothing was encoded, everything came from the cache
        call.line = CallLine(
            pid=self._pid,
            rank=self._rank,
            t=call.t,
            runner=call.runner,  # type: ignore[arg-type]  # a plain str here, checked by the reader
            phase=call.phase,  # type: ignore[arg-type]
            host_us=(ended_ns - call.started_ns) / 1e3,
            synchronised=call.synchronised,
            groups=_close_groups(call, outputs, ended_ns),
            error=None if error is None else f"{type(error).__name__}: {error}"[:500],
        )
        self._pending.append(call)
        if error is not None:  # after a failed CUDA call no event may be asked any more
            for waiting in self._pending:
                waiting.events = None
        self._drain()

    @_safe
    def group(self, modality: str, items: int, mm_kwargs: dict[str, Any]) -> None:
        """Note the items that vLLM encodes next."""
        if self.call is not None:
            self.call.groups.append(_OpenGroup(modality, items, _grids(mm_kwargs, items)))

    @_safe
    def manager(self, manager: Any) -> None:
        """Note that the current group goes through the manager, and once, how that is configured."""
        self._local = False
        if self.call is None:
            return
        self.call.groups[-1].route = "graph"
        if id(manager) not in self._managers:
            self._managers.add(id(manager))
            self._write(
                ManagerLine(
                    pid=self._pid,
                    model=type(manager.model).__name__,
                    budgets=list(manager.token_budgets),
                    max_items=manager.max_batch_size,
                    max_frames=manager.max_frames_per_batch,
                    data_parallel=manager.use_dp,
                )
            )

    @_safe
    def specs(self, specs: Sequence[Any]) -> None:
        """Note the output tokens of the items that this rank packs; called while `wants_specs`."""
        self.wants_specs = False
        if self.call is not None:
            self.call.groups[-1].tokens = [spec.output_tokens for spec in specs]

    @_safe
    def local(self, inside: bool) -> None:
        """Enter or leave `_execute_local`."""
        self._local = self.wants_specs = inside and self.call is not None

    @_safe
    def selected(self, items: Sequence[int]) -> None:
        """Note a selection: a batch inside `_execute_local`, this rank's share before it."""
        if self.call is None:
            return
        group = self.call.groups[-1]
        if self._local:
            group.batches.append((list(items), None, time.perf_counter_ns()))
        else:
            group.shard = list(items)

    @_safe
    def replayed(self, budget: int) -> None:
        """Note that the batch selected last was a replay."""
        if self.call is not None and self._local:
            batches = self.call.groups[-1].batches
            batches[-1] = (batches[-1][0], budget, batches[-1][2])

    @_safe
    def close(self) -> None:
        """Write what is pending, at the end of the process. Events that are not complete stay unread."""
        self._drain(everything=True)

    def _open(self, owner: Any) -> None:
        """Open the file in this process and write its first line."""
        self._pid = os.getpid()
        self.call = None
        self._pending.clear()
        self._free_events.clear()
        self._managers.clear()
        self._unchecked = 0
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._rank = _rank()
        self._write(
            ProcessLine(
                pid=self._pid,
                schema_version=SCHEMA_VERSION,
                t=time.time(),
                workbench=workbench.__version__,
                vllm=_vllm_version(),
                device=owner.device.type,
            )
        )
        Finalize(None, self.close, exitpriority=0)  # also runs where multiprocessing skips atexit

    def _drain(self, everything: bool = False) -> None:
        """Write calls from the oldest on, as far as their GPU times are known."""
        while self._pending:
            call = self._pending[0]
            line = call.line
            assert line is not None
            if call.events is not None:
                if call.events[1].query():
                    line = msgspec.structs.replace(line, gpu_us=call.events[0].elapsed_time(call.events[1]) * 1e3)
                elif not everything and len(self._pending) < _MAX_PENDING:
                    return
                else:
                    call.events = None  # still in flight, so not for reuse
            self._pending.popleft()
            self._release(call)
            self._write(line)

    def _release(self, call: _OpenCall) -> None:
        if call.events is not None:
            self._free_events.append(call.events)
            call.events = None

    def _write(self, line: Line) -> None:
        """Append one line in one write, so that processes that share the file never mix within a line."""
        if self.off:
            return
        data = self._encoder.encode(line) + b"\n"
        self._unchecked -= len(data)
        if self._unchecked < 0:
            self._unchecked = min(_CHECK_BYTES, self.max_bytes - os.fstat(self._file).st_size) - len(data)
        if self._unchecked < 0:
            full = FullLine(pid=self._pid, limit_bytes=self.max_bytes)
            os.write(self._file, self._encoder.encode(full) + b"\n")
            self.stop(f"the file has reached its limit of {self.max_bytes:,} bytes ({LIMIT_VARIABLE})")
            return
        os.write(self._file, data)


def _new_events() -> tuple[Any, Any]:
    import torch

    event: Callable[..., Any] = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def _vllm_version() -> str:
    return str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))


def _rank() -> int:
    """Return the rank in the tensor-parallel group, over which the encoder is data-parallel; 0 without one."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 0
    return int(state.get_tensor_model_parallel_rank())


def _grids(mm_kwargs: dict[str, Any], items: int) -> list[list[int]] | None:
    """Return the items' (t, h, w), or None where they are on a device: reading would synchronise."""
    for key, value in mm_kwargs.items():
        if key.endswith("grid_thw"):
            device = getattr(value, "device", None)
            if device is None or device.type != "cpu" or value.shape != (items, 3):
                return None
            grids: list[list[int]] = value.tolist()
            return grids
    return None


def _close_groups(call: _OpenCall, outputs: Sequence[Any] | None, ended_ns: int) -> list[Group]:
    """Turn open groups into records; `outputs` give each item's tokens in the order of the call's items."""
    counted = [0] * sum(group.items for group in call.groups)
    if outputs is not None and len(outputs) == len(counted):
        order = call.order if call.order is not None else range(len(counted))
        counted = [int(outputs[index].shape[0]) for index in order]
    closed, first = [], 0
    for group in call.groups:
        shard = group.shard if group.shard is not None else range(group.items)
        starts = [start for _, _, start in group.batches]
        local = group.tokens or []
        closed.append(
            Group(
                modality=group.modality,
                route=group.route,  # type: ignore[arg-type]  # a plain str here, checked by the reader
                grids=group.grids,
                tokens=counted[first : first + group.items],
                batches=[
                    Batch(
                        items=[shard[item] for item in items],
                        tokens=sum(local[item] for item in items),
                        budget=budget,
                        host_us=(stop - start) / 1e3,
                    )
                    for (items, budget, start), stop in zip(group.batches, [*starts[1:], ended_ns], strict=False)
                ],
                shard=group.shard,
            )
        )
        first += group.items
    return closed


# --- wrapping vLLM ------------------------------------------------------------------------------------------


def _wrap_call(
    recorder: Recorder, original: Callable[..., Any], describe: Callable[..., tuple[Any, ...] | None]
) -> Callable[..., Any]:
    """Wrap the function of a runner that makes an encoder call.

    `describe` gives the rest of `begin`'s arguments, or None when there is nothing to encode (v1 asks in every step).
    """

    @functools.wraps(original)
    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            described = describe(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever it is, the server goes on
            recorder.stop(f"{type(error).__name__}: {error}")
            return original(self, *args, **kwargs)
        call = None if described is None else recorder.begin(self, *described)
        if call is None:
            return original(self, *args, **kwargs)
        try:
            outputs = original(self, *args, **kwargs)
        except BaseException as error:
            recorder.end(call, None, error)
            raise
        recorder.end(call, outputs, None)
        return outputs

    return execute


def _wrap_grouping(recorder: Recorder, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Wrap `group_and_batch_mm_kwargs`, which yields (modality, items, kwargs)."""

    @functools.wraps(original)
    def group_and_batch(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = recorder.call
        outermost = call is not None and not call.grouping  # vLLM may regroup a group's videos, one by one
        if call is not None and outermost:
            call.grouping = True
        try:
            for group in original(*args, **kwargs):
                if outermost:
                    recorder.group(*group)
                yield group
        finally:
            if call is not None and outermost:
                call.grouping = False

    return group_and_batch


def _patch_runner_v1(module: ModuleType, recorder: Recorder) -> None:
    def describe(self: Any, scheduler_output: Any) -> tuple[Any, ...] | None:
        if not scheduler_output.scheduled_encoder_inputs:
            return None
        timed = self.observability_config is not None and self.observability_config.enable_mm_processor_stats
        return "v1", None, bool(timed)

    runner = module.GPUModelRunner
    runner._execute_mm_encoder = _wrap_call(recorder, runner._execute_mm_encoder, describe)
    module.__dict__["group_and_batch_mm_kwargs"] = _wrap_grouping(recorder, module.group_and_batch_mm_kwargs)


def _patch_runner_v2(module: ModuleType, recorder: Recorder) -> None:
    def describe(self: Any, mm_kwargs: list[tuple[str, Any]]) -> tuple[Any, ...] | None:
        if not mm_kwargs:
            return None
        return "v2", sorted(range(len(mm_kwargs)), key=lambda item: mm_kwargs[item][0]), False

    runner = module.EncoderRunner
    profile = runner.profile_encoder_cache

    @functools.wraps(profile)
    def profile_encoder_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.phase = "profile"
        try:
            return profile(self, *args, **kwargs)
        finally:
            recorder.phase = "serve"

    runner.execute_mm_encoder = _wrap_call(recorder, runner.execute_mm_encoder, describe)
    runner.profile_encoder_cache = profile_encoder_cache
    module.__dict__["group_and_batch_mm_kwargs"] = _wrap_grouping(recorder, module.group_and_batch_mm_kwargs)


def _patch_manager(module: ModuleType, recorder: Recorder) -> None:
    manager = module.EncoderCudaGraphManager
    execute, execute_local = manager.execute, manager._execute_local
    get_specs, select, run_graph = manager._get_item_specs, manager._select_items, manager._run_budget_graph

    @functools.wraps(execute)
    def wrapped_execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.manager(self)
        return execute(self, *args, **kwargs)

    @functools.wraps(execute_local)
    def wrapped_local(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.local(True)
        try:
            return execute_local(self, *args, **kwargs)
        finally:
            recorder.local(False)

    @functools.wraps(get_specs)
    def wrapped_specs(self: Any, *args: Any, **kwargs: Any) -> Any:
        specs = get_specs(self, *args, **kwargs)
        if recorder.wants_specs:
            recorder.specs(specs)
        return specs

    @functools.wraps(select)
    def wrapped_select(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.selected(*args[1:2])  # mm_kwargs, indices
        return select(self, *args, **kwargs)

    @functools.wraps(run_graph)
    def wrapped_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = run_graph(self, *args, **kwargs)
        if output is not None:
            recorder.replayed(*args[1:2])  # mm_kwargs, token budget
        return output

    manager.execute, manager._execute_local = wrapped_execute, wrapped_local
    manager._get_item_specs, manager._select_items = wrapped_specs, wrapped_select
    manager._run_budget_graph = wrapped_run


_PATCHES = {RUNNER_V1: _patch_runner_v1, RUNNER_V2: _patch_runner_v2, MANAGER: _patch_manager}


def _patch(module: ModuleType, recorder: Recorder) -> None:
    """Wrap what this module defines, or switch recording off when it defines something else."""
    try:
        _PATCHES[module.__name__](module, recorder)
    except Exception as error:  # noqa: BLE001  whatever it is, the server goes on
        recorder.stop(f"this vLLM is not one the ledger knows ({type(error).__name__}: {error})")


class LedgerFinder(importlib.abc.MetaPathFinder):
    """Wraps the three modules right after vLLM imports them, so that the plugin need not import them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return what the other finders find, with a loader that wraps the module; None for every other module."""
        if fullname not in _PATCHES or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_patch(module: ModuleType) -> None:
                load(module)
                _patch(module, self.recorder)

            spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def _max_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return DEFAULT_MAX_BYTES
    if not text.isdecimal() or int(text) < 1:
        _log.warning("%s is %r, not a number of bytes; using %d", LIMIT_VARIABLE, text, DEFAULT_MAX_BYTES)
        return DEFAULT_MAX_BYTES
    return int(text)


def register() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in each of its processes, perhaps more than once."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path or any(isinstance(finder, LedgerFinder) for finder in sys.meta_path):
        return
    recorder = Recorder(Path(path).absolute(), _max_bytes())
    sys.meta_path.insert(0, LedgerFinder(recorder))
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None:
            _patch(module, recorder)
