"""Where a step's time goes, by operation, in the target and in the draft head.

Times every call of the ops protocol from outside; what no operation covers (Python, views, cache writes) is the rest of
its forward, and what no forward covers (packing, picks, text) is the rest of the step. Operations are timed one by
one, so forwards are not run as plans here; `foreglance explain --plan` times the lines of a plan. How much of a step
that runs as plans is spent in them, `in_kernels` says.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from types import ModuleType
from typing import Any

from foreglance.engine import Engine
from foreglance.models.base import ChainedHead, DraftHead, HeadSpec, Target
from foreglance.ops.base import Ops
from foreglance.ops.native import Lines, run_by
from foreglance.request import Request, Speculation
from foreglance.settings import Settings

NO_OPERATIONS = ("name", "draft", "kept_as", "pack_linear")
OPERATIONS = tuple(name for name in vars(Ops) if not name.startswith("_") and name not in NO_OPERATIONS)

RECORDING = 8  # steps after which rows have been met often enough to be recorded


class Clock:
    """Adds up seconds and calls by (scope, operation). `scope` is who runs: target, head, or neither."""

    def __init__(self) -> None:
        self.scope = "step"
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[self.scope, name] += time.perf_counter() - began
                self.calls[self.scope, name] += 1

        return call

    def within(self, scope: str, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed("all", function)

        def call(*args: Any) -> Any:
            outer, self.scope = self.scope, scope
            try:
                return timed(*args)
            finally:
                self.scope = outer

        return call


class TimedOps:
    """An `Ops` that times each operation of another one."""

    def __init__(self, ops: Ops, clock: Clock):
        self.name = ops.name
        self.kept_as = ops.kept_as
        self.pack_linear = ops.pack_linear
        self.draft = self
        timed = {name: clock.timed(name, attrgetter(name)(ops)) for name in OPERATIONS}
        self.__dict__.update(timed)


class TimedModel:
    """A target or a head whose forward and logits count under a scope."""

    def __init__(self, model: Any, clock: Clock, scope: str, head: TimedModel | TimedChain | None = None):
        self.spec, self.head = model.spec, head
        self.forward = clock.within(scope, model.forward)
        self.logits = clock.within(f"{scope} output head", model.logits)
        self.__dict__.update({name: method for name, method in _images_of(model, scope).items()})


@dataclass(frozen=True)
class TimedChain:
    """A chained head whose modules count under a scope each."""

    spec: HeadSpec
    modules: tuple[TimedModel, ...]


def _timed_head(head: DraftHead | ChainedHead, clock: Clock) -> TimedModel | TimedChain:
    if head.spec.num_modules == 1:
        return TimedModel(head, clock, "draft head")
    modules = enumerate(head.modules, start=1)
    return TimedChain(head.spec, tuple(TimedModel(one, clock, f"draft module {number}") for number, one in modules))


def _images_of(model: Target, scope: str) -> dict[str, Callable[..., Any]]:
    return {"prepare": model.prepare, "embed_image": model.embed_image} if scope == "target" else {}


@dataclass(frozen=True)
class Line:
    """One line of the table. Times in microseconds per target step."""

    scope: str
    operation: str
    calls: float
    microseconds: float
    share: float


@dataclass(frozen=True)
class InKernels:
    """A decode step at a draft depth: how long it takes and how long of that recorded kernel calls do, in microseconds,
    and the share of these. Medians over steps, so the share is of no step in particular."""

    depth: int
    step: float
    kernels: float
    share: float


def in_kernels(
    model: str, request: Request, depths: tuple[int, ...], steps: int = 64, settings: Settings | None = None
) -> list[InKernels]:
    """Of plain steps first, if 0 is among `depths`. Nothing is spent in recorded calls where none are: without native
    kernels."""
    engine, found = Engine.load(model, settings), []
    for depth in depths:
        speculation = Speculation("auto", depth) if depth else Speculation("none")
        sampling = replace(request.sampling, max_tokens=(depth + 1) * (steps + RECORDING), ignore_eos=True)
        asked = replace(request, id=f"{request.id}/{depth}", sampling=sampling, speculation=speculation)
        engine.add(asked)
        for _ in range(RECORDING):
            engine.step()
        spent, both = 0.0, []

        def run(native: ModuleType, lines: Lines, times: int) -> None:
            nonlocal spent
            began = time.perf_counter()
            native.run(lines.address, lines.count, times)
            spent += time.perf_counter() - began

        with run_by(run):
            for _ in range(steps):
                spent, began = 0.0, time.perf_counter()
                engine.step()
                both.append((time.perf_counter() - began, spent))
        engine.cancel(asked.id)
        engine.step()
        step, kernels = (median(times) * 1e6 for times in zip(*both, strict=True))
        found.append(InKernels(depth, step, kernels, median([own / whole for whole, own in both])))
    return found


def measure(model: str, request: Request, rounds: int = 3, settings: Settings | None = None) -> list[Line]:
    """Decode `request` a few times after a warm-up and divide by the number of steps; prompt work is left out."""
    clock = Clock()
    engine = Engine.load(model, settings, instrument=lambda ops: TimedOps(ops, clock))
    head = engine.target.head
    timed_head = _timed_head(head, clock) if head is not None else None
    engine = engine.with_target(TimedModel(engine.target, clock, "target", timed_head))
    list(engine.stream(request))
    total, steps = 0.0, 0
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for _ in range(rounds):
        stream = engine.stream(request)
        next(stream)
        clock.seconds.clear()
        clock.calls.clear()
        began = time.perf_counter()
        result = [event.result for event in stream][-1]
        total += time.perf_counter() - began
        steps += result.timings.steps
        for key, value in clock.seconds.items():
            seconds[key] += value
            calls[key] += clock.calls[key]
    return _lines(seconds, calls, total, steps)


def _lines(
    seconds: dict[tuple[str, str], float], calls: dict[tuple[str, str], int], total: float, steps: int
) -> list[Line]:
    def line(scope: str, name: str, count: float, spent: float) -> Line:
        return Line(scope, name, count / steps, spent / steps * 1e6, spent / total)

    lines, covered = [], 0.0
    for scope in dict.fromkeys(scope for scope, _ in seconds):
        whole = seconds[scope, "all"]
        inside = {name: spent for (s, name), spent in seconds.items() if s == scope and name != "all"}
        lines += [line(scope, name, calls[scope, name], spent) for name, spent in inside.items()]
        lines.append(line(scope, "(rest of its forward)", calls[scope, "all"], whole - sum(inside.values())))
        covered += whole
    lines.append(line("step", "(packing, picks, caches, text)", steps, total - covered))
    return sorted(lines, key=lambda item: -item.microseconds)
