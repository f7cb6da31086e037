"""The capture on vLLM's real classes (CPU: static replay at depth 2), and the command line around it."""

from pathlib import Path

import numpy as np
import pytest

from tests.test_profiler import annotations, operators, workload
from workbench.budgets import Configuration
from workbench.grids import to_grids
from workbench.models import model_facts
from workbench.run import ARMS, UNNAMED_PHASE, Run, read_run
from workbench.workload import Workload

pytestmark = pytest.mark.engine

pytest.importorskip("vllm", reason="the engine is not installed")

from workbench.encoder.session import SessionOptions  # noqa: E402 - needs the engine
from workbench.profiler import capture  # noqa: E402

SMALL, WIDE, LARGE = (224, 224, 1), (448, 224, 1), (448, 896, 1)
OPTIONS = SessionOptions(depth=2, width=160, device="cpu")
CONFIGURATION = Configuration((128, 256), 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three distinct calls; the third holds an item above the largest budget (D1)."""
    out = tmp_path_factory.mktemp("runs") / "small"
    calls = workload([SMALL], [SMALL, WIDE], [SMALL], [LARGE])
    seen: list[tuple[str, float]] = []
    run = capture(
        OPTIONS, CONFIGURATION, calls, out, repeats=4, warmup=1, progress=lambda what, done: seen.append((what, done))
    )
    assert run == read_run(out)
    shares = [done for _, done in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


def test_the_run_says_what_it_is(run: Run) -> None:
    assert run.name == "small"
    assert run.replay == "static_replay"
    assert any("static replay" in note for note in run.notes)
    assert (run.model.key, run.model.depth, run.model.width, run.model.weights) == (
        "ernie45_vl",
        2,
        160,
        "dummy seed 0",
    )
    assert run.config.budgets == [128, 256]
    assert [cost.budget for cost in run.capture] == [256, 128]
    assert [call.count for call in run.calls] == [2, 1, 1]
    assert run.environment.vllm is not None


def test_timings_are_in_abba_order(run: Run) -> None:
    for call, arms in ((0, ARMS), (1, ARMS), (2, ARMS[:2])):
        timings = [timing for timing in run.timings if timing.call == call]
        assert [timing.arm for timing in timings] == list(arms)
        order = {position: timing.arm for timing in timings for position in timing.order}
        sequence = [order[position] for position in range(len(order))]
        assert sequence == [*arms, *arms[::-1]] * 2
        for timing in timings:
            assert len(timing.wall_us) == len(timing.order) == 4
            assert min(timing.wall_us) > 0
            assert timing.gpu_us == []


def test_every_batch_has_its_budget(run: Run) -> None:
    assert [(batch.call, batch.items, batch.tokens, batch.budget) for batch in run.batches] == [
        (0, [0], 64, 128),
        (1, [0, 1], 192, 256),
    ]
    assert (run.graph_hits, run.graph_misses) == (3, 0)


def test_graph_equals_both_eager_arms(run: Run) -> None:
    assert [(found.call, found.baseline) for found in run.equality] == [
        (call, arm) for call in (0, 1) for arm in ("eager_served", "eager_fallback")
    ]
    for found in run.equality:
        assert found.finite
        assert found.relative_rms is not None
        assert found.relative_rms < 0.02  # bf16 rounding of another batch composition


def test_an_item_above_the_largest_budget_fails_as_d1_and_the_rest_goes_on(run: Run) -> None:
    (failure,) = run.failures
    assert (failure.arm, failure.call, failure.cause) == ("graph", 2, "D1")
    assert "\n" not in failure.message
    assert {timing.arm for timing in run.timings if timing.call == 2} == {"eager_served", "eager_fallback"}


def test_phases_of_a_call_are_named_and_exclusive(run: Run) -> None:
    for call in (0, 1):
        phases = {phase.phase: phase.wall_us for phase in run.phases if phase.call == call}
        assert {"item_specs", "replay_buffers", "buffer_copies", "replay", "clone", UNNAMED_PHASE} <= set(phases)
        assert {len(wall) for wall in phases.values()} == {2}
        assert min(min(wall) for wall in phases.values()) >= 0
    assert not [phase for phase in run.phases if phase.call == 2]


def test_traces_hold_the_named_ranges(folder: Path, run: Run) -> None:
    assert [(trace.arm, trace.activities) for trace in run.traces] == [(arm, ["cpu"]) for arm in ARMS]
    for trace in run.traces:
        names = annotations(folder / trace.file)
        calls = [int(name.split("#")[1]) for name in names if name.startswith(f"{trace.window}#")]
        assert calls == trace.calls == ([0, 1] if trace.arm == "graph" else [0, 1, 2]) * 2
        assert len(trace.wall_us) == len(trace.calls)
        assert names.count("synchronise") == len(calls)
        assert operators(folder / trace.file) > 0
        if trace.arm == "graph":
            assert names.count("replay") == len(calls)
            assert not [name for name in names if "blocks" in name]
        else:
            assert names.count("vision_model.blocks.1.attn") == len(calls)


def test_the_trace_reader_reads_the_traces(folder: Path, run: Run) -> None:
    from workbench.trace import Category, read_trace

    for trace in run.traces:
        read = read_trace(folder / trace.file)
        assert len(read.rows(Category.USER_ANNOTATION)) >= len(trace.calls)
        assert len(read.gpu_rows()) == 0


def test_nothing_else_is_in_the_folder(folder: Path, run: Run) -> None:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"run.json", *(trace.file for trace in run.traces)}
    assert [path.name for path in folder.parent.iterdir()] == ["small"]


def glm(*groups: list[tuple[int, int, int]]) -> Workload:
    """A workload of GLM-4.1V by its own resize rule."""
    sizes = np.array([size for group in groups for size in group], dtype=np.int32)
    made = to_grids(sizes, model_facts("glm4_1v"))
    offsets = np.cumsum([0, *map(len, groups)])
    return Workload("glm", "glm4_1v", "a test", sizes, made.grids, made.tokens, offsets)


@pytest.mark.parametrize(
    ("configuration", "item", "cause"),
    [
        (Configuration((256,), 4, 4), (112, 112, 16), "D4"),  # 8 temporal patches where 4 sequences were captured
        (Configuration((100,), 8, 8), (280, 280, 1), "D3"),  # 100 tokens in a budget whose buffers hold 96
    ],
)
def test_known_defects_of_glm_are_named(
    tmp_path: Path, configuration: Configuration, item: tuple[int, int, int], cause: str
) -> None:
    options = SessionOptions(model="glm4_1v", depth=1, width=256, device="cpu", video_limit=1)
    run = capture(options, configuration, glm([item]), tmp_path / "run", repeats=1, warmup=0, profiled_repeats=0)
    assert [(failure.arm, failure.call, failure.cause) for failure in run.failures] == [("graph", 0, cause)]
    assert {timing.arm for timing in run.timings} == {"eager_served", "eager_fallback"}
    assert run.traces == []
