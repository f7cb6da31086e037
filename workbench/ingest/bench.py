"""JSON of `vllm bench mm-processor`, `vllm bench serve` and `vllm bench sweep`.

Shapes as written by vLLM 0.33's `benchmarks/mm_processor.py`, `serve.py` and `sweep/serve.py`. Its
statistics are numpy's: linear percentiles, standard deviations that divide by n.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from workbench.errors import WorkbenchError
from workbench.ingest.external import SCHEMA_VERSION, External, Measure

_TO_US = {"us": 1.0, "ms": 1e3, "s": 1e6, "secs": 1e6}
_STATISTIC = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(\w+?)_(us|ms|s)")
# Per-request lists that `--save-detailed` keeps, in seconds.
_DETAILED = {"ttfts": "ttft", "latencies": "e2el"}
_RATES = ("request_throughput", "output_throughput", "total_token_throughput")
_ENDPOINT_KEYS = ("backend", "endpoint_type", "num_prompts", "request_rate", "burstiness", "max_concurrency")
_MOST_SAMPLES = 100_000


def is_mm_processor(document: object) -> bool:
    """Whether this is a result of `vllm bench mm-processor`."""
    return isinstance(document, dict) and isinstance(document.get("mm_processor_stats"), dict)


def is_serve(document: object) -> bool:
    """Whether this is a result of `vllm bench serve`."""
    return isinstance(document, dict) and "duration" in document and "request_throughput" in document


def is_sweep(document: object) -> bool:
    """Whether this is a `summary.json` of `vllm bench sweep`, or results appended to one file."""
    return isinstance(document, list) and bool(document) and all(map(is_serve, document))


def mm_processor(document: Mapping[str, Any], name: str) -> External:
    """Read one result of `vllm bench mm-processor`.

    Raises:
        WorkbenchError: no stage was measured.
    """
    measures = []
    for stage, statistics in document["mm_processor_stats"].items():
        base, unit = _split_unit(stage)
        if isinstance(statistics, dict):
            measures.append(_measure(base, unit, statistics))
    end_to_end: dict[str, Any] = {key: document.get(f"{key}_e2el_ms") for key in ("mean", "median", "std")} | {
        f"p{p}": value for p, value in _pairs(document.get("percentiles_e2el_ms"))
    }
    if _number(end_to_end["mean"]) is not None and document.get("completed"):
        measures.append(_measure("e2el", "ms", end_to_end))
    if not any(measure.mean for measure in measures):
        raise WorkbenchError(
            f"{name} holds no measured stage; run the benchmark with multimodal requests, without warm-up only"
        )
    config = document.get("config")
    config = config if isinstance(config, dict) else {}
    summary = document.get("encoder_summary")
    notes = [
        "encoder_forward is host time around the encoder divided by the requests of its call; model runner V1 and "
        "V2 measure different scopes"
    ]
    if document.get("failed"):
        notes.append(f"{document['failed']} requests failed")
    return External(
        schema_version=SCHEMA_VERSION,
        source="bench mm-processor",
        name=name,
        created=_text(document.get("timestamp")),
        model=_text(config.get("model")) or None,
        configuration=_configuration(config | (summary if isinstance(summary, dict) else {})),
        measures=measures,
        notes=notes,
    )


def serve(document: Mapping[str, Any], name: str) -> External:
    """Read one result of `vllm bench serve`; per-request samples where it was saved in detail."""
    notes = [f"{document['failed']} requests failed"] if document.get("failed") else []
    return External(
        schema_version=SCHEMA_VERSION,
        source="bench serve",
        name=name,
        created=_text(document.get("date")),
        model=_text(document.get("model_id")) or None,
        configuration=_configuration({key: document.get(key) for key in _ENDPOINT_KEYS}),
        measures=_serve_measures(document),
        notes=notes,
    )


def sweep(documents: Sequence[Mapping[str, Any]], name: str) -> External:
    """Read the runs of a sweep: per combination of parameters, every statistic with one sample a run."""
    groups: dict[str, list[list[Measure]]] = {}
    varied = _varied(documents)
    for document in documents:
        label = ", ".join(f"{key}={_text(document.get(key))}" for key in varied)
        groups.setdefault(label, []).append(_serve_measures(document))
    measures = [
        measure for label, runs in groups.items() for measure in _across_runs(runs, f" [{label}]" if label else "")
    ]
    first = serve(documents[0], name)
    return msgspec.structs.replace(
        first,
        source="bench sweep",
        configuration=first.configuration | {"runs": str(len(documents)), "combinations": str(len(groups))},
        measures=measures,
        notes=[] if len(documents) > 1 else ["one run only: nothing can be said about its spread"],
    )


def _serve_measures(document: Mapping[str, Any]) -> list[Measure]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for key, value in document.items():
        if match := _STATISTIC.fullmatch(key):
            found.setdefault((match[2], match[3]), {})[match[1]] = value
    measures = {base: _measure(base, unit, statistics) for (base, unit), statistics in found.items()}
    for key, base in _DETAILED.items():
        samples = _samples(document.get(key))
        if samples:
            known = measures.get(base) or Measure(name=base, unit="us", better="lower")
            measures[base] = msgspec.structs.replace(known, samples=samples)
    for key in _RATES:
        if (value := _number(document.get(key))) is not None:
            measures[key] = Measure(name=key, unit="per_second", better="higher", mean=value)
    return list(measures.values())


def _across_runs(runs: Sequence[Sequence[Measure]], suffix: str) -> Iterator[Measure]:
    """One measure per statistic, whose samples are the runs."""
    columns: dict[tuple[str, str], list[float]] = {}
    kinds: dict[str, Measure] = {}
    for run in runs:
        for measure in run:
            kinds[measure.name] = measure
            for statistic, value in (
                ("mean", measure.mean),
                ("median", measure.median),
                *((f"p{p}", value) for p, value in measure.percentiles.items()),
            ):
                if value is not None:
                    columns.setdefault((measure.name, statistic), []).append(value)
    for (base, statistic), values in columns.items():
        kind = kinds[base]
        label = base if kind.unit == "per_second" else f"{statistic} {base}"
        yield Measure(name=label + suffix, unit=kind.unit, better=kind.better, samples=values, runs=True)


def _varied(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters that differ between runs: the sweep's overrides, not its results."""
    results = {"date", "run_number", "duration", "completed", "failed", "errors"}
    keys = [key for key in documents[0] if key not in results and not _STATISTIC.fullmatch(key) and key not in _RATES]
    return [
        key
        for key in keys
        if all(isinstance(document.get(key), str | int | bool | None) for document in documents)
        and not key.startswith(("total_", "max_output", "spec_decode", "num_requests"))
        and len({str(document.get(key)) for document in documents}) > 1
        and not key.startswith("max_concurrent_requests")
    ]


