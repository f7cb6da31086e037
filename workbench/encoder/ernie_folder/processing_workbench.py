"""Processor of an ERNIE-4.5-VL folder without weights, as remote code: images to patches, text to tokens.

The checkpoint's own processor is remote code too. This one gives vLLM what it reads from it: grids by vLLM's own
`smart_resize`, uint8 patches (vLLM normalises them), token ids. Images only.
"""

from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, BatchFeature
from transformers.processing_utils import ProcessorMixin

PATCH = 14
MERGE = 2


class WorkbenchErnieImages:
    """Pixel limits and normalisation of ERNIE-4.5-VL's image processor."""

    size = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 6177}  # read as an attribute by vLLM
    image_mean = (0.48145466, 0.4578275, 0.40821073)
    image_std = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor = 1 / 255

    def patches(self, image: Any) -> tuple[torch.Tensor, list[int]]:
        """Return uint8 [h * w, 3 * 14 * 14] patches, merged blocks together, and the grid [1, h, w]."""
        from vllm.model_executor.models.ernie45_vl import smart_resize

        height, width = smart_resize(
            image.height, image.width, PATCH * MERGE, self.size["min_pixels"], self.size["max_pixels"]
        )
        pixels = np.asarray(image.convert("RGB").resize((width, height)))
        rows, columns = height // PATCH, width // PATCH
        blocks = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
        flat = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * PATCH * PATCH)
        return torch.from_numpy(flat.copy()), [1, rows, columns]


class WorkbenchErnieProcessor(ProcessorMixin):  # type: ignore[misc]
    """Tokenizer and image processor under the names vLLM asks for."""

    attributes = ["tokenizer"]  # transformers reads a class attribute
    tokenizer_class = "AutoTokenizer"
    spatial_conv_size = MERGE
    temporal_conv_size = 2
    supports_video_metadata = True

    def __init__(self, tokenizer: Any = None, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = WorkbenchErnieImages()
        self.chat_template = getattr(tokenizer, "chat_template", None)

    @classmethod
    def from_pretrained(cls, path: str, **kwargs: Any) -> "WorkbenchErnieProcessor":
        """Build from the folder's tokenizer; nothing else is stored."""
        return cls(AutoTokenizer.from_pretrained(path))

    def __call__(self, text: Any = None, images: Any = None, videos: Any = None, **kwargs: Any) -> BatchFeature:
        """Return `input_ids`, `images` (patches of all images, or None) and `grid_thw`."""
        if videos:
            raise ValueError("this folder without weights has a processor for images only")
        data: dict[str, Any] = {
            "input_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"],
            "images": None,
        }
        if images:
            made = [self.image_processor.patches(image) for image in images]
            data["images"] = torch.cat([patches for patches, _ in made])
            data["grid_thw"] = torch.tensor([grid for _, grid in made])
        return BatchFeature(data)
