"""Runs the whole recipe of `tiny-qwen`, from an empty folder to a measured model folder.

Owns the order of the stages and their lengths in steps. A stage whose result exists is not run again, and the
long ones go on from their last checkpoint, so the command can be stopped and repeated at any point; the weights are
the same however often that happens.
"""

import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from training.prepare import VALIDATION
from training.schedule import on_stop

ROOT = Path(__file__).parent
EMBEDDED = ROOT.parent / "src" / "foreglance" / "embedded"
TEST_DATA = ROOT.parent / "tests" / "data"
console = Console()


@dataclass(frozen=True)
class Scale:
    """How much of everything; the numbers of the full recipe unless it is only a rehearsal (`--quick`)."""

    quick: bool

    def steps(self, full: int) -> dict[str, object]:
        """Options of a training stage: a number of steps, however long they take."""
        return {"steps": 3 if self.quick else full, "seconds": math.inf}

    def data(self, shards: int, chats_per_shard: int) -> dict[str, object]:
        """Options of `prepare`. Feature shards are the last four."""
        if self.quick:
            return {"shards": min(shards, 4), "chats_per_shard": 40, "tokenizer_chats": 1500, "validation_chats": 16}
        return {"shards": shards, "chats_per_shard": chats_per_shard}

    @property
    def probe_batches(self) -> int:
        """Of `loud_rows`; fewer than ten may lack one of the words."""
        return 10 if self.quick else 40

    @property
    def captions(self) -> dict[str, object]:
        return {"images": 2, "questions": 2, "show": 0} if self.quick else {"images": 500}

    @property
    def drafts(self) -> dict[str, object]:
        return {"images": 1, "talks": 1} if self.quick else {}


@dataclass(frozen=True)
class Finish:
    """How a target's training ends. First what it does not read yet is shown alone, if anything (`alone`, kinds of
    things; `alone_heavy`, kinds of words that then weigh 20). Then come all kinds of chats for `steps` steps, the rate
    falling to zero; the other fields are options of `train_target`.
    """

    steps: int
    alone: str = ""
    alone_heavy: str = ""
    alone_steps: int = 160
    learning_rate: float = 1e-3
    vision_rate: float = 4e-4
    heavy: str = "digit word"
    heavy_weight: float = 8
    probe_weight: float = 0


FINISH = Finish(steps=600, alone="word", alone_heavy="word")


def start(stage: str, **options: object) -> subprocess.Popen:
    """Starts `python -m training.<stage> --option value ...`."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen([sys.executable, "-m", f"training.{stage}", *words], cwd=ROOT.parent)


def run(*stages: subprocess.Popen) -> None:
    """Waits for stages that run side by side; the first failure ends the build, a signal to it ends them."""
    with on_stop(lambda _: [stage.terminate() for stage in stages]):
        codes = [stage.wait() for stage in stages]
    if any(codes):
        console.print("The build ended early; the same command goes on where it was.")
        raise typer.Exit(next(code if code > 0 else 128 - code for code in codes if code))  # below 0: by a signal


def finish_target(
    family: str, work: Path, data: Path, target: Path, finish: Finish, scale: Scale, threads: int
) -> Path:
    """Goes on from a trained target; the last checkpoint is returned."""
    common = {"family": family, "threads": threads}
    if finish.alone:
        kinds = finish.alone.split()
        single, read = work / f"data-alone-{'-'.join(kinds)}", work / f"{family}-target-alone.pt"
        share_tokenizer(data, single)
        shares = {"plain_shards": 0, "plain_last_shards": 0, "alone_share": 1, "alone_kinds": finish.alone}
        run(start("prepare", data=single, **scale.data(1, 3000), **shares))
        stretch = {**scale.steps(finish.alone_steps), "warm_up": 15, "learning_rate": 1e-3}
        weights = {"heavy": finish.alone_heavy, "heavy_weight": 20}
        run(start("train_target", data=single, start_from=target, out=read, **stretch, **weights, **common))
        target = read
    mixed, last = work / "data-last", work / f"{family}-target-last.pt"
    share_tokenizer(data, mixed)
    shares = {"plain_shards": 0, "plain_last_shards": 0, "alone_share": 0.12, "writing_share": 0.6, "seed": 11}
    run(start("prepare", data=mixed, **scale.data(20, 2500), **shares))
    options = ("learning_rate", "vision_rate", "heavy", "heavy_weight", "probe_weight")
    stretch = {**scale.steps(finish.steps), "warm_up": 40, **{name: getattr(finish, name) for name in options}}
    run(start("train_target", data=mixed, start_from=target, out=last, **stretch, **common))
    return last


def share_tokenizer(data: Path, other: Path) -> None:
    """Puts the tokenizer and the validation chats of one data folder into another, before `prepare` makes its own."""
    other.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", f"{VALIDATION}.npz"):
        if not (other / name).exists():
            shutil.copyfile(data / name, other / name)


def places(quick: bool, work: Path, out: Path | None, tests: Path | None) -> tuple[Path, Path, Path]:
    """Work folder, folder of model folders, and folder of the control tensors; a rehearsal's are all its own."""
    work = (work / "quick" if quick else work).resolve()
    out, tests = out or (work / "embedded" if quick else EMBEDDED), tests or (work / "tests" if quick else TEST_DATA)
    tests.mkdir(parents=True, exist_ok=True)
    return work, out.resolve(), tests.resolve()


