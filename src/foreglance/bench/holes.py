"""What a hole in the draft's positions costs, apart from what missing rows cost.

A report on this fault (llama.cpp #25144) found acceptance near 0 when the draft kept the target's positions across a
hole and normal acceptance after renumbering. Here the two are told apart: the same missing rows with and without holes
of growing size, rows present as the reference, and the pairing faults that look like a hole from outside.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from foreglance.bench.acceptance import Run, run
from foreglance.bench.prompts import Case
from foreglance.bench.report import Progress, interval, silent
from foreglance.drafters.base import Drafter, Settled
from foreglance.drafters.mtp import MtpDrafter
from foreglance.drafters.mtp_chain import ChainDrafter
from foreglance.drafters.rows import RowMap
from foreglance.engine import Engine
from foreglance.prompt import PositionRule, Positions
from foreglance.request import MAX_DEPTH, RequestError, SamplingParams, Speculation
from foreglance.sequence import Sequence as Running


class HoleMap(RowMap):
    """Policy `gap` with `extra` more positions in each hole."""

    extra = 0
    limit = 0  # positions that the model has, less the deepest guess

    def positions(self, start: int, stop: int) -> Positions:
        made = super().positions(start, stop)
        self._check(int(made.coords.max(initial=0)))
        return made

    def coordinate(self, row: int) -> int:
        made = super().coordinate(row)
        self._check(made)
        return made

    def _check(self, last: int) -> None:
        if last >= self.limit:
            raise ValueError(f"position {last} lies beyond those that the model has")

    def _number(self, rule: PositionRule, position_of: str) -> Positions:
        positions = super()._number(rule, position_of)
        if self._policy != "gap" or not self.extra:
            return positions
        kept = np.flatnonzero(np.append(self._kept, True) if position_of == "hidden" else self._kept)
        jumps = np.concatenate([[0], np.cumsum(np.diff(kept) > 1)]) if len(kept) else np.zeros(0, np.int64)
        return Positions(positions.coords + self.extra * jumps)


def hole_of(extra: int, context: int) -> type[HoleMap]:
    return type(f"HoleOf{extra}", (HoleMap,), {"extra": extra, "limit": context - MAX_DEPTH})


class ShiftedStates:
    """Put before a drafter: pairs every row after the first image with the state of `shift` rows earlier, which is what
    happens when row counts and positions are confused."""

    shift = 0

    def propose(self, settled: Sequence[Settled]) -> dict[int, tuple[int, ...]]:
        return super().propose([self._shifted(one) for one in settled])

    def _shifted(self, one: Settled) -> Settled:
        assert one.hidden is not None
        past = self._past.setdefault(one.sequence.id, [])
        past.extend(one.hidden.clone())
        first_image = int(np.argmax(one.sequence.rows.is_image))
        rows = range(one.first_row, one.first_row + len(one.hidden))
        states = [past[row - self.shift if row > first_image + self.shift else row] for row in rows]
        return one._replace(hidden=torch.stack(states))

    def admit(self, sequence: Running, memory) -> None:
        self._past: dict[int, list[torch.Tensor]] = {}
        super().admit(sequence, memory)


@dataclass(frozen=True)
class Variant:
    """One row of the table: a policy, the hole added to each image's own, and a shift of the paired states."""

    name: str
    policy: str
    extra: int = 0
    shift: int = 0


VARIANTS = (
    Variant("rows present (see)", "see"),
    Variant("rows missing, renumbered (skip)", "skip"),
    Variant("rows missing, the target's positions (gap)", "gap"),
    Variant("gap, 16 more per image", "gap", 16),
    Variant("gap, 128 more per image", "gap", 128),
    Variant("gap, 1,000 more per image", "gap", 1000),
    Variant("skip, states 1 row late after the image", "skip", shift=1),
    Variant("skip, states 16 rows late after the image", "skip", shift=16),
)


@dataclass(frozen=True)
class HoleRow:
    """Acceptance at depth 1 and tokens per step with 95 % intervals over prompts; `off_because` says why there are
    none, e.g. since holes lead beyond the positions that the model has."""

    variant: str
    prompts: int
    acceptance: tuple[float, float, float] | None
    tokens_per_step: tuple[float, float, float] | None
    off_because: str | None = None


def measure(
    engine: Engine,
    cases: Sequence[Case],
    depth: int = 3,
    max_tokens: int = 64,
    variants: Sequence[Variant] = VARIANTS,
    progress: Progress = silent,
) -> list[HoleRow]:
    """Swap the engine's drafter for each variant in turn; the target's text is the same throughout.

    Raises `RequestError` if the model has no head with rows of its own.
    """
    if engine.target.head is None:
        raise RequestError(
            f"{engine.target.spec.name} has no draft head with rows of its own, so its drafts have no holes; "
            "`foreglance bench acceptance` measures them",
            param="model",
            code="draft_unavailable",
        )
    rows = []
    with _said_in_the_table():
        for number, variant in enumerate(variants):
            engine.use_drafter(_drafter(engine, variant))
            runs = []
            for index, case in enumerate(cases):
                sampling = SamplingParams(max_tokens=max_tokens, seed=index)
                runs.append(run(engine, case.request(sampling, Speculation("mtp", depth, variant.policy))))
                progress(number * len(cases) + index + 1, len(variants) * len(cases))
            rows.append(_row(variant, runs))
    return rows


@contextmanager
def _said_in_the_table() -> Iterator[None]:
    """A hole that leads too far is a drafter's failure to the engine, which logs it; here it is a row of the table."""
    log = logging.getLogger("foreglance.engine")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _row(variant: Variant, runs: Sequence[Run]) -> HoleRow:
    off = next((r.result.draft.off_because for r in runs if r.result.draft.off_because), None)
    if off is not None:
        return HoleRow(variant.name, len(runs), None, None, off)
    first = interval(np.array([[sum(ok for _, ok in r.firsts), len(r.firsts)] for r in runs]))
    steps = interval(np.array([[r.result.timings.num_tokens - 1, r.result.timings.steps] for r in runs]))
    return HoleRow(variant.name, len(runs), first, steps)


def _drafter(engine: Engine, variant: Variant) -> Drafter:
    head = engine.target.head
    assert head is not None
    kind = MtpDrafter if head.spec.num_modules == 1 else ChainDrafter
    if variant.shift:
        kind = type("Shifted", (ShiftedStates, kind), {"shift": variant.shift})
    return kind(head, row_map=hole_of(variant.extra, engine.context))
