"""Busy and idle agree with a slow independent computation to the nanosecond, and sum exactly."""

import json
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.kineto import Kineto, workload
from workbench.errors import WorkbenchError
from workbench.gaps import COUNTS, TIMES, Analysis, analyze, explain, report
from workbench.timeline import GapKind
from workbench.trace import Trace, read_trace

RECORDED = sorted((Path(__file__).parents[1] / "workbench" / "recordings").glob("*/traces/*.json.gz"))
EPOCH = 1_790_857_026_000_000_000


def saved(trace: Kineto, folder: Path) -> Trace:
    return read_trace(trace.write(folder / "t.json"))


def agree(path: Path, pattern: str | None) -> None:
    """The analysis of `path` equals the reference, and each row sums exactly."""
    analysis = analyze(read_trace(path), pattern)
    wanted = reference.rows(path, pattern)
    got = [
        {"name": row.name, "device": row.device} | {key: int(analysis.exact[key][i]) for key in (*TIMES, *COUNTS)}
        for i, row in enumerate(analysis.windows)
    ]
    assert got == wanted
    sums_hold(analysis)


def sums_hold(analysis: Analysis) -> None:
    """wall = busy + lead + gaps + tail, in nanoseconds, in the decimal text of the JSON, and in total."""
    exact = analysis.exact
    parts = ("busy", "lead", "launch_gap", "queue_gap", "intra_graph_gap", "tail")
    assert np.array_equal(exact["wall"], np.sum([exact[key] for key in parts], axis=0))
    assert np.array_equal(exact["idle"], exact["wall"] - exact["busy"])
    shown = json.loads(json.dumps(report([analysis])), parse_float=Decimal)
    for row in [*shown["windows"], shown["total"]]:
        assert row["wall_us"] == sum(row[f"{key}_us"] for key in parts)
    for key in COUNTS:
        assert shown["total"][key] == sum(row[key] for row in shown["windows"])
    listed = analysis.gaps
    for kind in GapKind:
        assert listed.duration_ns[listed.kind == kind].sum() == exact[f"{kind.name.lower()}_gap"].sum()


@st.composite
def traces(draw: st.DrawFn) -> Kineto:
    """Traces with everything at once: streams, devices, overlaps, ops without length, calls or ids."""
    trace = Kineto()
    base = draw(st.sampled_from([0, EPOCH, 5_119_820_687_519]))
    moments = st.integers(0, 60).map(lambda n: base + 37 * n)
    lengths = st.integers(0, 12).map(lambda n: 37 * n)
    devices = st.integers(0, draw(st.integers(0, 1)))
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["kernel", "copy", "memset", "replay", "bare", "alone"]))
        launch, start, length, device = draw(moments), draw(moments), draw(lengths), draw(devices)
        if kind == "kernel":
            trace.kernel(launch, start, length, device=device, stream=draw(st.integers(7, 8)))
        elif kind == "copy":
            trace.copy(launch, start, length, draw(st.sampled_from(["HtoD", "DtoH", "DtoD"])), device=device)
        elif kind == "memset":
            trace.memset(launch, start, length, device=device)
        elif kind == "replay":
            nodes = draw(st.lists(st.tuples(moments, lengths), min_size=1, max_size=4))
            trace.replay(launch, 500, nodes, device=device, graph=draw(st.integers(0, 2)))
        elif kind == "bare":  # its launch call is not in the trace
            trace.correlation += 1
            trace.gpu(start, length, trace.correlation, device=device, node=draw(st.integers(0, 1)))
        else:
            trace.gpu(start, length, None, device=device)
    for _ in range(draw(st.integers(0, 4))):
        trace.sync(draw(moments), draw(lengths), tid=draw(st.integers(1, 2)) * 4242)
    for index in range(draw(st.integers(1, 4))):
        begin = draw(moments)
        trace.annotate(f"w#{index % 2}", begin, begin + draw(lengths))
    return trace


@settings(max_examples=150, deadline=None)
@given(traces(), st.sampled_from([None, "w#*", "w#1", "*0"]))
def test_random_traces_agree_with_the_reference(trace: Kineto, pattern: str | None) -> None:
    with TemporaryDirectory() as folder:
        path = trace.write(Path(folder) / "t.json")
        if pattern == "w#1" and '"w#1"' not in path.read_text():
            pattern = "w#0"
        agree(path, pattern)


