"""A model folder without weights: config, byte-level tokenizer, processor. For `--load-format dummy`.

With it the pull requests' own commands (`vllm bench mm-processor`, `vllm serve`) run on any machine, without a
download. The vision tower is the model's (`full`) or two small layers (`tiny`); the language model is always one
small layer, so figures of such a folder are the encoder's, never the model's end-to-end speed, and its answers
mean nothing.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.encoder import bootstrap
from workbench.errors import WorkbenchError
from workbench.files import replacing_folder
from workbench.models import ModelFacts

VOCABULARY = 512  # 256 bytes and the special tokens
_REMOTE_CODE = Path(__file__).parent / "ernie_folder"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was made.

    Attributes:
        folder: where it is.
        model: registry key.
        full: whether the vision tower has the model's real dimensions.
        files: its files' names, sorted.
        arguments: what vLLM needs to load it, for a command line.
    """

    folder: Path
    model: str
    full: bool
    files: tuple[str, ...]
    arguments: tuple[str, ...]


def make_checkpoint(
    facts: ModelFacts, folder: Path, *, full: bool = True, video_fps: int | None = None, overwrite: bool = False
) -> Checkpoint:
    """Write a folder without weights, whole or not at all.

    Args:
        facts: the model; ERNIE-4.5-VL or GLM-4.1V.
        folder: the new folder.
        full: the vision tower's real depth and width, else depth 2, width 128.
        video_fps: frames a second that the processor samples from videos; None is the model's own.
        overwrite: replace what is there.

    Raises:
        WorkbenchError: no recipe for the model, frames of videos for one that takes none here, the folder is occupied
            or not writable, transformers is missing.
    """
    recipes = {"ernie45_vl": _write_ernie, "glm4_1v": _write_glm}
    if facts.key not in recipes:
        raise WorkbenchError(
            f"there is no recipe for a folder without weights for {facts.title}; there are for {', '.join(recipes)}"
        )
    if video_fps is not None and (video_fps < 1 or "video" not in facts.limits):
        raise WorkbenchError(
            f"{video_fps} frames a second for {facts.title}; give 1 or more, and a model that takes videos here"
        )
    bootstrap.prepare()
    try:
        import tokenizers  # noqa: F401  what the recipes need, asked for before anything is written
        import transformers  # noqa: F401
    except ImportError as error:
        raise WorkbenchError(
            f"a model folder needs {error.name}, which comes with an engine; install the extra `cpu` or `gpu`"
        ) from error
    with replacing_folder(folder, overwrite) as temporary:
        try:
            recipes[facts.key](facts, temporary, full, video_fps)
        except Exception as error:
            if not re.search(r"\(os error \d+\)$", str(error)):
                raise
            # The tokenizer's library raises no OSError.
            raise WorkbenchError(f"cannot write {folder}: {error}; choose a folder with room") from error
        files = tuple(sorted(path.name for path in temporary.iterdir()))
    remote = ("--trust-remote-code",) if facts.key == "ernie45_vl" else ()
    return Checkpoint(folder, facts.key, full, files, ("--load-format", "dummy", *remote))


