"""What changed between two sequences of GPU operations, in order.

Two sequences are laid side by side with the fewest insertions and removals (Myers, Algorithmica 1, 1986:
the greedy O(ND) algorithm). What stands on one side only is then matched by name with what stands only on
the other side: that is work that *moved*. The rest was *added* or *removed*. Counting names alone would
miss a move; comparing positions alone would report everything behind one inserted kernel as new.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_EDITS = 1_500  # time and memory grow with its square; beyond, only names are counted


@dataclass(frozen=True)
class Alignment:
    """Two sequences side by side.

    Attributes:
        pairs: positions (base, head) of operations that stayed in order.
        moved: positions (base, head) of operations of one name at another place.
        removed, added: positions on one side only.
        ordered: False when the sequences differ too much to be laid side by side; what follows their
            common beginning is then matched by name alone.
    """

    pairs: list[tuple[int, int]]
    moved: list[tuple[int, int]]
    removed: list[int]
    added: list[int]
    ordered: bool


def align(base: Sequence[str], head: Sequence[str]) -> Alignment:
    """Align two sequences of names; see the module."""
    numbers: dict[str, int] = {}
    left = [numbers.setdefault(name, len(numbers)) for name in base]
    right = [numbers.setdefault(name, len(numbers)) for name in head]
    pairs = _in_order(left, right)
    ordered = pairs is not None
    if pairs is None:
        pairs = [(position, position) for position in range(_common(left, right))]
    kept_base, kept_head = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    waiting: dict[int, list[int]] = {}
    for position in range(len(right) - 1, -1, -1):
        if position not in kept_head:
            waiting.setdefault(right[position], []).append(position)
    moved, removed = [], []
    for position, name in enumerate(left):
        if position not in kept_base:
            partners = waiting.get(name)
            if partners:
                moved.append((position, partners.pop()))
            else:
                removed.append(position)
    added = sorted(position for partners in waiting.values() for position in partners)
    return Alignment(pairs, moved, removed, added, ordered)


def _common(base: Sequence[int], head: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for left, right in zip(base, head, strict=False):
        if left != right:
            break
        length += 1
    return length


def _in_order(base: list[int], head: list[int]) -> list[tuple[int, int]] | None:
    """Longest common subsequence as pairs of positions; None beyond `MOST_EDITS` edits.

    `reach[k]` is how far into `base` the best path on diagonal k = x - y gets with d edits.
    """
    n, m = len(base), len(head)
    limit = min(n + m, MOST_EDITS)
    reach = [0] * (2 * limit + 3)
    history = []
    for edits in range(limit + 1):
        history.append(np.array(reach[limit - edits : limit + edits + 2], np.int32))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[limit + k - 1] < reach[limit + k + 1])
            x = reach[limit + k + 1] if down else reach[limit + k - 1] + 1
            y = x - k
            while x < n and y < m and base[x] == head[y]:
                x, y = x + 1, y + 1
            reach[limit + k] = x
            if x >= n and y >= m:
                return _path(history, n, m, base, head)
    return None


def _path(history: list[np.ndarray], n: int, m: int, base: list[int], head: list[int]) -> list[tuple[int, int]]:
    """Walk the stored reaches back from the end."""
    pairs, x, y = [], n, m
    for edits in range(len(history) - 1, -1, -1):
        reach, k = history[edits], x - y

        def at(diagonal: int, reach: np.ndarray = reach, edits: int = edits) -> int:
            place = diagonal + edits
            return int(reach[place]) if 0 <= place < len(reach) else 0

        down = k == -edits or (k != edits and at(k - 1) < at(k + 1))
        before = k + 1 if down else k - 1
        start_x = at(before) if edits else 0
        start_y = start_x - before if edits else 0
        while x > start_x and y > start_y and base[x - 1] == head[y - 1]:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if edits:
            x, y = start_x, start_y
    return pairs[::-1]
