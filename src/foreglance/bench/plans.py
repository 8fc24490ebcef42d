"""What a step consists of: the plans of a running engine, line by line, with the time of each line here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreglance.engine import Engine
from foreglance.models.plans import PlanLine, Planned
from foreglance.request import Request, Speculation

PICKS = "output head and picks"
STEPS = 8  # after which the rows of a step have been met often enough to be recorded


@dataclass(frozen=True)
class PlanReport:
    """A plan of `who` ("target", "output head and picks", "draft head", ...) for a step of `num_rows` rows."""

    who: str
    num_rows: int
    lines: list[PlanLine]

    @property
    def microseconds(self) -> float:
        return sum(line.microseconds for line in self.lines)


def profile(engine: Engine, request: Request, depth: int = 3) -> list[PlanReport]:
    """Decode a little without and with drafts of a fixed depth, and look at the plans of the rows that were run then.
    Empty where nothing is recorded: without native kernels."""
    reports: dict[tuple[str, int], PlanReport] = {}
    for speculation in (Speculation("none"), Speculation("auto", depth)):
        sampling = replace(request.sampling, max_tokens=64, ignore_eos=True)
        asked = replace(request, id=f"{request.id}/{speculation.draft}", sampling=sampling, speculation=speculation)
        engine.add(asked)
        for _, model in _models(engine):
            model.plans.forget()
        for _ in range(STEPS):
            engine.step()
        for who, model in _models(engine):
            for num_rows, lines in model.plans.profile(engine.caches).items():
                reports.setdefault((who, num_rows), PlanReport(who, num_rows, lines))
        if engine.picker is not None:
            for num_rows, lines in engine.picker.profile().items():
                reports.setdefault((PICKS, num_rows), PlanReport(PICKS, num_rows, lines))
        engine.cancel(asked.id)
        engine.step()
    return list(reports.values())


def _models(engine: Engine) -> list[tuple[str, Planned]]:
    head = engine.target.head
    parts = [("target", engine.target)]
    if head is not None:
        modules = (head,) if head.spec.num_modules == 1 else head.modules
        parts += [("draft head" if len(modules) == 1 else f"draft module {i}", m) for i, m in enumerate(modules, 1)]
    return [(who, model) for who, model in parts if isinstance(model, Planned)]
