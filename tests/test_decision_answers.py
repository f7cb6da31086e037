"""Answers of two arms from files: matched, compared, or refused with the reason."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from workbench.answers import compare_answers, compare_correctness, compare_results, read_answers
from workbench.errors import WorkbenchError

META = {"weights": "sha256:1", "preprocessing": "smart_resize 28", "seed": 0, "vocab_size": 100}
# The shape that lmms-eval 0.3 writes; the values are the Ernie pull request's.
RESULTS: dict[str, Any] = {
    "results": {
        "ai2d": {
            "alias": "ai2d",
            "exact_match,flexible-extract": 0.6548,
            "exact_match_stderr,flexible-extract": 0.0086,
            "submission,none": None,
        },
        "mmstar": {"alias": "mmstar", "average,none": 0.1241, "average_stderr,none": 0.0088},
    },
    "versions": {"ai2d": "Yaml", "mmstar": 0.0},
    "n-samples": {
        "ai2d": {"original": 3088, "effective": 3088},
        "mmstar": {"original": 1500, "effective": 1500},
    },
    "config": {"model": "vllm", "limit": None, "random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234},
}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fifty(changed: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return 50 samples answered by three tokens each; `changed` replaces fields of some."""
    lines: list[dict[str, Any]] = [{"meta": META}]
    for i in range(50):
        logprobs = [{"1": -0.1, "2": -3.0}, {"5": -0.68, "6": -0.71}, {"9": -0.2, "8": -2.0}]
        lines.append({"id": i, "token_ids": [1, 5, 9], "top_logprobs": logprobs} | changed.get(i, {}))
    return lines


def test_47_of_50_with_near_ties(tmp_path: Path) -> None:
    a = read_answers(write_lines(tmp_path / "off.jsonl", fifty({})))
    near = {"token_ids": [1, 6, 9], "top_logprobs": [{"1": -0.1}, {"6": -0.69, "5": -0.7}, {"9": -0.2}]}
    b = read_answers(write_lines(tmp_path / "on.jsonl", fifty({3: near, 17: near, 40: near})))
    result = compare_answers(a, b)
    assert (result.samples, result.identical, result.near_ties) == (50, 47, 3)
    assert result.identical_interval.low == pytest.approx(0.8345, abs=5e-5)
    assert not result.changed
    first = result.differences[0]
    assert (first.sample, first.position, first.a, first.b) == ("3", 1, "5", "6")
    assert first.margin_a == pytest.approx(0.03)
    assert first.margin_b == pytest.approx(0.01)


def test_a_decided_answer_that_changed_is_no_near_tie(tmp_path: Path) -> None:
    a = read_answers(write_lines(tmp_path / "off.jsonl", fifty({})))
    b = read_answers(write_lines(tmp_path / "on.jsonl", fifty({7: {"token_ids": [2, 5, 9]}})))
    result = compare_answers(a, b)
    assert (result.decided, result.near_ties, result.unknown) == (1, 0, 0)
    assert result.changed


def test_text_answers_and_a_prefix(tmp_path: Path) -> None:
    a = read_answers(write_lines(tmp_path / "a.jsonl", [{"id": "x", "text": "A cat."}]))
    b = read_answers(write_lines(tmp_path / "b.jsonl", [{"id": "x", "text": "A cat"}]))
    (difference,) = compare_answers(a, b).differences
    assert (difference.unit, difference.position, difference.a, difference.b) == ("character", 5, ".", "")
    assert difference.near_tie is None


def test_lmms_eval_samples_and_their_metric(tmp_path: Path) -> None:
    def sample(doc: int, answer: str, right: float) -> dict[str, Any]:
        return {"doc_id": doc, "prompt_hash": f"p{doc}", "filtered_resps": [answer], "exact_match": right}

    a = read_answers(write_lines(tmp_path / "a.jsonl", [sample(0, "A", 1.0), sample(1, "B", 1.0)]))
    b = read_answers(write_lines(tmp_path / "b.jsonl", [sample(1, "C", 0.0), sample(0, "A", 1.0)]))
    assert compare_answers(a, b).identical == 1
    paired = compare_correctness(a, b)
    assert paired is not None
    assert (paired.only_a, paired.only_b, paired.p_value) == (1, 0, 1.0)


def test_result_files(tmp_path: Path) -> None:
    other = copy.deepcopy(RESULTS)
    other["results"]["ai2d"] |= {
        "exact_match,flexible-extract": 0.6564,
        "exact_match_stderr,flexible-extract": 0.0085,
    }
    other["results"]["mmstar"] |= {"average,none": 0.1284, "average_stderr,none": 0.0089}
    off, on = (tmp_path / name for name in ("off.json", "on.json"))
    off.write_text(json.dumps(RESULTS))
    on.write_text(json.dumps(other))
    ai2d, mmstar = compare_results(off, on)
    assert (ai2d.metric, ai2d.samples) == ("exact_match,flexible-extract", 3088)
    assert ai2d.sigma == pytest.approx(0.13, abs=0.005)
    assert mmstar.sigma == pytest.approx(0.34, abs=0.005)


