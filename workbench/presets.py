"""Named workloads, each a setting of vLLM's random-mm data set, with where its numbers come from."""

from dataclasses import dataclass

from workbench.random_mm import RandomMM


@dataclass(frozen=True)
class Preset:
    """A named workload.

    Attributes:
        title: one line for people.
        origin: who chose these numbers, and where.
        recipe: the random-mm setting that makes it.
        models: registry keys it was made for; other models may use it where they take its modalities.
    """

    title: str
    origin: str
    recipe: RandomMM
    models: tuple[str, ...]


_ERNIE_PR = "vLLM pull request 45254 (ViT CUDA graphs for Ernie-4.5-VL), its `vllm bench mm-processor` command"
_GLM_PR = "vLLM pull request 40576 (ViT CUDA graphs for GLM-4.1V), its `vllm bench mm-processor` commands"
_OWN = "this project's own choice, from no one's traffic"

PRESETS: dict[str, Preset] = {
    "pull-request": Preset(
        "one 224 x 224 image per request",
        _ERNIE_PR,
        RandomMM(buckets={(224, 224, 1): 1.0}, requests=1000, limit={"image": 1, "video": 0}, seed=42),
        ("ernie45_vl", "glm4_1v"),
    ),
    "glm-image": Preset(
        "one 224 x 224 image per request",
        f"{_GLM_PR}, image, one GPU",
        RandomMM(buckets={(224, 224, 1): 1.0}, requests=1000, limit={"image": 1, "video": 0}, seed=42),
        ("glm4_1v",),
    ),
    "glm-video": Preset(
        "one video of 8 frames of 224 x 224 per request",
        f"{_GLM_PR}, video, one GPU",
        RandomMM(buckets={(224, 224, 8): 1.0}, requests=1000, limit={"image": 0, "video": 1}, seed=42),
        ("glm4_1v",),
    ),
    "glm-mixed": Preset(
        "1 to 3 images and videos per request: 224 x 224, 1024 x 768, videos of 8 and 16 frames",
        f"{_OWN}: photographs and short clips in one stream",
        RandomMM(
            buckets={(224, 224, 1): 0.35, (768, 1024, 1): 0.3, (224, 224, 8): 0.2, (336, 448, 16): 0.15},
            requests=500,
            base_items=2,
            range_ratio=0.5,
            limit={"image": 3, "video": 1},
            seed=42,
        ),
        ("glm4_1v",),
    ),
    "mixed": Preset(
        "1 to 7 images per request: 224 x 224, 640 x 480, 1024 x 768, 1792 x 1792",
        f"{_OWN}: thumbnails, screen captures, photographs and pages in one stream",
        RandomMM(
            buckets={(224, 224, 1): 0.35, (480, 640, 1): 0.3, (768, 1024, 1): 0.25, (1792, 1792, 1): 0.1},
            requests=1000,
            base_items=4,
            range_ratio=0.75,
            limit={"image": 16, "video": 0},
            seed=42,
        ),
        ("ernie45_vl", "glm4_1v"),
    ),
    "small-many": Preset(
        "16 to 32 small images per request: 56 x 56 to 224 x 224",
        f"{_OWN}: icons and product tiles, many to a call",
        RandomMM(
            buckets={(56, 56, 1): 0.25, (112, 112, 1): 0.35, (112, 224, 1): 0.2, (224, 224, 1): 0.2},
            requests=500,
            base_items=24,
            range_ratio=1 / 3,
            limit={"image": 64, "video": 0},
            seed=42,
        ),
        ("ernie45_vl", "glm4_1v"),
    ),
}
