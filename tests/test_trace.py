"""The reader: exact times, every shape Kineto writes, and no file that crashes it."""

import gzip
import json
import random
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import workbench.trace
from tests.kineto import GEMM, Kineto, workload
from workbench.errors import WorkbenchError
from workbench.trace import Category, Copy, Trace, read_trace, read_traces

RECORDED = sorted((Path(__file__).parents[1] / "workbench" / "recordings").glob("*/traces/*.json.gz"))


def event(**changes: Any) -> dict[str, Any]:
    """A kernel event; a change to None leaves the key out."""
    base = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.25,
            "args": {"device": 0, "stream": 7, "correlation": 5}}  # fmt: skip
    return {key: value for key, value in (base | changes).items() if value is not None}


def parse(tmp_path: Path, text: str | bytes, name: str = "t.json") -> Trace:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path)


def check_against_json(path: Path) -> Trace:
    """Every column equals what `json` with exact decimals reads."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    content = json.loads(text, parse_float=Decimal)
    kept = [e for e in content["traceEvents"] if e["ph"] == "X" and e["cat"].upper() in KEPT]
    trace = read_trace(path)
    assert len(trace) == len(kept)
    assert [trace.names[i] for i in trace.name] == [e["name"] for e in kept]
    assert trace.start_ns.tolist() == [int(Decimal(e["ts"]) * 1000) for e in kept]
    assert trace.duration_ns.tolist() == [int(Decimal(e["dur"]) * 1000) for e in kept]
    for column, key in (("correlation", "correlation"), ("stream", "stream"), ("external", "External id"),
                        ("graph_node", "graph node id"), ("bytes", "bytes")):  # fmt: skip
        assert getattr(trace, column).tolist() == [e["args"].get(key, -1) for e in kept], column
    return trace


# Names in the file of the categories that are kept.
KEPT = {"KERNEL", "GPU_MEMCPY", "GPU_MEMSET", "CUDA_RUNTIME", "CUDA_DRIVER", "CPU_OP", "USER_ANNOTATION",
        "GPU_USER_ANNOTATION", "OVERHEAD"}  # fmt: skip


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this machine's torch.profiler writes, stacks and shapes included."""
    torch = pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("torch") / "cpu.json"
    model = torch.nn.Linear(8, 8)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True) as profiler:
        for step in range(3):
            with torch.profiler.record_function(f"step#{step}"):
                model(torch.randn(4, 8)).softmax(-1)
    profiler.export_chrome_trace(str(path))
    return path


def test_a_real_torch_trace(cpu_trace: Path) -> None:
    trace = check_against_json(cpu_trace)
    assert trace.info.schema_version == 1
    assert trace.info.base_ns > 10**18
    names = [trace.names[i] for i in trace.name[trace.rows(Category.USER_ANNOTATION)]]
    assert [name for name in names if name.startswith("step#")] == ["step#0", "step#1", "step#2"]
    assert trace.gpu_rows().size == 0
    assert not trace.warnings
    assert trace.dropped["python_function"] > 0


def test_python_frames_on_request(cpu_trace: Path) -> None:
    trace, dropped = read_trace(cpu_trace, python=True), read_trace(cpu_trace).dropped["python_function"]
    assert trace.rows(Category.PYTHON_FUNCTION).size == dropped


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parts[-3]}/{path.name}")
def test_recordings(path: Path) -> None:
    trace = check_against_json(path)
    assert trace.gpu_rows().size > 0
    assert not trace.warnings


@pytest.mark.parametrize("form", ["object", "array"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "gzip_by_content.json"])
def test_forms(tmp_path: Path, form: str, name: str) -> None:
    made = workload(2, kernels=5, nodes=5)
    data = made.text(form).encode()
    trace = parse(tmp_path, gzip.compress(data) if "gz" in name else data, name)
    assert len(trace) == sum('"ph": "X"' in text for text in made.events)
    assert trace.info.rank == (0 if form == "object" else None)
    assert GEMM in trace.names
    assert not trace.warnings


@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_display_unit_does_not_change_times(tmp_path: Path, unit: str) -> None:
    made = Kineto()
    made.kernel(1_000, 2_345, 1_234)
    trace = parse(tmp_path, made.text(unit=unit))
    assert trace.info.display_unit == unit
    assert (trace.start_ns[1], trace.duration_ns[1]) == (2_345, 1_234)