@pytest.mark.parametrize("pattern", [None, "eager#*", "graph#*", "*"])
def test_a_workload_like_a_real_one_agrees(tmp_path: Path, pattern: str | None) -> None:
    agree(workload(3, kernels=12, nodes=15).write(tmp_path / "t.json.gz"), pattern)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parts[-3]}/{path.name}")
def test_recordings_agree(path: Path) -> None:
    """Real H200 traces: busy by a walk over sorted ops, counts by loops (the reference is quadratic)."""
    analysis = analyze(read_trace(path))
    sums_hold(analysis)
    ops = sorted(reference.join(reference.load(path)), key=lambda op: op.start)
    busy, reach = 0, ops[0].start
    for op in ops:
        busy += max(op.end - max(op.start, reach), 0)
        reach = max(reach, op.end)
    assert int(analysis.exact["busy"][0]) == busy
    assert analysis.total.wall_us == (reach - ops[0].start) / 1000
    wanted = reference.counts(ops, ops[0].start, reach + 1)
    assert {key: getattr(analysis.total, key) for key in wanted} == wanted
    assert analysis.total.syncs <= sum(row.syncs for row in analysis.phases)


def test_gap_kinds_of_a_made_case(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("step", 0, 100_000)
    trace.kernel(1_000, 5_000, 5_000)  # ends at 10,000
    trace.kernel(2_000, 12_000, 3_000)  # launched before that: queue gap of 2,000
    trace.kernel(18_000, 20_000, 10_000)  # launched after 15,000: launch gap of 5,000
    trace.replay(29_000, 5_000, [(40_000, 5_000), (47_000, 3_000)])  # queued; 2,000 inside the graph
    trace.copy(48_000, 49_000, 11_000, "DtoH")  # overlaps the graph's end
    trace.sync(50_000, 12_000)
    row = analyze(saved(trace, tmp_path), "step").windows[0]
    assert (row.lead_us, row.tail_us) == (5.0, 40.0)
    assert (row.queue_gap_us, row.launch_gap_us, row.intra_graph_gap_us) == (2.0 + 10.0, 5.0, 2.0)
    assert row.busy_us == 5.0 + 3.0 + 10.0 + 5.0 + 13.0
    assert (row.gpu_ops, row.kernels, row.memcpy_d2h, row.launches) == (6, 5, 1, 5)
    assert (row.graph_launches, row.syncs, row.spilled_ops) == (1, 1, 0)


def test_a_launch_at_the_very_end_of_an_op_is_no_launch_gap(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(0, 1_000, 1_000)
    trace.kernel(2_000, 5_000, 1_000)
    assert analyze(saved(trace, tmp_path)).total.queue_gap_us == 3.0
    late = Kineto()
    late.kernel(0, 1_000, 1_000)
    late.kernel(2_001, 5_000, 1_000)
    assert analyze(saved(late, tmp_path)).total.launch_gap_us == 3.0


def test_gaps_name_the_op_that_ended_last(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(0, 1_000, 9_000, "long")
    trace.kernel(0, 2_000, 1_000, "short", stream=8)
    trace.kernel(0, 10_000, 1_000, "touching")
    trace.kernel(0, 15_000, 1_000, "next")
    made = saved(trace, tmp_path)
    gaps = analyze(made).gaps
    assert gaps.duration_ns.tolist() == [4_000]
    assert (made.names[gaps.before[0]], made.names[gaps.after[0]]) == ("touching", "next")
    trace = Kineto()
    trace.kernel(0, 1_000, 9_000, "long")
    trace.kernel(0, 2_000, 1_000, "short", stream=8)
    trace.kernel(0, 15_000, 1_000, "next")
    made = saved(trace, tmp_path)
    assert made.names[analyze(made).gaps.before[0]] == "long"


def test_idle_inside_a_replay_that_spans_another(tmp_path: Path) -> None:
    trace = Kineto()
    trace.replay(0, 500, [(1_000, 1_000), (20_000, 1_000)])
    trace.replay(600, 500, [(3_000, 1_000), (5_000, 1_000)], graph=12)
    total = analyze(saved(trace, tmp_path)).total
    assert (total.intra_graph_gap_us, total.queue_gap_us) == (1.0 + 1.0 + 14.0, 0.0)


def test_of_two_calls_with_one_correlation_the_outer_counts(tmp_path: Path) -> None:
    """A runtime call and the driver call inside it may carry the same correlation."""
    trace = Kineto()
    trace.kernel(0, 1_000, 1_000)
    inner = {"correlation": trace.correlation + 1}
    trace.event("cuda_driver", "cuLaunchKernel", 2_500, 100, 4242, 4242, inner)
    trace.kernel(1_500, 4_000, 1_000)  # its runtime call begins before the previous op ends
    assert analyze(saved(trace, tmp_path)).total.queue_gap_us == 2.0


def test_a_sync_counts_for_the_device_its_thread_last_used(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(1_000, 2_000, 1_000, device=1)
    trace.sync(5_000, 1_000)
    trace.kernel(7_000, 8_000, 1_000, device=0)
    trace.sync(8_500, 1_000)
    trace.sync(8_600, 1_000, tid=99_999)  # a thread that launched nothing
    trace.kernel(8_700, 9_000, 9_000, device=1)
    assert [row.syncs for row in analyze(saved(trace, tmp_path)).windows] == [2, 1]


def test_spilled_ops_belong_to_where_they_start(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("a", 0, 10_000)
    trace.annotate("b", 10_000, 30_000)
    trace.kernel(5_000, 10_000, 4_000)  # starts at the very end of a: belongs to b
    trace.kernel(6_000, 9_000, 4_000)  # begins in a, reaches into b
    analysis = analyze(saved(trace, tmp_path), "?")
    a, b = analysis.windows
    assert (a.gpu_ops, a.spilled_ops, a.busy_us) == (1, 1, 1.0)
    assert (b.gpu_ops, b.spilled_ops, b.busy_us) == (1, 0, 4.0)
    assert any("started after it" in text for text in analysis.warnings)


def test_events_before_the_first_window_do_not_count(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(0, 1_000, 500)
    trace.sync(1_500, 100)
    trace.annotate("step", 10_000, 20_000)
    trace.kernel(11_000, 12_000, 1_000)
    total = analyze(saved(trace, tmp_path), "step").total
    assert (total.gpu_ops, total.syncs, total.launch_gap_us, total.lead_us) == (1, 0, 0.0, 2.0)


def test_gpu_annotations_are_not_work(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(0, 1_000, 1_000)
    trace.event("gpu_user_annotation", "step", 500, 9_000, 0, 7, {"External id": 5})
    assert analyze(saved(trace, tmp_path)).total.wall_us == 1.0


def test_phases_are_the_innermost_annotations_of_the_thread(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("call", 0, 100_000)
    trace.annotate("inner", 10_000, 40_000)
    trace.annotate("inner", 60_000, 80_000)
    trace.annotate("elsewhere", 0, 100_000, tid=7)
    trace.kernel(1_000, 3_000, 1_000)
    trace.kernel(12_000, 14_000, 1_000)
    trace.copy(15_000, 16_000, 1_000, "DtoH")
    trace.sync(20_000, 15_000)
    trace.sync(61_000, 9_000)
    trace.sync(90_000, 2_000)
    trace.replay(62_000, 2_000, [(71_000, 1_000), (73_000, 1_000)])
    rows = {row.phase: row for row in analyze(saved(trace, tmp_path), "call").phases}
    inner, call = rows["inner"], rows["call"]
    assert (inner.syncs, inner.blocked_us, inner.host_us) == (2, 24.0, 50.0)
    assert (inner.launches, inner.graph_launches, inner.gpu_ops, inner.fan_out) == (3, 1, 4, 4 / 3)
    assert (inner.memcpy_d2h, inner.gpu_us) == (1, 4.0)
    assert (call.syncs, call.blocked_us, call.host_us, call.launches) == (1, 2.0, 50.0, 1)
    assert rows["elsewhere"].host_us == 100.0
    assert rows["elsewhere"].launches == 0


def test_phases_that_share_an_instant(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("first", 1_000, 2_000)
    trace.annotate("inner", 2_000, 5_000)
    trace.annotate("outer", 2_000, 9_000)
    trace.annotate("last", 5_000, 9_000)
    trace.annotate("after", 9_000, 10_000)
    rows = {row.phase: row.host_us for row in analyze(with_a_kernel(trace, tmp_path)).phases}
    assert rows == {"first": 1.0, "inner": 3.0, "last": 4.0, "after": 1.0, "(outside)": 0.0}


def test_phases_are_cut_to_the_windows(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("w#0", 1_000, 4_000)
    trace.annotate("w#1", 2_000, 6_000, tid=8)
    trace.annotate("long", 3_000, 60_000, tid=9)
    trace.annotate("w#2", 30_000, 31_000)
    analysis = analyze(with_a_kernel(trace, tmp_path), "w#*")
    assert {row.phase: row.host_us for row in analysis.phases}["long"] == 3.0 + 1.0


def with_a_kernel(trace: Kineto, folder: Path) -> Trace:
    """The trace with one op over its whole length, so that it can be analysed."""
    trace.gpu(0, 90_000, None)
    return saved(trace, folder)


def test_ops_between_the_ends_of_nested_windows_belong_to_the_outer(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("w", 0, 90_000)
    trace.annotate("w", 1_000, 5_000)
    trace.kernel(6_000, 7_000, 1_000)
    analysis = analyze(saved(trace, tmp_path), "w")
    assert [row.gpu_ops for row in analysis.windows] == [1, 0]
    assert sum(row.count for row in analysis.kernels) == 1
    assert any("overlap" in text for text in analysis.warnings)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12), st.integers(1, 400))
def test_innermost_by_a_stack(steps: list[tuple[int, int]], when: int) -> None:
    """Properly nested random annotations, against a stack walked in time."""
    trace, stack, now, spans = Kineto(), [], 0, []
    for index, (opening, closing) in enumerate(steps):
        for level in range(opening):
            now += 10
            stack.append((f"n{index}.{level}", now))
        for _ in range(min(closing, len(stack))):
            now += 10
            name, begin = stack.pop()
            spans.append((name, begin, now))
    while stack:
        now += 10
        name, begin = stack.pop()
        spans.append((name, begin, now))
    for name, begin, end in spans:
        trace.annotate(name, begin, end)
    trace.kernel(when, 500, 10)
    containing = [(end - begin, name) for name, begin, end in spans if begin <= when < end]
    wanted = min(containing)[1] if containing else "(outside)"
    with TemporaryDirectory() as folder:
        rows = [row for row in analyze(saved(trace, Path(folder))).phases if row.launches]
    assert [row.phase for row in rows] == [wanted]


def test_replay_parts(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("replay", 0, 100_000)
    trace.replay(1_000, 6_000, [(4_000, 2_000), (7_000, 1_000), (12_000, 3_000)], graph=9)
    trace.sync(8_000, 8_500)
    row = analyze(saved(trace, tmp_path), "replay").replays[0]
    assert (row.phase, row.graph, row.nodes, row.kernels) == ("replay", 9, 3, 3)
    assert (row.launch_us, row.to_first_us, row.span_us) == (6.0, 3.0, 11.0)
    assert (row.intra_graph_gap_us, row.to_sync_us) == (5.0, 1.5)


@pytest.mark.parametrize(("graph", "doubt"), [(9, False), (0, True)])
def test_a_replay_that_lost_a_kernel_is_reported(tmp_path: Path, graph: int, doubt: bool) -> None:
    trace, other = Kineto(), Kineto()
    for number in range(3):
        at = 100_000 * number
        trace.annotate("replay", at, at + 90_000)
        nodes = [(at + 10_000 + 2_000 * i, 1_500) for i in range(5)]
        trace.replay(at, 5_000, nodes[: 4 if number == 1 else 5], graph=graph)
    warnings = [text for text in analyze(saved(trace, tmp_path)).warnings if "differ" in text]
    assert len(warnings) == 1
    assert "5 kernels in 2, 4 kernels in 1" in warnings[0]
    assert ("no graph ids" in warnings[0]) == doubt
    for number, budget in enumerate((3, 3, 4)):  # two graphs of different size are no disagreement
        other.replay(100_000 * number, 5_000, [(100_000 * number + 9_000, 10)] * budget, graph=budget)
    assert not analyze(saved(other, tmp_path)).warnings


@pytest.mark.parametrize("step", ["call#0", "ProfilerStep#{}"])
def test_without_graph_ids_the_same_place_of_repeats_is_compared(tmp_path: Path, step: str) -> None:
    """torch 2.11 writes no graph ids: two budgets in one call must not look like a lost kernel."""
    for lost in (0, 1):
        trace = Kineto()
        for repeat in range(3):
            at = 100_000 * repeat
            trace.annotate(step.format(repeat), at, at + 90_000)
            for place, kernels in enumerate((4, 6)):
                begin = at + 40_000 * place
                trace.annotate("replay", begin + 100, begin + 10_000)
                nodes = [(begin + 12_000 + 2_000 * i, 500) for i in range(kernels - lost * place * (repeat == 2))]
                trace.replay(begin + 200, 5_000, nodes, graph=0)
        warnings = [text for text in analyze(saved(trace, tmp_path)).warnings if "differ" in text]
        assert len(warnings) == lost
        assert all("graph launch 2 under" in text and "6 kernels in 2, 5 kernels in 1" in text for text in warnings)


def test_hip_names(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("step", 0, 100_000)
    launch = trace.runtime("hipExtModuleLaunchKernel", 1_000, 500, cat="hip_runtime")
    trace.gpu(2_000, 1_000, launch, "Cijk_Ailk_Bljk_BBS_BH_MT64x64x64")
    copy = trace.runtime("hipMemcpyWithStream", 4_000, 5_000)
    trace.gpu(5_000, 2_000, copy, "CopyDeviceToHost", "gpu_memcpy")
    trace.replay(10_000, 2_000, [(13_000, 1_000), (15_000, 1_000)], name="hipGraphLaunch", graph=0)
    trace.sync(16_000, 1_000, "hipStreamSynchronize")
    row = analyze(saved(trace, tmp_path), "step").windows[0]
    assert (row.gpu_ops, row.launches, row.graph_launches, row.memcpy_d2h) == (4, 3, 1, 1)
    assert row.syncs == 2  # the blocking copy to the host waits as well
    assert row.intra_graph_gap_us == 1.0


@pytest.mark.parametrize("name", ["cudaEventQuery", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaEventRecord"])
def test_calls_that_do_not_block_are_no_syncs(tmp_path: Path, name: str) -> None:
    trace = Kineto()
    trace.kernel(0, 1_000, 10_000)
    trace.sync(2_000, 1_000, name)
    trace.copy(4_000, 12_000, 1_000, "DtoH")
    assert analyze(saved(trace, tmp_path)).total.syncs == 0


def test_kernel_and_family_tables(tmp_path: Path) -> None:
    analysis = analyze(saved(workload(2, kernels=8, nodes=4), tmp_path), "eager#*")
    assert sum(row.count for row in analysis.kernels) == analysis.total.gpu_ops == 16
    assert [row.family for row in analysis.families] == ["glue", "gemm"]
    assert sum(row.share for row in analysis.kernels) == pytest.approx(1)
    assert sum(row.total_us for row in analysis.families) == pytest.approx(16 * 2.345)
    assert any("75.0%" in text and "glue" in text for text in explain(analysis))


def test_missing_calls_and_crossed_clocks_are_said(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(5_000, 1_000, 500)
    trace.gpu(9_000, 500, None)
    warnings = " ".join(analyze(saved(trace, tmp_path)).warnings)
    assert "1 of 2 GPU ops have no launch call in the trace; gaps before them" in warnings
    assert "clocks" in warnings


def test_a_missing_call_without_a_gap_speaks_of_none(tmp_path: Path) -> None:
    trace = Kineto()
    trace.gpu(9_000, 500, None)
    assert analyze(saved(trace, tmp_path)).warnings == ["1 of 1 GPU ops have no launch call in the trace"]


def test_profiler_overhead_is_said(tmp_path: Path) -> None:
    trace = Kineto()
    trace.kernel(0, 1_000, 500)
    trace.event("overhead", "Buffer Flush", 1_100, 250, -1, 0, {})
    trace.kernel(1_200, 9_000, 500)
    assert any("profiler itself" in text for text in analyze(saved(trace, tmp_path)).warnings)


def test_several_ranks_are_reported_by_rank(tmp_path: Path) -> None:
    one, two = Kineto(rank=0), Kineto(rank=1)
    for trace in (one, two):
        trace.kernel(0, 1_000, 1_000)
    analyses = [analyze(read_trace(trace.write(tmp_path / f"r{trace.rank}.json"))) for trace in (one, two)]
    result = report(analyses, details=True)
    assert [row["rank"] for row in result["windows"]] == [0, 1]
    assert result["total"]["launches"] == 2  # equal correlations of two ranks are two launches
    assert list(report(analyses[:1])) == ["windows", "total", "warnings"]


def test_no_gpu_work_and_no_such_window_are_refused(tmp_path: Path) -> None:
    trace = Kineto()
    trace.annotate("step#1", 0, 10)
    with pytest.raises(WorkbenchError, match="no GPU work"):
        analyze(saved(trace, tmp_path))
    trace.kernel(0, 1_000, 500)
    with pytest.raises(WorkbenchError, match=r"'setp\*'.*it has 'step#1'"):
        analyze(saved(trace, tmp_path), "setp*")


def test_lost_microseconds_would_be_seen(tmp_path: Path) -> None:
    """The planted fault of readers that cut to whole microseconds: 2.9 us kernels would count as 2."""
    trace = Kineto()
    for i in range(10):
        trace.kernel(10_000 * i, 10_000 * i + 5_000, 2_900)
    assert analyze(saved(trace, tmp_path)).total.busy_us == 29.0
