"""Timelines of any size as figures of bounded size: spans narrower than a pixel become blocks.

    drawn = level_of_detail(explain.timeline(one), pixels=2000)

A figure of a million spans is a file of 100 MB in which no single span can be seen. At most `pixels` blocks and as many
wide spans per lane and group are left, and nothing is lost from the sums: `spans` and `busy_us` add up to those of the
table that went in.
"""

import numpy as np
import pandas as pd

COLUMNS = ["lane", "name", "group", "start_us", "duration_us", "spans", "busy_us"]


def level_of_detail(table: pd.DataFrame, pixels: int) -> pd.DataFrame:
    """Merge the spans that are narrower than a pixel, lane by lane and group by group.

    Args:
        table: from `explain.timeline`: lane, name, group, start_us, duration_us.
        pixels: of the whole time axis.

    Returns:
        The same columns and two more, in time order. A span as wide as a pixel stays as it is, with `spans` 1 and
        `busy_us` its duration. Narrower ones that begin in the same pixel are one block from the first's start to the
        last's end: `spans` counts them, `busy_us` sums their durations, `name` says both.
    """
    if table.empty:
        return table.assign(spans=np.zeros(0, np.int64), busy_us=np.zeros(0))[COLUMNS]
    begin = float(table["start_us"].min())
    end = (table["start_us"] + table["duration_us"]).to_numpy()
    pixel = (float(end.max()) - begin) / pixels
    whole = table.assign(spans=1, busy_us=table["duration_us"])
    narrow = (table["duration_us"] < pixel).to_numpy()
    if not narrow.any():
        return whole[COLUMNS]
    small = whole[narrow].assign(end=end[narrow], pixel=((whole["start_us"][narrow] - begin) / pixel).astype(np.int64))
    blocks = (
        small.groupby(["lane", "group", "pixel"], sort=False)
        .agg(
            name=("name", "first"),
            start_us=("start_us", "min"),
            end=("end", "max"),
            spans=("spans", "sum"),
            busy_us=("busy_us", "sum"),
        )
        .reset_index()
    )
    blocks["duration_us"] = blocks["end"] - blocks["start_us"]
    several = blocks["spans"] > 1
    share = blocks["busy_us"] / blocks["duration_us"].where(blocks["duration_us"] > 0, np.inf)
    told = [f"{count:,} spans, {part:.0%} busy" for count, part in zip(blocks["spans"], share, strict=True)]
    blocks["name"] = blocks["name"].where(~several, told)
    made = pd.concat([whole[~narrow][COLUMNS], blocks[COLUMNS]], ignore_index=True)
    return made.sort_values("start_us", kind="stable", ignore_index=True)
