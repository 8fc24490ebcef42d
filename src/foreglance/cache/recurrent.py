"""State of recurrent layers (gated delta net and its convolution), one object per sequence and layer.

A recurrent state cannot be cut back like a list of rows, so each provisional row leaves a snapshot and `commit` picks
one. A prompt chunk is kept whole or not at all and leaves one snapshot, at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, ...]  # never written in place once it is here


@dataclass(frozen=True)
class RecurrentSpec:
    """A recurrent layer's cache: the shapes of its state tensors. All begin as zeros."""

    shapes: tuple[tuple[int, ...], ...]

    def make(self) -> Recurrent:
        return Recurrent(self)

    def bytes_per_row(self) -> int:
        return 0


class Recurrent:
    """State of one sequence in one layer: the committed one, and a snapshot per provisional row."""

    def __init__(self, spec: RecurrentSpec):
        self.spec = spec
        self._state: State = tuple(torch.zeros(shape) for shape in spec.shapes)
        self._snapshots: dict[int, State] = {}

    def reserve(self, committed: int, num_rows: int) -> None:
        """A new forward begins: snapshots of an unfinished one are void."""
        self._snapshots = {}

    def read(self) -> State:
        """The committed state. Do not write into it."""
        return self._state

    def write(self, num_rows: int, state: State) -> None:
        """The state after `num_rows` provisional rows."""
        self._snapshots[num_rows] = state

    def commit(self, committed: int, num_rows: int, keep: int) -> None:
        if keep:
            if keep not in self._snapshots:
                raise ValueError(
                    f"a recurrent layer has no state after {keep} of {num_rows} rows; a prompt chunk is kept whole"
                )
            self._state = self._snapshots[keep]
        self._snapshots = {}

    def save(self, rows: int) -> Any:
        return self._state

    def load(self, rows: int, saved: Any) -> None:
        self._state, self._snapshots = saved, {}

    def copy(self, rows: int, saved: Any) -> Recurrent:
        twin = Recurrent(self.spec)
        twin.load(rows, saved)
        return twin
