"""Comparison of two captures: verdicts, alignment, conditions, and what makes it doubtful."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.runs import KERNELS, kineto_events, kineto_trace, make_environment, make_run, small_run, write_run
from workbench.alignment import MOST_EDITS, align
from workbench.bundle import create, read_source
from workbench.cli import app
from workbench.conditions import check, names, parse
from workbench.diff import Diff, arm_samples, compare_files
from workbench.errors import WorkbenchError
from workbench.evidence import Question, dependence, drift, holm, judge, mann_whitney_p, p99_p
from workbench.run import Arm, Failure, Run, TraceFile, load_recording, recording_folder, recording_names

VERDICTS = {"faster", "slower"}


# --- evidence --------------------------------------------------------------------------------------


def exact_p(base: list[float], head: list[float]) -> float:
    """Mann-Whitney by enumeration of all assignments; no ties, no serial dependence."""
    pooled = sorted(base + head)
    ranks = {value: place + 1 for place, value in enumerate(pooled)}
    centre = len(head) * (len(pooled) + 1) / 2
    observed = abs(sum(ranks[value] for value in head) - centre)
    sums = [sum(chosen) for chosen in itertools.combinations(range(1, len(pooled) + 1), len(head))]
    return sum(abs(total - centre) >= observed - 1e-9 for total in sums) / len(sums)


@given(
    st.lists(st.integers(0, 10**6), min_size=8, max_size=12, unique=True),
    st.integers(4, 6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=15, deadline=None)
def test_mann_whitney_agrees_with_enumeration(values: list[int], split: int, random: Any) -> None:
    random.shuffle(values)
    base, head = [float(v) for v in values[:split]], [float(v) for v in values[split:]]
    # Serial dependence may only make it more careful; without it the two agree to the draws' error.
    p = mann_whitney_p(base, head)
    assert p >= exact_p(base, head) - 0.03


def test_mann_whitney_normal_limit_agrees_with_enumeration() -> None:
    generator = np.random.default_rng(2)
    for shift in (0.0, 0.5, 1.0):
        base, head = generator.normal(0, 1, 200), generator.normal(shift, 1, 200)
        ranks = np.concatenate([base, head]).argsort().argsort() + 1.0
        draws = generator.permuted(np.tile(ranks, (4000, 1)), axis=1)[:, 200:].sum(axis=1)
        observed = abs(ranks[200:].sum() - 200 * 401 / 2)
        simulated = (np.abs(draws - 200 * 401 / 2) >= observed).mean()
        assert mann_whitney_p(base, head) == pytest.approx(simulated, abs=0.05)


def test_ties_and_equal_samples() -> None:
    assert mann_whitney_p([1.0] * 50, [1.0] * 50) == 1.0
    assert mann_whitney_p([1.0, 2.0] * 30, [2.0, 1.0] * 30) > 0.5
    assert mann_whitney_p([1.0, 2.0] * 30, [2.0, 3.0] * 30) < 1e-6


def moving_blocks(samples: np.ndarray[Any, Any], length: int, generator: np.random.Generator) -> list[float]:
    """Resample keeping stretches of `length` together, so that dependence survives."""
    starts = generator.integers(0, len(samples), -(-len(samples) // length))
    taken = np.concatenate([np.take(samples, range(start, start + length), mode="wrap") for start in starts])
    return [float(value) for value in taken[: len(samples)]]


def test_samples_that_move_together_count_less() -> None:
    generator = np.random.default_rng(4)
    moods = np.repeat(generator.normal(1000, 100, 40), 5) + generator.normal(0, 5, 200)
    assert 3 < dependence(moods) < 9
    assert dependence(generator.normal(0, 1, 200)) < 2
    assert dependence([1.0] * 50) == 1.0
    alarms = careless = 0
    for _ in range(100):
        base, head = (moving_blocks(moods, 20, generator) for _ in range(2))
        alarms += mann_whitney_p(base, head) < 0.05
        careless += mann_whitney_p(generator.permutation(base), generator.permutation(head)) < 0.05
    assert careless >= 15  # what the order tells, and a test without it would not see
    assert alarms <= 12


def test_drift_within_a_run_is_told_and_no_smaller_change_is_called_one() -> None:
    generator = np.random.default_rng(5)
    steady = generator.normal(1000, 20, 200)
    drifting = np.concatenate([steady[:100], steady[100:] * 1.2])
    assert drift(steady) == 0.0
    assert drift(drifting) == pytest.approx(0.2, abs=0.02)
    (mean, *_), *_ = judge([Question(list(drifting), list(drifting * 1.1))])
    assert mean.verdict == "no evidence"
    (mean, *_), *_ = judge([Question(list(steady), list(generator.permutation(steady) * 1.1))])
    assert mean.verdict == "slower"


def test_holm_orders_and_bounds() -> None:
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0]


def test_p99_sees_a_tail_that_the_mean_does_not() -> None:
    generator = np.random.default_rng(1)
    base = generator.normal(1000, 10, 400)
    head = base.copy()
    head[::25] += 400  # 4 % of the calls
    (mean, median, p99), *_ = judge([Question(list(base), list(generator.permutation(head)))], draws=50)
    assert p99.verdict == "slower"
    assert mean.verdict == median.verdict == "no evidence"
    assert p99_p(base, base) > 0.5


def test_false_alarms_over_200_identical_pairs() -> None:
    """Both sides drawn from the same samples; a comparison asks six questions a run."""
    run = load_recording(recording_names()[0]) if recording_names() else make_run(repeats=120)
    sources = [timing.wall_us for timing in run.timings if timing.wall_us][:6]
    sizes = [max(120, len(source)) for source in sources]
    generator, alarms = np.random.default_rng(8), 0
    for _ in range(200):
        questions = [
            Question(list(generator.choice(source, size)), list(generator.choice(source, size)))
            for source, size in zip(sources, sizes, strict=True)
        ]
        alarms += any(change.verdict in VERDICTS for changes in judge(questions, draws=8) for change in changes)
    assert alarms <= 10


def test_main_questions_are_not_hidden_by_many_details() -> None:
    generator = np.random.default_rng(6)
    base, head = generator.normal(5000, 50, 16), generator.normal(5150, 50, 16)
    questions = [Question(list(base), list(head))]
    questions += [Question(list(a), list(b), main=False) for a, b in generator.normal(100, 5, (60, 2, 16))]
    assert judge(questions, draws=8)[0][0].verdict == "slower"


@pytest.mark.skipif("ernie45_vl-224" not in recording_names(), reason="the recording is not shipped")
@pytest.mark.parametrize("length", [1, 5, 20, 50])
def test_false_alarms_when_the_moods_of_a_real_machine_are_kept(length: int) -> None:
    """The recording's host slowed down and recovered for tens of calls at a time."""
    generator, alarms = np.random.default_rng(length), 0
    timings = load_recording("ernie45_vl-224").timings
    for _ in range(50):
        questions = []
        for timing in timings:
            base, head = (moving_blocks(np.array(timing.wall_us), length, generator) for _ in range(2))
            questions.append(Question(base, head))
        alarms += any(change.verdict in VERDICTS for changes in judge(questions, draws=4) for change in changes)
    assert alarms <= 5


