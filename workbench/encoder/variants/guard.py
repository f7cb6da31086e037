"""Which methods of vLLM a variant stands on, and whether they still are what it was written for.

A variant replaces some methods and relies on how the manager calls them. If any of these reads differently, its
output could be wrong without a sign, so it refuses to attach. After a look at the new source, `source_hash` gives the
new entry.
"""

import hashlib
import inspect
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from workbench.errors import WorkbenchError

_FILE = "vllm.model_executor.models.ernie45_vl"
_ERNIE = f"{_FILE}:Ernie4_5_VLMoeForConditionalGeneration"
_TOWER = f"{_FILE}:Ernie4_5_VisionTransformer"
_GLM_FILE = "vllm.model_executor.models.glm4_1v"
_GLM = f"{_GLM_FILE}:Glm4vForConditionalGeneration"
_MANAGER = "vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager"
VERSIONS = "0.32.0 and 0.33.0"

# What the manager does around the methods below; every variant relies on it.
MANAGER = tuple(f"{_MANAGER}.{name}" for name in ("_execute_local", "_run_budget_graph", "_capture_budget_graph"))
REPLAY = (
    f"{_ERNIE}.prepare_encoder_cudagraph_replay_buffers",
    f"{_TOWER}.prepare_encoder_metadata",
)
GRIDS = (
    f"{_ERNIE}.get_encoder_cudagraph_item_specs",
    f"{_ERNIE}.select_encoder_cudagraph_items",
)
CONFIG = (f"{_ERNIE}.get_encoder_cudagraph_config", f"{_MANAGER}._copy_padded_buffer")
EAGER = (f"{_ERNIE}.encoder_eager_forward", f"{_ERNIE}.postprocess_encoder_output")
CAPTURE = (
    f"{_ERNIE}.prepare_encoder_cudagraph_capture_inputs",
    f"{_ERNIE}.encoder_cudagraph_forward",
    f"{_ERNIE}._process_image_input",
    f"{_ERNIE}._process_video_input",
    f"{_FILE}:VariableResolutionResamplerModel.forward",
)
TOWER = (
    f"{_ERNIE}.encoder_cudagraph_forward",
    f"{_TOWER}.forward",
    f"{_TOWER}.rot_pos_emb",
    f"{_TOWER}.compute_attn_mask_seqlen",
)
BLOCKS = (
    f"{_FILE}:Ernie4_5_VisionBlock.forward",
    f"{_FILE}:Ernie4_5_VisionAttention.forward",
    f"{_FILE}:Ernie4_5_VisionMLP.forward",
    "vllm.v1.attention.ops.vit_attn_wrappers:flash_attn_maxseqlen_wrapper",
)
GLM = (
    f"{_GLM}.get_encoder_cudagraph_config",
    f"{_GLM}.prepare_encoder_cudagraph_capture_inputs",
    f"{_GLM}.prepare_encoder_cudagraph_replay_buffers",
)
GLM_POSITIONS = (
    f"{_GLM}.prepare_encoder_cudagraph_replay_buffers",
    f"{_GLM_FILE}:Glm4vVisionTransformer.prepare_encoder_metadata",
    f"{_GLM_FILE}:Glm4vVisionTransformer.pos_embeds_interpolate",
    f"{_GLM_FILE}:Glm4vVisionTransformer.rot_pos_emb",
    f"{_GLM_FILE}:Glm4vVisionEmbeddings.forward",
)

# SHA-256, first 12 digits, of the source in vLLM 0.32.0 and 0.33.0, which are alike.
HASHES: dict[str, str] = {
    f"{_ERNIE}._process_image_input": "e61a82bd4e0d",
    f"{_ERNIE}._process_video_input": "813431bfe07d",
    f"{_ERNIE}.encoder_cudagraph_forward": "60579d1161cc",
    f"{_ERNIE}.encoder_eager_forward": "78173ff26a66",
    f"{_ERNIE}.get_encoder_cudagraph_config": "51e95e6d1720",
    f"{_ERNIE}.get_encoder_cudagraph_item_specs": "a863761c57ec",
    f"{_ERNIE}.postprocess_encoder_output": "3bee1b71381b",
    f"{_ERNIE}.prepare_encoder_cudagraph_capture_inputs": "b41dc19b0a94",
    f"{_ERNIE}.prepare_encoder_cudagraph_replay_buffers": "486c7dda88a6",
    f"{_ERNIE}.select_encoder_cudagraph_items": "9d81dbe03ccd",
    f"{_FILE}:Ernie4_5_VisionAttention.forward": "a7b011a4561c",
    f"{_FILE}:Ernie4_5_VisionBlock.forward": "8df4964a2df1",
    f"{_FILE}:Ernie4_5_VisionMLP.forward": "0c200cd4d9ad",
    f"{_TOWER}.compute_attn_mask_seqlen": "1adb1563c5b5",
    f"{_TOWER}.forward": "349a1a11b7bd",
    f"{_TOWER}.prepare_encoder_metadata": "b1d4616d0c4c",
    f"{_TOWER}.rot_pos_emb": "bf7880a8dace",
    f"{_FILE}:VariableResolutionResamplerModel.forward": "04931fb739c3",
    f"{_GLM}.get_encoder_cudagraph_config": "a97bf439ff73",
    f"{_GLM}.prepare_encoder_cudagraph_capture_inputs": "9ab2f751d78d",
    f"{_GLM}.prepare_encoder_cudagraph_replay_buffers": "3da5e7d8d60e",
    f"{_GLM_FILE}:Glm4vVisionTransformer.prepare_encoder_metadata": "b7c466b5e167",
    f"{_GLM_FILE}:Glm4vVisionTransformer.pos_embeds_interpolate": "f0fa02f9f96b",
    f"{_GLM_FILE}:Glm4vVisionTransformer.rot_pos_emb": "5c4db9b81e2d",
    f"{_GLM_FILE}:Glm4vVisionEmbeddings.forward": "6d2899f98ed9",
    "vllm.v1.attention.ops.vit_attn_wrappers:flash_attn_maxseqlen_wrapper": "978f77b843cd",
    f"{_MANAGER}._capture_budget_graph": "1b5a2b1d0ecf",
    f"{_MANAGER}._copy_padded_buffer": "b73c03e4a368",
    f"{_MANAGER}._execute_local": "4de97a666454",
    f"{_MANAGER}._run_budget_graph": "58068cb8ba5b",
}


@cache
def source_hash(name: str) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of the source of `module:Class.method`.

    Raises:
        WorkbenchError: there is no such thing in this vLLM, or its source cannot be read.
    """
    module, _, path = name.partition(":")
    try:
        thing = import_module(module)
        for part in path.split("."):
            thing = getattr(thing, part)
        source = inspect.getsource(inspect.unwrap(thing))  # type: ignore[arg-type]
    except (ImportError, AttributeError, OSError, TypeError):
        raise WorkbenchError(
            f"this vLLM has no readable {path} in {module}; variants work with vLLM {VERSIONS}"
        ) from None
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()[:12]


def require_sources(variant: str, names: Sequence[str]) -> None:
    """Refuse a vLLM whose methods are not those that `variant` was written for.

    Raises:
        WorkbenchError: names the methods that differ.
    """
    changed = [name.partition(":")[2] for name in names if source_hash(name) != HASHES.get(name)]
    if changed:
        version = getattr(sys.modules.get("vllm"), "__version__", "here")
        raise WorkbenchError(
            f"variant {variant} was written for vLLM {VERSIONS}; in vLLM {version} these differ: {', '.join(changed)}. "
            "Install one of those, or leave the variant out"
        )
