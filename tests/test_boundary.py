"""The boundary probe: host syncs found without CUDA at their lines, and nothing where there is none."""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from workbench.budgets import Configuration
from workbench.cli import app
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")

from workbench.capturable import BoundaryReport  # noqa: E402 - needs an engine
from workbench.encoder import engine  # noqa: E402
from workbench.encoder.session import EncoderSession, SessionOptions, open_session  # noqa: E402

engine.require_vllm()

from workbench.encoder.boundary import host_syncs, obstacle_of, package_path, probe  # noqa: E402 - needs vLLM
from workbench.encoder.candidates import (  # noqa: E402
    SHIPPED,
    WITH_METADATA,
    WITH_POSITIONS,
    WITHOUT_TEMPORAL,
    as_captured,
)
from workbench.encoder.variants import names_for  # noqa: E402
from workbench.models import MODELS, Modality, small_size  # noqa: E402


@pytest.fixture(scope="module")
def session() -> Iterator[EncoderSession]:
    with open_session(SessionOptions(depth=2, width=160), Configuration((64,), 4)) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(session: EncoderSession) -> BoundaryReport:
    return probe(session, [(1, 8, 8), (1, 4, 6)])


def line_of(text: str, model: str = "ernie45_vl") -> str:
    """Place of the one line of vLLM's file of a model that holds `text`."""
    file = import_module(f"vllm.model_executor.models.{model}").__file__
    assert file is not None
    (number,) = [number for number, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line]
    return f"vllm/model_executor/models/{model}.py:{number}"


@pytest.mark.parametrize("left", [{}, {"max_seqlen": None}])
def test_the_longest_sequence_that_a_replay_leaves_out_is_given(
    session: EncoderSession, monkeypatch: pytest.MonkeyPatch, left: dict[str, None]
) -> None:
    """A CUDA graph has it baked in; a region that is run anew has not."""
    replay = SimpleNamespace(values=left)
    monkeypatch.setattr(session.model, "prepare_encoder_cudagraph_replay_buffers", lambda *_: replay)
    candidate = as_captured(session.model, session.inputs([(1, 8, 8), (1, 4, 6)]), "", "")
    assert candidate.prepare() == {"max_seqlen": torch.tensor(64, dtype=torch.int32)}
    replay.values = {"max_seqlen": torch.tensor(7)}
    assert candidate.prepare() == replay.values


def test_the_host_read_of_the_resampler_is_found_at_its_line(report: BoundaryReport) -> None:
    shipped = next(b for b in report.boundaries if b.name == SHIPPED)
    assert not shipped.clean
    reads = [sync for sync in shipped.syncs if not sync.host_copy]
    assert [(sync.call, sync.place) for sync in reads] == [("Tensor.cpu", line_of("grid_thw.cpu().numpy()"))]
    assert reads[0].source == "grid_thw_cpu = grid_thw.cpu().numpy()"
    assert reads[0].frames[0].endswith("fwd_placeholder")
    copies = [sync.place for sync in shipped.syncs if sync.host_copy]
    assert copies == [line_of(" slice_offsets = async_tensor_h2d("), line_of(" slice_offsets2 = async_tensor_h2d(")]


def test_everything_else_is_clean(report: BoundaryReport) -> None:
    others = {b.name: b for b in report.boundaries if b.name != SHIPPED}
    assert {"vit", WITHOUT_TEMPORAL, "resampler", "fused"} <= set(others)
    assert all(b.clean and b.captured is None and b.inside_us is None for b in others.values())
    assert report.replay == "static_replay"


@pytest.mark.parametrize(
    ("grids", "modality"),
    [([(1, 8, 8), (1, 4, 6)], "image"), ([(3, 4, 4), (1, 4, 6)], "video")],
    ids=["image", "video"],
)
def test_what_glm_computes_before_a_replay_is_what_keeps_it_outside(
    glm: EncoderSession, grids: list[tuple[int, int, int]], modality: Modality
) -> None:
    found = {one.name: one for one in probe(glm, grids, modality=modality).boundaries}
    variants = names_for("glm4_1v")
    assert list(found) == ["vit", WITH_POSITIONS, WITH_METADATA, *variants, "+".join(variants)]
    assert {name for name, one in found.items() if not one.clean} == {WITH_POSITIONS, WITH_METADATA}
    copies = [sync.place for sync in found[WITH_POSITIONS].syncs]
    interpolation = [line_of(f" {name} = async_tensor_h2d(", "glm4_1v") for name in ("target_h", "target_w")]
    assert copies[2:] == interpolation
    assert all(sync.host_copy for sync in found[WITH_POSITIONS].syncs)
    reads = [sync for sync in found[WITH_METADATA].syncs if not sync.host_copy]
    assert [(sync.call, sync.source) for sync in reads] == [("Tensor.tolist", "grid_thw = grid_thw.tolist()")]
    assert reads[0].frames[0].endswith(" forward")


