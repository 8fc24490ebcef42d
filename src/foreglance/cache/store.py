"""Rows per sequence, for target and drafter alike. Only `commit(keep)` moves a length.

    rows of one sequence:  [ committed ............ | provisional (this forward) | free ]
                             forward reads these      forward writes these
                             commit(keep) makes the first `keep` provisional rows permanent and forgets the rest

A store has a budget of rows, handed out in pages, so that running out is an answer and not a crash.
Touches no layer mathematics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from foreglance.batch import Holding
from foreglance.cache.kv import KV, KVSpec
from foreglance.cache.recurrent import Recurrent, RecurrentSpec
from foreglance.prompt import Coordinates

LayerSpec = KVSpec | RecurrentSpec
LayerCache = KV | Recurrent
PAGE = 64


class CacheFull(RuntimeError):
    """The store's budget of rows is used up."""


@dataclass(frozen=True)
class Checkpoint:
    """A sequence at `rows` rows: enough to go back to it after later rows were written.

    Full-attention rows stay where they are and need no copy; recurrent states and windows are in `layers`.
    """

    rows: int
    last: Coordinates | None
    layers: tuple[Any, ...]


@dataclass
class Segment:
    """Copies of rows [start, stop) of one sequence in all layers; `last` is the position of row stop - 1.

    `layers` are pieces as the layers' specs say (`piece_shapes`). Segments from row 0 on that follow each other hold
    all that it takes to go on behind the last of them.
    """

    start: int
    stop: int
    last: Coordinates | None
    layers: list[tuple[Tensor, ...]]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for piece in self.layers for tensor in piece)


class SequenceCache:
    """All layers of one sequence. `rows` are committed; `provisional` were reserved for the running forward."""

    def __init__(self, layers: Sequence[LayerCache], rows: int = 0):
        self.layers = tuple(layers)
        self.recurrent = tuple(layer for layer in self.layers if isinstance(layer, Recurrent))
        self._addresses = np.array([layer.address.ctypes.data for layer in self.layers], np.int64)
        self.addresses: int = self._addresses.ctypes.data  # of the addresses of the layers' cells, for native kernels
        self.rows = rows
        self.provisional = 0
        self.last: Coordinates | None = None

    def make_room(self, num_rows: int) -> None:
        """Room for `num_rows` rows of kernels in recurrent layers."""
        for layer in self.recurrent:
            layer.make_room(num_rows)

    def filled(self, num_rows: int) -> None:
        """Kernels have computed the first `num_rows` provisional rows of recurrent layers."""
        for layer in self.recurrent:
            layer.filled(num_rows)

    def cut(self, start: int) -> Segment:
        """Copies of the committed rows from `start` on."""
        return Segment(start, self.rows, self.last, [layer.piece(start, self.rows) for layer in self.layers])

    def cut_bytes(self, start: int) -> int:
        """How much memory `cut` would take."""
        return segment_bytes([layer.spec for layer in self.layers], self.rows - start)


def segment_bytes(specs: Sequence[LayerSpec], num_rows: int) -> int:
    """Memory of a segment of `num_rows` rows."""
    return sum(4 * prod(shape) for spec in specs for shape in spec.piece_shapes(num_rows))


def merge(one: Segment, other: Segment, specs: Sequence[LayerSpec]) -> Segment:
    """Two segments that follow each other as one. Takes them apart layer by layer: never twice in memory."""
    num_rows, layers = other.stop - one.start, []
    for place, spec in enumerate(specs):
        layers.append(spec.merge((one.layers[place], other.layers[place]), num_rows))
        one.layers[place] = other.layers[place] = ()
    return Segment(one.start, other.stop, other.last, layers)


