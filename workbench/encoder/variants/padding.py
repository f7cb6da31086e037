"""How a replay's values get into a captured buffer, without touching more rows than needed.

Each function has vLLM's signature of padding logics: (captured buffer, value of this batch), rows first.
"""

from collections.abc import Callable, MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Padding = Callable[[torch.Tensor, torch.Tensor], None]


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
        self._filled: MutableMapping[torch.Tensor, int] = (
            WeakTensorKeyDictionary()
        )  # captured buffer -> rows that may differ from zero
        self._held: MutableMapping[torch.Tensor, torch.Tensor] = (
            WeakTensorKeyDictionary()
        )  # captured buffer -> the value it holds

    def __call__(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Make `buffer` hold `value` followed by zeros."""
        if self._immutable and self._held.get(buffer) is value:
            return
        rows = value.shape[0]
        self._held.pop(buffer, None)  # a copy that raises leaves the buffer in doubt
        filled = self._filled.pop(buffer, buffer.shape[0])
        buffer[:rows].copy_(value, non_blocking=True)
        if rows < filled:
            buffer[rows:filled].zero_()
        self._filled[buffer] = rows
        if self._immutable:
            self._held[buffer] = value


class HeldOffsets:
    """`repeat_last`, skipped when the buffer already holds the value; values are never written after they were given.

    A value that is held is alive, so another tensor cannot be mistaken for it.
    """

    def __init__(self) -> None:
        self._held: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()

    def __call__(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Make `buffer` hold `value`, its last offset repeated."""
        if self._held.get(buffer) is value:
            return
        self._held.pop(buffer, None)
        repeat_last(buffer, value)
        self._held[buffer] = value
