"""What a step consists of: the recorded calls that a running engine repeats, line by line, with the time of each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from foreglance.engine import Engine
from foreglance.models.plans import Planned
from foreglance.ops.native import Lines, run_by
from foreglance.request import Request, Speculation

STEPS = 8  # after which the rows of a step have been met often enough to be recorded
MEASURED = 64  # steps after those
PICKS = "output head and picks"


@dataclass(frozen=True)
class PlanLine:
    """One call of a list, and how long it takes in microseconds."""

    kernel: str
    what: str
    microseconds: float


@dataclass(frozen=True)
class PlanReport:
    """A list of recorded calls for `num_rows` rows: whose it is and what it does ("target, forward, output head and
    picks", "draft head, one guess more", ...), and how often a step of the measured request ran it."""

    who: str
    num_rows: int
    runs: float
    lines: list[PlanLine]

    @property
    def microseconds(self) -> float:
        return sum(line.microseconds for line in self.lines)


class Stopwatch:
    """Runs recorded calls one by one, and keeps the fastest time of each. A list in one go is a little faster than
    their sum."""

    def __init__(self) -> None:
        self.lists: dict[int, Lines] = {}
        self.fastest: dict[int, np.ndarray] = {}  # nanoseconds of each call
        self.runs: dict[int, int] = defaultdict(int)

    def __call__(self, native: ModuleType, lines: Lines, times: int) -> None:
        key = id(lines)
        self.lists[key] = lines
        for _ in range(times):
            spent = np.zeros(lines.count, np.int64)
            native.time(lines.address, lines.count, spent.ctypes.data)
            self.fastest[key] = np.minimum(self.fastest.get(key, spent), spent)
            self.runs[key] += 1

    def reports(self, owners: dict[int, str], others: str) -> list[PlanReport]:
        """In the order in which the lists first ran. `owners`: who repeats which; `others`: whose the rest are."""
        found = []
        for key, lines in self.lists.items():
            times = (self.fastest[key] / 1e3).tolist()
            each = [PlanLine(*names, time) for names, time in zip(lines.names(), times, strict=True)]
            who = owners.get(key, "target" if PICKS in lines.name else others)
            who = who if lines.name == "forward" else f"{who}, {lines.name}"
            found.append(PlanReport(who, lines.num_rows, self.runs[key] / MEASURED, each))
        return found


def profile(engine: Engine, request: Request, depth: int = 3) -> list[PlanReport]:
    """Decode a little without and with drafts of a fixed depth, and time what is repeated then as it is. Empty where
    nothing is recorded: without native kernels."""
    reports: dict[tuple[str, int], PlanReport] = {}
    for speculation in (Speculation("none"), Speculation("auto", depth)):
        sampling = replace(request.sampling, max_tokens=(depth + 1) * (STEPS + MEASURED), ignore_eos=True)
        asked = replace(request, id=f"{request.id}/{speculation.draft}", sampling=sampling, speculation=speculation)
        engine.add(asked)
        for _ in range(STEPS):
            engine.step()
        watch = Stopwatch()
        with run_by(watch):
            for _ in range(MEASURED):
                engine.step()
        others = "draft model" if engine.target.head is None else "draft modules"
        others = "assistant" if "assistant" in engine.draft_kinds else others
        for report in watch.reports(_owners(engine), others):
            reports.setdefault((report.who, report.num_rows), report)
        engine.cancel(asked.id)
        engine.step()
    return list(reports.values())


def _owners(engine: Engine) -> dict[int, str]:
    """Who repeats which lists, by `id`."""
    head, parts = engine.target.head, [("target", engine.target)]
    if head is not None:
        modules = (head,) if head.spec.num_modules == 1 else head.modules
        parts += [("draft head" if len(modules) == 1 else f"draft module {i}", m) for i, m in enumerate(modules, 1)]
    return {id(lines): who for who, model in parts if isinstance(model, Planned) for lines in model.plans.recorded()}
