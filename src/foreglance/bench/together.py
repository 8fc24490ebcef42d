"""Several sequences in one engine: how many tokens a second all of them get, and that company changes no token.

The same prompts go through engines with more and more slots, drafts off and on, in turn, round after round, so that
whatever else the machine does falls on all of them. Time is that of all the work, prompts included. What is compared
with are the token ids of each prompt alone in a fresh engine, drafts off.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from foreglance.bench.acceptance import differing
from foreglance.bench.prompts import Case, image_cases, text_cases
from foreglance.bench.report import Progress, silent
from foreglance.engine import Engine
from foreglance.request import Request, RequestError, Result, SamplingParams, Speculation

MOST_SLOTS = 64


@dataclass
class Row:
    """One count of slots with drafts or without. `tokens_per_second` of all sequences together: the median over rounds;
    `ratio` to one slot of the same drafts: the median of ratios within a round. `differing`: tokens that are not those
    of the solo runs, of `tokens`."""

    slots: int
    draft: str
    tokens_per_second: float = 0.0
    ratio: float = 1.0
    tokens: int = 0
    differing: int = 0
    runs: list[float] = field(default_factory=list)

    def as_json(self) -> dict:
        return asdict(self)


def cases_for(engine: Engine, count: int) -> list[Case]:
    """Pictures and texts in turn, or texts alone for a model that takes no picture."""
    if engine.target.spec.image_token < 0:
        return text_cases(count)
    pairs = zip(image_cases(count), text_cases(count), strict=True)
    return [case for pair in pairs for case in pair][:count]


def measure(
    engine: Engine,
    counts: Sequence[int],
    drafts: Sequence[Speculation],
    sampling: SamplingParams,
    prompts: int,
    rounds: int,
    progress: Progress = silent,
) -> list[Row]:
    """A row for each count of slots and each of `drafts`. One slot is measured too, if it is not among them."""
    for count in counts:
        if not 1 <= count <= MOST_SLOTS:
            raise RequestError(f"--slots takes numbers from 1 to {MOST_SLOTS}, got {count}", param="slots")
    cases, levels = cases_for(engine, prompts), sorted({1, *counts})
    alone = [_on(engine, 1).generate(case.request(sampling, Speculation("none")))[0] for case in cases]
    settings = [(speculation, count) for speculation in drafts for count in levels]
    rows = [Row(count, speculation.draft) for speculation, count in settings]
    total = (rounds + 1) * len(rows)
    for turn in range(rounds + 1):  # the first warms up
        for at, (row, (speculation, count)) in enumerate(zip(rows, settings, strict=True)):
            rate, results = _timed(_on(engine, count), [case.request(sampling, speculation) for case in cases])
            row.tokens += sum(len(result.token_ids) for result in results)
            row.differing += sum(_differing(one, other) for one, other in zip(results, alone, strict=True))
            row.runs += [rate] if turn else []
            progress(turn * len(rows) + at + 1, total)
    for start in range(0, len(rows), len(levels)):
        for row in rows[start : start + len(levels)]:
            row.tokens_per_second = float(np.median(row.runs))
            row.ratio = float(np.median(np.array(row.runs) / np.array(rows[start].runs)))
    return rows


def _on(engine: Engine, slots: int) -> Engine:
    """A fresh engine over the same weights; no rows are reused."""
    return engine.with_target(engine.target, replace(engine.settings, slots=slots, prefix_cache_bytes=0))


def _timed(engine: Engine, requests: list[Request]) -> tuple[float, list[Result]]:
    """Tokens a second of all the requests, and their results."""
    began = time.perf_counter()
    results = engine.generate(requests)
    seconds = time.perf_counter() - began
    engine.check()
    return sum(len(result.token_ids) for result in results) / seconds, results


def _differing(one: Result, other: Result) -> int:
    return 0 if one.token_ids == other.token_ids else max(1, differing(one, other))