def _measure(name: str, unit: str, statistics: Mapping[str, Any]) -> Measure:
    """A measure from `mean`, `median`, `std` and `p…` keys, scaled to microseconds."""
    scale = _TO_US.get(unit, 1.0)

    def scaled(key: str) -> float | None:
        value = _number(statistics.get(key))
        return None if value is None else value * scale

    percentiles = {
        f"{float(key[1:]):g}": value
        for key in statistics
        if re.fullmatch(r"p\d+(?:\.\d+)?", key) and (value := scaled(key)) is not None
    }
    is_time = unit in _TO_US
    return Measure(
        name=name,
        unit="us" if is_time else "count",
        better="lower" if is_time else "neither",
        mean=scaled("mean"),
        median=scaled("median"),
        std=scaled("std"),
        percentiles=percentiles,
    )


def _split_unit(stage: str) -> tuple[str, str]:
    base, _, unit = stage.rpartition("_")
    return (base, unit) if unit in _TO_US and base else (stage, "")


def _pairs(value: object) -> Iterator[tuple[str, Any]]:
    for pair in value if isinstance(value, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and _number(pair[0]) is not None:
            yield str(pair[0]), pair[1]


def _samples(value: object) -> list[float]:
    """Seconds per request as microseconds; empty when the list is not of plain numbers."""
    if not isinstance(value, list) or len(value) > _MOST_SAMPLES:
        return []
    numbers = [_number(item) for item in value]
    return [] if None in numbers else [number * 1e6 for number in numbers if number is not None]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: object) -> str:
    return "" if value is None else str(value)[:200]


def _configuration(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: _text(value) for key, value in values.items() if isinstance(value, str | int | float)}
