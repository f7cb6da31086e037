"""The numbers of a table as text: equal decimals in a column, the same in notebooks and in a bundle's report."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import pandas as pd

MISSING = "\N{EN DASH}"


def cells(column: "pd.Series[Any]") -> tuple[bool, list[str]]:
    """Return whether a column holds numbers, and the plain text of its cells; nothing is escaped."""
    values = column.tolist()
    numbers = [value for value in values if _is_number(value)]
    if not numbers or any(not (_is_number(value) or _is_missing(value)) for value in values):
        return False, [MISSING if _is_missing(value) else _word(value) for value in values]
    whole = all(isinstance(value, Integral) for value in numbers)
    decimals = 0 if whole else _decimals(numbers)
    return True, [MISSING if _is_missing(value) else f"{value:,.{decimals}f}" for value in values]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not _is_missing(value)


def _is_missing(value: object) -> bool:
    return value is None or value is pd.NaT or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _decimals(values: Sequence[Any]) -> int:
    """Return decimals that show four significant digits of the column's largest value, at most 6."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest == 0 else min(6, max(0, 3 - math.floor(math.log10(largest))))
