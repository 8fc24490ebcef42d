"""What every training script does the same way: threads, learning rate, checkpoints to restart from."""

import math
from pathlib import Path

import torch
from torch import nn


def single_thread(threads: int = 1) -> None:
    """Fixes the number of threads, and flushes denormals, which cost much and mean nothing here."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)


def cosine(step: int, progress: float, warm_up: int) -> float:
    """The share of the learning rate at `progress` (0 to 1): linear warm-up, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def save_checkpoint(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, **facts: float) -> None:
    """Writes the state of a run; a half-written file never takes the place of a whole one."""
    partial = path.with_suffix(".partial")
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save({**state, "facts": facts}, partial)
    partial.rename(path)


def load_checkpoint(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Restores what `save_checkpoint` wrote and returns its facts; empty if there is nothing to restore."""
    if not path.exists():
        return {}
    state = torch.load(path, weights_only=True)
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return state["facts"]
