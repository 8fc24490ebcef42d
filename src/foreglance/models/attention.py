"""Attention of a batch over its sequences' caches: writes the new rows, then each row reads what it sees."""

from __future__ import annotations

import numpy as np
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
    whole_images: bool = False,
) -> Tensor:
    """query [rows, heads, d], keys and values [rows, kv heads, d] -> [rows, heads * d].

    `layer` is the layer's place among the model's caches. `whole_images`: rows of one image see each other.
    """
    num_few, few = batch.num_few, batch.few(caches)
    if num_few:
        ops.write_few(few, layer, keys[:num_few], values[:num_few])
    for index, part in enumerate(batch.parts):
        if part.chunk:
            rows = batch.rows_of(index)
            _cache(caches, part, layer).write(caches[part.sequence].rows, keys[rows], values[rows])
    return look(ops, batch, caches, layer, query, scale, whole_images)


def look(
    ops: Ops, batch: Batch, caches: Caches, layer: int, query: Tensor, scale: float, whole_images: bool = False
) -> Tensor:
    """`attend` to rows that were written before, for a layer without keys and values of its own.

    The batch may hold only the last of the provisional rows.
    """
    num_few = batch.num_few
    pieces = [ops.attend_few(batch.few(caches), layer, query[:num_few], scale)] if num_few else []
    for index, part in enumerate(batch.parts):
        if part.chunk:
            rows, sequence = batch.rows_of(index), caches[part.sequence]
            before = sequence.rows + sequence.provisional - part.num_rows
            pieces.append(_chunk(ops, part, before, _cache(caches, part, layer), query[rows], scale, whole_images))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cache(caches: Caches, part: Part, layer: int) -> KV:
    cache = caches[part.sequence].layers[layer]
    assert isinstance(cache, KV)
    return cache


def _chunk(ops: Ops, part: Part, before: int, cache: KV, query: Tensor, scale: float, whole_images: bool) -> Tensor:
    n, window = part.num_rows, cache.spec.window
    first = 0 if window is None else max(0, before - window + 1)
    keys, values = cache.read(first, before + n)
    mask = causal_mask(n, before - first, window, part.image if whole_images else None)
    return ops.attend_chunk(query, keys, values, scale, mask)


def causal_mask(n: int, before: int, window: int | None, image: np.ndarray | None = None) -> Tensor:
    """bool [n, before + n]: row i sees the `before` rows and itself, or the last `window` of them.

    With `image` bool [n], consecutive image rows are one image, and its rows see also those that come later.
    """
    row = torch.arange(before, before + n)[:, None]
    seen = torch.arange(before + n)[None, :]
    mask = seen <= row
    if image is not None and image.any():
        mask[:, before:] |= same_image(image)
    return mask if window is None else mask & (seen > row - window)


def same_image(image: np.ndarray) -> Tensor:
    """image bool [n] -> bool [n, n], whether both rows lie in the same run of image rows."""
    run = torch.from_numpy(np.cumsum(image & ~np.concatenate([[False], image[:-1]])))
    inside = torch.from_numpy(image)
    return (run[:, None] == run[None, :]) & inside[:, None] & inside[None, :]
