"""Configuration of an ERNIE-4.5-VL folder without weights: the fields vLLM's model reads, as remote code."""

from typing import Any

from transformers import PretrainedConfig


class WorkbenchErnieVisionConfig(PretrainedConfig):  # type: ignore[misc]
    """The vision tower's fields."""

    model_type = "workbench_ernie45_vl_vision"


class WorkbenchErnieConfig(PretrainedConfig):  # type: ignore[misc]
    """The language model's and resampler's fields, with the vision tower's inside."""

    model_type = "workbench_ernie45_vl"
    sub_configs = {"vision_config": WorkbenchErnieVisionConfig}  # transformers reads a class attribute

    def __init__(self, vision_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.vision_config = WorkbenchErnieVisionConfig(**(vision_config or {}))
        super().__init__(**kwargs)
