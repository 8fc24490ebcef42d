"""A whole step of few rows in one native call: forward, output head and picks, once each of them is recorded.

For rows of generated tokens and guesses of requests that pick plainly (`Sequence.picks_plainly`), which is what nearly
all steps are. They follow each other by construction, so no batch is made of them. The kernels, and with them all bits,
are those of `Plans` and `Picker`, which compute everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreglance.cache.store import SequenceCache
from foreglance.models.base import Target
from foreglance.models.plans import NotRecordable, Plan, Planned, Plans, Record, recording, signed
from foreglance.ops.native import Lines, NativeOps
from foreglance.request import SamplingParams

log = logging.getLogger(__name__)


class FewRows(NamedTuple):
    """Rows that a sequence computes behind those that `cache` holds, where room is reserved for them: `tokens`, the
    first one at `coordinate` on every axis. Their picks are those of tokens number `index` and on."""

    cache: SequenceCache
    tokens: Sequence[int]
    coordinate: int
    params: SamplingParams
    index: int


class StepPlan:
    """The calls for so many rows, and the buffers that they read as memory. Raises `NotRecordable`."""

    def __init__(self, ops: NativeOps, plan: Plan, logits: Callable[[Tensor], Tensor], read_as: Mapping[int, int]):
        assert plan.output is not None
        self._ops, self.forward, self._read_as, num_rows = ops, plan, read_as, len(plan.ids)
        self._tokens, picks = torch.zeros(num_rows, dtype=torch.int64), np.zeros((1, num_rows), np.int64)
        cells = np.zeros(1 + 3 * num_rows, np.int64)
        self._record = Record()
        with recording(self._record, ops):
            ops.pick_rows(logits(plan.output), self._tokens, picks, cells)
        self._lines = Lines([*plan.record.calls, *self._record.calls], "forward, output head and picks", num_rows)
        self._ids, self._coordinates = memoryview(plan.ids), [memoryview(axis) for axis in plan.coords]
        self._table, self._picks = memoryview(plan.table), memoryview(picks[0])
        self._cells, self._temperatures = memoryview(cells), memoryview(cells.view(np.float64))

    @property
    def states(self) -> Tensor:
        """[rows, h] of the last step, until the next one of so many rows."""
        assert self.forward.output is not None
        return self.forward.output

    def run(self, rows: Sequence[FewRows]) -> list[int]:
        """-> a pick for each row."""
        ids, coordinates, table, cells, temperatures = (
            self._ids, self._coordinates, self._table, self._cells, self._temperatures,
        )  # fmt: skip
        row, part, pick = 0, 1, 1
        table[0] = len(rows)
        for cache, tokens, coordinate, params, index in rows:
            cache.make_room(len(tokens))
            table[part], table[part + 1], table[part + 2] = row, len(tokens), cache.rows
            table[part + 3] = cache.addresses
            part += 4
            temperature = params.temperature
            seed = signed(params.seed) if temperature else 0
            if self._read_as:
                tokens = [self._read_as.get(token, token) for token in tokens]
            for number, token in enumerate(tokens):
                ids[row] = token
                for axis in coordinates:
                    axis[row] = coordinate + number
                temperatures[pick], cells[pick + 1], cells[pick + 2] = temperature, seed, index + number
                row += 1
                pick += 3
        self._ops.run(self._lines)
        for cache, tokens, *_ in rows:
            cache.filled(len(tokens))
        return self._picks.tolist()


class Steps:
    """A target's step plans, by number of rows."""

    def __init__(self, plans: Plans, ops: NativeOps, logits: Callable[[Tensor], Tensor]):
        self._forwards, self._ops, self._logits = plans, ops, logits
        self._plans: dict[int, StepPlan] = {}
        self._refused = False

    @classmethod
    def of(cls, target: Target) -> Steps | None:
        """None for a target that does not run on native kernels."""
        if not isinstance(target, Planned) or target.plans.ops is None:
            return None
        return cls(target.plans, target.plans.ops, target.logits)

    def plan(self, num_rows: int) -> StepPlan | None:
        """None while the forward of so many rows is not recorded, or if it or the output head cannot be."""
        forward, found = self._forwards.plan(num_rows), self._plans.get(num_rows)
        if forward is None or self._refused:
            return None
        if found is None or found.forward is not forward:
            found = self._recorded(forward, num_rows)
        return found

    def _recorded(self, forward: Plan, num_rows: int) -> StepPlan | None:
        try:
            self._plans[num_rows] = StepPlan(self._ops, forward, self._logits, self._forwards.read_as)
        except NotRecordable as error:
            log.info("steps are not recorded as a whole: logits compute %s outside the kernels", error)
            self._refused = True
        return self._plans.get(num_rows)
