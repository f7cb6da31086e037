"""Ranks' traces on one clock: planted clock offsets and waits must be found, and traces that do not join refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.kineto import GEMM, Kineto
from workbench.cli import app
from workbench.collectives import Ranks, join_ranks
from workbench.errors import WorkbenchError
from workbench.trace import read_traces

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals)"
US = 1000


def write(folder: Path, arrivals: list[list[int]], ahead: list[int], exchange: int = 3 * US) -> list[Path]:
    """Write a trace per rank of collectives that rank r enters at `arrivals[r][i]` and all leave together.

    Args:
        ahead: of each rank's clock, ns.
    """
    paths = []
    leaves = [max(times) + exchange for times in zip(*arrivals, strict=True)]
    for rank, (times, shift) in enumerate(zip(arrivals, ahead, strict=True)):
        made = Kineto(rank=rank)
        for i, (enters, end) in enumerate(zip(times, leaves, strict=True)):
            start = enters + shift
            made.annotate(f"call#{i}", start - 10 * US, end + shift + US)
            made.kernel(start - 9 * US, start - 5 * US, 2 * US, GEMM)
            made.kernel(start - 4 * US, start, end - enters, ALL_GATHER if i % 2 else ALL_REDUCE)
        paths.append(made.write(folder / f"{rank}.json"))
    return paths


def joined(paths: list[Path], window: str | None = None) -> Ranks:
    return join_ranks(read_traces(paths), window)


@settings(max_examples=25, deadline=None)
@given(st.integers(-(10**12), 10**12), st.data())
def test_planted_offsets_and_waits_are_found(
    tmp_path_factory: pytest.TempPathFactory, shift: int, data: st.DataObject
) -> None:
    times = st.lists(st.integers(0, 400 * US), min_size=6, max_size=6)
    base = [10**13 + i * 1000 * US for i in range(6)]
    arrivals = [[at + late for at, late in zip(base, data.draw(times), strict=True)] for _ in range(3)]
    found = joined(write(tmp_path_factory.mktemp("traces"), arrivals, [0, shift, -shift]))
    assert [clock.rank for clock in found.clocks] == [0, 1, 2]
    for clock, planted in zip(found.clocks, (0, shift, -shift), strict=True):
        assert clock.ahead_us == planted / US
        assert clock.lowest_us <= clock.ahead_us <= clock.highest_us
        assert clock.spread_us == 0
    for row in found.collectives:
        last = max(times[row.index] for times in arrivals)
        assert row.waited_us == pytest.approx((last - arrivals[row.rank][row.index]) / US)
    for clock, own in zip(found.clocks, arrivals, strict=True):
        waits = [max(all_) - mine for all_, mine in zip(zip(*arrivals, strict=True), own, strict=True)]
        assert clock.waited_us == pytest.approx(sum(waits) / US)


def test_bases_of_two_files_are_told_apart(tmp_path: Path) -> None:
    first, second = write(tmp_path, [[10**9, 10**9 + 10**6], [10**9, 10**9 + 10**6]], [0, 5 * US])
    text = second.read_text().replace(
        '"baseTimeNanoseconds": 1790857026000000000', '"baseTimeNanoseconds": 1790857026000000700'
    )
    second.write_text(text)
    assert joined([first, second]).clocks[1].ahead_us == 5.7


def test_rows_name_their_window_and_rank(tmp_path: Path) -> None:
    rows = joined(write(tmp_path, [[10**9, 10**9 + 10**6]] * 2, [0, 0]), "call#1").collectives
    assert [(row.index, row.rank, row.window) for row in rows] == [
        (0, 0, ""),
        (0, 1, ""),
        (1, 0, "call#1"),
        (1, 1, "call#1"),
    ]
    assert [row.name for row in rows[::2]] == [
        "cross_device_reduce_1stage",
        "ncclDevKernel_AllGather_RING_LL",
    ]
    assert rows[2].start_us == 1000


def test_a_drifting_clock_is_refused(tmp_path: Path) -> None:
    steady = [10**9 + i * 10**6 for i in range(4)]
    first, second = write(tmp_path, [steady, steady], [0, 0])
    drifting = Kineto(rank=1)
    for i, at in enumerate(steady):
        drifting.kernel(at - US, at + i * 20 * US, 3 * US, ALL_GATHER if i % 2 else ALL_REDUCE)
    drifting.write(second)
    with pytest.raises(WorkbenchError, match="no shift of rank 1's clock lets all 4 collectives overlap"):
        joined([first, second])


def test_what_does_not_join_is_refused_by_name(tmp_path: Path) -> None:
    both = write(tmp_path, [[10**9, 2 * 10**9]] * 2, [0, 0])
    with pytest.raises(WorkbenchError, match="1 traces of the ranks 0 cannot"):
        joined(both[:1])
    with pytest.raises(WorkbenchError, match="ranks 0, 0 cannot"):
        joined([both[0], both[0]])
    fewer = Kineto(rank=1)
    fewer.kernel(10**9, 10**9 + US, US, ALL_REDUCE)
    fewer.kernel(10**9, 10**9 + US, US, "ncclDevKernel_Broadcast_RING_LL(x)")
    fewer.write(both[1])
    with pytest.raises(WorkbenchError, match=r"1.json of one rank has 0 collectives 'ncclDevKernel_AllGather"):
        joined(both)
    none = Kineto(rank=0)
    none.kernel(10**9, 10**9 + US, US)
    none.write(both[0])
    with pytest.raises(WorkbenchError, match=r"0.json has no collective"):
        joined(both)


def analyzed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["analyze", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_analyze_shows_ranks_side_by_side(tmp_path: Path) -> None:
    paths = write(tmp_path, [[10**9, 10**9 + 10**6], [10**9 + 40 * US, 10**9 + 10**6]], [0, 7 * US])
    shown = json.loads(analyzed("--json", "--details", *map(str, paths)))
    assert [(row["rank"], row["ahead_us"], row["waited_us"]) for row in shown["ranks"]] == [(0, 0, 40), (1, 7, 0)]
    assert {(row["rank"], row["index"]): row["waited_us"] for row in shown["collectives"]} == {
        (0, 0): 40, (1, 0): 0, (0, 1): 0, (1, 1): 0,
    }  # fmt: skip
    text = analyzed(*map(str, paths))
    assert "Ranks on rank 0's clock" in text
    assert "40.0" in text


def test_analyze_of_traces_of_no_ranks_says_nothing_about_ranks(tmp_path: Path) -> None:
    paths = []
    for name, rank in (("a", None), ("b", None), ("c", 0)):
        made = Kineto(rank=rank)
        made.kernel(0, US, US, ALL_REDUCE)
        paths.append(str(made.write(tmp_path / f"{name}.json")))
    for chosen in (paths[:2], [paths[2], paths[2]]):
        shown = json.loads(analyzed("--json", *chosen))
        assert "ranks" not in shown
        assert shown["warnings"] == []


def test_analyze_of_ranks_that_share_nothing_warns(tmp_path: Path) -> None:
    paths = []
    for rank in (0, 1):
        made = Kineto(rank=rank)
        made.kernel(0, US, US)
        paths.append(str(made.write(tmp_path / f"{rank}.json")))
    shown = json.loads(analyzed("--json", *paths))
    assert "ranks" not in shown
    assert any("has no collective, so nothing joins the ranks" in warning for warning in shown["warnings"])