def test_metadata(tmp_path: Path) -> None:
    info = parse(tmp_path, Kineto(rank=3, events=[json.dumps(event())]).text()).info
    assert (info.rank, info.world_size, info.trace_name) == (3, 2, "trace.json")
    assert info.devices[0]["name"] == "NVIDIA H200"
    odd = {"distributedInfo": {"rank": "3"}, "deviceProperties": {"a": 1}, "baseTimeNanoseconds": None}
    odd_info = parse(tmp_path, json.dumps({**odd, "traceEvents": [event()]})).info
    assert (odd_info.rank, odd_info.devices, odd_info.base_ns) == (None, [], 0)


def test_metadata_that_is_not_json_is_left_out_with_a_warning(tmp_path: Path) -> None:
    trace = parse(tmp_path, '{"host": {bad: 1}, "traceEvents": [' + json.dumps(event()) + "]}")
    assert len(trace) == 1
    assert "'host'" in trace.warnings[0]


@settings(max_examples=200, deadline=None)
@given(
    st.decimals(-(10**15), 2 * 10**15, places=3, allow_nan=False, allow_infinity=False)
    | st.decimals(0, 1000, allow_nan=False, allow_infinity=False),
    st.sampled_from(["f", "e", "E"]),
)
@example(Decimal("1790857026000000.123"), "f")
@example(Decimal("0.0005"), "f")
@example(Decimal("-0.0005"), "f")
@example(Decimal("1e-400"), "E")
def test_decimal_text_to_nanoseconds_is_exact(
    tmp_path_factory: pytest.TempPathFactory, value: Decimal, spelling: str
) -> None:
    text = format(value, spelling) if spelling != "E" else format(value, "e").upper()
    path = tmp_path_factory.getbasetemp() / "number.json"
    path.write_text(f'[{{"ph":"X","cat":"kernel","name":"k","ts":{text},"dur":1}}]')
    wanted = int((abs(Decimal(text)) * 1000).to_integral_value(ROUND_HALF_UP)) * (-1 if value < 0 else 1)
    assert read_trace(path).start_ns.tolist() == [wanted]


def test_copies_and_devices(tmp_path: Path) -> None:
    made = Kineto()
    for kind in ("HtoD", "DtoH", "DtoD"):
        made.copy(0, 1_000, 10, kind)
    for name in ("CopyHostToDevice", "Memcpy PtoP (Device -> Device)", "Memcpy HtoH (Pageable -> Pageable)"):
        made.gpu(1_000, 10, 9, name, "gpu_memcpy", device=3)
    trace = parse(tmp_path, made.text())
    rows = trace.rows(Category.MEMCPY)
    assert trace.copies()[rows].tolist() == [Copy.HTOD, Copy.DTOH, Copy.DTOD, Copy.HTOD, Copy.DTOD, Copy.OTHER]
    assert trace.device[rows].tolist() == [0, 0, 0, 3, 3, 3]
    assert set(trace.copies()[trace.rows(Category.RUNTIME)]) == {Copy.NONE}


def test_old_traces(tmp_path: Path) -> None:
    """torch 1.8 to 1.11: capital categories, whole microseconds, the device as pid, textual ids."""
    old = [
        event(cat="Kernel", pid=1, tid="stream 7", ts=1632000000000001, dur=3, args={"correlation": 8}),
        event(cat="Runtime", pid="python", tid="77", args={"external id": 4, "correlation": 8}),
        event(cat="Operator", pid="python", tid="78", args=None),
    ]
    trace = parse(tmp_path, json.dumps({"traceEvents": old}))
    assert trace.category.tolist() == [Category.KERNEL, Category.RUNTIME, Category.CPU_OP]
    assert trace.start_ns[0] == 1632000000000001000
    assert trace.device.tolist()[0] == 1
    assert trace.external.tolist() == [-1, 4, -1]
    assert trace.pid[1] == trace.pid[2]
    assert len(set(trace.tid.tolist())) == 3
    assert trace.names[-2 - trace.tid[1]] == "77"


def test_names_keep_their_characters(tmp_path: Path) -> None:
    names = ['a"b\\c', "ünï→\u2028", "\x00\x1b[31m", "", "x" * 100_000, 'esc\\"', "\U0001f600"]
    trace = parse(tmp_path, json.dumps([event(name=name) for name in names]))
    assert [trace.names[i] for i in trace.name] == names
    other_spelling = json.dumps(event(name="a")).replace('"a"', '"\\u0061"')
    same = parse(tmp_path, f"[{other_spelling}, {json.dumps(event(name='a'))}]")
    assert same.names == ["a"]
    assert same.name.tolist() == [0, 0]
    broken = parse(tmp_path, b'[{"ph":"X","cat":"kernel","name":"\xff\\q","ts":1,"dur":1}]')
    assert broken.names == ["\ufffd\\q"]


