"""A checkpoint with another draft head: what a head learnt is seen by putting it in the place of the model's own."""

from __future__ import annotations

import shutil
from pathlib import Path

from foreglance.models.weights import SINGLE
from foreglance.request import RequestError


def with_head(model: Path, head: Path, folder: Path) -> Path:
    """Copy the checkpoint `model` into `folder`, with the tensors of the safetensors file `head` in place of those of
    the same names; -> the copy, named MODEL-with-HEAD. Raises `RequestError` for a tensor that does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if not (model / SINGLE).is_file():
        raise RequestError(f"--head needs a checkpoint with one file of tensors, {model} has no {SINGLE}", param="head")
    try:
        others = load_file(head)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"--head {head} cannot be read as safetensors ({error})", param="head") from error
    tensors = load_file(model / SINGLE)
    for name, tensor in others.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            raise RequestError(f"--head {head}: {name} {list(tensor.shape)} is no tensor of {model}", param="head")
    made = folder / f"{model.name}-with-{head.stem}"
    shutil.copytree(model, made, ignore=shutil.ignore_patterns(SINGLE))
    save_file(tensors | others, made / SINGLE, {"format": "pt"})
    return made