@pytest.mark.skipif("ernie45_vl-224" not in recording_names(), reason="the recording is not shipped")
def test_interleaved_halves_of_one_recording_do_not_differ() -> None:
    run = load_recording("ernie45_vl-224")
    questions = [Question(timing.wall_us[::2], timing.wall_us[1::2]) for timing in run.timings]
    assert not {change.verdict for changes in judge(questions) for change in changes} & VERDICTS


@pytest.mark.skipif("ernie45_vl-mixed-2048" not in recording_names(), reason="the recording is not shipped")
def test_two_recorded_configurations() -> None:
    """Without the budget of 4096 some calls fall back to eager, where D1 ends them."""
    diff = compare_files(recording_folder("ernie45_vl-mixed"), recording_folder("ernie45_vl-mixed-2048"))
    (pair,) = diff.pairs
    metrics = {metric.name: metric for metric in pair.metrics}
    assert any(text.startswith("budgets:") and "4096" in text for text in pair.differences)
    assert metrics["memory.pool"].verdict == "better"
    assert [(row.arm, row.cause, row.base) for row in pair.failures] == [("graph", "D1", 0)]
    assert check(diff, ["graph.failures > +0"])[0].hit
    assert verdict_of(diff, "eager_served") == "no evidence"


def test_a_real_change_is_found() -> None:
    generator, found = np.random.default_rng(9), 0
    for _ in range(50):
        base, head = 5000 * (1 + generator.gamma(2, 0.01, 60)), 5150 * (1 + generator.gamma(2, 0.01, 60))
        changes = judge([Question(list(base), list(head))], draws=8)[0]
        found += changes[0].verdict == "slower"
    assert found >= 48


