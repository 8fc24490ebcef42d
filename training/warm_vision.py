"""Teaches the vision tower alone to see, before the language model learns to speak.

Owns the probe: one linear layer on every image token that names what its cell holds, where the cell lies and
which item of the scene it is in reading order. Two minutes of this make the difference between a target that
names everything right after an hour and one that is still guessing colours. The probe is thrown away.
"""

import random
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from foreglance.bench.scenes import (
    BACKGROUNDS,
    GRID,
    HELD_OUT_SEED,
    INKS,
    SHAPES,
    SIZES,
    WORDS,
    Scene,
    scene_from_seed,
)
from training.families import family_module
from training.model import HIDDEN_SIZE, ROWS_PER_IMAGE, batch_pictures
from training.schedule import Run, replace, single_thread

KINDS = ("nothing", *SHAPES, "number", "word", "end of word")
COLOUR_NAMES = ("nothing", *INKS)
# Name of a probe to its number of classes. -1 as a label means: not asked of this cell.
PROBES = {
    "kind": len(KINDS),
    "colour": len(COLOUR_NAMES),
    "size": len(SIZES),
    "tens": 10,
    "ones": 10,
    "word": len(WORDS),
    "row": GRID,
    "column": GRID,
    "order": 8,
    "background": len(BACKGROUNDS),
}


def cell_labels(scene: Scene) -> np.ndarray:
    """The right answers for the cells of a scene: int64 [16, number of probes]."""
    names = list(PROBES)
    labels = {name: np.full(ROWS_PER_IMAGE, -1) for name in names}
    labels["kind"][:] = 0
    labels["colour"][:] = 0
    labels["row"][:], labels["column"][:] = np.divmod(np.arange(ROWS_PER_IMAGE), GRID)
    labels["background"][:] = list(BACKGROUNDS).index(scene.background)
    for order, item in enumerate(scene.items):
        cell = item.cell
        labels["kind"][cell] = KINDS.index(item.shape or item.kind)
        labels["colour"][cell] = COLOUR_NAMES.index(item.colour)
        labels["order"][cell] = min(order, PROBES["order"] - 1)
        if item.kind == "shape":
            labels["size"][cell] = SIZES.index(item.size)
        elif item.kind == "number":
            labels["tens"][cell], labels["ones"][cell] = map(int, item.text)
        else:
            labels["word"][cell : cell + 2] = WORDS.index(item.text)
            labels["kind"][cell + 1] = KINDS.index("end of word")
            labels["colour"][cell + 1] = labels["colour"][cell]
    return np.stack([labels[name] for name in names], axis=1)


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.heads = nn.ModuleDict({name: nn.Linear(HIDDEN_SIZE, num) for name, num in PROBES.items()})

    def forward(self, cells: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Image rows [n, 16, hidden] and labels [n, 16, probes] to the loss and the share right by probe."""
        cells = self.norm(cells)
        loss, right = torch.zeros(()), {}
        for i, (name, head) in enumerate(self.heads.items()):
            label = labels[..., i]
            asked = label >= 0
            if not asked.any():
                continue
            scores = head(cells[asked])
            loss = loss + F.cross_entropy(scores, label[asked]) * (
                0.3 if name in ("row", "column", "background") else 1
            )
            named = label[asked] > 0 if name == "kind" else torch.ones(len(scores), dtype=torch.bool)
            right[name] = (scores.argmax(-1) == label[asked])[named].float().mean().item()
        return loss, right


def draw_batch(rng: random.Random, size: int, seeds: range, crowded: bool) -> tuple[np.ndarray, Tensor]:
    """Pictures and their labels; half of a crowded batch holds more shapes than scenes usually do."""
    pictures, labels = [], []
    for i in range(size):
        scene, picture = scene_from_seed(rng.choice(seeds), rng.randint(5, 12) if crowded and i % 2 else None)
        pictures.append(np.asarray(picture))
        labels.append(cell_labels(scene))
    return np.stack(pictures), torch.from_numpy(np.stack(labels))


def main(
    out: Annotated[Path, typer.Option(help="The tower's weights (.safetensors); the checkpoint lies beside it.")],
    family: Annotated[str, typer.Option(help="qwen, step or gemma.")] = "qwen",
    seconds: Annotated[float, typer.Option(help="Time limit.")] = 170,
    steps: Annotated[int, typer.Option(help="Upper limit of steps.")] = 900,
    batch: int = 32,
    learning_rate: float = 1e-3,
    threads: int = 1,
) -> None:
    """Trains tower and probe on scenes drawn on the fly; keeps the tower."""
    single_thread(threads)
    batch_pictures()
    torch.manual_seed(0)
    console = Console()
    target, probe = family_module(family).Target(32), Probe()
    tower = target.vision
    weights = [*tower.parameters(), *probe.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.05, betas=(0.9, 0.98))
    limits = {"steps": steps, "seconds": seconds, "warm_up": 80}
    run = Run(out.with_suffix(".pt"), tower, optimizer, **limits, helper=probe)

    def loss_of(pictures: np.ndarray, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        return probe(target.image_rows(pictures).view(len(pictures), ROWS_PER_IMAGE, -1), labels)

    unseen = draw_batch(random.Random(0), 200, range(HELD_OUT_SEED, HELD_OUT_SEED + 100_000), crowded=False)

    def report() -> None:
        with torch.no_grad():
            _, right = loss_of(*unseen)
        shares = " ".join(f"{name} {share:.3f}" for name, share in right.items())
        console.print(f"{run.step} steps, {run.spent:.0f} s; right on unseen scenes: {shares}", highlight=False)

    losses = []
    for step in run.numbers(report):
        rng = random.Random(f"warm vision {step}")
        loss, _ = loss_of(*draw_batch(rng, batch, range(HELD_OUT_SEED), crowded=True))
        run.descend(loss)
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            console.print(f"{step + 1} {run.spent:.0f} s loss {sum(losses) / len(losses):.3f}", highlight=False)
            losses = []
    replace(out, lambda path: save_file(tower.state_dict(), path))


if __name__ == "__main__":
    typer.run(main)
