"""Mathematics that families share, as free functions: rotary tables and the input embedding of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreglance.batch import Batch
from foreglance.models.base import ModelError
from foreglance.ops.base import Ops

FREQUENCY_FACTORS = (
    "rope_frequency_factors"  # in a config: what frequencies of full layers are divided by, of GGUF files
)


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of every coordinate below `context`: `cos`, `sin` [context, r].

    A table rather than a call per step, so that a row's angles cannot depend on its batch. `axis_of` [r] says which
    position axis each frequency reads (all 0 on one axis).
    """

    cos: Tensor
    sin: Tensor
    axis_of: Tensor

    def angles(self, ops: Ops, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [axes, n] -> cos, sin [n, r]."""
        return ops.angles(self.cos, self.sin, self.axis_of, positions)


def rotary_table(inv_freq: Tensor, context: int, axis_of: Tensor, scaling: float = 1.0) -> RotaryTable:
    """inv_freq float32 [r]."""
    freqs = torch.arange(context, dtype=torch.float32)[:, None] * inv_freq.float()
    return RotaryTable(freqs.cos() * scaling, freqs.sin() * scaling, axis_of)


def default_inv_freq(theta: float, rotary_size: int) -> Tensor:
    """float32 [rotary_size / 2] (Su et al., RoFormer, 2021)."""
    return 1.0 / (theta ** (torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size))


def divided(inv_freq: Tensor, factors: Sequence[float] | None) -> Tensor:
    """inv_freq [r] over the first r factors; as it is without any."""
    if factors is None:
        return inv_freq
    if len(factors) < len(inv_freq):
        raise ModelError(f"{FREQUENCY_FACTORS} has {len(factors)} entries for {len(inv_freq)} frequencies")
    return inv_freq / torch.tensor(factors[: len(inv_freq)], dtype=torch.float32)


def interleaved_mrope_axes(sections: list[int]) -> Tensor:
    """int64 [sum(sections)]: frequencies take turns temporal, height, width; what height and width leave is temporal.

    Source: transformers `Qwen3_5TextRotaryEmbedding.recomposition_frequencies`.
    """
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def embed_rows(ops: Ops, table: Tensor, batch: Batch) -> Tensor:
    """Input embeddings [rows, h]: looked up for token rows, carried by the batch for image rows.

    A placeholder id never reaches the table: `pack` puts 0 in its place.
    """
    x = ops.embedding(table, batch.token_ids)
    if batch.image_rows is not None:
        assert batch.embeds is not None
        x = x.index_copy(0, batch.image_rows, batch.embeds)
    return x