def test_many_names_grow_the_table(tmp_path: Path) -> None:
    made = [event(name=f"step {i} " + "y" * (i % 400)) for i in range(20_000)]
    trace = parse(tmp_path, json.dumps(made))
    assert [trace.names[i] for i in trace.name] == [e["name"] for e in made]


def test_pieces_do_not_change_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes put a boundary inside every token once."""
    path = workload(1, kernels=3, nodes=3).write(tmp_path / "t.json")
    whole = read_trace(path)
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr(workbench.trace, "CHUNK", size)
        monkeypatch.setattr(workbench.trace, "_ROWS", 2)
        pieces = read_trace(path)
        assert pieces.names == whole.names
        assert pieces.info == whole.info
        for column in ("start_ns", "duration_ns", "name", "correlation", "tid", "graph_node"):
            assert np.array_equal(getattr(pieces, column), getattr(whole, column)), (size, column)


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_every_cut_keeps_the_whole_events(tmp_path: Path, suffix: str) -> None:
    made = workload(2, kernels=6, nodes=6)
    data = made.write(tmp_path / f"t.{suffix}").read_bytes()
    whole = read_trace(tmp_path / f"t.{suffix}")
    step = max(1, len(data) // 60)
    kept = []
    for length in range(1, len(data) - 12, step):  # the last 12 bytes: trailer of gzip, end of the object
        try:
            trace = parse(tmp_path, data[:length], f"cut.{suffix}")
        except WorkbenchError as error:
            assert "cut off" in str(error) or "empty" in str(error)  # noqa: PT017
            kept.append(0)
            continue
        assert any("cut off" in text for text in trace.warnings)
        assert np.array_equal(trace.start_ns, whole.start_ns[: len(trace)])
        kept.append(len(trace))
    assert kept == sorted(kept)
    assert kept[-1] >= len(whole) - 2


def test_gzip_members_padding_and_damage(tmp_path: Path) -> None:
    data = workload(1, kernels=20, nodes=3).text().encode()
    members = gzip.compress(data[:3000]) + gzip.compress(data[3000:]) + bytes(64)
    assert len(parse(tmp_path, members)) == len(parse(tmp_path, data))
    without_trailer = parse(tmp_path, gzip.compress(data)[:-8])
    assert any("cut off" in text for text in without_trailer.warnings)
    packed = bytearray(gzip.compress(data))
    packed[-6] ^= 0xFF  # the checksum
    with pytest.raises(WorkbenchError, match="damaged gzip"):
        parse(tmp_path, bytes(packed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        (gzip.compress(b""), "is empty"),
        ("hello", "malformed"),
        ("\x7fELF\x02\x01", "malformed"),
        ("{}", "no array"),
        ("[]", "no events"),
        ('{"traceEvents": []}', "no events"),
        ('{"traceEvents": {}}', "no array"),
        ('{"a": [1, 2, 3]}', "no array"),
        ("[1, 2, 3]", "no events"),
        ('[{"ph": "X", "cat": "blink", "name": "v8", "ts": 1, "dur": 1}]', "no events"),
        ('{"traceEvents": [{"ph": "X", ', "cut off"),
        ('{"traceEvents"', "cut off"),
        ('{"traceEvents": [{"ph" "X"}]}', "malformed"),
        ('{"traceEvents": [{"args": {"a": [1}}]}', "malformed"),
        ('{"traceEvents" []}', "malformed"),
        ("{1: 2}", "malformed"),
        ('[{"args": ' + "[" * 100_000 + "]" * 100_000 + "}]", "malformed"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "malformed"),
        ('{"traceEvents": [}', "malformed"),
    ],
)
def test_what_is_no_trace_gets_one_sentence(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message) as caught:
        parse(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "t.json" in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(WorkbenchError, match="cannot read"):
            read_trace(path)


ODD = [
    "null", "7", '"text"', "[]", "{}", '{"ph": "X"}', '{"ph": 1, "cat": 2}',
    *(
        json.dumps(event(**changes))
        for changes in (
            {"ts": "12"}, {"ts": float("nan")}, {"dur": float("inf")}, {"dur": -1}, {"dur": 1e300}, {"ts": -1e300},
            {"dur": "N/A"}, {"ts": None}, {"dur": None}, {"ts": {"a": 1}}, {"ts": True},
        )
    ),
]  # fmt: skip


def test_odd_events_are_counted_and_left_out(tmp_path: Path) -> None:
    good = json.dumps(event(name="good"))
    trace = parse(tmp_path, "[" + ",".join([good, *(f"{odd}, {good}" for odd in ODD)]) + "]")
    assert len(trace) == len(ODD) + 1
    assert trace.names == ["good"]
    # Not an object: 4. A time that is none: 11. The rest are objects of no known kind.
    assert trace.warnings == ["t.json: 15 events without a usable time or duration were left out"]


def test_odd_members_do_not_cost_the_event(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        {"name": 7}, {"name": {"a": [1, {}]}}, {"args": 5}, {"args": []}, {"args": {"device": "gpu", "stream": None}},
        {"args": {"correlation": 1e300}}, {"args": {"correlation": float("nan")}}, {"pid": None, "tid": None},
        {"pid": [1], "tid": {"x": 2}}, {"id": [[[]]]}, {"args": {"nested": {"device": 9}}},
    ]  # fmt: skip
    trace = parse(tmp_path, json.dumps([event(**changes) for changes in odd]))
    assert len(trace) == len(odd)
    assert not trace.warnings
    assert set(trace.device.tolist()) == {0}
    assert trace.names[trace.name[0]] == ""


def test_last_of_duplicate_keys_wins_as_in_json(tmp_path: Path) -> None:
    text = (
        '[{"ph":"B","ph":"X","cat":"cpu_op","cat":"kernel","name":"a","name":"b","ts":1,"ts":2,"dur":9,"dur":3,'
        '"pid":"p","pid":4,"args":{"device":5,"stream":6},"args":{"device":1,"device":2}}]'
    )
    trace = parse(tmp_path, text)
    assert trace.names == ["b"]
    assert (trace.start_ns[0], trace.duration_ns[0], trace.pid[0]) == (2000, 3000, 4)
    assert (trace.device[0], trace.stream[0], trace.category[0]) == (2, -1, Category.KERNEL)


def test_key_order_and_white_space_do_not_matter(tmp_path: Path) -> None:
    text = json.dumps([dict(reversed(event().items()))], indent=7)
    assert parse(tmp_path, text).correlation.tolist() == [5]
    assert parse(tmp_path, "\ufeff" + json.dumps([event()], separators=(",", ":"))).correlation.tolist() == [5]
    assert len(parse(tmp_path, "[" + json.dumps(event()) + ",]")) == 1


def test_text_after_the_end_is_said(tmp_path: Path) -> None:
    assert "after the end" in parse(tmp_path, json.dumps([event()]) + " x").warnings[0]


def test_white_space_without_end_is_quick(tmp_path: Path) -> None:
    blank = b" " * (64 * 2**20)
    with pytest.raises(WorkbenchError, match="is empty"):
        parse(tmp_path, gzip.compress(blank, 1))
    events = b"[" + json.dumps(event()).encode() + b"]"
    assert len(parse(tmp_path, gzip.compress(blank + events + blank, 1))) == 1


def test_a_single_huge_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbench.trace, "CHUNK", 1000)
    monkeypatch.setattr(workbench.trace, "LARGEST_VALUE", 10_000)
    with pytest.raises(WorkbenchError, match="single value"):
        parse(tmp_path, '{"a": "' + "x" * 50_000 + '"}')


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_bytes_changed_at_random_never_crash(seed: int, changes: int) -> None:
    """Fuzz: either columns of one length, or one sentence."""
    chance = random.Random(seed)
    data = bytearray(FUZZED)
    for _ in range(changes):
        place = chance.randrange(len(data))
        action = chance.randrange(3)
        if action == 0:
            data[place] = chance.choice(b'{}[]",:\\0\x00\xffeE-.n')
        elif action == 1:
            del data[place : place + chance.randrange(1, 40)]
        else:
            data[place:place] = chance.choice([b"{", b"}", b'"', b"\\", b"[[[", b"NaN", b"1e999", b"\x00"])
    with TemporaryDirectory() as folder:
        try:
            trace = parse(Path(folder), bytes(data))
        except WorkbenchError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return
    assert len(trace.category) == len(trace.start_ns) == len(trace.bytes) > 0
    assert trace.name.max() < len(trace.names)
    assert trace.duration_ns.min() >= 0


FUZZED = workload(1, kernels=3, nodes=2).text().encode()


def test_ranks_in_parallel_come_in_order(tmp_path: Path) -> None:
    paths = []
    for rank in (2, 0, 1):
        made = Kineto(rank=rank)
        made.kernel(0, 1000 * rank, 10)
        paths.append(made.write(tmp_path / f"{rank}.json"))
    assert [trace.info.rank for trace in read_traces(paths)] == [0, 1, 2]
    paths.append(tmp_path / "none.json")
    with pytest.raises(WorkbenchError, match=r"none\.json"):
        read_traces(paths)
