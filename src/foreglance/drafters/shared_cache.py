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
from foreglance.cache.prefix import Hit, Memory
from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Settled
from foreglance.drafters.chains import Chain, extend
from foreglance.models.plans import ReadingAtOnce
from foreglance.models.reading import Lent, Reader
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence


class SharedCacheDrafter:
    """A `Reader` as a drafter, one batch for all sequences."""

    kind = "assistant"
    wants_hidden = True
    reads_target = True
    max_depth = MAX_DEPTH
    stores: tuple[CacheStore, ...] = ()
    keys: tuple[str, ...] = ()

    def __init__(self, reader: Reader, target_store: CacheStore):
        self._reader, self._target_store = reader, target_store
        self._at_once_reader = reader if isinstance(reader, ReadingAtOnce) else None

    def key(self, sequence: Sequence) -> str | None:
        return None

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        sequence.report = replace(sequence.report, model=self._reader.spec.name)

    def remember(self, sequence: Sequence) -> Memory:
        return Memory()

    def retire(self, sequence: Sequence) -> None:
        pass

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 1. who guesses, each from the target's state of its last verified row
        chains = [Chain(one.sequence, one.depth, self._start(one)) for one in settled if one.depth]
        if len(chains) == 1 and (tokens := self._at_once(chains[0])) is not None:
            return {chains[0].sequence.id: tokens}
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

    def _at_once(self, chain: Chain) -> tuple[int, ...] | None:
        """Steps 2 and 3 of a single sequence in one native call; None where they are not recorded or more than
        temperature decides a pick."""
        sequence, reader = chain.sequence, self._at_once_reader
        if reader is None or not sequence.picks_plainly:
            return None
        position, lent = self._position(sequence), self._lent(sequence)
        plan = reader.plan(len(position), lent)
        if plan is None:
            return None
        params, generated = sequence.request.sampling, sequence.generated
        return plan.run(
            generated[-1], chain.hidden, position, lent, chain.depth, params.temperature, params.seed, len(generated)
        )

    def _extend(self, chains: Many[Chain], state: Tensor) -> None:
        extend(chains, self._reader.logits(state).numpy())
        for chain, hidden in zip(chains, self._reader.chained(state).split(1), strict=True):
            chain.hidden = hidden

    @staticmethod
    def _start(one: Settled) -> Tensor:
        if one.hidden is None or not len(one.hidden):
            raise RuntimeError("a guess needs the target's state of the last verified row")
        return one.hidden[-1:]

    def _position(self, sequence: Sequence) -> Tensor:
        """[axes, 1] of the last picked token, which has no row yet."""
        rows = self._target_store[sequence.id].rows
        return torch.tensor(sequence.positions(rows, rows + 1).coords)

    def _lent(self, sequence: Sequence) -> Lent:
        """The verified rows, or those less than the window before the row of the last picked token."""
        cache = self._target_store[sequence.id]
        if cache.rows != sequence.committed or cache.provisional:
            raise RuntimeError(f"the target holds {cache.rows} rows, {sequence.committed} are verified")
        lent = []
        for read in self._reader.spec.reads:
            layer = cache.layers[read.place]
            assert isinstance(layer, KV)
            first = 0 if read.window is None else max(0, cache.rows - read.window + 1)
            lent.append(layer.read(first, cache.rows))
        return lent
