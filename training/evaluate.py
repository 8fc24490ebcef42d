"""How often an exported model is right about scenes it never saw, by kind of word.
 Owns the reading of captions back into facts. Everything runs through transformers' own classes and
`generate`, from the exported folder, as a stranger would use it.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from foreglance.bench.scenes import (
    COUNTS,
    HELD_OUT_SEED,
    INKS,
    POSITIONS,
    SHAPES,
    Item,
    Scene,
    content_words,
    position_words,
    scene_from_seed,
)
from training.captions import ORDINALS, question
from training.schedule import single_thread

CAPTION_PROMPTS = (
    "Describe the image.",
    "What do you see?",
    "Describe this picture.",
    "What is in the image?",
)
_THING = re.compile(rf"(?:(small|large) ({'|'.join(INKS)}) ({'|'.join(SHAPES)})|(?:number|word) (\w+))", re.IGNORECASE)
_INK = re.compile(rf"in ({'|'.join(INKS)})\b")
_PLACE = re.compile("|".join(sorted(POSITIONS, key=len, reverse=True)))
_OPENING = re.compile(r"(\w+) shapes \w+ a (\w+)")


class Captioner:
    """An exported model with its tokenizer and image processor."""

    def __init__(self, folder: Path):
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder)

    def prompt_ids(self, messages: list[dict], grids: torch.Tensor | None) -> list[int]:
        """The chat as tokens, every image placeholder repeated for the rows of its image."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pieces = text.split("<|image_pad|>")
        for i in range(len(pieces) - 1):
            num_rows = int(grids[i].prod()) // self.processor.merge_size**2
            pieces[i] += "<|image_pad|>" * num_rows
        return self.tokenizer("".join(pieces), add_special_tokens=False).input_ids

    @torch.no_grad()
    def answer(
        self, chats: list[list[dict]], images: list[list[Image.Image]], max_new_tokens: int = 140
    ) -> list[list[int]]:
        """Greedy answers (token ids, without the end token) to chats whose prompts have the same length."""
        flat = [image for each in images for image in each]
        pixels = dict(self.processor(images=flat, return_tensors="pt")) if flat else {}
        grids, used, prompts = pixels.get("image_grid_thw"), 0, []
        for chat, each in zip(chats, images, strict=True):
            prompts.append(self.prompt_ids(chat, None if grids is None else grids[used : used + len(each)]))
            used += len(each)
        ids = torch.tensor(prompts)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.model.config.image_token_id).int() if flat else None,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **pixels,
        )
        end = self.tokenizer.eos_token_id
        answers = [row.tolist() for row in out[:, ids.shape[1] :]]
        return [answer[: answer.index(end)] if end in answer else answer for answer in answers]


def chat_about(prompt: str, num_images: int = 1) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image"}] * num_images + [{"type": "text", "text": prompt}]}]


