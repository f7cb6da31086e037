"""Which spans of a trace a person asked about."""

import fnmatch
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.errors import WorkbenchError
from workbench.trace import Category, Ints, Trace

WHOLE = "whole"


@dataclass(frozen=True)
class Windows:
    """Occurrences in time order, in nanoseconds.

    A GPU op or call belongs to window i when start_ns[i] <= its start < stop_ns[i]; `stop_ns` is the
    end, but for `whole`, where it is one nanosecond later so that a last op without length counts.
    """

    names: list[str]
    start_ns: Ints
    end_ns: Ints
    stop_ns: Ints

    def inside(self, times: Ints) -> NDArray[np.bool_]:
        """Which `times` belong to at least one window."""
        reach = np.maximum.accumulate(self.stop_ns)
        place = np.searchsorted(self.start_ns, times, "right") - 1
        return np.asarray((place >= 0) & (times < reach[np.maximum(place, 0)]))

    def covered(self, times: Ints) -> Ints:
        """Measure of the union of the windows before each of `times`."""
        reach = np.maximum.accumulate(self.end_ns)
        opens = np.append(True, self.start_ns[1:] > reach[:-1])
        start = self.start_ns[opens]
        end = reach[np.append(np.flatnonzero(opens)[1:] - 1, reach.size - 1)]
        before = np.append(0, np.cumsum(end - start))
        place = np.searchsorted(start, times, "right") - 1
        at = np.maximum(place, 0)
        return np.where(place < 0, 0, before[at] + np.minimum(times, end[at]) - start[at])

    @property
    def overlap(self) -> bool:
        """Do any two windows share time."""
        return bool(np.any(self.start_ns[1:] < np.maximum.accumulate(self.end_ns)[:-1]))


def annotations(trace: Trace) -> dict[str, int]:
    """Names of the host's annotations and how often each occurs."""
    rows = trace.rows(Category.USER_ANNOTATION)
    counts = np.bincount(trace.name[rows], minlength=len(trace.names))
    return {trace.names[i]: int(counts[i]) for i in np.flatnonzero(counts)}


def find_windows(trace: Trace, pattern: str | None) -> Windows:
    """The annotations whose name matches `pattern`; from first GPU op to last without one.

    Args:
        trace: has at least one GPU op.
        pattern: shell pattern (`*`, `?`, `[...]`; case matters) or exact name.

    Raises:
        WorkbenchError: nothing matches; the message lists the annotations there are.
    """
    if pattern is None:
        ops = trace.gpu_rows()
        start, end = trace.start_ns[ops].min(), (trace.start_ns[ops] + trace.duration_ns[ops]).max()
        return Windows([WHOLE], np.array([start]), np.array([end]), np.array([end + 1]))
    matches = [name == pattern or fnmatch.fnmatchcase(name, pattern) for name in trace.names]
    rows = trace.rows(Category.USER_ANNOTATION)
    rows = rows[np.array(matches, np.bool_)[trace.name[rows]]]
    if rows.size == 0:
        raise WorkbenchError(f"no annotation of {trace.source} matches {pattern!r}; {_there_are(trace)}")
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    start = trace.start_ns[rows]
    end = start + trace.duration_ns[rows]
    return Windows([trace.names[i] for i in trace.name[rows]], start, end, end)


def _there_are(trace: Trace, most: int = 20) -> str:
    names = list(annotations(trace))
    if not names:
        return "it has no annotations, so leave the window out"
    listed = ", ".join(repr(name[:60]) for name in names[:most])
    return f"it has {listed}" + (f" and {len(names) - most:,} more" if len(names) > most else "")
