"""Static replay: vLLM's encoder graph manager on a machine without CUDA.

A static replay runs the same forward over the same fixed buffers that a CUDA graph would have captured. It shows what
the manager packs, copies and pads, and whether padded outputs equal eager ones, on vLLM's own code. It says nothing
about launch times, and Python runs again at each replay, so values that a CUDA graph bakes in at capture (such as
`max_seqlen.item()`, or a branch) are not frozen here.

Import this module only after `engine.require_vllm`.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.attention.mm_encoder_attention as mm_encoder_attention
from vllm.v1.worker.encoder_cudagraph import BudgetGraphMetadata, EncoderCudaGraphManager


@dataclass(frozen=True)
class Finding:
    """Something wrong that a session saw in vLLM's buffers; it does not stop the session.

    Attributes:
        defect: its number in docs/defects.md.
        budget: token budget of the replay it was seen in.
        message: a sentence with the values seen.
    """

    defect: str
    budget: int
    message: str


class StaticReplay:
    """Stands in for a `torch.cuda.CUDAGraph`: `replay()` writes the forward's result into the output buffer."""

    def __init__(self, forward: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        self._forward = forward
        self._output = output

    def replay(self) -> None:
        """Run the forward on what the buffers hold now."""
        self._output.copy_(self._forward())


class StaticReplayManager(EncoderCudaGraphManager):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's manager, with the capture of one budget replaced by a static replay.

    Attributes:
        findings: what was seen in the buffers of replays, each finding once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.findings: list[Finding] = []

    def _capture_budget_graph(
        self, token_budget: int, path: str = "default", axis_keys: tuple[Hashable, ...] = ()
    ) -> None:
        buffers = self.model.prepare_encoder_cudagraph_capture_inputs(
            token_budget,
            self.max_batch_size,
            self.max_frames_per_batch,
            self.device,
            self.dtype,
            path,
            axis_keys,
        ).values

        def forward() -> torch.Tensor:
            with torch.inference_mode(), padded_tails(self.findings, token_budget):
                # A copy of the dict: the models pop from it.
                output: torch.Tensor = self.model.encoder_cudagraph_forward(dict(buffers), path=path)
                return output

        output = torch.empty_like(forward())
        key = (token_budget, axis_keys) if axis_keys else token_budget
        self._get_graph_set(path)[key] = BudgetGraphMetadata(
            token_budget=token_budget,
            max_batch_size=self.max_batch_size,
            max_frames_per_batch=self.max_frames_per_batch,
            graph=StaticReplay(forward, output),
            input_buffers=buffers,
            output_buffer=output,
            axis_keys=axis_keys,
        )


@contextlib.contextmanager
def padded_tails(findings: list[Finding], budget: int) -> Iterator[None]:
    """Let vLLM's CPU attention take the padded tail of a replay's buffers.

    The CPU attention splits the rows by the differences of `cu_seqlens` and refuses when they do not add up to all
    rows, which a padded buffer's never do. Inside, it gets the rows up to the first maximum of `cu_seqlens`, and the
    padding rows get zeros. A `cu_seqlens` that falls after its maximum is a finding: on the GPU its negative lengths
    reach the kernel.
    """
    original = mm_encoder_attention.vit_torch_sdpa_wrapper

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        cu_seqlens: torch.Tensor | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if cu_seqlens is None:
            return original(q, k, v, scale, cu_seqlens, enable_gqa)  # type: ignore[no-any-return]
        last = int(cu_seqlens.argmax())  # the first of equal maxima
        rows = int(cu_seqlens[last])
        if bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
            _report(findings, budget, cu_seqlens.tolist())
        output = torch.zeros_like(q)
        if rows:
            head = (x[:, :rows] for x in (q, k, v))
            output[:, :rows] = original(*head, scale, cu_seqlens[: last + 1], enable_gqa)
        return output

    mm_encoder_attention.vit_torch_sdpa_wrapper = attention
    try:
        yield
    finally:
        mm_encoder_attention.vit_torch_sdpa_wrapper = original


def _report(findings: list[Finding], budget: int, offsets: list[int]) -> None:
    shown = ", ".join(map(str, offsets[:8])) + (", ..." if len(offsets) > 8 else "")
    finding = Finding(
        defect="D6",
        budget=budget,
        message=(
            f"cu_seqlens of budget {budget} falls after its maximum ([{shown}], {len(offsets)} entries): the padding "
            "must repeat the last offset, or CUDA attention reads negative lengths"
        ),
    )
    if finding not in findings:
        findings.append(finding)


@contextlib.contextmanager
def checked_linears(model: torch.nn.Module) -> Iterator[None]:
    """Make vLLM's CPU linear layers refuse an input of the wrong width.

    CUDA's do; the packed CPU kernels read past their buffers instead and damage the process.
    """

    def check(layer: Any, arguments: tuple[Any, ...]) -> None:
        given = arguments[0]
        # A row-parallel layer of several ranks gets this rank's part.
        width = layer.input_size_per_partition if getattr(layer, "input_is_parallel", False) else layer.input_size
        if given.shape[-1] != width:
            raise RuntimeError(
                f"mat1 and mat2 shapes cannot be multiplied ({given.numel() // given.shape[-1]}x{given.shape[-1]} and "
                f"{width}x{layer.output_size})"
            )

    handles = [
        layer.register_forward_pre_hook(check)
        for layer in model.modules()
        if hasattr(layer, "quant_method") and hasattr(layer, "input_size")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