class CacheStore:
    """The caches of one model, by sequence id. `capacity` is the budget in rows; None: without bound."""

    def __init__(self, specs: Sequence[LayerSpec], capacity: int | None = None):
        self.specs = tuple(specs)
        self._capacity = capacity
        self._sequences: dict[int, SequenceCache] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, sequence: int) -> SequenceCache:
        return self._sequences[sequence]

    def held(self) -> Mapping[int, Holding]:
        """What each sequence holds, for `batch.pack`."""
        return self._sequences

    def caches(self) -> dict[int, SequenceCache]:
        """Those that are open, by sequence id."""
        return dict(self._sequences)

    @property
    def pages_held(self) -> int:
        return sum(-(-(cache.rows + cache.provisional) // PAGE) for cache in self._sequences.values())

    @property
    def pages_total(self) -> int | None:
        return None if self._capacity is None else -(-self._capacity // PAGE)

    def open(self, sequence: int) -> SequenceCache:
        """A new, empty sequence."""
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} is open already")
        cache = SequenceCache([spec.make() for spec in self.specs])
        self._sequences[sequence] = cache
        return cache

    def reserve(self, sequence: int, num_rows: int) -> None:
        """Make room for `num_rows` provisional rows; forgets provisional rows of a forward that was not committed.

        Raises `CacheFull` and changes nothing if the budget does not allow it.
        """
        cache = self._sequences[sequence]
        grown = -(-(cache.rows + num_rows) // PAGE) - (-(-(cache.rows + cache.provisional) // PAGE))
        if grown > 0 and self.pages_total is not None and self.pages_held + grown > self.pages_total:
            raise CacheFull(
                f"sequence {sequence} needs {num_rows} rows, but {self.pages_held} of {self.pages_total} pages "
                f"of {PAGE} rows are held; run fewer or shorter requests at once, or raise the context or the slots"
            )
        for layer in cache.layers:
            layer.reserve(cache.rows, num_rows)
        cache.provisional = num_rows

    def commit(self, sequence: int, keep: int, last: Coordinates | None) -> None:
        """Make the first `keep` provisional rows permanent and forget the rest; `last` is the last kept row's position.

        `keep` 0 is legal and leaves everything as before the forward.
        """
        cache = self._sequences[sequence]
        if not 0 <= keep <= cache.provisional:
            raise ValueError(f"sequence {sequence}: cannot keep {keep} of {cache.provisional} provisional rows")
        for layer in cache.layers:
            layer.commit(cache.rows, cache.provisional, keep)
        cache.rows += keep
        cache.provisional = 0
        if keep:
            cache.last = last

    def release(self, sequence: int) -> None:
        """Forget a sequence. Releasing one that is not there is an error: somebody lost count."""
        if sequence not in self._sequences:
            raise KeyError(f"sequence {sequence} holds nothing here")
        del self._sequences[sequence]

    def checkpoint(self, sequence: int) -> Checkpoint:
        """The sequence as it is now; provisional rows are not part of it."""
        cache = self._sequences[sequence]
        return Checkpoint(cache.rows, cache.last, tuple(layer.save(cache.rows) for layer in cache.layers))

    def restore(self, sequence: int, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint of this same sequence."""
        cache = self._sequences[sequence]
        for layer, saved in zip(cache.layers, checkpoint.layers, strict=True):
            layer.load(checkpoint.rows, saved)
        cache.rows, cache.last, cache.provisional = checkpoint.rows, checkpoint.last, 0

    def adopt(self, sequence: int, segments: Sequence[Segment]) -> None:
        """Open a sequence that begins with copies of these rows, from the first one on."""
        end, pieces = segments[-1], zip(*(segment.layers for segment in segments), strict=True)
        layers = [spec.join(own, end.stop) for spec, own in zip(self.specs, pieces, strict=True)]
        self.open(sequence)
        self._sequences[sequence] = SequenceCache(layers, end.stop)
        self._sequences[sequence].last = end.last

    def check(self) -> None:
        """Integrity, run when idle and after tests: free + held = total, nothing provisional, nothing negative."""
        for sequence, cache in self._sequences.items():
            if cache.provisional or cache.rows < 0 or (cache.rows > 0) != (cache.last is not None):
                raise AssertionError(
                    f"sequence {sequence}: {cache.rows} rows, {cache.provisional} provisional, last at {cache.last}"
                )
        total, held = self.pages_total, self.pages_held
        if total is not None and not 0 <= held <= total:
            raise AssertionError(f"{held} pages are held of {total}")
