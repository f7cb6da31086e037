"""Timelines of a million spans: sums stay exact, the figure stays small."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import detail, explain
from workbench.kernels import FAMILIES
from workbench.run import recording_folder
from workbench.views import boundary

SUMS = ["spans", "busy_us"]


def spans(count: int, seed: int = 0) -> pd.DataFrame:
    """An eager call without end: short kernels of four families, their launches, and a phase a thousand kernels."""
    rng = np.random.default_rng(seed)
    tables = []
    for lane, groups, share, length in (
        ("host", ("replay", "clone"), 0.001, 2000.0),
        ("CUDA calls", ("graph launch", "kernel launch", "copy", "memset", "wait"), 0.4995, 1.5),
        ("GPU", FAMILIES, 0.4995, 3.0),
    ):
        number = int(count * share)
        duration = rng.integers(1, 2 * int(1000 * length), number) / 1e3
        begins = np.cumsum(duration + rng.integers(0, 1000, number) / 1e3) - duration
        kind = rng.integers(0, len(groups), number)
        names = np.array([f"{group} kernel" for group in groups], object)[kind]
        table = {"lane": lane, "name": names, "group": np.array(groups, object)[kind]}
        tables.append(pd.DataFrame(table | {"start_us": begins, "duration_us": duration}))
    return pd.concat(tables, ignore_index=True)


def test_a_timeline_of_a_million_spans_is_a_small_figure_with_the_same_sums() -> None:
    table = spans(1_000_000)
    drawn = detail.level_of_detail(table, boundary._PIXELS)
    assert list(drawn.columns) == detail.COLUMNS
    assert len(drawn) <= 2 * boundary._PIXELS * table.groupby(["lane", "group"]).ngroups
    sums = drawn.groupby(["lane", "group"])[SUMS].sum()
    wanted = table.groupby(["lane", "group"])["duration_us"].agg(["size", "sum"])
    assert sums["spans"].to_list() == wanted["size"].to_list()
    assert sums["busy_us"].to_numpy() == pytest.approx(wanted["sum"].to_numpy(), rel=1e-9)
    figure = boundary.timelines({"eager as served": table})
    assert sum(len(bar.x) for bar in figure.data) == len(drawn)
    assert len(figure.to_html(include_plotlyjs=True)) < 6e6


def test_wide_spans_stay_and_narrow_ones_become_blocks_that_say_so() -> None:
    rows = [("GPU", "a", "gemm", 0.0, 50.0), ("GPU", "b", "gemm", 50.0, 1.0), ("GPU", "c", "gemm", 52.0, 1.0)]
    rows += [("GPU", "d", "norm", 53.0, 1.0), ("GPU", "e", "gemm", 90.0, 10.0)]
    drawn = detail.level_of_detail(pd.DataFrame(rows, columns=detail.COLUMNS[:5]), 10)
    assert drawn["name"].to_list() == ["a", "2 spans, 67% busy", "d", "e"]
    assert drawn["start_us"].to_list() == [0, 50, 53, 90]
    assert drawn["duration_us"].to_list() == [50, 3, 1, 10]
    assert drawn["spans"].to_list() == [1, 2, 1, 1]
    assert drawn["busy_us"].to_list() == [50, 2, 1, 10]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["GPU", "host"]), st.sampled_from("ab"), st.integers(0, 500), st.integers(0, 90)),
        max_size=60,
    ),
    pixels=st.integers(1, 40),
)
def test_any_table_keeps_its_sums_and_its_extent(rows: list[tuple[str, str, int, int]], pixels: int) -> None:
    table = pd.DataFrame(
        [(lane, "n", group, float(start), float(length)) for lane, group, start, length in rows],
        columns=detail.COLUMNS[:5],
    )
    drawn = detail.level_of_detail(table, pixels)
    assert drawn["spans"].sum() == len(rows)
    assert drawn["busy_us"].sum() == table["duration_us"].sum()
    if rows:
        assert drawn["start_us"].min() == table["start_us"].min()
        last = (table["start_us"] + table["duration_us"]).max()
        assert (drawn["start_us"] + drawn["duration_us"]).max() == last
        assert len(drawn) <= len(rows)
        groups = drawn[drawn["spans"] > 1].groupby(["lane", "group"]).size()
        assert (groups <= pixels + 1).all()


def test_a_recorded_call_is_drawn_whole() -> None:
    table = explain.timeline(explain.traced(explain.open_subject(recording_folder("ernie45_vl-224")), "eager_served"))
    figure = boundary.timelines({"eager as served": table})
    assert sum(len(bar.x) for bar in figure.data) == len(table)
