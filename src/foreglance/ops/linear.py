"""Linear layers that give a row the same bits whatever its batch (up to `TILE` few rows; a chunk is one block).

A plain matrix product does not: torch picks another kernel, with another order of summation, for one row than for four.
Each path here is a candidate that the self-test in `numerics` accepts or refuses on the running machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foreglance.ops.base import Blocks
from foreglance.ops.formats import GROUP, HALF_MAX, Quantised, quantise

FP16_BUCKETS = (3, 4, 5, 6, 8, 12, 16)


@dataclass(frozen=True)
class Packed:
    """A weight as its path wants it."""

    shape: tuple[int, int]
    data: Any


@dataclass(frozen=True)
class LinearPath:
    """A way to multiply: `pack` once, then `block` for up to a tile of rows or a whole chunk."""

    name: str
    weights: str  # "fp32", "fp16", "q8" or "q4"
    pack: Callable[[Any], Any]
    block: Callable[[Tensor, Any], Tensor]

    def pack_linear(self, weight: Tensor | Quantised) -> Packed:
        return Packed((weight.shape[0], weight.shape[1]), self.pack(weight))

    def linear(self, x: Tensor, weight: Packed, blocks: Blocks) -> Tensor:
        if len(blocks) == 1:
            return self.block(x, weight.data)
        return torch.cat([self.block(x[start:stop], weight.data) for start, stop in blocks])


def _float(weight: Tensor | Quantised) -> Tensor:
    return weight.restored() if isinstance(weight, Quantised) else weight.float().contiguous()


def _pack_onednn(weight: Tensor | Quantised) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(_float(weight), 16)


def _block_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _pack_fbgemm(weight: Tensor | Quantised) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(_float(weight).clamp(-HALF_MAX, HALF_MAX), None)


def _block_fbgemm(x: Tensor, weight: Any) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x, weight)


def _block_fbgemm_bucket(x: Tensor, weight: Any) -> Tensor:
    """Its kernels for one and two rows sum in another order than the rest: pad few rows to a size from a fixed list."""
    num_rows = len(x)
    size = next((bucket for bucket in FP16_BUCKETS if bucket >= num_rows), num_rows)
    return torch.ops.quantized.linear_dynamic_fp16(F.pad(x, (0, 0, 0, size - num_rows)), weight)[:num_rows]


def _pack_half(weight: Tensor | Quantised) -> Tensor:
    return _float(weight).clamp(-HALF_MAX, HALF_MAX).half()


def _rows_alone(x: Tensor, weight: Tensor) -> Tensor:
    """One product per few row: the same call for a row, whatever the batch. Chunks go in one call."""
    matrix = weight.float()
    if len(x) > 16:
        return F.linear(x, matrix)
    return torch.cat([F.linear(x[i : i + 1].clone(), matrix) for i in range(len(x))])


def _pack_quantised(bits: int) -> Callable[[Tensor | Quantised], Quantised]:
    return lambda weight: weight if isinstance(weight, Quantised) else quantise(weight, bits)


def quantised_rows(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """x [n, in] -> whole numbers within 127 as float32 [n, groups, 32], and scales [n, groups]."""
    groups = F.pad(x, (0, padded - x.shape[1])).view(len(x), -1, GROUP)
    most = groups.abs().amax(-1)
    inverse = torch.where(most > 0, 127 / most, 0.0)
    return (groups * inverse.unsqueeze(-1)).round(), most / 127


def _block_quantised(x: Tensor, weight: Quantised) -> Tensor:
    """What the native kernels compute. Sums within a group are whole numbers that float32 holds exactly, and the rest
    goes element by element, so rows do not depend on each other."""
    values, of_rows = quantised_rows(x, weight.values.shape[1])
    scales, total = weight.scales.float(), x.new_zeros(len(x), weight.shape[0])
    for group, part in enumerate(weight.values.split(GROUP, 1)):
        whole = values[:, group] @ part.float().t()
        total = total + whole * (scales[:, group] * of_rows[:, group : group + 1])
    return total


PATHS = (
    LinearPath("onednn", "fp32", _pack_onednn, _block_onednn),
    LinearPath("rows", "fp32", _float, _rows_alone),
    LinearPath("fbgemm", "fp16", _pack_fbgemm, _block_fbgemm),
    LinearPath("fbgemm-bucket", "fp16", _pack_fbgemm, _block_fbgemm_bucket),
    LinearPath("rows", "fp16", _pack_half, _rows_alone),
    LinearPath("groups", "q8", _pack_quantised(8), _block_quantised),
    LinearPath("groups", "q4", _pack_quantised(4), _block_quantised),
)
