"""Stations 4 to 6: the rows of a step as one batch, through the target, and the target's picks.

Decides nothing about lengths, text or guesses, and names no family. Most steps are rows of generated tokens and guesses
whose picks take nothing but temperature: those are one native call without a batch (`models.steps`), once it is
recorded.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foreglance.batch import Batch, BatchError, Part, pack
from foreglance.cache.store import CacheStore
from foreglance.models.base import Caches, Target
from foreglance.models.picks import Picker, Wanted
from foreglance.models.steps import FewRows, Steps
from foreglance.request import LogProb
from foreglance.sampling import log_prob, pick
from foreglance.scheduler import Work
from foreglance.sequence import Sequence

log = logging.getLogger(__name__)
Refuse = Callable[[Sequence, str], None]  # ends a sequence with an error


@dataclass
class Picks:
    """The target's picks of one sequence's scored rows, and their log-probabilities if they were asked for."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProb] = field(default_factory=list)


class Computed(NamedTuple):
    """What the target made of the sequences of a step: for each work its first flat row and its picks; and the states
    [rows, h] of all rows, which the next step may write over."""

    works: list[Work]
    firsts: list[int]
    picks: list[Picks]
    hidden: Tensor | None


class TargetRunner:
    """Runs a target over a store for all sequences of a step. `steps`: whole steps in native calls; None: none."""

    def __init__(self, target: Target, store: CacheStore):
        self._target, self._store = target, store
        self.picker, self.steps = Picker.of(target), Steps.of(target)

    def run(self, works: list[Work], refuse: Refuse) -> Computed:
        """Reserve and write provisional rows; commits none. Sequences whose rows break a rule are left out."""
        return self._at_once(works) or self._by_stations(works, refuse)

    def _at_once(self, works: list[Work]) -> Computed | None:
        """All in one native call; None where a step is not recorded as a whole, or a pick takes more."""
        if self.steps is None:
            return None
        num_rows = 0
        for work in works:
            if not work.decodes or not work.sequence.picks_at_once:
                return None
            num_rows += work.num_rows
        plan = self.steps.plan(num_rows)
        if plan is None:
            return None
        rows, firsts, first = [], [], 0
        for work in works:
            sequence = work.sequence
            self._store.reserve(sequence.id, work.num_rows)
            tokens, params = (sequence.generated[-1], *sequence.draft), sequence.request.sampling
            coordinate, index = sequence.coordinate(work.start), len(sequence.generated)
            rows.append(FewRows(self._store[sequence.id], tokens, coordinate, params, index))
            firsts.append(first)
            first += work.num_rows
        found = plan.run(rows)
        picks = [Picks(found[at : at + work.num_rows]) for at, work in zip(firsts, works, strict=True)]
        return Computed(works, firsts, picks, plan.states)

    def _by_stations(self, works: Many[Work], refuse: Refuse) -> Computed:
        batch, by_id = self._pack(works, refuse)  # 4
        if batch is None:
            return Computed([], [], [], None)
        hidden = self._target.forward(batch, self._reserve(batch))  # 5  writes provisional rows only
        picks = self._pick(batch, by_id, hidden)  # 6
        ids = [part.sequence for part in batch.parts]
        return Computed([by_id[id] for id in ids], list(batch.starts), [picks[id] for id in ids], hidden)

    def _pack(self, works: Many[Work], refuse: Refuse) -> tuple[Batch | None, dict[int, Work]]:
        """A validated batch; a sequence at fault is refused and left out."""
        by_id, parts = {work.sequence.id: work for work in works}, {}
        for work in works:
            try:
                parts[work.sequence.id] = self._part(work)
            except Exception as error:
                log.exception("a sequence has no rows for the step")
                refuse(by_id.pop(work.sequence.id).sequence, f"{type(error).__name__}: {error}")
        while by_id:
            try:
                return pack([parts[id] for id in by_id], self._target.spec.inputs, self._store.held()), by_id
            except BatchError as error:
                refuse(by_id.pop(error.sequence).sequence, str(error))
        return None, {}

    @staticmethod
    def _part(work: Work) -> Part:
        sequence, drafts = work.sequence, work.sequence.draft
        tokens, image, offset = sequence.inputs(work.start, min(work.stop, sequence.known))
        part = Part(
            sequence.id,
            tokens,
            image >= 0,
            sequence.positions(work.start, work.stop),
            num_scored=int(work.stop == sequence.num_prompt) if work.chunk else 1 + len(drafts),
            chunk=work.chunk,
            embeds=sequence.embeddings(image, offset),
        )
        return part if work.chunk or not drafts else part.with_drafts(drafts)

    def _reserve(self, batch: Batch) -> Caches:
        for part in batch.parts:
            self._store.reserve(part.sequence, part.num_rows)
        return {part.sequence: self._store[part.sequence] for part in batch.parts}

    def _pick(self, batch: Batch, works: Mapping[int, Work], hidden: Tensor) -> dict[int, Picks]:
        """The target's picks of each sequence's scored rows, at least up to the first that refutes a draft."""
        scored = [(part, works[part.sequence].sequence) for part in batch.parts if part.num_scored]
        if not scored:
            return {part.sequence: Picks() for part in batch.parts}
        states = hidden if batch.num_scored == batch.num_rows else hidden[batch.scored]
        picks = self._pick_plainly(scored, states) or self._pick_each(scored, self._target.logits(states))
        return picks if len(picks) == len(batch.parts) else {part.sequence: Picks() for part in batch.parts} | picks

    def _pick_plainly(self, scored: Many[tuple[Part, Sequence]], states: Tensor) -> dict[int, Picks] | None:
        """Output head and picks in one native call; None where a request needs its logits."""
        if self.picker is None or not all(sequence.picks_at_once for _, sequence in scored):
            return None
        tokens = iter(self.picker(states, [_wanted(part, sequence) for part, sequence in scored]))
        return {part.sequence: Picks(list(itertools.islice(tokens, part.num_scored))) for part, _ in scored}

    def _pick_each(self, scored: Many[tuple[Part, Sequence]], logits: Tensor) -> dict[int, Picks]:
        """Sequence by sequence. Who picks plainly has its picks made by the same kernel as in company of its kind."""
        picks, row = {}, 0
        for part, sequence in scored:
            own, row = logits[row : row + part.num_scored], row + part.num_scored
            tokens = None
            if self.picker is not None and sequence.picks_plainly:
                tokens = self.picker.among(own, [_wanted(part, sequence)])
            picks[part.sequence] = _pick_rows(sequence, part.drafts, own.numpy(), tokens)
        return picks


def _wanted(part: Part, sequence: Sequence) -> Wanted:
    return Wanted(sequence.request.sampling, len(sequence.generated), part.num_scored)


def _pick_rows(sequence: Sequence, drafts: Many[int], logits: np.ndarray, tokens: Many[int] | None = None) -> Picks:
    """Row i is picked with the history that it would really have: what was generated and the drafts before it. `tokens`
    are the picks if they were made already."""
    params, picks = sequence.request.sampling, Picks()
    prompt = sequence.rows.token_ids if params.repetition_penalty != 1 else ()
    for i, row in enumerate(logits):
        history = (*sequence.generated, *drafts[:i])
        token = tokens[i] if tokens else pick(row, params, len(history), prompt, history, sequence.allowed(history))
        picks.tokens.append(token)
        if params.logprobs is not None:
            picks.logprobs.append(log_prob(row, token, params.logprobs))
        if i < len(drafts) and token != drafts[i]:
            break
    return picks
