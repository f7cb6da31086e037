"""Cost profiles made from a stated formula, so that tests know every answer.

Microseconds of one call, for items of n tokens in batches that replay budget b:

    CALL + sum over batches (BATCH + ITEM * items + BASE + RATE * b + SLOPE * sum (4 n)^2 + TAIL + TAIL_RATE * sum n)
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tests.runs import make_environment, make_run
from workbench.costs import (
    SCHEMA_VERSION,
    BatchShape,
    CallPoint,
    CostProfile,
    EagerPoint,
    FramesPoint,
    MemoryPoint,
    ReplayPoint,
    TailPoint,
)

CALL, BATCH, ITEM = 300.0, 500.0, 40.0
BASE, RATE, SLOPE = 1500.0, 15.0, 2e-5
TAIL, TAIL_RATE = 700.0, 0.1
EAGER, EAGER_RATE = 24_000.0, 12.0
BUDGETS = (*range(64, 1024, 64), *range(1024, 4097, 256), 6144, 8192)
FIRST_BYTES, LATER_BYTES, LATER_RATE = 280_000, 2**21, 4_000
SECONDS, SECONDS_RATE = 0.06, 1e-5
FRAMES = (4, 64, 2400, 40_000)


def base_us(budget: int) -> float:
    """Replay of `budget` without attention."""
    return BASE + RATE * budget


def later_seconds(budget: int) -> float:
    """Seconds of a capture."""
    return SECONDS + SECONDS_RATE * budget


def call_us(batches: Sequence[tuple[int, Sequence[int]]], base: Callable[[int], float] = base_us) -> float:
    """The formula; a batch is (budget, tokens of its items)."""
    return CALL + sum(
        BATCH
        + ITEM * len(tokens)
        + base(budget)
        + SLOPE * sum((4 * n) ** 2 for n in tokens)
        + TAIL
        + TAIL_RATE * sum(tokens)
        for budget, tokens in batches
    )


def make_profile(
    *,
    base: Callable[[int], float] = base_us,
    budgets: Sequence[int] = BUDGETS,
    gpu: str = "NVIDIA H200",
    model: str = "ernie45_vl",
    noise: float = 0.0,
    seed: int = 0,
) -> CostProfile:
    """A profile of the formula; `noise` is the relative standard deviation of every sample."""
    random = np.random.default_rng(seed)

    def samples(value: float) -> list[float]:
        return [float(value * (1 + noise * deviation)) for deviation in random.standard_normal(5)]

    replays = [
        ReplayPoint(
            budget=budget,
            sequences=[4 * n for n in tokens],
            gpu_us=samples(base(budget) + SLOPE * sum((4 * n) ** 2 for n in tokens)),
        )
        for budget in budgets
        for tokens in ([budget], [budget // 16] * 16)
    ]
    run = make_run()
    return CostProfile(
        schema_version=SCHEMA_VERSION,
        workbench="test",
        created=run.created,
        replay_kind="cuda_graph",
        environment=make_environment(name=gpu),
        model=msgspec.structs.replace(run.model, key=model),
        replays=replays,
        tails=[TailPoint(tokens=n, wall_us=samples(TAIL + TAIL_RATE * n)) for n in (1, budgets[-1])],
        eager=[
            EagerPoint(arm=arm, tokens=n, wall_us=samples(EAGER + EAGER_RATE * n))
            for arm in ("eager_served", "eager_fallback")
            for n in (64, 4096)
        ],
        calls=[_call(random, budgets, base, samples) for _ in range(48)],
        captures=[
            *(MemoryPoint(budget=b, first=True, seconds=0.1, bytes=FIRST_BYTES * b) for b in (budgets[0], budgets[-1])),
            *(
                MemoryPoint(budget=b, first=False, seconds=later_seconds(b), bytes=LATER_BYTES + LATER_RATE * b)
                for b in budgets
            ),
        ],
        seed=seed,
        frames=[] if model == "ernie45_vl" else [_framed(base, samples, frames) for frames in FRAMES],
    )


def _framed(base: Callable[[int], float], samples: Callable[[float], list[float]], frames: int) -> FramesPoint:
    """Budget 64 with 4 items, each of which has its share of the frames and of them at least a token each."""
    shared = frames // 4
    computed = 4 * shared * -(-16 // shared)
    return FramesPoint(
        budget=64,
        max_items=4,
        max_frames=frames,
        computed=computed,
        sequences=[64] * 4,
        seconds=later_seconds(computed),
        bytes=FIRST_BYTES * computed,
        gpu_us=samples(base(computed) + SLOPE * 4 * 64**2),
    )


def _call(
    random: np.random.Generator,
    budgets: Sequence[int],
    base: Callable[[int], float],
    samples: Callable[[float], list[float]],
) -> CallPoint:
    """A call of 1 to 3 batches of 1 to 4 equal items, each filling its budget to a random share."""
    batches = []
    for budget in random.choice(budgets, int(random.integers(1, 4))).tolist():
        items = int(random.integers(1, 5))
        batches.append((budget, [max(1, int(budget * random.uniform(0.5, 1)) // items)] * items))
    value = call_us(batches, base)
    return CallPoint(
        batches=[
            BatchShape(budget=b, items=len(t), tokens=sum(t), squares=sum((4 * n) ** 2 for n in t)) for b, t in batches
        ],
        wall_us=samples(value),
        host_us=samples(value / 2),
    )
