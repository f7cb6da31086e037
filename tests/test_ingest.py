"""Foreign results: vLLM's benchmarks, lmms-eval, Nsight Systems and Kineto, good, odd and hostile."""

import contextlib
import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs import KERNELS, kineto_events, kineto_trace
from workbench.bundle import Bundle, create
from workbench.conditions import check
from workbench.diff import compare_files
from workbench.errors import WorkbenchError
from workbench.gaps import analyze
from workbench.ingest import External, nsys_trace, read_external
from workbench.ingest.reader import of_document
from workbench.run import load_recording, recording_folder, recording_names
from workbench.trace import Category, read_trace


def mm_processor(scale: float = 1.0) -> dict[str, Any]:
    """What `vllm bench mm-processor --output-json` writes."""

    def stage(mean: float) -> dict[str, float]:
        return {"mean": mean, "median": mean * 0.99, "std": mean * 0.1, "p99.0": mean * 1.5}

    return {
        "completed": 100,
        "failed": 0,
        "mean_e2el_ms": 812.5,
        "median_e2el_ms": 800.0,
        "std_e2el_ms": 30.0,
        "percentiles_e2el_ms": [[99.0, 901.0]],
        "mm_processor_stats": {
            "get_mm_hashes_ms": stage(0.2),
            "preprocessor_total_ms": stage(5.1),
            "encoder_forward_ms": stage(5.33 * scale),
            "num_encoder_calls": stage(1.0),
        },
        "encoder_summary": {"total_encoder_calls": 100, "num_requests_with_encoder_calls": 100},
        "config": {"model": "baidu/ERNIE-4.5-VL-28B-A3B-PT", "num_prompts": 100, "input_len": 1024, "output_len": 1},
        "timestamp": "2026-11-29T12:00:00",
    }


def serve(seed: int = 0, detailed: bool = False, **changes: Any) -> dict[str, Any]:
    """What `vllm bench serve --save-result` writes."""
    ttfts = list(0.2 * (1 + np.random.default_rng(seed).gamma(2, 0.05, 150)))
    document: dict[str, Any] = {
        "date": "20261129-120000",
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": None,
        "model_id": "zai-org/GLM-4.6V-Flash",
        "tokenizer_id": "zai-org/GLM-4.6V-Flash",
        "num_prompts": 150,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": 31.5,
        "completed": 150,
        "failed": 0,
        "total_input_tokens": 153600,
        "total_output_tokens": 19200,
        "request_throughput": 4.76,
        "request_goodput": None,
        "output_throughput": 609.5,
        "total_token_throughput": 5485.7,
        "max_output_tokens_per_s": 900.0,
        "max_concurrent_requests": 150,
        "mean_ttft_ms": float(np.mean(ttfts)) * 1000,
        "median_ttft_ms": float(np.median(ttfts)) * 1000,
        "std_ttft_ms": float(np.std(ttfts)) * 1000,
        "p99_ttft_ms": float(np.percentile(ttfts, 99)) * 1000,
        "mean_tpot_ms": 12.0,
        "median_tpot_ms": 11.8,
        "std_tpot_ms": 0.5,
        "p99_tpot_ms": 14.1,
    }
    if detailed:
        document |= {"ttfts": ttfts, "itls": [[0.01, 0.02]] * 150, "generated_texts": ["a"] * 150, "errors": [""] * 150}
    return document | changes


