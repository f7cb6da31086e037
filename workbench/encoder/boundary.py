"""What a graph of the encoder can hold: each candidate region run, watched for host syncs, and captured.

    from workbench.encoder.boundary import probe

    report = probe(session, [(1, 16, 16)])
    [(b.name, b.captured, [sync.place for sync in b.syncs]) for b in report.boundaries]

Host syncs are found on any machine: the tensors that live on the device carry a mark through every operation, and
whatever hands the content of a marked tensor to Python is noted with the frames that called it. Tensors that vLLM
keeps on the host on purpose, such as `max_seqlen`, carry none. On CUDA each region is also captured for real, and
timed.

Import this module only after `engine.require_vllm`.
"""

import contextlib
import linecache
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from workbench.capturable import SCHEMA_VERSION, Boundary, BoundaryReport, HostSync, Obstacle
from workbench.encoder.candidates import Candidate, as_captured
from workbench.encoder.instruments import captured_nodes, wrapped
from workbench.encoder.registry import BUILDERS, builder
from workbench.encoder.session import EncoderInputs, EncoderSession, Grid
from workbench.encoder.variants import VARIANTS, attach, names_for
from workbench.environment import environment
from workbench.models import Modality

VIT = "vit"

# Methods and functions that hand a tensor's content to Python, or make a shape of it.
_READS = frozenset(
    (
        "item",
        "tolist",
        "cpu",
        "numpy",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "__int__",
        "__float__",
        "__bool__",
        "__index__",
        "__complex__",
        "__contains__",
        "__array__",
        "__format__",
        "equal",
        "is_nonzero",
        "allclose",
        "bincount",
    )
)
_FRAMES = 8


def wanted(session: EncoderSession, inputs: EncoderInputs, variants: Sequence[str]) -> list[Candidate]:
    """Return the candidates for one call: what vLLM captures, the model's own, and the variants.

    Args:
        variants: each is a candidate of its own; several together where there are several.

    Raises:
        WorkbenchError: an unknown variant.
    """
    found = [as_captured(session.model, inputs, VIT, "ViT, as vLLM captures it")]
    found += builder(session.facts.key).candidates(session, inputs)
    ideas = {variant.name: variant.idea for variant in VARIANTS}
    sets = [[name] for name in variants] + ([list(variants)] if len(variants) > 1 else [])
    for names in sets:
        title = f"variant {names[0]}: {ideas.get(names[0], '')}" if len(names) == 1 else "all variants together"
        found.append(as_captured(attach(session.model, names, session.facts.key), inputs, "+".join(names), title))
    return found


# Host syncs -------------------------------------------------------------------------------------------------------


class _OnDevice(torch.Tensor):
    """A tensor whose content is on the device; results of operations on it are marked too."""

    sink: "list[tuple[str, bool, traceback.StackSummary]] | None" = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if _OnDevice.sink is not None and (name in _READS or _reads_by_arguments(name, args, kwargs or {})):
            _OnDevice.sink.append((f"Tensor.{name}", False, traceback.extract_stack(sys._getframe(1))))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in ("cpu", "numpy", "tolist", "item"):
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return _marked(result)


def _reads_by_arguments(name: str, args: Any, kwargs: Any) -> bool:
    """Calls that read only when called in a certain way."""
    if name == "to":
        target = args[1] if len(args) > 1 else kwargs.get("device")
        # The device of the CPU's own sessions is a torch.device; the word "cpu" is a wish to be on the host.
        return target == "cpu" and isinstance(target, str)
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
    if name in ("__getitem__", "__setitem__") and len(args) > 1:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in index)
    return False


