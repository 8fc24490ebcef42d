"""Runs the whole recipe of `tiny-step`, of `tiny-gemma` with its assistant, or of `tiny-text`, as `build` does for
`tiny-qwen`: finished stages are not run again, long ones go on from their last checkpoint.

Owns their stages and the steps of each. All share one data set and tokenizer.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from training.build import ROOT, Finish, Scale, console, finish_target, places, run, start


@dataclass(frozen=True)
class Recipe:
    """Steps of each stage; 0 leaves it out. `head` is the module that trains the draft, `loud` what `loud_rows` adds
    to the image rows after the warm-up.
    """

    vision: int
    target: int
    learning_rate: float
    head: str | None = None
    draft: int = 0
    loud: str = ""
    finish: Finish | None = None


RECIPES = {
    "step": Recipe(
        vision=704,
        target=2665,
        learning_rate=1.5e-3,
        head="step_head",
        draft=1300,
        loud="colour",
        finish=Finish(
            steps=3000,
            learning_rate=1.5e-3,
            vision_rate=1.2e-3,
            heavy="digit word colour shape count",
            heavy_weight=5,
            probe_weight=0.2,
        ),
    ),
    "gemma": Recipe(
        vision=700,
        target=2038,
        learning_rate=1.5e-3,
        head="gemma_assistant",
        draft=900,
        loud="shape size colour tens ones word",
        finish=Finish(
            steps=3600, alone="number shape", alone_heavy="digit", learning_rate=1.2e-3, heavy_weight=5, alone_steps=110
        ),
    ),
    "text": Recipe(vision=0, target=1193, learning_rate=3e-3),
}


def main(
    family: Annotated[str, typer.Option(help="step, gemma or text.")],
    work: Annotated[Path, typer.Option(help="For data and checkpoints.")] = ROOT / "work",
    out: Annotated[Path | None, typer.Option(help="The folder that model folders go to, if not the package's.")] = None,
    tests: Annotated[Path | None, typer.Option(help="The folder of the control modules, if not tests/data.")] = None,
    quick: Annotated[bool, typer.Option(help="A few steps of every stage, in a folder `quick` inside `work`.")] = False,
    threads: int = 1,
) -> None:
    """Builds data, tower, target, draft, the model folders and the tables."""
    recipe, scale, began = RECIPES[family], Scale(quick), time.monotonic()
    work, out, tests = places(quick, work, out, tests)
    folder, control = out / f"tiny-{family}", tests / "tiny-step-skip-modules.safetensors"
    data, vision, target = work / "data-families", work / f"{family}-vision.safetensors", work / f"{family}-target.pt"
    draft = work / {"step": "step-modules.safetensors", "gemma": "gemma-assistant.pt"}.get(family, "none")

    def done(what: str) -> None:
        console.rule(f"{what}: {time.monotonic() - began:.0f} s since the start")

    run(start("prepare", data=data, **scale.data(16, 4000), plain_shards=2, plain_last_shards=4))
    done("data")
    common = {"data": data, "threads": threads}
    tower = {}
    if recipe.vision:
        run(start("warm_vision", family=family, out=vision, threads=threads, **scale.steps(recipe.vision)))
        done("vision tower")
        loud = work / f"{family}-vision-loud.safetensors"
        if not loud.exists():
            how = {"probes": recipe.loud, "batches": scale.probe_batches}
            run(start("loud_rows", family=family, data=data, target=vision, out=loud, **how))
        done("image rows")
        tower = {"vision": loud}
    how = {"learning_rate": recipe.learning_rate, "heavy": "digit word colour shape", **scale.steps(recipe.target)}
    run(start("train_target", family=family, out=target, **how, **common, **tower))
    done("target")
    if recipe.finish:
        target = finish_target(family, work, data, target, recipe.finish, scale, threads)
        done("target, last stretch")
    head = {}
    if recipe.head:
        trained = {"target": target, **scale.steps(recipe.draft), **common}
        run(start(recipe.head, out=draft, **trained))
        if family == "step":
            skip = work / "step-skip-modules.safetensors"
            run(start(recipe.head, out=skip, policy="skip", **trained))
            control.write_bytes(skip.read_bytes())
        done("draft")
        head = {"head": draft}
    run(start("folders", family=family, data=data, target=target, out=folder, **head))
    if recipe.head:
        other = {"head": control} if family == "step" else {}
        run(
            start("evaluate", folder=folder, **scale.captions),
            start("chained_acceptance", folder=folder, **other, **scale.drafts),
        )
        done("tables")


if __name__ == "__main__":
    typer.run(main)
