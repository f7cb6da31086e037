"""The lab on vLLM's real classes: clean code passes, known defects are found, mismatches are located."""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from workbench.errors import WorkbenchError
from workbench.parity import Noise

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab

pytestmark = pytest.mark.engine
BUDGETS = (16, 64)


def open_small(model: str) -> "Iterator[Lab]":
    from workbench.budgets import Configuration
    from workbench.encoder.parity.lab import lab_options, open_lab

    options, _ = lab_options(model, "cpu")
    with open_lab(options, Configuration(BUDGETS, 4)) as lab:
        yield lab


@pytest.fixture(scope="module")
def ernie_lab() -> "Iterator[Lab]":
    yield from open_small("ernie45_vl")


@pytest.fixture(scope="module")
def glm_lab() -> "Iterator[Lab]":
    yield from open_small("glm4_1v")


@pytest.fixture(params=["ernie_lab", "glm_lab"])
def lab(request: pytest.FixtureRequest) -> "Lab":
    chosen: Lab = request.getfixturevalue(request.param)
    return chosen


def test_grave_faults_exceed_twenty_times_the_noise(lab: "Lab") -> None:
    from workbench.encoder.parity.matrix import visibility

    seen = visibility(lab)
    assert seen.attention_ratio > 20
    assert seen.rotary_ratio > 20


def test_the_limit_is_measured(lab: "Lab") -> None:
    noise = lab.noise
    assert noise is not None
    assert 0.001 < noise.reference_rms < 0.03  # bf16 has 8 bits of precision
    assert noise.limit_rms == noise.factor * max(noise.reference_rms, noise.composition_rms)
    assert noise.graph_reference_rms == pytest.approx(noise.reference_rms, rel=0.3)


def test_unchanged_code_raises_no_alarm_in_random_workloads(lab: "Lab") -> None:
    from workbench.encoder.parity.matrix import clean_runs

    runs = clean_runs(lab, 200, seed=7)
    assert (runs.workloads, runs.false_alarms) == (200, 0)
    # The factor between limit and floor is 3; nothing comes near the limit.
    assert runs.worst_ratio < 0.7


def test_every_scenario_passes_but_those_of_known_defects(lab: "Lab") -> None:
    from workbench.encoder.parity.matrix import run_matrix
    from workbench.encoder.parity.scenarios import SCENARIOS

    matrix = run_matrix(lab, tuple(name for name, scenario in SCENARIOS.items() if not scenario.child))
    ran = {cell.scenario for cell in matrix.cells if cell.status != "not_tested"}
    bad = {(cell.scenario, cell.status) for cell in matrix.cells if cell.status in ("error", "mismatch", "hazard")}
    if lab.session.facts.key == "ernie45_vl":
        assert bad == set()
        assert "video" not in ran
    else:
        assert bad == {("video-frames-over", "error"), ("image-beside-video", "hazard")}
        assert {(f.defect, f.suspect) for f in matrix.findings} == {("D4", "cu_seqlens"), ("D6", "cu_seqlens")}
        assert "video" in ran
    assert len(ran) >= 14
    assert {cell.budget for cell in matrix.cells} == {None, *BUDGETS}
    padded = [item.padded for item in matrix.items if item.scenario == "fills"]
    assert padded
    assert all(difference is not None and difference.finite for difference in padded)


@pytest.mark.parametrize("fork", [True, False])
def test_d1_is_found_in_a_child_process(ernie_lab: "Lab", monkeypatch: pytest.MonkeyPatch, fork: bool) -> None:
    from workbench.encoder.parity import child

    if fork:
        assert child._can_fork(ernie_lab)
    else:
        monkeypatch.setattr(child, "_can_fork", lambda _lab: False)
    part = child.run(ernie_lab, "oversize")
    (cell,) = part.cells
    assert cell.status == "error"
    assert "shapes cannot be multiplied" in cell.reason
    assert {(finding.suspect, finding.defect) for finding in part.findings} == {("fallback", "D1")}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda: os.write(2, b"free(): invalid size\n") and os.abort(), "was ended by SIGABRT: free(): invalid size"),
        (lambda: dict[str, int]()["rows"], "ended with exit code 1: KeyError: 'rows'"),
        (lambda: sys.exit(0), "ended with exit code 1: SystemExit: 0"),  # it left no result
        (lambda: time.sleep(60), "did not end within 0.5 s"),
    ],
)
def test_however_a_forked_child_ends_its_parent_goes_on(
    ernie_lab: "Lab", monkeypatch: pytest.MonkeyPatch, end: Callable[[], object], reason: str
) -> None:
    from workbench.encoder.parity import child

    monkeypatch.setattr(child, "observe", lambda _lab, _scenario: end())
    monkeypatch.setattr(child, "TIME_LIMIT_S", 0.5)
    part = child.run(ernie_lab, "oversize")
    assert part.cells[0].status == "error"
    assert part.cells[0].reason == f"the child process {reason}"
    assert ernie_lab.observe([(1, 4, 4)], "after").status == "equal"


def test_a_child_that_dies_is_a_result() -> None:
    from workbench.encoder.parity.child import _died, _last_words

    part = _died("oversize", _last_words(-11, "noise\nfree(): invalid size\n"))
    assert part.cells[0].status == "error"
    assert part.cells[0].reason == "the child process was ended by SIGSEGV: free(): invalid size"
    assert _last_words(1, "") == "the child process ended with exit code 1"