def _tokenizer(special: list[str], template: str, **roles: str) -> Any:
    """Return a byte-level tokenizer without merges: one token a byte, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    others = [token for token in special if token not in roles.values()]
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=others, **roles)
    made.chat_template = template
    return made


def _vision(facts: ModelFacts, full: bool) -> tuple[int, int, int]:
    """Return depth, width and heads."""
    return (facts.depth, facts.width, facts.heads) if full else (2, 128, 2)


# --- GLM-4.1V: every class is in transformers ---------------------------------------------------------------

_GLM_SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<think>", "</think>",
]  # fmt: skip
_GLM_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif part['type'] in ('video', 'video_url') %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}<|assistant|>\n"
)


def _write_glm(facts: ModelFacts, folder: Path, full: bool, video_fps: int | None) -> None:
    from transformers import Glm4vConfig, Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    end = _GLM_SPECIAL[0]
    tokenizer = _tokenizer(_GLM_SPECIAL, _GLM_TEMPLATE, eos_token=end, pad_token=end)
    identity = tokenizer.convert_tokens_to_ids
    depth, width, heads = _vision(facts, full)
    hidden = facts.out_width if full else 256
    text_heads = hidden // 128 if full else 4
    head = hidden // text_heads
    section = [8, 12, 12] if full else [4, 6, 6]  # sums to half of the rotary part of a head
    config = Glm4vConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 1024 if full else 512,
            "num_hidden_layers": 1,
            "num_attention_heads": text_heads,
            "num_key_value_heads": 2,
            "head_dim": head,
            "max_position_embeddings": 65_536,
            "pad_token_id": identity(end),
            "eos_token_id": [identity(end)],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": section,
                "partial_rotary_factor": 0.5,
            },
        },
        vision_config={
            "depth": depth,
            "hidden_size": width,
            "num_heads": heads,
            "out_hidden_size": hidden,
            "intermediate_size": facts.mlp_width if full else 512,
            "patch_size": facts.patch,
            "temporal_patch_size": facts.temporal_patch,
            "spatial_merge_size": facts.merge,
        },
        image_token_id=identity("<|image|>"),
        video_token_id=identity("<|video|>"),
        image_start_token_id=identity("<|begin_of_image|>"),
        image_end_token_id=identity("<|end_of_image|>"),
        video_start_token_id=identity("<|begin_of_video|>"),
        video_end_token_id=identity("<|end_of_video|>"),
    )
    config.architectures = [facts.architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Glm4vProcessor(
        image_processor=Glm4vImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor() if video_fps is None else Glm4vVideoProcessor(fps=video_fps),
        chat_template=_GLM_TEMPLATE,
    ).save_pretrained(folder)


# --- ERNIE-4.5-VL: vLLM reads the fields of the checkpoint's remote code, so this folder carries some ---------

_ERNIE_SPECIAL = [
    "<|begin_of_sentence|>", "<|end_of_sentence|>", "<unk>", "<|IMAGE_PLACEHOLDER|>", "<|image@placeholder|>",
    "<|video@placeholder|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>", "<think>",
    "</think>",
]  # fmt: skip
_ERNIE_TEMPLATE = (
    "<|begin_of_sentence|>{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}Picture:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}Assistant: <think></think>"
)


def _write_ernie(facts: ModelFacts, folder: Path, full: bool, _: int | None) -> None:
    begin, end, unknown = _ERNIE_SPECIAL[:3]
    tokenizer = _tokenizer(_ERNIE_SPECIAL, _ERNIE_TEMPLATE, bos_token=begin, eos_token=end, pad_token=unknown)
    identity = tokenizer.convert_tokens_to_ids
    depth, width, heads = _vision(facts, full)
    hidden, head = (facts.out_width if full else 256), 128
    config = {
        "architectures": [facts.architecture],
        "model_type": "workbench_ernie45_vl",
        "auto_map": {"AutoConfig": "configuration_workbench.WorkbenchErnieConfig"},
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": max(1, hidden // (5 * head)),
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "use_bias": False,
        "tie_word_embeddings": True,
        "use_moe": False,
        "moe_num_experts": [0, 0],
        "moe_k": 2,
        "moe_intermediate_size": [64, 64],
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": [0, 0],
        "moe_layer_end_index": [0, 0],
        "freq_allocation": 20,
        "rope_theta": 500_000.0,
        "rope_scaling": {"type": "default", "mrope_section": [22, 22, 20]},
        "im_patch_id": identity("<|IMAGE_PLACEHOLDER|>"),
        "image_start_token_id": identity("<|IMAGE_START|>"),
        "image_end_token_id": identity("<|IMAGE_END|>"),
        "video_start_token_id": identity("<|VIDEO_START|>"),
        "video_end_token_id": identity("<|VIDEO_END|>"),
        "bos_token_id": identity(begin),
        "eos_token_id": identity(end),
        "pad_token_id": identity(unknown),
        "pixel_hidden_size": width,
        "spatial_conv_size": facts.merge,
        "temporal_conv_size": int(facts.extra["temporal_merge"]),
        "use_temporal_conv": bool(facts.extra["use_temporal_conv"]),
        "vision_config": {
            "depth": depth,
            "embed_dim": width,
            "hidden_size": width,
            "num_heads": heads,
            "mlp_ratio": facts.mlp_width // facts.width,
            "in_channels": 3,
            "patch_size": facts.patch,
            "spatial_merge_size": facts.merge,
        },
    }
    processor = {
        "processor_class": "WorkbenchErnieProcessor",
        "auto_map": {"AutoProcessor": "processing_workbench.WorkbenchErnieProcessor"},
    }
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=1))
    for source in sorted(_REMOTE_CODE.glob("*.py")):
        shutil.copyfile(source, folder / source.name)
