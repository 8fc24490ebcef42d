"""Runs the trained target over some shards once and keeps what a draft head learns from.
 Owns the feature files: per row the target's normed last hidden state, per image its embeddings, both fp16.
The target does not change any more, so a head of any kind trains on these in minutes.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import track
from safetensors.numpy import load_file, save_file

from training.batches import batch_plan, collate, count_shards
from training.model import IMAGE_PAD, Target, batch_pictures
from training.prepare import Shard, shard_path
from training.schedule import single_thread
from training.train_target import vocabulary_size


def load_target(data: Path, checkpoint: Path) -> Target:
    """The target as training left it, ready to be read."""
    target = Target(vocabulary_size(data)).eval()
    target.load_state_dict(torch.load(checkpoint, weights_only=True)["module"])
    return target.requires_grad_(False)


class FeatureShard:
    """A shard of chats with the target's features of its rows."""

    def __init__(self, data: Path, features: Path, i: int):
        self.shard = Shard(shard_path(data, i))
        arrays = load_file(feature_path(features, i))
        self._hidden, self._image_rows = arrays["hidden"], arrays["image_rows"]
        self._starts = np.concatenate([[0], np.cumsum(self.shard.lengths)])
        images = [len(self.shard.chat(k)[2]) for k in range(len(self.shard))]
        self._image_starts = np.concatenate([[0], np.cumsum(images)])

    def hidden(self, i: int) -> np.ndarray:
        """Hidden states [t, hidden] of chat `i`."""
        return self._hidden[self._starts[i] : self._starts[i + 1]]

    def image_rows(self, i: int) -> np.ndarray:
        """Image embeddings [images * 16, hidden] of chat `i`."""
        rows = self._image_rows[self._image_starts[i] : self._image_starts[i + 1]]
        return rows.reshape(-1, self._hidden.shape[-1])


def feature_path(features: Path, i: int) -> Path:
    return features / f"features-{i:03d}.safetensors"


@torch.no_grad()
def features_of(target: Target, shard: Shard, rows: int) -> dict[str, np.ndarray]:
    """The target's features of all chats of a shard, in the shard's order."""
    hidden: list[np.ndarray | None] = [None] * len(shard)
    images: list[np.ndarray | None] = [None] * len(shard)
    for chats in track(batch_plan(shard.lengths, rows, np.random.default_rng(0)), "batches"):
        batch = collate(shard, chats)
        image_rows = target.image_rows(Shard.pictures(batch.seeds)) if len(batch.seeds) else None
        states = target.hidden(target.embed(batch.ids, image_rows), batch.positions).half().numpy()
        used = 0
        for row, i in enumerate(chats):
            ids, _, seeds = shard.chat(int(i))
            hidden[i] = states[row, : len(ids)].copy()
            if len(seeds):
                images[i] = image_rows[used : used + len(seeds)].half().numpy()
                used += len(seeds)
    kept = [rows for rows in images if rows is not None]
    return {"hidden": np.concatenate(hidden), "image_rows": np.concatenate(kept)}


def inputs_of(target_embedding: torch.Tensor, ids: np.ndarray, image_rows: np.ndarray) -> torch.Tensor:
    """Input embeddings [t, hidden] of a chat, image embeddings in the placeholders' rows."""
    embedded = target_embedding[torch.from_numpy(ids.astype(np.int64))]
    if len(image_rows):
        embedded[torch.from_numpy(ids == IMAGE_PAD)] = torch.from_numpy(image_rows).float()
    return embedded


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="Folder for the feature files.")],
    first: Annotated[int, typer.Option(help="First shard, counted from the last one backwards.")] = 0,
    shards: Annotated[int, typer.Option(help="Number of shards.")] = 5,
    rows: int = 4096,
    threads: int = 1,
) -> None:
    """Takes the last shards, which the target has hardly trained on. Finished files stay as they are."""
    single_thread(threads)
    batch_pictures()
    out.mkdir(parents=True, exist_ok=True)
    model = load_target(data, target)
    last = count_shards(data) - 1
    for i in range(last - first, last - first - shards, -1):
        path = feature_path(out, i)
        if not path.exists():
            partial = path.with_suffix(".partial")
            save_file(features_of(model, Shard(shard_path(data, i)), rows), partial)
            partial.rename(path)


if __name__ == "__main__":
    typer.run(main)