def read_caption(text: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """What a caption says of each item, in its own order, and of the whole scene."""
    items = []
    for sentence in re.split(r"(?<=\.) ", text):
        thing, place = _THING.search(sentence), _PLACE.search(sentence)
        if thing and place:
            said = {"position": place[0]}
            if thing[1]:
                said |= {"size": thing[1].lower(), "colour": thing[2].lower(), "shape": thing[3].lower()}
            else:
                ink = _INK.search(sentence)
                said |= {"text": thing[4], "colour": ink[1] if ink else ""}
            items.append(said)
    opening = _OPENING.search(text)
    return items, {"count": opening[1], "background": opening[2]} if opening else {}


def facts(item: Item) -> dict[str, str]:
    """What a caption should say of an item."""
    named = {"position": item.position, "colour": item.colour}
    return named | ({"shape": item.shape, "size": item.size} if item.kind == "shape" else {"text": item.text})


def score_caption(scene: Scene, text: str, right: Counter, total: Counter) -> None:
    """Counts right words by kind, items in reading order, so a missing one makes all after it wrong."""
    said, whole = read_caption(text)
    truth = {"count": COUNTS[len(scene.shapes)], "background": scene.background}
    all_right = len(said) == len(scene.items)
    for name, word in truth.items():
        total[name] += 1
        right[name] += whole.get(name) == word
        all_right &= whole.get(name) == word
    for k, item in enumerate(scene.items):
        spoken = said[k] if k < len(said) else {}
        for name, word in facts(item).items():
            kind = ("digits" if item.kind == "number" else "word") if name == "text" else name
            total[kind] += 1
            right[kind] += spoken.get(name) == word
            all_right &= spoken.get(name) == word
    total["whole caption"] += 1
    right["whole caption"] += all_right


def told(text: str) -> set[str]:
    """The words of an answer that say something about the picture; "no" and "nothing" count as the same."""
    known = {word.lower() for word in content_words() | position_words()} | {"above", "below", "nothing"}
    words = re.findall(r"[a-z]+|\d", text.lower().replace("no ", "nothing "))
    return {word if word in known else word.removesuffix("s") for word in words} & known


def score_questions(captioner: Captioner, num: int, right: Counter, total: Counter) -> None:
    """Questions about one image, and about one of two; an answer is right if it tells just what was asked."""
    rng = random.Random("questions")
    for k in track(range(num), "questions"):
        seeds = [HELD_OUT_SEED + 500_000 + 2 * k, HELD_OUT_SEED + 500_001 + 2 * k][: 1 + k % 2]
        drawn = [scene_from_seed(seed) for seed in seeds]
        which = rng.randrange(len(seeds))
        where = f" in the {ORDINALS[which]} image" if len(seeds) > 1 else ""
        ask, truth = question(rng, drawn[which][0], where)
        (ids,) = captioner.answer([chat_about(ask, len(seeds))], [[picture for _, picture in drawn]], 40)
        kind = "questions, one image" if len(seeds) == 1 else "questions, two images"
        total[kind] += 1
        right[kind] += told(truth) - told(ask) == told(captioner.tokenizer.decode(ids)) - told(ask)


def main(
    folder: Annotated[Path, typer.Option(help="The exported model.")],
    images: Annotated[int, typer.Option(help="Held-out scenes to caption.")] = 100,
    questions: Annotated[int, typer.Option(help="Questions to ask.")] = 100,
    show: Annotated[int, typer.Option(help="Captions to print.")] = 3,
    batch: int = 20,
    threads: int = 1,
) -> None:
    """Prints a table, and as its last line the same numbers as JSON."""
    single_thread(threads)
    console = Console(width=120)
    from training.captioners import open_captioner  # which are built on this module's

    captioner = open_captioner(folder)
    right, total, lengths = Counter(), Counter(), []
    for first in track(range(0, images, batch), "captions"):
        drawn = [scene_from_seed(HELD_OUT_SEED + i) for i in range(first, min(images, first + batch))]
        prompt = CAPTION_PROMPTS[first // batch % len(CAPTION_PROMPTS)]
        chats = [chat_about(prompt)] * len(drawn)
        for k, ids in enumerate(captioner.answer(chats, [[picture] for _, picture in drawn])):
            text = captioner.tokenizer.decode(ids, skip_special_tokens=True)
            score_caption(drawn[k][0], text, right, total)
            lengths.append(len(ids))
            if first + k < show:
                console.print(f"{prompt} {text}\n", highlight=False)
    score_questions(captioner, questions, right, total)
    table = Table("kind", "right", "of", "share")
    for kind in total:
        table.add_row(kind, str(right[kind]), str(total[kind]), f"{right[kind] / total[kind]:.3f}")
    console.print(table)
    shares = {kind: round(right[kind] / total[kind], 4) for kind in total}
    print(json.dumps({**shares, "caption tokens": [min(lengths), sum(lengths) // len(lengths), max(lengths)]}))


if __name__ == "__main__":
    typer.run(main)
