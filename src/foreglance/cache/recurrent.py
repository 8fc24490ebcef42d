"""State of recurrent layers (gated delta net and its convolution), one object per sequence and layer.

A recurrent state cannot be cut back like a list of rows, so each provisional row leaves a snapshot and `commit` picks
one. A prompt chunk is kept whole or not at all and leaves one snapshot, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = tuple[Tensor, ...]
CURRENT = 2  # cell of `address` that holds the slot of the committed state


@dataclass(frozen=True)
class RecurrentSpec:
    """A recurrent layer's cache: the shapes of its state tensors. All begin as zeros."""

    shapes: tuple[tuple[int, ...], ...]

    def make(self) -> Recurrent:
        return Recurrent(self)

    def bytes_per_row(self) -> int:
        return 0

    def piece_shapes(self, num_rows: int) -> tuple[tuple[int, ...], ...]:
        """Of a piece of rows, however many: the state behind the last of them."""
        return self.shapes

    def merge(self, pieces: Sequence[State], num_rows: int) -> State:
        """Pieces that follow each other as one."""
        return pieces[-1]

    def join(self, pieces: Sequence[State], num_rows: int) -> Recurrent:
        """A cache of `num_rows` rows that begins with these pieces."""
        layer = self.make()
        layer.load(num_rows, pieces[-1])
        return layer


class Recurrent:
    """State of one sequence in one layer: the committed one, and a snapshot per provisional row.

        slots:   [ after row 0 | committed | after row 1 | after row 2 | ... ]

    Every state tensor has a pool of slots; committing a row names the slot that holds its snapshot. `address` are cells
    for native kernels: addresses of the first two pools, and the slot of the committed state.
    """

    def __init__(self, spec: RecurrentSpec):
        self.spec = spec
        self.address = np.zeros(4, np.int64)
        self._current = 0
        self._kept: dict[int, int] = {}  # rows -> slot, of snapshots that were written one by one
        self._filled = 0  # rows whose snapshots a kernel wrote into the slots in order
        self._set(tuple(torch.zeros(1, *shape) for shape in spec.shapes))

    def _set(self, pools: State) -> None:
        self._pools = pools
        self.address[: min(2, len(pools))] = [pool.data_ptr() for pool in pools[:2]]

    def _stand(self, slot: int) -> None:
        self._current = slot
        self.address[CURRENT] = slot

    def reserve(self, committed: int, num_rows: int) -> None:
        """A new forward begins: snapshots of an unfinished one are void."""
        self._kept, self._filled = {}, 0

    def make_room(self, num_rows: int) -> None:
        """Slots for a snapshot of each of `num_rows` rows."""
        slots = len(self._pools[0])
        if slots > num_rows:
            return
        pools = tuple(old.new_zeros(num_rows + 1, *old.shape[1:]) for old in self._pools)
        for old, new in zip(self._pools, pools, strict=True):
            new[:slots] = old
        self._set(pools)

    def read(self) -> State:
        """The committed state, until the next commit. Do not write into it."""
        return tuple(pool[self._current] for pool in self._pools)

    def write(self, num_rows: int, state: State) -> None:
        """The state after `num_rows` provisional rows."""
        used = len(self._kept)
        self.make_room(used + 1)
        slot = self._slot(used)
        for pool, tensor in zip(self._pools, state, strict=True):
            pool[slot] = tensor
        self._kept[num_rows] = slot

    def filled(self, num_rows: int) -> None:
        """A kernel has written the snapshots of the first `num_rows` rows, each into its slot."""
        self._filled = num_rows

    def _slot(self, index: int) -> int:
        """The slots but the one of the committed state, in order."""
        return index if index < self._current else index + 1

    def commit(self, committed: int, num_rows: int, keep: int) -> None:
        if keep in self._kept:
            self._stand(self._kept[keep])
        elif 0 < keep <= self._filled:
            self._stand(self._slot(keep - 1))
        elif keep:
            raise ValueError(
                f"a recurrent layer has no state after {keep} of {num_rows} rows; a prompt chunk is kept whole"
            )
        self._kept, self._filled = {}, 0

    def save(self, rows: int) -> Any:
        return tuple(tensor.clone() for tensor in self.read())

    def load(self, rows: int, saved: Any) -> None:
        for tensor, old in zip(self.read(), saved, strict=True):
            tensor.copy_(old)
        self._kept, self._filled = {}, 0

    def piece(self, start: int, stop: int) -> State:
        """A copy of the committed state in main memory."""
        return tuple(tensor.to("cpu", copy=True) for tensor in self.read())
