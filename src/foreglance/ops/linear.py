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

FP16_BUCKETS = (3, 4, 5, 6, 8, 12, 16)
HALF_MAX = 65504.0


@dataclass(frozen=True)
class Packed:
    """A weight as its path wants it."""

    shape: tuple[int, int]
    data: Any


@dataclass(frozen=True)
class LinearPath:
    """A way to multiply: `pack` once, then `block` for up to a tile of rows or a whole chunk."""

    name: str
    weights: str  # "fp32" or "fp16"
    pack: Callable[[Tensor], Any]
    block: Callable[[Tensor, Any], Tensor]

    def pack_linear(self, weight: Tensor) -> Packed:
        return Packed((weight.shape[0], weight.shape[1]), self.pack(weight))

    def linear(self, x: Tensor, weight: Packed, blocks: Blocks) -> Tensor:
        if len(blocks) == 1:
            return self.block(x, weight.data)
        return torch.cat([self.block(x[start:stop], weight.data) for start, stop in blocks])


def _pack_onednn(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), 16)


def _block_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _pack_fbgemm(weight: Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16(weight.float().clamp(-HALF_MAX, HALF_MAX).contiguous(), None)


def _block_fbgemm(x: Tensor, weight: Any) -> Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(x, weight)


def _block_fbgemm_bucket(x: Tensor, weight: Any) -> Tensor:
    """Its kernels for one and two rows sum in another order than the rest: pad few rows to a size from a fixed list."""
    num_rows = len(x)
    size = next((bucket for bucket in FP16_BUCKETS if bucket >= num_rows), num_rows)
    return torch.ops.quantized.linear_dynamic_fp16(F.pad(x, (0, 0, 0, size - num_rows)), weight)[:num_rows]


def _pack_plain(weight: Tensor) -> Tensor:
    return weight.float().contiguous()


def _pack_half(weight: Tensor) -> Tensor:
    return weight.float().clamp(-HALF_MAX, HALF_MAX).half()


def _rows_alone(x: Tensor, weight: Tensor) -> Tensor:
    """One product per few row: the same call for a row, whatever the batch. Chunks go in one call."""
    matrix = weight.float()
    if len(x) > 16:
        return F.linear(x, matrix)
    return torch.cat([F.linear(x[i : i + 1].clone(), matrix) for i in range(len(x))])


PATHS = (
    LinearPath("onednn", "fp32", _pack_onednn, _block_onednn),
    LinearPath("rows", "fp32", _pack_plain, _rows_alone),
    LinearPath("fbgemm", "fp16", _pack_fbgemm, _block_fbgemm),
    LinearPath("fbgemm-bucket", "fp16", _pack_fbgemm, _block_fbgemm_bucket),
    LinearPath("rows", "fp16", _pack_half, _rows_alone),
)
