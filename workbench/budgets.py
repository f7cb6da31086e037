"""The budget configuration under study, resolved as vLLM resolves it.

The rules are those of `EncoderCudaGraphManager.__init__` and `CompilationConfig` in vLLM 0.33.0
(`vllm/v1/worker/encoder_cudagraph.py`, `vllm/config/compilation.py`). Budgets, items and frames:

* a *token budget* is the number of output tokens (after the spatial merge) that one captured graph holds;
* *max items* is the number of images or videos that one replay may hold;
* *max frames* sizes the captured sequence buffer of models with video.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from workbench.errors import WorkbenchError
from workbench.models import ModelFacts

# Beyond any encoder; keeps every sum of the planner inside 64 bits.
MAX_TOKENS = 2**40
# vLLM's limit of a modality that `--limit-mm-per-prompt` does not name.
DEFAULT_VIDEO_LIMIT = 999
# vLLM asks for confirmation in its log above this number of captured graphs.
MANY_GRAPHS = 64

_SWITCH = "cudagraph_mm_encoder"
_BUDGETS = "encoder_cudagraph_token_budgets"
_ITEMS = "encoder_cudagraph_max_vision_items_per_batch"
_FRAMES = "encoder_cudagraph_max_frames_per_batch"


@dataclass(frozen=True)
class Configuration:
    """What a person asks vLLM for.

    Attributes:
        budgets: token budgets in any order; empty: vLLM infers them.
        max_items: images or videos per replay; 0: vLLM infers it.
        max_frames: frames per replay; None: max items x the model's frames per video.
    """

    budgets: tuple[int, ...] = ()
    max_items: int = 0
    max_frames: int | None = None

    def compilation_config(self) -> dict[str, Any]:
        """Return the object to give `vllm serve --compilation-config`; inferred values are left out."""
        config: dict[str, Any] = {_SWITCH: True}
        if self.budgets:
            config[_BUDGETS] = list(self.budgets)
        if self.max_items:
            config[_ITEMS] = self.max_items
        if self.max_frames is not None:
            config[_FRAMES] = self.max_frames
        return config


@dataclass(frozen=True)
class Limits:
    """What vLLM infers budgets from, besides the configuration.

    Attributes:
        max_model_len: the server's `--max-model-len`; None: not given.
        max_num_batched_tokens: the server's `--max-num-batched-tokens`; None: not given.
        min_budget: smallest budget the model's class suggests (64 for Ernie-4.5-VL and GLM-4.1V).
        video_limit: videos allowed per prompt; 0 switches the frames of the manager off.
        max_frames_per_video: frames the model's class assumes per video; vLLM's default is 1.
    """

    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    min_budget: int = 64
    video_limit: int = DEFAULT_VIDEO_LIMIT
    max_frames_per_video: int = 1

    @classmethod
    def of(cls, facts: ModelFacts, **given: int | None) -> "Limits":
        """Return the limits of a server of `facts`; `given` values that are not None replace the model's."""
        known = {name: value for name, value in given.items() if value is not None}
        frames = facts.frames_per_video(known.get("video_limit", DEFAULT_VIDEO_LIMIT))
        return cls(**{"min_budget": facts.min_budget, "max_frames_per_video": frames} | known)

    @property
    def max_budget(self) -> int | None:
        """Largest inferred budget, min(max_num_batched_tokens, max_model_len); None when neither is given."""
        given = [n for n in (self.max_model_len, self.max_num_batched_tokens) if n is not None]
        return min(given) if given else None


@dataclass(frozen=True)
class Resolved:
    """The configuration that a manager runs with.

    Attributes:
        budgets: ascending, repeated ones kept (vLLM captures a repeated budget twice).
        max_items: images or videos per replay, at most the smallest budget unless vLLM accepts more.
        max_frames: `max_frames_per_batch`, 0 when videos are switched off.
        warnings: sentences about input that vLLM accepts but that does not do what it seems to.
    """

    budgets: tuple[int, ...]
    max_items: int
    max_frames: int
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def sequence_slots(self) -> int:
        """Attention sequences (images or video frames) that the captured `cu_seqlens` holds.

        A model with video captures one slot per frame, never fewer than one per item.
        """
        return max(self.max_items, self.max_frames)


