"""The compiled scanner under `workbench.trace`: JSON bytes of trace events to integer columns.

It reads each byte once and keeps no Python object, so a core reads over a million events a second.
It knows only what `trace` needs from the Trace Event Format (one JSON object per event, `ts` and
`dur` in microseconds) and from Kineto's `args`; every other value is stepped over.

Rules for odd input, so that no file can crash or stall it:

* brackets must match and nest at most `MAX_DEPTH` deep, otherwise the file is malformed;
* the last of duplicate keys wins, as in Python's `json`;
* a trailing comma and bare words such as NaN are stepped over;
* an event whose time is missing, negative in length, not a number or beyond `MAX_TIME_NS` is counted
  as odd and left out.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from workbench.compiled import compiled

MAX_DEPTH = 60
MAX_TIME_NS = 2**61  # about year 2043 as an epoch; sums with a duration stay inside int64
MAX_DURATION_NS = 2**53  # 104 days
PADDING = 8  # zero bytes that must follow the text in its buffer
MISSING = -1  # an absent number in the columns


class Status(IntEnum):
    """Why the scanner returned."""

    DONE = 0  # the array of events was closed
    MORE = 1  # the text ended inside or before an event
    FULL = 2  # the output, the name table or its text is full
    BAD = 3  # not JSON


class Field(IntEnum):
    """Rows of the output array."""

    START, DURATION, CATEGORY, NAME, PID, TID, DEVICE, STREAM = range(8)
    CORRELATION, EXTERNAL, GRAPH, GRAPH_NODE, BYTES = range(8, 13)


class State(IntEnum):
    """Places in the scanner's state vector."""

    POSITION, COUNT, NAMES, TEXT, ODD = range(5)


FIELDS = len(Field)
# Plain integers: what compiled code may close over.
_DONE, _MORE, _FULL, _BAD = (int(status) for status in Status)
_START, _DURATION, _CATEGORY, _NAME, _PID, _TID, _DEVICE = range(7)
_BYTES = int(Field.BYTES)
_POSITION, _COUNT, _NAMES, _TEXT, _ODD = range(5)
# Negative results of the functions below, in place of a position.
_ENDS, _WRONG, _CLOSED = -1, -2, -3
_NO_TIME = -(2**63)

_QUOTE, _BACKSLASH, _COMMA, _COLON = 34, 92, 44, 58
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = 123, 125, 91, 93
_MINUS, _PLUS, _DOT, _ZERO, _NINE = 45, 43, 46, 48, 57
_SMALL_E, _LARGE_E, _LARGE_X = 101, 69, 88
_LAST_SAFE = (2**63 - 10) // 10  # times ten, plus a digit, still fits int64
_HALF = 5 * 10**18
_PRIME = np.uint64(0x100000001B3)  # FNV-1a, 64 bits
_BASIS = np.uint64(0xCBF29CE484222325)


def text_hash(text: bytes, basis: int = int(_BASIS)) -> int:
    """FNV-1a of `text`, the hash by which keys and categories are recognised."""
    for byte in text:
        basis = ((basis ^ byte) * int(_PRIME)) % 2**64
    return basis


def _hashes(*keys: bytes) -> NDArray[np.uint64]:
    return np.array([text_hash(key) for key in keys], np.uint64)


# Keys of an event. The first five hold text, of which pid and tid may be numbers.
_EVENT_KEYS = _hashes(b"ph", b"cat", b"name", b"pid", b"tid", b"ts", b"dur", b"args")
_IS_PH, _IS_CAT, _IS_NAME, _IS_PID, _IS_TID, _IS_TS, _IS_DUR, _IS_ARGS = range(8)
# Keys of `args`, and the rows their numbers go to; "external id" is how old versions spell it.
_ARGUMENT_KEYS = _hashes(
    b"correlation", b"External id", b"device", b"stream", b"graph id", b"graph node id", b"bytes", b"external id"
)
_ARGUMENT_FIELDS = np.array(
    [
        Field.CORRELATION, Field.EXTERNAL, Field.DEVICE, Field.STREAM, Field.GRAPH, Field.GRAPH_NODE,
        Field.BYTES, Field.EXTERNAL,
    ],
    np.int64,
)  # fmt: skip


