"""Makes colours loud in the image rows of a half-trained `tiny-step`.

Owns one linear change of the projector. The warm-up's probe reads colours through a layer of its own, so it is content
with colours in directions of very little variance, and a language model that norms its rows hears nothing of them: after
1,500 steps it read words, digits and shapes but named colours at chance (1 % of the rows' variance lay between colours,
27 % between shapes). This fits the colours of cells linearly and adds the fit to each row, along directions that hold
nothing else. The projector stays one matrix, and training goes on.
"""

import random
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from foreglance.bench.scenes import HELD_OUT_SEED
from training.schedule import single_thread
from training.step import Target
from training.train_target import vocabulary_size
from training.warm_vision import COLOUR_NAMES, PROBES, draw_batch

LOUDNESS = 0.5  # of the added part, as a share of a row's size


@torch.no_grad()
def louder(target: Target, batches: int) -> tuple[torch.Tensor, float]:
    """The matrix [hidden, hidden] to apply to image rows, and the share of colours that the fit gets right."""
    rng = random.Random("colours")
    rows, labels = [], []
    for _ in range(batches):
        pictures, answers = draw_batch(rng, 32, range(HELD_OUT_SEED), crowded=True)
        rows.append(target.image_rows(pictures).flatten(0, 1))
        labels.append(answers[..., list(PROBES).index("colour")].flatten())
    x, colour = torch.cat(rows), torch.cat(labels)
    filled = colour > 0
    wanted = F.one_hot(colour[filled] - 1, len(COLOUR_NAMES) - 1).float()
    wanted -= wanted.mean(0)
    centred = x[filled] - x[filled].mean(0)
    spread = centred.T @ centred
    fit = torch.linalg.solve(spread + 1e-6 * spread.trace() * torch.eye(len(spread)), centred.T @ wanted)
    right = ((centred @ fit).argmax(-1) == wanted.argmax(-1)).float().mean().item()
    quiet = torch.linalg.eigh(torch.cov(x.T)).eigenvectors[:, : fit.shape[1]]
    size = x[filled].norm(dim=-1).mean() / (centred @ fit).norm(dim=-1).mean()
    return torch.eye(len(spread)) + LOUDNESS * size * quiet @ fit.T, right


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target.")],
    out: Annotated[Path, typer.Option(help="The changed checkpoint, to go on from.")],
    batches: int = 16,
    threads: int = 1,
) -> None:
    """Changes the projector in a checkpoint."""
    single_thread(threads)
    state = torch.load(target, weights_only=True)
    model = Target(vocabulary_size(data)).eval()
    model.load_state_dict(state["module"])
    change, right = louder(model, batches)
    state["module"]["model.model.multi_modal_projector.weight"] = (
        change @ model.model.model.multi_modal_projector.weight
    )
    torch.save(state, out)
    print(f"colours fitted right: {right:.3f}")


if __name__ == "__main__":
    typer.run(main)
