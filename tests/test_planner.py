"""The planner: equal to recorded plans of vLLM, its ledger, its sums, its bad input, its command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from workbench.budgets import Configuration, Limits, Resolved, resolve
from workbench.cli import app
from workbench.errors import WorkbenchError
from workbench.planner import FALLBACK, Ints, Plan, arrange, pack, plan, plan_totals

VECTORS = json.loads((Path(__file__).parent / "data" / "plans.json").read_text())["cases"]


def columns(calls: list[list[int]]) -> tuple[Ints, Ints]:
    """Return tokens and offsets of calls."""
    offsets = np.cumsum([0, *(len(call) for call in calls)])
    return np.array([tokens for call in calls for tokens in call], np.int64), offsets


def resolved(*budgets: int, items: int, frames: int = 0) -> Resolved:
    """Return a configuration as given."""
    return Resolved(budgets, items, frames)


def batches(made: Plan) -> list[list[tuple[list[int], int | None]]]:
    """Return (items, budget) of each batch of each call."""
    return [[(batch["items"], batch["budget"]) for batch in call["batches"]] for call in made.record()["calls"]]


def vector_plan(case: dict[str, Any]) -> Plan:
    """Plan one recorded case."""
    configuration = Configuration(tuple(case["budgets"]), case["max_items"])
    return plan(*columns(case["calls"]), resolve(configuration, Limits(*case["limits"])))


@pytest.mark.parametrize("case", [case for case in VECTORS if "error" not in case])
def test_recorded_plans_of_vllm(case: dict[str, Any]) -> None:
    made = vector_plan(case)
    assert [list(made.resolved.budgets), made.resolved.max_items] == case["resolved"]
    expected = [[(items, budget) for items, budget in call] for call in case["batches"]]
    assert batches(made) == expected


@pytest.mark.parametrize("case", [case for case in VECTORS if "error" in case])
def test_configurations_that_vllm_refused(case: dict[str, Any]) -> None:
    with pytest.raises(WorkbenchError, match="vLLM refuses it"):
        resolve(Configuration(tuple(case["budgets"]), case["max_items"]), Limits(*case["limits"]))


def test_recorded_plans_are_many_and_varied() -> None:
    replays = [batch for case in VECTORS for call in case.get("batches", []) for batch in call]
    assert len(VECTORS) == 300
    assert sum(budget is None for _, budget in replays) > 50
    assert sum(len(items) > 1 for items, _ in replays) > 500
    assert sum(not case["budgets"] for case in VECTORS) > 20


def test_totals_equal_the_ledger() -> None:
    for case in VECTORS[::7]:
        if "error" in case:
            continue
        made = vector_plan(case)
        totals = plan_totals(made.arrangement, made.resolved)
        replayed = made.budget_index != FALLBACK
        assert totals.replays == replayed.sum()
        assert totals.fallbacks == (~replayed).sum()
        assert totals.tokens == made.tokens[replayed].sum()
        assert totals.budget_tokens == made.budget[replayed].sum()
        assert totals.fallback_tokens == made.tokens[~replayed].sum()
        for index in range(len(totals.budgets)):
            chosen = made.budget_index == index
            assert totals.replays_per_budget[index] == chosen.sum()
            assert totals.items_per_budget[index] == made.items[chosen].sum()
            assert totals.tokens_per_budget[index] == made.tokens[chosen].sum()
        for call in range(made.arrangement.calls):
            of_call = made.call == call
            assert totals.call_replays[call] == (of_call & replayed).sum()
            assert totals.call_fallbacks[call] == (of_call & ~replayed).sum()
            assert totals.call_budget_tokens[call] == made.budget[of_call & replayed].sum()
            assert totals.call_fallback_tokens[call] == made.tokens[of_call & ~replayed].sum()


def test_repeated_budgets_count_at_the_first() -> None:
    made = plan(*columns([[100]]), resolved(64, 128, 128, 256, items=4))
    assert made.budget_index.tolist() == [1]
    assert plan_totals(made.arrangement, made.resolved).replays_per_budget.tolist() == [0, 1, 0, 0]


def test_an_item_waits_for_its_own_replay_when_that_is_cheaper() -> None:
    # Both together would need 4096; apart they need 128 + 2048.
    made = plan(*columns([[100, 2000]]), resolved(128, 2048, 4096, items=4))
    assert batches(made) == [[([0], 128), ([1], 2048)]]
    # Three in one budget of 256 are no dearer than 64 + 128 apart, so they stay together.
    assert batches(plan(*columns([[60, 60, 60]]), resolved(64, 128, 256, items=4))) == [[([0, 1, 2], 256)]]


def test_equal_items_keep_their_order() -> None:
    made = plan(*columns([[64, 32, 64, 32]]), resolved(1024, items=16))
    assert batches(made) == [[([1, 3, 0, 2], 1024)]]


def test_ledger_of_a_fallback() -> None:
    made = plan(*columns([[64, 300]]), resolved(128, 256, items=4))
    assert made.budget.tolist() == [128, FALLBACK]
    assert made.fallback.tolist() == [False, True]
    assert made.fill[0] == 0.5
    assert np.isnan(made.fill[1])
    assert made.reason(0) is None
    assert made.reason(1) == "300 tokens exceed the largest budget, 256"


def test_frames_are_counted_and_never_packed_by() -> None:
    tokens, offsets = columns([[64, 64, 64]])
    made = plan(tokens, offsets, resolved(256, items=4, frames=8), frames=np.array([3, 3, 3]))
    assert (made.frames.tolist(), made.over_frames.tolist()) == ([9], [True])
    assert plan_totals(made.arrangement, made.resolved).over_frames == 1
    assert made.record()["calls"][0]["batches"][0]["over_frames"] is True
    enough = resolved(256, items=4, frames=9)
    assert plan(tokens, offsets, enough, frames=np.array([3, 3, 3])).over_frames.tolist() == [False]
    assert plan_totals(made.arrangement, enough).over_frames == 0


def test_images_never_exceed_the_slots() -> None:
    made = plan(*columns([[64] * 9]), resolved(1024, items=4, frames=0))
    assert not made.over_frames.any()


def test_a_fallback_copies_no_sequences() -> None:
    made = plan(*columns([[500]]), resolved(256, items=1, frames=2), frames=np.array([7]))
    assert made.over_frames.tolist() == [False]


def test_sums_per_batch() -> None:
    tokens, offsets = columns([[10, 300, 20], [], [5]])
    made = plan(tokens, offsets, resolved(64, items=4))
    squares = made.sum_per_batch(tokens[made.arrangement.item] ** 2)
    assert squares.tolist() == [500, 90_000, 25]
    assert plan(*columns([[]]), resolved(64, items=4)).sum_per_batch(np.zeros(0)).tolist() == []


sizes = st.lists(st.integers(1, 5000), max_size=60)
many_calls = st.lists(sizes, min_size=1, max_size=6)
some_budgets = st.lists(st.integers(1, 6000), min_size=1, max_size=8).map(lambda budgets: tuple(sorted(budgets)))


@settings(max_examples=100, deadline=None)
@given(many_calls, some_budgets, st.integers(1, 20), st.integers(1, 5))
def test_every_item_is_in_one_batch(calls: list[list[int]], budgets: tuple[int, ...], items: int, dp: int) -> None:
    made = plan(*columns(calls), Resolved(budgets, items, 0), dp=dp)
    for call, planned in zip(calls, made.record()["calls"], strict=True):
        packed = [item for batch in planned["batches"] for item in batch["items"]]
        assert sorted(packed) == list(range(len(call)))
        for batch in planned["batches"]:
            total = sum(call[item] for item in batch["items"])
            assert total == batch["tokens"]
            assert len(batch["items"]) <= items
            fitting = [budget for budget in budgets if budget >= total]
            assert batch["budget"] == (min(fitting) if fitting else None)
            assert fitting or len(batch["items"]) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=300), st.integers(1, 4))
def test_queues_are_sorted_and_stable(tokens: list[int], dp: int) -> None:
    arrangement = arrange(np.array(tokens, np.int64), np.array([0, len(tokens)]), dp=dp)
    for start, stop in zip(arrangement.first, arrangement.first[1:], strict=False):
        queue = arrangement.item[start:stop].tolist()
        assert arrangement.tokens[start:stop].tolist() == sorted(tokens[item] for item in queue)
        assert queue == sorted(queue, key=lambda item: (tokens[item], item))


def test_long_calls_sort_like_short_ones() -> None:
    rng = np.random.default_rng(0)
    for count in (31, 32, 33, 34, 1000, 70_000):
        tokens = rng.integers(1, 70_000, count)
        arrangement = arrange(tokens, np.array([0, count]))
        np.testing.assert_array_equal(arrangement.item, np.argsort(tokens, kind="stable"))


def test_ranks_share_a_call_by_input_size() -> None:
    tokens, offsets = columns([[1000, 100, 200, 50]])
    made = plan(tokens, offsets, resolved(256, 1024, items=4), dp=2)
    assert [(b["rank"], b["items"]) for b in made.record()["calls"][0]["batches"]] == [(0, [0]), (1, [3, 1]), (1, [2])]
    # The same tokens with other input sizes are dealt otherwise.
    other = plan(tokens, offsets, resolved(256, 1024, items=4), dp=2, input_sizes=np.array([4, 4000, 8, 16]))
    assert [(b["rank"], b["items"]) for b in other.record()["calls"][0]["batches"]] == [(0, [1]), (1, [3, 2]), (1, [0])]


@pytest.mark.parametrize(
    ("tokens", "offsets", "reason"),
    [
        ([1, 0, 2], [0, 2, 3], "item 1 of call 0 has 0 tokens"),
        ([1, 2, -7], [0, 2, 2, 3], "item 0 of call 2 has -7 tokens"),
        ([2**41], [0, 1], "give numbers from 1 to"),
        ([], [0], "no encoder call"),
        ([1, 2], [0, 1], "do not ascend"),
        ([1, 2], [0, 2, 1, 2], "do not ascend"),
        ([1, 2], [1, 2], "do not ascend"),
        ([1.5], [0, 1], "whole numbers"),
        ([float("nan")], [0, 1], "whole numbers"),
        ([[1]], [0, 1], "whole numbers"),
    ],
)
def test_bad_columns(tokens: Any, offsets: Any, reason: str) -> None:
    with pytest.raises(WorkbenchError, match=reason):
        arrange(tokens, offsets)


def test_bad_companions() -> None:
    with pytest.raises(WorkbenchError, match="2 frames for 1 items"):
        arrange([5], [0, 1], frames=[1, 1])
    with pytest.raises(WorkbenchError, match="0 input size"):
        arrange([5], [0, 1], dp=2, input_sizes=[0])
    with pytest.raises(WorkbenchError, match="0 data-parallel ranks"):
        arrange([5], [0, 1], dp=0)


def test_packing_again_needs_no_sorting() -> None:
    tokens, offsets = columns([[300, 20, 20]])
    arrangement = arrange(tokens, offsets)
    assert batches(pack(arrangement, resolved(64, 512, items=2))) == [[([1, 2], 64), ([0], 512)]]
    assert batches(pack(arrangement, resolved(512, items=8))) == [[([1, 2, 0], 512)]]


# The command ----------------------------------------------------------------------------------------------------


def run(tmp_path: Path, calls: str, *options: str) -> Any:
    """Run `workbench plan` on a file of calls; return typer's result."""
    path = tmp_path / "calls.json"
    path.write_text(calls)
    return CliRunner().invoke(app, ["plan", "--calls", str(path), "--json", *options])


