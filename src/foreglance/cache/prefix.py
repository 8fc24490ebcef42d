"""Which finished conversation serves a new request. Owns the choice and its bound, not the tensors' meaning.

A stored conversation can be resumed where a checkpoint was taken: on the row grid during prefill and at its end. A
draft's memory is part of a checkpoint; one without the memory that the new request's drafter needs does not serve.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreglance.cache.store import Checkpoint, SequenceCache


@dataclass(frozen=True)
class Point:
    """A row count at which a conversation can be resumed. `memory` is the drafter's, under its `key`."""

    checkpoint: Checkpoint
    key: str
    memory: Any


@dataclass(frozen=True)
class Stored:
    """A finished conversation: what its rows are (`Rows.identities`), its caches, where it can be resumed."""

    identities: np.ndarray
    cache: SequenceCache
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Hit:
    """A stored conversation and the point to resume it at."""

    stored: Stored
    point: Point


class PrefixCache:
    """The last `slots` finished conversations, least recently used out first."""

    def __init__(self, slots: int):
        self._slots = slots
        self._stored: OrderedDict[int, Stored] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: Stored) -> None:
        if not self._slots or not stored.points:
            return
        self._stored[self._next] = stored
        self._next += 1
        while len(self._stored) > self._slots:
            self._stored.popitem(last=False)

    def find(self, identities: np.ndarray, key: str | None) -> Hit | None:
        """The longest reusable prefix of rows with these identities; at least the last row is left to compute, since
        its hidden state is needed. `key` is the draft memory that is needed; None: none is."""
        best: tuple[int, int, Point] | None = None
        for name, stored in self._stored.items():
            limit = min(common_prefix(identities, stored.identities), len(identities) - 1)
            points = [p for p in stored.points if p.checkpoint.rows <= limit and key in (None, p.key)]
            if points:
                point = max(points, key=lambda p: p.checkpoint.rows)
                if best is None or point.checkpoint.rows > best[0]:
                    best = point.checkpoint.rows, name, point
        if best is None:
            return None
        self._stored.move_to_end(best[1])
        return Hit(self._stored[best[1]], best[2])


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix of two int64 arrays."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
