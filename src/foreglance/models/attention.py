"""Attention of a batch over its sequences' caches: writes the new rows, then each row reads what it sees."""

from __future__ import annotations

import torch
from torch import Tensor

from foreglance.batch import Batch, Part
from foreglance.cache.kv import KV
from foreglance.models.base import Caches
from foreglance.ops.base import Ops


def attend(
    ops: Ops,
    batch: Batch,
    caches: Caches,
    layer: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> Tensor:
    """query [rows, heads, d], keys and values [rows, kv heads, d] -> [rows, heads * d].

    `layer` is the layer's place among the model's caches.
    """
    pieces: list[Tensor] = []
    for index, part in enumerate(batch.parts):
        rows = batch.rows_of(index)
        sequence = caches[part.sequence]
        cache = sequence.layers[layer]
        assert isinstance(cache, KV)
        cache.write(sequence.rows, keys[rows], values[rows])
        if part.chunk:
            pieces.append(_chunk(ops, part, sequence.rows, cache, query[rows], scale))
        else:
            pieces += _few(ops, part, sequence.rows, cache, query[rows], scale)
    return torch.cat(pieces)


def _few(ops: Ops, part: Part, committed: int, cache: KV, query: Tensor, scale: float) -> list[Tensor]:
    """One call per row with the rows that it sees, so that a row's bits do not depend on who was verified with it."""
    window = cache.spec.window
    out = []
    for i in range(part.num_rows):
        stop = committed + i + 1
        seen = cache.read(0 if window is None else max(0, stop - window), stop)
        out.append(ops.attend_row(query[i], *seen, scale).unsqueeze(0))
    return out


def _chunk(ops: Ops, part: Part, committed: int, cache: KV, query: Tensor, scale: float) -> Tensor:
    n, window = part.num_rows, cache.spec.window
    first = 0 if window is None else max(0, committed - window + 1)
    keys, values = cache.read(first, committed + n)
    return ops.attend_chunk(query, keys, values, scale, causal_mask(n, committed - first, window))


def causal_mask(n: int, before: int, window: int | None) -> Tensor:
    """bool [n, before + n]: row i sees the `before` rows and itself, or the last `window` of them."""
    row = torch.arange(before, before + n)[:, None]
    seen = torch.arange(before + n)[None, :]
    mask = seen <= row
    return mask if window is None else mask & (seen > row - window)