def _bytes_in(characters: bytes) -> NDArray[np.bool_]:
    table = np.zeros(256, np.bool_)
    table[list(characters)] = True
    return table


_ENDS_STRING = _bytes_in(b'\0"\\')
_SPACE = _bytes_in(b" \t\r\n")
_SPACE_OR_COMMA = _bytes_in(b" \t\r\n,")
_WORD = _bytes_in(b"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


@compiled
def _find(table, value):  # type: ignore[no-untyped-def]
    """Place of `value` in a short `table`; -1: not there."""
    for i in range(table.size):
        if table[i] == value:
            return i
    return -1


@compiled
def _skip(table, text, position):  # type: ignore[no-untyped-def]
    """First position whose byte is not in `table`."""
    while table[text[position]]:
        position += 1
    return position


@compiled
def skip_space(text, position):  # type: ignore[no-untyped-def]
    """First position that is not white space; the padding ends every run."""
    return _skip(_SPACE, text, position)


@compiled
def _skip_string(text, position, end):  # type: ignore[no-untyped-def]
    """From after an opening quote to after the closing one, or `_ENDS`."""
    while True:
        while not _ENDS_STRING[text[position]]:
            position += 1
        if position >= end:
            return _ENDS
        if text[position] == _QUOTE:
            return position + 1
        position += 2 if text[position] == _BACKSLASH else 1
        if position > end:
            return _ENDS


@compiled
def _hash_string(text, position, end, basis):  # type: ignore[no-untyped-def]
    """Like `_skip_string`, with the hash of the text between the quotes."""
    value = basis
    while True:
        byte = text[position]
        if _ENDS_STRING[byte]:
            if position >= end:
                return _ENDS, value
            if byte == _QUOTE:
                return position + 1, value
            if byte == _BACKSLASH:
                value = (value ^ np.uint64(byte)) * _PRIME
                position += 1
                if position >= end:
                    return _ENDS, value
                byte = text[position]
        value = (value ^ np.uint64(byte)) * _PRIME
        position += 1


@compiled
def _skip_nested(text, position, end):  # type: ignore[no-untyped-def]
    """From an opening bracket to after its closing one, `_ENDS` or `_WRONG`."""
    depth = 0
    objects = 0  # one bit a level: 1 inside an object, 0 inside an array
    while True:
        byte = text[position]
        if byte == _QUOTE:
            position = _skip_string(text, position + 1, end)
            if position < 0:
                return position
            continue
        position += 1
        if byte in (_OPEN_OBJECT, _OPEN_ARRAY):
            depth += 1
            objects = (objects << 1) | (1 if byte == _OPEN_OBJECT else 0)
            if depth > MAX_DEPTH:
                return _WRONG
        elif byte in (_CLOSE_OBJECT, _CLOSE_ARRAY):
            if (objects & 1) != (1 if byte == _CLOSE_OBJECT else 0):
                return _WRONG
            objects >>= 1
            depth -= 1
            if depth == 0:
                return position
        elif position > end:
            return _ENDS


@compiled
def skip_value(text, position, end):  # type: ignore[no-untyped-def]
    """Position after the JSON value at `position`; -1: the text ends before, -2: malformed."""
    first = text[position]
    if first == _QUOTE:
        return _skip_string(text, position + 1, end)
    if first in (_OPEN_OBJECT, _OPEN_ARRAY):
        return _skip_nested(text, position, end)
    after = _skip(_WORD, text, position)
    if after >= end:
        return _ENDS
    return after if after > position else _WRONG


@compiled
def _digits(text, position, value, lost):  # type: ignore[no-untyped-def]
    """Append the digits at `position` to `value`: (value, position after, digits that did not fit)."""
    while _ZERO <= text[position] <= _NINE:
        if value <= _LAST_SAFE:
            value = value * 10 + (text[position] - _ZERO)
        else:
            lost += 1
        position += 1
    return value, position, lost


@compiled
def _power(text, position):  # type: ignore[no-untyped-def]
    """The power of ten in `e+3`, (0, position) without one."""
    if text[position] != _SMALL_E and text[position] != _LARGE_E:
        return 0, position
    position += 1
    negative = text[position] == _MINUS
    if negative or text[position] == _PLUS:
        position += 1
    value, position, lost = _digits(text, position, 0, 0)
    value = 100_000 if lost > 0 else min(value, 100_000)
    return (-value if negative else value), position


@compiled
def _scaled(value, exponent):  # type: ignore[no-untyped-def]
    """`value` times 10**exponent, halves rounded up: (result, fits)."""
    if value == 0 or exponent < -18:  # 10**19 does not fit; half of it does
        return (1 if exponent == -19 and value >= _HALF else 0), True
    while exponent > 0:
        if value > _LAST_SAFE:
            return 0, False
        value *= 10
        exponent -= 1
    divisor = 1
    while exponent < 0:
        divisor *= 10
        exponent += 1
    rest = value % divisor
    return value // divisor + (1 if rest >= divisor - rest else 0), True


@compiled
def _decimal(text, position, scale):  # type: ignore[no-untyped-def]
    """The number at `position` times 10**scale as an integer: (value, position after, good).

    Exact from the decimal digits, with no float between. Not good: no number, or beyond int64.
    """
    first = position + 1 if text[position] == _MINUS else position
    value, after, lost = _digits(text, first, 0, 0)
    exponent = scale + lost
    count = after - first
    if text[after] == _DOT:
        point = after + 1
        value, after, dropped = _digits(text, point, value, lost)
        count += after - point
        exponent -= after - point - (dropped - lost)
    power, after = _power(text, after)
    value, fits = _scaled(value, exponent + power)
    good = fits and count > 0 and not _WORD[text[after]]
    return (-value if first > position else value), after, good


@compiled
def _key(text, position, end):  # type: ignore[no-untyped-def]
    """Read `"key":` and the space around it: (position of the value, hash of the key).

    In place of the position `_ENDS`, `_WRONG`, or `_CLOSED` when the object ends here; then the
    second value is the position of its closing brace.
    """
    position = _skip(_SPACE_OR_COMMA, text, position)
    if text[position] != _QUOTE:
        closed = text[position] == _CLOSE_OBJECT and position < end
        return (_ENDS if position >= end else _CLOSED if closed else _WRONG), np.uint64(position)
    position, value = _hash_string(text, position + 1, end, _BASIS)
    if position < 0:
        return position, value
    position = skip_space(text, position)
    if text[position] != _COLON:
        return (_ENDS if position >= end else _WRONG), value
    position = skip_space(text, position + 1)
    return (_ENDS if position >= end else position), value


@compiled
def _number(text, position, end, scale, row, field, otherwise):  # type: ignore[no-untyped-def]
    """Read a number into row[field], `otherwise` when the value is none; position after, or negative."""
    number, after, good = _decimal(text, position, scale)
    row[field] = number if good else otherwise
    if not good:
        return skip_value(text, position, end)
    return after if after < end else _ENDS


@compiled
def _arguments(text, position, end, row):  # type: ignore[no-untyped-def]
    """Read the numbers of an `args` value into `row`; position after it, or negative."""
    for field in range(_DEVICE, _BYTES + 1):
        row[field] = MISSING
    if text[position] != _OPEN_OBJECT:
        return skip_value(text, position, end)
    position += 1
    while True:
        position, key = _key(text, position, end)
        if position < 0:
            return np.int64(key) + 1 if position == _CLOSED else position
        which = _find(_ARGUMENT_KEYS, key)
        if which >= 0:
            position = _number(text, position, end, 0, row, _ARGUMENT_FIELDS[which], MISSING)
        else:
            position = skip_value(text, position, end)
        if position < 0:
            return position


@compiled
def _text_member(text, position, end, which, row, spans, values, basis):  # type: ignore[no-untyped-def]
    """Read one of the first five members: its span and hash, or the number that stands for an id."""
    spans[which, 0] = spans[which, 1] = 0
    values[which] = basis
    if text[position] == _QUOTE:
        after, value = _hash_string(text, position + 1, end, basis)
        spans[which, 0] = position + 1
        spans[which, 1] = after - 1
        values[which] = value
        return after
    if which in (_IS_PID, _IS_TID):
        return _number(text, position, end, 0, row, _PID if which == _IS_PID else _TID, MISSING)
    return skip_value(text, position, end)


@compiled
def _event(text, position, end, row, spans, values, basis):  # type: ignore[no-untyped-def]
    """Read the event whose brace is at `position`; position after it, or negative."""
    row[:] = MISSING
    row[_START] = row[_DURATION] = _NO_TIME
    spans[:] = 0
    values[:] = basis
    position += 1
    while True:
        position, key = _key(text, position, end)
        if position < 0:
            return np.int64(key) + 1 if position == _CLOSED else position
        which = _find(_EVENT_KEYS, key)
        if which < 0:
            position = skip_value(text, position, end)
        elif which <= _IS_TID:
            position = _text_member(text, position, end, which, row, spans, values, basis)
        elif which == _IS_ARGS:
            position = _arguments(text, position, end, row)
        else:
            field = _START if which == _IS_TS else _DURATION
            position = _number(text, position, end, 3, row, field, _NO_TIME)
        if position < 0:
            return position


@compiled
def _complete(text, spans):  # type: ignore[no-untyped-def]
    """Is the phase "X"."""
    return spans[_IS_PH, 1] - spans[_IS_PH, 0] == 1 and text[spans[_IS_PH, 0]] == _LARGE_X


@compiled
def _usable(row):  # type: ignore[no-untyped-def]
    """Are both times within bounds."""
    return -MAX_TIME_NS <= row[_START] <= MAX_TIME_NS and 0 <= row[_DURATION] <= MAX_DURATION_NS


@compiled
def _intern(text, which, spans, values, state, names, slots, hashes, arena):  # type: ignore[no-untyped-def]
    """Number of the text of one member, adding it when new. Hash and length identify a text."""
    start = spans[which, 0]
    length = spans[which, 1] - start
    value = values[which] ^ (values[which] >> np.uint64(29))
    mask = np.uint64(slots.size - 1)
    slot = value & mask
    while slots[slot] >= 0:
        known = slots[slot]
        if hashes[slot] == value and names[known + 1] - names[known] == length:
            return np.int64(known)
        slot = (slot + np.uint64(1)) & mask
    number = state[_NAMES]
    used = state[_TEXT]
    for i in range(length):
        arena[used + i] = text[start + i]
    slots[slot] = number
    hashes[slot] = value
    names[number + 1] = used + length
    state[_NAMES] = number + 1
    state[_TEXT] = used + length
    return number


@compiled
def _store(text, row, spans, values, state, out, names, slots, hashes, arena):  # type: ignore[no-untyped-def]
    """Append a kept event to the output."""
    row[_NAME] = _intern(text, _IS_NAME, spans, values, state, names, slots, hashes, arena)
    if spans[_IS_PID, 0] > 0:
        row[_PID] = -2 - _intern(text, _IS_PID, spans, values, state, names, slots, hashes, arena)
    if spans[_IS_TID, 0] > 0:
        row[_TID] = -2 - _intern(text, _IS_TID, spans, values, state, names, slots, hashes, arena)
    at = state[_COUNT]
    for field in range(row.size):
        out[field, at] = row[field]
    state[_COUNT] = at + 1


@compiled
def _full(state, out, slots, arena, room):  # type: ignore[no-untyped-def]
    """Is there no place for another event with `room` bytes of text."""
    names = 2 * (state[_NAMES] + 3) > slots.size
    return names or state[_COUNT] >= out.shape[1] or state[_TEXT] + room > arena.size


@compiled
def scan(  # type: ignore[no-untyped-def]
    text, end, state, out, keep, seen, categories, codes, names, slots, hashes, arena, basis
):
    """Scan events from `state`'s position until the array closes, the text ends or room runs out.

    Args:
        text: uint8 buffer whose bytes from `end` on are at least `PADDING` zeros.
        state: int64 vector indexed by `State`; on return the position stands before an event.
        out: int64 (FIELDS, capacity).
        keep: bool per category code. seen: int64 per code, complete events met.
        categories, codes: `text_hash` of category names with `basis`, and their codes; the last
            code stands for any other category.
        names: int64 offsets into `arena`; slots, hashes: open-addressing table of power-of-two size.
        basis: start of the hash of texts, random so that no file can be built to collide.

    Returns:
        A `Status`.
    """
    row = np.empty(FIELDS, np.int64)
    spans = np.empty((5, 2), np.int64)
    values = np.empty(5, np.uint64)
    while True:
        start = _skip(_SPACE_OR_COMMA, text, state[_POSITION])
        state[_POSITION] = start
        if start >= end:
            return _MORE
        if text[start] == _CLOSE_ARRAY:
            state[_POSITION] = start + 1
            return _DONE
        event = text[start] == _OPEN_OBJECT
        after = _event(text, start, end, row, spans, values, basis) if event else skip_value(text, start, end)
        if after < 0:
            return _MORE if after == _ENDS else _BAD
        if event and _complete(text, spans):
            which = _find(categories, values[_IS_CAT])
            code = codes[which] if which >= 0 else seen.size - 1
            usable = _usable(row)
            if keep[code] and usable:
                if _full(state, out, slots, arena, after - start):
                    return _FULL
                row[_CATEGORY] = code
                _store(text, row, spans, values, state, out, names, slots, hashes, arena)
            state[_ODD] += keep[code] and not usable
            seen[code] += 1
        elif not event:
            state[_ODD] += 1
        state[_POSITION] = after


class NameTable:
    """The strings met so far, numbered from 0 in order of first use; grown by doubling."""

    def __init__(self) -> None:
        self.names: NDArray[np.int64] = np.zeros(2**12 + 2, np.int64)
        self.slots: NDArray[np.int32] = np.full(2**13, -1, np.int32)
        self.hashes: NDArray[np.uint64] = np.zeros(2**13, np.uint64)
        self.arena: NDArray[np.uint8] = np.empty(2**20, np.uint8)

    def grow(self, used_names: int, room: int) -> None:
        """Make room: twice the slots when half full, and at least `room` more bytes of text."""
        if 2 * (used_names + 3) > self.slots.size:
            filled = np.flatnonzero(self.slots >= 0)
            slots, hashes = self.slots[filled], self.hashes[filled]
            size = 2 * self.slots.size
            self.slots = np.full(size, -1, np.int32)
            self.hashes = np.zeros(size, np.uint64)
            _reinsert(slots, hashes, self.slots, self.hashes)
            names = np.zeros(size // 2 + 2, np.int64)
            names[: self.names.size] = self.names
            self.names = names
        used = int(self.names[used_names])
        if used + room > self.arena.size:
            arena = np.empty(2 * (used + room), np.uint8)
            arena[:used] = self.arena[:used]
            self.arena = arena

    def texts(self, count: int) -> list[bytes]:
        """The raw bytes of the first `count` strings, escapes as in the file."""
        data = self.arena.tobytes()
        return [data[self.names[i] : self.names[i + 1]] for i in range(count)]


@compiled
def _reinsert(numbers, values, slots, hashes):  # type: ignore[no-untyped-def]
    mask = np.uint64(slots.size - 1)
    for i in range(numbers.size):
        slot = values[i] & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = numbers[i]
        hashes[slot] = values[i]
