"""vLLM's random-mm data set: the same sampling of items, without making a pixel.

Follows `RandomMultiModalDataset` of vLLM's `benchmarks/datasets` draw for draw: from a numpy generator in the
same state it takes the same items. A benchmark's generator also draws prompts and pixels in between, so the
order of items in a benchmark run differs; their number and distribution do not.
"""

import ast
import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workbench.errors import WorkbenchError, check_seed

Bucket = tuple[int, int, int]  # height, width, frames: vLLM's order
TEXT_LIMIT = 100_000  # characters of a bucket string
MAX_BUCKETS = 1000
MAX_ITEMS = 50_000_000
DEFAULT_LIMIT = {"image": 255, "video": 1}  # RandomMultiModalDataset.DEFAULT_LIMIT_MM_PER_PROMPT


@dataclass(frozen=True)
class RandomMM:
    """A setting of the data set; names and defaults are those of its command line (`--random-mm-...`).

    Attributes:
        buckets: (height, width, frames) -> probability; one frame is an image. Need not sum to 1.
        requests: `--num-prompts`.
        base_items: base items per request.
        range_ratio: r in [0, 1]; items per request are uniform in [floor(n(1-r)), ceil(n(1+r))].
        limit: most items per request and modality; the number above is clamped to their sum over the
            modalities in `buckets`.
        seed: of numpy's default generator.
    """

    buckets: Mapping[Bucket, float]
    requests: int = 1000
    base_items: int = 1
    range_ratio: float = 0.0
    limit: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_LIMIT))
    seed: int = 0


def parse_buckets(text: str) -> dict[Bucket, float]:
    """Read a bucket string such as `{(224, 224, 1): 1.0}` as literal data, never as code.

    Raises:
        WorkbenchError: not a literal, not a dict of (height, width, frames) -> probability, or too large.
    """
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    form = "write it like {(224, 224, 1): 0.7, (480, 640, 1): 0.3}, with (height, width, frames)"
    if len(text) > TEXT_LIMIT:
        raise WorkbenchError(f"a bucket string of {len(text):,} characters is too long; {form}")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise WorkbenchError(f"bucket string {shown!r} is not literal data; {form}") from None
    if not isinstance(value, dict) or not value:
        raise WorkbenchError(f"bucket string {shown!r} is not a dict with buckets; {form}")
    if len(value) > MAX_BUCKETS:
        raise WorkbenchError(f"{len(value):,} buckets are more than {MAX_BUCKETS:,}; {form}")
    return {_bucket(key): _probability(key, probability) for key, probability in value.items()}


def _bucket(key: object) -> Bucket:
    if isinstance(key, str):  # vLLM accepts quoted tuples, as JSON needs them
        try:
            key = ast.literal_eval(key)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            key = None
    sides = key if isinstance(key, tuple) else ()
    if len(sides) != 3 or not all(type(side) is int and side >= 1 for side in sides):
        raise WorkbenchError(f"bucket {str(key)[:60]!r} is not (height, width, frames) in whole numbers of at least 1")
    height, width, frames = sides
    return height, width, frames


def _probability(key: object, value: object) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise WorkbenchError(f"bucket {str(key)[:60]} has probability {value!r}; give a number of at least 0")
    return number


def parse_limit(text: str) -> dict[str, int]:
    """Read `--random-mm-limit-mm-per-prompt`, such as `{"image": 1, "video": 0}`.

    Raises:
        WorkbenchError: not JSON, or not modality -> number of at least 0.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or any(type(count) is not int or count < 0 for count in value.values()):
        raise WorkbenchError(
            f'limit {text[:60]!r} is not JSON like {{"image": 1, "video": 0}} with numbers of at least 0'
        )
    return value


def sample(setting: RandomMM) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Draw the items of all requests.

    Returns:
        sizes int32 [N, 3], (width, height, frames), and offsets int64 [requests + 1]. A request may be empty.

    Raises:
        WorkbenchError: a setting that vLLM refuses too.
    """
    check_seed(setting.seed)
    return draw(setting, np.random.default_rng(setting.seed))


