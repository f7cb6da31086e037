"""The lab under CUDA's conditions: every planted fault is caught by name, though no two arms agree in every bit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from workbench.budgets import Configuration

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab

pytestmark = pytest.mark.engine
BUDGETS = (8, 32)
TILE_READERS = {("poisoned-padding", 8)}  # in budget 32 the poisoned rows begin behind the last tile


@pytest.fixture(scope="module", params=["ernie45_vl", "glm4_1v"])
def lab(request: pytest.FixtureRequest) -> "Iterator[Lab]":
    from tests.recorded_graphs import recorded_lab

    with recorded_lab(request.param, Configuration(BUDGETS, 4)) as lab:
        yield lab


def test_every_fault_is_caught_under_its_name(lab: "Lab") -> None:
    from workbench.encoder.parity.faults import FAULTS
    from workbench.encoder.parity.matrix import campaign

    results = campaign(lab)
    wrong = [(result.fault, result.status, result.suspect) for result in results if result.status != "caught"]
    assert wrong == [
        (name, "not_tested", None)
        for name, fault in FAULTS.items()
        if lab.session.facts.key not in fault.models and not fault.variants
    ]
    assert sum(FAULTS[result.fault].needs == "cuda" for result in results if result.status == "caught") == 5


def test_unchanged_code_raises_no_alarm_in_random_workloads(lab: "Lab") -> None:
    from workbench.encoder.parity.matrix import clean_runs

    runs = clean_runs(lab, 100, seed=3)
    assert (runs.workloads, runs.false_alarms) == (100, 0)
    assert 0 < runs.worst_ratio < 0.7


def test_unchanged_code_passes_every_scenario_but_those_of_known_hazards(lab: "Lab") -> None:
    from workbench.encoder.parity.matrix import run_matrix
    from workbench.encoder.parity.scenarios import SCENARIOS

    matrix = run_matrix(lab, tuple(name for name, scenario in SCENARIOS.items() if not scenario.child))
    bad = {(cell.scenario, cell.budget) for cell in matrix.cells if cell.status not in ("within_noise", "not_tested")}
    known = {("image-beside-video", budget) for budget in BUDGETS} if lab.session.facts.key == "glm4_1v" else set()
    assert bad - {("empty", None)} == TILE_READERS | known
    assert {cell.bit_equal for cell in matrix.cells if cell.items} <= {0, None}
    assert [cell.calls for cell in matrix.cells if cell.scenario == "poisoned-pool"] == [4]


def test_a_replay_runs_no_python_and_reads_the_memory_of_its_capture(lab: "Lab") -> None:
    from workbench.encoder.parity.bisect import TOWER, beyond, compare_stage

    def fail(*_args: Any) -> None:
        raise AssertionError("Python ran")

    call = lab.inputs([(1, 4, 6)])
    first = lab.session.graph(call)[0].clone()
    hook = lab.tower.blocks[0].register_forward_hook(fail)
    try:
        assert lab.session.graph(call)[0].equal(first)
        other = lab.session.graph(lab.inputs([(1, 4, 6)]))[0]
    finally:
        hook.remove()
    assert beyond(lab, compare_stage(TOWER, other, first))


def test_eager_without_the_zeroed_output_of_a_capture_is_no_arm_to_compare_with(lab: "Lab") -> None:
    """What misled the lab on a GPU: padded rows that attention leaves unwritten reach valid ones in the next block."""
    import torch

    seen = lab.observe([(1, 4, 6)], "padded", padded=True)
    (batch,) = seen.batches
    assert seen.padded[0] is not None
    assert seen.padded[0].finite
    assert bool(torch.isfinite(lab.padded_raw(batch)).all())
    with torch.inference_mode():
        plain = lab.model.encoder_cudagraph_forward(dict(batch.buffers), path="default")
    assert not bool(torch.isfinite(plain).all())


@pytest.mark.parametrize(
    ("fault", "first", "rows"),
    [
        ("mlp-skipped", "blocks.1.mlp", "valid"),
        ("block-skipped", "blocks.1", "valid"),
        ("head-skipped", "tower", "valid"),
        ("padding-becomes-nan", "blocks.0", "padded"),
        ("attention-nan-values", "blocks.1.attn", "valid"),
    ],
)
def test_bisection_works_from_the_noise_floor(lab: "Lab", fault: str, first: str, rows: str) -> None:
    from workbench.encoder.parity.bisect import bisect_padded
    from workbench.encoder.parity.faults import FAULTS

    manager = lab.new_manager()
    with lab.using(manager), FAULTS[fault].plant(lab):
        lab.capture(manager)
        seen = lab.observe([(1, 4, 6)], fault)
        found = bisect_padded(lab, seen.call, seen.batches[0], fault)
    assert (found.first, found.rows) == (first, rows)


@pytest.mark.parametrize("fault", ["baked-branch", "replay-skipped", "mlp-skipped"])
def test_prefixes_captured_anew_agree_with_eager_on_the_same_buffers(lab: "Lab", fault: str) -> None:
    """What the manager's own graph has baked is not in them, and what the forward does wrong is in both."""
    from workbench.encoder.parity.bisect import bisect_graph
    from workbench.encoder.parity.faults import FAULTS

    manager = lab.new_manager()
    with lab.using(manager), FAULTS[fault].plant(lab):
        lab.capture(manager)
        seen = lab.observe([(1, 4, 6)], fault)
        found = bisect_graph(lab, seen.batches[0], fault)
    assert seen.status == "mismatch"
    assert found.first is None


def test_an_eager_run_as_captured_leaves_torch_as_it_was() -> None:
    import torch

    from workbench.encoder.parity.lab import as_captured

    before = torch.cuda.is_current_stream_capturing, torch.are_deterministic_algorithms_enabled()
    with as_captured():
        assert torch.cuda.is_current_stream_capturing()
        assert bool(torch.empty(3).isnan().all())
    assert (torch.cuda.is_current_stream_capturing, torch.are_deterministic_algorithms_enabled()) == before


@pytest.mark.parametrize(
    ("free", "segment", "requests"),
    [
        (512, "small", [512]),
        (1 << 20, "small", [1 << 20]),
        (2 << 20, "small", [1 << 20, 1 << 20]),
        ((1 << 20) + 512, "small", [1 << 20, 512]),
        (20 << 20, "large", [20 << 20]),
    ],
)
def test_a_free_block_is_poisoned_by_requests_that_torch_serves_from_it(
    free: int, segment: str, requests: list[int]
) -> None:
    """A request above 1 MiB is never served from a segment of small blocks."""
    from workbench.encoder.parity.scenarios import _requests

    assert _requests(free, segment) == requests
