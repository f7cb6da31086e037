"""The registry's breadth: Qwen's encoders against vLLM's own, and the table of all models."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from workbench.budgets import Configuration, Limits, resolve
from workbench.lint import lint
from workbench.models import MODELS, model_facts

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab
    from workbench.encoder.session import EncoderSession

WIDTHS = {"qwen2_5_vl": 160, "qwen3_vl": 144}
CONFIGURATION = Configuration((64, 128), 4, 8)


@pytest.fixture(scope="module", params=sorted(WIDTHS))
def session(request: pytest.FixtureRequest) -> Iterator["EncoderSession"]:
    """A captured encoder of three blocks, windowed and full ones or with two and three deepstack mergers."""
    from workbench.encoder.session import SessionOptions, open_session

    options = SessionOptions(request.param, depth=3, width=WIDTHS[request.param], device="cpu", video_limit=1)
    with open_session(options, CONFIGURATION) as opened:
        opened.capture()
        yield opened


@pytest.mark.engine
@pytest.mark.parametrize(
    ("modality", "grids"),
    [
        ("image", [(1, 16, 16), (1, 8, 8), (1, 2, 2)]),
        ("image", [(1, 10, 18), (1, 6, 30), (1, 18, 10), (1, 4, 4), (1, 16, 16)]),  # windows that are not whole
        ("video", [(2, 8, 8), (3, 4, 4)]),
        ("video", [(8, 2, 2)]),
    ],
)
def test_replays_equal_eager(session: "EncoderSession", modality: Any, grids: list[tuple[int, int, int]]) -> None:
    import torch

    inputs = session.inputs(grids, modality)
    with session.watch() as batches:
        graph = session.graph(inputs)
    served = session.eager_served(inputs)
    for output, expected, tokens in zip(graph, served, inputs.tokens, strict=True):
        assert output.shape == (tokens, session.facts.out_width)
        assert float(expected.float().std()) > 0.01
        torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    assert all(batch.budget is not None for batch in batches)
    fallback = session.eager_fallback(inputs)
    assert all(torch.equal(a, b) for a, b in zip(fallback, served, strict=True))


def scenarios_of(lab: "Lab") -> tuple[set[tuple[str, str]], set[tuple[str | None, str]]]:
    """Run the scenarios that matter to windows and frames; return what is bad, and the findings."""
    from workbench.encoder.parity.matrix import run_matrix

    chosen = ("fills", "max-items", "company", "aspect", "mixed", "poisoned-buffers", "video", "video-frames-over")
    matrix = run_matrix(lab, (*chosen, "image-beside-video"))
    bad = {(cell.scenario, str(cell.status)) for cell in matrix.cells if cell.status in ("error", "mismatch", "hazard")}
    return bad, {(finding.defect, finding.suspect) for finding in matrix.findings}


@pytest.mark.engine
@pytest.mark.parametrize("model", sorted(WIDTHS))
def test_parity_finds_d6_in_qwen3_and_not_in_qwen2_5(model: str) -> None:
    from workbench.encoder.parity.lab import lab_options, open_lab

    options, _ = lab_options(model, "cpu")
    with open_lab(options, Configuration((16, 64), 4)) as lab:
        bad, findings = scenarios_of(lab)
    if model == "qwen3_vl":
        assert bad == {("video-frames-over", "error"), ("image-beside-video", "hazard")}
        assert findings == {("D4", "cu_seqlens"), ("D6", "cu_seqlens")}
    else:
        assert bad == {("video-frames-over", "error")}
        assert findings == {("D4", "cu_seqlens")}


@pytest.mark.engine
def test_resize_is_that_of_transformers() -> None:
    """Qwen's images, Qwen2.5-VL's frames and Qwen3-VL's videos, at limits and beyond."""
    pytest.importorskip("vllm")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as plain
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as framed

    from workbench.grids import resize

    generator = np.random.default_rng(3)
    sides = np.exp(generator.uniform(np.log(40), np.log(9000), (3000, 2))).astype(np.int32)
    for key in sorted(WIDTHS):
        facts = model_facts(key)
        factor = facts.patch * facts.merge
        for modality, limits in facts.limits.items():
            frames = generator.integers(2, 400, 3000) if modality == "video" else np.ones(3000, np.int32)
            sizes = np.column_stack([sides, frames]).astype(np.int32)
            made = resize(sizes, modality, facts)
            for row, (width, height, count) in enumerate(sizes.tolist()):
                bounds = {"factor": factor, "min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels}
                try:
                    if limits.counts_frames:
                        expected = framed(num_frames=count, height=height, width=width, temporal_factor=2, **bounds)
                    else:
                        expected = plain(height, width, **bounds)
                except ValueError:
                    assert made.refused[row] or made.failed[row]
                    continue
                assert (int(made.height[row]), int(made.width[row])) == expected, (key, modality, width, height, count)


@pytest.mark.parametrize(
    ("key", "limit", "frames"), [("qwen2_5_vl", 1, 14), ("qwen2_5_vl", 999, 1), ("glm4_1v", 999, 600)]
)
def test_frames_are_shared_by_the_videos_of_a_prompt(key: str, limit: int, frames: int) -> None:
    resolved = resolve(Configuration((64,), 2), Limits.of(model_facts(key), video_limit=limit))
    assert resolved.max_frames == 2 * frames


def test_the_linter_knows_who_zeroes_the_tail() -> None:
    def rules(key: str) -> set[str]:
        return {finding.rule for finding in lint(model_facts(key), Configuration((64,), 4, 32)).findings}

    assert "zeroed-sequence-tail" in rules("qwen3_vl")
    assert "zeroed-sequence-tail" not in rules("qwen2_5_vl")


@pytest.mark.parametrize("key", sorted(MODELS))
def test_every_model_has_shapes_and_is_refused_no_budget(key: str) -> None:
    facts = model_facts(key)
    report = lint(facts, Configuration((64, 130), 4), Limits.of(facts, video_limit=0))
    assert len(report.captures) == 2
    assert report.captures[0].capacity == 64


@pytest.mark.engine
def test_the_table_of_models_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the walk over vLLM's models: every one with encoder graphs has a row."""
    pytest.importorskip("vllm")
    path = Path(__file__).parents[1] / "scripts" / "models.py"
    spec = importlib.util.spec_from_file_location("scripts_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert module.main(["--check"]) == 0, capsys.readouterr().err
    page = module.PAGE.read_text()
    for facts in MODELS.values():
        assert f"| `{facts.architecture}` | itself | yes | yes | yes |  |" in page
    assert page.count("| no | no | no |") >= 20


@pytest.mark.engine
def test_a_model_that_does_not_import_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    from workbench.encoder import coverage

    architecture = "Qwen2_5_VLForConditionalGeneration"
    known = {name: ModelRegistry.models[name] for name in (architecture, "LlamaForCausalLM")}
    monkeypatch.setattr(ModelRegistry, "models", known)

    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> object:
        if name.startswith("vllm.model_executor.models."):
            raise RuntimeError(f"{name} needs a GPU")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    (row,) = coverage.coverage()
    assert (row.model_class, row.built, row.planned, row.linted) == (architecture, False, False, False)
    assert row.reason == "its module does not import here (RuntimeError)"
