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
from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Settled
from foreglance.drafters.chains import Chain, ChainRunner, extend, fit, must_catch_up
from foreglance.drafters.lanes import Lanes, inputs_of, memory_key, memory_keys, remember
from foreglance.drafters.rows import RowMap
from foreglance.models.base import ChainedHead, DraftHead
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
        """Steps 2 and 3 of a single sequence behind its prompt, one native call for each guess; None if that cannot be
        done, and nothing has happened then."""
        sequence, stop = one.sequence, one.sequence.known - 1
        links = []
        for depth in range(one.depth):
            module = self._modules[min(depth, len(self._modules) - 1)]
            lane = module.lanes[sequence]
            if not lane.map.is_behind_the_prompt(lane.first):
                return None
            # deeper guesses come from the last module's provisional rows, and one more each time
            num_rows = stop - lane.first if depth == module.number else depth
            link = module.runner.link_of(sequence, num_rows) if 0 < num_rows <= TILE else None
            if link is None:
                return None
            links.append((module, link))
        resting = (module.lanes[sequence] for module in self._modules[one.depth :])
        if not links or any(must_catch_up(sequence, lane.num_waiting) for lane in resting):
            return None
        guesses: list[int] = []
        made = fed = torch.empty(0, self._width)
        for depth, (module, link) in enumerate(links):
            lane, rows = module.lanes[sequence], module.lanes.store[sequence.id].rows
            start, keep = lane.first, 0
            if depth == module.number:
                keep, states = lane.ready - start, [lane.rest(), made]
                lane.due()
            else:
                states = [fed, made[-1:]]
            ahead = start + lane.map.shift - sequence.num_prompt
            tokens = [*sequence.generated[ahead:], *guesses]
            guess, made = link(tokens, lane.map.coordinate(rows), states, keep, len(guesses))
            guesses.append(guess)
            if keep and module.number + 1 < len(self._modules):
                self._modules[module.number + 1].lanes[sequence].receive(start, made[:keep])
            fed, made = torch.cat(states)[keep:], made[keep:]
        return tuple(guesses)

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
