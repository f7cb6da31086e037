"""Variant `cu_seqlens_tail`, for GLM-4.1V: unused entries of `cu_seqlens` repeat the last offset (D6).

Import this module only after `engine.require_vllm`.
"""

from typing import TYPE_CHECKING, Any

from workbench.encoder.variants.padding import repeat_last

if TYPE_CHECKING:
    from vllm.model_executor.models.glm4_1v import Glm4vForConditionalGeneration as Model
else:
    Model = object


class CuSeqlensTail(Model):  # type: ignore[misc]  # vLLM is untyped here
    """See the module."""

    def get_encoder_cudagraph_config(self) -> Any:
        """Give the manager a padding logic for `cu_seqlens` instead of zeros."""
        config = super().get_encoder_cudagraph_config()
        config.padding_logics["cu_seqlens"] = repeat_last
        return config
