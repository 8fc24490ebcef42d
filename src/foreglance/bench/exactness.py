"""Drafts on against drafts off, token by token, over random settings: the count of differing tokens must be 0.

Each round runs some requests together with drafts on, each with its own settings, then each of them alone with drafts
off. It stops at the first difference and says how to see it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from foreglance.bench.acceptance import differing
from foreglance.bench.prompts import Case, image_cases, text_cases
from foreglance.engine import Engine
from foreglance.request import Request, SamplingParams, Speculation

POOL = 64  # cases of each kind that rounds draw from


@dataclass(frozen=True)
class Trial:
    """One request's settings, small enough to print as a reproduction."""

    case: int
    kind: str
    sampling: SamplingParams
    speculation: Speculation


@dataclass
class Report:
    """`differing` is 0 or the count of the trial that ended the run; `reproduction` then says which it was."""

    tokens: int = 0
    differing: int = 0
    rounds: int = 0
    accepted: int = 0
    settings: dict = field(default_factory=dict)
    reproduction: dict | None = None


def cases() -> dict[str, list[Case]]:
    return {"text": text_cases(POOL), "image": image_cases(POOL), "two images": image_cases(POOL, images_each=2)}


def draw(rng: random.Random, max_tokens: int, drafts: tuple[str, ...]) -> Trial:
    """A request that a user could send: any kind of prompt, any sampling, any drafter at any depth."""
    temperature = rng.choice((0.0, 0.0, 0.3, 0.8, 1.2))
    sampling = SamplingParams(
        max_tokens=rng.randint(1, max_tokens),
        temperature=temperature,
        top_k=rng.choice((0, 0, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.2)),
        seed=rng.randrange(2**32),
        stop=rng.choice(((), (), ("red",), ("the top",))),
        ignore_eos=rng.random() < 0.2,
    )
    speculation = Speculation(
        rng.choice(drafts), rng.choice((1, 2, 3, 4, 7, "auto")), rng.choice(("see", "see", "skip", "placeholder"))
    )
    return Trial(rng.randrange(POOL), rng.choice(("text", "image", "image", "two images")), sampling, speculation)


def run(
    engine: Engine, tokens: int, seed: int = 0, max_tokens: int = 64, progress: Callable[[int], None] = lambda n: None
) -> Report:
    """Compare at least `tokens` tokens. `engine` should not reuse prefixes (`Settings(prefix_cache_bytes=0)`)."""
    rng, pool = random.Random(seed), cases()
    drafts = ("ngram",) if engine.best_draft == "none" else (engine.best_draft, engine.best_draft, "ngram")
    report = Report(settings={"seed": seed, "max_tokens": max_tokens, "model": engine.target.spec.name})
    while report.tokens < tokens and not report.differing:
        trials = [draw(rng, max_tokens, drafts) for _ in range(rng.randint(1, engine.settings.slots))]
        together = engine.generate([_request(trial, pool, trial.speculation) for trial in trials])
        for trial, result in zip(trials, together, strict=True):
            alone = engine.generate(_request(trial, pool, Speculation("none")))[0]
            report.tokens += len(alone.token_ids)
            report.accepted += sum(result.timings.accepted)
            wrong = differing(result, alone) or result.finish_reason != alone.finish_reason or result.text != alone.text
            if wrong:
                report.differing = max(1, differing(result, alone))
                report.reproduction = {"together": [asdict(t) for t in trials], "wrong": asdict(trial)}
                break
        report.rounds += 1
        progress(report.tokens)
    engine.check()
    return report


def _request(trial: Trial, pool: dict[str, list[Case]], speculation: Speculation) -> Request:
    return replace(pool[trial.kind][trial.case].request(trial.sampling, speculation))