def test_command(tmp_path: Path) -> None:
    result = run(tmp_path, "[[64, 100, 300], []]", "--budgets", "256,128", "--max-items", "4")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert record["budgets"] == [128, 256]
    assert record["max_items"] == 4
    assert record["calls"] == [
        {
            "batches": [
                {"items": [0, 1], "tokens": 164, "budget": 256},
                {"items": [2], "tokens": 300, "budget": None, "reason": "300 tokens exceed the largest budget, 256"},
            ]
        },
        {"batches": []},
    ]
    assert record["totals"] == {
        "replays": 1,
        "fallbacks": 1,
        "fallback_items": 1,
        "fallback_tokens": 300,
        "tokens": 164,
        "budget_tokens": 256,
        "waste": 92 / 256,
        "over_frames": 0,
    }
    assert record["warnings"] == ["budgets 256, 128 are not in ascending order; vLLM sorts them"]


def test_command_infers(tmp_path: Path) -> None:
    limits = ("--max-model-len", "4096", "--max-num-batched-tokens", "8192")
    record = json.loads(run(tmp_path, "[[64]]", "--budgets", "", "--max-items", "0", *limits).stdout)
    assert record["budgets"] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert (record["max_items"], record["max_frames"]) == (64, 64)
    glm = json.loads(run(tmp_path, "[[64]]", *limits, "--model", "glm4_1v").stdout)
    assert glm["max_frames"] == 64 * 600


