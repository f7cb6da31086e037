"""The module map: nodes to innermost modules, joined only when counts agree, and the roofline's arithmetic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.encoder.module_map import (  # noqa: E402 - needs torch
    NodeSpan,
    Work,
    attention_work,
    encoder_work,
    join,
    linear_work,
    ops_of,
    owners,
    sequence_lengths,
    with_roofline,
)
from workbench.models import MODELS, ModelFacts, model_facts, small_size  # noqa: E402
from workbench.roofline import H200, Device  # noqa: E402

GEMM, NORM, CAST = "nvjet_tst_128x64", "vectorized_layer_norm_kernel", "void at::native::elementwise_kernel<x>(int)"
SPANS = [
    NodeSpan("vit", 0, 6),
    NodeSpan("vit.norm", 0, 1),
    NodeSpan("vit.attn", 1, 5),
    NodeSpan("vit.attn.qkv", 1, 2),
    NodeSpan("vit.attn.empty", 2, 2),
    NodeSpan("vit.attn.proj", 4, 5),
]
OPS = [(NORM, 2.0), (GEMM, 10.0), (CAST, 1.0), (CAST, 1.5), (GEMM, 8.0), (CAST, 0.5), (CAST, 3.0)]


def test_a_node_belongs_to_its_innermost_module() -> None:
    expected = ["vit.norm", "vit.attn.qkv", "vit.attn", "vit.attn", "vit.attn.proj", "vit", ""]
    assert owners(SPANS, 7) == expected
    assert owners(SPANS[::-1], 7) == expected
    rows = {row.module: row for row in join(SPANS, 7, OPS)}
    assert list(rows) == ["vit.norm", "vit.attn.qkv", "vit.attn", "vit.attn.proj", "vit", ""]
    assert (rows["vit.attn"].nodes, rows["vit.attn"].us) == (2, 2.5)
    assert rows["vit.attn"].families == {"glue": (2, 2.5)}
    assert sum(row.us for row in rows.values()) == sum(us for _, us in OPS)


@pytest.mark.parametrize("ops", [OPS[:-1], [*OPS, (CAST, 1.0)], []])
def test_other_counts_are_refused(ops: list[tuple[str, float]]) -> None:
    with pytest.raises(WorkbenchError, match=rf"7 nodes and its replay shows {len(ops)} ops"):
        join(SPANS, 7, ops)


@pytest.mark.parametrize(
    "spans",
    [
        [NodeSpan("a", 0, 3), NodeSpan("b", 2, 5)],
        [NodeSpan("a", 3, 2)],
        [NodeSpan("a", 0, 9)],
        [NodeSpan("a", -1, 2)],
    ],
)
def test_spans_that_cannot_be_are_refused(spans: list[NodeSpan]) -> None:
    with pytest.raises(WorkbenchError, match="more than one stream"):
        owners(spans, 7)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nested_spans_give_every_node_to_the_deepest(data: st.DataObject) -> None:
    expected: list[str] = []
    spans: list[NodeSpan] = []
    for module in range(data.draw(st.integers(0, 5))):
        first = len(expected)
        for child in range(data.draw(st.integers(0, 4))):
            count = data.draw(st.integers(0, 3))
            spans.append(NodeSpan(f"{module}.{child}", len(expected), len(expected) + count))
            expected += [f"{module}.{child}"] * count + [str(module)] * data.draw(st.integers(0, 2))
            # what follows a child is the parent's own
        spans.append(NodeSpan(str(module), first, len(expected)))
        expected += [""] * data.draw(st.integers(0, 1))
    assert owners(data.draw(st.permutations(spans)), len(expected)) == expected


def test_the_roofline_is_the_larger_of_weights_and_operations() -> None:
    device = Device("d", bytes_per_second=1e12, flops=1e14)
    assert Work(flops=0, weight_bytes=2_000_000).roofline_us(device) == pytest.approx(2.0)
    assert Work(flops=10**9, weight_bytes=2_000_000).roofline_us(device) == pytest.approx(10.0)
    linear = torch.nn.Linear(1280, 3840, dtype=torch.bfloat16)
    work = linear_work(linear, rows=256)
    assert work == Work(2 * 256 * 1280 * 3840, 2 * (1280 * 3840 + 3840))
    assert linear_work(torch.nn.Sequential(linear), 256) == Work(0, 0)
    assert attention_work([256, 64], 1280) == Work(4 * 1280 * (256**2 + 64**2), 0)
    # All of ERNIE's weights, 1.26 GB at 4.3 TB/s: the design notes' 0.29 ms
    assert Work(0, 1_260_000_000).roofline_us(H200) == pytest.approx(293, abs=1)


def test_attention_runs_over_items_or_frames() -> None:
    grids = [(2, 4, 6), (1, 8, 8)]
    assert sequence_lengths(model_facts("ernie45_vl"), grids) == [48, 64]
    assert sequence_lengths(model_facts("glm4_1v"), grids) == [24, 24, 64]


@pytest.fixture
def built(request: pytest.FixtureRequest) -> Iterator[tuple[Any, ModelFacts]]:
    """The model object of a small encoder, its weights not packed away yet, and its facts."""
    from workbench.budgets import Limits
    from workbench.encoder import engine, registry

    engine.require_vllm()
    depth, width = small_size(model_facts(request.param))
    facts = registry.reduced_facts(request.param, depth, width)
    device, dtype = torch.device("cpu"), torch.bfloat16
    with engine.surroundings(Limits(4096, 4096, video_limit=0), device, dtype, None), engine.building(device, dtype):
        yield registry.builder(request.param).build(facts), facts


@pytest.mark.engine
@pytest.mark.parametrize("built", MODELS, indirect=True)
def test_a_registry_entry_names_modules_that_exist(built: tuple[Any, ModelFacts]) -> None:
    from workbench.encoder.registry import builder

    model, facts = built
    entry, names = builder(facts.key), dict(model.named_modules())
    for name in (*entry.merged, *entry.outside):
        assert list(names[name].parameters()), name
    work = encoder_work(model, facts, [64], 64)
    outside = sum(p.nbytes for name in entry.outside for p in names[name].parameters())
    assert sum(one.weight_bytes for one in work.values()) == sum(p.nbytes for p in model.parameters()) - outside


@pytest.mark.engine
@pytest.mark.parametrize("built", ["glm4_1v"], indirect=True)
def test_the_work_of_glm_is_that_of_its_layers(built: tuple[Any, ModelFacts]) -> None:
    model, facts = built
    lengths, patches = [24, 24, 64], 128
    width, out, tokens = facts.width, facts.out_width, patches // facts.merge**2
    work = encoder_work(model, facts, lengths, patches)
    flops = {name: one.flops for name, one in work.items() if one.flops}
    block = {"attn.qkv": 3 * width**2, "attn.proj": width**2, "mlp.gate_up_proj": 2 * width * out}
    block["mlp.down_proj"] = width * out
    expected = {
        f"visual.blocks.{number}.{name}": 2 * patches * entries
        for number in range(facts.depth)
        for name, entries in block.items()
    }
    for number in range(facts.depth):
        expected[f"visual.blocks.{number}.attn.attn"] = 4 * width * (24**2 + 24**2 + 64**2)
    expected["visual.patch_embed.proj"] = 2 * patches * width * facts.patch_features
    expected["visual.downsample"] = 2 * tokens * out * facts.merge**2 * width
    merger = {"proj": out**2, "gate_up_proj": 2 * out * facts.mlp_width, "down_proj": out * facts.mlp_width}
    expected |= {f"visual.merger.{name}": 2 * tokens * entries for name, entries in merger.items()}
    assert flops == expected


def test_work_of_a_module_without_nodes_goes_to_the_one_around_it() -> None:
    device = Device("d", bytes_per_second=1e12, flops=1e14)
    rows = join(SPANS, 7, OPS)
    work = {
        "vit.attn.qkv": Work(10**8, 0),
        "vit.attn.attn": Work(3 * 10**8, 0),
        "vit.attn.attn.inner": Work(10**8, 0),
        "vit.ln": Work(0, 10**6),
        "other": Work(10**9, 10**9),
    }
    found = {row.module: row for row in with_roofline(rows, work, device)}
    assert found["vit.attn.qkv"].roofline_us == pytest.approx(1.0)
    assert found["vit.attn.qkv"].distance == pytest.approx(10.0)
    assert found["vit.attn"].flops == 4 * 10**8
    assert found["vit"].weight_bytes == 10**6
    assert found["vit.norm"].distance is None
    assert found[""].flops == 0
    unknown = {row.module: row for row in with_roofline(rows, work, None)}
    assert unknown["vit.attn.qkv"].flops == 10**8
    assert {row.roofline_us for row in unknown.values()} == {0.0}


def test_a_recorded_replay_gives_its_ops_in_order() -> None:
    from workbench.run import recording_folder
    from workbench.trace import read_trace

    folder = recording_folder("ernie45_vl-224")
    trace = read_trace(folder / "traces" / "graph.ranges-cuda.json.gz")
    ops = ops_of(trace)
    assert len(ops) == len(trace.gpu_rows())
    assert all(us > 0 for _, us in ops)
    alone = trace.duration_ns[trace.gpu_rows()].sum() / 1e3
    assert 0.99 * alone < sum(us for _, us in ops) < alone  # FlashAttention 3 begins while its plan is still being made


def test_a_kernel_that_waits_for_the_one_in_front_counts_from_its_end(tmp_path: Path) -> None:
    from workbench.trace import read_trace

    kernels = [("a", 0, 10), ("b", 1, 14), ("inside", 2, 3), ("c", 20, 5), ("d", 25, 1)]  # name, begin, microseconds
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": us, "args": {"stream": 7}}
        for name, begin, us in kernels
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert ops_of(read_trace(path)) == [("a", 10.0), ("b", 5.0), ("inside", 0.0), ("c", 5.0), ("d", 1.0)]


def test_hooks_note_every_module_while_the_stream_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.encoder import module_map

    nodes: list[int] = []
    capturing = False
    monkeypatch.setattr(module_map, "captured_nodes", lambda: len(nodes) if capturing else None)

    class Kernel(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is imported late
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def forward(self, x: object) -> object:
            nodes.extend([0] * self.count)
            return x

    model = torch.nn.Module()
    model.tower = torch.nn.Sequential(Kernel(2), torch.nn.Sequential(Kernel(0), Kernel(3)))
    model.other = Kernel(1)
    for capturing in (False, True):
        nodes.clear()
        with module_map.noting_spans(model, ("tower",)) as spans:
            model.other(model.tower(torch.zeros(1)))
        assert bool(spans) is capturing
    assert owners(spans, len(nodes)) == ["tower.0"] * 2 + ["tower.1.1"] * 3 + [""]
    assert not model.tower._forward_hooks
