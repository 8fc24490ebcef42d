"""Keys and values of attention layers, one object per sequence and layer.

Owns the tensors; is told row numbers and never decides one. Buffers are [kv heads, capacity, head size] and grow in
steps of 64 rows, so that a head's rows begin at the same memory alignment whatever the capacity is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEP = 64


def _round_up(rows: int) -> int:
    return -(-rows // STEP) * STEP


@dataclass(frozen=True)
class KVSpec:
    """An attention layer's cache. `window` None is full attention; w: a row sees itself and the w - 1 rows before."""

    kv_heads: int
    head_size: int
    window: int | None = None

    def make(self) -> KV:
        return KV(self)

    def bytes_per_row(self) -> int:
        return 2 * 4 * self.kv_heads * self.head_size


class KV:
    """Keys and values of rows [first, ...) of one sequence in one layer.

    Full attention keeps every row (first = 0). A window keeps what the next row can still see; older rows are dropped
    when the buffer is full, which moves `first` and never a length.
    """

    def __init__(self, spec: KVSpec):
        self.spec = spec
        self._first = 0
        self._keys = torch.empty(spec.kv_heads, 0, spec.head_size)
        self._values = torch.empty(spec.kv_heads, 0, spec.head_size)

    def reserve(self, committed: int, num_rows: int) -> None:
        """Make room for rows [committed, committed + num_rows)."""
        if committed + num_rows - self._first <= self._keys.shape[1]:
            return
        keep_from = self._first if self.spec.window is None else max(self._first, committed - self.spec.window + 1)
        needed = committed + num_rows - keep_from
        capacity = _round_up(max(needed, min(2 * needed, needed + 1024)))
        used = slice(keep_from - self._first, committed - self._first)
        self._keys, self._values = (self._moved(old, used, capacity) for old in (self._keys, self._values))
        self._first = keep_from

    @staticmethod
    def _moved(old: Tensor, used: slice, capacity: int) -> Tensor:
        new = old.new_empty(old.shape[0], capacity, old.shape[2])
        new[:, : used.stop - used.start] = old[:, used]
        return new

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv heads, head size] at rows [row, row + n)."""
        at = slice(row - self._first, row - self._first + len(keys))
        self._keys[:, at] = keys.transpose(0, 1)
        self._values[:, at] = values.transpose(0, 1)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows [start, stop), each [kv heads, n, head size], as views.

        `start` is raised to the oldest row that is kept.
        """
        at = slice(max(start - self._first, 0), stop - self._first)
        return self._keys[:, at], self._values[:, at]

    def commit(self, committed: int, num_rows: int, keep: int) -> None:
        """Rows behind committed + keep are simply overwritten by the next ones."""

    def save(self, rows: int) -> Any:
        """State at `rows` that a later forward destroys: nothing for full attention, the window otherwise."""
        if self.spec.window is None:
            return None
        keys, values = self.read(rows - self.spec.window + 1, rows)
        return keys.clone(), values.clone()

    def load(self, rows: int, saved: Any) -> None:
        """Go back to `rows`."""
        if saved is None:
            return
        keys, values = saved
        self._first = rows - keys.shape[1]
        self._keys, self._values = keys.clone(), values.clone()

    def copy(self, rows: int, saved: Any) -> KV:
        """A new object that holds the first `rows` rows."""
        twin = KV(self.spec)
        if saved is not None:
            twin.load(rows, saved)
        elif rows:
            twin.reserve(0, rows)
            keys, values = self.read(0, rows)
            twin._keys[:, :rows], twin._values[:, :rows] = keys, values
        return twin
