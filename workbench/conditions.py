"""`--fail-if`: when a difference is a failure.

    graph.mean > +5%          the mean of the graph arm grew by more than 5 %
    graph[2].p99 > +200us     the P99 of its call 2 grew by more than 200 microseconds
    graph.syncs > 0           the head has any stream synchronisation
    memory.pool > +64MiB      the graph pool grew by more than that
    padding >= 0.25           the head wastes a quarter of its budgets

A signed number is a change from base to head, an unsigned one the head's value. A timing that moved
beyond the limit without evidence (see `workbench.evidence`) is not a failure; the answer says so. A name
that neither side has is an error, not a pass.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.diff import Diff, PairDiff
from workbench.errors import WorkbenchError
from workbench.evidence import Verdict
from workbench.run import ARMS, Record

_GRAMMAR = re.compile(
    r"\s*(?P<name>[^\s<>=]+(?: [^\s<>=]+)*?)\s*(?P<operator>>=|<=|>|<)\s*(?P<sign>[+-]?)(?P<number>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>%|us|ms|s|KiB|MiB|GiB)?\s*"
)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_SCALES = {"us": 1.0, "ms": 1e3, "s": 1e6, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_EXAMPLE = "write for example 'graph.mean > +5%' or 'graph.syncs > 0'"
_LONGEST = 200


@dataclass(frozen=True)
class Condition:
    """One parsed condition; `limit` is a share where `percent`, else in the unit of the quantity."""

    text: str
    name: str
    operator: str
    limit: float
    change: bool
    percent: bool
    unit: str


class Answer(Record, frozen=True):
    """One condition on one pair. `hit` means failure; `reason` tells the numbers."""

    condition: str
    pair: str
    hit: bool
    reason: str


@dataclass(frozen=True)
class _Quantity:
    base: float | None
    head: float | None
    unit: str
    verdict: Verdict | None = None
    doubt: str = ""


def parse(text: str) -> Condition:
    """Parse a condition; nothing in it is evaluated.

    Raises:
        WorkbenchError: it does not follow the grammar.
    """
    match = _GRAMMAR.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise WorkbenchError(f"the condition {text[:_LONGEST]!r} cannot be read; {_EXAMPLE}")
    sign, unit = match["sign"], match["unit"] or ""
    percent = unit == "%"
    if percent and not sign:
        raise WorkbenchError(f"the condition {text!r} needs a sign before its percentage; {_EXAMPLE}")
    value = float(match["number"]) * (0.01 if percent else _SCALES.get(unit, 1.0))
    return Condition(
        text=text.strip(),
        name=match["name"],
        operator=match["operator"],
        limit=-value if sign == "-" else value,
        change=bool(sign),
        percent=percent,
        unit="" if percent else unit,
    )


def check(diff: Diff, texts: list[str]) -> list[Answer]:
    """Answer every condition for every pair that has its quantity.

    Raises:
        WorkbenchError: a condition that cannot be read, names what no pair has, or what one side lacks.
    """
    conditions = [parse(text) for text in texts]
    tables = [(pair, dict(_quantities(pair))) for pair in diff.pairs]
    answers = []
    for condition in conditions:
        having = [(pair, table[condition.name]) for pair, table in tables if condition.name in table]
        if not having:
            known = sorted({name for _, table in tables for name in table})
            raise WorkbenchError(
                f"the condition {condition.text!r} names {condition.name!r}, which this comparison does not have; "
                f"it has {', '.join(known[:60]) or 'nothing'}"
            )
        answers += [_answer(condition, pair.name, quantity) for pair, quantity in having]
    return answers


def names(diff: Diff) -> list[str]:
    """All quantities that a condition can name, sorted."""
    return sorted({name for pair in diff.pairs for name, _ in _quantities(pair)})


def _quantities(pair: PairDiff) -> Iterator[tuple[str, _Quantity]]:
    for timing in pair.timings:
        for change in timing.changes:
            yield (
                f"{timing.name}.{change.statistic}",
                _Quantity(change.base, change.head, timing.unit, change.verdict, change.reason),
            )
        if timing.base and timing.head:
            yield f"{timing.name}.std", _Quantity(timing.base.std, timing.head.std, timing.unit)
    for metric in pair.metrics:
        yield metric.name, _Quantity(metric.base, metric.head, metric.unit)
    for row in pair.parity:
        first = row.source.partition(" ")[0]
        key = {"items": "parity", "outputs": "ladder"}.get(first, "equality")  # a session's, a ladder's, a run's
        base = row.base_equal / row.base_total if row.base_total else None
        head = row.head_equal / row.head_total if row.head_total else None
        yield f"{key}.equal_share", _Quantity(base, head, "share")
        yield f"{key}.worst_rms", _Quantity(row.base_worst, row.head_worst, "share")
        yield f"{key}.new_findings", _Quantity(0, len(row.new_findings), "count")
    for accuracy in pair.accuracy:
        yield f"accuracy.{accuracy.task}.{accuracy.metric}", _Quantity(accuracy.a, accuracy.b, "share")
        yield f"sigma.{accuracy.task}.{accuracy.metric}", _Quantity(0, accuracy.sigma, "count")
    for arm in dict.fromkeys((*ARMS, *(row.arm for row in pair.failures))):
        counts = [[getattr(row, side) for row in pair.failures if row.arm == arm] for side in ("base", "head")]
        yield f"{arm}.failures", _Quantity(sum(counts[0]), sum(counts[1]), "count")
    yield "doubts", _Quantity(0, len(pair.doubts), "count")


def _answer(condition: Condition, pair: str, quantity: _Quantity) -> Answer:
    base, head = quantity.base, quantity.head
    if head is None or (condition.change and base is None):
        raise WorkbenchError(
            f"the condition {condition.text!r} cannot be checked: {condition.name} was not measured on "
            f"{'the head' if head is None else 'the base'}; capture both sides alike"
        )
    _check_unit(condition, quantity.unit)
    value = head
    if condition.change:
        value = head - (base or 0.0)
        if condition.percent:
            value = value / abs(base) if base else math.copysign(math.inf, value) if value else 0.0
    limit = condition.limit / 1e6 if quantity.unit == "s" and condition.unit else condition.limit
    beyond = _OPERATORS[condition.operator](value, limit)
    told = f"{_shown(base, quantity.unit)} → {_shown(head, quantity.unit)}"
    if condition.percent and math.isfinite(value):
        told += f" ({value:+.1%})"
    if beyond and condition.change and quantity.verdict in ("no evidence", "not judged"):
        doubt = f": {quantity.doubt}" if quantity.doubt else ""
        return Answer(condition=condition.text, pair=pair, hit=False, reason=f"{told}, but {quantity.verdict}{doubt}")
    return Answer(condition=condition.text, pair=pair, hit=beyond, reason=told)


def _check_unit(condition: Condition, unit: str) -> None:
    allowed = {"us": ("us", "ms", "s"), "s": ("us", "ms", "s"), "bytes": ("KiB", "MiB", "GiB")}.get(unit, ())
    if condition.unit and condition.unit not in allowed:
        raise WorkbenchError(
            f"the condition {condition.text!r} gives {condition.unit}, but {condition.name} is measured in {unit}; "
            f"{_EXAMPLE}"
        )


def _shown(value: float | None, unit: str) -> str:
    suffix = {"us": " us", "bytes": " bytes", "s": " s"}.get(unit, "")
    if value is None:
        return "none"
    return (f"{value:,.6g}" if abs(value) < 10_000 else f"{value:,.0f}") + suffix
