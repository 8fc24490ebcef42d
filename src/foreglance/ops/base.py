"""The protocol of the operations: signatures and shapes.

n rows; every output is new and its shape follows from the inputs' shapes, never from values, so that a step can be
recorded once per shape. `blocks` are the row ranges of a batch that one call may span (`Batch.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from foreglance.batch import Few

Blocks = Sequence[tuple[int, int]]
Scoring = Literal["sigmoid", "softmax"]
Gate = Literal["silu", "gelu"]


class PackedLinear(Protocol):
    """A weight [out, in] in the layout that an implementation wants. Opaque to everybody else."""

    shape: tuple[int, int]


@dataclass(frozen=True)
class DeltaShape:
    """Heads and their sizes in a gated delta net, and what its q and k are normed with."""

    k_heads: int
    v_heads: int
    k_size: int
    v_size: int
    eps: float

    def split(self, mixed: Tensor, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        """mixed [n, channels] -> q, k [n, value heads, dk] (normed, q scaled) and v [n, value heads, dv]."""
        n, keys = len(mixed), self.k_heads * self.k_size
        qk, v = mixed.split([2 * keys, self.v_heads * self.v_size], -1)
        qk = ops.l2_norm(qk.view(n, 2 * self.k_heads, self.k_size), self.eps)
        qk = qk.repeat_interleave(self.v_heads // self.k_heads, 1)
        return qk[:, : self.v_heads] * self.k_size**-0.5, qk[:, self.v_heads :], v.view(n, self.v_heads, self.v_size)


class Ops(Protocol):
    """What a family's forward is written in."""

    name: str

    @property
    def draft(self) -> Ops:
        """The operations of draft heads, perhaps on smaller weights: their numbers change no token."""
        ...

    @property
    def kept_as(self) -> str | None:
        """The format of packed weights that are worth keeping on disk, since they take long to make; None if not."""
        ...

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        """weight [out, in] -> packed; the original may be dropped."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear, blocks: Blocks) -> Tensor:
        """x [n, in] -> [n, out]."""
        ...

    def embedding(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """table [vocab, h] of any float type, token_ids [n] -> float32 [n, h]."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, both [n, h]."""
        ...

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """x [n, ...] times a constant."""
        ...

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        """x [n, a], y [n, b] -> [n, a + b]."""
        ...

    def angles(self, cos: Tensor, sin: Tensor, axis_of: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of rotary tables: cos, sin [positions, r], axis_of int64 [r] (which axis each frequency reads),
        positions int64 [axes, n] -> cos, sin [n, r]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., h] times weight [h] or [heads, h]; a family that stores w - 1 adds the one at load."""
        ...

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm(x) * silu(gate); x and gate [..., h]."""
        ...

    def silu_mul(self, x: Tensor, limit: float | None = None) -> Tensor:
        """x [n, 2 i], gate before up -> silu(gate) * up [n, i]; `limit` caps silu(gate), and up on both sides."""
        ...

    def gelu_mul(self, x: Tensor) -> Tensor:
        """x [n, 2 i], gate before up -> gelu(gate) * up [n, i]; gelu in its tanh form."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate), same shapes, or one gate for each head: x [n, heads, d], gate [n, heads, 1]."""
        ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first 2 r of each head (halves convention): x [n, heads, d], cos and sin [n, r] -> like x."""
        ...

    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """One row over the rows that it sees: query [heads, d], keys and values [kv heads, l, d] -> [heads * d]."""
        ...

    def write_few(self, few: Few, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [few rows, kv heads, d] behind what each sequence holds in cache `layer`."""
        ...

    def attend_few(self, few: Few, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [few rows, heads, d] -> [few rows, heads * d]: each row over the rows of its sequence up to itself, of
        them the last ones if the cache has a window. Their keys and values were written before."""
        ...

    def attend_chunk(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Tensor:
        """A prompt chunk: query [n, heads, d], keys and values [kv heads, l, d], mask bool [n, l] -> [n, heads * d]."""
        ...

    def causal_conv(self, x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Depthwise convolution over rows, then silu: x [n, c], tail [w - 1, c] the inputs before, weight [c, w]
        -> (out [n, c], window [w - 1 + n, c], of which rows [i + 1, i + w) are the tail after row i)."""
        ...

    def delta_gates(self, a: Tensor, b: Tensor, neg_rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """a, b [n, heads] -> (log decay = neg_rate * softplus(a + dt_bias), beta = sigmoid(b))."""
        ...

    def delta_rows(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The gated delta rule row by row: q, k [n, heads, dk] (normalised, q scaled), v [n, heads, dv], log_decay and
        beta [n, heads], state [heads, dk, dv] -> (out [n, heads, dv], the n states)."""
        ...

    def delta_few(
        self, few: Few, layer: int, mixed: Tensor, log_decay: Tensor, beta: Tensor, conv: Tensor, how: DeltaShape
    ) -> Tensor:
        """Few rows through `causal_conv`, `l2_norm` and `delta_rows` from the state that cache `layer` holds, leaving a
        snapshot after each: mixed [rows, 2 key heads * dk + value heads * dv], log_decay and beta [rows, value heads],
        conv [channels, width] -> [rows, value heads, dv]."""
        ...

    def delta_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for a prompt chunk in matrix form -> (out, the last state)."""
        ...

    def route(self, logits: Tensor, bias: Tensor | None, top_k: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Router logits [n, experts] -> (chosen experts int64 [n, k], best first, their weights [n, k] that add up to
        one). `bias` [experts] counts for the choice, never for the weights."""
        ...

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        limit: float | None,
        blocks: Blocks,
        gate: Gate = "silu",
    ) -> Tensor:
        """Each row through its own experts, down(silu_mul(gate_up(x))) or gelu_mul, added up in the order of its
        choice: x [n, h], chosen and weights [n, k] -> [n, h]. `limit` is that of `silu_mul`."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap); x [n, d], e.g. logits."""
        ...

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """x [..., d] over the root of its sum of squares plus eps."""
        ...