def generate_budgets(smallest: int, largest: int) -> tuple[int, ...]:
    """Return vLLM's inferred budgets: doubling from `smallest`, `largest` always last."""
    budgets = []
    budget = smallest
    while budget <= largest:
        budgets.append(budget)
        budget *= 2
    if not budgets or budgets[-1] < largest:
        budgets.append(largest)
    return tuple(budgets)


def resolve(configuration: Configuration, limits: Limits | None = None) -> Resolved:
    """Return what vLLM makes of `configuration`.

    Raises:
        WorkbenchError: vLLM refuses it, or it must be inferred and `limits` do not say from what.
    """
    limits = limits or Limits()
    check_values(configuration, limits)
    budgets, max_items = _budgets_and_items(configuration, limits)
    if limits.video_limit == 0:
        max_frames = 0
    elif configuration.max_frames is not None:
        max_frames = configuration.max_frames
    else:
        max_frames = max_items * limits.max_frames_per_video
    return Resolved(budgets, max_items, max_frames, tuple(_warnings(configuration, limits, budgets)))


def check_values(configuration: Configuration, limits: Limits) -> None:
    """Refuse values that make no configuration.

    Raises:
        WorkbenchError: a budget or a limit that is not positive, a negative number, or one beyond any encoder.
    """
    for budget in configuration.budgets:
        if budget <= 0:
            raise WorkbenchError(f"budget {budget} is not positive; vLLM refuses it, so remove it")
    if configuration.max_items < 0:
        raise WorkbenchError(
            f"max items {configuration.max_items} is negative; vLLM refuses it, use 0 to let vLLM infer it"
        )
    if configuration.max_frames is not None and configuration.max_frames < 0:
        raise WorkbenchError(f"max frames {configuration.max_frames} is negative; vLLM refuses it, so leave it out")
    if limits.video_limit < 0 or limits.max_frames_per_video < 0:
        raise WorkbenchError("the video limit and the frames per video cannot be negative; use 0 for no video")
    server = {"model len": limits.max_model_len, "num batched tokens": limits.max_num_batched_tokens}
    for name, value in server.items():
        if value is not None and value <= 0:
            raise WorkbenchError(f"max {name} {value} is not positive; vLLM refuses it, so raise it")
    given = (value for value in server.values() if value is not None)
    sizes = (*configuration.budgets, configuration.max_items, configuration.max_frames or 0, *given)
    if max(sizes) > MAX_TOKENS:
        raise WorkbenchError(f"{max(sizes)} is larger than any encoder call; the workbench stops at {MAX_TOKENS}")