def _without_stderr(content: dict[str, Any]) -> None:
    content["results"]["mmstar"]["average_stderr,none"] = "N/A"


def _other_task(content: dict[str, Any]) -> None:
    content["results"]["mmmu"] = content["results"].pop("mmstar")


def _other_count(content: dict[str, Any]) -> None:
    content["n-samples"]["ai2d"]["effective"] = 100


def _other_seed(content: dict[str, Any]) -> None:
    content["config"]["torch_seed"] = 1


def _other_metric(content: dict[str, Any]) -> None:
    content["results"]["mmstar"] = {"acc,none": 0.1, "acc_stderr,none": 0.01}


def _no_results(content: dict[str, Any]) -> None:
    content.pop("results")


def _huge_number(content: dict[str, Any]) -> None:
    content["results"]["ai2d"]["exact_match,flexible-extract"] = 10**400


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_huge_number, "300 digits"),
        (_without_stderr, "standard error"),
        (_other_task, "other tasks"),
        (_other_count, "n-samples"),
        (_other_seed, "torch_seed"),
        (_other_metric, "other metrics"),
        (_no_results, "no `results`"),
    ],
)
def test_result_files_that_cannot_be_compared(tmp_path: Path, change: Any, reason: str) -> None:
    other = copy.deepcopy(RESULTS)
    change(other)
    a, b = (tmp_path / name for name in ("a.json", "b.json"))
    a.write_text(json.dumps(RESULTS))
    b.write_text(json.dumps(other))
    with pytest.raises(WorkbenchError, match=reason):
        compare_results(a, b)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"meta": META | {"weights": "sha256:2"}}, {"id": 0, "token_ids": [1]}], "another weights"),
        ([{"meta": META | {"preprocessing": "other"}}, {"id": 0, "token_ids": [1]}], "another preprocessing"),
        ([{"meta": META | {"vocab_size": 200}}, {"id": 0, "token_ids": [1]}], "another vocabulary"),
        ([{"meta": META | {"seed": 1}}, {"id": 0, "token_ids": [1]}], "another seed"),
        ([{"meta": META}, {"id": 1, "token_ids": [1]}], "not the same"),
        ([{"meta": META}, {"id": 0, "token_ids": [1]}, {"id": 1, "token_ids": [1]}], "2, and they are not"),
        ([{"meta": META}, {"id": 0, "token_ids": [1], "prompt_hash": "x"}], "other inputs"),
        ([{"meta": META}, {"id": 0, "text": "A"}], "text in the other"),
    ],
)
def test_arms_that_differ_in_more_than_the_graph(tmp_path: Path, lines: list[dict[str, Any]], reason: str) -> None:
    a = read_answers(write_lines(tmp_path / "a.jsonl", [{"meta": META}, {"id": 0, "token_ids": [1]}]))
    b = read_answers(write_lines(tmp_path / "b.jsonl", lines))
    with pytest.raises(WorkbenchError, match=reason):
        compare_answers(a, b)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no answers"),
        ("{", "line 1 is not a JSON object"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"text": "A"}\n', "`id`"),
        ('{"id": 1}\n', "no answer"),
        ('{"id": 1, "token_ids": ["a"]}\n', "integers"),
        ('{"id": 1, "text": "A"}\n{"id": "1", "text": "B"}\n', "repeats sample '1'"),
        ('{"id": 1, "token_ids": [1], "top_logprobs": [["a"]]}\n', "top_logprobs"),
        ('{"meta": {"vocab_size": 5}}\n{"id": 1, "token_ids": [7]}\n', "outside its own vocabulary"),
    ],
)
def test_files_that_are_no_answers(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(WorkbenchError, match=reason):
        read_answers(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match=r"cannot read .*none\.jsonl"):
        read_answers(tmp_path / "none.jsonl")


def test_two_metrics_need_a_name(tmp_path: Path) -> None:
    line = {"id": 0, "text": "A", "exact_match": 1.0, "anls": 0.0}
    a = read_answers(write_lines(tmp_path / "a.jsonl", [line]))
    with pytest.raises(WorkbenchError, match="several"):
        compare_correctness(a, a)
    with pytest.raises(WorkbenchError, match="'f1' is not"):
        compare_correctness(a, a, "f1")
    named = compare_correctness(a, a, "anls")
    assert named is not None
    assert named.accuracy_a == 0.0
