"""From pixels to patches to tokens: each model's own resize rule, for whole columns of sizes at once.

The rules are written here again, in numpy, because planning must need neither torch nor vLLM and a million
calls of a Python function take seconds. Tests compare every rule with the function that vLLM itself calls.
All arithmetic is the same sequence of IEEE double operations; `numpy.rint` rounds halves to even as Python's
`round` does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import WorkbenchError
from workbench.files import read_json
from workbench.models import Modality, ModelFacts, SizeLimits

Ints = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]

MAX_SIDE = 1_000_000  # pixels; a larger side is a mistake in the data
MAX_PIXELS = 2**53  # width x height x frames stay exact as a double, as the rules need
HUGE = 9_999_999  # vLLM asks a rule for its largest item with this side (get_image_size_with_most_features)


@dataclass(frozen=True)
class Resized:
    """What a rule made of N sizes, in pixels.

    Attributes:
        width, height: int64 [N], multiples of patch x merge; 0 where the rule gives no size.
        refused: bool [N], True where the Hugging Face processor raises for the aspect ratio.
        failed: bool [N], True where the rule itself raises, or would resize to nothing.
    """

    width: Ints
    height: Ints
    refused: Flags
    failed: Flags


def resize(sizes: Sizes, modality: Modality, facts: ModelFacts) -> Resized:
    """Apply the model's resize rule to `sizes`, all of one modality.

    * ERNIE-4.5-VL: `smart_resize` of vLLM's `ernie45_vl.py`, which the checkpoint's own (remote code)
      processor
      mirrors. Above an aspect ratio of 200 vLLM clamps the longer side, where transformers' processor raises:
      `refused` marks them, the sizes are vLLM's. (Below 14 pixels a side transformers' rule differs too.)
    * Limits that count frames (GLM-4.1V, Qwen3-VL video): `smart_resize` of transformers' `glm4v`, which vLLM
      calls
      too. An image counts as one temporal patch of frames.
    * All others (Qwen images): `smart_resize` of transformers' `qwen2_vl`.

    Args:
        sizes: int [N, 3], (width, height, frames), all positive.
        modality: whose limits to take.
        facts: the model.

    Raises:
        WorkbenchError: the model has no rule for the modality.
    """
    limits = facts.limits.get(modality)
    if limits is None:
        raise WorkbenchError(
            f"{facts.title} takes no {modality} here ({facts.architecture} has graphs for "
            f"{', '.join(facts.graph_modalities)}); leave {modality} items out of the workload"
        )
    width, height, frames = (sizes[:, column].astype(np.float64) for column in range(3))
    factor = facts.patch * facts.merge
    if facts.key == "ernie45_vl":
        return _resize_clamped(width, height, factor, limits)
    if limits.counts_frames:
        counted = np.maximum(frames, facts.temporal_patch)
        return _resize_frames(width, height, counted, facts.temporal_patch, factor, limits)
    return _resize_plain(width, height, factor, limits)


def _aspect(width: Reals, height: Reals) -> Reals:
    ratio: Reals = np.maximum(width, height) / np.minimum(width, height)
    return ratio


def _nearest(side: Reals, factor: int) -> Reals:
    return np.rint(side / factor) * factor


def _floor(side: Reals, factor: int) -> Reals:
    return np.floor(side / factor) * factor


def _ceil(side: Reals, factor: int) -> Reals:
    return np.ceil(side / factor) * factor


def _resize_clamped(width: Reals, height: Reals, factor: int, limits: SizeLimits) -> Resized:
    """vLLM's rule for ERNIE-4.5-VL."""
    ratio = limits.max_aspect or math.inf
    refused = _aspect(width, height) > ratio
    tall = height > width
    short = np.maximum(factor, _nearest(np.minimum(width, height), factor))
    long = _floor(short * ratio, factor) if refused.any() else short
    width = np.where(refused, np.where(tall, short, long), width)
    height = np.where(refused, np.where(tall, long, short), height)
    new_width = np.maximum(factor, _nearest(width, factor))
    new_height = np.maximum(factor, _nearest(height, factor))
    area = new_width * new_height
    down = np.sqrt((height * width) / limits.max_pixels)
    up = np.sqrt(limits.min_pixels / (height * width))
    large, small = area > limits.max_pixels, area < limits.min_pixels
    new_width = np.select([large, small], [_floor(width / down, factor), _ceil(width * up, factor)], new_width)
    new_height = np.select([large, small], [_floor(height / down, factor), _ceil(height * up, factor)], new_height)
    area = new_width * new_height
    return _resized(new_width, new_height, refused, (area < limits.min_pixels) | (area > limits.max_pixels))