@pytest.mark.parametrize("key", MODELS)
def test_what_vllm_captures_of_every_model_is_clean(key: str) -> None:
    depth, width = small_size(MODELS[key])
    options = SessionOptions(model=key, depth=depth, width=width, device="cpu")
    with open_session(options, Configuration((64,), 1)) as session:
        found = probe(session, [(1, 8, 8)], variants=()).boundaries
    assert found[0].name == "vit"
    assert found[0].clean


def test_the_report_survives_its_json(report: BoundaryReport) -> None:
    text = msgspec.json.encode(report)
    assert msgspec.json.decode(text, type=BoundaryReport) == report
    assert b"/home" not in text
    assert b"/work" not in text


def test_the_probe_leaves_the_encoder_as_it_was(session: EncoderSession, report: BoundaryReport) -> None:
    assert session.model.resampler_model.use_temporal_conv is True
    inputs = session.inputs([(1, 8, 8)])
    output = session.eager_served(inputs)[0]
    assert type(output) is torch.Tensor


PLANTED: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: (x + 1).tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "__int__": lambda x: int(x.sum()),
    "__float__": lambda x: float(x.sum()),
    "__bool__": lambda x: "yes" if (x > 0).all() else "no",
    "__index__": lambda x: [1, 2, 3][x.long().sum()],
    "nonzero": lambda x: torch.nonzero(x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "__getitem__": lambda x: x[x > 0],
    "to": lambda x: x.to("cpu"),
    "split": lambda x: len([part.item() for part in x.split(1)]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_reads_are_found(name: str) -> None:
    syncs = host_syncs(lambda values: PLANTED[name](values["x"]), {"x": torch.zeros(2)})
    assert syncs
    assert syncs[0].call == f"Tensor.{'item' if name == 'split' else name}"
    assert "lambda x:" in syncs[0].source
    assert syncs[0].count == (2 if name == "split" else 1)


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: x[x.shape[0] - 1 :].to(torch.int32) + len(x),
        lambda x: x.to(x.device),
        lambda x: torch.repeat_interleave(x, 2),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.tensor(3).item() + x,  # on the host already
        lambda x: [part + 1 for part in x],
    ],
)
def test_what_reads_nothing_is_clean(harmless: Callable[[Any], Any]) -> None:
    assert host_syncs(lambda values: harmless(values["x"]), {"x": torch.zeros(2)}) == []


def test_a_value_that_vllm_keeps_on_the_host_may_be_read() -> None:
    values = {"max_seqlen": torch.tensor(3), "x": torch.zeros(2)}
    assert host_syncs(lambda v: v["max_seqlen"].item() + v["x"], values) == []


def test_the_innermost_line_outside_torch_is_the_obstacle() -> None:
    try:
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(2, 2))
    except RuntimeError as error:
        obstacle = obstacle_of(error)
    assert obstacle.error == "RuntimeError"
    assert obstacle.place.startswith("test_boundary.py:")
    assert "functional.linear" in obstacle.source


def test_paths_say_nothing_about_the_machine() -> None:
    assert package_path("/a/lib/python3/site-packages/vllm/x/y.py") == "vllm/x/y.py"
    assert package_path("/a/workbench/encoder/z.py") == "workbench/encoder/z.py"
    assert package_path("/a/b/script.py") == "script.py"


# The command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_places_and_json() -> None:
    small = ["boundary", "--call", "56x56", "--device", "cpu", "--depth", "1"]
    done = CliRunner().invoke(app, [*small, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [b["name"] for b in found["boundaries"]][:2] == ["vit", SHIPPED]
    done = CliRunner().invoke(app, [*small, "--variants", "resampler"])
    assert done.exit_code == 0, done.output
    assert "grid_thw.cpu().numpy()" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--call", "224"], "is no item"),
        (["--call", "0x5"], "sizes are at least 1"),
        (["--call", "224x224,"], "is no item"),
        (["--call", "56x56,1000001x5"], "item 1 of 56x56,1000001x5 has width 1e+06, above the limit of 1,000,000"),
        (["--call", "1x1000"], "does not take a size"),
        (["--call", "56x56x4", "--device", "cpu"], "ERNIE-4.5-VL"),
        (["--model", "glm4_1v", "--call", "56x56,56x56x4"], "images and videos are calls of their own"),
        (["--model", "nonsense"], "unknown model"),
        (["--depth", "0", "--device", "cpu"], "depth 0 is not between 1 and 32"),
        (["--call", "56x56", "--variants", "rotary", "--device", "cpu"], "names no variant"),
        (["--repeats", "0"], "give at least 1"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["boundary", *arguments])
    assert isinstance(done.exception, WorkbenchError), done.output
    assert words in str(done.exception)
