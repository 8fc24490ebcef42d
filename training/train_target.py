"""Trains the whole target model, vision tower included, on captions, questions and chats.

Owns the loss of the target and what each kind of word weighs in it.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from foreglance.bench.scenes import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    HELD_OUT_SEED,
    SHAPES,
    SIZES,
    WORDS,
    position_words,
)
from training import families
from training.batches import Batch, batch_plan, collate
from training.model import ROWS_PER_IMAGE, Target, batch_pictures
from training.prepare import READ, VALIDATION, Shard
from training.schedule import Run, single_thread
from training.warm_vision import Probe, draw_batch

WORD_KINDS = {
    "colour": set(COLOURS),
    "shape": set(SHAPES),
    "size": set(SIZES),
    "count": set(COUNTS),
    "digit": set(map(str, range(10))),
    "word": set(WORDS),
    "background": set(BACKGROUNDS),
    "position": position_words(),
}
CONTENT_WEIGHT = 2.0
WRITING_WEIGHT = 5.0
PROBE_PICTURES = 16


def vocabulary_size(data: Path) -> int:
    """Rows of the embedding: the tokenizer's vocabulary, padded to a multiple of 32."""
    size = Tokenizer.from_file(str(data / "tokenizer.json")).get_vocab_size()
    return -(-size // 32) * 32


def token_kinds(data: Path) -> Tensor:
    """For every token id the index of its kind in WORD_KINDS, or -1."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    kinds = torch.full((vocabulary_size(data),), -1)
    for i in range(tokenizer.get_vocab_size()):
        word = tokenizer.decode([i]).strip()
        for k, words in enumerate(WORD_KINDS.values()):
            if word in words or word.lower() in words:
                kinds[i] = k
    return kinds


def token_weights(
    kinds: Tensor, heavy: tuple[str, ...] = ("digit", "word"), heavy_weight: float = WRITING_WEIGHT
) -> Tensor:
    """The weight of every token id in the loss when it is said; the rare ones weigh most: digits and written words."""
    weights = torch.where(kinds >= 0, CONTENT_WEIGHT, 1.0)
    rare = [list(WORD_KINDS).index(name) for name in heavy]
    return torch.where(torch.isin(kinds, torch.tensor(rare)), heavy_weight, weights)


def next_token_loss(target: Target, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss, the plain loss [n] of each token said, and whether it was the likeliest [n]."""
    said = batch.labels[:, 1:] > READ
    logits = target.logits(batch.hidden(target)[:, :-1][said])
    truth = batch.ids[:, 1:][said]
    losses = F.cross_entropy(logits, truth, reduction="none")
    weight = weights[truth]
    return (losses * weight).sum() / weight.sum(), losses.detach(), logits.argmax(-1) == truth


def probe_loss(target: Target, probe: Probe, seed: int, step: int) -> Tensor:
    """The warm-up's probe on pictures of its own: every cell is asked for, not only those that a chat speaks of."""
    rng = random.Random(f"probe {seed} {step}")
    pictures, labels = draw_batch(rng, PROBE_PICTURES, range(HELD_OUT_SEED), crowded=True)
    return probe(target.image_rows(pictures).view(len(pictures), ROWS_PER_IMAGE, -1), labels)[0]


@torch.no_grad()
def validate(target: Target, shard: Shard, kinds: Tensor, rows: int = 3000, collate: Callable = collate) -> str:
    """Mean loss and the share right by kind of word, teacher-forced, on chats about unseen scenes."""
    losses, right, said_kinds = [], [], []
    for chats in batch_plan(shard.lengths, rows, np.random.default_rng(0)):
        batch = collate(shard, chats)
        _, loss, hit = next_token_loss(target, batch, torch.ones(len(kinds)))
        losses.append(loss)
        right.append(hit)
        said_kinds.append(kinds[batch.ids[:, 1:][batch.labels[:, 1:] > READ]])
    hits, hit_kinds = torch.cat(right).float(), torch.cat(said_kinds)
    shares = [f"{name} {hits[hit_kinds == k].mean():.3f}" for k, name in enumerate(WORD_KINDS)]
    return f"loss {torch.cat(losses).mean():.4f} " + " ".join(shares)


def make_optimizer(
    target: Target, learning_rate: float, vision_rate: float, probe: Probe | None = None
) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices only, and a smaller rate for the vision tower, which already sees."""
    groups: dict[str, list] = {"matrices": [], "vectors": [], "vision": []}
    seeing = {id(weight) for weight in target.vision.parameters()}
    for name, weight in target.named_parameters():
        plain = weight.ndim < 2 or "conv1d" in name
        groups["vision" if id(weight) in seeing else "vectors" if plain else "matrices"].append(weight)
    groups = [
        {"params": groups["matrices"], "peak": learning_rate, "weight_decay": 0.05},
        {"params": groups["vectors"], "peak": learning_rate, "weight_decay": 0.0},
        {"params": groups["vision"], "peak": vision_rate, "weight_decay": 0.02},
    ]
    if probe is not None:
        groups.append({"params": list(probe.parameters()), "peak": learning_rate, "weight_decay": 0.02})
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.97))


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    out: Annotated[Path, typer.Option(help="Checkpoint; a run that finds it goes on from it.")],
    vision: Annotated[Path | None, typer.Option(help="The tower of warm_vision.")] = None,
    start_from: Annotated[Path | None, typer.Option(help="Checkpoint whose weights a new run starts with.")] = None,
    family: Annotated[str, typer.Option(help="qwen, step, gemma or text.")] = "qwen",
    seconds: Annotated[float, typer.Option(help="Training time, all starts together.")] = 3300,
    steps: Annotated[int, typer.Option(help="Upper limit of steps.")] = 100_000,
    rows: Annotated[int, typer.Option(help="Padded rows a batch.")] = 2048,
    learning_rate: float = 1.5e-3,
    vision_rate: float = 4e-4,
    warm_up: Annotated[int, typer.Option(help="Steps until the learning rate has risen.")] = 150,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 180,
    heavy: Annotated[str, typer.Option(help="Kinds of words that weigh most.")] = "digit word",
    heavy_weight: Annotated[float, typer.Option(help="What they weigh; a plain token weighs 1.")] = WRITING_WEIGHT,
    probe_weight: Annotated[float, typer.Option(help="Of the warm-up's probe, run along; 0: none.")] = 0.0,
    seed: int = 1,
    threads: int = 1,
) -> None:
    """Trains until the time or the steps are used up."""
    single_thread(threads)
    batch_pictures()
    torch.manual_seed(seed)
    console = Console(width=200)
    target = families.family_module(family).Target(vocabulary_size(data))
    if vision is not None:
        target.vision.load_state_dict(load_file(vision))
    if start_from is not None:
        target.load_state_dict(torch.load(start_from, weights_only=True)["module"])
    probe = Probe() if probe_weight else None
    optimizer = make_optimizer(target, learning_rate, vision_rate, probe)
    limits = {"steps": steps, "seconds": seconds, "warm_up": warm_up, "save_every": save_every}
    run = Run(out, target, optimizer, **limits, helper=probe)
    kinds, unseen = token_kinds(data), Shard(data / f"{VALIDATION}.npz")
    weights = token_weights(kinds, tuple(heavy.split()), heavy_weight)
    batches = families.batches(family, data, rows, seed, run.step, vocabulary_size(data))
    collate_unseen = families.collate(family)

    def report() -> None:
        shares = validate(target, unseen, kinds, collate=collate_unseen)
        console.print(f"{run.step} steps, {run.spent:.0f} s, unseen: {shares}", highlight=False)

    last_line, running, num_rows = time.monotonic(), [], 0
    for step in run.numbers(report):
        batch = next(batches)
        loss, _, _ = next_token_loss(target, batch, weights)
        run.descend(loss, *([probe_weight * probe_loss(target, probe, seed, step)] if probe else []))
        num_rows += batch.num_rows
        running.append(loss.item())
        if (step + 1) % 100 == 0:
            speed, mean = num_rows / (time.monotonic() - last_line), sum(running) / len(running)
            console.print(f"{step + 1} {run.spent:.0f} s loss {mean:.4f} {speed:.0f} rows/s", highlight=False)
            last_line, running, num_rows = time.monotonic(), [], 0


if __name__ == "__main__":
    typer.run(main)
