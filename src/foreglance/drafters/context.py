"""Tokens of a sequence's context that a draft head does not guess from by itself, since they are rare in all texts.

A head may guess from the frequent part of a large vocabulary (`models.plans.Guessing`). What a text is about, or the
script that it is written in, may lie outside; what its prompt and its answer so far hold is guessed from too.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from foreglance.models.plans import MOST_GATHERED, Guessing
from foreglance.ops.native import Gathered, NativeLinear, NativeOps
from foreglance.sequence import Sequence


@dataclass
class Rare:
    """One sequence's: outputs of its rare tokens, and how many generated tokens were looked at."""

    gathered: Gathered
    tokens: set[int]
    seen: int = 0


class ContextTokens:
    """Those of all sequences of one head. The latest `MOST_GATHERED` of a sequence count."""

    def __init__(self, ops: NativeOps, output: NativeLinear, guess_ids: Tensor):
        self._ops, self._output = ops, output
        self._is_rare = np.ones(output.shape[0], bool)
        self._is_rare[guess_ids.numpy()] = False
        self._rare: dict[int, Rare] = {}

    @classmethod
    def of(cls, head: Guessing) -> ContextTokens | None:
        """None for a head that guesses from all tokens, or does not run on native kernels."""
        ops, output, ids = head.plans.ops, head.output, head.guess_ids
        if ops is None or ids is None or not isinstance(output, NativeLinear):
            return None
        return cls(ops, output, ids)

    def __getitem__(self, sequence: Sequence) -> Gathered:
        """Of what the sequence holds now."""
        rare = self._rare.get(sequence.id)
        if rare is None:
            prompt = sequence.rows.token_ids[~sequence.rows.is_image]
            rare = self._rare[sequence.id] = Rare(Gathered(self._output, MOST_GATHERED), set())
            self._add(rare, latest(prompt[self._is_rare[prompt]], MOST_GATHERED))
        if rare.seen < len(sequence.generated):
            tokens = sequence.generated[rare.seen :]
            rare.seen = len(sequence.generated)
            if new := [token for token in tokens if self._is_rare[token] and token not in rare.tokens]:
                self._add(rare, latest(np.array(new, np.int64), MOST_GATHERED))
        return rare.gathered

    def _add(self, rare: Rare, tokens: np.ndarray) -> None:
        if not len(tokens):
            return
        rare.gathered.add(tokens)
        if len(rare.tokens) + len(tokens) <= MOST_GATHERED:
            rare.tokens.update(tokens.tolist())
        else:
            rare.tokens = set(rare.gathered.numbers.tolist())

    def complete(self, logits: np.ndarray, hidden: Tensor, sequences: Many[Sequence]) -> None:
        """Put in the logits [n, vocab] of these tokens, of rows with states [n, h]."""
        for row, state, sequence in zip(logits, hidden.split(1), sequences, strict=True):
            own = self[sequence]
            if len(own):
                row[own.numbers] = self._ops.linear(state, own.weight, [(0, 1)])[0].numpy()

    def retire(self, sequence: Sequence) -> None:
        self._rare.pop(sequence.id, None)


def latest(tokens: np.ndarray, most: int) -> np.ndarray:
    """Each token once, the `most` that were last, in the order of their last places."""
    backwards = tokens[::-1]
    first = np.sort(np.unique(backwards, return_index=True)[1])[:most]
    return backwards[first][::-1].copy()
