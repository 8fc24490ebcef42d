"""Keys and values of attention layers, one object per sequence and layer.

Owns the tensors; is told row numbers and never decides one. Buffers are [kv heads, capacity, head size] and grow in
steps of 64 rows, so that a head's rows begin at the same memory alignment whatever the capacity is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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

    def piece_shapes(self, num_rows: int) -> tuple[tuple[int, ...], ...]:
        """Of a piece of `num_rows` rows: keys and values of all of them, or of those that the next row can see."""
        kept = num_rows if self.window is None else min(num_rows, self.window - 1)
        return ((self.kv_heads, kept, self.head_size),) * 2

    def merge(self, pieces: Sequence[tuple[Tensor, ...]], num_rows: int) -> tuple[Tensor, ...]:
        """Pieces that follow each other as one of `num_rows` rows."""
        kept = self.piece_shapes(num_rows)[0][1]
        keys, values = (torch.cat([piece[i] for piece in pieces], 1) for i in (0, 1))
        if keys.shape[1] == kept:
            return keys, values
        return tuple(whole[:, whole.shape[1] - kept :].clone() for whole in (keys, values))

    def join(self, pieces: Sequence[tuple[Tensor, ...]], num_rows: int) -> KV:
        """A cache of `num_rows` rows that begins with these pieces, from the first row on."""
        layer = KV(self)
        layer.fill(pieces, num_rows)
        return layer


class KV:
    """Keys and values of rows [first, ...) of one sequence in one layer.

    Full attention keeps every row (first = 0). A window keeps what the next row can still see; older rows are dropped
    when the buffer is full, which moves `first` and never a length. `address` are cells for native kernels: addresses
    of keys and values, numbers from one head to the next, and `first`.
    """

    def __init__(self, spec: KVSpec):
        self.spec = spec
        self.address = np.zeros(4, np.int64)
        self._set(0, *(torch.empty(spec.kv_heads, 0, spec.head_size) for _ in range(2)))

    def _set(self, first: int, keys: Tensor, values: Tensor) -> None:
        self._first, self._keys, self._values = first, keys, values
        self.address[:] = keys.data_ptr(), values.data_ptr(), keys.shape[1] * keys.shape[2], first

    def reserve(self, committed: int, num_rows: int) -> None:
        """Make room for rows [committed, committed + num_rows)."""
        if committed + num_rows - self._first <= self._keys.shape[1]:
            return
        keep_from = self._first if self.spec.window is None else max(self._first, committed - self.spec.window + 1)
        needed = committed + num_rows - keep_from
        capacity = _round_up(max(needed, min(2 * needed, needed + 1024)))
        used = slice(keep_from - self._first, committed - self._first)
        self._set(keep_from, *(self._moved(old, used, capacity) for old in (self._keys, self._values)))

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
        self._set(rows - keys.shape[1], keys.clone(), values.clone())

    def fill(self, pieces: Sequence[tuple[Tensor, ...]], num_rows: int) -> None:
        """Hold `num_rows` rows of which these pieces, from the first row on, have at least those that are kept."""
        lacking = self.spec.piece_shapes(num_rows)[0][1]
        self._set(num_rows - lacking, self._keys, self._values)
        self.reserve(num_rows - lacking, lacking)
        for keys, values in reversed(pieces):
            n = min(lacking, keys.shape[1])
            self._keys[:, lacking - n : lacking] = keys[:, keys.shape[1] - n :]
            self._values[:, lacking - n : lacking] = values[:, values.shape[1] - n :]
            lacking -= n
        if lacking:
            raise ValueError(f"pieces of a cache of {num_rows} rows lack {lacking} of them")

    def piece(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Copies in main memory of the keys and values of committed rows [start, stop), see `KVSpec.piece_shapes`."""
        kept = self.spec.piece_shapes(stop - start)[0][1]
        return tuple(rows.to("cpu", copy=True) for rows in self.read(stop - kept, stop))
