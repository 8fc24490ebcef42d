"""How many drafted tokens the target would accept, computed offline from an exported model.
 Owns a reference for the engine's own numbers: no cache, no engine code. The target answers greedily; then
the head drafts from every row of that text at once. A draft is right as long as it equals the target's own
next tokens, so walking over the answer gives exactly the steps that greedy speculative decoding would take.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file

from foreglance.bench.scenes import HELD_OUT_SEED, content_words, scene_from_seed
from training.captions import small_talk
from training.draft_rows import Policy, draft_rows
from training.evaluate import CAPTION_PROMPTS, Captioner, chat_about
from training.model import IMAGE_PAD, MtpHead, batch_pictures, mrope_positions, pixel_rows
from training.schedule import single_thread

POLICIES: tuple[Policy, ...] = ("see", "placeholder", "skip", "gap")
DEPTH = 4


@dataclass(frozen=True)
class Answered:
    """A prompt with the target's greedy answer, and what the target computed on the way."""

    ids: np.ndarray  # [t] prompt and answer
    prompt_len: int
    embedded: torch.Tensor  # [1, t, hidden] inputs, image embeddings included
    hidden: torch.Tensor  # [1, t, hidden]


@torch.no_grad()
def read_back(captioner: Captioner, prompt: list[int], answer: list[int], pictures: list) -> Answered:
    """One forward over prompt and answer."""
    model = captioner.model.model
    ids = np.array([*prompt, *answer, captioner.tokenizer.eos_token_id])
    token_ids = torch.from_numpy(ids)[None]
    embedded = model.language_model.embed_tokens(token_ids)
    if pictures:
        patches, grid = pixel_rows(np.stack([np.asarray(picture) for picture in pictures]))
        rows = model.visual(patches, grid_thw=grid).pooler_output
        embedded = embedded.masked_scatter((token_ids == IMAGE_PAD).unsqueeze(-1), rows)
    positions = torch.from_numpy(mrope_positions(ids))[:, None]
    out = model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    return Answered(ids, len(prompt), embedded, out.last_hidden_state)


@torch.no_grad()
def drafts(captioner: Captioner, head: MtpHead, seen: Answered, policy: Policy) -> np.ndarray:
    """Drafted ids [DEPTH, t]: entry (k, i) guesses x[i + 1 + k] when x[i] is the last token known."""
    language = captioner.model.model.language_model
    inputs, positions = draft_rows(seen.ids, policy)
    embedded = seen.embedded
    if policy == "placeholder":
        is_image = torch.from_numpy(seen.ids == IMAGE_PAD)[None, :, None]
        embedded = torch.where(is_image, language.embed_tokens.weight[IMAGE_PAD], embedded)
    n = len(inputs)
    following = np.minimum(np.arange(n + DEPTH - 1), n - 1)
    embedded = embedded[:, inputs[following]]
    positions = torch.from_numpy(np.ascontiguousarray(positions[:, following]))[:, None]
    hidden, earlier = seen.hidden[:, inputs - 1], []
    guesses = np.full((DEPTH, len(seen.ids)), -1)
    for step in range(DEPTH):
        rows = slice(step, step + n)
        rotary = language.rotary_emb(hidden, positions[:, :, rows])
        hidden = head.step(embedded[:, rows], hidden, rotary, earlier)
        guesses[step, inputs] = (hidden[0] @ language.embed_tokens.weight.T).argmax(-1).numpy()
    return guesses


def walk(seen: Answered, guesses: np.ndarray, depth: int) -> list[int]:
    """Accepted drafts of every step of greedy decoding at a depth, from the answer's first token on."""
    accepted, i = [], seen.prompt_len
    while i < len(seen.ids) - 1:
        k = 0
        while k < depth and i + 1 + k < len(seen.ids) and guesses[k, i] == seen.ids[i + 1 + k]:
            k += 1
        accepted.append(k)
        i += k + 1
    return accepted