def main(
    work: Annotated[Path, typer.Option(help="For data, checkpoints and features (1.5 GB).")] = ROOT / "work",
    out: Annotated[
        Path | None, typer.Option(help="The folder that the model folder goes to, if not the package's.")
    ] = None,
    tests: Annotated[Path | None, typer.Option(help="The folder of the control head, if not tests/data.")] = None,
    quick: Annotated[bool, typer.Option(help="A few steps of every stage, in a folder `quick` inside `work`.")] = False,
    threads: Annotated[int, typer.Option(help="Threads of the target's training.")] = 1,
) -> None:
    """Builds data, tower, target, features, both heads side by side, the model folder and the tables."""
    scale = Scale(quick)
    work, out, tests = places(quick, work, out, tests)
    folder, skip_head = out / "tiny-qwen", tests / "tiny-qwen-skip-head.safetensors"
    data, vision, target, features = (work / name for name in ("data", "vision.safetensors", "target.pt", "features"))
    heads = {"see": work / "head-see.safetensors", "skip": work / "head-skip.safetensors"}
    began = time.monotonic()

    def done(what: str) -> None:
        console.rule(f"{what}: {time.monotonic() - began:.0f} s since the start")

    run(start("prepare", data=data, **scale.data(44, 4000)))
    done("data")
    run(start("warm_vision", out=vision, threads=threads, **scale.steps(900)))
    done("vision tower")
    run(start("train_target", data=data, vision=vision, out=target, threads=threads, **scale.steps(3600)))
    done("target")
    loud = work / "target-loud.pt"
    if not loud.exists():
        words = {"probes": "word tens ones", "loudness": 0.4, "widen": 0.7, "batches": scale.probe_batches}
        run(start("loud_rows", family="qwen", data=data, target=target, out=loud, **words))
    done("image rows")
    target = finish_target("qwen", work, data, loud, FINISH, scale, threads)
    done("target, last stretch")
    caching = {"data": data, "target": target, "out": features, "shards": 2}
    run(start("cache_features", **caching), start("cache_features", **caching, first=2))
    done("features")
    common = {"data": data, "features": features, "target": target, **scale.steps(1700)}
    run(*(start("train_head", **common, out=path, policy=policy) for policy, path in heads.items()))
    done("heads")
    run(start("export", data=data, target=target, head=heads["see"], out=folder))
    skip_head.write_bytes(heads["skip"].read_bytes())
    run(
        start("evaluate", folder=folder, **scale.captions),
        start("acceptance", folder=folder, head=skip_head, **scale.drafts),
    )
    done("tables")


if __name__ == "__main__":
    typer.run(main)
