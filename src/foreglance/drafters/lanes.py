"""What a draft head's module keeps of each sequence: its rows in a store, and states that wait for an input.

A row of a head needs an input that comes later, so row t is computed once input t + shift is known (`rows.RowMap`).
Until then the state that it is fed waits here. Knows nothing of guesses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from foreglance.batch import TILE, InputSpec, Part
from foreglance.cache.prefix import Hit, Memory, Waiting
from foreglance.cache.store import CacheStore
from foreglance.drafters.rows import DraftRows, RowMap
from foreglance.models.base import DraftHead
from foreglance.request import IMAGE_POLICIES
from foreglance.sequence import Sequence


class Lane:
    """One sequence's: states of target rows [first, first + num_waiting) that have no draft row yet.

    States are lent to it by `receive`; those that still wait when a drafter has done its round are copied (`hold`),
    since the next step may write over them.
    """

    def __init__(self, sequence: Sequence, map: RowMap, width: int):
        self.sequence, self.map, self.width, self.first = sequence, map, width, 0
        self._none = self._lent = torch.empty(0, width)
        self._address = 0
        self._held = torch.empty(0, width)  # rows [_begin, _end) of it wait, before those that are lent
        self._begin = self._end = 0

    def resume(self, first: int, states: Tensor) -> None:
        """Begin with states of rows from `first` on that another sequence left."""
        self.first, self._lent = first, states

    @property
    def num_waiting(self) -> int:
        return self._end - self._begin + self._lent.shape[0]

    @property
    def ready(self) -> int:
        """Target rows below this have a known input and a state."""
        return min(self.first + self.num_waiting, self._known() - self.map.shift)

    @property
    def is_behind_the_prompt(self) -> bool:
        """Whether its next rows are rows of generated tokens."""
        return self.map.is_behind_the_prompt(self.first)

    @property
    def inputs_from(self) -> int:
        """The first target row whose input is still to be read."""
        return self.first + self.map.shift

    def _known(self) -> int:
        """In prefill the next chunk's first inputs are known already, but a reused prefix may go on differently there,
        so the last rows of a chunk wait for the next step: no row depends on what a checkpoint does not hold."""
        return self.sequence.committed if self.sequence.in_prefill else self.sequence.known

    def receive(self, first_row: int, states: Tensor | None) -> None:
        """Queue the states of rows from `first_row` on, which must be the next ones: a state paired with another row's
        input is the fault that nobody sees, since only acceptance suffers."""
        expected = self.first + self.num_waiting
        if states is None or first_row != expected:
            raise RuntimeError(f"states of rows from {first_row} on, but row {expected} is next")
        self._lent = torch.cat([self._lent, states]) if self._lent.shape[0] else states

    def due(self) -> Tensor:
        """Take the states of rows [first, ready)."""
        return self._taken(max(self.ready - self.first, 0))

    def _taken(self, count: int) -> Tensor:
        states = self.rest()
        self.drop(count)
        return states if count == states.shape[0] else states[:count]

    def drop(self, count: int) -> None:
        """The first states have been used."""
        self.first += count
        from_lent = count - (self._end - self._begin)
        if from_lent < 0:
            self._begin += count
            return
        self._begin = self._end = 0
        if from_lent:
            self._lent = self._lent[from_lent:] if from_lent < self._lent.shape[0] else self._none

    def take(self, num_rows: int, draft_row: int) -> tuple[list[int], int, Tensor]:
        """Take the states of the next rows, all behind the prompt and below `ready`, of which the first will be
        `draft_row`; -> their tokens, the first one's coordinate and the states."""
        at = self.first + self.map.shift - self.sequence.num_prompt
        return self.sequence.generated[at : at + num_rows], self.map.coordinate(draft_row), self._taken(num_rows)

    def rest(self) -> Tensor:
        """All states that wait [num_waiting, width]."""
        if self._begin == self._end:
            return self._lent
        held = self._held[self._begin : self._end]
        return torch.cat([held, self._lent]) if self._lent.shape[0] else held

    def hold(self) -> None:
        """Copy what is lent."""
        count = self._lent.shape[0]
        if not count:
            return
        if self._end + count > self._held.shape[0]:
            more = torch.empty(max(64, 2 * (self._end + count)), self.width)
            more[: self._end] = self._held[: self._end]
            self._held, self._address = more, more.data_ptr()
        row = 4 * self.width
        ctypes.memmove(self._address + self._end * row, self._lent.contiguous().data_ptr(), count * row)
        self._end, self._lent = self._end + count, self._none

    def part(self, rows: DraftRows, states: Tensor, num_scored: int) -> Part:
        """Draft rows with the state that each is fed."""
        return Part(
            self.sequence.id,
            rows.token_ids,
            rows.is_image,
            rows.positions,
            num_scored,
            len(rows) > TILE,
            self.sequence.embeddings(rows.image, rows.offset),
            states,
            in_image=rows.in_image,
        )


class Lanes:
    """One module's lanes and store. `shift` is that of its rows."""

    def __init__(self, head: DraftHead, capacity: int | None, row_map: type[RowMap] = RowMap, shift: int = 1):
        self._spec, self._row_map, self._shift = head.spec, row_map, shift
        self._lanes: dict[int, Lane] = {}
        self.store = CacheStore(head.spec.caches, capacity)

    def __getitem__(self, sequence: Sequence) -> Lane:
        return self._lanes[sequence.id]

    def admit(self, sequence: Sequence, hit: Hit | None, place: int = 0) -> None:
        """`place` is the module's among those of its head."""
        spec, policy = self._spec, sequence.request.speculation.images
        row_map = self._row_map(sequence, policy, spec.rule, spec.position_of, spec.placeholder, self._shift)
        lane = Lane(sequence, row_map, spec.hidden_size)
        if hit is None:
            self.store.open(sequence.id)
        else:
            self.store.adopt(sequence.id, hit.drafts[place])
            lane.resume(hit.waiting[place].first, hit.waiting[place].states)
        self._lanes[sequence.id] = lane

    def retire(self, sequence: Sequence) -> None:
        if self._lanes.pop(sequence.id, None) is not None:
            self.store.release(sequence.id)


def remember(key: str, modules: Iterable[Lanes], sequence: Sequence) -> Memory:
    """The memory of a head with these modules."""
    lanes = [(lanes[sequence], lanes.store[sequence.id]) for lanes in modules]
    waiting = tuple(Waiting(lane.first, lane.rest()) for lane, _ in lanes)
    return Memory(key, tuple(cache for _, cache in lanes), waiting, min(lane.inputs_from for lane, _ in lanes))


def memory_key(kind: str, sequence: Sequence) -> str:
    """Draft rows of another policy are other rows."""
    return f"{kind}/{sequence.request.speculation.images}"


def memory_keys(kind: str) -> tuple[str, ...]:
    """Of all policies."""
    return tuple(f"{kind}/{policy}" for policy in IMAGE_POLICIES)


def inputs_of(head: DraftHead, sequences: Iterable[Sequence]) -> InputSpec:
    """What a batch of these sequences must obey: only the policy that leaves holes may leave holes."""
    return head.spec.inputs(not any(sequence.request.speculation.images == "gap" for sequence in sequences))
