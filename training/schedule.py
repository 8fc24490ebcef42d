"""What every training script does the same way: threads, learning rate, and a run that can be stopped and go on."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def on_stop(call: Callable[[int], object]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM only call this, with their number."""
    before = {number: signal.signal(number, lambda got, _: call(got)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    """The steps of a training run, with learning rate and checkpoint; a run that finds its checkpoint goes on from it.

    Iterating gives the number of each step, from 0, until `steps` or `seconds` are used up. In between the state is
    written every `save_every` seconds, at the end, and when SIGINT or SIGTERM comes; then the process ends with
    128 + the signal's number. With `steps` alone (`seconds` infinite) the weights depend on nothing but the arguments,
    however often the run is stopped. `helper` is trained along with the module and needed only to go on.
    """

    def __init__(
        self,
        checkpoint: Path,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        seconds: float,
        warm_up: int,
        save_every: float = 120,
        helper: nn.Module | None = None,
    ):
        self.checkpoint, self.module, self.optimizer, self.helper = checkpoint, module, optimizer, helper
        self.steps, self.seconds, self.warm_up, self.save_every = steps, seconds, warm_up, save_every
        self.step, earlier = 0, 0.0
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            module.load_state_dict(state["module"])
            if helper is not None:
                helper.load_state_dict(state["helper"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.step, earlier = int(state["facts"]["step"]), state["facts"]["spent"]
        self._start = time.monotonic() - earlier

    @property
    def spent(self) -> float:
        """Seconds of training, all starts together."""
        return time.monotonic() - self._start

    def _used_up(self) -> bool:
        return self.step >= self.steps or self.spent >= self.seconds

    def numbers(self, report: Callable[[], None]) -> Iterator[int]:
        """Gives the number of each step; `report` is called after a regular checkpoint and at the end.

        A run that is at its end already gives none, and writes and reports nothing.
        """
        if self._used_up():
            return
        last_save, came = time.monotonic(), []
        with on_stop(came.append):
            while not self._used_up():
                progress = max(self.step / self.steps, self.spent / self.seconds)
                rate = cosine(self.step, progress, self.warm_up)
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak"] * rate
                yield self.step
                self.step += 1
                if came:
                    self.save()
                    raise SystemExit(128 + came[0])
                if time.monotonic() - last_save > self.save_every:
                    self.save()
                    report()
                    last_save = time.monotonic()
        self.save()
        report()

    def descend(self, *losses: torch.Tensor) -> None:
        """One step of the optimizer against the sum of the losses, their gradient no longer than 1."""
        self.optimizer.zero_grad(set_to_none=True)
        for loss in losses:
            loss.backward()
        torch.nn.utils.clip_grad_norm_([w for group in self.optimizer.param_groups for w in group["params"]], 1.0)
        self.optimizer.step()

    def save(self) -> None:
        """Writes the state; a half-written file never takes the place of a whole one."""
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.helper is not None:
            state["helper"] = self.helper.state_dict()
        facts = {"step": self.step, "spent": self.spent}
        replace(self.checkpoint, lambda path: torch.save({**state, "rng": torch.get_rng_state(), "facts": facts}, path))


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Has a file written beside its place and then put there, so that what lies there is always whole."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    partial.rename(path)