def lmms_eval(accuracy: float = 0.6548) -> dict[str, Any]:
    """What lmms-eval writes: numbers, text and "N/A" side by side."""
    return {
        "results": {
            "ai2d": {
                "alias": "ai2d",
                "exact_match,flexible-extract": accuracy,
                "exact_match_stderr,flexible-extract": 0.0086,
                "submission,none": "N/A",
                "submission_stderr,none": "N/A",
            },
            "mmstar": {"alias": "mmstar", "average,none": 0.1241, "average_stderr,none": "N/A", "sample_len": 1500},
        },
        "group_subtasks": {"ai2d": [], "mmstar": []},
        "n-samples": {"ai2d": {"original": 3088, "effective": 3088}, "mmstar": {"original": 1500, "effective": 1500}},
        "config": {"model": "vllm", "model_args": "model=zai-org/GLM-4.1V-9B-Thinking", "limit": None},
        "git_hash": "0a1b2c3",
        "date": "20261129_120000",
    }


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_mm_processor(tmp_path: Path) -> None:
    found = read_external(write(tmp_path / "graph.json", mm_processor()))
    measures = {measure.name: measure for measure in found.measures}
    assert found.source == "bench mm-processor"
    assert found.model == "baidu/ERNIE-4.5-VL-28B-A3B-PT"
    assert measures["encoder_forward"].mean == pytest.approx(5330.0)
    assert measures["encoder_forward"].percentiles == {"99": pytest.approx(5.33 * 1.5e3)}
    assert measures["e2el"].percentiles == {"99": pytest.approx(901_000)}
    assert measures["num_encoder_calls"].unit == "count"
    assert measures["num_encoder_calls"].mean == 1.0


@pytest.mark.engine
def test_mm_processor_as_the_installed_vllm_computes_it(tmp_path: Path) -> None:
    from workbench.encoder.bootstrap import prepare

    prepare()
    from vllm.benchmarks.mm_processor import calculate_mm_processor_metrics

    seconds = list(np.random.default_rng(0).gamma(2, 0.002, 300))
    stats = calculate_mm_processor_metrics({"encoder_forward_secs": seconds, "num_encoder_calls": [1.0]}, [50.0, 99.0])
    document = mm_processor() | {"mm_processor_stats": stats}
    found = read_external(write(tmp_path / "a.json", document))
    measure = next(measure for measure in found.measures if measure.name == "encoder_forward")
    assert measure.mean == pytest.approx(np.mean(seconds) * 1e6)
    assert measure.percentiles["99"] == pytest.approx(np.percentile(seconds, 99) * 1e6)


def test_serve_with_and_without_samples(tmp_path: Path) -> None:
    plain = read_external(write(tmp_path / "plain.json", serve()))
    detailed = read_external(write(tmp_path / "detailed.json", serve(detailed=True)))
    left, right = ({m.name: m for m in side.measures} for side in (plain, detailed))
    assert left["ttft"].samples == []
    assert len(right["ttft"].samples) == 150
    assert left["ttft"].mean == pytest.approx(np.mean(right["ttft"].samples))
    assert left["ttft"].percentiles["99"] == pytest.approx(np.percentile(right["ttft"].samples, 99))
    assert left["request_throughput"].better == "higher"
    assert plain.configuration["request_rate"] == "inf"


