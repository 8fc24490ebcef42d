"""All guesses of a chain of draft modules for one sequence as one native call.

Each module computes its rows behind the prompt, the last of which guesses; its states go on to the next module, and the
guess to the rows of all modules behind it. Guesses beyond the last module come from one more row of it each. The
modules' forwards are those that `Plans` recorded; which of them follow each other depends on how many rows each owes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreglance.batch import Few, Holder
from foreglance.models.plans import (
    Guessing,
    NotRecordable,
    Plan,
    Record,
    move_rows,
    owned,
    record_guess,
    recording,
    signed,
)
from foreglance.ops.native import Gathered, Lines, NativeOps

log = logging.getLogger(__name__)


class ModuleRows(NamedTuple):
    """What a module computes behind the rows of `holder`: rows with these known inputs, the first at `coordinate` on
    every axis, and one more for each guess before its own. The states that its first rows are fed have `waited` [w, h];
    the rest are those that the module before makes. `own`: tokens that the sequence adds to those it guesses from."""

    holder: Holder
    tokens: Sequence[int]
    coordinate: int
    waited: Tensor
    own: Gathered | None


class ChainedGuesses:
    """The guesses of modules one behind the other. `deepest`: the most guesses at a time."""

    def __init__(self, ops: NativeOps, modules: Sequence[Guessing], axes: int, deepest: int):
        self._ops, self._modules, self._axes = ops, modules, axes
        self._token, self._picks = torch.zeros(1, dtype=torch.int64), np.zeros((deepest, 1), np.int64)
        self._cells, self._nothing = np.zeros(4, np.int64), np.zeros(1, np.int64)
        self._own = [owned(module, 1) for module in modules]
        self._guesses: dict[tuple[int, int], tuple[Plan, Record]] = {}  # by module and rows
        self._lines: dict[tuple[int, ...], tuple[list[Plan], Lines]] = {}  # by the rows of each module
        self._onward: tuple[Plan, Lines] | None = None
        self.refused: str | None = None  # what guesses compute that no kernel does

    def plan(self, counts: Sequence[int], depth: int) -> list[Plan] | None:
        """The forwards of modules that owe so many rows, for guesses down to `depth`; None while one of them is not
        recorded."""
        found = self._lines.get(tuple(counts))
        plans = [module.plans.plan(n) for module, n in zip(self._modules, counts, strict=False)]
        further = self._modules[-1].plans.plan(1)
        if None in plans or self.refused is not None or (depth > len(counts) and further is None):
            return None
        try:
            if found is None or found[0] != plans:
                self._lines[tuple(counts)] = found = plans, self._recorded(plans)
            if depth > len(counts) and (self._onward is None or self._onward[0] is not further):
                self._onward = further, self._recorded_onward(further)
        except NotRecordable as error:
            self.refused = str(error)
            log.info("guesses are not recorded: logits compute %s outside the kernels", error)
            return None
        return plans

    def run(self, rows: Sequence[ModuleRows], depth: int, temperature: float, seed: int, index: int) -> list[int]:
        """Guesses, the first of which is for token number `index`. `plan` has been asked for these rows."""
        cells = self._cells
        cells[0], cells[2], cells[3] = 0, signed(seed), index
        cells[1:2].view(np.float64)[0] = temperature
        for place, (holder, tokens, coordinate, waited, own) in enumerate(rows):
            plan = self._modules[place].plans.plan(len(tokens) + place)
            assert plan is not None
            plan.place(tokens, coordinate, holder)
            move_rows(waited, plan.hidden_address)
            of_head = self._own[place]
            if of_head is not None:
                of_head.set(0, own)
        counts = tuple(len(one.tokens) + place for place, one in enumerate(rows))
        self._ops.run(self._lines[counts][1])
        if depth > len(rows):
            assert self._onward is not None
            last, (further, onward) = rows[-1], self._onward
            further.place((int(self._picks[len(rows) - 1, 0]),), last.coordinate + counts[-1], last.holder, counts[-1])
            move_rows(self._lines[counts][0][-1].output[-1:], further.hidden_address)
            self._ops.run(onward, depth - len(rows))
        return self._picks[:depth, 0].tolist()

    def _recorded(self, plans: Sequence[Plan]) -> Lines:
        calls, still = [], torch.empty(self._axes, 0, dtype=torch.int64)
        for place, plan in enumerate(plans):
            guess, linked = self._guess(place, plan), Record()
            calls += plan.record.calls
            self._cells[0] = 0  # what is recorded is run, too
            with recording(linked, self._ops):
                if place + 1 < len(plans):
                    behind = plans[place + 1]
                    assert plan.output is not None and behind.hidden is not None
                    self._ops.copied(plan.output, behind.hidden[-len(plan.output) :])
                self._ops.advance(self._cells, Few((), self._nothing), still)
                for further, later in enumerate(plans[place + 1 :], place + 1):
                    self._pass_on(later.token_ids[len(later.token_ids) - further + place :])
            calls += guess.calls + linked.calls
        return Lines(calls, "rows and guesses of all", len(plans[0].ids))

    def _recorded_onward(self, plan: Plan) -> Lines:
        """One more row of the last module, and the guess from it."""
        guess, linked = self._guess(len(self._modules) - 1, plan), Record()
        self._cells[0] = 0
        assert plan.output is not None and plan.hidden is not None
        with recording(linked, self._ops):
            self._ops.copied(plan.output, plan.hidden)
            self._ops.advance(self._cells, Few((), plan.table), plan.positions)
            self._pass_on(plan.token_ids)
        return Lines([*plan.record.calls, *guess.calls, *linked.calls], "one guess more", 1)

    def _guess(self, place: int, plan: Plan) -> Record:
        """Logits of a forward's last row and the pick from them."""
        num_rows = len(plan.ids)
        found = self._guesses.get((place, num_rows))
        if found is None or found[0] is not plan:
            assert plan.output is not None
            self._cells[0] = 0
            module, state = self._modules[place], plan.output[-1:]
            record = record_guess(self._ops, module, state, self._token, self._picks, self._cells, self._own[place])
            self._guesses[place, num_rows] = found = plan, record
        return found[1]

    def _pass_on(self, token_ids: Tensor) -> None:
        """The guess to the first of these, bit by bit."""
        self._ops.copied(self._token.view(torch.float32).view(1, 2), token_ids[:1].view(torch.float32).view(1, 2))
