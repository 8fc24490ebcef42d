"""What drafters with rows of their own share: rows through their model, and guesses that grow token by token.

Owns the loop. Which rows a sequence still owes, and what becomes of rows made from guesses, is the drafter's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foreglance.batch import Batch, InputSpec, Part, pack
from foreglance.cache.recurrent import RecurrentSpec
from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Settled
from foreglance.drafters.context import ContextTokens
from foreglance.models.base import Caches
from foreglance.models.plans import Guess, Guessing, Owed, tiled
from foreglance.ops.native import Gathered
from foreglance.request import MAX_DEPTH
from foreglance.sampling import pick
from foreglance.sequence import Sequence

MAX_WAITING = 1024  # committed rows that may wait for their draft rows while nothing is drafted


class ChainModel(Protocol):
    """What is run: a draft head or a whole model."""

    def forward(self, batch: Batch, caches: Caches) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass
class Chain:
    """One sequence's guesses in this round; `hidden` [1, h] is the model's state of its last row."""

    sequence: Sequence
    depth: int
    hidden: Tensor
    tokens: list[int] = field(default_factory=list)


class Owing(NamedTuple):
    """A sequence behind its prompt that lacks rows and wants guesses. `take` gives, once they will be computed, their
    tokens, the first one's coordinate and the states [rows, h] that they are fed, of how many there are and how many
    its cache holds."""

    sequence: Sequence
    num_rows: int
    depth: int
    take: Callable[[int, int], tuple[Many[int], int, Tensor]]


def must_catch_up(sequence: Sequence, num_waiting: int) -> bool:
    """Whether a sequence that does not draft now must still compute its rows: in prefill, so that a checkpoint has
    them, and after a long wait."""
    if sequence.finish is not None:
        return False
    return sequence.in_prefill or not sequence.counters.steps or num_waiting > MAX_WAITING


class ChainRunner:
    """Runs a model over a store for many sequences in one batch. `vocab_size` is the target's."""

    def __init__(self, model: ChainModel, store: CacheStore, vocab_size: int):
        self._model, self._store, self._vocab_size = model, store, vocab_size
        self._guessing = model if isinstance(model, Guessing) else None
        self._is_recurrent = any(isinstance(spec, RecurrentSpec) for spec in store.specs)
        self._context = None if self._guessing is None else ContextTokens.of(self._guessing)

    def retire(self, sequence: Sequence) -> None:
        """Forget what was noted of a sequence."""
        if self._context is not None:
            self._context.retire(sequence)

    def own_tokens(self, sequence: Sequence) -> Gathered | None:
        return None if self._context is None else self._context[sequence]

    def forward(
        self, parts: Many[Part], inputs: InputSpec, keep: Mapping[int, int] | None = None
    ) -> tuple[Batch, Tensor]:
        """Compute rows and keep them all, or of each sequence the first `keep`."""
        batch = pack(parts, inputs, self._store.held())
        for part in batch.parts:
            self._store.reserve(part.sequence, part.num_rows)
        hidden = self._model.forward(batch, {part.sequence: self._store[part.sequence] for part in batch.parts})
        for part in batch.parts:
            kept = part.num_rows if keep is None else keep[part.sequence]
            self._store.commit(part.sequence, kept, part.positions.at(kept - 1))
        return batch, hidden

    def begin(self, parts: Many[Part], wanted: Mapping[int, Settled], inputs: InputSpec) -> list[Chain]:
        """Catch up with what was committed; parts with a scored row begin a chain."""
        if not parts:
            return []
        chains = []
        for run in tiled([0 if part.chunk else part.num_rows for part in parts]):
            batch, hidden = self.forward(parts[run], inputs)
            owners = [wanted[part.sequence] for part in batch.parts if part.num_scored]
            last = hidden[batch.scored]
            chains += [Chain(one.sequence, one.depth, last[i : i + 1]) for i, one in enumerate(owners)]
        return chains

    def grow(self, chains: Many[Chain], next_part: Callable[[Chain], Part], inputs: InputSpec) -> None:
        """Guesses from the last rows, and deeper ones from a row more per sequence and depth."""
        if first := [chain for chain in chains if not chain.tokens]:
            self._guess(first, torch.cat([chain.hidden for chain in first]))
        while alive := [chain for chain in chains if len(chain.tokens) < chain.depth]:
            _, hidden = self.forward([next_part(chain) for chain in alive], inputs)
            for i, chain in enumerate(alive):
                chain.hidden = hidden[i : i + 1]
            self._guess(alive, hidden)

    def guess_by_itself(self, chains: Many[Chain], next_position: Callable[[Chain], np.ndarray]) -> None:
        """What `grow` does, in one native call for as many guesses as all of them still want: where the model's rows
        are recorded and nothing but temperature decides a pick. Else leaves the rest to it.

        `next_position` gives the position [axes] of a chain's next row.
        """
        while alive := [chain for chain in chains if len(chain.tokens) < chain.depth]:
            plan = None
            if self._guessing is not None and all(chain.sequence.picks_plainly for chain in alive):
                plan = self._guessing.plans.chain(len(alive), self._guessing, MAX_DEPTH)
            if plan is None or self._is_recurrent:
                return
            depth = min(chain.depth - len(chain.tokens) for chain in alive)
            num_rows = depth - (not alive[0].tokens)
            guesses = []
            for chain in alive:
                self._store.reserve(chain.sequence.id, num_rows)
                guesses.append(self._start(chain, next_position(chain)))
            tokens, hidden = plan.run(guesses, depth)
            for i, (chain, guess) in enumerate(zip(alive, guesses, strict=True)):
                chain.tokens += tokens[:, i].tolist()
                chain.hidden = hidden[i : i + 1]
                self._store.commit(chain.sequence.id, num_rows, tuple((guess.position + num_rows - 1).tolist()))

    def guess_at_once(self, owing: Many[Owing]) -> dict[int, tuple[int, ...]] | None:
        """Catch up with rows of a few sequences that pick plainly and guess for all of them, in native calls without a
        batch, as deep as the deepest; None where rows of these numbers are not recorded, and nothing has happened
        then."""
        model = self._guessing
        if model is None or self._is_recurrent:
            return None
        plan = model.plans.catch_up([one.num_rows for one in owing], model, MAX_DEPTH)
        if plan is None:
            return None
        rows, deepest = [], max([one.depth for one in owing])
        for one in owing:
            sequence, params = one.sequence, one.sequence.request.sampling
            cache = self._store[sequence.id]
            self._store.reserve(sequence.id, one.num_rows + deepest - 1)
            tokens, coordinate, states = one.take(one.num_rows, cache.rows)
            number, own = len(sequence.generated), self.own_tokens(sequence)
            rows.append(Owed(cache, tokens, coordinate, states, params.temperature, params.seed, number, own))
        found = plan.run(rows, deepest)
        for one, row in zip(owing, rows, strict=True):
            self._store.commit(one.sequence.id, one.num_rows, (row.coordinate + one.num_rows - 1,) * plan.axes)
        return {one.sequence.id: tuple(own[: one.depth]) for one, own in zip(owing, found, strict=True)}

    def _start(self, chain: Chain, position: np.ndarray) -> Guess:
        params, sequence = chain.sequence.request.sampling, chain.sequence
        return Guess(
            self._store[sequence.id],
            position,
            chain.hidden,
            chain.tokens[-1] if chain.tokens else None,
            params.temperature,
            params.seed,
            len(sequence.generated) + len(chain.tokens),
            self.own_tokens(sequence),
        )

    def _guess(self, chains: Many[Chain], hidden: Tensor) -> None:
        if not chains:
            return
        logits = self._model.logits(hidden).numpy()
        if self._context is not None:
            self._context.complete(logits, hidden, [chain.sequence for chain in chains])
        extend(chains, fit(logits, self._vocab_size))


def extend(chains: Many[Chain], logits: np.ndarray) -> None:
    """One more guess for each chain from its row of logits [n, vocab], picked with the target's own rule and noise:
    that is what makes a sampled guess worth something."""
    for row, chain in zip(logits, chains, strict=True):
        sequence = chain.sequence
        generated = (*sequence.generated, *chain.tokens)
        prompt = sequence.rows.token_ids if sequence.request.sampling.repetition_penalty != 1 else ()
        allowed = sequence.allowed(generated)
        chain.tokens.append(pick(row, sequence.request.sampling, len(generated), prompt, generated, allowed))


def fit(logits: np.ndarray, vocab_size: int) -> np.ndarray:
    """[n, v] -> [n, vocab_size]: a model that pads its vocabulary otherwise never guesses what the target lacks, and
    has no chance for what it lacks itself."""
    lacking = vocab_size - logits.shape[1]
    if lacking <= 0:
        return logits[:, :vocab_size]
    return np.pad(logits, ((0, 0), (0, lacking)), constant_values=-np.inf)
