"""How many guesses of `tiny-step`'s modules and of `tiny-gemma`'s assistant the target would accept, computed offline.

Owns a reference for the engine's own numbers, like `training.acceptance` for `tiny-qwen`: no cache and no engine code.
The target answers greedily, the drafts are made from every row of that text at once, and walking over the answer gives
the steps that greedy speculative decoding takes.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from foreglance.bench.scenes import HELD_OUT_SEED, content_words, scene_from_seed
from training import gemma, step
from training.acceptance import Answered, first_guesses, walk
from training.captioners import PixelCaptioner, open_captioner
from training.captions import small_talk
from training.evaluate import CAPTION_PROMPTS, chat_about
from training.gemma_assistant import Assistant
from training.model import IMAGE_PAD
from training.schedule import single_thread
from training.step_head import MtpModule, module_rows

DEPTH = 3
Drafts = Callable[[torch.Tensor, torch.Tensor | None], np.ndarray]


def stepping(tensors: dict[str, torch.Tensor], captioner: PixelCaptioner, policy: str) -> Drafts:
    """Guesses of the modules among `tensors`: entry (k, i) guesses x[i + 1 + k] when x[i] is the last token known."""
    target = step.Target(captioner.model.config.text_config.vocab_size - 32).eval()
    target.model = captioner.model
    modules = nn.ModuleList([MtpModule(target) for _ in range(step.NUM_MODULES)]).eval()
    first = target.model.config.text_config.num_hidden_layers
    for k, module in enumerate(modules):
        prefix = f"model.layers.{first + k}."
        own = {name.removeprefix(prefix): w.float() for name, w in tensors.items() if name.startswith(prefix)}
        module.load_state_dict(own)

    def drafts(ids: torch.Tensor, pictures: np.ndarray | None) -> np.ndarray:
        states = []
        hook = target.text.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        embedded = target.embed(ids, None if pictures is None else target.image_rows(pictures))
        target.hidden(embedded)
        hook.remove()
        n = ids.shape[1] - 1
        embedded, state = F.pad(embedded, (0, 0, 0, DEPTH)), states[0][:, :n]
        guesses = np.full((DEPTH, n + 1), -1)
        for k, module in enumerate(modules):
            positions, sees = module_rows(ids == IMAGE_PAD, k, policy, target.model.config.text_config.sliding_window)
            rotary = target.text.rotary_emb(embedded, positions, "sliding_attention")
            state = module(embedded[:, 1 + k : 1 + k + n], state, rotary, sees)
            guesses[k, 1:] = module.logits(state)[0].argmax(-1).numpy()
        return guesses

    return drafts


def assisting(folder: Path, captioner: PixelCaptioner) -> Drafts:
    """Guesses of the assistant, which lies in the folder of that name beside the target's."""
    target = gemma.Target(captioner.model.config.text_config.vocab_size).eval()
    target.model = captioner.model
    assistant = Assistant(target).eval()
    beside = folder.with_name(f"{folder.name}-assistant")
    assistant.model = AutoModelForCausalLM.from_pretrained(beside, dtype=torch.float32).eval()

    def drafts(ids: torch.Tensor, pictures: np.ndarray | None) -> np.ndarray:
        inputs = target.embed(ids, None if pictures is None else target.image_rows(pictures))
        truth, shared = target.run(inputs)
        n = ids.shape[1] - 1
        row = torch.arange(n)
        sees = (row[:, None] >= row)[None, None]
        masks = {"full_attention": sees, "sliding_attention": sees}
        shared = {kind: (keys[:, :, :n], values[:, :, :n]) for kind, (keys, values) in shared.items()}
        embedded, hidden = F.pad(inputs.embedded, (0, 0, 0, DEPTH)), truth[:, :n]
        guesses = np.full((DEPTH, n + 1), -1)
        for k in range(DEPTH):
            logits, hidden = assistant.step(embedded[:, 1 + k : 1 + k + n], hidden, shared, masks)
            guesses[k, 1:] = logits[0].argmax(-1).numpy()
        return guesses

    return drafts


def prompts(images: int, talks: int) -> dict[str, list[tuple[list[dict], list[Image.Image]]]]:
    """Chats about held-out pictures, and chats without one: those of `training.acceptance`."""
    rng = random.Random("talk")
    return {
        "image": [
            (chat_about(CAPTION_PROMPTS[i % 4]), [scene_from_seed(HELD_OUT_SEED + 200_000 + i)[1]])
            for i in range(images)
        ],
        "text": [([{"role": "user", "content": small_talk(rng)[0]}], []) for _ in range(talks)],
    }


def drafters(folder: Path, captioner: PixelCaptioner, more: list[Path]) -> dict[str, Drafts]:
    """What is measured, by name: modules under each policy, or the assistant, which has no rows to leave out."""
    if captioner.model.config.model_type != "step3p7":
        return {"assistant": assisting(folder, captioner)}
    heads = {"own": load_file(folder / "model.safetensors")} | {path.stem: load_file(path) for path in more}
    return {
        f"{name}/{policy}": stepping(tensors, captioner, policy)
        for name, tensors in heads.items()
        for policy in ("see", "skip")
    }


@torch.no_grad()
def main(
    folder: Annotated[Path, typer.Option(help="The exported model.")],
    head: Annotated[list[Path] | None, typer.Option(help="More modules (.safetensors) to compare with.")] = None,
    images: int = 60,
    talks: int = 40,
    threads: int = 1,
) -> None:
    """Prints a table, and as its last line the same numbers as JSON."""
    single_thread(threads)
    captioner = open_captioner(folder)
    measured = drafters(folder, captioner, head or [])
    words = {word.lower() for word in content_words()}
    vocabulary = [captioner.tokenizer.decode([i]).strip().lower() for i in range(len(captioner.tokenizer))]
    content = np.array([word in words for word in vocabulary])
    header = ("draft", "prompts", "d1 right", "content", "other", *(f"accepted, n={n}" for n in range(1, DEPTH + 1)))
    table, report = Table(*header), {}
    for group, chats in prompts(images, talks).items():
        seen, guesses = [], {name: [] for name in measured}
        for chat, pictures in track(chats, group):
            (answer,) = captioner.answer([chat], [pictures])
            prompt = captioner.prompt_tokens(chat, pictures)
            ids = np.array([*prompt, *answer, captioner.tokenizer.eos_token_id])
            pixels = np.stack([np.asarray(picture) for picture in pictures]) if pictures else None
            seen.append(Answered(ids, len(prompt), torch.empty(0), torch.empty(0)))
            for name, drafts in measured.items():
                guesses[name].append(drafts(torch.from_numpy(ids)[None], pixels))
            assert pictures or IMAGE_PAD not in ids
        for name, guessed in guesses.items():
            pairs = [first_guesses(one, own, content) for one, own in zip(seen, guessed, strict=True)]
            right, tells = (np.concatenate(column) for column in zip(*pairs, strict=True))
            means = [
                np.mean([k for one, own in zip(seen, guessed, strict=True) for k in walk(one, own, depth)])
                for depth in range(1, DEPTH + 1)
            ]
            of_content = right[tells].mean() if tells.any() else float("nan")
            numbers = [right.mean(), of_content, right[~tells].mean(), *means]
            table.add_row(name, group, *(f"{number:.3f}" for number in numbers))
            report[f"{name}/{group}"] = [round(float(number), 3) for number in numbers]
    Console(width=140).print(table)
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)