def _budgets_and_items(configuration: Configuration, limits: Limits) -> tuple[tuple[int, ...], int]:
    budgets = tuple(sorted(configuration.budgets))
    if budgets and configuration.max_items:
        if configuration.max_items > budgets[0]:
            raise WorkbenchError(
                f"max items {configuration.max_items} is above the smallest budget {budgets[0]}, which would "
                "leave less than one token per item; vLLM refuses it, so lower max items or raise that budget"
            )
        return budgets, configuration.max_items
    largest = _largest_inferred(limits)
    if configuration.max_items:
        return generate_budgets(max(limits.min_budget, configuration.max_items), largest), configuration.max_items
    budgets = budgets or generate_budgets(limits.min_budget, largest)
    return budgets, min(largest // limits.min_budget, budgets[0])


def _largest_inferred(limits: Limits) -> int:
    """Return the largest inferred budget, refusing the ranges that vLLM refuses."""
    largest = limits.max_budget
    if largest is None:
        raise WorkbenchError(
            "budgets or max items are left to vLLM, which infers them from the server's limits; give max "
            "model len and max num batched tokens, or both budgets and max items"
        )
    if limits.min_budget <= 0 or largest <= 0:
        raise WorkbenchError(
            f"the inferred budgets would run from {limits.min_budget} to {largest}; vLLM refuses a range "
            "that is not positive, so raise the limits"
        )
    if limits.min_budget > largest:
        raise WorkbenchError(
            f"the model's smallest budget {limits.min_budget} is above the largest, {largest} (the smaller "
            "of max model len and max num batched tokens); vLLM refuses it, so raise these limits or give "
            "budgets and max items"
        )
    return largest


def _warnings(configuration: Configuration, limits: Limits, budgets: Sequence[int]) -> list[str]:
    warnings = []
    asked = configuration.budgets
    if list(asked) != sorted(asked):
        warnings.append(f"budgets {_listed(asked)} are not in ascending order; vLLM sorts them")
    repeated = sorted({budget for budget in asked if asked.count(budget) > 1})
    if repeated:
        warnings.append(f"budgets repeat {_listed(repeated)}; vLLM captures each repetition and uses one")
    if not asked and configuration.max_items > budgets[0]:
        warnings.append(
            f"max items {configuration.max_items} is above the smallest inferred budget {budgets[0]}; vLLM "
            "accepts it with inferred budgets, though that graph cannot hold so many items"
        )
    inferred = not (asked and configuration.max_items)
    if inferred and (limits.max_model_len is None) != (limits.max_num_batched_tokens is None):
        warnings.append(
            "only one of max model len and max num batched tokens is given; the other is taken to be no smaller"
        )
    if limits.video_limit == 0 and configuration.max_frames:
        warnings.append(f"max frames {configuration.max_frames} has no effect when the video limit is 0")
    return warnings


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def parse_budgets(text: str) -> tuple[int, ...]:
    """Return the budgets of a comma-separated list; empty text means that vLLM infers them.

    Raises:
        WorkbenchError: something in the list is not a whole number.
    """
    budgets = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            budgets.append(int(part))
        except ValueError:
            raise WorkbenchError(
                f"budget {part!r} is not a whole number; give budgets like 128,256 or none for vLLM's own"
            ) from None
    return tuple(budgets)


class _CompilationConfig(msgspec.Struct, frozen=True):
    """The fields of vLLM's CompilationConfig that concern the encoder; the others are ignored."""

    cudagraph_mm_encoder: bool = False
    encoder_cudagraph_token_budgets: list[int] = []
    encoder_cudagraph_max_vision_items_per_batch: int = 0
    encoder_cudagraph_max_frames_per_batch: int | None = None


def parse_compilation_config(text: str | bytes) -> Configuration:
    """Return the configuration inside the JSON of `vllm serve --compilation-config`.

    Raises:
        WorkbenchError: not JSON, a value of another type, a misspelt name, or encoder graphs not switched on.
    """
    try:
        config = msgspec.json.decode(text, type=_CompilationConfig, strict=False)
        names = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise WorkbenchError(f"the compilation config is not what vLLM reads: {error}") from None
    for name in names:
        if "encoder_cudagraph" in name and name not in _CompilationConfig.__struct_fields__:
            known = ", ".join(_CompilationConfig.__struct_fields__)
            raise WorkbenchError(f"the compilation config has {name!r}, which vLLM refuses; it knows {known}")
    if not config.cudagraph_mm_encoder:
        raise WorkbenchError(
            f'the compilation config lacks "{_SWITCH}": true, so vLLM captures no encoder graph; add it'
        )
    return Configuration(
        budgets=tuple(config.encoder_cudagraph_token_budgets),
        max_items=config.encoder_cudagraph_max_vision_items_per_batch,
        max_frames=config.encoder_cudagraph_max_frames_per_batch,
    )
