"""The families of embedded models, and what training asks of each: a target, and how its batches are made.

Owns the registry only. A family is a module with a `Target`, and with `batches` where it needs batches of its own.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from training import batches as plain
from training.batches import Batch
from training.prepare import Shard

MODULES = {"qwen": "training.model", "step": "training.step", "gemma": "training.gemma", "text": "training.text"}


def family_module(family: str) -> ModuleType:
    return importlib.import_module(MODULES[family])


def batches(family: str, data: Path, rows: int, seed: int, skip: int, vocab_size: int) -> Iterator[Batch]:
    """Training batches without end; the first `skip` are left out."""
    own = getattr(family_module(family), "batches", None)
    return own(data, rows, seed, skip, vocab_size) if own else plain.endless(data, rows, seed, skip)


def collate(family: str) -> Callable[[Shard, np.ndarray], Batch]:
    """How chats become a batch for validation."""
    return getattr(family_module(family), "collate", plain.collate)