def test_command_without_a_replay(tmp_path: Path) -> None:
    record = json.loads(run(tmp_path, "[[]]", "--budgets", "64", "--max-items", "1").stdout)
    assert record["totals"]["waste"] is None


def test_command_shares_ranks(tmp_path: Path) -> None:
    patches = tmp_path / "patches.json"
    patches.write_text("[[4, 4000, 8, 16]]")
    options = ("--budgets", "256,1024", "--max-items", "4", "--dp", "2")
    record = json.loads(run(tmp_path, "[[1000, 100, 200, 50]]", *options).stdout)
    assert [batch["rank"] for batch in record["calls"][0]["batches"]] == [0, 1, 1]
    record = json.loads(run(tmp_path, "[[1000, 100, 200, 50]]", *options, "--input-sizes", str(patches)).stdout)
    assert [batch["items"] for batch in record["calls"][0]["batches"]] == [[1], [3, 2], [0]]
    alone = json.loads(run(tmp_path, "[[64]]", "--budgets", "64", "--max-items", "1", "--dp", "1").stdout)
    assert alone["calls"][0]["batches"][0]["rank"] == 0


def test_command_takes_a_compilation_config(tmp_path: Path) -> None:
    text = json.dumps(Configuration((128,), 2).compilation_config())
    assert json.loads(run(tmp_path, "[[64]]", "--compilation-config", text).stdout)["max_items"] == 2
    with pytest.raises(WorkbenchError, match="not both"):
        raise run(tmp_path, "[[64]]", "--compilation-config", text, "--budgets", "64").exception


