"""A family's tensors, by the names that they have under a prefix, packed for the ops in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from foreglance.models.weights import FLOATS, Weights
from foreglance.ops.base import Ops, PackedLinear


@dataclass(frozen=True)
class Loader:
    ops: Ops
    weights: Weights
    prefix: str

    def at(self, name: str) -> Self:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def tensor(self, name: str, *shape: int, kinds: Sequence[torch.dtype] = FLOATS) -> Tensor:
        return self.weights.take(self.prefix + name, *shape, kinds=kinds)

    def norm(self, name: str, size: int) -> Tensor:
        return self.tensor(f"{name}.weight", size).float()

    def linear(self, names: dict[str, int], num_in: int) -> PackedLinear:
        """Several weights [out, in] by name and out as one."""
        return self.packed(
            [f"{name}.weight" for name in names],
            lambda: torch.cat([self.tensor(f"{name}.weight", out, num_in) for name, out in names.items()]),
        )

    def packed(self, names: Sequence[str], make: Callable[[], Tensor]) -> PackedLinear:
        """What `make` makes of these tensors alone, see `Weights.packed`."""
        return self.weights.packed(self.ops, [self.prefix + name for name in names], make)

    def packed_each(self, names: Sequence[str], make: Callable[[], Iterable[Tensor]]) -> list[PackedLinear]:
        return self.weights.packed_each(self.ops, [self.prefix + name for name in names], make)


class CentredLoader(Loader):
    """Of families that store the weights of their norms less one."""

    def norm(self, name: str, size: int) -> Tensor:
        return super().norm(name, size) + 1
