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
# Cells of `address` as csrc/kernels.h reads them: addresses of inputs, states and steps; the first input in use, the
# state to begin with, the first step to repeat and how many, whether the state behind those is wanted, whether else
# that behind the last row is.
WINDOW, STATES, STEPS, AT, BASE, FIRST, PENDING, RENEW, EAGER = range(9)
SPARE = 24  # rows that inputs and steps have room for beyond those in use, before they are moved to the front
REPEATED = 4  # steps that are rather repeated than their state written: a state is large, a step is not
SMALL = 1 << 18  # bytes of a layer's state that stay in the caches: it is written with every forward


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
        return heads * (2 * dk + dv + 16)

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

    A forward that writes its states itself (`write`) leaves one for each row that may be kept. Native kernels compute
    rows from what `Stepped` holds, which is made when they first do.
    """

    def __init__(self, spec: RecurrentSpec):
        self.spec = spec
        self.address = np.zeros(9, np.int64)
        self._state = tuple(torch.zeros(shape) for shape in spec.shapes)
        self._stepped: Stepped | None = None  # in place of `_state`
        self._kept: dict[int, State] = {}  # rows -> state behind them
        self._filled = 0  # rows that a kernel computed

    def reserve(self, committed: int, num_rows: int) -> None:
        """A new forward begins: what an unfinished one left is void."""
        if self._kept:
            self._kept = {}
        self._filled = 0

    def make_room(self, num_rows: int) -> None:
        """Room for a kernel's `num_rows` rows."""
        if self._stepped is None:
            if not self.spec.step_size() or native_module() is None:
                return
            self._stepped = Stepped(self.spec, self._state, self.address)
            self._state = ()
        self._stepped.make_room(num_rows)

    def read(self) -> State:
        """The committed state, until the next commit. Do not write into it."""
        return self._state if self._stepped is None else self._stepped.read()

    def write(self, num_rows: int, state: State) -> None:
        """The state after `num_rows` provisional rows. It is copied when it is committed and must not change before."""
        self._kept[num_rows] = state

    def filled(self, num_rows: int) -> None:
        """A kernel has computed the first `num_rows` rows."""
        self._filled = num_rows

    def commit(self, committed: int, num_rows: int, keep: int) -> None:
        if keep in self._kept:
            self._set(self._kept[keep])
        elif 0 < keep <= self._filled:
            assert self._stepped is not None
            self._stepped.commit(keep, self._filled)
        elif keep:
            raise ValueError(
                f"a recurrent layer has no state after {keep} of {num_rows} rows; a prompt chunk is kept whole"
            )
        self.reserve(committed, num_rows)

    def _set(self, state: State) -> None:
        if self._stepped is not None:
            self._stepped.load(state)
        else:
            self._state = tuple(tensor.clone() for tensor in state)

    def save(self, rows: int) -> Any:
        return tuple(tensor.clone() for tensor in self.read())

    def load(self, rows: int, saved: Any) -> None:
        self._set(saved)
        self.reserve(rows, 0)

    def piece(self, start: int, stop: int) -> State:
        """A copy of the committed state in main memory."""
        return tuple(tensor.to("cpu", copy=True) for tensor in self.read())


class Stepped:
    """Inputs of a convolution, and a state [heads, dk, dv] with the steps that lead on from it.

        inputs:  [ gone | width - 1 before the running rows | running rows | free ]
        steps:   [ gone | of committed rows, behind the state | of running rows | free ]

    Committing rows moves the borders and copies nothing. A state is so much larger than a step that kernels rather
    repeat a few committed steps from an older state than write a new one; from `REPEATED` steps on they do both, into
    the other one of two states. A small state is written by every forward, as it is behind the last row; only if not
    all rows are kept, steps are repeated. A state is computed by the same instructions whenever that is, with the same
    bits.
    """

    def __init__(self, spec: RecurrentSpec, state: State, address: np.ndarray):
        (self._tail, channels), of_state = spec.shapes
        self._cells = memoryview(address)
        self._address = address.ctypes.data
        self._window = torch.empty(self._tail + SPARE, channels)
        self._states = torch.empty(2, *of_state)
        self._steps = torch.empty(SPARE, spec.step_size())
        self._rooms = len(self._window) - self._tail, len(self._steps)
        self._cells[STATES] = self._states.data_ptr()
        self._cells[EAGER] = self._states[0].nbytes < SMALL
        self._cells[WINDOW], self._cells[STEPS] = self._window.data_ptr(), self._steps.data_ptr()
        self.load(state)

    def load(self, state: State) -> None:
        tail, of_state = state
        self._window[: self._tail] = tail
        self._states[0] = of_state
        cells = self._cells
        cells[AT] = cells[BASE] = cells[FIRST] = cells[PENDING] = cells[RENEW] = 0

    def make_room(self, num_rows: int) -> None:
        cells = self._cells
        at, first, pending = cells[AT], cells[FIRST], cells[PENDING]
        inputs, steps = self._rooms
        if at + num_rows > inputs or first + pending + num_rows > steps:
            self._move(num_rows)
        cells[RENEW] = pending >= REPEATED

    def _move(self, num_rows: int) -> None:
        """What is in use to the front, of larger memory if need be."""
        cells = self._cells
        self._window = _moved(self._window, cells[AT], self._tail, num_rows)
        self._steps = _moved(self._steps, cells[FIRST], cells[PENDING], num_rows)
        self._rooms = len(self._window) - self._tail, len(self._steps)
        cells[WINDOW], cells[STEPS] = self._window.data_ptr(), self._steps.data_ptr()
        cells[AT] = cells[FIRST] = 0

    def commit(self, keep: int, num_rows: int) -> None:
        """Keep the first of `num_rows` rows of the last forward of a kernel."""
        cells = self._cells
        cells[AT] += keep
        if cells[RENEW]:
            self._renewed()
            cells[PENDING] = keep
            return
        cells[PENDING] += keep
        if keep == num_rows and cells[EAGER]:
            self._renewed()

    def _renewed(self) -> None:
        """The state behind the steps that were to be repeated is there."""
        cells = self._cells
        cells[BASE] = 1 - cells[BASE]
        cells[FIRST] += cells[PENDING]
        cells[PENDING] = cells[RENEW] = 0

    def read(self) -> State:
        cells = self._cells
        if cells[PENDING]:
            module = native_module()
            assert module is not None  # it left the steps
            cells[RENEW] = 1
            module.call(module.delta_commit, self._address, *self._states.shape[1:])
            self._renewed()
        at = cells[AT]
        return self._window[at : at + self._tail], self._states[cells[BASE]]


def _moved(rows: Tensor, first: int, count: int, more: int) -> Tensor:
    """Rows [first, first + count) in front, with room for `more` behind them."""
    kept = rows[first : first + count]
    if count + more > len(rows):
        new = rows.new_empty(count + SPARE + more, rows.shape[1])
        new[:count] = kept
        return new
    rows[:count] = kept.clone()
    return rows
