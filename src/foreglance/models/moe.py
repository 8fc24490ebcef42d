"""Mixture of experts: each row is sent to its own few experts. Families share it; what stands beside it (a shared
expert, its gate) is theirs.

A row's bits do not depend on its batch: routing is per row, an expert multiplies the rows that chose it through the
packed linear path, and a row adds its experts up in the order of its own choice (`ops.route`, `ops.experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foreglance.ops.base import Blocks, Gate, Ops, PackedLinear, Scoring


class Blocked(Protocol):
    """A `Batch`, or whatever else knows which rows one call may span."""

    @property
    def blocks(self) -> Blocks: ...


@dataclass(frozen=True)
class Routing:
    """How a family chooses experts. `scale` multiplies their sum; `gate` is their activation, `limit` that of
    `ops.silu_mul`."""

    top_k: int
    scoring: Scoring
    scale: float = 1.0
    limit: float | None = None
    gate: Gate = "silu"


class Experts:
    """router [experts, h], bias [experts] or None, and of each expert, packed, gate_up [2 i, h] (gate before up) and
    down [h, i]."""

    def __init__(
        self,
        ops: Ops,
        router: Tensor,
        bias: Tensor | None,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        routing: Routing,
    ):
        self._ops, self._routing = ops, routing
        self._router = ops.pack_linear(router)
        self._bias = None if bias is None else bias.float()
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor, batch: Blocked) -> Tensor:
        """x [rows, h] -> [rows, h]."""
        how = self._routing
        logits = self._ops.linear(x, self._router, batch.blocks)
        chosen, weights = self._ops.route(logits, self._bias, how.top_k, how.scoring)
        out = self._ops.experts(x, chosen, weights, self._gate_up, self._down, how.limit, batch.blocks, how.gate)
        return out if how.scale == 1.0 else self._ops.scaled(out, how.scale)


def expert_shapes(hidden: int, inner: int, num_experts: int) -> set[tuple[int, int]]:
    """(out, in) of every product, for the self-test."""
    return {(num_experts, hidden), (2 * inner, hidden), (hidden, inner)}