def draw(setting: RandomMM, generator: np.random.Generator) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """`sample` from a generator of the caller's, which a test compares with vLLM's own draws."""
    buckets, limit, least, most = _resolve(setting)
    if setting.requests * max(most, 1) > MAX_ITEMS:
        raise WorkbenchError(
            f"{setting.requests:,} requests of up to {most:,} items exceed {MAX_ITEMS:,} items; ask for fewer"
        )
    keys = list(buckets)
    if least == most and all(limit[name] >= most for name in limit):
        drawn = generator.random(setting.requests * most)
        chosen = np.searchsorted(_cumulative(list(buckets.values())), drawn, side="right")
        counts = np.full(setting.requests, most)
    else:
        picks, numbers = [], []
        for _ in range(setting.requests):
            number = int(generator.integers(least, most + 1))
            request = _request(buckets, limit, number, generator)
            picks.extend(request)
            numbers.append(len(request))
        chosen, counts = np.array(picks, np.int64), np.array(numbers, np.int64)
    table = np.array([(width, height, frames) for height, width, frames in keys], np.int32)
    return table[chosen], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def modality(bucket: Bucket) -> str:
    """Return "image" for one frame, else "video"."""
    return "image" if bucket[2] == 1 else "video"


def _resolve(setting: RandomMM) -> tuple[dict[Bucket, float], dict[str, int], int, int]:
    """Return normalised buckets, the limits that apply, and the least and most items per request."""
    if setting.requests < 1:
        raise WorkbenchError(f"{setting.requests} requests make no workload; ask for at least 1")
    if setting.base_items < 0:
        raise WorkbenchError(f"{setting.base_items} base items per request is negative")
    if not 0 <= setting.range_ratio <= 1:
        raise WorkbenchError(f"range ratio {setting.range_ratio} is not between 0 and 1")
    missing = {modality(bucket) for bucket in setting.buckets} - set(setting.limit)
    if missing:
        raise WorkbenchError(f"the limit per prompt names no {', '.join(sorted(missing))}, which has a bucket; add it")
    buckets = _normalised(dict(setting.buckets))
    if not buckets:
        raise WorkbenchError("all bucket probabilities are 0; give at least one above 0")
    present = {modality(bucket) for bucket in buckets}
    limit = {name: count for name, count in setting.limit.items() if name in present}
    most = min(sum(limit.values()), math.ceil(setting.base_items * (1 + setting.range_ratio)))
    least = max(0, math.floor(setting.base_items * (1 - setting.range_ratio)))
    if least > most:
        raise WorkbenchError(
            f"requests need at least {least} items, but the limit per prompt allows {most}; raise the limit, or lower "
            "the base items"
        )
    return buckets, limit, least, most


def _normalised(buckets: dict[Bucket, float]) -> dict[Bucket, float]:
    kept = {bucket: probability for bucket, probability in buckets.items() if probability > 0}
    total = sum(kept.values())
    return {bucket: probability / total for bucket, probability in kept.items()}


def _cumulative(probabilities: list[float]) -> npt.NDArray[np.float64]:
    """Return what numpy's `Generator.choice` searches: the cumulative sum, scaled to end at 1."""
    sums = np.array(probabilities).cumsum()
    scaled: npt.NDArray[np.float64] = sums / sums[-1]
    return scaled


def _request(
    buckets: dict[Bucket, float], limit: dict[str, int], number: int, generator: np.random.Generator
) -> list[int]:
    """Draw one request's items as indices of `buckets`; a modality at its limit loses its buckets."""
    index = {bucket: position for position, bucket in enumerate(buckets)}
    taken = dict.fromkeys((modality(bucket) for bucket in buckets), 0)
    picks: list[int] = []
    open_buckets = buckets
    keys = list(buckets)
    edges = _cumulative(list(buckets.values())).tolist()
    while len(picks) < number:
        bucket = keys[bisect_right(edges, generator.random())]
        name = modality(bucket)
        if taken[name] < limit[name]:
            taken[name] += 1
            picks.append(index[bucket])
            continue
        rest = {key: share for key, share in open_buckets.items() if modality(key) != name}
        if not rest:
            break
        open_buckets = _normalised(rest)
        keys = list(open_buckets)
        edges = _cumulative(list(open_buckets.values())).tolist()
    return picks
