"""Rows of many sequences as one flat, validated batch. Changes no sequence.

    rows:   [ few rows: decode and verify, all sequences ............ | chunk of A ....... | chunk of B ... ]
    parts:    A? B  C (1 + k rows each)                                 its own block        its own block

A row carries an input (a token id or an image embedding) and may carry a target hidden state at the same time: what an
MTP head needs for an image row. Few rows and prompt chunks are computed differently, each in a way that the row alone
determines, so the batch says where the borders lie (`blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foreglance.prompt import Coordinates, PositionError, PositionRule, Positions

TILE = 16  # few rows are computed in tiles of at most this many


class BatchError(ValueError):
    """A batch that breaks a rule. `sequence` is the id of the one at fault; the others are untouched."""

    def __init__(self, sequence: int, message: str):
        super().__init__(f"sequence {sequence}: {message}")
        self.sequence = sequence


@dataclass(frozen=True)
class InputSpec:
    """What a model accepts as rows."""

    vocab_size: int
    embed_width: int
    hidden_width: int | None  # width of the target hidden state that each row must carry; None: none may
    rule: PositionRule
    strict_positions: bool = True


@dataclass(frozen=True)
class Held:
    """What a cache holds of a sequence: how many rows, and where the last one is."""

    rows: int
    last: Coordinates | None


class Holding(Protocol):
    """What `Held` says; a cache says it itself."""

    @property
    def rows(self) -> int: ...

    @property
    def last(self) -> Coordinates | None: ...


@dataclass(frozen=True)
class Part:
    """The consecutive rows of one sequence.

    token_ids    int64 [n]; ignored where `image` is true
    image        bool [n]; true where the row's input is an image embedding
    positions    [axes, n]
    num_scored   the last rows whose logits are wanted
    chunk        a prompt chunk (computed as one block) rather than few rows
    embeds       [image rows, embed width], in order
    hidden       [n, hidden width] target hidden states, for a draft head
    drafts       the guesses among the rows, all but the first few row
    in_image     bool [n]; true where the row is numbered as part of an image, if that is not where `image` is true
    """

    sequence: int
    token_ids: np.ndarray
    image: np.ndarray
    positions: Positions
    num_scored: int
    chunk: bool
    embeds: Tensor | None = None
    hidden: Tensor | None = None
    drafts: tuple[int, ...] = ()
    in_image: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def last(self, num_rows: int) -> Part:
        """The last rows of it, without image embeddings and hidden states."""
        at = slice(self.num_rows - num_rows, None)
        return replace(
            self,
            token_ids=self.token_ids[at],
            image=self.image[at],
            positions=self.positions.part(self.num_rows - num_rows, self.num_rows),
            embeds=None,
            hidden=None,
            in_image=None,
        )

    def with_drafts(self, drafts: tuple[int, ...]) -> Part:
        """The same part with a row for each guess behind its own; `positions` already covers them."""
        token_ids = np.concatenate([self.token_ids, np.array(drafts, np.int64)])
        image = np.concatenate([self.image, np.zeros(len(drafts), bool)])
        return replace(self, token_ids=token_ids, image=image, drafts=drafts)


class Holder(Protocol):
    """What a sequence holds: a cache per layer, rows that are committed and rows of the running forward, and the
    address of the layers' cells for native kernels."""

    layers: tuple[Any, ...]
    recurrent: tuple[Any, ...]
    rows: int
    provisional: int
    addresses: int

    def make_room(self, num_rows: int) -> None:
        """Room for `num_rows` rows of kernels."""
        ...


@dataclass(frozen=True)
class FewPart:
    """Flat rows [start, start + num_rows) of one sequence, whose caches hold `before` rows in front of them."""

    start: int
    num_rows: int
    before: int
    holder: Holder


