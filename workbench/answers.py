"""The answers two arms gave, read from files and matched sample by sample.

Two kinds of file:

* *answers*, JSON Lines: one object per sample with `id` (or lmms-eval's `doc_id`), one of `token_ids`,
  `text`, `filtered_resps`, `resps`, and optionally `top_logprobs` (per position, token -> logprob, or -> an
  object with a `logprob`), a metric of 0/1, and lmms-eval's `prompt_hash`, `doc_hash`. The first line may
  instead be `{"meta": {...}}` with whatever must be equal in both arms: weights, preprocessing, seed,
  vocab_size.
* *results*, the JSON that lmms-eval (and lm-evaluation-harness) writes: `results.{task}.{metric},{filter}`
  and `{metric}_stderr,{filter}`.

Files that cannot be compared are refused with the reason, never compared as far as they go.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from workbench.decision import (
    NEAR_TIE_NATS,
    Agreement,
    BenchmarkDelta,
    FirstDifference,
    PairedAccuracy,
    agreement,
    benchmark_delta,
    first_difference,
    paired_accuracy,
)
from workbench.errors import WorkbenchError
from workbench.files import read_json

LINE_LIMIT = 16 * 2**20
_SAME_INPUT = ("prompt_hash", "doc_hash", "target_hash", "input", "prompt")
# Fields of a result file's `config` that change what is asked, so that values cannot be compared.
_SAME_CONFIG = ("limit", "random_seed", "numpy_seed", "torch_seed", "fewshot_seed", "gen_kwargs", "model")
_SAME_RESULTS = ("versions", "n-shot", "n-samples", "task_hashes")


class Answer(msgspec.Struct, frozen=True):
    """One sample's answer. `logprobs[i]` maps a token (as text of its id) to its logprob at position i."""

    sample: str
    tokens: list[int] | None
    text: str | None
    logprobs: list[dict[str, float]] | None
    inputs: dict[str, Any]
    metrics: dict[str, bool]


class Answers(msgspec.Struct, frozen=True):
    """One arm's answers by sample id, in file order."""

    path: str
    meta: dict[str, Any]
    samples: dict[str, Answer]


def read_answers(path: Path) -> Answers:
    """Read an answers file.

    Raises:
        WorkbenchError: unreadable, empty, a line that is not an answer, a duplicate sample id, a token
            outside the vocabulary that the file itself states.
    """
    meta: dict[str, Any] = {}
    samples: dict[str, Answer] = {}
    for number, line in _lines(path):
        if number == 1 and set(line) == {"meta"} and isinstance(line["meta"], dict):
            meta = line["meta"]
            continue
        answer = _answer(path, number, line)
        if answer.sample in samples:
            raise WorkbenchError(f"{path} line {number} repeats sample {answer.sample!r}; give each sample once")
        samples[answer.sample] = answer
    if not samples:
        raise WorkbenchError(f"{path} holds no answers; give one JSON object per line and sample")
    vocabulary = meta.get("vocab_size")
    if isinstance(vocabulary, int):
        for answer in samples.values():
            if any(not 0 <= token < vocabulary for token in answer.tokens or ()):
                raise WorkbenchError(
                    f"{path} sample {answer.sample!r} has a token outside its own vocabulary of {vocabulary}"
                )
    return Answers(path=str(path), meta=meta, samples=samples)


def compare_answers(
    a: Answers, b: Answers, *, confidence: float = 0.95, near_tie_nats: float = NEAR_TIE_NATS
) -> Agreement:
    """Compare two arms' answers to the same samples.

    Raises:
        WorkbenchError: other samples, other inputs, other weights, preprocessing, seed or vocabulary, or
            tokens in one arm and text in the other.
    """
    _check_same_study(a, b)
    differences = []
    for sample, left in a.samples.items():
        difference = _difference(left, b.samples[sample], near_tie_nats)
        if difference is not None:
            differences.append(difference)
    return agreement(len(a.samples), differences, confidence=confidence, near_tie_nats=near_tie_nats)


def compare_correctness(
    a: Answers, b: Answers, metric: str | None = None, *, confidence: float = 0.95, target_delta: float = 0.01
) -> PairedAccuracy | None:
    """Compare a 0/1 metric that both files hold for every sample; None when there is no such metric.

    Raises:
        WorkbenchError: the named metric is missing, or several could be meant and none is named.
    """
    _check_same_study(a, b)
    answers = [*a.samples.values(), *b.samples.values()]
    shared = set.intersection(*(set(answer.metrics) for answer in answers))
    if metric is None:
        if len(shared) > 1:
            raise WorkbenchError(f"{a.path} holds several 0/1 metrics ({', '.join(sorted(shared))}); name one")
        if not shared:
            return None
        metric = next(iter(shared))
    if metric not in shared:
        raise WorkbenchError(f"{metric!r} is not a 0/1 value of every sample in {a.path} and {b.path}")
    return paired_accuracy(
        [answer.metrics[metric] for answer in a.samples.values()],
        [b.samples[sample].metrics[metric] for sample in a.samples],
        confidence=confidence,
        target_delta=target_delta,
    )


