"""CUDA's conditions on the CPU, for the parity lab: graphs that are recordings, attention that is like FlashAttention.

A *recorded graph* is what a CUDA graph is, at the level of torch's operators: a capture notes every operator with the
tensors and numbers it got, and a replay runs the list again, on the same memory. Python does not run, so addresses,
host values and branches stay what they were. Intermediate results are the pool's memory, which others may have written.

Attention goes through vLLM's own FlashAttention wrapper to a kernel that behaves like the GPU's: it reads `cu_seqlens`
at the replay and `max_seqlen` at the launch, works in tiles, leaves rows behind the last sequence unwritten, and
multiplies what lies in a tile behind the sequence by zero, so that NaN there spreads. Memory of `torch.empty` is NaN.
Matrix products round differently for another number of rows and during a capture, so no two arms agree in every bit.
"""

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.budgets import Configuration
from workbench.encoder import engine
from workbench.encoder.instruments import wrapped
from workbench.encoder.parity.lab import Lab, lab_options
from workbench.encoder.parity.noise import noise_grids
from workbench.encoder.session import EncoderSession, open_session
from workbench.models import model_facts

TILE = 16  # rows; the GPU's are larger, and so are its budgets
NOISY_SHARE = 0.2  # of the values of a product that come out in the next bfloat16


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Notes operators while it is active; `replay` runs them again on the memory that they had."""

    active: "Recording | None" = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Callable[[], None]] = []
        self.memory: list[torch.Tensor] = []

    def __enter__(self) -> "Recording":
        Recording.active = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        Recording.active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, output)
        return output

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        made = _tensors(output)
        fresh = [i for i, x in enumerate(made) if x.untyped_storage().data_ptr() not in given]
        self.memory += [made[i] for i in fresh]
        if func._schema.name.startswith("aten::empty") or not (fresh or func._schema.is_mutable):
            return

        def step() -> None:
            again = _tensors(func(*args, **kwargs))
            for i in fresh:
                made[i].copy_(again[i])

        self._steps.append(step)

    def kernel(self, run: Callable[[], None]) -> None:
        """Run one kernel and note it whole."""
        with _disable_current_modes():
            run()
        self._steps.append(run)

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self._steps:
            step()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [x for each in value for x in _tensors(each)] if isinstance(value, list | tuple) else []


def attention_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    out: torch.Tensor,
    **_rest: Any,
) -> torch.Tensor:
    """[rows, heads, head size] each, as `flash_attn_varlen_func`."""

    def run() -> None:
        offsets = cu_seqlens_q.tolist()
        for start, end in itertools.pairwise(offsets):
            if not 0 <= start < end <= len(q):
                continue
            queries = min(end, start + -(-max_seqlen_q // TILE) * TILE)
            behind = min(len(q), start + -(-(end - start) // TILE) * TILE) - end
            x, y, z = (t.transpose(0, 1).float() for t in (q[start:queries], k[start:end], v[start : end + behind]))
            weights = (x @ y.transpose(1, 2) * softmax_scale).softmax(dim=-1)
            padded = torch.nn.functional.pad(weights.to(v.dtype).float(), (0, behind))
            out[start:queries] = (padded @ z).transpose(0, 1).to(out.dtype)

    if Recording.active is not None:
        Recording.active.kernel(run)
    else:
        run()
    return out


@contextmanager
def flash_attention(session: EncoderSession) -> Iterator[None]:
    """Let the encoder's attention go through vLLM's FlashAttention wrapper to `attention_kernel`."""
    import vllm.model_executor.layers.attention.mm_encoder_attention as layer
    import vllm.v1.attention.backends.fa_utils as fa_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.ops import vit_attn_wrappers

    class _Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        def is_cuda(self) -> bool:
            return True

    def direct(*args: Any, **kwargs: Any) -> torch.Tensor:
        return vit_attn_wrappers.flash_attn_maxseqlen_wrapper(*args, **kwargs)  # type: ignore[no-any-return]

    def capturing() -> bool:
        return Recording.active is not None

    platform = vit_attn_wrappers.current_platform
    kernel = getattr(fa_utils, "flash_attn_varlen_func", None)
    tower = session.model.vision_model if hasattr(session.model, "vision_model") else session.model.visual
    tower.attn_backend = AttentionBackendEnum.FLASH_ATTN
    for block in tower.blocks:
        own = block.attn.attn
        own.attn_backend, own.is_flash_attn_backend = AttentionBackendEnum.FLASH_ATTN, True
        own._fa_version, own._forward_method = 3, own.forward_cuda
    with ExitStack() as stack:
        stack.enter_context(wrapped(layer, "vit_flash_attn_wrapper", lambda _original: direct))
        stack.enter_context(wrapped(torch.cuda, "is_current_stream_capturing", lambda _original: capturing))
        stack.callback(setattr, vit_attn_wrappers, "current_platform", platform)
        stack.callback(setattr, fa_utils, "flash_attn_varlen_func", kernel)
        vit_attn_wrappers.current_platform = _Platform()
        fa_utils.flash_attn_varlen_func = attention_kernel
        for name, module in tower.named_modules():
            if name == "patch_embed" or re.fullmatch(r"blocks\.\d+\.(attn|mlp)", name):
                stack.callback(module.register_forward_hook(_rounding(name)).remove)
        yield


def _rounding(name: str) -> Any:
    """A hook that moves a share of a module's values by one unit in the last place."""
    factors: dict[tuple[Any, ...], torch.Tensor] = {}

    def hook(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
        key = (*output.shape, Recording.active is not None)
        if key not in factors:
            with _disable_current_modes():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
                moved = torch.rand(output.shape, generator=generator) < NOISY_SHARE
                factors[key] = (1 + moved * 2.0**-7).to(torch.float32)
        return (output.float() * factors[key]).to(output.dtype)

    return hook


def recording_manager() -> type[Any]:
    """Return vLLM's manager with recorded graphs in place of CUDA's."""
    from vllm.v1.worker.encoder_cudagraph import BudgetGraphMetadata, EncoderCudaGraphManager

    class RecordingManager(EncoderCudaGraphManager):  # type: ignore[misc]
        bakes = True

        def _capture_budget_graph(self, token_budget: int, path: str = "default", axis_keys: Any = ()) -> None:
            values = self.model.prepare_encoder_cudagraph_capture_inputs(
                token_budget, self.max_batch_size, self.max_frames_per_batch, self.device, self.dtype, path, axis_keys
            ).values
            with torch.inference_mode():
                output = torch.empty_like(self.model.encoder_cudagraph_forward(dict(values), path=path))
                graph = Recording()
                with graph:
                    output.copy_(self.model.encoder_cudagraph_forward(dict(values), path=path))
            self._get_graph_set(path)[token_budget] = BudgetGraphMetadata(
                token_budget=token_budget,
                max_batch_size=self.max_batch_size,
                max_frames_per_batch=self.max_frames_per_batch,
                graph=graph,
                input_buffers=values,
                output_buffer=output,
                axis_keys=axis_keys,
            )

    return RecordingManager


class _Filling:
    """Fills the memory of all graphs of a manager, except what the manager itself reads and writes."""

    def __init__(self, manager: Any, value: float) -> None:
        self._value = value
        graphs = manager.budget_graphs["default"].values()
        self._memory = [
            memory
            for captured in graphs
            for memory in getattr(captured.graph, "memory", [])
            if memory.is_floating_point()
        ]

    @torch.inference_mode()
    def replay(self) -> None:
        for memory in self._memory:
            memory.fill_(self._value)


@contextmanager
def recorded_lab(model: str, configuration: Configuration, variants: Sequence[str] = ()) -> Iterator[Lab]:
    """Open a lab of a small encoder under CUDA's conditions; of no use are the bits of vLLM's own graph, see above."""
    import msgspec

    engine.require_vllm()
    from workbench.encoder import static_replay
    from workbench.encoder.parity import scenarios

    facts = model_facts(model)
    options = replace(lab_options(model, "cpu")[0], width=facts.width // facts.heads)
    with ExitStack() as stack:
        manager = recording_manager()
        stack.callback(setattr, static_replay, "StaticReplayManager", static_replay.StaticReplayManager)
        static_replay.StaticReplayManager = manager  # type: ignore[misc]
        stack.enter_context(
            wrapped(scenarios, "pool_filling", lambda _original: lambda lab, value: _Filling(lab.manager, value))
        )
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        session = stack.enter_context(open_session(options, configuration))
        reference = stack.enter_context(open_session(replace(options, dtype="float32"), configuration))
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `torch.empty` returns with NaN
        stack.enter_context(flash_attention(session))
        session.model_record = msgspec.structs.replace(session.model_record, attention_backend="FLASH_ATTN 3")
        if variants:
            session = stack.enter_context(session.with_variants(variants))
        lab = Lab(session, variants=variants)
        lab.capture()
        lab.measure_noise(reference, [lab.inputs(grids) for grids in noise_grids(lab.budgets, session.facts.merge)])
        lab.restart_inputs()
        yield lab