def test_what_cannot_be_said_is_refused_with_the_reason() -> None:
    few = judge([Question([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])])[0]
    assert {change.verdict for change in few} == {"not judged"}
    assert "fewer than" in few[0].reason
    some = judge([Question([1.0, 2.0] * 20, [4.0, 5.0] * 20)])[0]
    assert some[2].verdict == "not judged"
    assert "P99 needs 100" in some[2].reason
    small = judge([Question([1000.0, 1001.0] * 200, [1004.0, 1005.0] * 200)])[0]
    assert small[0].verdict == "no evidence"
    assert "less than 1%" in small[0].reason


# --- alignment -------------------------------------------------------------------------------------


def longest_common(base: list[str], head: list[str]) -> int:
    lengths = [0] * (len(head) + 1)
    for name in base:
        before = lengths[:]
        for place, other in enumerate(head):
            lengths[place + 1] = before[place] + 1 if name == other else max(before[place + 1], lengths[place])
    return lengths[-1]


@given(st.lists(st.sampled_from("abcd"), max_size=14), st.lists(st.sampled_from("abcd"), max_size=14))
@settings(max_examples=300, deadline=None)
def test_alignment_accounts_for_every_operation(base: list[str], head: list[str]) -> None:
    found = align(base, head)
    assert len(found.pairs) == longest_common(base, head)
    assert all(base[left] == head[right] for left, right in found.pairs + found.moved)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(found.pairs))
    assert sorted([left for left, _ in found.pairs + found.moved] + found.removed) == list(range(len(base)))
    assert sorted([right for _, right in found.pairs + found.moved] + found.added) == list(range(len(head)))
    left_over = {base[place] for place in found.removed} & {head[place] for place in found.added}
    assert not left_over  # a name that went and came is a move


def test_moved_work_is_not_new() -> None:
    block = [f"k{number}" for number in range(21)]
    base = ["in", *block * 32, "out"]
    head = ["in", *(block[:5] + block[6:] + [block[5]]) * 32, "out"]
    found = align(base, head)
    assert (found.removed, found.added) == ([], [])
    assert len(found.moved) == 32
    inserted = align(base, ["in", *[*block[:5], "new", *block[5:]] * 32, "out"])
    assert len(inserted.added) == 32
    assert (inserted.removed, inserted.moved) == ([], [])


def test_sequences_without_likeness_are_counted_by_name() -> None:
    base = ["same"] + [f"a{number}" for number in range(MOST_EDITS)]
    head = ["same"] + [f"b{number}" for number in range(MOST_EDITS)]
    found = align(base, head)
    assert not found.ordered
    assert found.pairs == [(0, 0)]
    assert (len(found.removed), len(found.added)) == (MOST_EDITS, MOST_EDITS)


# --- whole comparisons -----------------------------------------------------------------------------


def diff_of(tmp_path: Path, **head: Any) -> Diff:
    small_run(tmp_path / "base")
    small_run(tmp_path / "head", **({"seed": 1} | head))
    return compare_files(tmp_path / "base", tmp_path / "head")


def verdict_of(diff: Diff, name: str, statistic: str = "mean") -> str:
    timing = next(timing for timing in diff.timings() if timing.name == name)
    change = timing.change(statistic)
    assert change is not None
    return change.verdict


