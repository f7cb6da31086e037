"""Variants: small subclasses of vLLM's encoder models, each one idea, alone or together.

    from workbench.encoder.variants import attach, names_for

    model = attach(session.model, ["resampler", "metadata_cache"])     # shares the parts, so no weight is copied
    with session.with_variants(["resampler"]) as changed:              # a session with a manager over such a model
        changed.capture()

Each is described in docs/variants. A variant refuses to attach to a vLLM whose methods are not those it was written
for (`guard`).
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.encoder.variants import guard
from workbench.errors import WorkbenchError
from workbench.models import Modality


@dataclass(frozen=True)
class Variant:
    """One variant.

    Attributes:
        name: as a person types it.
        model: registry key of the encoder it is for.
        where: "module:Class" of the mixin, inside this package.
        idea: one line.
        sources: methods of vLLM it stands on.
        exact: its outputs are bit-identical to those of vLLM's graph at the same budget.
        modalities: what it adds to the modalities that have graphs.
    """

    name: str
    model: str
    where: str
    idea: str
    sources: tuple[str, ...]
    exact: bool = True
    modalities: tuple[Modality, ...] = ()

    @property
    def mixin(self) -> type:
        """The class; imports it, so vLLM must be importable."""
        module, _, name = self.where.partition(":")
        found: type = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return found


# Outermost first: the order in which their methods are found.
VARIANTS: tuple[Variant, ...] = (
    Variant(
        name="resampler",
        model="ernie45_vl",
        where="resampler:ResamplerInGraph",
        idea="the resampler inside the graph, for images and videos",
        sources=guard.MANAGER + guard.REPLAY + guard.GRIDS + guard.CONFIG + guard.CAPTURE + guard.EAGER,
        modalities=("video",),
    ),
    Variant(
        name="one_pass",
        model="ernie45_vl",
        where="one_pass:OnePass",
        idea="a call's buffers prepared in one pass: grids read once, no row copied or zeroed twice",
        sources=guard.MANAGER + guard.REPLAY + guard.GRIDS + guard.CONFIG,
    ),
    Variant(
        name="metadata_cache",
        model="ernie45_vl",
        where="metadata_cache:MetadataCache",
        idea="a batch's metadata computed once per grid, grids read once per call",
        sources=guard.MANAGER + guard.REPLAY + guard.GRIDS + guard.TOWER,
    ),
    Variant(
        name="fallback",
        model="ernie45_vl",
        where="fallback:Fallback",
        idea="the eager fallback post-processed once, without waiting for the GPU (D1, D5)",
        sources=guard.MANAGER + guard.EAGER,
    ),
    Variant(
        name="fused",
        model="ernie45_vl",
        where="fused:Fused",
        idea="no copies around attention, rotary in place, residual add and norm in one kernel",
        sources=guard.MANAGER + guard.REPLAY + guard.TOWER + guard.BLOCKS,
        exact=False,
    ),
    Variant(
        name="position_cache",
        model="glm4_1v",
        where="position_cache:PositionCache",
        idea="position embeddings interpolated once per grid",
        sources=guard.MANAGER + guard.GLM_POSITIONS,
    ),
    Variant(
        name="cu_seqlens_tail",
        model="glm4_1v",
        where="cu_seqlens_tail:CuSeqlensTail",
        idea="unused sequence offsets repeat the last one (D6)",
        sources=guard.MANAGER + guard.GLM,
    ),
)


def names_for(model: str) -> tuple[str, ...]:
    """Return the names of the variants of encoder `model`, a registry key."""
    return tuple(variant.name for variant in VARIANTS if variant.model == model)


def chosen(key: str, names: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants called `names` of encoder `key`, outermost first.

    Raises:
        WorkbenchError: no name, an unknown one, one of another encoder, or one twice.
    """
    known = names_for(key)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise WorkbenchError(
            f"{', '.join(map(repr, unknown)) or 'an empty list'} names no variant of {key}; it has {', '.join(known)}"
        )
    if len(set(names)) < len(names):
        raise WorkbenchError(f"a variant is named twice in {', '.join(names)}; name each once")
    return tuple(variant for variant in VARIANTS if variant.name in names)


def attach(model: Any, names: Sequence[str], key: str = "ernie45_vl") -> Any:
    """Return a model object with the named variants, over the parts of `model`, which stays as it is.

    Args:
        model: vLLM's model object.
        key: its registry key.

    Raises:
        WorkbenchError: an unknown variant; a vLLM whose methods differ; an encoder that a variant cannot take.
    """
    variants = chosen(key, names)
    for variant in variants:
        guard.require_sources(variant.name, variant.sources)
    if any(variant.name == "fused" for variant in variants):
        _require_plain_attention(model)
    mixins = tuple(variant.mixin for variant in variants)
    name = f"{type(model).__name__}_{'_'.join(variant.name for variant in variants)}"
    made: Any = type(name, (*mixins, type(model)), {})
    changed = made.__new__(made)
    torch.nn.Module.__init__(changed)
    for attribute, value in vars(model).items():
        # Dictionaries of modules and hooks are the object's own; what is in them is shared.
        changed.__dict__[attribute] = dict(value) if isinstance(value, dict) else value
    for mixin in mixins:
        prepare = vars(mixin).get("__init_variant__")
        if prepare is not None:
            prepare(changed)
    return changed


def _require_plain_attention(model: Any) -> None:
    attention = model.vision_model.blocks[0].attn
    if attention.tp_size > 1 or attention.attn.fp8_enabled:
        raise WorkbenchError(
            "variant fused takes one GPU and attention that is not quantised; use mm_encoder_tp_mode data, or leave "
            "the variant out"
        )
