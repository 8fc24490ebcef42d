"""What a family declares and does: the protocols that the engine and the drafters rely on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from torch import Tensor

from foreglance.batch import Batch, InputSpec
from foreglance.cache.store import LayerSpec, SequenceCache
from foreglance.images import Picture
from foreglance.prompt import ImageInput, PositionRule

Caches = Mapping[int, SequenceCache]
State = Literal["post_norm", "pre_norm"]  # behind or before the final norm: which state is handed on


class ModelError(ValueError):
    """A model that cannot be loaded or used, said so that a person can act on it."""


@dataclass(frozen=True)
class ModelSpec:
    """The facts of a loaded target.

    context       rows that positions and training allow
    whole_images  image rows see each other, so a prompt chunk may not end inside an image
    image_token   placeholder id; only `prompt` looks at it
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    context: int
    rule: PositionRule
    caches: tuple[LayerSpec, ...]
    whole_images: bool
    image_token: int
    eos: frozenset[int]

    @cached_property
    def inputs(self) -> InputSpec:
        return InputSpec(self.vocab_size, self.hidden_size, None, self.rule)


@dataclass(frozen=True)
class HeadSpec:
    """The facts of a draft head that keeps its own cache.

    A head's row t consumes (target hidden state of row t, input of row t + 1).

    num_modules   modules of the head; module i serves depth i, the last one every depth beyond
    position_of   which of the row's two inputs it is numbered as: "input" (x of row t + 1) or "hidden" (row t). Engines
                  disagree (docs/exactness.md); they differ only at image borders
    """

    family: str
    vocab_size: int
    hidden_size: int
    rule: PositionRule
    caches: tuple[LayerSpec, ...]
    num_modules: int
    position_of: Literal["input", "hidden"]
    placeholder: int

    def inputs(self, strict_positions: bool = True) -> InputSpec:
        return InputSpec(self.vocab_size, self.hidden_size, self.hidden_size, self.rule, strict_positions)


class DraftHead(Protocol):
    """A head trained with the target (multi-token prediction), with caches of its own."""

    spec: HeadSpec

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Write provisional rows; -> [rows, hidden], what is chained to the next depth."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        ...


class ChainedHead(Protocol):
    """Several modules, one for each depth. Module i at row t consumes (state of module i - 1 at row t, input of row
    t + 1 + i); module 0 is fed the target's state. Each has a cache of its own, so each is a head of one module.

    `spec.caches` are those of all modules.
    """

    spec: HeadSpec
    modules: tuple[DraftHead, ...]


class Target(Protocol):
    """A loaded family. `head` is a `ChainedHead` exactly if its spec has more than one module."""

    spec: ModelSpec
    head: DraftHead | ChainedHead | None

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Write provisional rows; -> hidden [rows, hidden], the state that a draft head is fed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        ...

    def prepare(self, picture: Picture) -> ImageInput:
        """The family's image processor."""
        ...

    def embed_image(self, image: ImageInput) -> Tensor:
        """The vision tower: -> float32 [rows, hidden]."""
        ...


def tiles_of(num_rows: int, tile: int) -> list[tuple[int, int]]:
    """Blocks for rows that are no batch, e.g. the scored ones."""
    return [(at, min(at + tile, num_rows)) for at in range(0, num_rows, tile)]