def test_the_same_run_again_has_no_evidence_of_a_difference(tmp_path: Path) -> None:
    diff = diff_of(tmp_path)
    (pair,) = diff.pairs
    assert not {change.verdict for timing in pair.timings for change in timing.changes} & VERDICTS
    assert pair.doubts + pair.differences + pair.notes == []
    assert pair.kernels == []
    assert all(metric.base == metric.head for metric in pair.metrics)


def test_a_slower_graph_is_named_and_nothing_else(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, scale={"graph": 1.05})
    told = {timing.name: {change.verdict for change in timing.changes} for timing in diff.timings()}
    assert all((verdicts == {"slower"}) == name.startswith("graph") for name, verdicts in told.items())
    ratio = next(timing for timing in diff.timings() if timing.name == "graph").changes[0]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1.05 < ratio.high


def test_a_changed_budget_list_shows_in_padding_memory_and_capture(tmp_path: Path) -> None:
    (pair,) = diff_of(tmp_path, budgets=(64, 128), scale={"graph": 0.9}).pairs
    metrics = {metric.name: metric for metric in pair.metrics}
    assert (metrics["padding"].base, metrics["padding"].head) == (0.25, 0.0)
    assert metrics["memory.pool"].verdict == "better"
    assert metrics["capture.graphs"].head == 2
    assert any(text.startswith("budgets:") for text in pair.differences)
    (change, *_) = next(timing for timing in pair.timings if timing.name == "graph").changes
    assert change.verdict == "faster"
    assert pair.doubts == []


def test_a_run_that_was_not_steady_is_doubted(tmp_path: Path) -> None:
    base, head = make_run(calls=1), make_run(calls=1, seed=1)
    for timing in head.timings:
        if timing.arm == "graph":
            timing.wall_us[60:] = [value * 1.2 for value in timing.wall_us[60:]]
    write_run(tmp_path / "base", base)
    write_run(tmp_path / "head", head)
    (pair,) = compare_files(tmp_path / "base", tmp_path / "head").pairs
    (doubt,) = pair.doubts
    assert doubt.startswith("head: graph drifted by +19%")