def test_results_appended_to_one_file_and_sweeps(tmp_path: Path) -> None:
    runs = [serve(seed, run_number=seed % 5, max_num_seqs=64 * (1 + seed // 5)) for seed in range(10)]
    lines = tmp_path / "appended.json"
    lines.write_text("\n".join(map(json.dumps, runs)))
    for path in (lines, write(tmp_path / "summary.json", runs)):
        found = read_external(path)
        names = {measure.name: measure for measure in found.measures}
        assert found.source == "bench sweep"
        assert found.configuration["combinations"] == "2"
        assert len(names["mean ttft [max_num_seqs=64]"].samples) == 5
        assert names["mean ttft [max_num_seqs=64]"].runs
        assert "request_throughput [max_num_seqs=128]" in names


def test_sweep_runs_are_the_samples_of_a_comparison(tmp_path: Path) -> None:
    base = write(tmp_path / "base.json", [serve(seed) for seed in range(6)])
    faster = [serve(seed) for seed in range(6, 12)]
    for document in faster:
        for key in ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"):
            document[key] *= 0.5
        document["request_throughput"] *= 2
    diff = compare_files(base, write(tmp_path / "head.json", faster))
    verdicts = {timing.name: timing.changes[0].verdict for timing in diff.timings()}
    assert verdicts["mean ttft"] == "faster"
    assert verdicts["mean tpot"] == "no evidence"
    assert verdicts["request_throughput"] == "better"


def test_statistics_without_samples_are_shown_and_not_judged(tmp_path: Path) -> None:
    base = write(tmp_path / "eager.json", mm_processor(3.79))
    head = write(tmp_path / "graph.json", mm_processor())
    diff = compare_files(base, head)
    timing = next(timing for timing in diff.timings() if timing.name == "encoder_forward")
    assert timing.changes[0].ratio == pytest.approx(1 / 3.79)
    assert {change.verdict for change in timing.changes} == {"not judged"}
    assert check(diff, ["encoder_forward.mean < 6ms"])[0].hit


def test_lmms_eval_and_the_sigma_of_the_seeds(tmp_path: Path) -> None:
    on = write(tmp_path / "on.json", lmms_eval(0.6548))
    off = lmms_eval(0.6564)
    off["results"]["ai2d"]["exact_match_stderr,flexible-extract"] = 0.0085
    diff = compare_files(on, write(tmp_path / "off.json", off))
    (delta,) = diff.pairs[0].accuracy
    assert delta.sigma == pytest.approx(0.0016 / np.hypot(0.0086, 0.0085))
    assert any("mmstar" in note and "without a standard error" in note for note in diff.pairs[0].notes)
    assert not check(diff, ["sigma.ai2d.exact_match,flexible-extract > 2"])[0].hit


def test_a_kineto_trace_alone(tmp_path: Path) -> None:
    data = kineto_trace(kineto_events(KERNELS * 4, window="w", graph=True))
    plain, packed, bare = tmp_path / "a.json", tmp_path / "b.json.gz", tmp_path / "c.json"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    bare.write_text(json.dumps(json.loads(data)["traceEvents"]))
    results = [read_external(path) for path in (plain, packed, bare)]
    assert {found.source for found in results} == {"kineto"}
    assert results[0].counts["graph_launches"] == 2
    assert len({json.dumps([k.name for k in found.kernels]) for found in results}) == 1
    other = tmp_path / "d.json"
    other.write_bytes(kineto_trace(kineto_events([*KERNELS * 4, "new_kernel"], window="w", graph=True)))
    (pair,) = compare_files(plain, other).pairs
    assert [(row.short, row.status) for row in pair.kernels] == [("new_kernel", "added")]


@pytest.mark.skipif(not recording_names(), reason="no recording is shipped")
def test_traces_of_the_recordings_alone() -> None:
    name = recording_names()[0]
    for trace in load_recording(name).traces[:2]:
        found = read_external(recording_folder(name) / trace.file)
        assert found.source == "kineto"
        assert found.counts["kernels"] > 100
        assert sum(kernel.count for kernel in found.kernels) == found.counts["gpu_ops"]


# --- Nsight Systems --------------------------------------------------------------------------------

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId
INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
gridX INTEGER, blockX INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId
INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER,
dstKind INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, globalTid
INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER, rangeId INTEGER, text TEXT,
globalTid INTEGER, textId INTEGER);
"""
STRINGS = ["void gemm<int>(Params)", "gemm", "cudaGraphLaunch_v10000", "cudaLaunchKernel_v7000",
           "cudaStreamSynchronize_v3020", "encoder.graph#0"]  # fmt: skip
TID = (4242 << 24) | 77


def nsys(path: Path, *, extra: str = "", kernels: int = 20) -> Path:
    """An export: one window with a replay of `kernels` nodes, then one launched kernel, a copy and a wait."""
    with sqlite3.connect(path) as database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(STRINGS))
        database.execute("INSERT INTO NVTX_EVENTS VALUES (0, 100000, 59, NULL, NULL, ?, 5)", (TID,))
        database.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 34, NULL, 'mark', ?, NULL)", (TID,))
        runtime = [(100, 5000, 0, TID, 1, 2, 0), (40000, 43000, 0, TID, 2, 3, 0), (50000, 90000, 0, TID, 4, 4, 0)]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", runtime)
        row: tuple[int | None, ...]
        for node in range(kernels):
            row = (6000 + 1000 * node, 6800 + 1000 * node, 0, 1, 7, 1, 4242 << 24, 0, 1, 8, 128, 900 + node)
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 12)})", row)
        row = (60000, 61000, 0, 1, 7, 2, 4242 << 24, 0, 1, 8, 128, None)
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 12)})", row)
        copy = (70000, 71500, 0, 1, 7, 3, 4242 << 24, 4096, 2, 2, 0, None)
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({','.join('?' * 12)})", copy)
        database.executescript(extra)
    database.close()
    return path


def test_nsys_gives_the_columns_of_a_trace(tmp_path: Path) -> None:
    trace = nsys_trace(nsys(tmp_path / "a.sqlite"))
    assert trace.rows(Category.KERNEL).size == 21
    assert trace.rows(Category.USER_ANNOTATION).size == 1
    assert "Memcpy DtoH (Device -> Pageable)" in trace.names
    assert "cudaGraphLaunch" in trace.names
    assert trace.graph_node.max() == 919
    assert set(trace.pid.tolist()) == {4242}
    analysis = analyze(trace, "encoder.graph#*")
    (window,) = analysis.windows
    assert (window.wall_us, window.gpu_ops, window.launches, window.graph_launches, window.syncs) == (100, 22, 3, 1, 1)
    assert window.busy_us == pytest.approx(20 * 0.8 + 1 + 1.5)
    assert window.intra_graph_gap_us == pytest.approx(19 * 0.2)


def test_nsys_columns_equal_those_of_kineto(tmp_path: Path) -> None:
    """The same events told by both tools give the same analysis."""
    trace = nsys_trace(nsys(tmp_path / "a.sqlite"))
    events = []
    for row in range(len(trace)):
        names = {0: "kernel", 1: "gpu_memcpy", 3: "cuda_runtime", 6: "user_annotation"}
        category = int(trace.category[row])
        args = {"correlation": int(trace.correlation[row])} if category != 6 else {}
        args |= {"device": 0, "stream": 7} if category <= 1 else {}
        args |= {"graph node id": int(trace.graph_node[row])} if trace.graph_node[row] > 0 else {}
        events.append(
            {"ph": "X", "cat": names[category], "name": trace.names[trace.name[row]],
             "pid": 0 if category <= 1 else 4242, "tid": 7 if category <= 1 else 77,
             "ts": int(trace.start_ns[row]) / 1000, "dur": int(trace.duration_ns[row]) / 1000, "args": args}
        )  # fmt: skip
    path = tmp_path / "a.json"
    path.write_bytes(kineto_trace(events))
    assert analyze(read_trace(path), "encoder.graph#0").windows == analyze(trace, "encoder.graph#0").windows


def test_nsys_of_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE StringIds (id INTEGER, value TEXT); INSERT INTO StringIds VALUES (1, 'k');"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 10, 1), (20, 30, 9);"
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT);"
            "INSERT INTO NVTX_EVENTS VALUES (0, 40, 'w');"
        )
    database.close()
    trace = nsys_trace(path)
    assert sorted(trace.names) == ["k", "kernel without a name", "w"]
    assert analyze(trace, "w").total.gpu_ops == 2


def test_graphs_traced_as_a_whole_are_told(tmp_path: Path) -> None:
    extra = """CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, streamId
    INTEGER, correlationId INTEGER, graphId INTEGER, globalPid INTEGER);
    INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (80000, 85000, 0, 7, 9, 3, 0);"""
    trace = nsys_trace(nsys(tmp_path / "a.sqlite", extra=extra))
    assert any("--cuda-graph-trace=node" in warning for warning in trace.warnings)
    assert "CUDA graph 3, traced as a whole" in trace.names


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("CREATE TABLE x (a)", "no Nsight Systems export"),
        ("CREATE TABLE StringIds (id, value)", "no GPU work"),
        ("CREATE TABLE StringIds (id, value); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (a)", "without start and end"),
        (
            "CREATE TABLE StringIds (id, value); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('<script>', 'x')",
            "where a number should stand",
        ),
        (
            "CREATE TABLE StringIds (id, value); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 5)",
            "ends before it starts",
        ),
        (
            "CREATE TABLE StringIds (id, value); CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE "
            "n(start, end) AS (SELECT 1, 2 UNION ALL SELECT start + 1, end + 1 FROM n) SELECT * FROM n",
            "no GPU work",  # a view is never read, so it cannot run for ever
        ),
    ],
)
def test_odd_databases_get_one_sentence(sql: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(sql)
    database.close()
    with pytest.raises(WorkbenchError, match=told):
        nsys_trace(path)


def test_a_damaged_database_is_refused_and_never_written(tmp_path: Path) -> None:
    data = nsys(tmp_path / "a.sqlite", kernels=2000).read_bytes()
    generator = np.random.default_rng(0)
    path = tmp_path / "b.sqlite"
    for _ in range(60):
        broken = bytearray(data)
        for at in generator.integers(16, len(data), 40):
            broken[at] = generator.integers(0, 256)
        path.write_bytes(broken)
        try:
            nsys_trace(path)
        except WorkbenchError as error:
            assert "\n" not in str(error)  # noqa: PT017  either outcome is right
        assert path.read_bytes() == bytes(broken)
    path.write_bytes(data[:5000])
    with pytest.raises(WorkbenchError):
        nsys_trace(path)


def test_an_export_becomes_part_of_a_bundle_and_of_a_comparison(tmp_path: Path) -> None:
    base, head = nsys(tmp_path / "base.sqlite"), nsys(tmp_path / "head.sqlite", kernels=25)
    create([base, write(tmp_path / "serve.json", serve(detailed=True))], tmp_path / "a.wbz")
    create([head, write(tmp_path / "serve.json", serve(1, detailed=True))], tmp_path / "b.wbz")
    Bundle(tmp_path / "a.wbz").verify()
    diff = compare_files(tmp_path / "a.wbz", tmp_path / "b.wbz")
    assert [pair.kind for pair in diff.pairs] == ["external", "external"]
    trace = next(pair for pair in diff.pairs if pair.kernels)
    assert [(row.status, row.base_count, row.head_count) for row in trace.kernels] == [("changed count", 21, 26)]
    assert check(diff, ["trace.launches > +0"])[0].hit is False


# --- what is nothing of the kind -------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"{}", b"[]", b"[1, 2]", b"null", b'{"results": {}}', b'{"results": {"a": {"alias": "a"}}}',
     b'{"mm_processor_stats": {}}', b"\x1f\x8bbroken", b"[" * 100_000, b'{"a": 1}\n{"b": 2}', b"\xff\xfe\x00",
     b'{"traceEvents": []}', b'{"duration": 1}', b'{"mm_processor_stats": {"encoder_forward_ms": {"mean": NaN}}}'],
)  # fmt: skip
def test_what_is_no_result_gets_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(WorkbenchError) as refusal:
        read_external(path)
    assert "\n" not in str(refusal.value)


def test_a_missing_file() -> None:
    with pytest.raises(WorkbenchError, match="cannot read"):
        read_external(Path("/nowhere/x.json"))


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([mm_processor(), serve(detailed=True), lmms_eval()]), st.data())
@settings(max_examples=150, deadline=None)
def test_odd_values_in_known_files_never_crash(document: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(document)))
    changed = document | {key: data.draw(values)}
    if isinstance(document[key], dict) and document[key]:
        inner = data.draw(st.sampled_from(sorted(document[key])))
        changed = document | {key: document[key] | {inner: data.draw(values)}}
    with contextlib.suppress(WorkbenchError):
        assert isinstance(of_document(changed, Path("x.json")), External)


@pytest.mark.parametrize("digits", [310, 5000])
def test_a_number_that_no_float_holds_counts_as_missing(digits: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    number = "1" * digits
    path.write_text(f'{{"duration": 1.0, "request_throughput": 2.0, "mean_ttft_ms": {number}, "median_ttft_ms": 3}}')
    ttft, rate = read_external(path).measures
    assert (ttft.mean, ttft.median, rate.mean) == (None, 3000.0, 2.0)
