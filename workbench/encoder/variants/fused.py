"""Variant `fused`: the tower without the small kernels around attention and norms.

Per call: cos and sin once. Per block: q, k and v are views of the product's output, rotated in place; attention
writes into one output that all blocks share and that is zeroed once, so that padding rows stay finite; residual add
and the next norm are one kernel; the activation is in place. Small graphs compute some steps in other ways, see
`recipe`. Only the captured forward changes, no eager path.

Where there is no Triton or no CUDA, the same dataflow runs in torch (`dataflow`).

Import this module only after `engine.require_vllm`.
"""

import importlib.util
from functools import partial
from typing import Any

import torch

from workbench.encoder.variants import dataflow
from workbench.encoder.variants.base import ErnieVariant
from workbench.encoder.variants.recipe import Attend, Recipe, Tile, choose, product


class Fused(ErnieVariant):
    """See the module.

    Attributes:
        kernels: module that holds `add_norm`, `rotate`, `quick_gelu` and `attend`.
        in_triton: `kernels` are Triton's, which can compute a step in several ways.
        recipes: (rows, sequence slots, longest sequence) -> how a graph of that shape computes its steps.
        plan_attention: let FlashAttention 3 plan the blocks' attention once per call. Off unless
            `python -m workbench.encoder.variants.check attention-plan` has shown that this FlashAttention can.
        schedules: (sequence slots, longest sequence) -> "once per call", or why attention is planned in every block.
    """

    plan_attention = False

    def __init_variant__(self) -> None:
        """Choose the kernels; `attach` calls it."""
        self.schedules: dict[tuple[int, int], str] = {}
        self.recipes: dict[tuple[int, int, int], Recipe] = {}
        self.kernels: Any = dataflow
        self.in_triton = self.vision_model.device.type == "cuda" and importlib.util.find_spec("triton") is not None
        if self.in_triton:
            from workbench.encoder.variants import kernels

            self.kernels = kernels

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor], path: str = "default") -> torch.Tensor:
        """Run the tower on [patches, features] pixel rows; [patches, width]."""
        pixels = values.pop("pixel_values")
        return self.tower(pixels, values)

    def tower(self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run every block; the norm behind each residual add is that of whatever comes next."""
        vision, run = self.vision_model, self.kernels
        hidden = vision.patch_embed(pixels)
        cos, sin = metadata["rotary_pos_emb"].cos(), metadata["rotary_pos_emb"].sin()
        first = vision.blocks[0].attn
        heads, size = first.num_attention_heads_per_partition, first.hidden_size_per_attention_head
        context = hidden.new_zeros(hidden.shape[0], heads, size)
        recipe = self._recipe(hidden.shape[0], metadata)
        attend = self._attend(recipe, metadata)
        normed: torch.Tensor = vision.blocks[0].norm1(hidden)
        following = [block.norm1 for block in vision.blocks[1:]] + [vision.ln]
        for block, next_norm in zip(vision.blocks, following, strict=True):
            qkv, _ = block.attn.qkv(normed)
            rows = qkv.view(-1, 3 * heads, size)
            run.rotate(rows[:, : 2 * heads], cos, sin)
            attended = attend(block.attn.attn, rows, context)
            update = product(block.attn.proj, attended.reshape(-1, heads * size), recipe.proj)
            normed = run.add_norm(hidden, *update, block.norm2)
            wide = run.quick_gelu(*product(block.mlp.fc1, normed, recipe.fc1))
            normed = run.add_norm(hidden, *product(block.mlp.fc2, wide, recipe.fc2), next_norm)
        return normed

    def _attend(self, recipe: Recipe, metadata: dict[str, torch.Tensor]) -> Attend:
        if recipe.tile is None:
            return self._attention(metadata)
        return partial(_attend_shortly, self.kernels, metadata["cu_seqlens"], int(metadata["max_seqlen"]), recipe.tile)

    def _recipe(self, rows: int, metadata: dict[str, torch.Tensor]) -> Recipe:
        """Return how a graph of `rows` rows computes its steps.

        vLLM calls the forward once before it captures. That call measures the ways, if nothing is captured meanwhile.
        """
        if not self.in_triton:
            return Recipe()
        from workbench.encoder.variants import kernels  # not `self.kernels`, which the parity lab watches

        offsets, longest = metadata["cu_seqlens"], int(metadata["max_seqlen"])
        key = (rows, offsets.shape[0] - 1, longest)
        if key not in self.recipes:
            if torch.cuda.is_current_stream_capturing():
                return Recipe()
            attend = self._attention(metadata, plan=False)
            self.recipes[key] = choose(self.vision_model.blocks, kernels, rows, attend, offsets, longest)
        return self.recipes[key]

    def _attention(self, metadata: dict[str, torch.Tensor], plan: bool = True) -> Attend:
        offsets, longest = metadata["cu_seqlens"], metadata["max_seqlen"]
        attention = self.vision_model.blocks[0].attn.attn
        if not _is_flash(attention):
            return partial(_attend_by_vllm, offsets, longest)
        most = int(longest)  # on the CPU; a CUDA graph bakes it in
        schedule = self._schedule(attention, offsets, most) if plan and attention._fa_version == 3 else None
        return partial(_attend_by_flash, offsets, most, schedule)

    def _schedule(self, attention: Any, offsets: torch.Tensor, most: int) -> torch.Tensor | None:
        """Return FlashAttention 3's plan of all blocks' attention, or None where each block must make its own.

        vLLM calls the forward once before it captures. That call tries the plan: attention with it, twice, must equal
        attention without it.
        """
        key = (offsets.shape[0], most)
        if not self.plan_attention:
            self.schedules[key] = "in every block: not asked for"
            return None
        if key not in self.schedules:
            if torch.cuda.is_current_stream_capturing():
                return None  # not tried yet, and a failure would end the capture
            self.schedules[key] = attention_plan(attention, offsets, most, self.vision_model.dtype)
        if self.schedules[key] != "once per call":
            return None
        return _flash_schedule(attention, offsets, most, self.vision_model.dtype)


def _is_flash(attention: Any) -> bool:
    return bool(attention.attn_backend.name == "FLASH_ATTN")


def _attend_by_vllm(
    offsets: torch.Tensor, longest: torch.Tensor, attention: Any, rows: torch.Tensor, context: torch.Tensor
) -> torch.Tensor:
    """Run vLLM's own attention on views of [rows, 3 heads, size]; it makes the output itself."""
    q, k, v = (x.unsqueeze(0) for x in rows.chunk(3, dim=1))
    output: torch.Tensor = attention(query=q, key=k, value=v, cu_seqlens=offsets, max_seqlen=longest)
    return output.squeeze(0)


def _attend_shortly(
    kernels: Any,
    offsets: torch.Tensor,
    longest: int,
    tile: Tile,
    attention: Any,
    rows: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """Run the kernel for short sequences on [rows, 3 heads, size] into `context`."""
    kernels.attend(rows, offsets, longest, attention.scale, context, tile)
    return context


def _attend_by_flash(
    offsets: torch.Tensor,
    most: int,
    schedule: torch.Tensor | None,
    attention: Any,
    rows: torch.Tensor,
    context: torch.Tensor,
) -> torch.Tensor:
    """Run FlashAttention on views of [rows, 3 heads, size] into `context`, whose padding rows it leaves alone."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    q, k, v = rows.chunk(3, dim=1)
    more = {} if schedule is None else {"scheduler_metadata": schedule}
    flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=most,
        max_seqlen_k=most,
        dropout_p=0.0,
        causal=False,
        softmax_scale=attention.scale,
        fa_version=attention._fa_version,
        out=context,
        **more,
    )
    return context


def _flash_schedule(attention: Any, offsets: torch.Tensor, most: int, dtype: torch.dtype) -> torch.Tensor:
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    schedule: torch.Tensor = get_scheduler_metadata(
        batch_size=offsets.shape[0] - 1,
        max_seqlen_q=most,
        max_seqlen_k=most,
        num_heads_q=attention.num_heads,
        num_heads_kv=attention.num_kv_heads,
        headdim=attention.head_size,
        cache_seqlens=offsets[1:] - offsets[:-1],
        qkv_dtype=dtype,
        cu_seqlens_q=offsets,
        causal=False,
    )
    return schedule


def attention_plan(attention: Any, offsets: torch.Tensor, most: int, dtype: torch.dtype) -> str:
    """Compare attention with one plan, used three times over, and without; "once per call", or what is wrong."""
    shape = (int(offsets[-1]), 3 * attention.num_heads, attention.head_size)
    rows = torch.randn(shape, dtype=dtype, device=offsets.device)
    plain, planned = (torch.zeros_like(rows[:, : attention.num_heads]).contiguous() for _ in range(2))
    _attend_by_flash(offsets, most, None, attention, rows, plain)
    try:
        schedule = _flash_schedule(attention, offsets, most, dtype)
        for _ in range(3):
            _attend_by_flash(offsets, most, schedule, attention, rows, planned.zero_())
            if not torch.equal(plain, planned):
                return "in every block: with one plan for all the result differs"
    except (RuntimeError, TypeError, AttributeError, ImportError) as error:
        return f"in every block: {type(error).__name__} {str(error).splitlines()[0][:120]}"
    return "once per call"
