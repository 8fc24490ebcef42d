"""Drafts on against drafts off, token by token, over random settings: the count of differing tokens must be 0.

A round takes the model and weight format that were compared least so far, so that a run of any length visits all of
them evenly. It draws the format of draft heads, how many slots there are and whether finished conversations are reused;
then some conversations of one to three turns, each with its own prompt, sampling and drafter. With drafts on they run
together, with drafts off each runs alone in a fresh engine. The first difference ends the run, and the round is given
whole, so that `replay` shows it again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from foreglance.bench.acceptance import differing
from foreglance.bench.prompts import IMAGE_QUESTIONS, TALK, Case, image_cases, text_cases
from foreglance.bench.scenes import HELD_OUT_SEED, scene_from_seed
from foreglance.engine import Engine
from foreglance.models.weights import find_assistant
from foreglance.ops.formats import FORMATS
from foreglance.request import Message, Request, Result, SamplingParams, Speculation
from foreglance.settings import Settings

POOL = 64  # cases of each kind that rounds draw from
MAX_TURNS = 3
MODELS = ("tiny-qwen", "tiny-step", "tiny-gemma", "tiny-text", "tiny-qwen+tiny-text")  # "+" names an independent draft
REUSE_BYTES = 1 << 28

Engines = Callable[[str, str, str], Engine]  # of a model, its weight format and that of draft heads


@dataclass(frozen=True)
class Plan:
    """What rounds draw from."""

    models: tuple[str, ...] = MODELS
    weights: tuple[str, ...] = FORMATS
    draft_weights: tuple[str, ...] = ("same", "q8")
    slots: int = 4
    max_tokens: int = 64


@dataclass(frozen=True)
class Trial:
    """One conversation's settings."""

    case: int
    kind: str
    turns: int
    sampling: SamplingParams
    speculation: Speculation


@dataclass(frozen=True)
class Round:
    """Everything that a round depends on, small enough to print."""

    model: str
    weights: str
    draft_weights: str
    slots: int
    reuse: bool
    trials: tuple[Trial, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Round:
        """The inverse of `as_json`, also after a detour through a file."""
        trials = tuple(
            Trial(one["case"], one["kind"], one["turns"], _sampling(one["sampling"]), Speculation(**one["speculation"]))
            for one in values["trials"]
        )
        layout = {name: values[name] for name in ("model", "weights", "draft_weights", "slots", "reuse")}
        return cls(**layout, trials=trials)


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    bias = {int(token): value for token, value in values["logit_bias"].items()}
    return SamplingParams(**{**values, "stop": tuple(values["stop"]), "logit_bias": bias})


@dataclass
class Count:
    """Tokens compared, those that differ, and drafts accepted on the way, which show that there was something to
    compare."""

    tokens: int = 0
    differing: int = 0
    accepted: int = 0

    def add(self, tokens: int, differing: int, accepted: int) -> None:
        self.tokens, self.differing = self.tokens + tokens, self.differing + differing
        self.accepted += accepted


@dataclass
class Report:
    """`differing` is 0 or the count of the conversation that ended the run; `reproduction` then holds its round and
    which trial and turn it was. `reused` rows and `accepted` drafts show that there was something to compare. The same
    counts by weight format, by family of the target and by drafter, and of each pair of model and format."""

    tokens: int = 0
    differing: int = 0
    rounds: int = 0
    accepted: int = 0
    reused: int = 0
    settings: dict = field(default_factory=dict)
    by_weights: dict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    by_family: dict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    by_draft: dict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    by_pair: dict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))
    reproduction: dict | None = None

    def add(self, drawn: Round, family: str, result: Result, off: Result) -> int:
        """Count one turn with drafts against the same without; -> tokens that differ."""
        wrong = 0 if _same(result, off) else max(1, differing(result, off))
        counts = len(off.token_ids), wrong, sum(result.timings.accepted)
        self.tokens, self.accepted = self.tokens + counts[0], self.accepted + counts[2]
        self.differing, self.reused = self.differing + wrong, self.reused + result.timings.cached_rows
        for count in (
            self.by_weights[drawn.weights],
            self.by_family[family],
            self.by_draft[result.draft.kind],
            self.by_pair[drawn.model, drawn.weights],
        ):
            count.add(*counts)
        return wrong

    def as_json(self) -> dict[str, Any]:
        groups = {"by_weights": self.by_weights, "by_family": self.by_family, "by_draft": self.by_draft}
        counts = {name: {key: asdict(count) for key, count in sorted(group.items())} for name, group in groups.items()}
        plain = ("tokens", "differing", "rounds", "accepted", "reused", "settings", "reproduction")
        return {name: vars(self)[name] for name in plain} | counts


def load(model: str, weights: str, draft_weights: str) -> Engine:
    """The engine of a model of `Plan.models`."""
    name, _, draft = model.partition("+")
    settings = Settings(weights=weights, draft_weights=draft_weights, try_drafts=False)
    return Engine.load(name, settings, draft_model=draft or find_assistant(name))


@cache
def cases(kind: str) -> list[Case]:
    if kind == "text":
        return text_cases(POOL)
    return image_cases(POOL, images_each=2 if kind == "two images" else 1)


