"""Trains the whole target model, vision tower included, on captions, questions and chats.
 Owns the training loop of the target. It writes a checkpoint every few minutes and goes on from it when
started again; the learning rate falls over steps or over time, whichever is nearer its end.
"""

import time
from collections.abc import Callable
from functools import partial
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

from foreglance.bench.scenes import BACKGROUNDS, COLOURS, COUNTS, SHAPES, SIZES, WORDS, position_words
from training import families
from training.batches import Batch, batch_plan, collate
from training.model import Target, batch_pictures
from training.prepare import READ, VALIDATION, Shard
from training.schedule import cosine, load_checkpoint, save_checkpoint, single_thread

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


def make_optimizer(target: Target, learning_rate: float, vision_rate: float) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices only, and a smaller rate for the vision tower, which already sees."""
    groups: dict[str, list] = {"matrices": [], "vectors": [], "vision": []}
    seeing = {id(weight) for weight in target.vision.parameters()}
    for name, weight in target.named_parameters():
        plain = weight.ndim < 2 or "conv1d" in name
        groups["vision" if id(weight) in seeing else "vectors" if plain else "matrices"].append(weight)
    return torch.optim.AdamW(
        [
            {"params": groups["matrices"], "peak": learning_rate, "weight_decay": 0.05},
            {"params": groups["vectors"], "peak": learning_rate, "weight_decay": 0.0},
            {"params": groups["vision"], "peak": vision_rate, "weight_decay": 0.02},
        ],
        lr=learning_rate,
        betas=(0.9, 0.97),
    )


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
    optimizer = make_optimizer(target, learning_rate, vision_rate)
    facts = load_checkpoint(out, target, optimizer)
    step, spent = int(facts.get("step", 0)), facts.get("spent", 0.0)
    kinds, unseen = token_kinds(data), Shard(data / f"{VALIDATION}.npz")
    weights = token_weights(kinds, tuple(heavy.split()), heavy_weight)
    batches = families.batches(family, data, rows, seed, step, vocabulary_size(data))
    tell = partial(validate, target, unseen, kinds, collate=families.collate(family))

    start = time.monotonic() - spent
    last_save = last_line = time.monotonic()
    running, num_rows = [], 0
    while step < steps and (spent := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * cosine(step, max(step / steps, spent / seconds), warm_up)
        batch = next(batches)
        loss, _, _ = next_token_loss(target, batch, weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        step, num_rows = step + 1, num_rows + batch.num_rows
        running.append(loss.item())
        now = time.monotonic()
        if step % 100 == 0:
            speed = num_rows / (now - last_line)
            console.print(
                f"{step} {now - start:.0f} s loss {sum(running) / len(running):.4f} {speed:.0f} rows/s",
                highlight=False,
            )
            running, num_rows, last_line = [], 0, now
        if now - last_save > save_every:
            save_checkpoint(out, target, optimizer, step=step, spent=now - start)
            console.print(f"{step} unseen: {tell()}", highlight=False)
            last_save = time.monotonic()
    save_checkpoint(out, target, optimizer, step=step, spent=time.monotonic() - start)
    console.print(f"{step} steps, {time.monotonic() - start:.0f} s: {tell()}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
