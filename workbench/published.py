"""Figures that others published, to set beside measurements made here.

Each table names its source, its GPU and its exact workload, because none of them was measured by this project.
"""

from dataclasses import dataclass

from workbench.models import Modality

# The configuration that vLLM pull requests 45254 (ERNIE-4.5-VL) and 40576 (GLM-4.1V) benchmark.
PULL_REQUEST_BUDGETS = (128, 256, 512, 1024, 1536, 2048)
PULL_REQUEST_ITEMS = 4
PULL_REQUEST_FRAMES = 32  # of the second alone, whose model takes videos


@dataclass(frozen=True)
class PublishedRow:
    """One arm of a published benchmark: `encoder_forward_ms`, milliseconds per request; None was not published."""

    arm: str
    mean: float
    p99: float
    median: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class PublishedTable:
    """A benchmark that a pull request reported.

    `encoder_forward_ms` of `vllm bench mm-processor` is host time between two synchronises around the encoder,
    divided by the requests that the scheduler put into that call.
    """

    title: str
    source: str
    gpu: str
    workload: str
    rows: tuple[PublishedRow, ...]


ERNIE_PULL_REQUEST = PublishedTable(
    title="ERNIE-4.5-VL, encoder_forward_ms",
    source="vLLM pull request 45254",
    gpu="H100 80GB",
    workload="one 224 x 224 image per request, 1000 requests; budgets 128, 256, 512, 1024, 1536, 2048, 4 items",
    rows=(
        PublishedRow("eager", mean=20.19, median=19.89, std=1.69, p99=30.88),
        PublishedRow("CUDA graph", mean=5.33, median=5.31, std=0.22, p99=5.77),
    ),
)

GLM_IMAGE_PULL_REQUEST = PublishedTable(
    title="GLM-4.1V-9B-Thinking, encoder_forward_ms, images",
    source="vLLM pull request 40576",
    gpu="RTX 4090",
    workload="one 224 x 224 image per request, 1000 requests; budgets 128, 256, 512, 1024, 1536, 2048, 4 items",
    rows=(PublishedRow("eager", mean=4.17, p99=9.33), PublishedRow("CUDA graph", mean=4.05, p99=4.82)),
)
GLM_VIDEO_PULL_REQUEST = PublishedTable(
    title="GLM-4.6V-Flash, encoder_forward_ms, videos",
    source="vLLM pull request 40576",
    gpu="RTX 4090",
    workload="one video of 8 frames of 224 x 224 per request, 1000 requests; the same budgets, 32 frames",
    rows=(PublishedRow("eager", mean=7.26, p99=25.78), PublishedRow("CUDA graph", mean=4.54, p99=9.52)),
)

GLM_IMAGE_TWO_GPUS = PublishedTable(
    title="GLM-4.1V-9B-Thinking, encoder_forward_ms, images, data-parallel encoder",
    source="vLLM pull request 40576",
    gpu="2 RTX 4090",
    workload="224 x 224 images, at most two per request, 1000 requests; the same budgets, 4 items, 32 frames",
    rows=(PublishedRow("eager", mean=6.01, p99=24.73), PublishedRow("CUDA graph", mean=2.24, p99=9.29)),
)
GLM_VIDEO_TWO_GPUS = PublishedTable(
    title="GLM-4.6V-Flash, encoder_forward_ms, videos, data-parallel encoder",
    source="vLLM pull request 40576",
    gpu="2 RTX 4090",
    workload="videos of 8 frames of 224 x 224, at most two per request, 1000 requests; the same budgets, 32 frames",
    rows=(PublishedRow("eager", mean=9.51, p99=26.17), PublishedRow("CUDA graph", mean=3.16, p99=9.83)),
)

