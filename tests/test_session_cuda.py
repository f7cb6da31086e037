"""The encoder session on a GPU: real CUDA graphs, real streams, real memory."""

import gc
from typing import Any

import pytest

from workbench.budgets import Configuration
from workbench.errors import WorkbenchError
from workbench.run import ARMS

pytestmark = [pytest.mark.engine, pytest.mark.cuda]

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.encoder.session import SessionOptions, open_session  # noqa: E402 - needs an engine
from workbench.encoder.smoke import LEFT_BYTES, LIMIT  # noqa: E402

CONFIGURATION = Configuration((64, 256), 4)
MODELS = [SessionOptions(depth=4), SessionOptions(model="glm4_1v", depth=4)]


@pytest.mark.parametrize("options", MODELS, ids=lambda options: options.model)
def test_graphs_equal_eager(options: SessionOptions) -> None:
    with open_session(options, CONFIGURATION) as session:
        assert session.replay == "cuda_graph"
        costs = session.capture()
        assert [cost.budget for cost in costs] == [256, 64]
        for cost in costs:
            assert cost.pool_bytes is not None
            assert cost.nodes is None or cost.nodes > 50
        assert len({cost.nodes for cost in costs}) == 1
        for grids in ([(1, 16, 16)], [(1, 24, 40)], [(1, 8, 8), (1, 16, 18), (1, 4, 4)]):
            inputs = session.inputs(grids)
            assert inputs.pixels.is_cuda
            assert not inputs.grid.is_cuda
            outputs = {arm: session.run(arm, inputs) for arm in ARMS}
            for arm in ARMS:
                for got, expected in zip(outputs[arm], outputs["eager_served"], strict=True):
                    assert (got.float() - expected.float()).norm() <= LIMIT * expected.float().norm()


def test_seeds_give_the_same_values_on_every_device() -> None:
    options = SessionOptions(depth=1, width=160)
    with open_session(options, CONFIGURATION) as session:
        # The CPU's, from tests/test_session.py's machine-independent generator.
        assert (
            session.inputs([(1, 2, 2)])
            .pixels.cpu()
            .equal(torch.randn(4, 588, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
        )


def test_a_session_gives_back_stream_device_and_memory() -> None:
    stream, device = torch.cuda.current_stream(), torch.cuda.current_device()
    left: list[int] = []
    for options in [*MODELS, *MODELS]:
        with open_session(options, CONFIGURATION) as session:
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
            session.capture()
            session.graph(session.inputs([(1, 16, 16)]))
        gc.collect()
        left.append(torch.cuda.memory_allocated())
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == device
    assert max(left) < LEFT_BYTES
    assert left[3] == left[1]


def test_no_room_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(SessionOptions(depth=1), CONFIGURATION) as session:
        monkeypatch.setattr(session, "_capture_bytes", lambda: (0, 0))

        def full(*_: Any, **__: Any) -> None:
            raise torch.cuda.OutOfMemoryError("planted")

        monkeypatch.setattr(session.model, "encoder_cudagraph_forward", full)
        with pytest.raises(WorkbenchError, match="does not fit into cuda"):
            session.capture()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (SessionOptions(device="cpu"), "not built for the CPU"),
        (SessionOptions(device="cuda:99"), "does not exist"),
        (SessionOptions(attention_backend="NOPE"), "FLASH_ATTN"),
    ],
)
def test_bad_options(options: SessionOptions, says: str) -> None:
    with pytest.raises(WorkbenchError, match=says), open_session(options, CONFIGURATION):
        pass
