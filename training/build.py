"""Runs the whole recipe of `tiny-qwen`, from an empty folder to a measured model folder.
 Owns the order of the stages and their time limits. A stage whose result exists is not run again, and the
long ones go on from their last checkpoint, so the command can be stopped and repeated at any point.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from training.prepare import VALIDATION

ROOT = Path(__file__).parent
EMBEDDED = ROOT.parent / "src" / "foreglance" / "embedded" / "tiny-qwen"
SKIP_HEAD = ROOT.parent / "tests" / "data" / "tiny-qwen-skip-head.safetensors"
ALONE_STEPS = 160
console = Console()


def start(stage: str, **options: object) -> subprocess.Popen:
    """Starts `python -m training.<stage> --option value ...`."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen([sys.executable, "-m", f"training.{stage}", *words], cwd=ROOT.parent)


def run(*stages: subprocess.Popen) -> None:
    """Waits for stages that run side by side; the first failure ends the build."""
    for stage in stages:
        if stage.wait() != 0:
            raise typer.Exit(stage.returncode)


def finish_target(
    family: str, work: Path, data: Path, target: Path, alone: str, heavy: str, seconds: float, threads: int
) -> Path:
    """Goes on from a trained target: what it does not read is shown alone, then all together, the rate falling to zero.

    `alone` names the kinds of things to show alone (empty: none), `heavy` the kinds of words that then weigh most. The
    last checkpoint is returned.
    """
    common = {"family": family, "threads": threads}
    if alone:
        kinds = alone.split()
        single, read = work / f"data-alone-{'-'.join(kinds)}", work / f"{family}-target-alone.pt"
        own = {"shards": 1, "chats_per_shard": 3000, "plain_shards": 0, "plain_last_shards": 0, "alone_share": 1}
        share_tokenizer(data, single)
        run(start("prepare", data=single, **own, alone_kinds=alone))
        stretch = {"steps": ALONE_STEPS, "seconds": 10 * seconds, "warm_up": 15, "learning_rate": 1e-3}
        weights = {"heavy": heavy, "heavy_weight": 20}
        run(start("train_target", data=single, start_from=target, out=read, **stretch, **weights, **common))
        target = read
    mixed, last = work / "data-last", work / f"{family}-target-last.pt"
    own = {"shards": 8, "chats_per_shard": 2500, "plain_shards": 0, "plain_last_shards": 0, "alone_share": 0.12}
    share_tokenizer(data, mixed)
    run(start("prepare", data=mixed, **own, writing_share=0.7, seed=8))
    stretch = {"seconds": seconds, "warm_up": 30, "learning_rate": 1e-3, "heavy_weight": 8}
    run(start("train_target", data=mixed, start_from=target, out=last, **stretch, **common))
    return last


def share_tokenizer(data: Path, other: Path) -> None:
    """Puts the tokenizer and the validation chats of one data folder into another, before `prepare` makes its own."""
    other.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", f"{VALIDATION}.npz"):
        if not (other / name).exists():
            shutil.copyfile(data / name, other / name)


def main(
    work: Annotated[Path, typer.Option(help="For data, checkpoints and features (1.5 GB).")] = ROOT / "work",
    out: Annotated[Path, typer.Option(help="The model folder.")] = EMBEDDED,
    skip_head: Annotated[Path, typer.Option(help="The control head's tensors.")] = SKIP_HEAD,
    shards: Annotated[int, typer.Option(help="Shards of data; the last four also train the heads.")] = 44,
    chats_per_shard: int = 4000,
    vision_seconds: Annotated[float, typer.Option(help="Time for the vision tower alone.")] = 170,
    target_seconds: Annotated[float, typer.Option(help="Time for the target.")] = 3840,
    last_seconds: Annotated[float, typer.Option(help="Time for the target's last stretch.")] = 650,
    head_seconds: Annotated[float, typer.Option(help="Time for each of the two heads.")] = 600,
    threads: Annotated[int, typer.Option(help="Threads of the target's training.")] = 1,
) -> None:
    """Builds data, tower, target, features, both heads side by side, the model folder and the tables."""
    work = work.resolve()
    data, vision, target, features = (work / name for name in ("data", "vision.safetensors", "target.pt", "features"))
    heads = {"see": work / "head-see.safetensors", "skip": work / "head-skip.safetensors"}
    began = time.monotonic()

    def done(what: str) -> None:
        console.rule(f"{what}: {time.monotonic() - began:.0f} s since the start")

    run(start("prepare", data=data, shards=shards, chats_per_shard=chats_per_shard))
    done("data")
    if not vision.exists():
        run(start("warm_vision", out=vision, seconds=vision_seconds, threads=threads))
    done("vision tower")
    run(start("train_target", data=data, vision=vision, out=target, seconds=target_seconds, threads=threads))
    done("target")
    loud = work / "target-loud.pt"
    if not loud.exists():
        words = {"probes": "word tens ones", "loudness": 0.4, "widen": 0.7, "batches": 40}
        run(start("loud_rows", family="qwen", data=data, target=target, out=loud, **words))
    target = loud
    done("image rows")
    target = finish_target(
        "qwen", work, data, target, alone="word", heavy="word", seconds=last_seconds, threads=threads
    )
    done("target, last stretch")
    caching = {"data": data, "target": target, "out": features, "shards": 2}
    run(start("cache_features", **caching), start("cache_features", **caching, first=2))
    done("features")
    common = {"data": data, "features": features, "target": target, "seconds": head_seconds}
    run(*(start("train_head", **common, out=path, policy=policy) for policy, path in heads.items()))
    done("heads")
    run(start("export", data=data, target=target, head=heads["see"], out=out.resolve()))
    skip_head.parent.mkdir(parents=True, exist_ok=True)
    skip_head.write_bytes(heads["skip"].read_bytes())
    run(
        start("evaluate", folder=out.resolve()),
        start("acceptance", folder=out.resolve(), head=skip_head.resolve()),
    )
    done("tables")


if __name__ == "__main__":
    typer.run(main)
