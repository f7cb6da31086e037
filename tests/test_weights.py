"""Weights of the encoders: dummy values that show faults, and checkpoints read through vLLM's own loading."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from workbench.budgets import Configuration, Limits
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")
safetensors = pytest.importorskip("safetensors", reason="needs an engine")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs an engine")

from workbench.encoder import engine  # noqa: E402 - needs an engine
from workbench.encoder.session import EncoderSession, SessionOptions, open_session  # noqa: E402

ERNIE = SessionOptions(depth=2, width=160)
GLM = SessionOptions(model="glm4_1v", depth=2, width=256)
CONFIGURATION = Configuration((64,), 1)
SEED = 11
Tensors = dict[str, Any]


@cache
def encoder_tensors(options: SessionOptions) -> Tensors:
    """The parameters of a dummy encoder under vLLM's names, before kernels repack them."""
    engine.require_vllm()
    from workbench.encoder import registry, weights

    facts = registry.reduced_facts(options.model, options.depth, options.width)
    limits = Limits(4096, 4096, video_limit=0)
    device, dtype = torch.device("cpu"), torch.bfloat16
    with engine.surroundings(limits, device, dtype, None):
        with engine.building(device, dtype):
            model = registry.builder(options.model).build(facts)
        weights.fill_dummy(model, SEED)
        assert sum(p.numel() for p in model.parameters()) == registry.builder(options.model).parameters(facts)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("key", "width"), [("qwen2_5_vl", 160), ("qwen3_vl", 144)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_parameters_are_counted_before_anything_is_built(key: str, width: int, depth: int) -> None:
    tensors = encoder_tensors(SessionOptions(model=key, depth=depth, width=width))
    norms = [tensor for name, tensor in tensors.items() if name.endswith(("norm.weight", "ln_q.weight"))]
    assert norms
    assert all(bool((tensor == 1).all()) for tensor in norms)  # a norm of zeros would hide everything before it


def ernie_hub_names(tensors: Tensors) -> Tensors:
    """As in the published ERNIE-4.5-VL folders: the resampler lies under the language model, in `Sequential`s."""
    hub: Tensors = {}
    for name, tensor in tensors.items():
        found = re.match(r"resampler_model\.(spatial|temporal)_(linear1|linear2|norm)\.(.*)", name)
        if found:
            place = {"linear1": 0, "linear2": 2, "norm": 3}[found[2]]
            hub[f"model.resampler_model.{found[1]}_linear.{place}.{found[3]}"] = tensor
        else:
            hub[f"model.{name}" if name.startswith("resampler_model.") else name] = tensor
    return hub


def glm_hub_names(tensors: Tensors) -> Tensors:
    """As in the published GLM-4.1V folders: gate and up projections apart."""
    hub: Tensors = {}
    for name, tensor in tensors.items():
        if ".gate_up_proj." in name:
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                hub[f"model.{name.replace('gate_up_proj', part)}"] = half.contiguous()
        else:
            hub[f"model.{name}"] = tensor
    return hub


ERNIE_LANGUAGE = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")
GLM_LANGUAGE = ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.down_proj.weight")
CASES = [(ERNIE, ernie_hub_names, ERNIE_LANGUAGE), (GLM, glm_hub_names, GLM_LANGUAGE)]


def write_folder(folder: Path, encoder: Tensors, language: tuple[str, ...]) -> Path:
    """Write three shards and their index: encoder, encoder and language mixed, language only (not on disk)."""
    folder.mkdir(exist_ok=True)
    names = sorted(encoder)
    half = len(names) // 2
    shards: list[Tensors] = [
        {name: encoder[name] for name in names[:half]},
        {name: encoder[name] for name in names[half:]} | {language[0]: torch.ones(8, 8)},
        dict.fromkeys(language[1:], torch.ones(8, 8)),
    ]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00003.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        if number < 3:
            safetensors_torch.save_file(shard, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(params=CASES, ids=["ernie", "glm"])
def case(request: pytest.FixtureRequest) -> tuple[SessionOptions, Tensors, tuple[str, ...]]:
    options, rename, language = request.param
    return options, rename(encoder_tensors(options)), language


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all tensors that anything reads from a safetensors file."""
    from workbench.encoder import weights

    names: list[str] = []

    class Recording:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.real: Any = safetensors.safe_open(*args, **kwargs)

        def __enter__(self) -> "Recording":
            self.file = self.real.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.real.__exit__(*args)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Any:
            names.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(weights, "safe_open", Recording)
    return names


def opened(options: SessionOptions, folder: Path, **changes: Any) -> Any:
    return open_session(replace(options, checkpoint=folder, **changes), CONFIGURATION)


def test_a_sharded_checkpoint_loads_and_language_stays_unread(
    case: tuple[SessionOptions, Tensors, tuple[str, ...]], tmp_path: Path, read_names: list[str]
) -> None:
    options, tensors, language = case
    folder = write_folder(tmp_path, tensors, language)
    with opened(options, folder) as loaded:
        assert sorted(read_names) == sorted(tensors)
        assert loaded.model_record.weights == "checkpoint"
        record = loaded.model_record.weights_fingerprint
        outputs = loaded.eager_served(loaded.inputs([(1, 8, 8)]))
    with open_session(replace(options, seed=SEED), CONFIGURATION) as dummy:
        assert dummy.model_record.weights_fingerprint == record
        assert torch.equal(dummy.eager_served(dummy.inputs([(1, 8, 8)]))[0], outputs[0])


def test_one_file_without_an_index(case: tuple[SessionOptions, Tensors, tuple[str, ...]], tmp_path: Path) -> None:
    options, tensors, language = case
    safetensors_torch.save_file(tensors | {language[0]: torch.ones(2)}, tmp_path / "model.safetensors")
    with opened(options, tmp_path) as session:
        first = session.model_record.weights_fingerprint
    with opened(options, write_folder(tmp_path / "sharded", tensors, language)) as session:
        assert session.model_record.weights_fingerprint == first


def test_fewer_blocks_of_a_checkpoint(
    case: tuple[SessionOptions, Tensors, tuple[str, ...]], tmp_path: Path, read_names: list[str]
) -> None:
    options, tensors, language = case
    folder = write_folder(tmp_path, tensors, language)
    with opened(options, folder, depth=1) as session:
        assert session.model_record.depth == 1
    assert not any(".blocks.1." in name for name in read_names)
    assert any(".blocks.0." in name for name in read_names)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("case", "damage", "says"),
    [
        (CASES[0], without("blocks"), "lacks 24 of the encoder's tensors, such as vision_model.blocks.0"),
        (CASES[0], without("resampler"), "such as resampler_model"),
        (CASES[0], without("attn.qkv.bias"), "lacks 2 of"),
        (
            CASES[1],
            without("mlp.up_proj"),
            "lacks 2 of the encoder's tensors, such as visual.blocks.0.mlp.gate_up_proj",
        ),
        (CASES[1], without("visual"), "has no vision tensors"),
        (CASES[0], lambda tensors: {}, "has no vision tensors"),
        (CASES[0], lambda tensors: tensors | {"vision_model.extra.weight": torch.ones(2)}, "does not fit"),
        (CASES[0], lambda tensors: tensors | {"vision_model.ln.weight": torch.ones(3)}, "does not fit"),
        (CASES[1], lambda tensors: tensors | {"model.visual.downsample.bias": torch.ones(3)}, "does not fit"),
    ],
)
def test_a_checkpoint_that_does_not_fit(case: Any, damage: Any, says: str, tmp_path: Path) -> None:
    options, rename, language = case
    folder = write_folder(tmp_path, damage(rename(encoder_tensors(options))), language)
    with pytest.raises(WorkbenchError) as caught, opened(options, folder):
        pass
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(WorkbenchError) as caught, opened(ERNIE, folder):
            pass
        return str(caught.value)

    assert "is not a folder" in refused(tmp_path / "missing")
    assert "has no safetensors files" in refused(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{nonsense")
    assert "is not a safetensors file" in refused(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert "give the file that the workbench wrote, or correct it" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"vision_model.ln.weight": "../../secret"}}))
    assert "points outside its folder" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"vision_model.ln.weight": "gone.safetensors"}}))
    assert "does not fit" in refused(tmp_path)
    index.write_text(json.dumps({"weight_map": {"vision_model.ln.weight": "model.safetensors"}}))
    assert "does not fit" in refused(tmp_path)


# Dummy weights ----------------------------------------------------------------------------------------------------

GRIDS = [(1, 8, 20), (1, 20, 12)]  # a square one would hide a transposed grid


def outputs(session: EncoderSession) -> Any:
    return torch.cat(session.eager_served(session.inputs(GRIDS))).float()


def relative_rms(got: Any, expected: Any) -> float:
    return float((got - expected).norm() / expected.norm())


def transposed(rot_pos_emb: Any) -> Any:
    """A rotary embedding that takes height for width."""

    def wrong(grid: Any) -> Any:
        return rot_pos_emb([[t, w, h] for t, h, w in grid] if isinstance(grid, list) else grid[:, [0, 2, 1]])

    return wrong


@pytest.mark.parametrize(("model", "part", "width"), [("ernie45_vl", "vision_model", 160), ("glm4_1v", "visual", 256)])
def test_dummy_weights_show_faults(model: str, part: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed attention and a wrong rotary embedding both move the output by over 20 times bf16's rounding."""
    with open_session(SessionOptions(model=model, depth=2, width=width, dtype="float32"), CONFIGURATION) as session:
        exact = outputs(session)
    with open_session(SessionOptions(model=model, depth=2, width=width), CONFIGURATION) as session:
        right = outputs(session)
        tower = getattr(session.model, part)
        with monkeypatch.context() as patch:
            patch.setattr(tower, "rot_pos_emb", transposed(tower.rot_pos_emb))
            wrong_rotary = outputs(session)
        for block in tower.blocks:
            monkeypatch.setattr(block.attn.attn, "forward", lambda query, **_: torch.zeros_like(query))
        no_attention = outputs(session)
    rounding = relative_rms(right, exact)
    assert 0 < rounding < 0.02
    assert relative_rms(wrong_rotary, right) > 20 * rounding
    assert relative_rms(no_attention, right) > 20 * rounding