def _resize_frames(
    width: Reals, height: Reals, frames: Reals, temporal: int, factor: int, limits: SizeLimits
) -> Resized:
    """transformers' rule for GLM-4.1V: the limits are on frames x area, small sides are scaled up first."""
    scale = np.maximum(factor / height, factor / width)
    tiny = (height < factor) | (width < factor)
    height = np.where(tiny, np.trunc(height * scale), height)
    width = np.where(tiny, np.trunc(width * scale), width)
    return _within_limits(width, height, factor, limits, frames, np.rint(frames / temporal) * temporal)


def _resize_plain(width: Reals, height: Reals, factor: int, limits: SizeLimits) -> Resized:
    """transformers' rule for Qwen2-VL images."""
    one = np.ones_like(width)
    return _within_limits(width, height, factor, limits, one, one)


def _within_limits(
    width: Reals, height: Reals, factor: int, limits: SizeLimits, frames: Reals, rounded_frames: Reals
) -> Resized:
    """Round to multiples of `factor`, then scale into the limits; `frames` are 1 where they do not count."""
    refused = _aspect(width, height) > (limits.max_aspect or math.inf)
    new_width, new_height = _nearest(width, factor), _nearest(height, factor)
    volume = rounded_frames * new_height * new_width
    down = np.sqrt((frames * height * width) / limits.max_pixels)
    up = np.sqrt(limits.min_pixels / (frames * height * width))
    large, small = volume > limits.max_pixels, volume < limits.min_pixels
    shrunk = [np.maximum(factor, np.floor(side / down / factor) * factor) for side in (width, height)]
    grown = [_ceil(side * up, factor) for side in (width, height)]
    new_width = np.select([large, small], [shrunk[0], grown[0]], new_width)
    new_height = np.select([large, small], [shrunk[1], grown[1]], new_height)
    return _resized(new_width, new_height, refused, (new_width < factor) | (new_height < factor))


def _resized(width: Reals, height: Reals, refused: Flags, failed: Flags) -> Resized:
    keep = ~failed
    return Resized((width * keep).astype(np.int64), (height * keep).astype(np.int64), refused, failed)


@dataclass(frozen=True)
class Grids:
    """Patch grids of N sizes.

    Attributes:
        grids: int32 [N, 3], (t, h, w) in patches; zeros where `failed`.
        tokens: int64 [N], t x h x w / merge squared.
        refused, failed: as in `Resized`.
    """

    grids: Sizes
    tokens: Ints
    refused: Flags
    failed: Flags


