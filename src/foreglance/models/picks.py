"""A target's output head and the picks from it, where nothing but temperature decides a pick: one native call, recorded
once for each number of rows.

A pick is a function of its row's logits, temperature, seed and number alone, and the kernel that makes it is the same
whether the head was recorded, run as it is, or run for other requests of the batch too. So it does not depend on depth,
company or the path by which a row came to be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreglance.batch import TILE
from foreglance.models.base import Target
from foreglance.models.plans import NotRecordable, Planned, Record, recording, signed
from foreglance.ops.native import Lines, NativeOps
from foreglance.request import SamplingParams

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """Picks from the next `num_rows` rows of logits, of tokens number `index` and on."""

    params: SamplingParams
    index: int
    num_rows: int


class Cells:
    """What `NativeOps.pick_rows` reads for `num_rows` rows, and where it leaves their tokens."""

    def __init__(self, num_rows: int):
        self.tokens, self.picks = torch.zeros(num_rows, dtype=torch.int64), np.zeros((1, num_rows), np.int64)
        self.numbers = np.zeros(1 + 3 * num_rows, np.int64)
        self._temperatures = self.numbers.view(np.float64)

    def fill(self, wanted: Sequence[Wanted]) -> None:
        at = 1
        for params, index, num_rows in wanted:
            for number in range(index, index + num_rows):
                self._temperatures[at] = params.temperature
                if params.temperature:
                    self.numbers[at + 1 : at + 3] = signed(params.seed), number
                at += 3


class PickPlan:
    """The calls for `num_rows` rows."""

    def __init__(self, ops: NativeOps, logits: Callable[[Tensor], Tensor], num_rows: int, width: int):
        self._ops, self._hidden, self._cells = ops, torch.empty(num_rows, width), Cells(num_rows)
        self._record = Record()
        with recording(self._record, ops):
            ops.pick_rows(logits(self._hidden), self._cells.tokens, self._cells.picks, self._cells.numbers)
        self.lines = Lines(self._record.calls, "output head and picks", num_rows)

    def run(self, hidden: Tensor, wanted: Sequence[Wanted]) -> list[int]:
        self._hidden.copy_(hidden)
        self._cells.fill(wanted)
        self._ops.run(self.lines)
        return self._cells.picks[0].tolist()


class Picker:
    """Picks from a target's states, for requests that pick plainly (`Sequence.picks_plainly`)."""

    def __init__(self, ops: NativeOps, logits: Callable[[Tensor], Tensor], width: int):
        self._ops, self._logits, self._width = ops, logits, width
        self._plans: dict[int, PickPlan | None] = {}

    @classmethod
    def of(cls, target: Target) -> Picker | None:
        """None for a target that does not run on native kernels."""
        ops = target.plans.ops if isinstance(target, Planned) else None
        return None if ops is None else cls(ops, target.logits, target.spec.hidden_size)

    def __call__(self, hidden: Tensor, wanted: Sequence[Wanted]) -> list[int]:
        """hidden [n, h] -> tokens [n]."""
        num_rows = len(hidden)
        if num_rows not in self._plans:
            self._plans[num_rows] = self._recorded(num_rows)
        plan = self._plans[num_rows]
        return self.among(self._logits(hidden), wanted) if plan is None else plan.run(hidden, wanted)

    def among(self, logits: Tensor, wanted: Sequence[Wanted]) -> list[int]:
        """logits float32 [n, vocab] -> tokens [n]."""
        cells = Cells(len(logits))
        cells.fill(wanted)
        self._ops.pick_rows(logits, cells.tokens, cells.picks, cells.numbers)
        return cells.picks[0].tolist()

    def _recorded(self, num_rows: int) -> PickPlan | None:
        if num_rows > TILE:
            return None
        try:
            return PickPlan(self._ops, self._logits, num_rows, self._width)
        except NotRecordable as error:
            log.info("picks are not recorded: logits compute %s outside the kernels", error)
            return None
