"""Files of tensors that are there whole or not at all, also on a full disk and when the process is killed.

Owns how they are written, in the layout of safetensors, and the hidden file that they are meanwhile, which `sweep`
removes if the process was killed. The writer of safetensors would make one of its own, under any name.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

UNFINISHED = re.compile(r"\..+\.\w{8}\.part")  # what `tempfile` makes of the names in `beside`
TYPES = {torch.uint8: "U8", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
ALIGNMENT = 64  # of the first tensor in the file
Stored = tuple[Sequence[int], Sequence[Tensor]]  # a shape, and the tensors whose bytes fill it one after the other


def raw(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor, uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def write(path: Path, tensors: Mapping[str, Stored], about: Mapping[str, str], *, durable: bool) -> None:
    """Write tensors beside `path` and move them there; what was there stays until the last moment. `durable`: the disk
    has them when this returns. Raises `OSError`."""
    with beside(path) as (hidden, file):
        file.write(_head(tensors, about))
        for _, parts in tensors.values():
            for part in parts:
                file.write(raw(part))
        file.flush()
        if durable:
            os.fsync(file.fileno())
        os.replace(hidden, path)
    if durable:
        _to_disk(path.parent)


def _head(tensors: Mapping[str, Stored], about: Mapping[str, str]) -> bytes:
    """Length and JSON: what lies where."""
    header, at = {}, 0
    for name, (shape, parts) in tensors.items():
        end = at + sum(part.nbytes for part in parts)
        header[name] = {"dtype": TYPES[parts[0].dtype], "shape": [*shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": dict(about), **header}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def beside(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new hidden file beside `path`; what is still there of it afterwards goes. It is locked, so that a `sweep` of
    another process leaves it, where the file system has locks."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        with open(handle, "wb", closefd=False) as file:
            yield Path(name), file
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _to_disk(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> list[str]:
    """Remove what writers that were cut short have left in a folder; -> names. Leaves what somebody is writing."""
    swept = []
    for path in folder.iterdir():
        if not UNFINISHED.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            continue
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            swept.append(path.name)
    return swept