def first_guesses(seen: Answered, guesses: np.ndarray, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every token of the answer but its first: was the first draft right, and does it tell content?"""
    rows = np.arange(seen.prompt_len, len(seen.ids) - 1)
    truth = seen.ids[rows + 1]
    return guesses[0, rows] == truth, content[truth]


def load_head(captioner: Captioner, tensors: dict[str, torch.Tensor]) -> MtpHead:
    head = MtpHead(captioner.model.config.text_config)
    named = {name.removeprefix("mtp."): weight.float() for name, weight in tensors.items() if name.startswith("mtp.")}
    head.load_state_dict(named)
    return head.eval()


def answer_prompts(captioner: Captioner, images: int, talks: int) -> dict[str, list[Answered]]:
    """Greedy answers to the default prompts about held-out images, and to prompts without an image."""
    groups: dict[str, list[Answered]] = {"image": [], "text": []}
    for i in track(range(images), "images"):
        picture = scene_from_seed(HELD_OUT_SEED + 200_000 + i)[1]
        chat = chat_about(CAPTION_PROMPTS[i % len(CAPTION_PROMPTS)])
        groups["image"].append(_answered(captioner, chat, [picture]))
    rng = random.Random("talk")
    for _ in track(range(talks), "talks"):
        groups["text"].append(_answered(captioner, [{"role": "user", "content": small_talk(rng)[0]}], []))
    return groups


def _answered(captioner: Captioner, chat: list[dict], pictures: list) -> Answered:
    grids = torch.tensor([[1, 8, 8]] * len(pictures)) if pictures else None
    (answer,) = captioner.answer([chat], [pictures])
    return read_back(captioner, captioner.prompt_ids(chat, grids), answer, pictures)


def main(
    folder: Annotated[Path, typer.Option(help="The exported model.")],
    head: Annotated[list[Path] | None, typer.Option(help="More heads (.safetensors) to compare with its own.")] = None,
    images: int = 60,
    talks: int = 40,
    threads: int = 1,
) -> None:
    """Prints a table for every head and policy, and as its last line the same numbers as JSON."""
    single_thread(threads)
    captioner = Captioner(folder)
    batch_pictures()
    words = {word.lower() for word in content_words()}
    vocabulary = [captioner.tokenizer.decode([i]).strip().lower() for i in range(len(captioner.tokenizer))]
    content = np.array([word in words for word in vocabulary])
    groups = answer_prompts(captioner, images, talks)
    heads = {"own": load_head(captioner, load_file(folder / "model.safetensors"))}
    heads |= {path.stem: load_head(captioner, load_file(path)) for path in head or []}

    table = Table(
        "head",
        "policy",
        "prompts",
        "d1 right",
        "content",
        "other",
        *(f"accepted, n={n}" for n in range(1, DEPTH + 1)),
    )
    report = {}
    for head_name, each in heads.items():
        for policy in POLICIES:
            for group, answered in groups.items():
                guesses = [drafts(captioner, each, seen, policy) for seen in answered]
                pairs = [first_guesses(seen, g, content) for seen, g in zip(answered, guesses, strict=True)]
                right, tells = (np.concatenate(column) for column in zip(*pairs, strict=True))
                means = [
                    float(np.mean([k for seen, g in zip(answered, guesses, strict=True) for k in walk(seen, g, depth)]))
                    for depth in range(1, DEPTH + 1)
                ]
                numbers = [
                    right.mean(),
                    right[tells].mean() if tells.any() else float("nan"),
                    right[~tells].mean(),
                    *means,
                ]
                table.add_row(head_name, policy, group, *(f"{number:.3f}" for number in numbers))
                report[f"{head_name}/{policy}/{group}"] = [round(float(number), 3) for number in numbers]
    Console(width=140).print(table)
    lengths = {group: sum(len(seen.ids) - seen.prompt_len for seen in answered) for group, answered in groups.items()}
    print(json.dumps({"answer tokens": lengths, **report}))


if __name__ == "__main__":
    typer.run(main)