def test_a_machine_that_changed_with_the_budgets_is_doubted(tmp_path: Path) -> None:
    (pair,) = diff_of(tmp_path, budgets=(64, 128), scale={"eager_served": 1.06}).pairs
    assert any("although the budgets do not touch it" in doubt for doubt in pair.doubts)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "NVIDIA H100 80GB HBM3"}, "another GPU"),
        ({"driver": "590.1"}, "another driver"),
        ({"vllm": "0.34.0"}, "another vLLM"),
        ({"torch": "2.12.0"}, "another torch"),
        ({"sm_clock_mhz": 1200}, "another SM clock"),
        ({"power_limit_w": 500.0}, "another power limit"),
        ({"temperature_c": 71}, "another temperature"),
        ({"other_processes": 2}, "other processes were on the GPU"),
        ({"packages": {"numpy": "2.4.0"}}, "other packages: numpy 2.3.5 → 2.4.0"),
    ],
)
def test_another_environment_makes_the_comparison_doubtful(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    (pair,) = diff_of(tmp_path, environment=make_environment(**changes)).pairs
    assert any(told in doubt for doubt in pair.doubts)


def test_kernels_added_removed_moved_and_slower(tmp_path: Path) -> None:
    order = list(KERNELS * 4)
    base = write_traced(tmp_path / "base", order)
    added = write_traced(tmp_path / "added", [*order[:3], "brand_new_kernel", *order[3:]])
    moved = write_traced(tmp_path / "moved", [*order[1:9], order[0], *order[9:]])
    slower = write_traced(tmp_path / "slower", order, kernel_us=9.0)
    (pair,) = compare_files(base, added).pairs
    assert [(row.short, row.status) for row in pair.kernels] == [("brand_new_kernel", "added")]
    (pair,) = compare_files(added, base).pairs
    assert [(row.short, row.status) for row in pair.kernels] == [("brand_new_kernel", "removed")]
    (pair,) = compare_files(base, moved).pairs
    assert [row.status for row in pair.kernels] == ["moved"]
    assert pair.kernels[0].moved == 1
    (pair,) = compare_files(base, slower).pairs
    assert {row.status for row in pair.kernels} == {"changed time"}
    metrics = {metric.name: metric for metric in pair.metrics}
    assert metrics["graph.busy"].verdict == "worse"
    assert metrics["graph.launches"].base == 1


def test_a_trace_that_was_cut_off_is_not_counted(tmp_path: Path) -> None:
    whole, cut = (write_traced(tmp_path / name, list(KERNELS * 4)) for name in ("whole", "cut"))
    trace = cut / "traces" / "graph.json.gz"
    trace.write_bytes(trace.read_bytes()[:-200])
    (pair,) = compare_files(cut, whole).pairs
    assert not pair.kernels
    assert any("that of base is cut off" in note for note in pair.notes)
    create([cut], tmp_path / "cut.wbz")  # its copy in a bundle is cut off, too
    (pair,) = compare_files(whole, tmp_path / "cut.wbz").pairs
    assert any("that of head is cut off" in note for note in pair.notes)


def write_traced(folder: Path, kernels: list[str], **options: Any) -> Path:
    trace = TraceFile(
        file="traces/graph.json.gz", arm="graph", activities=["cuda", "ranges"], repeats=2, window="encoder.graph"
    )
    data = kineto_trace(kineto_events(kernels, window="encoder.graph", graph=True, **options))
    return write_run(folder, make_run(calls=1, traces=[trace]), {trace.file: data})


def test_syncs_and_launches_are_counted_per_call(tmp_path: Path) -> None:
    (pair,) = diff_of(tmp_path, eager_syncs=3).pairs
    metrics = {metric.name: metric for metric in pair.metrics}
    assert (metrics["eager_served.syncs"].base, metrics["eager_served.syncs"].head) == (0, 3)
    assert metrics["eager_served.syncs"].verdict == "worse"


def test_timings_of_other_things_are_not_compared(tmp_path: Path) -> None:
    base = small_run(tmp_path / "base")
    other = write_run(tmp_path / "static", make_run(replay="static_replay"))
    (pair,) = compare_files(base, other).pairs
    assert pair.timings == []
    assert any("re-runs Python" in note for note in pair.notes)
    fewer = small_run(tmp_path / "fewer", calls=1)
    (pair,) = compare_files(base, fewer).pairs
    assert any("common to both sides: 1, of 2 and 1" in note for note in pair.notes)
    assert {timing.name for timing in pair.timings} >= {"graph", "eager_served"}


def test_calls_are_matched_by_what_they_encode(tmp_path: Path) -> None:
    base, head = make_run(calls=2), make_run(calls=2, seed=1)
    swapped = {"calls": head.calls[::-1]}
    timings = [type(timing)(**(as_dict(timing) | {"call": 1 - timing.call})) for timing in head.timings]
    batches = [type(batch)(**(as_dict(batch) | {"call": 1 - batch.call})) for batch in head.batches]
    write_run(tmp_path / "base", base)
    write_run(tmp_path / "head", type(head)(**(as_dict(head) | swapped | {"timings": timings, "batches": batches})))
    diff = compare_files(tmp_path / "base", tmp_path / "head")
    assert verdict_of(diff, "graph[0]") == verdict_of(diff, "graph[1]") == "no evidence"


def test_all_arms_of_a_table_are_over_the_same_calls() -> None:
    """The graph failed on 4 of 12 calls of the head (D1): no arm's pass has them, on either side."""
    names = ("ernie45_vl-mixed", "ernie45_vl-mixed-2048")
    (pair,) = compare_files(*map(recording_folder, names)).pairs
    runs = [load_recording(name) for name in names]
    finished = sorted(set(range(12)) - {failure.call for failure in runs[1].failures})
    assert (pair.pass_calls, pair.common_calls) == (finished, 12)
    assert len(finished) == 8
    for timing in pair.timings:
        if timing.call is None:
            assert timing.arm
            assert timing.clock
            for run, side in zip(runs, (timing.base, timing.head), strict=True):
                assert side
                samples = arm_samples(run, timing.arm, timing.clock)
                expected = sum(float(np.mean(samples[call])) * run.calls[call].count for call in finished)
                assert side.mean == pytest.approx(expected)
    # Single calls stay details of every arm that has them.
    assert {timing.call for timing in pair.timings if timing.name.startswith("eager_served[")} == set(range(12))
    assert pair.differences == [
        "budgets: 128, 256, 512, 1024, 1536, 2048, 4096 → 128, 256, 512, 1024, 1536, 2048",
    ]
    metrics = {metric.name: metric for metric in pair.metrics}
    hits = [sum(len(batch.items) for batch in run.batches if batch.call in finished) for run in runs]
    assert [metrics["graph.hits"].base, metrics["graph.hits"].head] == hits
    assert hits[0] == hits[1]


def without(run: Run, *left_out: tuple[Arm, int]) -> Run:
    """A run in which some arms failed on some calls."""
    return msgspec.structs.replace(
        run,
        timings=[timing for timing in run.timings if (timing.arm, timing.call) not in left_out],
        failures=[Failure(arm=arm, call=call, error="RuntimeError", message="m") for arm, call in left_out],
    )


def diff_of_runs(base: Run, head: Run, folder: Path) -> Diff:
    return compare_files(write_run(folder / "base", base), write_run(folder / "head", head))


def test_one_or_no_call_that_every_arm_finished(tmp_path: Path) -> None:
    base, head = make_run(calls=2), make_run(calls=2, seed=1)
    diff = diff_of_runs(base, without(head, ("graph", 0)), tmp_path / "one")
    (pair,) = diff.pairs
    assert pair.pass_calls == [1]
    means = {timing.name: timing.base.mean for timing in pair.timings if timing.base}
    assert means["eager_served"] == means["eager_served[1]"]
    assert {"eager_served[0]", "graph"} <= means.keys()
    assert "graph[0]" not in means
    (pair,) = diff_of_runs(base, without(head, ("graph", 0), ("eager_served", 1)), tmp_path / "none").pairs
    assert (pair.pass_calls, pair.common_calls) == ([], 2)
    assert any("no call was finished by every arm" in note for note in pair.notes)
    assert {timing.name for timing in pair.timings if timing.clock == "wall"} == {
        "eager_served[0]", "eager_fallback[0]", "eager_fallback[1]", "graph[1]",
    }  # fmt: skip
    # An arm that failed everywhere on one side is not compared and leaves the others their calls.
    (pair,) = diff_of_runs(base, without(head, ("graph", 0), ("graph", 1)), tmp_path / "arm").pairs
    assert pair.pass_calls == [0, 1]
    assert pair.failures[0].only_head == [0, 1]


def test_failures_are_new_call_by_call(tmp_path: Path) -> None:
    base, head = make_run(calls=2), make_run(calls=2, seed=1)
    swapped = diff_of_runs(without(base, ("graph", 0)), without(head, ("graph", 1)), tmp_path / "swapped")
    (row,) = swapped.pairs[0].failures
    assert (row.base, row.head, row.only_base, row.only_head, row.verdict) == (1, 1, [0], [1], "worse")
    assert swapped.has_new_failures()
    same = diff_of_runs(without(base, ("graph", 0)), without(head, ("graph", 0)), tmp_path / "same")
    assert same.pairs[0].failures[0].verdict is None
    assert not same.has_new_failures()
    gone = diff_of_runs(without(base, ("graph", 0)), head, tmp_path / "gone")
    assert gone.pairs[0].failures[0].verdict == "better"
    assert not gone.has_new_failures()
    # The same failing call under another number is the same call.
    moved = msgspec.structs.replace(without(head, ("graph", 1)), calls=head.calls[::-1])
    assert not diff_of_runs(without(base, ("graph", 0)), moved, tmp_path / "moved").has_new_failures()


def test_what_was_changed_is_named_and_nothing_else(tmp_path: Path) -> None:
    base, head = make_run(), make_run(seed=1)
    config = msgspec.structs.replace(head.config, max_items=8, requested_max_items=8, requested_max_frames=0)
    model = msgspec.structs.replace(head.model, weights_fingerprint="0" * 64)
    changed = msgspec.structs.replace(
        head, config=config, model=model, environment=make_environment(vllm="0.34.0", torch="2.12.0")
    )
    (pair,) = diff_of_runs(base, changed, tmp_path).pairs
    assert pair.differences == [
        "max items: 4 → 8",
        "max frames asked for: none → 0",
        "weights: dummy seed 0 (5f70bf18a086) → dummy seed 0 (000000000000)",
        "vLLM: 0.33.0 → 0.34.0",
        "torch: 2.11.0 → 2.12.0",
    ]


def as_dict(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_lost_equality_is_told(tmp_path: Path) -> None:
    base, head = make_run(), make_run(seed=1)
    broken = [type(row)(**(as_dict(row) | {"bit_equal": False, "finite": False})) for row in head.equality]
    write_run(tmp_path / "base", base)
    write_run(tmp_path / "head", type(head)(**(as_dict(head) | {"equality": broken})))
    diff = compare_files(tmp_path / "base", tmp_path / "head")
    (row,) = diff.pairs[0].parity
    assert (row.base_equal, row.head_equal) == (1, 0)
    assert len(row.new_findings) == 2


def test_runs_are_paired_by_name_and_the_rest_is_named(tmp_path: Path) -> None:
    folders = {name: small_run(tmp_path / name, name, repeats=10) for name in ("one", "two", "three")}
    create([folders["one"], folders["two"]], tmp_path / "a.wbz")
    create([folders["two"], folders["one"], folders["three"]], tmp_path / "b.wbz")
    diff = compare_files(tmp_path / "a.wbz", tmp_path / "b.wbz")
    assert [pair.name for pair in diff.pairs] == ["one", "two"]
    assert diff.only_head == ["three"]


@pytest.mark.skipif(len(recording_names()) < 1, reason="no recording is shipped yet")
@pytest.mark.parametrize("name", recording_names())
def test_a_recording_against_itself(name: str) -> None:
    diff = compare_files(recording_folder(name), recording_folder(name))
    assert not {change.verdict for timing in diff.timings() for change in timing.changes} & VERDICTS
    assert all(metric.base == metric.head for metric in diff.pairs[0].metrics)
    assert diff.pairs[0].kernels == []


# --- conditions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Diff:
    """A head whose graph is 8 % slower, with a smaller pool and one new sync."""
    return diff_of(tmp_path_factory.mktemp("slower"), scale={"graph": 1.08}, budgets=(64, 128), eager_syncs=1)


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("graph.mean > +5%", True),
        ("graph.mean > +50%", False),
        ("graph.mean>+5%", True),
        ("graph[0].median >= +5%", True),
        ("graph.gpu.p99 > +5%", True),
        ("graph.mean > +300us", True),
        ("graph.mean > +0.3ms", True),
        ("graph.mean > 1s", False),
        ("graph.mean < -5%", False),
        ("eager_served.mean > +0%", False),  # a change without evidence is no failure
        ("eager_served.syncs > 0", True),
        ("eager_served.syncs > +0", True),
        ("graph.syncs > 0", False),
        ("memory.pool > +1MiB", False),
        ("memory.pool < -1MiB", True),
        ("memory.pool > 1KiB", True),
        ("padding >= 0.2", False),
        ("capture.seconds > 50ms", True),
        ("equality.equal_share < 0.5", False),
        ("equality.equal_share <= 0.5", True),
        ("doubts > 0", False),
    ],
)
def test_conditions(slower: Diff, text: str, hit: bool) -> None:
    (answer,) = check(slower, [text])
    assert answer.hit == hit, answer


