"""How a tensor of a hub checkpoint is spelled in a GGUF file: names, and what is changed on the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Change:
    """What happens to a tensor: `store` gives the tensors of the file, as many as it has names there, `load` takes
    them back."""

    store: Callable[[Tensor], tuple[Tensor, ...]]
    load: Callable[..., Tensor]


@dataclass(frozen=True)
class Spelling:
    """A tensor in both worlds. `file` are its names there; `keep` may not be quantised."""

    hub: str
    file: tuple[str, ...]
    change: Change
    keep: bool = False


AS_IT_IS = Change(lambda t: (t,), lambda t: t)
PLUS_ONE = Change(lambda t: (t.float() + 1,), lambda t: t.float() - 1)  # norms that are stored zero-centred
RATE = Change(lambda t: (-t.float().exp(),), lambda t: (-t.float()).log())  # A_log
SQUEEZED = Change(lambda t: (t.squeeze(1),), lambda t: t.unsqueeze(1))  # a depthwise convolution [c, 1, w]
HALVES = Change(lambda t: t.chunk(2, 1), lambda gate, up: torch.cat([gate, up], 1))  # gate and up of fused experts
FRAMES = Change(lambda t: t.unbind(2), lambda first, second: torch.stack([first, second], 2))  # a 3-d convolution


def tiled(rows: int, groups: int, each: int, size: int, dim: int = 0) -> Change:
    """Heads behind the first `rows` entries of `dim`, stored as [each, groups] instead of [groups, each]: llama.cpp
    repeats keys by tiling, transformers by interleaving."""

    def turned(tensor: Tensor, outer: int, inner: int) -> Tensor:
        fixed, heads = tensor.split([rows, tensor.shape[dim] - rows], dim)
        return torch.cat(
            [fixed, heads.unflatten(dim, (outer, inner, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)], dim
        )

    return Change(lambda t: (turned(t, groups, each),), lambda t: turned(t, each, groups))


def both(first: Change, second: Change) -> Change:
    """One after the other, for tensors with one name in the file."""
    return Change(lambda t: second.store(*first.store(t)), lambda t: first.load(second.load(t)))


@dataclass
class Speller:
    """Collects spellings under prefixes."""

    made: list[Spelling] = field(default_factory=list)

    def add(self, hub: str, *file: str, change: Change = AS_IT_IS, keep: bool = False) -> None:
        self.made.append(Spelling(hub, file, change, keep))

    def under(
        self, hub: str, file: str, names: Mapping[str, str], change: Change = AS_IT_IS, keep: bool = False
    ) -> None:
        """Names under a prefix on each side."""
        for ours, theirs in names.items():
            self.add(f"{hub}{ours}", f"{file}{theirs}", change=change, keep=keep)
