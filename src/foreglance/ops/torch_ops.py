"""The operations in torch.

Activations are written with exp: torch's own silu, sigmoid and tanh-gelu compute the rows of a vector's tail with other
instructions than its body, so a row's bits would depend on where it lies in the batch. Attention and the recurrent
state are computed row by row, each with a call that the row alone determines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foreglance.batch import Few
from foreglance.ops.base import Blocks, DeltaShape, Gate, Scoring
from foreglance.ops.linear import LinearPath, Packed

FEW = 16  # rows of a block that may also be computed one by one
CHUNK = 64  # rows of a block in the matrix form of the delta rule
_GELU = -2 * math.sqrt(2 / math.pi)
_LINEAR_BEYOND = 20.0  # softplus(x) is x in float32 from here on


class TorchOps:
    """`Ops` on torch CPU kernels. `rows_alone`: this machine's elementwise kernels failed the self-test, so row
    operations are called once per row."""

    def __init__(self, path: LinearPath, rows_alone: bool = False):
        self.name = f"torch/{path.name}" + ("+rows" if rows_alone else "")
        self.path = path
        self._rows_alone = rows_alone

    @property
    def draft(self) -> TorchOps:
        return self

    @property
    def kept_as(self) -> str | None:
        return None

    def pack_linear(self, weight: Tensor) -> Packed:
        return self.path.pack_linear(weight)

    def linear(self, x: Tensor, weight: Packed, blocks: Blocks) -> Tensor:
        return self.path.linear(x, weight, blocks)

    def embedding(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return table[token_ids].float()

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], -1)

    def angles(self, cos: Tensor, sin: Tensor, axis_of: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        at = positions[axis_of].t()  # [n, r]
        return cos.gather(0, at), sin.gather(0, at)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._by_row(lambda x: F.rms_norm(x, x.shape[-1:], None, eps) * weight, x)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._by_row(lambda x, g: F.rms_norm(x, x.shape[-1:], None, eps) * weight * _silu(g), x, gate)

    def silu_mul(self, x: Tensor, limit: float | None = None) -> Tensor:
        half = x.shape[-1] // 2
        if limit is None:
            return self._by_row(lambda x: _silu(x[:, :half]) * x[:, half:], x)
        return self._by_row(lambda x: _silu(x[:, :half]).clamp(max=limit) * x[:, half:].clamp(-limit, limit), x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return self._by_row(lambda x: _gelu(x[:, :half]) * x[:, half:], x)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._by_row(lambda x, g: x / (1 + torch.exp(-g)), x, gate)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        return self._by_row(lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps), x)

    def route(self, logits: Tensor, bias: Tensor | None, top_k: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
        scores = self._by_row(_sigmoid if scoring == "sigmoid" else _softmax, logits)
        ranked = scores if bias is None else scores + bias
        chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(-1, chosen)
        return chosen, weights / _in_order(weights.unbind(-1)).unsqueeze(-1)

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Sequence[Packed],
        down: Sequence[Packed],
        limit: float | None,
        blocks: Blocks,
        gate: Gate = "silu",
    ) -> Tensor:
        if self._rows_alone:
            blocks = [tile for start, stop in blocks for tile in _rows_of(start, stop)]
        gated = self.gelu_mul if gate == "gelu" else lambda x: self.silu_mul(x, limit)
        pieces = []
        for start, stop in blocks:
            out = self._by_expert(x[start:stop], chosen[start:stop], gate_up, down, gated)  # [rows, k, h]
            out = out * weights[start:stop].unsqueeze(-1)
            pieces.append(_in_order(out.unbind(1)))
        return torch.cat(pieces)

    def _by_expert(
        self,
        x: Tensor,
        chosen: Tensor,
        gate_up: Sequence[Packed],
        down: Sequence[Packed],
        gated: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """One product for all rows of a block that chose the same expert: -> [n, k, h]. A row is with an expert at most
        once, so few rows stay few, and the linear path gives each the bits that it has alone."""
        n, k = chosen.shape
        places = chosen.flatten()  # row * k + rank
        order = places.argsort(stable=True)
        found, counts = places[order].unique_consecutive(return_counts=True)
        out = x.new_empty(n * k, x.shape[-1])
        for expert, mine in zip(found.tolist(), order.split(counts.tolist()), strict=True):
            whole = [(0, len(mine))]
            inner = gated(self.linear(x[mine // k], gate_up[expert], whole))
            out[mine] = self.linear(inner, down[expert], whole)
        return out.view(n, k, -1)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """One call for each row, however many there are: logits are wide, and who shares a batch must not matter."""
        return torch.cat([torch.tanh(row.clone() / cap) * cap for row in x.split(1)]) if len(x) else x

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = cos.shape[-1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        left, right = x[..., :r], x[..., r : 2 * r]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, x[..., 2 * r :]], -1)

    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        heads, size = query.shape
        # The query heads of a kv head are the query rows of one call, [1, kv heads, group, d]: keys are not copied.
        grouped = query.clone().view(1, keys.shape[0], -1, size)
        out = F.scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0), scale=scale)
        return out.reshape(heads * size)

    def write_few(self, few: Few, layer: int, keys: Tensor, values: Tensor) -> None:
        for part in few.parts:
            rows = slice(part.start, part.start + part.num_rows)
            part.holder.layers[layer].write(part.before, keys[rows], values[rows])

    def attend_few(self, few: Few, layer: int, query: Tensor, scale: float) -> Tensor:
        """One call per row with the rows that it sees, so that a row's bits do not depend on who was verified with
        it."""
        out = []
        for part in few.parts:
            cache = part.holder.layers[layer]
            window = cache.spec.window
            for i in range(part.num_rows):
                stop = part.before + i + 1
                seen = cache.read(0 if window is None else max(0, stop - window), stop)
                out.append(self.attend_row(query[part.start + i], *seen, scale))
        return torch.stack(out)

    def attend_chunk(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Tensor:
        n, heads, size = query.shape
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        # [1, kv heads, group * n, d]: the group's heads follow each other as rows under a repeated mask.
        grouped = query.view(n, kv_heads, group, size).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, size)
        out = F.scaled_dot_product_attention(
            grouped, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask.repeat(group, 1), scale=scale
        )
        return out.view(kv_heads, group, n, size).permute(2, 0, 1, 3).reshape(n, heads * size)

    def causal_conv(self, x: Tensor, tail: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([tail, x])
        n, width = len(x), weight.shape[1]
        total = window[:n] * weight[:, 0]
        for j in range(1, width):
            total = total + window[j : j + n] * weight[:, j]
        return self._by_row(_silu, total), window

    def delta_gates(self, a: Tensor, b: Tensor, neg_rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        step = a + dt_bias
        softplus = self._by_row(lambda s: torch.where(s > _LINEAR_BEYOND, s, torch.log1p(torch.exp(s))), step)
        return softplus * neg_rate, self._by_row(lambda b: 1 / (1 + torch.exp(-b)), b)

    def delta_rows(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        decay = self._by_row(torch.exp, log_decay)[..., None, None]
        k, q, beta = k.unsqueeze(-1), q.unsqueeze(-1), beta.unsqueeze(-1)
        out, states = [], []
        for row in range(len(v)):
            state = state * decay[row]
            delta = (v[row] - (state * k[row]).sum(-2)) * beta[row]
            state = state + k[row] * delta.unsqueeze(-2)
            out.append((state * q[row]).sum(-2))
            states.append(state)
        return torch.stack(out), states

    def delta_few(
        self, few: Few, layer: int, mixed: Tensor, log_decay: Tensor, beta: Tensor, conv: Tensor, how: DeltaShape
    ) -> Tensor:
        pieces, width = [], conv.shape[1]
        for part in few.parts:
            rows, cache = slice(part.start, part.start + part.num_rows), part.holder.layers[layer]
            tail, state = cache.read()
            convolved, window = self.causal_conv(mixed[rows], tail, conv)
            out, states = self.delta_rows(*how.split(convolved, self), log_decay[rows], beta[rows], state)
            for i, state in enumerate(states):
                cache.write(i + 1, (window[i + 1 : i + width], state))
            pieces.append(out)
        return torch.cat(pieces)

    def delta_chunk(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        pieces = []
        for start in range(0, len(q), CHUNK):
            part = slice(start, start + CHUNK)
            piece, state = _delta_block(q[part], k[part], v[part], log_decay[part], beta[part], state)
            pieces.append(piece)
        return torch.cat(pieces), state

    def _by_row(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        if not self._rows_alone or len(rows[0]) == 1 or len(rows[0]) > FEW:
            return function(*rows)
        return torch.cat([function(*(r[i : i + 1].clone() for r in rows)) for i in range(len(rows[0]))])


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _softmax(x: Tensor) -> Tensor:
    grown = torch.exp(x - x.amax(-1, keepdim=True))
    return grown / grown.sum(-1, keepdim=True)


def _in_order(terms: Sequence[Tensor]) -> Tensor:
    """A sum whose order is that of its terms."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _rows_of(start: int, stop: int) -> list[tuple[int, int]]:
    """A few-row block as blocks of one row; a chunk stays whole."""
    return [(start, stop)] if stop - start > FEW else [(row, row + 1) for row in range(start, stop)]


def _gelu(x: Tensor) -> Tensor:
    """The tanh form, x / 2 * (1 + tanh(u)), with the same number written as x * sigmoid(2 u)."""
    return x / (1 + torch.exp(_GELU * (x + x * x * x * 0.044715)))


def _delta_block(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over at most `CHUNK` rows in matrix form (Yang, Kautz and Hatamizadeh, "Gated Delta Networks",
    2024): the rows' writes solve one unit lower triangular system per head.

    q, k [n, heads, dk], v [n, heads, dv], log_decay and beta [n, heads], state [heads, dk, dv].
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, n, d]
    beta = beta.t().unsqueeze(-1)  # [heads, n, 1]
    total = log_decay.t().cumsum(-1)  # [heads, n]: log decay from before the block to row i
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # [heads, i, j <= i]
    before = total.exp().unsqueeze(-1)
    system = (beta * k) @ k.transpose(-1, -2) * between
    wanted = beta * (v - before * (k @ state))
    writes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [heads, n, dv]
    out = before * (q @ state) + (q @ k.transpose(-1, -2) * between) @ writes
    after = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = state * total[:, -1].exp()[:, None, None] + (after * k).transpose(-1, -2) @ writes
    return out.transpose(0, 1), state