def test_a_change_without_evidence_says_so(slower: Diff) -> None:
    means = {timing.name: timing.changes[0] for timing in slower.timings()}
    sign = ">" if (means["eager_served"].ratio or 1) > 1 else "<"
    (answer,) = check(slower, [f"eager_served.mean {sign} +0%"])
    assert not answer.hit
    assert "no evidence" in answer.reason


@pytest.mark.parametrize(
    "text",
    ["", "graph.mean", "graph.mean > ", "> 5", "graph.mean == 5", "graph.mean > 5%", "graph.mean > +5 parsecs",
     "graph.mean > +5%; import os", "__import__('os').system('x') > 0", "graph.mean > +nan%", "graph.mean > 1e999",
     "graph.mean > +5%" * 100, "graph.mean > +5%\nx"],
)  # fmt: skip
def test_conditions_that_cannot_be_read(text: str, slower: Diff) -> None:
    with pytest.raises(WorkbenchError):
        check(slower, [text])


def test_large_numbers_keep_their_digits_in_the_answer(slower: Diff) -> None:
    (answer,) = check(slower, ["memory.pool > 1KiB"])
    assert "bytes" in answer.reason
    assert "e+" not in answer.reason


def test_a_condition_on_nothing_is_an_error_not_a_pass(slower: Diff) -> None:
    with pytest.raises(WorkbenchError, match=r"'graph\.meen', which this comparison does not have"):
        check(slower, ["graph.meen > +5%"])
    with pytest.raises(WorkbenchError, match=r"gives MiB, but graph\.mean is measured in us"):
        check(slower, ["graph.mean > +5MiB"])


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_condition_or_an_error(text: str) -> None:
    try:
        condition = parse(text)
    except WorkbenchError:
        return
    assert math.isfinite(condition.limit)