# What was published for a model and a modality.
PULL_REQUESTS: dict[tuple[str, Modality], PublishedTable] = {
    ("ernie45_vl", "image"): ERNIE_PULL_REQUEST,
    ("glm4_1v", "image"): GLM_IMAGE_PULL_REQUEST,
    ("glm4_1v", "video"): GLM_VIDEO_PULL_REQUEST,
}
# The same with a data-parallel encoder on two GPUs.
TWO_GPUS: dict[tuple[str, Modality], PublishedTable] = {
    ("glm4_1v", "image"): GLM_IMAGE_TWO_GPUS,
    ("glm4_1v", "video"): GLM_VIDEO_TWO_GPUS,
}


@dataclass(frozen=True)
class PublishedBenchmark:
    """A benchmark's score and standard error without and with encoder graphs, and the distance, if it was quoted."""

    task: str
    off: tuple[float, float]
    on: tuple[float, float]
    quoted_sigma: float | None = None


@dataclass(frozen=True)
class PublishedDecisions:
    """Benchmarks without and with encoder graphs, and how many of `answers` greedy answers were byte-identical.

    Attributes:
        answers: zero where none were compared.
        doubt: what was not said about the two arms.
    """

    source: str
    benchmarks: tuple[PublishedBenchmark, ...]
    answers: int = 0
    identical: int = 0
    doubt: str = ""


ERNIE_DECISIONS = PublishedDecisions(
    source="vLLM pull request 45254, ERNIE-4.5-VL-28B-A3B on an H100",
    answers=50,
    identical=47,
    benchmarks=(
        PublishedBenchmark("AI2D", off=(0.6548, 0.0086), on=(0.6564, 0.0085), quoted_sigma=0.2),
        PublishedBenchmark("MMStar", off=(0.1241, 0.0088), on=(0.1284, 0.0089), quoted_sigma=0.5),
    ),
)

GLM_DECISIONS = PublishedDecisions(
    source="vLLM pull request 40576, GLM-4.1V-9B-Thinking",
    doubt="the arms are vLLM's main branch and the pull request; the quoted command does not switch encoder graphs on",
    benchmarks=(
        PublishedBenchmark("MMStar, average", off=(0.6886, 0.0121), on=(0.6922, 0.0120)),
        PublishedBenchmark("MMStar, coarse perception", off=(0.6749, 0.0298), on=(0.6773, 0.0297)),
        PublishedBenchmark("MMStar, fine-grained perception", off=(0.6388, 0.0311), on=(0.6530, 0.0310)),
        PublishedBenchmark("MMStar, instance reasoning", off=(0.7350, 0.0283), on=(0.7169, 0.0289)),
        PublishedBenchmark("MMStar, logical reasoning", off=(0.7257, 0.0274), on=(0.7067, 0.0278)),
        PublishedBenchmark("MMStar, math", off=(0.8376, 0.0235), on=(0.8273, 0.0246)),
        PublishedBenchmark("MMStar, science & technology", off=(0.5198, 0.0317), on=(0.5722, 0.0314)),
    ),
)
DECISIONS: dict[str, PublishedDecisions] = {"ernie45_vl": ERNIE_DECISIONS, "glm4_1v": GLM_DECISIONS}


@dataclass(frozen=True)
class PublishedServing:
    """What `vllm bench serve` reported with encoder graphs off and on.

    Attributes:
        means: mean milliseconds, off and on, by vLLM's name of the measure.
    """

    source: str
    gpu: str
    workload: str
    means: dict[str, tuple[float, float]]


# What was published for a model and a preset's name.
SERVED_PULL_REQUESTS: dict[tuple[str, str], PublishedServing] = {
    ("glm4_1v", "glm-video"): PublishedServing(
        source="vLLM pull request 40576",
        gpu="2 RTX 4090, data-parallel encoder, GLM-4.6V-Flash",
        workload="100 requests at once, videos of 8 frames of 224 x 224",
        means={"ttft": (18_770.72, 16_884.68), "tpot": (71.09, 71.04), "itl": (70.53, 70.48)},
    )
}
