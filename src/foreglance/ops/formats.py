"""Weights in the formats that the native kernels read: fp32 and fp16 as they are, q8 and q4 in groups of 32 inputs.

Outputs lie in blocks of 16, so that a vector holds one input's weights of 16 outputs; rows and columns are padded with
zeros. A quantised group shares a scale in half precision; the layouts are described in csrc/kernels.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foreglance.ops.memory import placed

GROUP = 32
BLOCK = 16
HALF_MAX = 65504.0
FORMATS = ("fp32", "fp16", "q8", "q4")
BITS = {"fp32": 32.0, "fp16": 16.0, "q8": 8.5, "q4": 4.5}  # of one weight, scales included
_Q4_TRIES = 6
_AT_ONCE = 1 << 18  # weights that are quantised at a time: what they take on the way stays in a core's cache


@dataclass(frozen=True)
class Quantised:
    """A weight [out, in] in groups: `values` int8 [out, groups * 32] (within 127 for q8, -8 to 7 for q4), padded with
    zeros, and `scales` float16 [out, groups]."""

    bits: int
    shape: tuple[int, int]
    values: Tensor
    scales: Tensor

    def restored(self) -> Tensor:
        """float32 [out, in]."""
        num_out, num_in = self.shape
        groups = self.values.view(num_out, -1, GROUP).float() * self.scales.float().unsqueeze(-1)
        return groups.view(num_out, -1)[:, :num_in]


def quantise(weight: Tensor, bits: int) -> Quantised:
    """weight [out, in] of any float type. 8 bits: the largest of a group becomes 127. 4 bits: the scale with the least
    squared error of a few, since the largest one's own place may cost the others more."""
    num_out, num_in = weight.shape
    groups, step = -(-num_in // GROUP), max(1, _AT_ONCE // num_in)
    values = torch.empty(num_out, groups * GROUP, dtype=torch.int8)
    scales = torch.empty(num_out, groups, dtype=torch.float16)
    for start in range(0, num_out, step):
        rows = slice(start, start + step)
        values[rows], scales[rows] = _quantised_rows(weight[rows].float(), bits)
    return Quantised(bits, (num_out, num_in), values, scales)


def _quantised_rows(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    num_out, num_in = weight.shape
    groups = torch.nn.functional.pad(weight, (0, -num_in % GROUP)).view(num_out, -1, GROUP)
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    scales = _half(groups.abs().amax(-1, keepdim=True) / 127) if bits == 8 else _best_scales(groups)
    values = _rounded(groups, scales, low, high).nan_to_num_(0.0)
    return values.to(torch.int8).view(num_out, -1), scales.squeeze(-1)


def _best_scales(groups: Tensor) -> Tensor:
    """The value that is largest without its sign becomes -8 to -6.75, as far as the others gain by it."""
    most = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = least = torch.empty(0)
    for step in range(_Q4_TRIES):
        scales = _half(most / (-8 + step / 4))
        error = _rounded(groups, scales, -8, 7).mul_(scales.float()).sub_(groups).square_().sum(-1, keepdim=True)
        if step == 0:
            best, least = scales, error
            continue
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return best


def _half(scales: Tensor) -> Tensor:
    return scales.clamp(-HALF_MAX, HALF_MAX).half()


def _rounded(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """Zeros where the scale is."""
    wide = scales.float()
    return (groups / torch.where(wide == 0, torch.inf, wide)).round_().clamp_(low, high)


def blocked(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [out, in] -> [out / 16, in, 16]."""
    num_out, num_in = weight.shape
    rows = torch.nn.functional.pad(weight.to(dtype), (0, 0, 0, -num_out % BLOCK))
    return placed(rows.view(-1, BLOCK, num_in).transpose(1, 2))


def packed_shapes(num_out: int, num_in: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Of what `blocked_groups` makes."""
    blocks, groups = -(-num_out // BLOCK), -(-num_in // GROUP)
    return {"data": (blocks, groups, bits, BLOCK, 4), "scales": (blocks, groups, BLOCK)}


def blocked_groups(weight: Quantised) -> tuple[Tensor, Tensor]:
    """-> bytes [out / 16, groups, 8 (q8) or 4 (q4), 16, 4] and scales [out / 16, groups, 16]."""
    missing = -weight.shape[0] % BLOCK
    values = torch.nn.functional.pad(weight.values, (0, 0, 0, missing))
    scales = torch.nn.functional.pad(weight.scales, (0, 0, 0, missing))
    quads = values.view(torch.uint8).view(-1, BLOCK, scales.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if weight.bits == 8:
        data = placed(quads).bitwise_xor_(128)  # plus 128, as bytes
    else:
        low, high = (quads + 8).split(4, 2)  # bytes wrap
        data = placed(low | (high << 4))
    return data, placed(scales.view(-1, BLOCK, scales.shape[1]).transpose(1, 2))
