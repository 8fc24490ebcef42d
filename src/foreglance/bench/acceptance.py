"""How often guesses stand: each policy, depth and temperature on the same prompts, against drafts off.

Every run is a real run of the engine; the off run of the same prompt gives the text to compare with, so a row also
counts tokens that differ (there must be none) and the ratio of speeds, measured prompt by prompt in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from foreglance.bench.prompts import Case
from foreglance.bench.report import Progress, interval, silent
from foreglance.engine import Engine
from foreglance.request import Depth, Event, Request, Result, SamplingParams, Speculation


@dataclass(frozen=True)
class Setting:
    """One row of the comparison."""

    draft: str
    policy: str
    depth: Depth
    temperature: float

    def speculation(self) -> Speculation:
        return Speculation(self.draft, self.depth, self.policy)


@dataclass(frozen=True)
class Run:
    """One prompt under one setting. `firsts` pairs the first token of each step that had a guess with whether the
    guess stood."""

    result: Result
    firsts: tuple[tuple[int, bool], ...]


@dataclass
class Row:
    """What `foreglance bench acceptance --json` lists. Intervals are 95 %, over prompts."""

    model: str
    draft: str
    policy: str
    depth: Depth
    temperature: float
    image: bool
    prompts: int
    tokens: int
    differing: int
    acceptance_by_depth: list[float | None]
    acceptance_ci: tuple[float, float] | None
    content_acceptance: float | None
    content_ci: tuple[float, float] | None
    tokens_per_step: float | None
    tokens_per_step_ci: tuple[float, float] | None
    speedup: float | None
    off_because: list[str] = field(default_factory=list)

    def as_json(self) -> dict:
        return asdict(self)


def run(engine: Engine, request: Request) -> Run:
    """Run one request alone and note the first token of each step."""
    firsts: list[tuple[int, bool]] = []
    events = list(engine.stream(request))
    result = events[-1].result
    assert result is not None
    if result.draft.kind != "none":
        firsts = [(event.tokens[0].id, event.tokens[0].depth == 1) for event in _guessed(events, request)]
    return Run(result, tuple(firsts))


def _guessed(events: Sequence[Event], request: Request) -> Iterator[Event]:
    """Steps that carried a guess: all but the first token, and but the last one if nothing could follow it."""
    if request.speculation.draft == "none" or request.speculation.depth in (0, "auto"):
        return
    gained = 0
    for event in events:
        if gained and event.tokens and request.sampling.max_tokens - gained > 1:
            yield event
        gained += len(event.tokens)


def measure(
    engine: Engine,
    cases: Sequence[Case],
    settings: Sequence[Setting],
    max_tokens: int,
    content: frozenset[int],
    progress: Progress = silent,
    seed: int = 1,
) -> list[Row]:
    """Every setting on every case; off and on runs take turns. `content` are the ids of content words."""
    temperatures = sorted({setting.temperature for setting in settings})
    done, total = 0, len(cases) * (len(settings) + len(temperatures))
    plain: dict[tuple[int, float], list[Run]] = {}
    runs: dict[tuple[int, Setting], Run] = {}
    for index, case in enumerate(cases):
        for temperature in temperatures:
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + index)
            mine = [setting for setting in settings if setting.temperature == temperature]
            off = case.request(sampling, Speculation("none"))
            plain[index, temperature] = [run(engine, off)]
            for setting in mine:
                runs[index, setting] = run(engine, case.request(sampling, setting.speculation()))
                progress(done := done + 1, total)
            plain[index, temperature].append(run(engine, off))  # again at the end: the two bracket the drift
            progress(done := done + 1, total)
    return [_row(engine, setting, len(cases), cases[0].kind, runs, plain, content) for setting in settings]


def _row(
    engine: Engine,
    setting: Setting,
    count: int,
    kind: str,
    runs: dict[tuple[int, Setting], Run],
    plain: dict[tuple[int, float], list[Run]],
    content: frozenset[int],
) -> Row:
    mine = [runs[i, setting] for i in range(count)]
    base = [plain[i, setting.temperature] for i in range(count)]
    per_step = interval(np.array([[m.result.timings.num_tokens - 1, m.result.timings.steps] for m in mine]))
    first = interval(np.array([[sum(ok for _, ok in m.firsts), len(m.firsts)] for m in mine]))
    words = [[ok for token, ok in m.firsts if token in content] for m in mine]
    of_content = interval(np.array([[sum(w), len(w)] for w in words]))
    return Row(
        model=engine.target.spec.name,
        draft=setting.draft,
        policy=setting.policy,
        depth=setting.depth,
        temperature=setting.temperature,
        image=kind == "image",
        prompts=count,
        tokens=sum(m.result.timings.num_tokens for m in mine),
        differing=sum(differing(m.result, b[0].result) for m, b in zip(mine, base, strict=True)),
        acceptance_by_depth=by_depth([m.result for m in mine]),
        acceptance_ci=first[1:] if first else None,
        content_acceptance=of_content[0] if of_content else None,
        content_ci=of_content[1:] if of_content else None,
        tokens_per_step=per_step[0] if per_step else None,
        tokens_per_step_ci=per_step[1:] if per_step else None,
        speedup=_speedup(mine, base),
        off_because=sorted({m.result.draft.off_because for m in mine if m.result.draft.off_because}),
    )


def differing(one: Result, other: Result) -> int:
    """Places at which two answers have different tokens; a missing token differs."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(a != b for a, b in pairs) + abs(len(one.token_ids) - len(other.token_ids))


def by_depth(results: Sequence[Result]) -> list[float | None]:
    deepest = max((len(r.timings.drafted) for r in results), default=0)
    rates = []
    for depth in range(deepest):
        tried = sum(r.timings.drafted[depth] for r in results if len(r.timings.drafted) > depth)
        stood = sum(r.timings.accepted[depth] for r in results if len(r.timings.drafted) > depth)
        rates.append(stood / tried if tried else None)
    return rates


def _speedup(mine: Sequence[Run], base: Sequence[Sequence[Run]]) -> float | None:
    """Median over prompts of plain time over drafted time for the same tokens."""
    ratios = [
        np.mean([b.result.timings.decode_ms for b in pair]) / m.result.timings.decode_ms
        for m, pair in zip(mine, base, strict=True)
        if m.result.timings.decode_ms
    ]
    return float(np.median(ratios)) if ratios else None
