"""The prompts that benchmarks run: made-up scenes that no embedded model was trained on, and text without an image."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foreglance.bench.scenes import HELD_OUT_SEED, Scene, scene_from_seed
from foreglance.request import Message, Request, RequestError, SamplingParams, Speculation

IMAGE_QUESTIONS = ("Describe the image.", "What do you see?", "Describe this picture.", "What is in the image?")
TALK = (
    "Tell me a story.",
    "How do you work?",
    "What can you do?",
    "Give me some advice.",
    "Who are you?",
    "Can you see images?",
)
TEXT_LEADS = ("Describe this scene: ", "Imagine this and describe it: ")


@dataclass(frozen=True)
class Case:
    """One conversation to measure on. `kind` is "image" or "text"."""

    kind: str
    messages: tuple[Message, ...]

    def request(self, sampling: SamplingParams, speculation: Speculation) -> Request:
        return Request(self.messages, sampling, speculation)


def image_cases(count: int, images_each: int = 1) -> list[Case]:
    """`count` conversations about held-out pictures."""
    cases = []
    for i in range(count):
        pictures = [scene_from_seed(HELD_OUT_SEED + i * images_each + j)[1] for j in range(images_each)]
        question = IMAGE_QUESTIONS[i % len(IMAGE_QUESTIONS)]
        cases.append(Case("image", (Message.of("user", question, pictures),)))
    return cases


def text_cases(count: int) -> list[Case]:
    """`count` conversations without a picture: scenes told in words, and small talk."""
    told = (TEXT_LEADS[i % 2] + in_words(scene_from_seed(HELD_OUT_SEED + 500_000 + i)[0]) for i in itertools.count())
    talk = itertools.chain(TALK, told)  # each small-talk prompt once: greedy answers would only repeat
    both = (prompt for pair in zip(told, talk, strict=False) for prompt in pair)
    return [Case("text", (Message.of("user", prompt),)) for prompt in itertools.islice(both, count)]


def cases_of(path: Path, count: int) -> list[Case]:
    """The first `count` conversations of a JSONL file: `{"prompt": ..., "image": PATH or [PATH, ...]}` a line, paths
    relative to the file, `image` optional. Raises `RequestError` naming the line."""
    cases = []
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read ({error})", param="file") from error
    for number, line in enumerate(lines[:count], 1):
        try:
            values = json.loads(line)
            prompt, image = values["prompt"], values.get("image", [])
            pictures = [path.parent / name for name in ([image] if isinstance(image, str) else image)]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise RequestError(
                f"{path}, line {number}: want an object with a prompt ({error})", param="file"
            ) from error
        if not isinstance(prompt, str):
            raise RequestError(f"{path}, line {number}: the prompt must be a text", param="file")
        missing = [picture for picture in pictures if not picture.is_file()]
        if missing:
            raise RequestError(f"{path}, line {number}: there is no picture {missing[0]}", param="file")
        cases.append(Case("image" if pictures else "text", (Message.of("user", prompt, pictures),)))
    if not cases:
        raise RequestError(f"{path} holds no prompt", param="file")
    return cases


def in_words(scene: Scene) -> str:
    """A scene as the embedded models read it in text."""
    items = [
        f"{item.size} {item.colour} {item.shape} {item.position}"
        if item.kind == "shape"
        else f"{item.kind} {item.text} in {item.colour} {item.position}"
        for item in scene.items
    ]
    return f"{scene.background} background; " + "; ".join(items)


def talk_before(num_turns: int, cases: Sequence[Case]) -> tuple[Message, ...]:
    """A long past: `num_turns` text turns with answers, to push what follows far into the context."""
    past: list[Message] = []
    for case in cases[:num_turns]:
        past += [
            *case.messages,
            Message.of("assistant", "I will keep that in mind and answer when you ask me about it."),
        ]
    return tuple(past)
