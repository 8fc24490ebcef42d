"""Runs the whole recipe of `tiny-step`, of `tiny-gemma` with its assistant, or of `tiny-text`, as `build` does for
`tiny-qwen`: finished stages are not run again, long ones go on from their last checkpoint.

Owns their stages and time limits. All share one data set and tokenizer.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from training.build import ROOT, console, finish_target, run, start

EMBEDDED = ROOT.parent / "src" / "foreglance" / "embedded"
SKIP_MODULES = ROOT.parent / "tests" / "data" / "tiny-step-skip-modules.safetensors"


@dataclass(frozen=True)
class Recipe:
    """Seconds of each stage on one core; 0 leaves it out. `head` is the module that trains the draft, `loud` what
    `loud_rows` adds to the image rows after the warm-up, `alone` and `heavy` what `build.finish_target` is given.
    """

    vision: float
    target: float
    learning_rate: float
    head: str | None = None
    draft: float = 0
    loud: str = ""
    last: float = 0
    alone: str = ""
    heavy: str = ""


GEMMA_LOUD = "shape size colour tens ones word"
RECIPES = {
    "step": Recipe(
        vision=290, target=3720, learning_rate=1.5e-3, head="step_head", draft=900, loud="colour", last=1000
    ),
    "gemma": Recipe(
        vision=170,
        target=2500,
        learning_rate=1.5e-3,
        head="gemma_assistant",
        draft=720,
        loud=GEMMA_LOUD,
        last=1000,
        alone="number shape",
        heavy="digit",
    ),
    "text": Recipe(vision=0, target=600, learning_rate=3e-3),
}


def main(
    family: Annotated[str, typer.Option(help="step, gemma or text.")],
    work: Annotated[Path, typer.Option(help="For data and checkpoints.")] = ROOT / "work",
    out: Annotated[Path, typer.Option(help="The folder that model folders go to.")] = EMBEDDED,
    vision_seconds: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    target_seconds: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    last_seconds: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    draft_seconds: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    shards: Annotated[int, typer.Option(help="Shards of data; the first two and last four are plain.")] = 16,
    chats_per_shard: int = 4000,
    threads: int = 1,
) -> None:
    """Builds data, tower, target, draft, the model folders and the tables."""
    recipe, began = RECIPES[family], time.monotonic()
    work, folder = work.resolve(), out.resolve() / f"tiny-{family}"
    data, vision, target = work / "data-families", work / f"{family}-vision.safetensors", work / f"{family}-target.pt"
    skip = work / "step-skip-modules.safetensors"
    draft = work / {"step": "step-modules.safetensors", "gemma": "gemma-assistant.pt"}.get(family, "none")

    def done(what: str) -> None:
        console.rule(f"{what}: {time.monotonic() - began:.0f} s since the start")

    run(
        start(
            "prepare",
            data=data,
            shards=shards,
            chats_per_shard=chats_per_shard,
            plain_shards=2,
            plain_last_shards=4,
        )
    )
    done("data")
    common = {"data": data, "threads": threads}
    if recipe.vision and not vision.exists():
        seconds = vision_seconds or recipe.vision
        run(start("warm_vision", family=family, out=vision, seconds=seconds, threads=threads))
        done("vision tower")
    loud = work / f"{family}-vision-loud.safetensors"
    if recipe.loud and not loud.exists():
        run(start("loud_rows", family=family, data=data, target=vision, out=loud, probes=recipe.loud, batches=40))
        done("image rows")
    tower = {"vision": loud} if recipe.loud else {}
    seconds = target_seconds or recipe.target
    rate = recipe.learning_rate
    heavy = "digit word colour shape"
    run(
        start(
            "train_target",
            family=family,
            out=target,
            seconds=seconds,
            learning_rate=rate,
            heavy=heavy,
            **common,
            **tower,
        )
    )
    done("target")
    if recipe.last:
        target = finish_target(
            family, work, data, target, recipe.alone, recipe.heavy, last_seconds or recipe.last, threads
        )
        done("target, last stretch")
    if recipe.head:
        trained = {"target": target, "seconds": draft_seconds or recipe.draft, **common}
        run(start(recipe.head, out=draft, **trained))
        if family == "step":
            run(start(recipe.head, out=skip, policy="skip", **trained))
            SKIP_MODULES.write_bytes(skip.read_bytes())
        done("draft")
    head = {"head": draft} if recipe.head else {}
    run(start("folders", family=family, data=data, target=target, out=folder, **head))
    if recipe.head:
        control = {"head": SKIP_MODULES} if family == "step" else {}
        run(start("evaluate", folder=folder), start("chained_acceptance", folder=folder, **control))
        done("tables")


if __name__ == "__main__":
    typer.run(main)