@dataclass(frozen=True)
class Few:
    """The few rows of a batch next to what their sequences hold: what an operation needs that reads or writes caches.

    `table` int64 are the same facts for native kernels: the number of parts, then for each its start, its rows, the
    rows before, and the address of its layers' cells.
    """

    parts: tuple[FewPart, ...]
    table: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[FewPart]) -> Few:
        table = np.array(
            [len(parts), *(n for p in parts for n in (p.start, p.num_rows, p.before, p.holder.addresses))], np.int64
        )
        return cls(tuple(parts), table)

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @cached_property
    def address(self) -> int:
        """Of the table."""
        return self.table.ctypes.data

    def window(self, layer: int) -> int | None:
        """Of attention cache `layer`, alike for all sequences."""
        return self.parts[0].holder.layers[layer].spec.window


@dataclass(frozen=True)
class Batch:
    """Flat rows of all parts; few-row parts come first. Make it with `pack`.

    token_ids   int64 [rows]; 0 where the input is an image embedding
    image_rows  int64 [m], flat places of the image rows; `embeds` [m, width]
    hidden      [rows, width] or None
    positions   int64 [axes, rows]
    """

    parts: tuple[Part, ...]
    starts: tuple[int, ...]
    token_ids: Tensor
    image_rows: Tensor | None
    embeds: Tensor | None
    hidden: Tensor | None
    positions: Tensor
    _few: list[Few] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def few(self, caches: Mapping[int, Holder]) -> Few:
        """The few rows next to what `caches` hold of their sequences. Made once: a batch is for one forward."""
        if not self._few:
            parts = []
            for part, start in zip(self.parts, self.starts, strict=True):
                if not part.chunk:
                    holder = caches[part.sequence]
                    before = holder.rows + holder.provisional - part.num_rows
                    holder.make_room(part.num_rows)
                    parts.append(FewPart(start, part.num_rows, before, holder))
            self._few.append(Few.of(parts))
        return self._few[0]

    @cached_property
    def num_scored(self) -> int:
        return sum(part.num_scored for part in self.parts)

    @cached_property
    def scored(self) -> Tensor:
        """int64 [s], flat places of the scored rows, by part."""
        ends = [(start + part.num_rows, part.num_scored) for part, start in zip(self.parts, self.starts, strict=True)]
        return torch.cat([torch.arange(end - count, end) for end, count in ends])

    @cached_property
    def num_few(self) -> int:
        return sum(part.num_rows for part in self.parts if not part.chunk)

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Row ranges that one kernel call may span: tiles of few rows, then each chunk alone."""
        tiles = [(at, min(at + TILE, self.num_few)) for at in range(0, self.num_few, TILE)]
        chunks = [(s, s + p.num_rows) for p, s in zip(self.parts, self.starts, strict=True) if p.chunk]
        return (*tiles, *chunks)

    def rows_of(self, index: int) -> slice:
        """Flat rows of part `index`."""
        return slice(self.starts[index], self.starts[index] + self.parts[index].num_rows)

    def wanted(self) -> tuple[Batch, Tensor]:
        """Without the chunk rows that are not scored, for layers behind the last one that writes a cache; and the flat
        places [m] that its rows have here. Inputs are not carried along."""
        parts, places = [], []
        for index, part in enumerate(self.parts):
            rows = self.rows_of(index)
            keep = part.num_scored if part.chunk else part.num_rows
            if keep:
                parts.append(part.last(keep))
                places.append(torch.arange(rows.stop - keep, rows.stop))
        starts = np.cumsum([0, *(part.num_rows for part in parts)]).tolist()
        at = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
        batch = Batch(tuple(parts), tuple(starts[:-1]), self.token_ids[at], None, None, None, self.positions[:, at])
        return batch, at


def pack(parts: Sequence[Part], spec: InputSpec, held: Mapping[int, Holding]) -> Batch:
    """Flatten and validate. Raises `BatchError`; nothing is changed, whatever happens."""
    if len(parts) == 1 and parts[0].embeds is None:
        return _pack_one(parts[0], spec, held)
    ordered = sorted(parts, key=lambda part: part.chunk)
    for part in ordered:
        check(part, spec, held)
    if len({part.sequence for part in ordered}) != len(ordered):
        twice = next(p.sequence for i, p in enumerate(ordered) if p.sequence in {q.sequence for q in ordered[:i]})
        raise BatchError(twice, "appears twice in one batch; a sequence has one run of rows in a step")
    starts = np.cumsum([0, *(part.num_rows for part in ordered)]).tolist()
    image = np.concatenate([part.image for part in ordered])
    embeds = [part.embeds for part in ordered if part.embeds is not None and len(part.embeds)]
    return Batch(
        parts=tuple(ordered),
        starts=tuple(starts[:-1]),
        token_ids=torch.from_numpy(np.where(image, 0, np.concatenate([part.token_ids for part in ordered]))),
        image_rows=torch.from_numpy(np.flatnonzero(image)) if embeds else None,
        embeds=torch.cat(embeds) if embeds else None,
        hidden=torch.cat([part.hidden for part in ordered]) if spec.hidden_width else None,
        positions=torch.from_numpy(np.concatenate([part.positions.coords for part in ordered], axis=1)),
    )


def _pack_one(part: Part, spec: InputSpec, held: Mapping[int, Holding]) -> Batch:
    """One part without image rows, as most steps of a single sequence are: nothing to sort or to join."""
    check(part, spec, held)
    return Batch(
        parts=(part,),
        starts=(0,),
        token_ids=torch.from_numpy(part.token_ids),
        image_rows=None,
        embeds=None,
        hidden=part.hidden,
        positions=torch.from_numpy(np.array(part.positions.coords)),
    )


def check(part: Part, spec: InputSpec, held: Mapping[int, Holding]) -> None:
    """Every rule that one part must obey; raises `BatchError` naming the sequence and what to do."""
    name = part.sequence
    if name not in held:
        raise BatchError(name, "is not known to the cache; open it before its first rows")
    if part.num_rows == 0:
        raise BatchError(name, "has no rows in this batch; leave it out")
    if not part.num_rows == len(part.image) == len(part.positions):
        raise BatchError(
            name,
            f"has {part.num_rows} token ids, {len(part.image)} input kinds and {len(part.positions)} positions; "
            "each row has one of each",
        )
    if not 0 <= part.num_scored <= part.num_rows:
        raise BatchError(name, f"asks for {part.num_scored} scored rows of {part.num_rows}")
    _check_inputs(part, spec)
    _check_hidden(part, spec)
    if part.positions.axes != spec.rule.axes:
        raise BatchError(name, f"has positions on {part.positions.axes} axes, the model numbers on {spec.rule.axes}")
    if spec.strict_positions:
        try:
            in_image = part.image if part.in_image is None else part.in_image
            spec.rule.check(held[name].last, part.positions, in_image)
        except PositionError as error:
            raise BatchError(name, f"{error} ({held[name].rows} rows held)") from None


def _check_inputs(part: Part, spec: InputSpec) -> None:
    num_images = int(np.count_nonzero(part.image))
    tokens = part.token_ids[~part.image] if num_images else part.token_ids
    ids = tokens.tolist() if len(tokens) <= TILE else (int(tokens.min()), int(tokens.max()))
    if ids and not (min(ids) >= 0 and max(ids) < spec.vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= spec.vocab_size)]
        raise BatchError(part.sequence, f"token id {int(bad[0])} is outside the vocabulary of {spec.vocab_size}")
    num_embeds = 0 if part.embeds is None else len(part.embeds)
    if num_images != num_embeds:
        raise BatchError(
            part.sequence,
            f"has {num_images} image rows but {num_embeds} image embeddings; a row's input is exactly one of a token "
            "id and an image embedding",
        )
    if part.embeds is not None and num_embeds and part.embeds.shape[1] != spec.embed_width:
        raise BatchError(
            part.sequence,
            f"image embeddings are {part.embeds.shape[1]} wide, the model takes {spec.embed_width}",
        )


def _check_hidden(part: Part, spec: InputSpec) -> None:
    if spec.hidden_width is None:
        if part.hidden is not None:
            raise BatchError(part.sequence, "carries target hidden states, but this model takes none")
        return
    want = (part.num_rows, spec.hidden_width)
    got = None if part.hidden is None else tuple(part.hidden.shape)
    if got != want:
        raise BatchError(part.sequence, f"must carry target hidden states of shape {want}, got {got}")
