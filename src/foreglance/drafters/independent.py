"""An independent draft: a whole text model of its own, with the target's vocabulary and a cache of its own.

It sees the text alone. Image rows are left out and its positions are its own and consecutive, equal on every axis if
its family has several. A row needs nothing but its token, so rows made from guesses stay if the target accepts just
these tokens; else the cache goes back to where they part.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np

from foreglance.batch import TILE, Part
from foreglance.cache.prefix import Hit, Memory
from foreglance.cache.store import CacheStore, Checkpoint
from foreglance.drafters.base import Settled
from foreglance.drafters.chains import MAX_WAITING, Chain, ChainRunner, must_catch_up
from foreglance.models.base import Target
from foreglance.prompt import Positions
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence


class TextRows:
    """Target rows to draft rows: draft row i is the i-th row whose input is a token."""

    def __init__(self, sequence: Sequence):
        is_image = sequence.rows.is_image
        self._sequence = sequence
        self._prompt = sequence.rows.token_ids[~is_image]
        self._before = np.concatenate([[0], np.cumsum(~is_image)])  # text rows of target rows [0, t)

    def count(self, target_rows: int) -> int:
        """Draft rows for target rows [0, target_rows)."""
        prompt = min(target_rows, self._sequence.num_prompt)
        return int(self._before[prompt]) + target_rows - prompt

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids int64 of draft rows [start, stop), which must be known."""
        n = len(self._prompt)
        tail = self._sequence.generated[max(start - n, 0) : max(stop - n, 0)]
        return np.concatenate([self._prompt[start:stop], np.array(tail, np.int64)])


@dataclass
class Lane:
    """What the drafter keeps of a sequence: the guesses whose rows are the last ones of its cache, and the cache before
    each of them."""

    sequence: Sequence
    text: TextRows
    guessed: list[int] = field(default_factory=list)
    marks: list[Checkpoint] = field(default_factory=list)

    @property
    def ready(self) -> int:
        """Draft rows whose token is known. What a later request may reuse holds none that the target has not."""
        sequence = self.sequence
        settled = sequence.in_prefill or sequence.finish is not None
        return self.text.count(sequence.committed if settled else sequence.known)


class IndependentDrafter:
    """A loaded target as the draft of another one, one batch for all sequences. `vocab_size` is the other one's."""

    kind = "model"
    wants_hidden = False
    reads_target = False
    max_depth = MAX_DEPTH

    def __init__(self, model: Target, vocab_size: int, capacity: int | None = None):
        self._spec = model.spec
        self._store = CacheStore(model.spec.caches, capacity)
        self._runner = ChainRunner(model, self._store, vocab_size)
        self._lanes: dict[int, Lane] = {}
        self.stores = (self._store,)
        self.keys = (f"{self.kind}/{model.spec.name}",)

    def key(self, sequence: Sequence) -> str:
        return self.keys[0]

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        sequence.report = replace(sequence.report, model=self._spec.name)
        if hit is None:
            self._store.open(sequence.id)
        else:
            self._store.adopt(sequence.id, hit.drafts[0])
        self._lanes[sequence.id] = Lane(sequence, TextRows(sequence))

    def retire(self, sequence: Sequence) -> None:
        if self._lanes.pop(sequence.id, None) is not None:
            self._store.release(sequence.id)

    def remember(self, sequence: Sequence) -> Memory:
        return Memory(self.key(sequence), (self._store[sequence.id],))

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 1. rows of guesses that stood are kept, the others are given back
        for one in settled:
            self._settle(self._lanes[one.sequence.id])
        # 2. who must catch up now: those that draft, those in prefill, and those that waited long
        due = [self._within_context(one) for one in settled if one.depth or self._must_catch_up(one.sequence)]
        due = [one for one in due if one.sequence.undrafted is None]
        # 3. catch up in one batch; one that waited long does so in pieces
        while behind := [one for one in due if self._num_waiting(one.sequence.id) > MAX_WAITING]:
            self._runner.forward([self._part(one.sequence.id, MAX_WAITING, 0) for one in behind], self._spec.inputs)
        chains = self._catch_up([one for one in due if self._num_waiting(one.sequence.id)])
        # 4. guess, on rows that stay until the target has spoken
        self._runner.grow(chains, self._next_part, self._spec.inputs)
        return {chain.sequence.id: tuple(chain.tokens) for chain in chains}

    def _settle(self, lane: Lane) -> None:
        """Keep the rows whose tokens the target picked too."""
        first = self._store[lane.sequence.id].rows - len(lane.guessed)
        known = lane.text.tokens(first, max(first, lane.ready)).tolist()
        pairs = zip(lane.guessed, known, strict=False)
        stood = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if stood < len(lane.guessed):
            self._store.restore(lane.sequence.id, lane.marks[stood])
        lane.guessed, lane.marks = [], []

    def _num_waiting(self, sequence: int) -> int:
        return self._lanes[sequence].ready - self._store[sequence].rows

    def _must_catch_up(self, sequence: Sequence) -> bool:
        return must_catch_up(sequence, self._num_waiting(sequence.id))

    def _within_context(self, one: Settled) -> Settled:
        """As deep as the draft's own context allows; a text that outgrew it is not drafted for any more."""
        lane = self._lanes[one.sequence.id]
        room = self._spec.context - lane.ready
        if room < 0:
            one.sequence.undrafted = f"the text outgrew the {self._spec.context} rows of draft model {self._spec.name}"
        return one._replace(depth=max(0, min(one.depth, room + 1)))

    def _catch_up(self, due: Many[Settled]) -> list[Chain]:
        parts = []
        for one in due:
            scored = 1 if one.depth and not one.sequence.in_prefill else 0
            parts.append(self._part(one.sequence.id, self._num_waiting(one.sequence.id), scored))
        return self._runner.begin(parts, {one.sequence.id: one for one in due}, self._spec.inputs)

    def _part(self, sequence: int, num_rows: int, num_scored: int) -> Part:
        """The next rows of known tokens."""
        first = self._store[sequence].rows
        return self._rows(sequence, self._lanes[sequence].text.tokens(first, first + num_rows), num_scored)

    def _next_part(self, chain: Chain) -> Part:
        """The row of the last guess; the cache before it is noted."""
        lane = self._lanes[chain.sequence.id]
        lane.marks.append(self._store.checkpoint(chain.sequence.id))
        lane.guessed.append(chain.tokens[-1])
        return self._rows(chain.sequence.id, np.array(chain.tokens[-1:], np.int64), 1)

    def _rows(self, sequence: int, token_ids: np.ndarray, num_scored: int) -> Part:
        """A token beyond the draft's vocabulary (one of the target's padding) is token 0 to it."""
        n, first = len(token_ids), self._store[sequence].rows
        return Part(
            sequence,
            np.where(token_ids < self._spec.vocab_size, token_ids, 0),
            np.zeros(n, bool),
            Positions.run(first, n, self._spec.rule.axes),
            num_scored,
            n > TILE,
        )