def _marked(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.as_subclass(_OnDevice)
    if type(result) in (tuple, list):
        return type(result)(_marked(part) for part in result)
    return result


@contextlib.contextmanager
def _watching() -> Iterator[list[tuple[str, bool, traceback.StackSummary]]]:
    """Yield a list of what is read, while the block lasts."""
    import vllm.model_executor.layers.attention.mm_encoder_attention as attention

    seen: list[tuple[str, bool, traceback.StackSummary]] = []

    def host_copy(original: Any) -> Any:
        def copy(data: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(("async_tensor_h2d", True, traceback.extract_stack(sys._getframe(1))))
            return _marked(original(data, *args, **kwargs))

        return copy

    def unwatched(original: Any) -> Any:
        # The CPU's attention reads the offsets to split its rows; no attention of CUDA does.
        def run(*args: Any, **kwargs: Any) -> Any:
            before, _OnDevice.sink = _OnDevice.sink, None
            try:
                return original(*args, **kwargs)
            finally:
                _OnDevice.sink = before

        return run

    models = [sys.modules[one.module] for one in BUILDERS.values() if one.module in sys.modules]
    with contextlib.ExitStack() as stack:
        for module in (attention, *models):
            if hasattr(module, "async_tensor_h2d"):
                stack.enter_context(wrapped(module, "async_tensor_h2d", host_copy))
        stack.enter_context(wrapped(attention, "vit_torch_sdpa_wrapper", unwatched))
        _OnDevice.sink = seen
        try:
            yield seen
        finally:
            _OnDevice.sink = None


def host_syncs(region: Callable[[dict[str, torch.Tensor]], Any], values: dict[str, torch.Tensor]) -> list[HostSync]:
    """Run `region` once and return what read a device tensor on the host, in the order of the first occurrence.

    Args:
        values: `max_seqlen`, of any kind, is on the host, as in vLLM; everything else is taken to be on the device.
    """
    marked = {key: value if key.startswith("max_seqlen") else _marked(value) for key, value in values.items()}
    with _watching() as seen, torch.inference_mode():
        region(marked)
    found: dict[tuple[str, str], HostSync] = {}
    for call, copies, stack in seen:
        inner = takewhile(lambda frame: (frame.filename, frame.name) != (__file__, "host_syncs"), reversed(stack))
        frames = [frame for frame in inner if not _is_machinery(frame.filename)][:_FRAMES]
        if not frames:
            continue
        place = f"{package_path(frames[0].filename)}:{frames[0].lineno}"
        before = found.get((call, place))
        found[call, place] = HostSync(
            call=call,
            place=place,
            source=(frames[0].line or "").strip(),
            frames=[f"{package_path(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames],
            count=before.count + 1 if before else 1,
            host_copy=copies,
        )
    return list(found.values())


_TORCH = str(Path(torch.__file__).parent)
_OWN = (__file__, str(Path(__file__).with_name("instruments.py")), contextlib.__file__)


def _is_machinery(file: str) -> bool:
    return file.startswith((_TORCH, "<")) or file in _OWN


def package_path(file: str) -> str:
    """Return `file` relative to where packages are installed, without anything about this machine."""
    parts = Path(file).parts
    for anchor in ("site-packages", "dist-packages"):
        if anchor in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(anchor) :])
    for anchor in ("vllm", "workbench", "torch"):
        if anchor in parts:
            return "/".join(parts[parts.index(anchor) :])
    return Path(file).name


# Capture ----------------------------------------------------------------------------------------------------------


@dataclass
class _Capture:
    graph: Any = None
    nodes: int | None = None
    obstacle: Obstacle | None = None


def _captured(region: Callable[[dict[str, torch.Tensor]], torch.Tensor], values: dict[str, torch.Tensor]) -> _Capture:
    """Capture `region` for real; what stands in the way is the first exception inside it."""
    region(dict(values))
    torch.cuda.synchronize()
    first: list[BaseException] = []
    graph, nodes = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            try:
                region(dict(values))
                nodes = captured_nodes()
            except BaseException as error:
                first.append(error)
                raise
    except Exception as error:  # noqa: BLE001 - whatever CUDA says is the finding
        return _Capture(obstacle=obstacle_of(first[0] if first else error))
    return _Capture(graph=graph, nodes=nodes)


def obstacle_of(error: BaseException) -> Obstacle:
    """Return what was raised, and the innermost line outside torch that did it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    last = frames[-1] if frames else None
    return Obstacle(
        error=type(error).__name__,
        message=(str(error).strip().splitlines() or [""])[0][:300],
        place=f"{package_path(last.filename)}:{last.lineno}" if last else "",
        source=linecache.getline(last.filename, last.lineno or 0).strip() if last else "",
    )


def _median_us(session: EncoderSession, work: Callable[[], Any], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 2):
        session.synchronize()
        start = time.perf_counter_ns()
        work()
        session.synchronize()
        if repeat >= 2:
            times.append((time.perf_counter_ns() - start) / 1e3)
    return median(times)


# The probe --------------------------------------------------------------------------------------------------------


def probe(
    session: EncoderSession,
    grids: Sequence[Grid],
    variants: Sequence[str] | None = None,
    repeats: int = 20,
    modality: Modality = "image",
) -> BoundaryReport:
    """Probe every candidate on one call.

    Args:
        session: open; it needs no graphs.
        variants: None is every variant of the encoder.
        repeats: timed runs per region, on CUDA only.

    Raises:
        WorkbenchError: a grid that the encoder cannot take, an unknown variant.
    """
    names = names_for(session.facts.key) if variants is None else variants
    with torch.inference_mode():
        candidates = wanted(session, session.inputs(grids, modality), names)
        # What CUDA will refuse comes last: torch does not fully recover from a capture that ended in an error.
        found = {
            candidate.name: _probed(session, candidate, repeats)
            for candidate in sorted(candidates, key=lambda candidate: candidate.refused)
        }
    return BoundaryReport(
        schema_version=SCHEMA_VERSION,
        environment=environment(),
        model=session.model_record,
        replay=session.replay,
        grids=list(grids),
        boundaries=[found[candidate.name] for candidate in candidates],
    )


def _probed(session: EncoderSession, candidate: Candidate, repeats: int) -> Boundary:
    candidate.region(candidate.prepare())  # what is done at the first run only is no part of a replay
    syncs, unwatched = _watched(session, candidate)
    if session.device.type != "cuda":
        return Boundary(name=candidate.name, title=candidate.title, syncs=syncs)
    values = candidate.prepare()
    capture = _captured(candidate.region, values)
    eager = _median_us(session, lambda: candidate.region(dict(values)), repeats)
    inside = eager if capture.graph is None else _median_us(session, capture.graph.replay, repeats)
    outside = _median_us(session, candidate.prepare, repeats)
    output = candidate.region(dict(values))
    outside += _median_us(session, lambda: candidate.rest(output), repeats)
    return Boundary(
        name=candidate.name,
        title=candidate.title,
        captured=capture.graph is not None,
        nodes=capture.nodes,
        obstacle=capture.obstacle,
        syncs=syncs,
        unwatched=unwatched,
        inside_us=inside,
        eager_us=eager,
        outside_us=outside,
    )


def _watched(session: EncoderSession, candidate: Candidate) -> tuple[list[HostSync], str | None]:
    """Look for host syncs; on CUDA a kernel that refuses marked tensors leaves the verdict to the capture."""
    try:
        return host_syncs(candidate.region, candidate.prepare()), None
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        if session.device.type != "cuda":
            raise
        return [], f"{type(error).__name__}: {error}"[:300]