def compare_results(path_a: Path, path_b: Path, *, target_delta: float = 0.01) -> list[BenchmarkDelta]:
    """Compare two lmms-eval result files metric by metric.

    Raises:
        WorkbenchError: not such files, other tasks, metrics, sample counts, seeds, task versions, or no
            standard error.
    """
    a, b = (read_json(path, dict[str, Any]) for path in (path_a, path_b))
    _check_same_evaluation(path_a, a, path_b, b)
    deltas = []
    for task, values in a["results"].items():
        metrics = _metrics(path_a, task, values)
        others = _metrics(path_b, task, b["results"][task])
        if set(metrics) != set(others):
            raise WorkbenchError(
                f"{path_a} and {path_b} hold other metrics of {task}: "
                f"{_differing(set(metrics), set(others))}; run both arms with the same task definition"
            )
        samples = _sample_count(a, task)
        deltas += [
            benchmark_delta(task, metric, metrics[metric], others[metric], samples=samples, target_delta=target_delta)
            for metric in metrics
        ]
    if not deltas:
        raise WorkbenchError(f"{path_a} holds no metric with a value; give a finished lmms-eval result file")
    return deltas


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as handle:
            number = 0
            while raw := handle.readline(LINE_LIMIT + 1):
                number += 1
                if len(raw) > LINE_LIMIT:
                    raise WorkbenchError(f"{path} line {number} is longer than {LINE_LIMIT:,} bytes")
                if raw.strip():
                    yield number, msgspec.json.decode(raw, type=dict[str, Any])
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WorkbenchError(f"{path} line {number} is not a JSON object: {error}") from error


