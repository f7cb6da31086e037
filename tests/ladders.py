"""A ladder and hardware counters made up for tests: as an H200 would fill them, with invented, seeded numbers."""

from pathlib import Path

import msgspec
import numpy as np

from tests.runs import make_environment
from workbench.capturable import (
    ALL,
    FALLBACK,
    GRAPH,
    LADDER_FILE,
    SCHEMA_VERSION,
    SERVED,
    Boundary,
    Case,
    Column,
    HostSync,
    Ladder,
    MappedModule,
    ModuleMap,
    Obstacle,
)
from workbench.encoder.counters import SCHEMA_VERSION as COUNTERS_VERSION
from workbench.encoder.counters import ArmCounters, Counters, KernelCounters
from workbench.files import write_json
from workbench.models import Modality
from workbench.parity import Difference
from workbench.run import ModelRecord

VARIANTS = ("resampler", "one_pass", "metadata_cache", "fallback", "fused")
STEP = "resampler+metadata_cache"
NOISE = 0.006
# What each column takes of eager as served's time, for a small item; a large one is bound by the GPU.
SHARES = {SERVED: 1.0, FALLBACK: 1.1, GRAPH: 0.2, **dict.fromkeys(VARIANTS, 0.18), STEP: 0.16, ALL: 0.08}


def make_ladder(model: str = "ernie45_vl") -> Ladder:
    """Return a whole ladder: two images, one above the largest budget, a video, maps of three graphs, boundaries."""
    random = np.random.default_rng(0)
    cases = [
        _case(random, "video of 4 frames", "video", [(4, 16, 16)], 128),
        _case(random, "64 tokens", "image", [(1, 16, 16)], 64),
        _case(random, "4096 tokens", "image", [(1, 128, 128)], 4096),
    ]
    return Ladder(
        schema_version=SCHEMA_VERSION,
        created="2026-11-29T12:00:00+00:00",
        environment=make_environment(),
        model=ModelRecord(
            key=model, architecture="A", depth=2, width=160, dtype="bfloat16", attention_backend="FLASH_ATTN 3",
            weights="dummy seed 0", weights_fingerprint="f", out_width=80,
        ),
        replay="cuda_graph",
        budgets=[64, 2048],
        max_items=4,
        repeats=20,
        warmup=2,
        seed=0,
        captured=[],
        cases=cases,
        maps=[_map(GRAPH, 12, 300.0), _map(ALL, 5, 200.0), ModuleMap(name="fused", budget=64, nodes=9, why_not="why")],
        boundaries=_boundaries(),
        complete=True,
    )  # fmt: skip


def make_glm_ladder() -> Ladder:
    """Return a ladder of an encoder with one variant and D6: an image is wrong where videos are allowed."""
    ladder = make_ladder("glm4_1v")
    keep = {FALLBACK: FALLBACK, SERVED: SERVED, GRAPH: GRAPH, "resampler": "cu_seqlens_tail"}
    image = _only(ladder.cases[1], keep)
    *rest, graph, fixed = image.columns
    wrong = msgspec.structs.replace(graph, parity=[_difference(150 * NOISE)], findings=["D6: offsets fall"])
    fixed = msgspec.structs.replace(fixed, parity=[_difference(0.0)], against_graph=[_difference(150 * NOISE)])
    beside = msgspec.structs.replace(
        image, name="64 tokens, videos allowed", beside_videos=True, columns=[*rest, wrong, fixed]
    )
    video = msgspec.structs.replace(
        image, name="video of 8 frames", modality="video", grids=[(4, 16, 16)], tokens=[256]
    )
    return msgspec.structs.replace(
        ladder, cases=[video, beside, image], maps=ladder.maps[:1], boundaries=ladder.boundaries[:1], max_frames=16
    )


def _only(case: Case, names: dict[str, str]) -> Case:
    """Return a case with the columns of `names` alone, called by its values."""
    columns = [
        msgspec.structs.replace(column, name=names[column.name], variants=[])
        for column in case.columns
        if column.name in names
    ]
    return msgspec.structs.replace(case, columns=columns)


def write_ladder(folder: Path, model: str = "ernie45_vl") -> Ladder:
    """Write a made-up ladder into `folder` and return it."""
    ladder = make_ladder(model)
    write_json(folder / LADDER_FILE, ladder)
    return ladder


