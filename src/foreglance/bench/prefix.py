"""What rows that are there already save: time to the first token, rows of a long chat, and what files of slots take.

Everything is a real run of one engine. Cold and warm runs of a prompt alternate in one process, so that what is shown
are ratios on the same machine at the same time; before a cold run everything that was kept is forgotten.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreglance.bench.prompts import IMAGE_QUESTIONS
from foreglance.bench.report import Progress, silent
from foreglance.bench.scenes import HELD_OUT_SEED, scene_from_seed
from foreglance.engine import Engine
from foreglance.request import Message, Request, Result, SamplingParams, Speculation

DEPTH = 3
TURNS = (
    ("Describe the image.", 1),
    ("What colours do you see?", 0),
    ("And what is in this picture?", 1),
    ("Which of the two has more shapes?", 0),
    ("Describe this one, too.", 1),
)  # a question, and how many new pictures come with it


@dataclass(frozen=True)
class Ratio:
    """A time as a fraction of a cold run's, by prompt: median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Ratio:
        low, median, high = np.percentile([warm / cold for warm, cold in pairs], (25, 50, 75))
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token of a prompt with an image. `rows` are computed of `prompt_rows`; `engine` counts from
    when the prompt's rows are queued, `whole` from the picture and the text."""

    case: str
    prompts: int
    prompt_rows: float
    rows: float
    engine: Ratio
    whole: Ratio
    differing: int


@dataclass(frozen=True)
class Turn:
    """One turn of some chats, in the mean: rows of its prompt, those that the turn before had not left, and those that
    were computed. `first_token` is from messages to token, of a cold run's."""

    prompt_rows: float
    image_rows: float
    new_rows: float
    computed_rows: float
    first_token: Ratio


@dataclass(frozen=True)
class Saved:
    """The file of the chat's slot. `cached_bytes` is all that the engine kept; times in milliseconds."""

    rows: int
    file_bytes: int
    cached_bytes: int
    save_ms: float
    restore_ms: float


@dataclass(frozen=True)
class Timed:
    result: Result
    whole: float  # seconds


def first_tokens(engine: Engine, prompts: int, progress: Progress = silent) -> list[FirstToken]:
    """The same prompt again, and another question about the same picture, each against a cold run of itself."""
    cases: dict[str, list[tuple[Timed, Timed]]] = {"another question": [], "the same prompt": []}
    for number in range(prompts):
        picture = scene_from_seed(HELD_OUT_SEED + 700_000 + number)[1]
        one, other = (IMAGE_QUESTIONS[(number + i) % len(IMAGE_QUESTIONS)] for i in (0, 1))
        engine.forget()
        cold = ask(engine, [Message.of("user", one, [picture])])
        cases["the same prompt"].append((ask(engine, [Message.of("user", one, [picture])]), cold))
        warm = ask(engine, [Message.of("user", other, [picture])])
        engine.forget()
        cases["another question"].append((warm, ask(engine, [Message.of("user", other, [picture])])))
        progress(number + 1, prompts)
    return [_first_token(case, pairs) for case, pairs in cases.items()]


def _first_token(case: str, pairs: Sequence[tuple[Timed, Timed]]) -> FirstToken:
    warm = [one.result.timings for one, _ in pairs]
    return FirstToken(
        case,
        len(pairs),
        float(np.mean([one.prompt_tokens for one in warm])),
        float(np.mean([one.prompt_tokens - one.cached_rows for one in warm])),
        Ratio.of([(one.result.timings.ttft_ms, cold.result.timings.ttft_ms) for one, cold in pairs]),
        Ratio.of([(one.whole, cold.whole) for one, cold in pairs]),
        sum(one.result.token_ids != cold.result.token_ids for one, cold in pairs),
    )


def ask(engine: Engine, messages: Sequence[Message], max_tokens: int = 1) -> Timed:
    """One greedy answer at a fixed depth, and the seconds from the messages to its first token."""
    speculation = Speculation("none" if engine.best_draft == "none" else "auto", DEPTH)
    request = Request(tuple(messages), SamplingParams(max_tokens=max_tokens), speculation)
    began, first, result = time.perf_counter(), 0.0, None
    for event in engine.stream(request):
        first = first or time.perf_counter() - began
        result = event.result
    assert result is not None
    return Timed(result, first)


Talk = list[tuple[tuple[Message, ...], Timed]]  # the messages of each turn, and its answer


def chat(engine: Engine, max_tokens: int, number: int = 0) -> Talk:
    """A chat of five turns with three pictures, each turn with the answers before it."""
    messages: list[Message] = []
    talk: Talk = []
    pictures = (scene_from_seed(HELD_OUT_SEED + 800_000 + 10 * number + i)[1] for i in range(10))
    for question, num_pictures in TURNS:
        messages.append(Message.of("user", question, [next(pictures) for _ in range(num_pictures)]))
        talk.append((tuple(messages), ask(engine, messages, max_tokens)))
        messages.append(Message.of("assistant", talk[-1][1].result.text))
    return talk


def new_rows(talk: Talk, at: int) -> int:
    """Rows of a turn's prompt behind those that the turn before computed; the last token of an answer has no row."""
    rows = talk[at][1].result.timings.prompt_tokens
    if at == 0:
        return rows
    before = talk[at - 1][1].result.timings
    return rows - (before.prompt_tokens + before.num_tokens - 1)


def five_turns(engine: Engine, chats: int, max_tokens: int, progress: Progress = silent) -> list[Turn]:
    """Chats as they come, and then each of their prompts cold."""
    talks, colds = [], []
    for number in range(chats):
        engine.forget()
        talks.append(chat(engine, max_tokens, number))
        colds.append([])
        for messages, _ in talks[-1]:
            engine.forget()
            colds[-1].append(ask(engine, messages))
        progress(number + 1, chats)
    return [_turn(talks, colds, at) for at in range(len(TURNS))]


def _turn(talks: Sequence[Talk], colds: Sequence[Sequence[Timed]], at: int) -> Turn:
    timings = [talk[at][1].result.timings for talk in talks]
    return Turn(
        float(np.mean([one.prompt_tokens for one in timings])),
        float(np.mean([one.image_rows for one in timings])),
        float(np.mean([new_rows(talk, at) for talk in talks])),
        float(np.mean([one.prompt_tokens - one.cached_rows for one in timings])),
        Ratio.of([(talk[at][1].whole, cold[at].whole) for talk, cold in zip(talks, colds, strict=True)]),
    )


def saved(engine: Engine, max_tokens: int) -> Saved:
    """Save a chat, and restore it into an engine that has forgotten it."""
    engine.forget()
    chat(engine, max_tokens)
    slot, cached = max(engine.slots(), key=lambda info: info.rows), engine.cached_bytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slot"
        began = time.perf_counter()
        file = engine.save_slot(slot.id, path)
        written = time.perf_counter()
        engine.forget()
        forgotten = time.perf_counter()
        engine.restore_slot(slot.id, path)
        back = time.perf_counter()
    return Saved(file.rows, file.num_bytes, cached, (written - began) * 1e3, (back - forgotten) * 1e3)
