"""Trains a draft head on the cached features of a frozen target.

Owns the loss of the head: it drafts three tokens from every row at once, each step on the output of the one
before, and learns the target's whole distribution at each. `--policy see` gives the head that ships;
`--policy skip` gives a head that never saw an image row, which is the control for measurements of what seeing
is worth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from training.batches import batch_plan
from training.cache_features import FeatureShard, inputs_of, load_target
from training.draft_rows import Policy, draft_rows
from training.model import MtpHead, Target
from training.prepare import READ
from training.schedule import Run, replace, single_thread

DRAFT_STEPS = 3
STEP_WEIGHTS = (1.0, 0.8, 0.6)


@dataclass(frozen=True)
class HeadBatch:
    """Rows of some chats as a head sees them, padded on the right by at least DRAFT_STEPS - 1 rows."""

    embedded: Tensor  # [b, n, hidden] input of the row
    hidden: Tensor  # [b, n, hidden] target's hidden state of the row before the input
    positions: Tensor  # [3, b, n]
    truth: Tensor  # [b, n, hidden] target's hidden state of the input itself: what a first step should predict
    starts: Tensor  # [b, n] whether the row's input is said, so that drafting can start here
    said: Tensor  # [b, n] whether the token after the row's input is said


def collate_rows(features: FeatureShard, chats: np.ndarray, embedding: Tensor, policy: Policy) -> HeadBatch:
    rows = []
    for i in map(int, chats):
        ids, labels, _ = features.shard.chat(i)
        inputs, positions = draft_rows(ids, policy)
        hidden = torch.from_numpy(features.hidden(i)).float()
        images = features.image_rows(i) if policy != "placeholder" else np.empty(0)
        said = np.append(labels > READ, False)
        rows.append(
            (
                inputs_of(embedding, ids, images)[inputs],
                hidden[inputs - 1],
                torch.from_numpy(np.ascontiguousarray(positions)).T,
                hidden[inputs],
                torch.from_numpy(said[inputs]),
                torch.from_numpy(said[inputs + 1]),
            )
        )
    width = max(len(row[0]) for row in rows) + DRAFT_STEPS - 1
    padded = [
        torch.stack([F.pad(part, (0, 0) * (part.ndim - 1) + (0, width - len(part))) for part in parts])
        for parts in zip(*rows, strict=True)
    ]
    padded[2] = padded[2].permute(2, 0, 1)
    return HeadBatch(*padded)


def head_loss(head: MtpHead, target: Target, batch: HeadBatch) -> tuple[Tensor, list[float]]:
    """The weighted loss, and by draft step the share of drafts equal to the target's likeliest token."""
    n = batch.hidden.shape[1] - DRAFT_STEPS + 1
    hidden, earlier, loss, agreed = batch.hidden[:, :n], [], torch.zeros(()), []
    valid = batch.starts[:, :n]
    for step, weight in enumerate(STEP_WEIGHTS):
        rows = slice(step, step + n)
        rotary = target.text.rotary_emb(hidden, batch.positions[:, :, rows])
        hidden = head.step(batch.embedded[:, rows], hidden, rotary, earlier)
        valid = valid & batch.said[:, rows]
        wanted = target.logits(batch.truth[:, rows][valid])
        drafted = target.logits(hidden[valid])
        loss = loss + weight * F.cross_entropy(drafted, wanted.softmax(-1))
        agreed.append((drafted.argmax(-1) == wanted.argmax(-1)).float().mean().item())
    return loss, agreed


def endless(
    data: Path, features: Path, held_out: int, rows: int, skip: int
) -> Iterator[tuple[FeatureShard, np.ndarray]]:
    """All feature shards in turn, without end; the last `held_out` chats of the first one are never given."""
    shards = [FeatureShard(data, features, i) for i in feature_numbers(features)]
    turn = 0
    while True:
        shard = shards[turn % len(shards)]
        lengths = shard.shard.lengths
        lengths = lengths[: len(lengths) - held_out] if shard is shards[0] else lengths
        plan = batch_plan(lengths, rows, np.random.default_rng(turn))
        for chats in plan[skip:]:
            yield shard, chats
        skip, turn = max(0, skip - len(plan)), turn + 1


def feature_numbers(features: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in features.glob("features-*.safetensors"))


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    features: Annotated[Path, typer.Option(help="Folder of cache_features.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="The head's tensors (.safetensors); its checkpoint lies beside it.")],
    policy: Annotated[str, typer.Option(help="see, placeholder, skip or gap.")] = "see",
    start_from: Annotated[Path | None, typer.Option(help="Checkpoint whose head a new run starts with.")] = None,
    seconds: Annotated[float, typer.Option(help="Training time, all starts together.")] = 540,
    steps: Annotated[int, typer.Option(help="Upper limit of steps.")] = 100_000,
    rows: int = 2048,
    learning_rate: float = 2e-3,
    save_every: float = 120,
    threads: int = 1,
) -> None:
    """Trains until the time or the steps are used up."""
    single_thread(threads)
    torch.manual_seed(0)
    console = Console(width=160)
    model = load_target(data, target)
    head = MtpHead(model.model.config.text_config)
    if start_from is not None:
        head.load_state_dict(torch.load(start_from, weights_only=True)["module"])
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=0.02, betas=(0.9, 0.97))
    limits = {"steps": steps, "seconds": seconds, "warm_up": 100, "save_every": save_every}
    run = Run(out.with_suffix(".pt"), head, optimizer, **limits)
    unseen = FeatureShard(data, features, feature_numbers(features)[0])
    held_out = min(160, len(unseen.shard) // 2)
    batches = endless(data, features, held_out, rows, skip=run.step)
    unseen_chats = np.arange(len(unseen.shard) - held_out, len(unseen.shard))

    def report() -> None:
        with torch.no_grad():
            parts = [
                head_loss(head, model, collate_rows(unseen, chats, model.embedding, policy))
                for chats in np.array_split(unseen_chats[np.argsort(unseen.shard.lengths[unseen_chats])], 8)
            ]
        agreed = np.mean([shares for _, shares in parts], axis=0).round(4)
        loss = np.mean([loss.item() for loss, _ in parts])
        console.print(f"{policy} {run.step} {run.spent:.0f} s unseen {loss:.4f} agreed {agreed}", highlight=False)

    for _ in run.numbers(report):
        run.descend(head_loss(head, model, collate_rows(*next(batches), model.embedding, policy))[0])
    tensors = {f"mtp.{name}": weight.half().contiguous() for name, weight in head.state_dict().items()}
    replace(out, lambda path: save_file(tensors, path))


if __name__ == "__main__":
    typer.run(main)
