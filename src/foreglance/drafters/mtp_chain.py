"""Multi-token prediction by a chain of modules, one for each depth, each with a cache of its own (Step-3.7).

Module i at row t consumes (state of module i - 1 at row t, input of row t + 1 + i). With K known inputs, the row that
guesses is K - 2 in every module, so the last i rows of module i are made from guesses:

    inputs       ... K-3  K-2  K-1 | g1   g2
    module 0     ... K-3  K-2           -> g1        all of known inputs
    module 1     ... K-3 (K-2)          -> g2        row K-2 carries g1
    module 2     ... K-4 (K-3) (K-2)    -> g3        rows K-3 and K-2 carry g1 and g2

Rows in brackets are provisional: they are never committed, and are computed again from what was really picked. So every
module's cache holds one row for each position whose inputs are known, and nothing that a later token may change.
Guesses beyond the last module re-use it, each on the rows before and its own state.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreglance.batch import TILE
from foreglance.cache.prefix import Hit, Memory
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Settled
from foreglance.drafters.chains import Chain, ChainRunner, extend, fit, must_catch_up
from foreglance.drafters.lanes import Lanes, inputs_of, memory_key, memory_keys, remember
from foreglance.drafters.rows import RowMap
from foreglance.models.base import ChainedHead, DraftHead
from foreglance.models.chained import ChainedGuesses, ModuleRows
from foreglance.models.plans import Guessing
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence


@dataclass(frozen=True)
class Module:
    """One module of the chain with its rows."""

    number: int
    head: DraftHead
    lanes: Lanes
    runner: ChainRunner


@dataclass(eq=False)
class Round:
    """What one sequence does in one `propose`: its guesses, and the last module's states of rows made from them.

    fed        states that this module's provisional rows were fed [rows, h]
    assumed    states that it made of them [rows, h]
    """

    chain: Chain
    fed: Tensor
    assumed: Tensor

    @property
    def sequence(self) -> Sequence:
        return self.chain.sequence


@dataclass(frozen=True)
class Piece:
    """Target rows [start, stop) of a round for one module, with the states that they are fed. Rows below `settled` are
    of known inputs and stay."""

    round: Round
    start: int
    stop: int
    settled: int
    states: Tensor

    def halves(self) -> list[Piece]:
        """A prompt chunk is kept whole, so provisional rows behind it are computed apart."""
        cut = self.settled - self.start
        if self.stop - self.start <= TILE or self.settled in (self.start, self.stop):
            return [self]
        return [
            replace(self, stop=self.settled, states=self.states[:cut]),
            replace(self, start=self.settled, states=self.states[cut:]),
        ]


class ChainDrafter:
    """A `ChainedHead` as a drafter: all sequences in one batch for each module."""

    kind = "mtp"
    wants_hidden = True
    reads_target = False
    max_depth = MAX_DEPTH
    keys = memory_keys("mtp")

    def __init__(self, head: ChainedHead, capacity: int | None = None, row_map: type[RowMap] = RowMap):
        self._modules: list[Module] = []
        for number, module in enumerate(head.modules):
            lanes = Lanes(module, capacity, row_map, 1 + number)
            runner = ChainRunner(module, lanes.store, head.spec.vocab_size)
            self._modules.append(Module(number, module, lanes, runner))
        self._vocab_size, self._width = head.spec.vocab_size, head.spec.hidden_size
        self.stores: tuple[CacheStore, ...] = tuple(module.lanes.store for module in self._modules)
        self._chained = _chained(head)

    def key(self, sequence: Sequence) -> str:
        return memory_key(self.kind, sequence)

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        for module in self._modules:
            module.lanes.admit(sequence, hit, module.number)

    def remember(self, sequence: Sequence) -> Memory:
        return remember(self.key(sequence), [module.lanes for module in self._modules], sequence)

    def retire(self, sequence: Sequence) -> None:
        for module in self._modules:
            module.lanes.retire(sequence)
            module.runner.retire(sequence)

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        # 1. take over the target's states of the rows that were committed
        for one in settled:
            self._modules[0].lanes[one.sequence].receive(one.first_row, one.hidden)
        guesses = self._guesses(settled)
        # 4. states whose input is not known yet, or of those who rest
        for module in self._modules:
            for one in settled:
                module.lanes[one.sequence].hold()
        return guesses

    def _guesses(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        if len(settled) == 1 and (tokens := self._at_once(settled[0])) is not None:
            return {settled[0].sequence.id: tokens}
        if not any(one.depth or self._must_catch_up(one.sequence) for one in settled):
            return {}
        none = torch.empty(0, self._width)
        rounds = [Round(Chain(one.sequence, one.depth, none), none, none) for one in settled]
        # 2. module by module: rows of known inputs, which stay, and rows made from the guesses so far; one more guess
        for module in self._modules:
            self._advance(module, rounds)
        # 3. deeper guesses by the last module
        while alive := [one for one in rounds if len(one.chain.tokens) < one.chain.depth]:
            self._deepen(self._modules[-1], alive)
        return {one.sequence.id: tuple(one.chain.tokens) for one in rounds if one.chain.tokens}

    def _must_catch_up(self, sequence: Sequence) -> bool:
        return any(must_catch_up(sequence, module.lanes[sequence].num_waiting) for module in self._modules)

    def _at_once(self, one: Settled) -> tuple[int, ...] | None:
        """Steps 2 and 3 of a single sequence behind its prompt in one native call; None if that cannot be done, and
        nothing has happened then."""
        sequence, chained, used = one.sequence, self._chained, self._modules[: one.depth]
        if chained is None or not used or not sequence.picks_plainly:
            return None
        lanes, stop = [module.lanes[sequence] for module in self._modules], sequence.known - 1
        counts = [stop - lane.first for lane in lanes[: len(used)]]
        if not 0 < counts[0] <= counts[-1] <= TILE or not lanes[len(used) - 1].is_behind_the_prompt:
            return None
        if any([must_catch_up(sequence, lane.num_waiting) for lane in lanes[len(used) :]]):
            return None
        waiting = [lane.num_waiting for lane in lanes[: len(used)]]
        if waiting != [after - before for before, after in zip((0, *counts), counts, strict=False)]:
            return None  # rows that do not follow those of the module before: `receive` says so
        plans = chained.plan(counts, one.depth)
        if plans is None:
            self._show_one_row(one)
            return None
        rows = []
        for module, lane, count in zip(used, lanes, counts, strict=False):
            cache = module.lanes.store[sequence.id]
            module.lanes.store.reserve(sequence.id, count + max(0, one.depth - len(used)))
            tokens = sequence.generated[lane.inputs_from - sequence.num_prompt :]
            coordinate, own = lane.map.coordinate(cache.rows), module.runner.own_tokens(sequence)
            rows.append(ModuleRows(cache, tokens, coordinate, lane.rest(), own))
        params = sequence.request.sampling
        guesses = chained.run(rows, one.depth, params.temperature, params.seed, len(sequence.generated))
        for number, (module, plan, own) in enumerate(zip(used, plans, rows, strict=True)):
            start, keep, output = lanes[number].first, len(own.tokens), plan.output
            last = (own.coordinate + keep - 1,) * len(plan.coords)
            module.lanes.store.commit(sequence.id, keep, last)
            lanes[number].drop(keep)
            if keep and number + 1 < len(lanes):
                assert output is not None
                lanes[number + 1].receive(start, output[:keep])
        return tuple(guesses)

    def _show_one_row(self, one: Settled) -> None:
        """Guesses beyond the last module come from a row at a time, which no batch has, so that none would be recorded:
        compute one, and keep nothing of it."""
        module, sequence = self._modules[-1], one.sequence
        model = module.head
        if one.depth <= len(self._modules) or not isinstance(model, Guessing) or model.plans.plan(1) is not None:
            return
        store = module.lanes.store
        lane, cache = module.lanes[sequence], store[sequence.id]
        if not cache.rows or not lane.is_behind_the_prompt:
            return
        rows = lane.map.rows(lane.first, lane.first + 1, (0,) * len(self._modules))
        part = lane.part(rows, torch.zeros(1, self._width), 0)
        module.runner.forward([part], inputs_of(model, [sequence]), {sequence.id: 0})

    def _advance(self, module: Module, rounds: Many[Round]) -> None:
        guessing = [one for one in rounds if one.chain.depth > module.number]
        catching_up = [
            one
            for one in rounds
            if one not in guessing and must_catch_up(one.sequence, module.lanes[one.sequence].num_waiting)
        ]
        pieces = [self._piece(module, one, one in guessing) for one in (*guessing, *catching_up)]
        halves = [piece.halves() for piece in pieces]
        self._settle(module, [half[0] for half in halves])
        self._settle(module, [half[1] for half in halves if len(half) > 1])
        self._guess(module, guessing)

    def _piece(self, module: Module, one: Round, guessing: bool) -> Piece:
        """Rows that became ready and, for a guess, those up to the row that guesses."""
        lane = module.lanes[one.sequence]
        start, states = lane.first, lane.due()
        settled = lane.first
        stop = one.sequence.known - 1 if guessing else settled
        if stop == settled:
            one.fed = states[:0]
            return Piece(one, start, stop, settled, states)
        one.fed = torch.cat([lane.rest(), one.assumed])
        return Piece(one, start, stop, settled, torch.cat([states, one.fed]))

    def _settle(self, module: Module, pieces: Many[Piece]) -> None:
        """Compute rows; hand settled states to the next module, and keep provisional ones for this round."""
        pieces = [piece for piece in pieces if piece.stop > piece.start]
        for piece, states in zip(pieces, self._compute(module, pieces), strict=True):
            count = max(piece.settled - piece.start, 0)
            piece.round.assumed = states[count:]
            piece.round.chain.hidden = states[-1:]
            if count and module.number + 1 < len(self._modules):
                lane = self._modules[module.number + 1].lanes[piece.round.sequence]
                lane.receive(piece.start, states[:count])

    def _compute(self, module: Module, pieces: Many[Piece]) -> list[Tensor]:
        """States [stop - start, h] of each piece; zeros, which no one reads, where the policy has no row."""
        parts, keep, places = [], {}, []
        for piece in pieces:
            lane = module.lanes[piece.round.sequence]
            rows = lane.map.rows(piece.start, piece.stop, piece.round.chain.tokens)
            places.append(torch.from_numpy(rows.target_row - piece.start))
            if len(rows):
                keep[lane.sequence.id] = int((rows.target_row < piece.settled).sum())
                parts.append(lane.part(rows, piece.states[places[-1]], 0))
        made: dict[int, Tensor] = {}
        if parts:
            inputs = inputs_of(module.head, [piece.round.sequence for piece in pieces])
            batch, hidden = module.runner.forward(parts, inputs, keep)
            made = {part.sequence: hidden[batch.rows_of(i)] for i, part in enumerate(batch.parts)}
        out = []
        for piece, place in zip(pieces, places, strict=True):
            states = torch.zeros(piece.stop - piece.start, self._width)
            if len(place):
                states[place] = made[piece.round.sequence.id]
            out.append(states)
        return out

    def _deepen(self, module: Module, rounds: Many[Round]) -> None:
        """One row more behind the provisional ones, fed the module's own state of the row before."""
        pieces = []
        for one in rounds:
            one.fed = torch.cat([one.fed, one.chain.hidden])
            start = module.lanes[one.sequence].first
            pieces.append(Piece(one, start, start + len(one.fed), start, one.fed))
        self._settle(module, pieces)
        self._guess(module, rounds)

    def _guess(self, module: Module, rounds: Many[Round]) -> None:
        if rounds:
            hidden = torch.cat([one.chain.hidden for one in rounds])
            logits = fit(module.head.logits(hidden).numpy(), self._vocab_size)
            extend([one.chain for one in rounds], logits)


def _chained(head: ChainedHead) -> ChainedGuesses | None:
    """Guesses in native calls; None for modules that record nothing, or whose states cannot be given back."""
    modules = [module for module in head.modules if isinstance(module, Guessing)]
    if len(modules) < len(head.modules) or not modules or modules[0].plans.ops is None:
        return None
    if any(isinstance(spec, RecurrentSpec) for spec in head.spec.caches):
        return None
    return ChainedGuesses(modules[0].plans.ops, modules, head.spec.rule.axes, MAX_DEPTH)
