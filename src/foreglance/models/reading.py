"""What a draft model without a cache is: it reads keys and values that its target wrote.

Owns the facts and the protocol. Must not touch a store: what is read is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Lent = Sequence[tuple[Tensor, Tensor]]  # keys and values [kv heads, rows, d] by `ReaderSpec.reads`, of one sequence


@dataclass(frozen=True)
class Read:
    """A cache of the target by its place there. `window` w: rows less than w before the row in question; None: all."""

    place: int
    window: int | None


@dataclass(frozen=True)
class ReaderSpec:
    """The facts of a reader. `hidden_size` is the target's."""

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    reads: tuple[Read, ...]


class Reader(Protocol):
    """One row per sequence and depth; all depths have the position of the first and see the same rows."""

    spec: ReaderSpec

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, lent: Sequence[Lent]) -> Tensor:
        """token_ids [n], hidden [n, target's width], positions [axes, n] -> own states [n, own width]."""
        ...

    def logits(self, state: Tensor) -> Tensor:
        """[n, own width] -> float32 [n, vocab]; minus infinity for tokens that are not considered."""
        ...

    def chained(self, state: Tensor) -> Tensor:
        """[n, own width] -> [n, target's width], the hidden state that the next depth is fed."""
        ...