def test_names_can_all_be_asked(slower: Diff) -> None:
    for name in names(slower):
        check(slower, [f"{name} > 0"])


# --- command line ----------------------------------------------------------------------------------


def test_the_command_line_exits_with_1_on_a_hit(tmp_path: Path) -> None:
    base, head = small_run(tmp_path / "a"), small_run(tmp_path / "b", seed=1, scale={"graph": 1.1})
    runner = CliRunner()
    page, text = tmp_path / "d.html", tmp_path / "d.md"
    result = runner.invoke(app, ["bundle", "diff", str(base), str(head), "--fail-if", "graph.mean > +5%",
                                 "--html", str(page), "--markdown", str(text)])  # fmt: skip
    assert result.exit_code == 1
    assert "fails: graph.mean > +5%" in result.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "| graph | change | +9.9%" in text.read_text()
    result = runner.invoke(app, ["bundle", "diff", str(base), str(base), "--fail-if", "graph.mean > +5%", "--json"])
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["conditions"][0]["hit"] is False
    assert document["diff"]["pairs"][0]["name"] == "ernie-base"


def test_two_things_that_have_nothing_in_common(tmp_path: Path) -> None:
    base = small_run(tmp_path / "a")
    trace = tmp_path / "t.json"
    trace.write_bytes(kineto_trace(kineto_events(KERNELS, window="w")))
    with pytest.raises(WorkbenchError, match="nothing that can be compared"):
        compare_files(base, trace)
    assert read_source(trace).external is not None


