"""Multi-token prediction: a head trained with the target, one module re-used at every depth, with its own cache.

A row of the head needs the input that follows it, so row t is computed once input t + 1 is known: within a prompt chunk
all but the last row, after a pick also that one. Accepted tokens are computed again from the target's true hidden
states; rows made from guesses never outlive `propose`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foreglance.batch import TILE, InputSpec, Part
from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Memory, Settled
from foreglance.drafters.chains import Chain, ChainRunner, must_catch_up
from foreglance.drafters.rows import RowMap
from foreglance.models.base import DraftHead
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence


@dataclass
class Lane:
    """What the drafter keeps of a sequence: target states of rows [first, ...) that have no draft row yet."""

    sequence: Sequence
    map: RowMap
    first: int = 0
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return sum(len(states) for states in self.waiting)

    @property
    def ready(self) -> int:
        """Target rows below this have a known next input and a state."""
        return min(self.first + self.num_waiting, self.sequence.known - 1, self._prefill_end())

    def _prefill_end(self) -> int:
        """In prefill the next chunk's first input is known already, but a reused prefix may go on differently there,
        so the last row of a chunk waits for the next step."""
        return self.sequence.committed - 1 if self.sequence.in_prefill else self.sequence.known

    def receive(self, settled: Settled) -> None:
        """Queue the states of committed rows, which must be the next ones: a state paired with another row's input is
        the fault that nobody sees, since only acceptance suffers."""
        expected = self.first + self.num_waiting
        if settled.hidden is None or settled.first_row != expected:
            raise RuntimeError(f"states of rows from {settled.first_row} on, but row {expected} is next")
        self.waiting.append(settled.hidden)

    def due(self) -> Tensor:
        """Take the states of rows [first, ready)."""
        states = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
        count = self.ready - self.first
        self.first, self.waiting = self.ready, [states[count:]] if count < len(states) else []
        return states[:count]


class MtpDrafter:
    """A `DraftHead` as a drafter. All sequences share one policy per request and one batch per forward."""

    kind = "mtp"
    wants_hidden = True
    reads_target = False
    max_depth = MAX_DEPTH

    def __init__(self, head: DraftHead, capacity: int | None = None, row_map: type[RowMap] = RowMap):
        self._head = head
        self._row_map = row_map
        self._store = CacheStore(head.spec.caches, capacity)
        self._runner = ChainRunner(head, self._store, head.spec.vocab_size)
        self._lanes: dict[int, Lane] = {}
        self.stores = (self._store,)

    def admit(self, sequence: Sequence, memory: Memory | None) -> None:
        spec, policy = self._head.spec, sequence.request.speculation.images
        lane = Lane(sequence, self._row_map(sequence, policy, spec.rule, spec.position_of, spec.placeholder))
        if memory is None:
            self._store.open(sequence.id)
        else:
            assert memory.cache is not None and memory.checkpoint is not None
            self._store.adopt(sequence.id, memory.cache, memory.checkpoint)
            lane.first, states = memory.notes
            lane.waiting = [states] if len(states) else []
        self._lanes[sequence.id] = lane

    def retire(self, sequence: Sequence) -> None:
        if self._lanes.pop(sequence.id, None) is not None:
            self._store.release(sequence.id)

    def remember(self, sequence: Sequence) -> Memory:
        lane = self._lanes[sequence.id]
        states = torch.cat(lane.waiting) if lane.waiting else torch.empty(0, self._head.spec.hidden_size)
        return Memory(
            self.key(sequence),
            self._store[sequence.id],
            self._store.checkpoint(sequence.id),
            (lane.first, states),
            lane.first + 1,
        )

    def key(self, sequence: Sequence) -> str:
        """Draft rows of another policy are other rows."""
        return f"{self.kind}/{sequence.request.speculation.images}"

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 1. take over the target's states of the rows that were committed
        for one in settled:
            self._lanes[one.sequence.id].receive(one)
        # 2. who must catch up now: those that draft, those in prefill, and those that waited long
        due = [one for one in settled if one.depth or self._must_catch_up(one.sequence)]
        inputs = self._inputs(due)
        # 3. catch up and make the first guess in one batch
        parts = [self._due_part(self._lanes[one.sequence.id], one.depth) for one in due]
        wanted = {one.sequence.id: one for one in due}
        chains = self._runner.begin([part for part in parts if part is not None], wanted, inputs)
        # 4. deeper guesses, on rows that are given back
        marks = {chain.sequence.id: self._store.checkpoint(chain.sequence.id) for chain in chains}
        self._runner.grow(chains, self._next_part, inputs)
        for sequence, mark in marks.items():
            self._store.restore(sequence, mark)
        return {chain.sequence.id: tuple(chain.tokens) for chain in chains}

    def _must_catch_up(self, sequence: Sequence) -> bool:
        return must_catch_up(sequence, self._lanes[sequence.id].num_waiting)

    def _inputs(self, due: Many[Settled]) -> InputSpec:
        return self._head.spec.inputs(not any(one.sequence.request.speculation.images == "gap" for one in due))

    def _due_part(self, lane: Lane, depth: int) -> Part | None:
        first, ready = lane.first, lane.ready
        if ready <= first:
            return None
        rows = lane.map.rows(first, ready)
        states = lane.due()
        if not len(rows):
            return None
        embeds = lane.sequence.embeddings(rows.image, rows.offset)
        scored = 1 if depth and not lane.sequence.in_prefill else 0
        hidden = states if len(rows) == len(states) else states[torch.from_numpy(rows.target_row - first)]
        return Part(
            lane.sequence.id,
            rows.token_ids,
            rows.is_image,
            rows.positions,
            scored,
            len(rows) > TILE,
            embeds,
            hidden,
            in_image=rows.in_image,
        )

    def _next_part(self, chain: Chain) -> Part:
        """The row after the last: input is the last guess, state is the head's own."""
        sequence = chain.sequence.id
        row = self._store[sequence].rows
        return Part(
            sequence,
            np.array(chain.tokens[-1:], np.int64),
            np.zeros(1, bool),
            self._lanes[sequence].map.positions(row, row + 1),
            1,
            False,
            None,
            chain.hidden,
        )
