"""The stored form of a result that another tool measured."""

from typing import Literal

from workbench.run import Record

SCHEMA_VERSION = 1
Source = Literal["bench mm-processor", "bench serve", "bench sweep", "lmms-eval", "nsys", "kineto"]
Unit = Literal["us", "per_second", "count", "share", "bytes"]


class Measure(Record, frozen=True):
    """One quantity of a benchmark: samples where the file has them, else the statistics it gives.

    Attributes:
        name: as the tool calls it, without unit ("encoder_forward", "ttft").
        unit: times are microseconds whatever the file uses.
        percentiles: by percent as text ("99").
        runs: the samples are one value per repetition of the benchmark, not one per request.
    """

    name: str
    unit: Unit
    better: Literal["lower", "higher", "neither"]
    mean: float | None = None
    median: float | None = None
    std: float | None = None
    percentiles: dict[str, float] = {}
    samples: list[float] = []
    runs: bool = False


class Accuracy(Record, frozen=True):
    """One metric of one task of an evaluation; a standard error of None was not given."""

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int | None


class KernelCount(Record, frozen=True):
    """GPU operations of one name."""

    name: str
    count: int
    total_us: float


class External(Record, frozen=True):
    """A foreign result.

    Attributes:
        name: the file's name without extension.
        configuration: what the file says about how it was made, values as text.
        kernels: of a trace: its GPU operations by name; `sequence` gives their order as indices into
            `kernels`, empty where it is long; `counts` and `times_us` are those of `workbench.gaps`.
    """

    schema_version: int
    source: Source
    name: str
    created: str = ""
    model: str | None = None
    configuration: dict[str, str] = {}
    measures: list[Measure] = []
    accuracies: list[Accuracy] = []
    kernels: list[KernelCount] = []
    sequence: list[int] = []
    counts: dict[str, int] = {}
    times_us: dict[str, float] = {}
    notes: list[str] = []