def draw(rng: random.Random, plan: Plan, engines: Engines, done: Mapping[tuple[str, str], int]) -> Round:
    """`done` counts what was compared of each pair of model and format: one that has least is next."""
    pairs = [(model, weights) for model in plan.models for weights in plan.weights]
    least = min(done.get(pair, 0) for pair in pairs)
    model, weights = rng.choice([pair for pair in pairs if done.get(pair, 0) == least])
    of_drafts = rng.choice(plan.draft_weights)
    engine = engines(model, weights, of_drafts)
    drafts = ("ngram",) if engine.best_draft == "none" else (engine.best_draft, engine.best_draft, "ngram")
    kinds = ("text", "image", "image", "two images") if engine.target.spec.image_token >= 0 else ("text",)
    slots = rng.randint(1, plan.slots)
    trials = tuple(_trial(rng, plan.max_tokens, drafts, kinds) for _ in range(rng.randint(1, 2 * slots)))
    return Round(model, weights, of_drafts, slots, rng.random() < 0.5, trials)


def _trial(rng: random.Random, max_tokens: int, drafts: tuple[str, ...], kinds: tuple[str, ...]) -> Trial:
    """A conversation that a user could have: any kind of prompt, any sampling, any drafter at any depth."""
    sampling = SamplingParams(
        max_tokens=rng.randint(1, max_tokens),
        temperature=rng.choice((0.0, 0.0, 0.3, 0.8, 1.2)),
        top_k=rng.choice((0, 0, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.2)),
        logit_bias=rng.choice(({}, {}, {rng.randrange(300): rng.choice((-5.0, 4.0))})),
        seed=rng.randrange(2**32),
        stop=rng.choice(((), (), ("red",), ("the top",))),
        ignore_eos=rng.random() < 0.2,
    )
    speculation = Speculation(
        rng.choice(drafts), rng.choice((1, 2, 3, 4, 7, "auto")), rng.choice(("see", "see", "skip", "placeholder"))
    )
    return Trial(rng.randrange(POOL), rng.choice(kinds), rng.randint(1, MAX_TURNS), sampling, speculation)


def run(
    plan: Plan,
    tokens: int,
    seed: int = 0,
    engines: Engines | None = None,
    progress: Callable[[int], None] = lambda n: None,
) -> Report:
    """Compare at least `tokens` tokens. `engines` gives the engine of a model and its formats."""
    rng, engines = random.Random(seed), engines or cache(load)
    report = Report(settings={"seed": seed, **asdict(plan)})
    while report.tokens < tokens and not report.differing:
        drawn = draw(rng, plan, engines, {pair: count.tokens for pair, count in report.by_pair.items()})
        compare(drawn, engines(drawn.model, drawn.weights, drawn.draft_weights), report)
        progress(report.tokens)
    return report


def replay(drawn: Round, engines: Engines = load) -> Report:
    """One round again."""
    report = Report(settings={"replay": True})
    compare(drawn, engines(drawn.model, drawn.weights, drawn.draft_weights), report)
    return report


def compare(drawn: Round, loaded: Engine, report: Report) -> None:
    """Run a round and add it to the report; stop at the first turn that differs."""
    settings = replace(loaded.settings, slots=drawn.slots, prefix_cache_bytes=REUSE_BYTES if drawn.reuse else 0)
    together = loaded.with_target(loaded.target, settings)
    alone = [loaded.with_target(loaded.target, settings) for _ in drawn.trials]
    talks: list[list[Message]] = [list(cases(trial.kind)[trial.case].messages) for trial in drawn.trials]
    report.rounds += 1
    for turn in range(MAX_TURNS):
        active = [i for i, trial in enumerate(drawn.trials) if turn < trial.turns]
        on = together.generate([_request(drawn.trials[i], talks[i], drawn.trials[i].speculation) for i in active])
        for i, result in zip(active, on, strict=True):
            off = alone[i].generate(_request(drawn.trials[i], talks[i], Speculation("none")))[0]
            if report.add(drawn, loaded.target.spec.family, result, off):
                report.reproduction = {"round": drawn.as_json(), "trial": i, "turn": turn}
                return
            talks[i] += _next(drawn.trials[i], turn, off)
    for engine in (together, *alone):
        engine.check()


def _same(one: Result, other: Result) -> bool:
    return (one.token_ids, one.text, one.finish_reason, one.error) == (
        other.token_ids,
        other.text,
        other.finish_reason,
        other.error,
    )


def _request(trial: Trial, messages: Sequence[Message], speculation: Speculation) -> Request:
    return Request(tuple(messages), trial.sampling, speculation)


def _next(trial: Trial, turn: int, answer: Result) -> list[Message]:
    """The answer and the next question, with a picture of its own in every other turn."""
    number = trial.case + turn
    images = [scene_from_seed(HELD_OUT_SEED + 900_000 + number)[1]] if number % 2 and trial.kind != "text" else []
    question = (IMAGE_QUESTIONS if images else TALK)[number % 4]
    return [Message.of("assistant", answer.text or "."), Message.of("user", question, images)]