@pytest.mark.parametrize(
    "calls", ["[]", "[[0]]", "[[-5]]", "[[1.5]]", "[[NaN]]", "{", '[["a"]]', "[1]", f"[[{10**30}]]"]
)
def test_command_refuses_calls(tmp_path: Path, calls: str) -> None:
    result = run(tmp_path, calls, "--budgets", "64", "--max-items", "1")
    assert isinstance(result.exception, WorkbenchError)


def test_command_refuses_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--calls", str(tmp_path / "none.json"), "--json"])
    assert isinstance(result.exception, WorkbenchError)


@pytest.mark.parametrize(
    "options", [("--budgets", "1,x"), ("--budgets", "64", "--max-items", "65"), (), ("--model", "gpt")]
)
def test_command_refuses_configurations(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert isinstance(run(tmp_path, "[[5]]", *options).exception, WorkbenchError)


def test_command_for_people(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.write_text(json.dumps([[64, 300]] * 30))
    result = CliRunner().invoke(app, ["plan", "--calls", str(path), "--budgets", "128,256", "--max-items", "4"])
    text = " ".join(result.stdout.split())
    assert "30 replays of 1,920 tokens, padding waste 50.0%; 30 eager fallbacks of 9,000 tokens" in text
    assert "10 more calls" in text