RECORDED = Path(__file__).parent / "data" / "runs"


def test_recorded_runs_of_two_configurations_and_of_one() -> None:
    """Runs of the CPU engine, static replay: two of one configuration, and one of another budget list.

    Made with `workbench capture --workload pull-request --max-items 4 --depth 2 --width 320 --repeats 60 --warmup 10
    --profiled-repeats 0` and `--budgets 64,128`, again the same, then `--budgets 512`.
    """
    same = compare_files(RECORDED / "graphs", RECORDED / "graphs-again")
    assert {change.verdict for timing in same.timings() for change in timing.changes} <= {"no evidence", "not judged"}
    assert same.pairs[0].doubts == []
    changed = compare_files(RECORDED / "graphs", RECORDED / "one-budget")
    graph = next(timing for timing in changed.timings() if timing.name == "graph")
    assert [change.verdict for change in graph.changes][:2] == ["slower", "slower"]
    # Eager does not depend on the budgets: that it moved too is told as a doubt about the machine.
    assert any(doubt.startswith("eager_served changed by") for doubt in changed.pairs[0].doubts)
    assert [answer.hit for answer in check(changed, ["graph.mean > +5%"])] == [True]
    assert [answer.hit for answer in check(same, ["graph.mean > +5%"])] == [False]
