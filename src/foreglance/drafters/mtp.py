"""Multi-token prediction: a head trained with the target, one module re-used at every depth, with its own cache.

A row of the head needs the input that follows it, so row t is computed once input t + 1 is known: within a prompt chunk
all but the last row, after a pick also that one. Accepted tokens are computed again from the target's true hidden
states; rows made from guesses never outlive `propose`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from foreglance.batch import TILE, Part
from foreglance.cache.prefix import Hit, Memory
from foreglance.drafters.base import Settled
from foreglance.drafters.chains import Chain, ChainRunner, Owing, must_catch_up
from foreglance.drafters.lanes import Lane, Lanes, inputs_of, memory_key, memory_keys, remember
from foreglance.drafters.rows import RowMap
from foreglance.models.base import DraftHead
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence


class MtpDrafter:
    """A `DraftHead` as a drafter. All sequences share one policy per request and one batch per forward."""

    kind = "mtp"
    wants_hidden = True
    reads_target = False
    max_depth = MAX_DEPTH
    keys = memory_keys("mtp")

    def __init__(self, head: DraftHead, capacity: int | None = None, row_map: type[RowMap] = RowMap):
        self._head = head
        self._lanes = Lanes(head, capacity, row_map)
        self._store = self._lanes.store
        self._runner = ChainRunner(head, self._store, head.spec.vocab_size)
        self.stores = (self._store,)

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        self._lanes.admit(sequence, hit)

    def retire(self, sequence: Sequence) -> None:
        self._lanes.retire(sequence)
        self._runner.retire(sequence)

    def remember(self, sequence: Sequence) -> Memory:
        return remember(self.key(sequence), [self._lanes], sequence)

    def key(self, sequence: Sequence) -> str:
        return memory_key(self.kind, sequence)

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 1. take over the target's states of the rows that were committed
        for one in settled:
            self._lanes[one.sequence].receive(one.first_row, one.hidden)
        guesses = self._guesses(settled)
        # 5. states whose input is not known yet, or of those who rest
        for one in settled:
            self._lanes[one.sequence].hold()
        return guesses

    def _guesses(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 2. who must catch up now: those that draft, those in prefill, and those that waited long
        due = [one for one in settled if one.depth or self._must_catch_up(one.sequence)]
        owing = [found for one in due if (found := self._owing(one)) is not None]
        guesses = self._at_once(owing)
        if len(guesses) == len(due):
            return guesses
        # who cannot be served so yet computes as many rows as are recorded then
        names = {one.sequence.id for one in owing}
        first = [] if guesses else [one for one in due if one.sequence.id in names]
        for group in (first, [one for one in due if one.sequence.id not in names]):
            guesses |= self._in_batches(group) if group else {}
        return guesses

    def _owing(self, one: Settled) -> Owing | None:
        """None for who is not behind its prompt, or does not pick plainly, or has nothing to guess from."""
        sequence, lane = one.sequence, self._lanes[one.sequence]
        num_rows = lane.ready - lane.first
        if not one.depth or not sequence.picks_plainly or not 0 < num_rows <= TILE:
            return None
        return Owing(sequence, num_rows, one.depth, lane.take) if lane.map.is_behind_the_prompt(lane.first) else None

    def _at_once(self, owing: Many[Owing]) -> dict[int, tuple[int, ...]]:
        """Steps 3 and 4 in native calls; of nobody if that cannot be done."""
        return (self._runner.guess_at_once(owing) if owing else None) or {}

    def _in_batches(self, due: Many[Settled]) -> dict[int, tuple[int, ...]]:
        inputs = inputs_of(self._head, [one.sequence for one in due])
        # 3. catch up, a tile of few rows at a time
        parts = [self._due_part(self._lanes[one.sequence], one.depth) for one in due]
        wanted = {one.sequence.id: one for one in due}
        chains = self._runner.begin([part for part in parts if part is not None], wanted, inputs)
        # 4. guess, on rows that are given back
        marks = {chain.sequence.id: self._store.checkpoint(chain.sequence.id) for chain in chains}
        self._runner.guess_by_itself(chains, self._next_position)
        self._runner.grow(chains, self._next_part, inputs)
        for sequence, mark in marks.items():
            self._store.restore(sequence, mark)
        return {chain.sequence.id: tuple(chain.tokens) for chain in chains}

    def _must_catch_up(self, sequence: Sequence) -> bool:
        return must_catch_up(sequence, self._lanes[sequence].num_waiting)

    def _due_part(self, lane: Lane, depth: int) -> Part | None:
        first, ready = lane.first, lane.ready
        if ready <= first:
            return None
        rows = lane.map.rows(first, ready)
        states = lane.due()
        if not len(rows):
            return None
        hidden = states if len(rows) == len(states) else states[torch.from_numpy(rows.target_row - first)]
        return lane.part(rows, hidden, 1 if depth and not lane.sequence.in_prefill else 0)

    def _next_position(self, chain: Chain) -> np.ndarray:
        row = self._store[chain.sequence.id].rows
        return self._lanes[chain.sequence].map.positions(row, row + 1).coords[:, 0]

    def _next_part(self, chain: Chain) -> Part:
        """The row after the last: input is the last guess, state is the head's own."""
        row = self._store[chain.sequence.id].rows
        return Part(
            chain.sequence.id,
            np.array(chain.tokens[-1:], np.int64),
            np.zeros(1, bool),
            self._lanes[chain.sequence].map.positions(row, row + 1),
            1,
            False,
            None,
            chain.hidden,
        )