def to_grids(sizes: Sizes, facts: ModelFacts) -> Grids:
    """Turn sizes of images and videos into patch grids and output tokens.

    A video's frames are those that reach the processor (after vLLM's and the processor's own sampling); they
    are
    padded to whole temporal patches. More than one frame is a video.

    Raises:
        WorkbenchError: the model has no rule for a modality that occurs.
    """
    count = len(sizes)
    grids = np.zeros((count, 3), np.int32)
    refused, failed = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    is_video = sizes[:, 2] > 1
    cases: tuple[tuple[Modality, Flags, Callable[[Sizes], Ints]], ...] = (
        ("image", ~is_video, lambda part: np.ones(len(part), np.int64)),
        ("video", is_video, lambda part: -(-part[:, 2].astype(np.int64) // facts.temporal_patch)),
    )
    for modality, mask, temporal in cases:
        if not mask.any():
            continue
        part = sizes[mask]
        resized = resize(part, modality, facts)
        refused[mask], failed[mask] = resized.refused, resized.failed
        sides = (
            temporal(part) * ~resized.failed,
            resized.height // facts.patch,
            resized.width // facts.patch,
        )
        grids[mask] = np.stack(sides, axis=1)
    tokens = grids.astype(np.int64).prod(axis=1) // facts.merge**2
    return Grids(grids, tokens, refused, failed)


def with_limits(facts: ModelFacts, folder: Path) -> ModelFacts:
    """Return `facts` with the pixel limits of a checkpoint's own processor, which may differ from the
    model's.

    Reads `size` of preprocessor_config.json (images), video_preprocessor_config.json (videos), or both parts
    of processor_config.json: `shortest_edge` and `longest_edge`, or `min_pixels` and `max_pixels`, all areas.

    A part that sets none keeps the model's.

    Raises:
        WorkbenchError: no such file in the folder, or limits that are no areas.
    """
    both = _json_object(folder / "processor_config.json")
    limits = dict(facts.limits)
    for modality, part, file in (
        ("image", "image_processor", "preprocessor_config.json"),
        ("video", "video_processor", "video_preprocessor_config.json"),
    ):
        areas = _areas(_json_object(folder / file) or both.get(part), f"{folder}, {modality}s")
        if areas is not None and modality in limits:
            limits[modality] = replace(limits[modality], min_pixels=areas[0], max_pixels=areas[1])
    if limits == facts.limits and not both and not _json_object(folder / "preprocessor_config.json"):
        raise WorkbenchError(
            f"{folder} has neither preprocessor_config.json nor processor_config.json; give a checkpoint's folder"
        )
    return replace(facts, limits=limits)


def _areas(config: object, where: str) -> tuple[int, int] | None:
    """Return least and most pixels of a processor's configuration, None where it sets none."""
    if not isinstance(config, dict):
        return None
    size = config.get("size")
    source: dict[str, object] = size if isinstance(size, dict) else config
    least, most = (
        source.get("shortest_edge", source.get("min_pixels")),
        source.get("longest_edge", source.get("max_pixels")),
    )
    if least is None and most is None:
        return None
    if not isinstance(least, int) or not isinstance(most, int) or not 0 < least <= most:
        raise WorkbenchError(
            f"{where}: limits of {least!r} to {most!r} pixels are no areas; correct the processor's size"
        )
    return least, most


def _json_object(path: Path) -> dict[str, Any]:
    """Return a JSON file's object, empty where there is no file."""
    return read_json(path, dict, limit=2**20) if path.is_file() else {}


def largest_image(facts: ModelFacts) -> int:
    """Return the output tokens of the largest image the rule can make (vLLM's `get_max_image_tokens`)."""
    return int(to_grids(np.array([[HUGE, HUGE, 1]], np.int32), facts).tokens[0])


def check_sizes(sizes: npt.NDArray[np.generic], where: Callable[[int], str]) -> Sizes:
    """Return `sizes` as int32 [N, 3] after checking each value.

    Args:
        sizes: [N, 3] numbers, (width, height, frames).
        where: names item i for a message, such as "calls.csv row 7".

    Raises:
        WorkbenchError: a value that is missing, not a whole number, below 1 or too large; the first is named.
    """
    values = sizes.astype(np.float64)
    for bad, what in (
        (np.isnan(values), "has no value for {name}"),
        (~np.isfinite(values), "has an infinite {name}"),
        (values != np.floor(values), "has {name} {value:g}, which is not a whole number"),
        (values < 1, "has {name} {value:g}; sizes are at least 1"),
        (values > MAX_SIDE, "has {name} {value:g}, above the limit of " + f"{MAX_SIDE:,}"),
    ):
        if bad.any():
            row, column = (int(index[0]) for index in np.nonzero(bad))
            name = ("width", "height", "frames")[column]
            problem = what.format(name=name, value=values[row, column])
            others = int(bad.any(axis=1).sum()) - 1
            more = f" (and {others:,} more)" if others else ""
            raise WorkbenchError(f"{where(row)} {problem}{more}; correct the data")
    if len(values) and values.prod(axis=1).max() > MAX_PIXELS:
        row = int(values.prod(axis=1).argmax())
        raise WorkbenchError(f"{where(row)} has more than {MAX_PIXELS:.0e} pixels over all frames; correct the data")
    return values.astype(np.int32)
