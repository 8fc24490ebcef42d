"""The operations through the native kernels (csrc/), for processors that they were compiled for.

A kernel is called with addresses and sizes. Calls can be recorded on the way (`record`): the record is a list that
`_native.run` repeats in one call, on the same buffers. What no kernel does (prompt chunks of the delta rule, masked
attention of chunks) is torch's, inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foreglance.batch import Few
from foreglance.ops.base import Blocks, DeltaShape, Gate, Scoring
from foreglance.ops.formats import BLOCK, GROUP, HALF_MAX, Quantised, blocked, blocked_groups, quantise
from foreglance.ops.sources import digest
from foreglance.ops.torch_ops import TorchOps

NOT_COMPILED = "installed without a compiler, so torch's kernels, which are slower: install again where gcc or clang is"
OUTDATED = "the compiled kernels are of other sources than these, so torch's kernels, which are slower: install again"

try:
    from foreglance.ops import _native
except ImportError:
    _native = None
is_outdated = _native is not None and digest() not in (None, vars(_native).get("sources"))
if is_outdated:
    _native = None

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ARGS_OF_A_LINE = 24  # MAX_ARGS of csrc/fg.h
FORMAT_NUMBERS = {"fp32": 0, "fp16": 1, "q8": 2, "q4": 3}


def native_module() -> ModuleType | None:
    """The compiled kernels; None where they are missing, or were compiled from other sources than those beside them."""
    return _native


def missing() -> str | None:
    """Why there are no compiled kernels, in words."""
    if _native is not None:
        return None
    return OUTDATED if is_outdated else NOT_COMPILED


class Lines:
    """Recorded calls as `_native.run` reads them: int64 [calls, 1 + `ARGS_OF_A_LINE`]; numbers with a fraction keep
    their bits. `name` and `num_rows` say what they are for."""

    def __init__(self, calls: Sequence[tuple[int, Sequence[int | float]]], name: str = "", num_rows: int = 0):
        self.name, self.num_rows = name, num_rows
        self.cells = np.zeros((len(calls), 1 + ARGS_OF_A_LINE), np.int64)
        for line, (kernel, args) in zip(self.cells, calls, strict=True):
            line[0] = kernel
            for i, arg in enumerate(args, 1):
                line[i] = np.float64(arg).view(np.int64) if isinstance(arg, float) else arg
        self.address, self.count = self.cells.ctypes.data, len(calls)

    def names(self) -> list[tuple[str, str]]:
        """For each call its kernel, and what it works on in words."""
        return [_described(int(line[0]), line[1:].tolist()) for line in self.cells]


Runner = Callable[[ModuleType, Lines, int], None]
_RUNNER: ContextVar[Runner | None] = ContextVar("runner", default=None)


@contextmanager
def run_by(runner: Runner) -> Iterator[None]:
    """Within, `runner` (of the kernels' module, recorded calls, and how often) repeats what is recorded, for example
    to time it."""
    before = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(before)


# Which arguments of a kernel say on what it works, in words (n rows); the rest is in csrc/kernels.h.
SIZES = {
    "embed": "n = {4}, {5} wide", "angles": "n = {6}, {7} wide", "add": "n = {3}, {4} wide",
    "scale": "n = {2}, {3} wide",
    "copy": "n = {2}, {3} wide", "softcap": "n = {2}, {3} wide", "l2_norm": "n = {2}, {3} wide",
    "linear_fp32": "n = {3}, {5} to {4}", "linear_fp16": "n = {3}, {5} to {4}", "quantize": "n = {4}, {5} wide",
    "linear_q8": "n = {6}, {8} to {7}", "linear_q4": "n = {6}, {8} to {7}",
    "rms_norm": "n = {3}, {4} heads of {5}", "gate_mul": "n = {2}, {3} wide",
    "sigmoid_mul": "n = {3}, {4} heads of {5}", "rotary": "n = {4}, {5} heads of {6}",
    "write_rows": "cache {1}, {4} heads of {5}", "attend_rows": "cache {1}, {4} heads over {5} of {6}",
    "conv_rows": "cache {1}, {5} channels", "delta_gates": "n = {8}, {9} heads",
    "delta_rows": "cache {1}, {7} heads of {8} x {9}", "route": "n = {4}, {6} of {5} experts",
    "experts": "n = {5}, {6} of {7} experts, {8} to {9}", "combine": "n = {3}, {4} x {5}",
    "pick_rows": "n = {4}, {5} wide", "advance": "n = {3}",
    "linear_own": "n = {5}, {6} to at most {8}", "pick_own": "n = {4}, {5} wide and at most {10}",
}  # fmt: skip


def _described(kernel: int, args: list[int]) -> tuple[str, str]:
    name = next(name for name, number in vars(_native).items() if number == kernel and name in SIZES)
    return name, SIZES[name].format(*args)


class Borrowed:
    """Keys and values [kv heads, rows, d] that others wrote, all seen by one row, as `attend_rows` reads them."""

    def __init__(self, keys: Tensor, values: Tensor):
        self._block = np.array([keys.data_ptr(), values.data_ptr(), keys.stride(0), 0], np.int64)
        self._address = np.array([self._block.ctypes.data], np.int64)
        self.few = Few((), np.array([1, 0, 1, keys.shape[1] - 1, self._address.ctypes.data], np.int64))


class Recorder(Protocol):
    """Hears of every kernel call and of every buffer that is made for one."""

    def add(self, kernel: int, args: tuple[int | float, ...]) -> None: ...

    def keep(self, buffer: Tensor) -> None: ...


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


class Gathered:
    """Some outputs of a weight, in memory of their own: `numbers` [count], in the order in which they were asked for.
    Beyond `most` the oldest make place. `cells` int64 [4] are the same for kernels (`Own` of csrc/kernels.h)."""

    def __init__(self, weight: NativeLinear, most: int):
        self._from, self._most = weight, most
        self._added = 0
        self.cells, self._numbers = np.zeros(4, np.int64), np.zeros(0, np.int64)
        self._data, self._scales = weight.data[:0], None if weight.scales is None else weight.scales[:0]

    def __len__(self) -> int:
        return min(self._added, self._most)

    @property
    def numbers(self) -> np.ndarray:
        return self._numbers[: len(self)]

    @property
    def weight(self) -> NativeLinear:
        """[count, in]."""
        return NativeLinear((len(self), self._from.shape[1]), self._from.format, self._data, self._scales)

    def add(self, numbers: np.ndarray) -> None:
        """int64 [n], at most `most`, none of which is there."""
        self._make_room(min(self._added + len(numbers), self._most))
        to = np.arange(self._added, self._added + len(numbers)) % self._most
        self._numbers[to] = numbers
        at, of = torch.from_numpy(to), torch.from_numpy(numbers)
        _lanes(self._data)[at // BLOCK, at % BLOCK] = _lanes(self._from.data)[of // BLOCK, of % BLOCK]
        if self._scales is not None and self._from.scales is not None:
            _lanes(self._scales)[at // BLOCK, at % BLOCK] = _lanes(self._from.scales)[of // BLOCK, of % BLOCK]
        self._added += len(numbers)
        self.cells[:] = *self.weight.addresses, self._numbers.ctypes.data, len(self)

    def _make_room(self, count: int) -> None:
        """Twice as much as before, so that memory is seldom copied."""
        blocks = len(self._data)
        if count <= blocks * BLOCK:
            return
        more = max(-(-count // BLOCK), 2 * blocks) - blocks
        self._numbers = np.concatenate([self._numbers, np.zeros(more * BLOCK, np.int64)])
        self._data = torch.cat([self._data, self._data.new_zeros(more, *self._data.shape[1:])])
        if self._scales is not None:
            self._scales = torch.cat([self._scales, self._scales.new_zeros(more, *self._scales.shape[1:])])


def _lanes(blocks: Tensor) -> Tensor:
    """[out / 16, ..., 16] or, of quantised data, [out / 16, ..., 16, 4 bytes] -> [out / 16, 16, ...]."""
    if blocks.dtype == torch.uint8:
        blocks = blocks.view(torch.int32).squeeze(-1)
    return blocks.movedim(-1, 1)


class Owned:
    """Which `Gathered` outputs of one weight each of `num_rows` rows has of its own, as kernels read it."""

    def __init__(self, num_rows: int, weight: NativeLinear, most: int):
        self.weight, self.most = weight, most
        self.cells = np.zeros((num_rows, 4), np.int64)

    def set(self, row: int, own: Gathered | None) -> None:
        self.cells[row] = 0 if own is None else own.cells


class NativeOps(TorchOps):
    """`Ops` on native kernels, for weights of one format."""

    def __init__(self, fallback: TorchOps, weights: str, draft_weights: str | None = None):
        """`draft_weights`: the format of draft heads; None: the same."""
        super().__init__(fallback.path)
        assert _native is not None
        self._n = _native
        self._weights = weights
        self.name = f"native/{_native.using()}/{weights}"
        self.recorder: Recorder | None = None
        self._draft = self if draft_weights in (None, weights) else NativeOps(fallback, str(draft_weights))
        # Held with what they were made from, so that an address is never another tensor's.
        self._convolutions: dict[int, tuple[Tensor, Tensor]] = {}
        self._experts: dict[int, tuple[Sequence[NativeLinear], np.ndarray]] = {}

    @property
    def draft(self) -> NativeOps:
        return self._draft

    @property
    def kept_as(self) -> str | None:
        return self._weights if self._weights in ("q8", "q4") else None

    def _call(self, kernel: int, *args: int | float) -> None:
        self._n.call(kernel, *args)
        if self.recorder is not None:
            self.recorder.add(kernel, args)

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        if self.recorder is not None:
            self.recorder.keep(out)
        return out

    def run(self, lines: Lines, times: int = 1) -> None:
        """Repeat recorded calls."""
        runner = _RUNNER.get()
        if runner is None:
            self._n.run(lines.address, lines.count, times)
        else:
            runner(self._n, lines, times)

    def pick_rows(
        self, logits: Tensor, token_ids: Tensor, picks: np.ndarray, cells: np.ndarray, ids: Tensor | None = None
    ) -> None:
        """Pick a token for each row [n, vocab] as `sampling.pick` does without filters: into `token_ids` [n] and behind
        the picks that there are, picks int64 [depth, n]. cells: how many there are, then for each row its temperature
        (the bits of a float64), its seed and the number of its first token. `ids` int64 [vocab], ascending: what each
        column stands for, if not for its own number."""
        n, vocab = logits.shape
        self._call(
            self._n.pick_rows, logits.data_ptr(), token_ids.data_ptr(), picks.ctypes.data, cells.ctypes.data, n, vocab,
            logits.stride(0), 0 if ids is None else ids.data_ptr(),
        )  # fmt: skip

    def pick_own(
        self,
        logits: Tensor,
        own_logits: Tensor,
        own: Owned,
        token_ids: Tensor,
        picks: np.ndarray,
        cells: np.ndarray,
        ids: Tensor,
    ) -> None:
        """Behind `pick_rows`: each row's pick is that among its own outputs too, `own_logits` [n, most]."""
        n, vocab = logits.shape
        self._call(
            self._n.pick_own, logits.data_ptr(), token_ids.data_ptr(), picks.ctypes.data, cells.ctypes.data, n, vocab,
            logits.stride(0), ids.data_ptr(), own.cells.ctypes.data, own_logits.data_ptr(), own_logits.stride(0),
        )  # fmt: skip

    def advance(self, cells: np.ndarray, few: Few, positions: Tensor) -> None:
        """One more pick in `cells`; every part of `few` one row further, and positions [axes, n] one coordinate."""
        axes, n = positions.shape
        self._call(self._n.advance, cells.ctypes.data, few.address, positions.data_ptr(), n, axes)

    def copied(self, x: Tensor, out: Tensor) -> None:
        """x [n, h] into `out`."""
        n, h = x.shape
        self._call(self._n.copy, x.data_ptr(), out.data_ptr(), n, h, x.stride(0), out.stride(0))

    def pack_linear(self, weight: Tensor | Quantised) -> NativeLinear:
        return pack(weight, self._weights)

    def linear(self, x: Tensor, weight: NativeLinear, blocks: Blocks) -> Tensor:
        x = _rows(x)
        n, (num_out, num_in) = x.shape[0], weight.shape
        out = self._new(n, num_out)
        data, scales = weight.addresses
        if weight.scales is None:
            kernel = self._n.linear_fp32 if weight.format == "fp32" else self._n.linear_fp16
            self._call(kernel, data, x.data_ptr(), out.data_ptr(), n, num_out, num_in, x.stride(0), num_out)
            return out
        q, of_rows = self._quantised(x, weight)
        kernel = self._n.linear_q8 if weight.format == "q8" else self._n.linear_q4
        args = q.data_ptr(), of_rows[0].data_ptr(), of_rows[1].data_ptr(), out.data_ptr()
        self._call(kernel, data, scales, *args, n, num_out, q.shape[1], num_out)
        return out

    def _quantised(self, x: Tensor, weight: NativeLinear) -> tuple[Tensor, Tensor]:
        """x [n, in] as `weight` is multiplied with: int8 [n, padded], and [2, n, groups] scales and what the sums start
        from."""
        n, num_in = x.shape
        padded = -(-num_in // GROUP) * GROUP
        q = self._new(n, padded, dtype=torch.int8)
        of_rows = self._new(2, n, padded // GROUP)
        args = q.data_ptr(), of_rows[0].data_ptr(), of_rows[1].data_ptr()
        bits = 8 if weight.format == "q8" else 4
        self._call(self._n.quantize, x.data_ptr(), *args, n, num_in, padded, x.stride(0), bits)
        return q, of_rows

    def linear_own(self, x: Tensor, own: Owned) -> Tensor:
        """x [n, in] -> [n, most]: each row by its own outputs; what lies behind them is left as it is."""
        x = _rows(x)
        n, out = x.shape[0], self._new(x.shape[0], own.most)
        of_rows = None
        if own.weight.scales is not None:
            x, of_rows = self._quantised(x, own.weight)
        scales = (0, 0) if of_rows is None else (of_rows[0].data_ptr(), of_rows[1].data_ptr())
        self._call(
            self._n.linear_own, own.cells.ctypes.data, x.data_ptr(), *scales, out.data_ptr(), n, x.shape[1],
            x.stride(0), own.most, FORMAT_NUMBERS[own.weight.format],
        )  # fmt: skip
        return out

    def embedding(self, table: Tensor, token_ids: Tensor) -> Tensor:
        token_ids = token_ids.contiguous()
        n, h = token_ids.shape[0], table.shape[1]
        out = self._new(n, h)
        self._call(self._n.embed, table.data_ptr(), TYPES[table.dtype], token_ids.data_ptr(), out.data_ptr(), n, h)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = _rows(x), _rows(y)
        n, h = x.shape
        out = self._new(n, h)
        self._call(self._n.add, x.data_ptr(), y.data_ptr(), out.data_ptr(), n, h, x.stride(0), y.stride(0))
        return out

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        out = self._new(*x.shape)
        flat = x.reshape(x.shape[0], -1)
        n, h = flat.shape
        self._call(self._n.scale, flat.data_ptr(), out.data_ptr(), n, h, flat.stride(0), float(factor))
        return out

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = _rows(x), _rows(y)
        n, left, right = x.shape[0], x.shape[1], y.shape[1]
        out = self._new(n, left + right)
        for part, width, at in ((x, left, 0), (y, right, left)):
            address = out.data_ptr() + 4 * at
            self._call(self._n.copy, part.data_ptr(), address, n, width, part.stride(0), left + right)
        return out

    def angles(self, cos: Tensor, sin: Tensor, axis_of: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.contiguous()
        n, r = positions.shape[1], cos.shape[1]
        out = self._new(2, n, r)
        self._call(
            self._n.angles, cos.data_ptr(), sin.data_ptr(), axis_of.data_ptr(), positions.data_ptr(), out.data_ptr(),
            out.data_ptr() + 4 * n * r, n, r, cos.shape[0],
        )  # fmt: skip
        return out[0], out[1]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, None)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, gate)

    def _norm(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None) -> Tensor:
        out = self._new(*x.shape)
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
        n, inner = x.shape[0], x.shape[1] // 2
        out = self._new(n, inner)
        self._call(self._n.gate_mul, x.data_ptr(), out.data_ptr(), n, inner, x.stride(0), kind, limit)
        return out

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        out = self._new(*x.shape)
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
        out = self._new(n, heads, d)
        self._call(
            self._n.rotary, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), n, heads, d, cos.shape[1],
            x.stride(0), x.stride(1),
        )  # fmt: skip
        return out

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        out = self._new(*x.shape)
        x = _rows(x.reshape(-1, x.shape[-1]))
        self._call(self._n.l2_norm, x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], x.stride(0), eps)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        x = _rows(x)
        out = self._new(*x.shape)
        self._call(self._n.softcap, x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], x.stride(0), float(cap))
        return out

    def write_few(self, few: Few, layer: int, keys: Tensor, values: Tensor) -> None:
        keys, values = _heads(keys), _heads(values)
        _, heads, d = keys.shape
        self._call(
            self._n.write_rows, few.address, layer, keys.data_ptr(), values.data_ptr(), heads, d,
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        )  # fmt: skip

    def attend_few(self, few: Few, layer: int, query: Tensor, scale: float) -> Tensor:
        spec = few.parts[0].holder.layers[layer].spec
        return self.attend_lent(few, layer, query, spec.kv_heads, scale, few.window(layer))

    def attend_row(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        borrowed = Borrowed(keys, values)
        return self.attend_lent(borrowed.few, 0, query.unsqueeze(0), keys.shape[0], scale, None)[0]

    def attend_lent(
        self, few: Few, layer: int, query: Tensor, kv_heads: int, scale: float, window: int | None
    ) -> Tensor:
        """query [n, heads, d] -> [n, heads * d], over what the table of `few` says of caches that others wrote."""
        query = _heads(query)
        n, heads, d = query.shape
        out = self._new(n, heads * d)
        self._call(
            self._n.attend_rows, few.address, layer, query.data_ptr(), out.data_ptr(), heads, kv_heads, d,
            query.stride(0), query.stride(1), float(scale), window or 0,
        )  # fmt: skip
        return out

    def delta_gates(self, a: Tensor, b: Tensor, neg_rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _rows(a), _rows(b)
        n, heads = a.shape
        decay, beta = self._new(n, heads), self._new(n, heads)
        self._call(
            self._n.delta_gates, a.data_ptr(), b.data_ptr(), a.stride(0), b.stride(0), neg_rate.data_ptr(),
            dt_bias.data_ptr(), decay.data_ptr(), beta.data_ptr(), n, heads,
        )  # fmt: skip
        return decay, beta

    def delta_few(
        self, few: Few, layer: int, mixed: Tensor, log_decay: Tensor, beta: Tensor, conv: Tensor, how: DeltaShape
    ) -> Tensor:
        mixed, n, channels, width = _rows(mixed), mixed.shape[0], conv.shape[0], conv.shape[1]
        by_width = self._transposed(conv)
        convolved, out = self._new(n, channels), self._new(n, how.v_heads, how.v_size)
        self._call(
            self._n.conv_rows, few.address, layer, mixed.data_ptr(), by_width.data_ptr(), convolved.data_ptr(),
            channels, width, mixed.stride(0),
        )  # fmt: skip
        self._call(
            self._n.delta_rows, few.address, layer, convolved.data_ptr(), log_decay.data_ptr(), beta.data_ptr(),
            out.data_ptr(), how.k_heads, how.v_heads, how.k_size, how.v_size, how.eps, how.k_size**-0.5, channels,
        )  # fmt: skip
        for part in few.parts:
            part.holder.layers[layer].filled(part.num_rows)
        return out

    def _transposed(self, conv: Tensor) -> Tensor:
        """A convolution's weight by width first; made once."""
        key = conv.data_ptr()
        if key not in self._convolutions:
            self._convolutions[key] = (conv, conv.t().contiguous())
        return self._convolutions[key][1]

    def route(self, logits: Tensor, bias: Tensor | None, top_k: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        n, count = logits.shape
        chosen, weights = self._new(n, top_k, dtype=torch.int64), self._new(n, top_k)
        scratch = self._new(n, 2 * count)
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
        each, out = self._new(n, k, h), self._new(n, h)
        room = _expert_scratch(n, h, inner)
        scratch = self._new(self._n.threads(0) * room, dtype=torch.uint8)
        self._call(
            self._n.experts, x.data_ptr(), chosen.data_ptr(), self._addresses(gate_up), self._addresses(down),
            each.data_ptr(), n, k, len(gate_up), h, inner, float("inf") if limit is None else float(limit),
            int(gate == "gelu"), FORMAT_NUMBERS[gate_up[0].format], x.stride(0), scratch.data_ptr(), room,
        )  # fmt: skip
        self._call(self._n.combine, each.data_ptr(), weights.data_ptr(), out.data_ptr(), n, k, h)
        return out

    def _addresses(self, experts: Sequence[NativeLinear]) -> int:
        """Of the addresses of all experts' data and scales; made once."""
        key = experts[0].data.data_ptr()
        if key not in self._experts:
            self._experts[key] = experts, np.array([one.addresses for one in experts], np.int64)
        return self._experts[key][1].ctypes.data


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
