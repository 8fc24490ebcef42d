"""A draft that reads the target's cache (Gemma-4's assistant): no rows of its own, nothing to catch up or to give back.

It comes after commit, so the target's cache ends at the last verified row and holds no rejected one. Images cost it
nothing: their keys and values are there like any others. A reused prefix needs no memory, since the target computes at
least one row of every request and its state is what a guess starts from.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from foreglance.cache.kv import KV
from foreglance.cache.prefix import Hit
from foreglance.cache.store import CacheStore, SequenceCache
from foreglance.drafters.base import Settled, Stateless
from foreglance.drafters.chains import Chain, extend
from foreglance.models.plans import Reading, ReadingAtOnce
from foreglance.models.reading import Lent, Reader
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence


class SharedCacheDrafter(Stateless):
    """A `Reader` as a drafter, one batch for all sequences."""

    kind = "assistant"
    wants_hidden = True
    reads_target = True
    max_depth = MAX_DEPTH

    def __init__(self, reader: Reader, target_store: CacheStore):
        self._reader, self._target_store = reader, target_store
        self._reading = reader if isinstance(reader, ReadingAtOnce) else None

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        sequence.report = replace(sequence.report, model=self._reader.spec.name)

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 1. who guesses, each from the target's state of its last verified row
        due = [one for one in settled if one.depth]
        if not due:
            return {}
        if (guesses := self._at_once(due)) is not None:
            return guesses
        chains = [Chain(one.sequence, one.depth, self._states(one)[-1:]) for one in due]
        # 2. what each sees and where it stands, at every depth
        lent = {chain.sequence.id: self._lent(chain.sequence) for chain in chains}
        at = {chain.sequence.id: self._position(chain.sequence) for chain in chains}
        # 3. guess by guess, one row per sequence
        while alive := [chain for chain in chains if len(chain.tokens) < chain.depth]:
            last = torch.tensor([chain.tokens[-1] if chain.tokens else chain.sequence.generated[-1] for chain in alive])
            hidden = torch.cat([chain.hidden for chain in alive])
            positions = torch.cat([at[chain.sequence.id] for chain in alive], 1)
            state = self._reader.forward(last, hidden, positions, [lent[chain.sequence.id] for chain in alive])
            self._extend(alive, state)
        return {chain.sequence.id: tuple(chain.tokens) for chain in chains}

    def _at_once(self, due: Many[Settled]) -> dict[int, tuple[int, ...]] | None:
        """Steps 2 and 3 in one native call, as deep as the deepest; None where they are not recorded or more than
        temperature decides a pick."""
        if self._reading is None or not all([one.sequence.picks_plainly for one in due]):
            return None
        caches = [self._verified(one.sequence) for one in due]
        plan = self._reading.plan(len(due), due[0].sequence.rows.positions.axes, caches[0])
        if plan is None:
            return None
        rows = []
        for one, cache in zip(due, caches, strict=True):
            sequence = one.sequence
            params, generated = sequence.request.sampling, sequence.generated
            place, states = sequence.coordinate(cache.rows), self._states(one)
            rows.append(Reading(cache, generated[-1], place, states, params.temperature, params.seed, len(generated)))
        guesses = plan.run(rows, max([one.depth for one in due]))
        return {one.sequence.id: tuple(own[: one.depth]) for one, own in zip(due, guesses, strict=True)}

    def _extend(self, chains: Many[Chain], state: Tensor) -> None:
        extend(chains, self._reader.logits(state).numpy())
        for chain, hidden in zip(chains, self._reader.chained(state).split(1), strict=True):
            chain.hidden = hidden

    @staticmethod
    def _states(one: Settled) -> Tensor:
        if one.hidden is None or not one.hidden.shape[0]:
            raise RuntimeError("a guess needs the target's state of the last verified row")
        return one.hidden

    def _position(self, sequence: Sequence) -> Tensor:
        """[axes, 1] of the last picked token, which has no row yet."""
        rows = self._target_store[sequence.id].rows
        return torch.tensor(sequence.positions(rows, rows + 1).coords)

    def _verified(self, sequence: Sequence) -> SequenceCache:
        """The target's cache, which must end at the last verified row."""
        cache = self._target_store[sequence.id]
        if cache.rows != sequence.committed or cache.provisional:
            raise RuntimeError(f"the target holds {cache.rows} rows, {sequence.committed} are verified")
        return cache

    def _lent(self, sequence: Sequence) -> Lent:
        """The verified rows, or those less than the window before the row of the last picked token."""
        cache, lent = self._verified(sequence), []
        for read in self._reader.spec.reads:
            layer = cache.layers[read.place]
            assert isinstance(layer, KV)
            first = 0 if read.window is None else max(0, cache.rows - read.window + 1)
            lent.append(layer.read(first, cache.rows))
        return lent
