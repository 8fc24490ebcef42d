"""Shards to batches: chats of about the same length together, about the same number of rows in every batch.
 Owns the order of the training data, which depends on the seed alone, so that a restarted run goes on where
it stopped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.model import Target, mrope_positions
from training.prepare import Shard, shard_path


@dataclass(frozen=True)
class Batch:
    """Chats padded on the right. Attention is causal, so what stands behind a chat does not reach it."""

    ids: Tensor  # [b, t]
    labels: Tensor  # [b, t], see prepare.READ
    positions: Tensor  # [3, b, t]
    seeds: np.ndarray  # scene seeds of all images, in order

    @property
    def num_rows(self) -> int:
        return self.ids.numel()

    def hidden(self, target: Target) -> Tensor:
        """The target's normed hidden states [b, t, hidden]."""
        rows = target.image_rows(Shard.pictures(self.seeds)) if len(self.seeds) else None
        return target.hidden(target.embed(self.ids, rows), self.positions)


def collate(shard: Shard, chats: np.ndarray) -> Batch:
    drawn = [shard.chat(int(i)) for i in chats]
    width = max(len(ids) for ids, _, _ in drawn)
    ids = np.zeros((len(drawn), width), np.int64)
    labels = np.zeros((len(drawn), width), np.int64)
    positions = np.zeros((3, len(drawn), width), np.int64)
    for row, (chat_ids, chat_labels, _) in enumerate(drawn):
        n = len(chat_ids)
        ids[row, :n], labels[row, :n], positions[:, row, :n] = (
            chat_ids,
            chat_labels,
            mrope_positions(chat_ids),
        )
    seeds = np.concatenate([seeds for _, _, seeds in drawn])
    return Batch(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions), seeds)


def batch_plan(lengths: np.ndarray, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Splits chats into batches of at most `rows` padded rows, long ones with long ones, in random order."""
    order = np.argsort(lengths + rng.uniform(-4, 4, len(lengths)), kind="stable")
    plan: list[np.ndarray] = []
    start = 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop + 1 - start) * lengths[order[start : stop + 1]].max() > rows:
            plan.append(order[start:stop])
            start = stop
    rng.shuffle(plan)
    return plan


def count_shards(data: Path) -> int:
    return len(list(data.glob("train-*.npz")))


def endless(
    data: Path, rows: int, seed: int, skip: int = 0, collate: Callable[[Shard, np.ndarray], Batch] = collate
) -> Iterator[Batch]:
    """All shards in turn, without end; the first `skip` batches are left out."""
    num_shards = count_shards(data)
    turn = 0
    while True:
        shard = Shard(shard_path(data, turn % num_shards))
        plan = batch_plan(shard.lengths, rows, np.random.default_rng((seed, turn)))
        for chats in plan[skip:]:
            yield collate(shard, chats)
        skip, turn = max(0, skip - len(plan)), turn + 1
