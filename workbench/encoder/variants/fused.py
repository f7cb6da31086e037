"""Variant `fused`: the tower without the small kernels around attention and norms.

Per call: cos and sin once. Per block: q, k and v are views of the product's output, rotated in place; attention
writes into one output that all blocks share and that is zeroed once, so that padding rows stay finite; residual add
and the next norm are one kernel; the activation is in place. Where that is faster, steps are computed in other ways,
see `recipe`. Only the captured forward changes, no eager path.

Where there is no Triton or no CUDA, the same dataflow runs in torch (`dataflow`).

Import this module only after `engine.require_vllm`.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from workbench.encoder.variants import attention as attending
from workbench.encoder.variants import dataflow, gemm
from workbench.encoder.variants.attention import FLASH4, TILES, Attend, Flash4
from workbench.encoder.variants.base import ErnieVariant
from workbench.encoder.variants.recipe import LAYERS, MOST_ROWS, Attention, Recipe, Stream, choose, layer_of, run_block

# What was measured, by tower: models that share one do not measure again, so their graphs compute alike.
_MEASURED: "WeakKeyDictionary[torch.nn.Module, dict[tuple[int, int, int], Recipe]]" = WeakKeyDictionary()


class Fused(ErnieVariant):
    """See the module.

    Attributes:
        kernels: module that holds the functions of `dataflow.KERNELS`.
        in_triton: `kernels` are Triton's, and steps are measured in several ways.
        recipes: (rows, sequence slots, longest sequence) -> how this model's graph of that shape computes its steps.
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

    def normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a layer norm of [rows, width], for other variants too."""
        result: torch.Tensor = self.kernels.normed(x, norm) if isinstance(norm, torch.nn.LayerNorm) else norm(x)
        return result

    def tower(self, pixels: torch.Tensor, metadata: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run every block; the norm behind each residual add is that of whatever comes next."""
        vision = self.vision_model
        hidden = vision.patch_embed(pixels)
        first = vision.blocks[0].attn
        heads, size = first.num_attention_heads_per_partition, first.hidden_size_per_attention_head
        stream = Stream(
            hidden,
            self.normed(vision.blocks[0].norm1, hidden),
            metadata["rotary_pos_emb"].cos(),
            metadata["rotary_pos_emb"].sin(),
            hidden.new_zeros(hidden.shape[0], heads, size),
        )
        recipe = self._recipe(hidden.shape[0], metadata)
        attend = self._attend(recipe.attention, self.kernels, metadata)
        following = [block.norm1 for block in vision.blocks[1:]] + [vision.ln]
        for block, next_norm in zip(vision.blocks, following, strict=True):
            run_block(self.kernels, block, next_norm, stream, attend, recipe)
        return stream.normed

    def _attend(
        self, way: Attention | None, kernels: Any, metadata: dict[str, torch.Tensor], plan: bool = True
    ) -> Attend:
        offsets, longest = metadata["cu_seqlens"], int(metadata["max_seqlen"])  # on the CPU; a CUDA graph bakes it in
        if isinstance(way, Flash4):
            return partial(attending.by_flash4, offsets, longest, way)
        if way is not None:
            return partial(attending.by_kernel, kernels, offsets, longest, way)
        attention = self.vision_model.blocks[0].attn.attn
        if not attending.is_flash(attention):
            return partial(attending.by_vllm, offsets, metadata["max_seqlen"])
        schedule = self._schedule(attention, offsets, longest) if plan and attention._fa_version == 3 else None
        return partial(attending.by_flash, offsets, longest, schedule)

    def _recipe(self, rows: int, metadata: dict[str, torch.Tensor]) -> Recipe:
        """Return how a graph of `rows` rows computes its steps.

        vLLM calls the forward once before it captures. That call measures the ways, if nothing is captured meanwhile.
        """
        if not self.in_triton:
            return Recipe()
        from workbench.encoder.variants import kernels  # not `self.kernels`, which the parity lab watches

        offsets = metadata["cu_seqlens"]
        key = (rows, offsets.shape[0] - 1, int(metadata["max_seqlen"]))
        measured = _MEASURED.setdefault(self.vision_model, {})
        if key not in measured:
            if torch.cuda.is_current_stream_capturing():
                return Recipe()
            measured[key] = self._measured(rows, kernels, metadata)
        self.recipes[key] = measured[key]
        return measured[key]

    def _measured(self, rows: int, kernels: Any, metadata: dict[str, torch.Tensor]) -> Recipe:
        blocks, offsets = self.vision_model.blocks, metadata["cu_seqlens"]
        ways: list[Attention | None] = [None, *(TILES if rows <= MOST_ROWS else ())]
        refused = []
        if reason := attending.flash4_refusal(blocks[0].attn.attn, offsets.device):
            refused.append(f"FlashAttention 4: {reason}")
        else:
            ways += FLASH4
        gemms: dict[str, Sequence[gemm.Gemm]] = dict.fromkeys(LAYERS, ())
        if not gemm.is_hopper(offsets.device):
            refused.append("other products: their tiles here are for Hopper")
        else:
            if not gemm.has_quack():
                refused.append("products by quack: quack-kernels is not installed")
            gemms = {step: self._gemms(step, rows) for step in LAYERS}
        attends = {way: self._attend(way, kernels, metadata, plan=False) for way in ways}
        recipe = choose(blocks, kernels, rows, attends, gemms, offsets)
        return replace(recipe, refused=(*refused, *recipe.refused))

    def _gemms(self, step: str, rows: int) -> Sequence[gemm.Gemm]:
        """Return the ways worth a trial on a product of this tower."""
        weight = getattr(layer_of(self.vision_model.blocks[0], step), "weight", None)
        if weight is None or weight.dim() != 2:  # quantised
            return ()
        multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        outer, inner = weight.shape
        return gemm.candidates(step, rows, outer, inner, multiprocessors, gemm.has_quack())

    def _schedule(self, attention: Any, offsets: torch.Tensor, most: int) -> torch.Tensor | None:
        """Return FlashAttention 3's plan of all blocks' attention, or None where each block must make its own.

        vLLM calls the forward once before it captures. That call tries the plan: attention with it must equal
        attention without it.
        """
        key = (offsets.shape[0], most)
        if not self.plan_attention:
            self.schedules[key] = "in every block: not asked for"
            return None
        if key not in self.schedules:
            if torch.cuda.is_current_stream_capturing():
                return None  # not tried yet, and a failure would end the capture
            self.schedules[key] = attending.attention_plan(attention, offsets, most, self.vision_model.dtype)
        if self.schedules[key] != "once per call":
            return None
        return attending.flash_schedule(attention, offsets, most, self.vision_model.dtype)