def _answer(path: Path, number: int, line: dict[str, Any]) -> Answer:
    sample = line.get("id", line.get("doc_id"))
    if not isinstance(sample, str | int) or isinstance(sample, bool):
        raise WorkbenchError(f"{path} line {number} has no `id` or `doc_id`; name the sample of each answer")
    tokens = line.get("token_ids")
    if tokens is not None and not (
        isinstance(tokens, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    ):
        raise WorkbenchError(f"{path} line {number}: `token_ids` must be a list of integers")
    text = next((line[key] for key in ("text", "filtered_resps", "resps") if key in line), None)
    while isinstance(text, list) and len(text) == 1:
        text = text[0]
    if text is not None and not isinstance(text, str):
        text = msgspec.json.encode(text, order="sorted").decode()
    if tokens is None and text is None:
        raise WorkbenchError(
            f"{path} line {number} holds no answer; give `token_ids`, `text`, or lmms-eval's `filtered_resps`"
        )
    return Answer(
        sample=str(sample),
        tokens=tokens,
        text=text,
        logprobs=_logprobs(path, number, line.get("top_logprobs")),
        inputs={key: line[key] for key in _SAME_INPUT if key in line},
        metrics={
            key: bool(value)
            for key, value in line.items()
            if key not in ("id", "doc_id") and isinstance(value, int | float) and value in (0, 1)
        },
    )


def _logprobs(path: Path, number: int, value: object) -> list[dict[str, float]] | None:
    if value is None:
        return None
    try:
        positions = msgspec.convert(value, list[dict[str, float | dict[str, Any]]])
        return [
            {token: float(entry["logprob"] if isinstance(entry, dict) else entry) for token, entry in position.items()}
            for position in positions
        ]
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise WorkbenchError(
            f"{path} line {number}: `top_logprobs` must be a list with token -> logprob per position ({error})"
        ) from error


def _check_same_study(a: Answers, b: Answers) -> None:
    if set(a.samples) != set(b.samples):
        raise WorkbenchError(
            f"{a.path} has {len(a.samples)} samples and {b.path} {len(b.samples)}, and they are not the "
            "same: "
            f"{_differing(set(a.samples), set(b.samples))}; run both arms on the same samples"
        )
    for key in sorted(set(a.meta) | set(b.meta)):
        if a.meta.get(key) != b.meta.get(key):
            what = "logits of another vocabulary" if key == "vocab_size" else f"another {key}"
            raise WorkbenchError(
                f"{b.path} was made with {what} ({b.meta.get(key)!r}) than {a.path} ({a.meta.get(key)!r}); "
                "the graph must be the only difference between the arms"
            )
    for sample, left in a.samples.items():
        right = b.samples[sample]
        if left.inputs != right.inputs:
            raise WorkbenchError(f"sample {sample!r} has other inputs in {b.path} than in {a.path}; give both the same")


def _difference(a: Answer, b: Answer, near_tie_nats: float) -> FirstDifference | None:
    if (a.tokens is None) != (b.tokens is None) and (a.text is None or b.text is None):
        raise WorkbenchError(f"sample {a.sample!r} has tokens in one arm and text in the other; give both the same")
    if a.tokens is None or b.tokens is None:
        left, right = a.text or "", b.text or ""
        at = first_difference(left, right)
        if at is None:
            return None
        return FirstDifference(
            sample=a.sample, position=at, unit="character", a=left[at : at + 1], b=right[at : at + 1]
        )
    at = first_difference(a.tokens, b.tokens)
    if at is None:
        return None
    chosen_a, chosen_b = (str(t[at]) if at < len(t) else "" for t in (a.tokens, b.tokens))
    margin_a = _margin(a, at, chosen_a, chosen_b)
    margin_b = _margin(b, at, chosen_b, chosen_a)
    known = [margin for margin in (margin_a, margin_b) if margin is not None]
    return FirstDifference(
        sample=a.sample,
        position=at,
        unit="token",
        a=chosen_a,
        b=chosen_b,
        margin_a=margin_a,
        margin_b=margin_b,
        near_tie=max(known) <= near_tie_nats if known else None,
    )


def _margin(answer: Answer, at: int, own: str, other: str) -> float | None:
    if answer.logprobs is None or at >= len(answer.logprobs):
        return None
    position = answer.logprobs[at]
    if own not in position or other not in position:
        return None
    return position[own] - position[other]


def _check_same_evaluation(path_a: Path, a: dict[str, Any], path_b: Path, b: dict[str, Any]) -> None:
    for path, content in ((path_a, a), (path_b, b)):
        results = content.get("results")
        if not isinstance(results, dict) or not all(isinstance(values, dict) for values in results.values()):
            raise WorkbenchError(f"{path} has no `results` per task; give the results JSON that lmms-eval writes")
    tasks_a, tasks_b = set(a["results"]), set(b["results"])
    if tasks_a != tasks_b:
        raise WorkbenchError(
            f"{path_a} and {path_b} hold other tasks: {_differing(tasks_a, tasks_b)}; evaluate the same tasks"
        )
    for key in _SAME_RESULTS:
        if key in a and key in b and a[key] != b[key]:
            raise WorkbenchError(
                f"{path_a} and {path_b} differ in `{key}` ({_first_difference_of(a[key], b[key])}); "
                "evaluate the same samples of the same task version"
            )
    config_a, config_b = (content.get("config") or {} for content in (a, b))
    for key in _SAME_CONFIG:
        if config_a.get(key) != config_b.get(key):
            raise WorkbenchError(
                f"{path_a} and {path_b} were made with another {key} ({config_a.get(key)!r} and "
                f"{config_b.get(key)!r}); "
                "the graph must be the only difference between the arms"
            )


def _metrics(path: Path, task: str, values: dict[str, Any]) -> dict[str, tuple[float, float]]:
    metrics = {}
    for key, value in values.items():
        name, _, suffix = key.partition(",")
        if name.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float) or not suffix:
            continue
        error = values.get(f"{name}_stderr,{suffix}")
        if isinstance(error, bool) or not isinstance(error, int | float):
            raise WorkbenchError(
                f"{path} has no standard error for {task} {key}; evaluate with bootstrap iterations or "
                "compare "
                "the per-sample answers instead"
            )
        try:
            metrics[key] = (float(value), float(error))
        except OverflowError:
            raise WorkbenchError(
                f"{path} gives {task} {key} a number of more than 300 digits; take the file as lmms-eval wrote it"
            ) from None
    return metrics


def _sample_count(content: dict[str, Any], task: str) -> int | None:
    counts = content.get("n-samples", {})
    value = counts.get(task) if isinstance(counts, dict) else None
    if isinstance(value, dict):
        value = value.get("effective")
    return value if isinstance(value, int) else None


def _first_difference_of(a: object, b: object) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(set(a) | set(b), key=str):
            if a.get(key) != b.get(key):
                return f"{key}: {_first_difference_of(a.get(key), b.get(key))}"
    return f"{a!r} and {b!r}"


def _differing(a: set[str], b: set[str]) -> str:
    parts = []
    for only, place in ((a - b, "first"), (b - a, "second")):
        if only:
            names = ", ".join(sorted(only)[:5])
            parts.append(f"{names}{' …' if len(only) > 5 else ''} only in the {place}")
    return "; ".join(parts)