def _case(
    random: np.random.Generator, name: str, modality: Modality, grids: list[tuple[int, int, int]], tokens: int
) -> Case:
    gpu_us = 40.0 * tokens
    columns = []
    for title, share in SHARES.items():
        if modality == "video" and "resampler" not in title and title not in (SERVED, ALL):
            continue
        if tokens > 2048 and title in (GRAPH, "one_pass", "metadata_cache", "fused"):
            columns.append(Column(name=title, error="RuntimeError: mat1 and mat2 shapes cannot be multiplied"))
            continue
        wall = gpu_us + 20_000 * share * random.lognormal(0, 0.02, 20)
        exact = title in (SERVED, FALLBACK)
        columns.append(
            Column(
                name=title,
                variants=[one for one in VARIANTS if one in title],
                wall_us=wall.tolist(),
                gpu_us=wall.tolist(),
                order=list(range(20)),
                ops=600,
                nodes=None if title in (SERVED, FALLBACK) else round(900 * share),
                busy_us=gpu_us,
                idle_us=float(wall.min()) - gpu_us,
                traced_us=float(wall.max()),
                budgets=[] if title in (SERVED, FALLBACK) else [64],
                parity=[_difference(0.0 if exact else 0.5 * NOISE)],
                against_graph=[] if modality == "video" else [_difference(0.4 * NOISE if title == "fused" else 0.0)],
            )
        )
    return Case(
        name=name,
        modality=modality,
        grids=grids,
        tokens=[tokens],
        columns=columns,
        noise_rms=NOISE,
        noise_worst_row=2 * NOISE,
    )


def _difference(rms: float) -> Difference:
    return Difference(
        tokens=64, bit_equal=rms == 0, finite=True, max_abs=rms, relative_rms=rms, worst_row=rms, min_cosine=1.0
    )


def _map(name: str, nodes: int, glue: float) -> ModuleMap:
    modules = []
    for block in range(2):
        stem = f"vision_model.blocks.{block}"
        modules += [
            MappedModule(
                module=f"{stem}.attn.qkv", nodes=1, us=20.0, families={"gemm": (1, 20.0)}, flops=10**9,
                weight_bytes=10**7, roofline_us=4.0,
            ),
            MappedModule(
                module=f"{stem}.attn", nodes=nodes, us=glue + 30.0,
                families={"glue": (nodes - 1, glue), "attention": (1, 30.0)}, flops=10**9, roofline_us=2.0,
            ),
            MappedModule(module=stem, nodes=1, us=3.0, families={"glue": (1, 3.0)}),
        ]  # fmt: skip
    modules.append(MappedModule(module="", nodes=2, us=5.0, families={"memcpy": (2, 5.0)}))
    return ModuleMap(name=name, budget=64, nodes=sum(one.nodes for one in modules), modules=modules)


def _boundaries() -> list[Boundary]:
    place = "vllm/model_executor/models/ernie45_vl.py:798"
    sync = HostSync(
        call="Tensor.cpu", place=place, source="grid = grid_thw.cpu()", frames=[f"{place} forward"], count=2
    )
    refused = Obstacle(
        error="AcceleratorError", message="operation not permitted when stream is capturing", place=place, source="x"
    )
    return [
        Boundary(
            name="vit", title="ViT, as vLLM captures it", captured=True, nodes=674, inside_us=2600.0, eager_us=18_000.0,
            outside_us=2_000.0,
        ),
        Boundary(
            name="vit+resampler", title="ViT and the resampler as shipped", captured=False, obstacle=refused,
            syncs=[sync], inside_us=19_000.0, eager_us=19_000.0, outside_us=600.0,
        ),
        Boundary(
            name="all", title="all variants together", captured=True, nodes=351, inside_us=1_500.0, eager_us=9_000.0,
            outside_us=200.0,
        ),
    ]  # fmt: skip


def make_counters() -> Counters:
    """Return counters of two arms and two families."""
    given = make_ladder()

    def kernel(name: str, us: float, share: float) -> KernelCounters:
        return KernelCounters(
            name=name, duration_us=us, dram_bytes=1e6, tensor_cycles=4 * share * us, active_cycles=us, elapsed_cycles=us
        )

    gemm, glue = "nvjet_hsh_128x128", "void at::native::elementwise_kernel<128, 4>"
    gpu = msgspec.structs.replace(given.environment.gpus[0], name="NVIDIA H200")
    return Counters(
        schema_version=COUNTERS_VERSION, workbench="0", nsight_python="0.9.6", model="ernie45_vl", budgets=[64],
        environment=msgspec.structs.replace(given.environment, gpus=[gpu]), max_items=4, grids=[(1, 16, 16)],
        arms=[
            ArmCounters(arm="eager_served", kernels=[kernel(gemm, 900.0, 0.5), kernel(glue, 800.0, 0.2)]),
            ArmCounters(arm="graph", kernels=[kernel(gemm, 950.0, 0.55), kernel(glue, 700.0, 0.1)]),
        ],
    )  # fmt: skip
