"""State of recurrent layers (gated delta net and its convolution), one object per sequence and layer.

A recurrent state cannot be cut back like a list of rows, so each provisional row leaves a snapshot, or the step that
led to it, and `commit` picks one. A prompt chunk is kept whole or not at all and leaves one snapshot, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreglance.ops.native import native_module

State = tuple[Tensor, ...]
# Cells of `address` behind the addresses of two pools, as csrc/kernels.h reads them: slots, a number, addresses.
CURRENT, BASE, PENDING, KEPT, STEPS = 2, 3, 4, 5, 6


@dataclass(frozen=True)
class RecurrentSpec:
    """A recurrent layer's cache: the shapes of its state tensors. All begin as zeros."""

    shapes: tuple[tuple[int, ...], ...]

    def make(self) -> Recurrent:
        return Recurrent(self)

    def step_size(self) -> int:
        """Numbers that native kernels need to repeat a row; 0 where none computes such a state."""
        if len(self.shapes) != 2 or len(self.shapes[1]) != 3:
            return 0
        heads, dk, dv = self.shapes[1]
        return heads * (1 + 2 * dk + dv)

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
    """State of one sequence in one layer: the committed one, and how to get to the one behind a provisional row.

        slots:   [ after row 0 | committed | after row 1 | after row 2 | ... ]

    Every state tensor has a pool of slots; committing a row names the slot that holds its snapshot. A forward that
    writes its states itself (`write`) leaves a snapshot of every tensor for each row that may be kept. Native kernels
    do so for the first tensor only. Of the second, [heads, dk, dv], they leave the state behind the last row, and of
    each row the step that led there; a state behind an earlier row is made by repeating the kept steps, with the same
    bits, when it is next needed. The pool of that tensor has three slots: the committed state or an earlier one, from
    which `PENDING` kept steps lead to it; the committed state as the kernels make it of those; the state behind the
    last row. `address` are the cells that they read.
    """

    def __init__(self, spec: RecurrentSpec):
        self.spec = spec
        self.address = np.zeros(8, np.int64)
        self._current = [0] * len(spec.shapes)  # slots
        self._kept: dict[int, int] = {}  # rows -> index of slot, of snapshots that were written one by one
        self._filled = 0  # rows that a kernel computed
        self._live = 0  # slot of the state behind the last of them
        self._pools = [torch.zeros(1, *shape) for shape in spec.shapes]
        self._steps = [
            torch.empty(0, spec.step_size()) for _ in range(2)
        ]  # kept ones, and those of the running forward
        self._point()

    def _point(self) -> None:
        """Tell the kernels where everything is."""
        cells = self.address
        cells[: min(2, len(self._pools))] = [pool.data_ptr() for pool in self._pools[:2]]
        cells[CURRENT], cells[BASE] = self._current[0], self._current[-1]
        cells[KEPT : STEPS + 1] = [steps.data_ptr() for steps in self._steps]

    def reserve(self, committed: int, num_rows: int) -> None:
        """A new forward begins: what an unfinished one left is void."""
        self._kept, self._filled = {}, 0

    def make_room(self, num_rows: int) -> None:
        """Room for a kernel's `num_rows` rows."""
        size = self.spec.step_size()
        if not size:
            return
        self._grow(0, num_rows + 1)
        self._grow(1, 3)
        if len(self._steps[0]) < num_rows:
            for place, old in enumerate(self._steps):
                self._steps[place] = torch.empty(num_rows, size)
                self._steps[place][: len(old)] = old
            self._point()

    def _grow(self, place: int, slots: int) -> None:
        old = self._pools[place]
        if len(old) < slots:
            self._pools[place] = old.new_zeros(slots, *old.shape[1:])
            self._pools[place][: len(old)] = old
            self._point()

    def read(self) -> State:
        """The committed state, until the next commit. Do not write into it."""
        if self.address[PENDING]:
            module = native_module()
            assert module is not None  # it left the steps
            module.call(module.delta_commit, self.address.ctypes.data, *self.spec.shapes[1])
            self._current[1] = _slot(0, self._current[1])
            self.address[PENDING] = 0
            self._point()
        return tuple(pool[slot] for pool, slot in zip(self._pools, self._current, strict=True))

    def write(self, num_rows: int, state: State) -> None:
        """The state after `num_rows` provisional rows."""
        index = len(self._kept)
        for place, tensor in enumerate(state):
            self._grow(place, index + 2)
            self._pools[place][_slot(index, self._current[place])] = tensor
        self._kept[num_rows] = index

    def filled(self, num_rows: int) -> None:
        """A kernel has computed the first `num_rows` rows."""
        self._filled, self._live = num_rows, _slot(1, self._current[1])

    def commit(self, committed: int, num_rows: int, keep: int) -> None:
        if keep in self._kept:
            self._current = [_slot(self._kept[keep], slot) for slot in self._current]
            self.address[PENDING] = 0
        elif 0 < keep <= self._filled:
            self._commit_filled(keep)
        elif keep:
            raise ValueError(
                f"a recurrent layer has no state after {keep} of {num_rows} rows; a prompt chunk is kept whole"
            )
        self._kept, self._filled = {}, 0
        self._point()

    def _commit_filled(self, keep: int) -> None:
        self._current[0] = _slot(keep - 1, self._current[0])
        if keep == self._filled:
            self._current[1] = self._live
            self.address[PENDING] = 0
            return
        if self.address[PENDING]:
            self._current[1] = _slot(0, self._current[1])
        self._steps.reverse()
        self.address[PENDING] = keep

    def save(self, rows: int) -> Any:
        return tuple(tensor.clone() for tensor in self.read())

    def load(self, rows: int, saved: Any) -> None:
        self.address[PENDING] = 0
        for tensor, old in zip(self.read(), saved, strict=True):
            tensor.copy_(old)
        self._kept, self._filled = {}, 0

    def piece(self, start: int, stop: int) -> State:
        """A copy of the committed state in main memory."""
        return tuple(tensor.to("cpu", copy=True) for tensor in self.read())


def _slot(index: int, current: int) -> int:
    """The slots but `current`, in order."""
    return index if index < current else index + 1
