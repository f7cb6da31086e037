"""The encoder session: vLLM's real classes on the CPU, by static replay."""

import contextlib
import dataclasses
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.budgets import Configuration
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.encoder import engine, smoke  # noqa: E402 - needs an engine
from workbench.encoder.session import (  # noqa: E402
    EncoderInputs,
    EncoderSession,
    Grid,
    SessionOptions,
    open_session,
)
from workbench.run import ARMS, Arm, CaptureCost  # noqa: E402

SMALL = SessionOptions(depth=2, width=160)


def assert_equal(got: list[Any], expected: list[Any]) -> None:
    """Bit for bit: on the CPU the same kernels see the same rows, whatever the padding after them."""
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, theirs)


def check_arms(session: EncoderSession, inputs: EncoderInputs) -> None:
    outputs = {arm: session.run(arm, inputs) for arm in ARMS}
    assert [tuple(x.shape) for x in outputs["graph"]] == [(n, session.facts.out_width) for n in inputs.tokens]
    assert_equal(outputs["graph"], outputs["eager_served"])
    assert_equal(outputs["eager_fallback"], outputs["eager_served"])


# Graph against eager ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grids", "batches"),
    [
        pytest.param([(1, 16, 16)], [([0], 64, 64)], id="fills the budget"),
        pytest.param([(1, 2, 2)], [([0], 1, 64)], id="one token"),
        pytest.param([(1, 16, 18)], [([0], 72, 128)], id="pads nearly half"),
        pytest.param([(1, 4, 60)], [([0], 60, 64)], id="wide"),
        pytest.param([(1, 16, 16)] * 4, [([0, 1, 2, 3], 256, 256)], id="four items"),
        pytest.param([(1, 8, 8)] * 5, [([0, 1, 2, 3], 64, 64), ([4], 16, 64)], id="one item too many"),
        pytest.param([(1, 32, 24), (1, 8, 8), (1, 12, 20)], [([1, 2], 76, 128), ([0], 192, 256)], id="deferred"),
    ],
)
def test_graph_equals_eager(
    ernie: EncoderSession, grids: list[Grid], batches: list[tuple[list[int], int, int]]
) -> None:
    inputs = ernie.inputs(grids, seed=3)
    check_arms(ernie, inputs)
    hits = ernie.stats["graph_hits"]
    with ernie.watch() as seen:
        ernie.graph(inputs)
    assert [(batch.items, batch.tokens, batch.budget) for batch in seen] == batches
    assert {batch.call for batch in seen} == {0}
    assert ernie.stats["graph_hits"] == hits + len(grids)
    assert ernie.stats["graph_misses"] == 0


@pytest.mark.parametrize(
    ("grids", "modality"),
    [
        ([(1, 8, 8)], "image"),
        ([(1, 8, 12), (1, 12, 12)], "image"),
        ([(1, 16, 16), (1, 4, 4), (1, 2, 2)], "image"),
        ([(2, 8, 8)], "video"),
        ([(4, 4, 4), (3, 4, 8)], "video"),
    ],
)
def test_glm_graph_equals_eager(glm: EncoderSession, grids: list[Grid], modality: Any) -> None:
    check_arms(glm, glm.inputs(grids, modality))


sides = st.integers(1, 8).map(lambda n: 2 * n)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grids=st.lists(st.tuples(st.just(1), sides, sides), min_size=1, max_size=7), seed=st.integers(0, 99))
def test_any_images_graph_equals_eager(ernie: EncoderSession, grids: list[Grid], seed: int) -> None:
    """Batches follow one another in the same buffers, so rows that an earlier one left behind would show."""
    inputs = ernie.inputs(grids, seed=seed)
    with ernie.watch() as seen:
        assert_equal(ernie.graph(inputs), ernie.eager_served(inputs))
    assert sorted(i for batch in seen for i in batch.items) == list(range(len(grids)))
    assert all(len(batch.items) <= 4 and batch.tokens <= (batch.budget or 0) for batch in seen)


