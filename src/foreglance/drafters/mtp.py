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

from foreglance.batch import TILE, Batch, Part, pack
from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Memory, Settled
from foreglance.drafters.rows import RowMap
from foreglance.models.base import DraftHead
from foreglance.request import MAX_DEPTH
from foreglance.sampling import pick
from foreglance.sequence import Sequence

MAX_WAITING = 256  # committed rows that may wait for their draft rows while nothing is drafted


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


@dataclass
class Chain:
    """One sequence's guesses in this round: the state that the next depth is fed, and the tokens so far."""

    lane: Lane
    depth: int
    hidden: Tensor
    tokens: list[int] = field(default_factory=list)


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
        due = [one for one in settled if one.depth or self._must_catch_up(self._lanes[one.sequence.id])]
        # 3. catch up and make the first guess in one batch
        chains = self._catch_up(due)
        # 4. deeper guesses, one row per sequence and depth, on rows that are given back
        marks = {chain.lane.sequence.id: self._store.checkpoint(chain.lane.sequence.id) for chain in chains}
        while alive := [chain for chain in chains if len(chain.tokens) < chain.depth]:
            self._deepen(alive)
        for sequence, mark in marks.items():
            self._store.restore(sequence, mark)
        return {chain.lane.sequence.id: tuple(chain.tokens) for chain in chains}

    def _must_catch_up(self, lane: Lane) -> bool:
        if lane.sequence.finish is not None:
            return False
        return lane.sequence.in_prefill or not lane.sequence.counters.steps or lane.num_waiting > MAX_WAITING

    def _catch_up(self, due: Many[Settled]) -> list[Chain]:
        parts, wanted = [], {}
        for one in due:
            lane = self._lanes[one.sequence.id]
            part = self._due_part(lane, one.depth)
            if part is not None:
                parts.append(part)
                wanted[one.sequence.id] = one.depth
        if not parts:
            return []
        batch, hidden = self._forward(parts)
        last = hidden[batch.scored]
        owners = [part for part in batch.parts if part.num_scored]
        chains = [
            Chain(self._lanes[part.sequence], wanted[part.sequence], last[i : i + 1]) for i, part in enumerate(owners)
        ]
        self._guess(chains, last)
        return chains

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

    def _deepen(self, chains: Many[Chain]) -> None:
        parts = [self._chain_part(chain) for chain in chains]
        _, hidden = self._forward(parts)
        for i, chain in enumerate(chains):
            chain.hidden = hidden[i : i + 1]
        self._guess(chains, hidden)

    def _chain_part(self, chain: Chain) -> Part:
        """The row after the last: input is the last guess, state is the head's own."""
        sequence = chain.lane.sequence.id
        row = self._store[sequence].rows
        return Part(
            sequence,
            np.array(chain.tokens[-1:], np.int64),
            np.zeros(1, bool),
            chain.lane.map.positions(row, row + 1),
            1,
            False,
            None,
            chain.hidden,
        )

    def _forward(self, parts: Many[Part]) -> tuple[Batch, Tensor]:
        strict = not any(self._lanes[part.sequence].sequence.request.speculation.images == "gap" for part in parts)
        batch = pack(parts, self._head.spec.inputs(strict), self._store.held())
        for part in batch.parts:
            self._store.reserve(part.sequence, part.num_rows)
        hidden = self._head.forward(batch, {part.sequence: self._store[part.sequence] for part in batch.parts})
        for part in batch.parts:
            self._store.commit(part.sequence, part.num_rows, part.positions.at(-1))
        return batch, hidden

    def _guess(self, chains: Many[Chain], hidden: Tensor) -> None:
        """Pick with the target's own rule and noise: that is what makes a sampled guess worth something."""
        if not chains:
            return
        logits = self._head.logits(hidden).numpy()
        for row, chain in zip(logits, chains, strict=True):
            sequence = chain.lane.sequence
            generated = (*sequence.generated, *chain.tokens)
            prompt = sequence.rows.token_ids if sequence.request.sampling.repetition_penalty != 1 else ()
            chain.tokens.append(pick(row, sequence.request.sampling, len(generated), prompt, generated))
