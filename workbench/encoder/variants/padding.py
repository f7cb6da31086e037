"""How a replay's values get into a captured buffer, without touching more rows than needed.

Each function has vLLM's signature of padding logics: (captured buffer, value of this batch), rows first.

What a buffer holds is noted on the tensor object itself: the note ends with the buffer, and the buffer of a graph that
is captured anew begins without one.
"""

from collections.abc import Callable

import torch

Padding = Callable[[torch.Tensor, torch.Tensor], None]

# Attribute of a captured buffer: (its rows that may differ from zero, the value it holds where that is remembered).
# A value that is remembered is alive, so another tensor cannot be mistaken for it.
_NOTE = "workbench_note"
_Note = tuple[int, torch.Tensor | None]


def _note_of(buffer: torch.Tensor) -> _Note:
    """Return the buffer's note; without one, any row may differ from zero."""
    note: _Note | None = getattr(buffer, _NOTE, None)
    return (buffer.shape[0], None) if note is None else note


def repeat_last(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy offsets and let the rest repeat the last one: sequences of length zero, never a negative length."""
    rows = value.shape[0]
    buffer[:rows].copy_(value, non_blocking=True)
    if rows < buffer.shape[0]:
        buffer[rows:].copy_(value[-1:].expand(buffer.shape[0] - rows), non_blocking=True)


class NarrowCopy:
    """Copy rows, and zero only what an earlier replay left behind them. What the buffer holds is as with vLLM.

    Args:
        immutable: values are never written after they were given, so one that the buffer already holds is not
            copied again.
    """

    def __init__(self, immutable: bool) -> None:
        self._immutable = immutable

    def __call__(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Make `buffer` hold `value` followed by zeros."""
        filled, held = _note_of(buffer)
        if held is value:
            return
        setattr(buffer, _NOTE, None)  # a copy that raises leaves the buffer in doubt
        rows, room = value.shape[0], buffer.shape[0]
        (buffer if rows == room else buffer.narrow(0, 0, rows)).copy_(value, non_blocking=True)
        if rows < filled:
            buffer.narrow(0, rows, filled - rows).zero_()
        setattr(buffer, _NOTE, (rows, value if self._immutable else None))


def held_offsets(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """`repeat_last`, skipped when the buffer already holds `value`, which is never written after it was given."""
    if _note_of(buffer)[1] is value:
        return
    setattr(buffer, _NOTE, None)
    repeat_last(buffer, value)
    setattr(buffer, _NOTE, (buffer.shape[0], value))
