"""The operations through the native kernels (csrc/), for processors that they were compiled for.

A kernel is called with addresses and sizes. Calls can be recorded on the way (`record`): the record is a list that
`_native.run` repeats in one call, on the same buffers. What no kernel does (prompt chunks of the delta rule, masked
attention of chunks) is torch's, inherited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from foreglance.ops.base import Blocks, Gate, Scoring
from foreglance.ops.formats import GROUP, HALF_MAX, Quantised, blocked, blocked_groups, quantise
from foreglance.ops.torch_ops import TorchOps

try:
    from foreglance.ops import _native
except ImportError:  # installed without a compiler
    _native = None

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FORMAT_NUMBERS = {"fp32": 0, "fp16": 1, "q8": 2, "q4": 3}


def native_module() -> ModuleType | None:
    """The compiled kernels; None where they are missing."""
    return _native


@dataclass(frozen=True)
class NativeLinear:
    """A weight [out, in] in one of the formats: its data and, of quantised ones, its scales."""

    shape: tuple[int, int]
    format: str
    data: Tensor
    scales: Tensor | None

    @property
    def addresses(self) -> tuple[int, int]:
        return self.data.data_ptr(), 0 if self.scales is None else self.scales.data_ptr()


def pack(weight: Tensor | Quantised, format: str) -> NativeLinear:
    if format in ("q8", "q4"):
        if not isinstance(weight, Quantised):
            weight = quantise(weight, 8 if format == "q8" else 4)
        return NativeLinear(weight.shape, format, *blocked_groups(weight))
    if isinstance(weight, Quantised):
        weight = weight.restored()
    shape = (weight.shape[0], weight.shape[1])
    if format == "fp16":
        return NativeLinear(shape, format, blocked(weight.float().clamp(-HALF_MAX, HALF_MAX), torch.float16), None)
    return NativeLinear(shape, format, blocked(weight, torch.float32), None)


class NativeOps(TorchOps):
    """`Ops` on native kernels, for weights of one format."""

    def __init__(self, fallback: TorchOps, weights: str):
        super().__init__(fallback.path)
        assert _native is not None
        self._n = _native
        self._weights = weights
        self._call = _native.call
        self.name = f"native/{_native.using()}/{weights}"

    def pack_linear(self, weight: Tensor | Quantised) -> NativeLinear:
        return pack(weight, self._weights)

    def linear(self, x: Tensor, weight: NativeLinear, blocks: Blocks) -> Tensor:
        x = _rows(x)
        n, (num_out, num_in) = len(x), weight.shape
        out = x.new_empty(n, num_out)
        data, scales = weight.addresses
        if weight.scales is None:
            kernel = self._n.linear_fp32 if weight.format == "fp32" else self._n.linear_fp16
            self._call(kernel, data, x.data_ptr(), out.data_ptr(), n, num_out, num_in, x.stride(0), num_out)
            return out
        padded = -(-num_in // GROUP) * GROUP
        q = torch.empty(n, padded, dtype=torch.int8)
        of_rows = torch.empty(2, n, padded // GROUP)  # scales, and what the sums start from
        bits = 8 if weight.format == "q8" else 4
        args = q.data_ptr(), of_rows[0].data_ptr(), of_rows[1].data_ptr()
        self._call(self._n.quantize, x.data_ptr(), *args, n, num_in, padded, x.stride(0), bits)
        kernel = self._n.linear_q8 if bits == 8 else self._n.linear_q4
        self._call(kernel, data, scales, *args, out.data_ptr(), n, num_out, padded, num_out)
        return out

    def embedding(self, table: Tensor, token_ids: Tensor) -> Tensor:
        n, h = len(token_ids), table.shape[1]
        out = torch.empty(n, h)
        token_ids = token_ids.contiguous()
        self._call(self._n.embed, table.data_ptr(), TYPES[table.dtype], token_ids.data_ptr(), out.data_ptr(), n, h)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, None)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, gate)

    def _norm(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None) -> Tensor:
        out = torch.empty(x.shape)
        x = _heads(x)
        n, heads, h = x.shape
        gated = (0, 0, 0)
        if gate is not None:
            gate = _heads(gate)
            gated = gate.data_ptr(), gate.stride(0), gate.stride(1)
        of_head = h if weight.dim() == 2 else 0
        self._call(
            self._n.rms_norm, x.data_ptr(), weight.data_ptr(), out.data_ptr(), n, heads, h,
            x.stride(0), x.stride(1), of_head, eps, *gated,
        )  # fmt: skip
        return out

    def silu_mul(self, x: Tensor, limit: float | None = None) -> Tensor:
        return self._gate_mul(x, 0, float("inf") if limit is None else float(limit))

    def gelu_mul(self, x: Tensor) -> Tensor:
        return self._gate_mul(x, 1, float("inf"))

    def _gate_mul(self, x: Tensor, kind: int, limit: float) -> Tensor:
        x = _rows(x)
        n, inner = len(x), x.shape[1] // 2
        out = torch.empty(n, inner)
        self._call(self._n.gate_mul, x.data_ptr(), out.data_ptr(), n, inner, x.stride(0), kind, limit)
        return out

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        x, gate = _heads(x), _heads(gate)
        n, heads, d = x.shape
        per_column = int(gate.shape[2] == d and d > 1)
        self._call(
            self._n.sigmoid_mul, x.data_ptr(), gate.data_ptr(), out.data_ptr(), n, heads, d,
            x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), per_column,
        )  # fmt: skip
        return out

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = _heads(x), cos.contiguous(), sin.contiguous()
        n, heads, d = x.shape
        out = torch.empty(n, heads, d)
        self._call(
            self._n.rotary, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), n, heads, d, cos.shape[1],
            x.stride(0), x.stride(1),
        )  # fmt: skip
        return out

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape)
        x = x.reshape(-1, x.shape[-1])
        x = _rows(x)
        self._call(self._n.l2_norm, x.data_ptr(), out.data_ptr(), len(x), x.shape[1], x.stride(0), eps)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        x = _rows(x)
        out = torch.empty(x.shape)
        self._call(self._n.softcap, x.data_ptr(), out.data_ptr(), len(x), x.shape[1], x.stride(0), float(cap))
        return out

    def delta_gates(self, a: Tensor, b: Tensor, neg_rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _rows(a), _rows(b)
        n, heads = a.shape
        decay, beta = torch.empty(n, heads), torch.empty(n, heads)
        self._call(
            self._n.delta_gates, a.data_ptr(), b.data_ptr(), a.stride(0), b.stride(0), neg_rate.data_ptr(),
            dt_bias.data_ptr(), decay.data_ptr(), beta.data_ptr(), n, heads,
        )  # fmt: skip
        return decay, beta

    def route(self, logits: Tensor, bias: Tensor | None, top_k: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        n, count = logits.shape
        chosen, weights = torch.empty(n, top_k, dtype=torch.int64), torch.empty(n, top_k)
        scratch = torch.empty(n, 2 * count)
        self._call(
            self._n.route, logits.data_ptr(), 0 if bias is None else bias.data_ptr(), chosen.data_ptr(),
            weights.data_ptr(), n, count, top_k, 0 if scoring == "sigmoid" else 1, scratch.data_ptr(),
        )  # fmt: skip
        return chosen, weights

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Sequence[NativeLinear],
        down: Sequence[NativeLinear],
        limit: float | None,
        blocks: Blocks,
        gate: Gate = "silu",
    ) -> Tensor:
        x, chosen, weights = _rows(x), chosen.contiguous(), weights.contiguous()
        n, k = chosen.shape
        h, inner = x.shape[1], gate_up[0].shape[0] // 2
        addresses = [torch.tensor([one.addresses for one in side]) for side in (gate_up, down)]
        each, out = torch.empty(n, k, h), torch.empty(n, h)
        room = _expert_scratch(n, h, inner)
        threads = self._n.threads(torch.get_num_threads())
        scratch = torch.empty(threads * room, dtype=torch.uint8)
        self._call(
            self._n.experts, x.data_ptr(), chosen.data_ptr(), addresses[0].data_ptr(), addresses[1].data_ptr(),
            each.data_ptr(), n, k, len(gate_up), h, inner, float("inf") if limit is None else float(limit),
            int(gate == "gelu"), FORMAT_NUMBERS[gate_up[0].format], x.stride(0), scratch.data_ptr(), room,
        )  # fmt: skip
        self._call(self._n.combine, each.data_ptr(), weights.data_ptr(), out.data_ptr(), n, k, h)
        return out


def _expert_scratch(n: int, h: int, inner: int) -> int:
    """Bytes that one thread needs for an expert that every row chose: places, rows, products and quantised rows."""
    widest = -(-max(h, inner) // GROUP) * GROUP
    return -(-(8 * n + 4 * n * (2 * h + 3 * inner) + n * widest + 8 * n * widest // GROUP + 256) // 64) * 64


def _rows(x: Tensor) -> Tensor:
    """[n, h] whose rows are whole in memory."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _heads(x: Tensor) -> Tensor:
    """[n, h] or [n, heads, h] -> [n, heads, h] whose rows are whole in memory."""
    x = x if x.dim() == 3 else x.unsqueeze(1)
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
