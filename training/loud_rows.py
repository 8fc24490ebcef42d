"""Makes what a half-trained target does not hear loud in its image rows.

Owns one linear change of the matrix that makes image rows. The warm-up's probe reads a cell through a layer of its own,
so it is content with facts in directions of very little variance; a language model that norms its rows hears nothing of
them. `tiny-step` read words, digits and shapes after 1,500 steps but named colours at chance (1 % of its rows' variance
lay between colours, 27 % between shapes), `tiny-gemma` had shapes and sizes at 1 %. This fits such facts linearly and
adds the fit to each row, along directions that hold least. The matrix stays one, and training goes on.

Written words can also be added along their own token embeddings, which are drawn apart before (`--widen`): those of
words always guessed lie close together, and then neither they nor what they should be read from get a gradient.
"""

import random
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from foreglance.bench.scenes import HELD_OUT_SEED, SHAPES, WORDS
from training.families import family_module
from training.model import batch_pictures
from training.schedule import replace, single_thread
from training.train_target import vocabulary_size
from training.warm_vision import KINDS, PROBES, draw_batch

PROJECTORS = {
    "qwen": "model.model.visual.merger.linear_fc2.weight",
    "step": "model.model.multi_modal_projector.weight",
    "gemma": "model.model.embed_vision.embedding_projection.weight",
}


def fitted(x: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Weights [hidden, classes] that tell labels from centred rows, and their share right on a held-out tenth."""
    wanted = F.one_hot(labels, int(labels.max()) + 1).float()
    wanted -= wanted.mean(0)
    x = x - x.mean(0)
    seen = torch.arange(len(x)) % 10 > 0
    spread = x[seen].T @ x[seen]
    fit = torch.linalg.solve(spread + 1e-6 * spread.trace() * torch.eye(len(spread)), x[seen].T @ wanted[seen])
    return fit, ((x[~seen] @ fit).argmax(-1) == labels[~seen]).float().mean().item()


@torch.no_grad()
def widen(embedding: Tensor, tokens: list[int], distance: float) -> Tensor:
    """Puts embeddings of tokens at a distance from their mean, in place; returns their offsets [hidden, tokens]."""
    mean = embedding[tokens].mean(0)
    offsets = F.normalize(embedding[tokens] - mean, dim=-1) * distance
    embedding[tokens] = mean + offsets
    return (offsets - offsets.mean(0)).T


@torch.no_grad()
def louder(
    image_rows, probes: list[str], loudness: float, batches: int, along: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The matrix [hidden, hidden] for image rows, their mean, and the share of each fact that its fit gets right.

    `along` has the directions [hidden, classes] of facts that are not added where rows hold least.
    """
    rng = random.Random("loud rows")
    rows, labels = [], []
    for _ in range(batches):
        pictures, answers = draw_batch(rng, 32, range(HELD_OUT_SEED), crowded=True)
        rows.append(image_rows(pictures).flatten(0, 1))
        labels.append(answers.flatten(0, 1))
    x, labels = torch.cat(rows), torch.cat(labels)
    kind = labels[:, list(PROBES).index("kind")]
    items = (kind > 0) & (kind < KINDS.index("end of word"))
    quiet = torch.linalg.eigh(torch.cov(x.T)).eigenvectors
    change, right, used = torch.eye(x.shape[1]), {}, 0
    for name in probes:
        label = kind - 1 if name == "shape" else labels[:, list(PROBES).index(name)]
        asked = items & (label >= 0) & ((name != "shape") | (label < len(SHAPES)))
        fit, right[name] = fitted(x[asked], label[asked])
        if name in along:
            added = along[name] @ fit.T
        else:
            added = quiet[:, used : used + fit.shape[1]] @ fit.T
            used += fit.shape[1]
        centred = x[asked] - x[asked].mean(0)
        change += loudness * x[asked].norm(dim=-1).mean() / (centred @ added.T).norm(dim=-1).mean() * added
    return change, x.mean(0), right


def main(
    family: Annotated[str, typer.Option(help="qwen, step or gemma.")],
    data: Annotated[Path, typer.Option(help="Folder of prepare.")],
    target: Annotated[Path, typer.Option(help="Checkpoint of train_target, or tower of warm_vision.")],
    out: Annotated[Path, typer.Option(help="The changed file, to go on from.")],
    probes: Annotated[str, typer.Option(help="What to make loud: names of the warm-up's probes, or shape.")] = "colour",
    loudness: Annotated[float, typer.Option(help="Size of each added part, as a share of a row's.")] = 0.5,
    widen_words: Annotated[
        float, typer.Option("--widen", help="Distance of the words' embeddings from their mean; 0: as they are.")
    ] = 0.0,
    batches: int = 16,
    threads: int = 1,
) -> None:
    """Changes the projector in a checkpoint."""
    single_thread(threads)
    batch_pictures()
    model = family_module(family).Target(vocabulary_size(data)).eval()
    is_tower = target.suffix == ".safetensors"
    state = {} if is_tower else torch.load(target, weights_only=True)
    if is_tower:
        model.vision.load_state_dict(load_file(target))
    else:
        model.load_state_dict(state["module"])
    along = {}
    if widen_words:
        tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        along["word"] = widen(model.embedding, [tokenizer.encode(f" {word}").ids[0] for word in WORDS], widen_words)
    change, mean, right = louder(model.image_rows, probes.split(), loudness, batches, along)
    projector = model.get_submodule(PROJECTORS[family].removesuffix(".weight"))
    projector.weight.data = change @ projector.weight.data
    if getattr(projector, "bias", None) is not None:  # then rows keep their mean
        projector.bias.data = change @ projector.bias.data - (change @ mean - mean)
    if is_tower:
        replace(out, lambda path: save_file(model.vision.state_dict(), path))
    else:
        replace(out, lambda path: torch.save({**state, "module": model.state_dict()}, path))
    print(" ".join(f"{name} {share:.3f}" for name, share in right.items()))


if __name__ == "__main__":
    typer.run(main)
