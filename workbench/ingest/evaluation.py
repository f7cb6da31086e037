"""Result files of lmms-eval (and lm-evaluation-harness, whose form it shares)."""

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import WorkbenchError
from workbench.ingest.external import SCHEMA_VERSION, Accuracy, External


def is_evaluation(document: object) -> bool:
    """Whether this is a results file: `results.{task}` is an object with `metric,filter` keys."""
    if not isinstance(document, dict) or not isinstance(document.get("results"), dict):
        return False
    tasks = document["results"].values()
    return all(isinstance(task, dict) for task in tasks) and any("," in key for task in tasks for key in task)


def evaluation(document: Mapping[str, Any], name: str) -> External:
    """Read all metrics with a value.

    Raises:
        WorkbenchError: no metric has a value.
    """
    accuracies = [
        accuracy
        for task, values in document["results"].items()
        for accuracy in _accuracies(str(task), values, _samples(document, task))
    ]
    if not accuracies:
        raise WorkbenchError(f"{name} holds no metric with a value; give the results file of a finished evaluation")
    config = document.get("config")
    config = config if isinstance(config, dict) else {}
    told = {key: config.get(key) for key in ("model", "model_args", "batch_size", "limit", "num_fewshot")}
    return External(
        schema_version=SCHEMA_VERSION,
        source="lmms-eval",
        name=name,
        created=str(document.get("date", ""))[:40],
        model=str(document.get("model_name") or config.get("model") or "")[:200] or None,
        configuration={key: str(value)[:500] for key, value in told.items() if value is not None},
        accuracies=accuracies,
    )


def _accuracies(task: str, values: Mapping[str, Any], samples: int | None) -> list[Accuracy]:
    found = []
    for key, value in values.items():
        metric, _, suffix = key.partition(",")
        number = _number(value)
        if number is not None and suffix and not metric.endswith("_stderr"):
            error = _number(values.get(f"{metric}_stderr,{suffix}"))
            found.append(Accuracy(task=task, metric=key, value=number, stderr=error, samples=samples))
    return found


def _samples(document: Mapping[str, Any], task: str) -> int | None:
    counts = document.get("n-samples")
    count = counts.get(task) if isinstance(counts, dict) else None
    if isinstance(count, dict):
        count = count.get("effective")
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
