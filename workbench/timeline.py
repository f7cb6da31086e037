"""One device's GPU ops merged into busy segments, and the cause of each idle interval between."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from workbench.launches import NO_CALL, Launches
from workbench.replays import Replays
from workbench.trace import Ints, Trace
from workbench.windows import Windows


class GapKind(IntEnum):
    """Cause of an idle interval between GPU ops; see `workbench.gaps` for the definitions."""

    LAUNCH = 0
    QUEUE = 1
    INTRA_GRAPH = 2


@dataclass(frozen=True)
class Timeline:
    """The ops of one device in order of start, and the segments of their union.

    Idle interval k lies between segments k and k + 1.

    Attributes:
        part: the device's slice of `Launches`.
        start_ns: start of every op.
        segment_start_ns, segment_end_ns: busy segments; touching ops share one.
        busy_before_ns: busy time before each segment, and after the last: one value more.
        first, last: positions in `part` of the op that opens a segment, and of the one that ends it.
        kind: `GapKind` of each idle interval.
        unknown: idle intervals before an op whose launch call the trace lacks.
    """

    device: int
    part: slice
    start_ns: Ints
    segment_start_ns: Ints
    segment_end_ns: Ints
    busy_before_ns: Ints
    first: Ints
    last: Ints
    kind: NDArray[np.uint8]
    unknown: NDArray[np.bool_]

    @property
    def idle_ns(self) -> Ints:
        """Length of each idle interval."""
        return self.segment_start_ns[1:] - self.segment_end_ns[:-1]

    def overlapping(self, windows: Windows) -> tuple[Ints, Ints]:
        """First and last segment that share time with each window; last < first when none does."""
        low = np.searchsorted(self.segment_end_ns, windows.start_ns, "right")
        high = np.searchsorted(self.segment_start_ns, windows.end_ns, "left") - 1
        return low, high

    def busy_until(self, times: Ints) -> Ints:
        """Busy time of the device before each of `times`."""
        place = np.searchsorted(self.segment_start_ns, times, "right") - 1
        at = np.maximum(place, 0)
        inside = np.minimum(times, self.segment_end_ns[at]) - self.segment_start_ns[at]
        return np.where(place < 0, 0, self.busy_before_ns[at] + inside)


def timelines(trace: Trace, joined: Launches, replays: Replays) -> list[Timeline]:
    """A `Timeline` per device with GPU ops, by device number."""
    devices = trace.device[joined.ops]
    bounds = np.flatnonzero(np.diff(devices)) + 1
    pairs = zip([0, *bounds.tolist()], [*bounds.tolist(), devices.size], strict=True)
    return [_timeline(trace, joined, replays, slice(a, b)) for a, b in pairs]


def _timeline(trace: Trace, joined: Launches, replays: Replays, part: slice) -> Timeline:
    ops = joined.ops[part]
    device = int(trace.device[ops[0]])
    start = trace.start_ns[ops]
    end = start + trace.duration_ns[ops]
    reach = np.maximum.accumulate(end)
    first = np.append(0, np.flatnonzero(start[1:] > reach[:-1]) + 1)
    final = np.append(first[1:], ops.size) - 1
    # Up to each position, the op that reaches furthest is the last to have set the running maximum.
    furthest = np.maximum.accumulate(np.where(end == reach, np.arange(ops.size), 0))
    segment_start, segment_end = start[first], reach[final]
    idle_from, idle_to, after = segment_end[:-1], segment_start[1:], first[1:]
    unknown = joined.call[part][after] == NO_CALL
    waited = ~unknown & (joined.called_ns[part][after] > idle_from)
    kind = np.where(waited, GapKind.LAUNCH, GapKind.QUEUE).astype(np.uint8)
    kind[replays.spanning(device, idle_from, idle_to)] = GapKind.INTRA_GRAPH
    return Timeline(
        device=device,
        part=part,
        start_ns=start,
        segment_start_ns=segment_start,
        segment_end_ns=segment_end,
        busy_before_ns=np.append(0, np.cumsum(segment_end - segment_start)),
        first=first,
        last=furthest[final],
        kind=kind,
        unknown=unknown & (kind == GapKind.QUEUE),
    )
