"""Model folders without weights: what vLLM and transformers read from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.encoder import checkpoint as module
from workbench.encoder.checkpoint import make_checkpoint
from workbench.errors import WorkbenchError
from workbench.grids import to_grids
from workbench.models import model_facts

pytestmark = pytest.mark.engine
pytest.importorskip("transformers", reason="the engine is not installed")

KEYS = ("ernie45_vl", "glm4_1v")
SIZES = [(224, 224), (640, 480), (30, 900), (1, 1), (57, 4000)]


@pytest.fixture(scope="module", params=[(key, full) for key in KEYS for full in (True, False)], ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One folder of each model and size."""
    key, full = request.param
    return make_checkpoint(model_facts(key), tmp_path_factory.mktemp("models") / f"{key}-{full}", full=full)


def test_it_holds_no_weights_and_says_how_to_load_it(made: Any) -> None:
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"} <= set(made.files)
    assert sum(path.stat().st_size for path in made.folder.iterdir()) < 100_000
    assert made.arguments[:2] == ("--load-format", "dummy")


def test_the_configuration_has_the_encoders_dimensions(made: Any) -> None:
    from transformers import AutoConfig

    facts = model_facts(made.model)
    config = AutoConfig.from_pretrained(made.folder, trust_remote_code=True)
    vision = config.vision_config
    assert config.architectures == [facts.architecture]
    expected = (facts.depth, facts.width, facts.heads) if made.full else (2, 128, 2)
    assert (vision.depth, vision.hidden_size, vision.num_heads) == expected
    assert (vision.patch_size, vision.spatial_merge_size) == (facts.patch, facts.merge)
    if made.full:
        out = config.hidden_size if made.model == "ernie45_vl" else vision.out_hidden_size
        assert out == facts.out_width


def test_the_tokenizer_gives_every_byte_back(made: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    text = "A图\n\x00 <|endoftext|"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer) <= module.VOCABULARY
    content = [{"type": "text", "text": "see"}, {"type": "image"}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert prompt.count("<|image@placeholder|>" if made.model == "ernie45_vl" else "<|image|>") == 1


def test_the_processor_makes_the_grids_that_planning_expects(made: Any) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(made.folder, trust_remote_code=True)
    images = [Image.new("RGB", size, (10, 20, 30)) for size in SIZES]
    text = {"ernie45_vl": "<|image@placeholder|>", "glm4_1v": "<|image|>"}[made.model] * len(images)
    output = processor(text=[text], images=images)
    grids = np.asarray(output["grid_thw" if made.model == "ernie45_vl" else "image_grid_thw"])
    facts = model_facts(made.model)
    expected = to_grids(np.array([(*size, 1) for size in SIZES], np.int32), facts)
    assert grids.tolist() == expected.grids.tolist()
    pixels = np.asarray(output["images" if made.model == "ernie45_vl" else "pixel_values"])
    assert pixels.shape == (int(grids.prod(axis=1).sum()), facts.patch_features)


def test_ernies_patches_are_merge_blocks_in_channel_order() -> None:
    from PIL import Image

    from workbench.encoder.ernie_folder.processing_workbench import WorkbenchErnieImages

    height, width = 56, 84
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows, columns, np.full_like(rows, 7)], axis=-1).astype(np.uint8)
    patches, grid = WorkbenchErnieImages().patches(Image.fromarray(pixels))
    assert grid == [1, 4, 6]
    # The sixth patch is the second of the second 2 x 2 block: row 0, column 3 of the patch grid.
    fifth = patches[5].reshape(3, 14, 14).numpy()
    assert np.array_equal(fifth, pixels[0:14, 42:56].transpose(2, 0, 1))


def test_glm_videos_make_the_grids_that_planning_expects(tmp_path: Path) -> None:
    from transformers import AutoProcessor

    facts = model_facts("glm4_1v")
    folder = make_checkpoint(facts, tmp_path / "glm", full=False).folder
    processor = AutoProcessor.from_pretrained(folder).video_processor
    sizes = [(224, 224, 8), (300, 200, 6), (64, 640, 2)]
    for width, height, frames in sizes:
        video = np.zeros((frames, height, width, 3), np.uint8)
        output = processor([video], do_sample_frames=False, return_tensors="np")
        expected = to_grids(np.array([(width, height, frames)], np.int32), facts).grids
        assert np.asarray(output["video_grid_thw"]).tolist() == expected.tolist()


def test_frames_that_the_processor_samples(tmp_path: Path) -> None:
    made = make_checkpoint(model_facts("glm4_1v"), tmp_path / "glm", full=False, video_fps=30)
    assert json.loads((made.folder / "processor_config.json").read_text())["video_processor"]["fps"] == 30
    for model, fps in (("ernie45_vl", 30), ("glm4_1v", 0)):
        with pytest.raises(WorkbenchError, match=f"{fps} frames a second"):
            make_checkpoint(model_facts(model), tmp_path / "other", full=False, video_fps=fps)
    assert not (tmp_path / "other").exists()


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(WorkbenchError, match="is not empty"):
        make_checkpoint(model_facts("glm4_1v"), tmp_path, full=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises((WorkbenchError, OSError), match="No space left"):
        make_checkpoint(model_facts("ernie45_vl"), tmp_path / "new", full=False)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_recipe(tmp_path: Path) -> None:
    from dataclasses import replace

    with pytest.raises(WorkbenchError, match="no recipe for a folder without weights for Other"):
        make_checkpoint(replace(model_facts("glm4_1v"), key="other", title="Other"), tmp_path / "x")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.commands.checkpoint import checkpoint

    checkpoint("glm4_1v", tmp_path / "x", full=False, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["arguments"] == ["--load-format", "dummy"]
    with pytest.raises(WorkbenchError, match="unknown model"):
        checkpoint("nope", tmp_path / "y")