def test_a_broken_graph_is_seen(ernie: EncoderSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality above must fail when replays attend with the wrong sequences."""
    inputs = ernie.inputs([(1, 8, 8), (1, 8, 8)])
    prepare = ernie.model.prepare_encoder_cudagraph_replay_buffers

    def one_sequence(*args: Any) -> Any:
        replay = prepare(*args)
        offsets = replay.values["cu_seqlens"]
        offsets[1:] = offsets[-1]
        return replay

    monkeypatch.setattr(ernie.model, "prepare_encoder_cudagraph_replay_buffers", one_sequence)
    graph, eager = ernie.graph(inputs), ernie.eager_served(inputs)
    assert all((a - b).norm() > 0.1 * b.norm() for a, b in zip(graph, eager, strict=True))


def test_watching_leaves_out_what_the_manager_does_not_run(ernie: EncoderSession) -> None:
    inputs = ernie.inputs([(1, 8, 8)])
    with ernie.watch() as seen:
        ernie.eager_fallback(inputs)
        ernie.graph(inputs)
        ernie.eager_fallback(inputs)
        ernie.graph(inputs)
    assert [(batch.call, batch.budget) for batch in seen] == [(0, 64), (1, 64)]


def test_outputs_are_the_callers_own(ernie: EncoderSession) -> None:
    first = ernie.graph(ernie.inputs([(1, 8, 8)], seed=1))[0]
    kept = first.clone()
    ernie.graph(ernie.inputs([(1, 8, 8)], seed=2))
    assert torch.equal(first, kept)


# Defects ----------------------------------------------------------------------------------------------------------

_D1 = """
from workbench.budgets import Configuration
from workbench.encoder.session import SessionOptions, open_session
with open_session(SessionOptions(depth=1, width=160), Configuration((64,), 1)) as session:
    session.capture()
    inputs = session.inputs([(1, 16, 18)])
    assert session.eager_fallback(inputs)[0].shape == (72, 320)
    try:
        with session.watch() as batches:
            session.graph(inputs)
    except RuntimeError as error:
        print(type(error).__name__, [(b.tokens, b.budget) for b in batches], session.stats["graph_misses"])
    print(session.graph(session.inputs([(1, 8, 8)]))[0].isfinite().all().item())
"""


def test_d1_an_item_above_the_largest_budget_raises() -> None:
    """In a process of its own: without the session's check, this kills it on the CPU."""
    done = subprocess.run([sys.executable, "-c", _D1], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == ["RuntimeError [(72, None)] 1", "True"]


def test_d6_a_tail_of_zeros_is_a_finding(glm: EncoderSession) -> None:
    glm.configure(Configuration((64, 128), 4, 8))
    glm.capture()
    assert glm.findings == []
    inputs = glm.inputs([(1, 8, 8)])
    assert_equal(glm.graph(inputs), glm.eager_served(inputs))
    glm.graph(inputs)
    assert [(finding.defect, finding.budget) for finding in glm.findings] == [("D6", 64)]
    assert "[0, 64, 64, 64, 64, 0, 0, 0, ...], 9 entries" in glm.findings[0].message


def test_no_finding_with_one_frame_per_item(glm: EncoderSession) -> None:
    glm.configure(Configuration((64, 128), 4, 4))
    glm.capture()
    check_arms(glm, glm.inputs([(1, 8, 8)]))
    assert glm.findings == []
    glm.configure(Configuration((64, 128), 4, 8))
    glm.capture()


# Looking inside ---------------------------------------------------------------------------------------------------


class Spans:
    """Records spans and checks that they nest."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.entered.append(name)
        self.open.append(name)
        try:
            yield
        finally:
            assert self.open.pop() == name


def test_phases_of_a_call(ernie: EncoderSession) -> None:
    inputs = ernie.inputs([(1, 8, 8), (1, 32, 32)])
    plain = ernie.graph(inputs)
    spans = Spans()
    with ernie.phases(spans):
        assert_equal(ernie.graph(inputs), plain)
    batch = ["select_items", "item_specs", "replay_buffers", "buffer_copies", "replay", "postprocess", "clone"]
    assert spans.entered == ["item_specs", *batch, *batch]
    assert spans.open == []
    ernie.graph(inputs)
    assert len(spans.entered) == 1 + 2 * len(batch), "the phases end with their block"


def test_phases_end_when_a_copy_or_a_fallback_raises(ernie: EncoderSession, glm: EncoderSession) -> None:
    spans = Spans()
    with pytest.raises(RuntimeError), ernie.phases(spans):
        ernie.graph(ernie.inputs([(1, 32, 34)]))
    assert spans.entered == ["item_specs", "select_items", "eager_fallback", "postprocess"]
    assert spans.open == []
    spans = Spans()
    too_many_frames = glm.inputs([(12, 2, 2)], "video")
    with pytest.raises(RuntimeError), glm.phases(spans):
        glm.graph(too_many_frames)
    assert spans.entered[-1] == "buffer_copies"
    assert spans.open == []
    check_arms(glm, glm.inputs([(2, 8, 8)], "video"))


@pytest.mark.parametrize("arm", ["eager_served", "eager_fallback"])
def test_module_spans(ernie: EncoderSession, arm: Arm) -> None:
    spans = Spans()
    with ernie.module_spans(spans):
        ernie.run(arm, ernie.inputs([(1, 8, 8)]))
    assert spans.open == []
    assert spans.entered[0] == "vision_model"
    blocks = [name for name in spans.entered if name.count(".") == 2 and ".blocks." in name]
    assert blocks == ["vision_model.blocks.0", "vision_model.blocks.1"]
    assert "resampler_model.temporal_linear1" in spans.entered
    assert spans.entered.count("vision_model.blocks.1.attn") == 1
    before = len(spans.entered)
    ernie.run(arm, ernie.inputs([(1, 8, 8)]))
    assert len(spans.entered) == before


def test_module_spans_end_when_a_module_raises(ernie: EncoderSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(ernie.model.vision_model.blocks[1].mlp, "forward", fail)
    spans = Spans()
    with pytest.raises(RuntimeError, match="planted"), ernie.module_spans(spans):
        ernie.eager_served(ernie.inputs([(1, 8, 8)]))
    assert spans.open == []


def test_capture_reports_each_budget(ernie: EncoderSession) -> None:
    reported: list[CaptureCost] = []
    ernie.configure(Configuration((128, 64, 256), 4))
    with pytest.raises(WorkbenchError, match="capture"):
        ernie.graph(ernie.inputs([(1, 8, 8)]))
    costs = ernie.capture(reported.append)
    assert [cost.budget for cost in costs] == [256, 128, 64]
    assert costs == reported
    assert all(cost.seconds > 0 and cost.pool_bytes is None and cost.nodes is None for cost in costs)


# What a session says about itself ---------------------------------------------------------------------------------


def test_records(ernie: EncoderSession) -> None:
    record = ernie.model_record
    assert (record.key, record.depth, record.width, record.out_width) == ("ernie45_vl", 2, 160, 320)
    assert (record.dtype, record.attention_backend, record.weights) == ("bfloat16", "TORCH_SDPA", "dummy seed 0")
    assert ernie.replay == "static_replay"
    config = ernie.config_record
    assert (config.budgets, config.max_items, config.max_frames) == ([64, 128, 256], 4, 0)
    assert sorted(config.requested_budgets) == config.budgets
    assert config.min_budget == 64


def test_inferred_configuration_is_vllms() -> None:
    options = SessionOptions(depth=1, width=160, max_model_len=1000, max_num_batched_tokens=4096)
    with open_session(options, Configuration()) as session:
        record = session.config_record
    assert (record.requested_budgets, record.requested_max_items) == ([], 0)
    assert record.budgets == [64, 128, 256, 512, 1000]
    assert record.max_items == 15


def test_video_limit_decides_the_frames() -> None:
    frames = {}
    for limit in (0, 1, None):
        options = SessionOptions(model="glm4_1v", depth=1, width=128, video_limit=limit)
        with open_session(options, Configuration((64,), 2)) as session:
            frames[limit] = session.config_record.max_frames
    assert frames == {0: 0, 1: 1200, None: 1200}


def test_inputs_depend_on_seed_and_grids(ernie: EncoderSession) -> None:
    one = ernie.inputs([(1, 8, 8), (1, 2, 4)])
    assert one.pixels.shape == (72, 588)
    assert one.pixels.dtype is torch.bfloat16
    assert one.grid.device.type == "cpu"
    assert one.tokens == (16, 2)
    assert one.fingerprint() == ernie.inputs([(1, 8, 8), (1, 2, 4)]).fingerprint()
    others = [ernie.inputs([(1, 8, 8), (1, 2, 4)], seed=1), ernie.inputs([(1, 8, 8), (1, 4, 2)])]
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 3


# Several sessions -------------------------------------------------------------------------------------------------


def _process_state() -> tuple[Any, ...]:
    import vllm.model_executor.layers.attention.mm_encoder_attention as attention
    import vllm.model_executor.models.utils as utils
    from vllm.config import get_current_vllm_config_or_none

    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.distributed.is_initialized(),
        get_current_vllm_config_or_none(),
        attention.vit_torch_sdpa_wrapper,
        utils.scatter_output_slices,
    )


def test_sessions_follow_one_another_and_leave_nothing() -> None:
    engine.require_vllm()
    before = _process_state()
    fingerprints = []
    models = []
    for options in (
        SMALL,
        SessionOptions(model="glm4_1v", depth=1, width=128, dtype="float32"),
        SessionOptions(depth=1, width=160, seed=5),
        SMALL,
    ):
        with open_session(options, Configuration((64,), 2)) as session:
            session.capture()
            check_arms(session, session.inputs([(1, 8, 8), (1, 4, 4)]))
            with session.phases(Spans()), session.watch():
                session.graph(session.inputs([(1, 8, 8)]))
            fingerprints.append(session.model_record.weights_fingerprint)
            models.append(weakref.ref(session.model))
        gc.collect()
        assert models[-1]() is None
        assert _process_state() == before
    assert fingerprints[0] == fingerprints[3]
    assert len(set(fingerprints)) == 3


def test_a_session_that_fails_leaves_nothing() -> None:
    before = _process_state()
    session = open_session(SMALL, Configuration((64,), 2))
    session.__enter__().capture()
    assert session.__exit__(KeyError, KeyError(), None) is False
    assert _process_state() == before


def test_sessions_nest() -> None:
    with open_session(SMALL, Configuration((64,), 2)) as outer:
        outer.capture()
        with open_session(SessionOptions(depth=1, width=160), Configuration((64,), 2)) as inner:
            inner.capture()
            check_arms(inner, inner.inputs([(1, 8, 8)]))
        check_arms(outer, outer.inputs([(1, 8, 8)]))


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (SessionOptions(model="nope"), "unknown model 'nope'"),
        (SessionOptions(depth=0), "depth 0"),
        (SessionOptions(depth=33), "between 1 and 32"),
        (SessionOptions(width=100), "width 100 is not a multiple of 80"),
        (SessionOptions(width=2560), "width 2560"),
        (SessionOptions(dtype="fp8"), "dtype 'fp8'"),
        (SessionOptions(device="cuda"), "there is no CUDA device"),
        (SessionOptions(device="tpu"), "device 'tpu'"),
        (SessionOptions(device="mps"), "use cuda or cpu"),
        (SessionOptions(attention_backend="NOPE"), "attention backend 'NOPE' is not one of TORCH_SDPA"),
        (SessionOptions(attention_backend="FLASH_ATTN"), "TORCH_SDPA"),
        (SessionOptions(max_model_len=0), "max_model_len 0"),
        (SessionOptions(max_num_batched_tokens=-5), "max_num_batched_tokens -5"),
        (SessionOptions(video_limit=-1), "video limit -1"),
    ],
)
def test_bad_options(options: SessionOptions, says: str) -> None:
    if torch.cuda.is_available() and "CUDA" in says:
        pytest.skip("there is a CUDA device")
    with pytest.raises(WorkbenchError) as caught, open_session(options, Configuration((64,), 1)):
        pass
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        (Configuration((4, 64), 8), "max items 8 is above the smallest budget 4"),
        (Configuration((0, 64), 1), "budget 0 is not positive"),
        (Configuration((-64,), 0), "budget -64 is not positive"),
        (Configuration((64,), -1), "max items -1 is negative"),
        (Configuration((64,), 1, -1), "max frames -1 is negative"),
    ],
)
def test_bad_configuration(ernie: EncoderSession, configuration: Configuration, says: str) -> None:
    with pytest.raises(WorkbenchError, match=says), open_session(SMALL, configuration):
        pass
    manager = ernie.manager
    with pytest.raises(WorkbenchError, match=says):
        ernie.configure(configuration)
    assert ernie.manager is manager


@pytest.mark.parametrize(
    ("grids", "modality", "says"),
    [
        ([(1, 7, 8)], "image", "grid 1 x 7 x 8"),
        ([(2, 8, 8)], "image", "one frame"),
        ([(1, 0, 8)], "image", "positive"),
        ([], "image", "at least one grid"),
        ([(2, 8, 8)], "video", "no video graphs"),
        ([(1, 8, 8)], "audio", "no audio graphs"),
    ],
)
def test_bad_inputs(ernie: EncoderSession, grids: list[Grid], modality: Any, says: str) -> None:
    with pytest.raises(WorkbenchError) as caught:
        ernie.inputs(grids, modality)
    assert says in str(caught.value)


def test_videos_need_a_video_limit() -> None:
    with (
        open_session(SessionOptions(model="glm4_1v", depth=1, width=128), Configuration((64,), 2)) as session,
        pytest.raises(WorkbenchError, match="video limit"),
    ):
        session.inputs([(2, 8, 8)], "video")


def test_not_enough_memory(ernie: EncoderSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "available_bytes", lambda device: 2**20)
    with pytest.raises(WorkbenchError, match=r"depth 32 and width 1280 needs about 1\.4 GiB and cpu has 0\.0 GiB"):
        open_session(SessionOptions(), Configuration((64,), 1)).__enter__()
    with pytest.raises(WorkbenchError, match="capturing 1,024 patches needs"):
        ernie.capture()


def test_d2_glm_under_vllms_own_video_limit_is_refused_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 frames for each of 64 items: 600 times the 256 patches of budget 64."""
    options = SessionOptions(model="glm4_1v", depth=1, width=128, video_limit=None)
    with open_session(options, Configuration()) as session:
        assert session.config_record.max_frames == 600 * 64
        monkeypatch.setattr(engine, "available_bytes", lambda device: 2**28)
        with pytest.raises(WorkbenchError, match="capturing 153,600 patches needs"):
            session.capture()


def test_another_version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.version

    for version in ("0.31.2", "0.34.0", "1.0.0"):
        monkeypatch.setattr(vllm.version, "__version__", version)
        with pytest.raises(WorkbenchError, match=r"is not supported; install vLLM 0\.32\.\* or 0\.33\.\*"):
            open_session(SMALL, Configuration((64,), 1)).__enter__()
    for version in ("0.32.0+cpu", "0.33.1"):
        monkeypatch.setattr(vllm.version, "__version__", version)
        assert engine.require_vllm() == version


def test_no_vllm_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.version", None)
    with pytest.raises(WorkbenchError, match="install the extra"):
        open_session(SMALL, Configuration((64,), 1)).__enter__()


# The check of a machine -------------------------------------------------------------------------------------------


def test_smoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = smoke.Case(
        "ernie45_vl", Configuration((64, 128), 2), (("image", ((1, 8, 8),)), ("image", ((1, 8, 8), (1, 16, 8))))
    )
    monkeypatch.setattr(smoke, "CASES", (case,))
    arguments = ["--depth", "1", "--width", "160", "--repeats", "1"]
    assert smoke.main(arguments) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert report["failures"] == []
    assert [[batch["tokens"] for batch in call["batches"]] for call in report["calls"]] == [[16], [48]]
    monkeypatch.setattr(EncoderSession, "graph", lambda self, inputs: [2 * x for x in self.eager_served(inputs)])
    assert smoke.main(arguments) == 1
    assert "differ by a relative RMS of 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(("field", "value"), [("capture_axes", (("low", "high"),)), ("paths", {"a": 1, "b": 2})])
def test_graphs_that_the_planner_does_not_count_are_refused_by_name(
    glm: EncoderSession, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    """As a model of vLLM's table would be that gets an entry without the planner knowing its protocol."""
    config = dataclasses.replace(glm.model.get_encoder_cudagraph_config(), **{field: value})
    monkeypatch.setattr(glm.model, "get_encoder_cudagraph_config", lambda: config)
    with (
        pytest.raises(WorkbenchError, match=rf"GLM-4.1V .*\({field}\), which the planner does not count"),
        glm.alongside(Configuration((64,), 4)),
    ):
        pass