def test_no_verdict_rests_on_cosine(lab: "Lab") -> None:
    from workbench.encoder.parity.faults import FAULTS
    from workbench.encoder.parity.scenarios import near_square

    manager = lab.new_manager()
    with lab.using(manager), FAULTS["attention-scaled"].plant(lab):
        lab.capture(manager)
        seen = lab.observe([near_square(40, 2)], "cosine")
    (difference,) = seen.graph
    assert seen.status == "mismatch"
    assert difference.min_cosine is not None
    assert difference.min_cosine > 0.9


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("attention-skipped", "blocks.1.attn"),
        ("mlp-skipped", "blocks.1.mlp"),
        ("block-skipped", "blocks.1"),
        ("dtype-drop", "blocks.0"),
        ("embedding-shifted", "embeddings"),
        ("head-skipped", "tower"),
    ],
)
def test_bisection_names_the_module(lab: "Lab", fault: str, first: str) -> None:
    from workbench.encoder.parity.matrix import bisect_fault

    found = bisect_fault(lab, fault)
    assert (found.first, found.rows) == (first, "valid")
    names = [stage.name for stage in found.stages]
    assert names[0] == "embeddings"
    assert names[-1] == "tower"
    assert all(stage.relative_rms == 0 for stage in found.stages[: names.index(first)])


def test_bisection_sees_padding_that_goes_bad_first(ernie_lab: "Lab") -> None:
    from workbench.encoder.parity.bisect import bisect_padded
    from workbench.encoder.parity.faults import FAULTS

    manager = ernie_lab.new_manager()
    with ernie_lab.using(manager), FAULTS["padding-becomes-nan"].plant(ernie_lab):
        ernie_lab.capture(manager)
        seen = ernie_lab.observe([(1, 8, 10)], "padding")
        found = bisect_padded(ernie_lab, seen.call, seen.batches[0], "padding")
    assert (found.first, found.rows) == ("blocks.0", "padded")


@pytest.mark.parametrize(("block", "first"), [(0, "blocks.0"), (1, "blocks.1"), (None, "embeddings")])
def test_prefixes_find_the_block_where_a_replay_leaves_eager(
    ernie_lab: "Lab", monkeypatch: pytest.MonkeyPatch, block: int | None, first: str
) -> None:
    """A hook that acts during replays only stands in for what a CUDA graph has baked in."""
    from workbench.encoder.parity.bisect import bisect_graph
    from workbench.encoder.static_replay import StaticReplay

    replaying: list[bool] = []

    @functools.wraps(StaticReplay.replay)
    def replay(self: Any) -> None:
        replaying.append(True)
        original(self)
        replaying.clear()

    original = StaticReplay.replay
    monkeypatch.setattr(StaticReplay, "replay", replay)
    module = ernie_lab.tower.patch_embed if block is None else ernie_lab.tower.blocks[block]
    hook = module.register_forward_hook(lambda _module, _args, output: output.flip(-1) if replaying else output)
    try:
        seen = ernie_lab.observe([(1, 8, 10)], "prefix")
        assert {finding.suspect for finding in seen.findings} == {"replay"}
        found = bisect_graph(ernie_lab, seen.batches[0], "prefix")
    finally:
        hook.remove()
    assert (found.arms, found.first, found.rows) == ("graph", first, "valid")
    assert len(ernie_lab.tower.blocks) == 2


def test_a_whole_session_in_one_call(ernie_lab: "Lab") -> None:
    from workbench.budgets import Configuration
    from workbench.encoder.parity.lab import lab_options
    from workbench.encoder.parity.matrix import Plan, run
    from workbench.parity import encode

    options, _ = lab_options("ernie45_vl", "cpu")
    plan = Plan(scenarios=("fills", "empty"), clean=3, seed=5)
    first, again = (run(options, Configuration(BUDGETS, 4), plan) for _ in range(2))
    assert not first.mismatched
    assert first.inputs_fingerprint == again.inputs_fingerprint
    assert first.cells == again.cells
    assert first.model.weights_fingerprint == again.model.weights_fingerprint
    assert first.proxy is not None
    assert first.proxy.flips == 0
    assert first.not_tested
    assert b"NaN" not in encode(first)


def test_bad_input_is_refused(ernie_lab: "Lab") -> None:
    from workbench.budgets import Configuration
    from workbench.encoder.parity.lab import Lab, lab_options, open_lab
    from workbench.encoder.parity.matrix import Plan, bisect_fault, campaign

    options, _ = lab_options("ernie45_vl", "cpu")
    exact = dataclasses.replace(options, dtype="float32")
    with pytest.raises(WorkbenchError, match="float32 is the lab's own reference"), open_lab(exact, Configuration()):
        pass
    with pytest.raises(WorkbenchError, match="unknown scenario 'fill'"):
        Plan(scenarios=("fill",))
    with pytest.raises(WorkbenchError, match="-1 random workloads"):
        Plan(clean=-1)
    with pytest.raises(WorkbenchError, match="unknown fault"):
        bisect_fault(ernie_lab, "none")
    with pytest.raises(WorkbenchError, match="unknown fault 'attention'"):
        campaign(ernie_lab, names=("order-wrong", "attention"))
    with pytest.raises(WorkbenchError, match="spoils no replay"):
        bisect_fault(ernie_lab, "budget-largest")
    with pytest.raises(WorkbenchError, match="noise floor is not measured"):
        Lab(ernie_lab.session).observe([(1, 4, 4)], "no noise")


def test_weights_that_give_no_finite_output_are_refused(ernie_lab: "Lab") -> None:
    norm = ernie_lab.tower.blocks[0].norm1.weight
    before, noise = norm.data, ernie_lab.noise
    norm.data = before * float("nan")
    try:
        with pytest.raises(WorkbenchError, match="not finite"):
            ernie_lab.measure_noise(ernie_lab.session, [ernie_lab.inputs([(1, 4, 4)])])
    finally:
        norm.data = before
    assert isinstance(noise, Noise)
    assert ernie_lab.noise == noise
