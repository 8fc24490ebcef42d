"""The same prompts on the same checkpoint through several engines, interleaved in one run.

Each engine runs in a process of its own (`peer_worker`), all are loaded before the first measurement, and then every
prompt goes through every engine and setting in turn, round after round, so that whatever else the machine does falls on
all of them. Decoding speed is tokens after the first by the time since the first. An engine or setting that does not
work is a row that says why.
"""

from __future__ import annotations

import base64
import io
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import PIL.Image

from foreglance.bench.prompts import Case, image_cases, text_cases
from foreglance.bench.report import Progress, plotter, silent
from foreglance.engine import Engine
from foreglance.models.base import ModelError
from foreglance.models.gguf.export import export
from foreglance.models.weights import find_assistant, find_model
from foreglance.request import Image, SamplingParams, Speculation, Text
from foreglance.settings import Settings

START_SECONDS, JOB_SECONDS = 900, 900
LAST_WORDS = 300  # characters of what a process that died had said


@dataclass(frozen=True)
class Contender:
    """An engine with a setting. `given` starts its process, and those with equal ones share it; `draft` and `depth` go
    with each job."""

    engine: str
    weights: str
    setting: str
    given: dict[str, Any]
    draft: str = "plain"
    depth: int | str = "auto"


@dataclass
class Row:
    """What one contender did. Speeds in tokens a second: the median over all runs and the best; `agrees`: the share of
    its texts that are those of the first row."""

    engine: str
    weights: str
    setting: str
    threads: int
    tokens_per_second: float | None = None
    best: float | None = None
    prompt_ms: float | None = None
    acceptance: float | None = None
    agrees: float | None = None
    skipped: str | None = None
    runs: list[float] = field(default_factory=list)

    def as_json(self) -> dict:
        return asdict(self)


class Worker:
    """A process that runs an engine. Raises `PeerError` in words if it cannot start, fails or falls silent."""

    def __init__(self, given: dict[str, Any], log: IO[bytes]):
        self._log = log
        threads = str(given["threads"])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "foreglance.bench.peer_worker", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"},
        )
        self._answer(START_SECONDS)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        return self._answer(JOB_SECONDS)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise PeerError(f"no answer within {seconds:.0f} seconds")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        said = json.loads(line)
        if "error" in said:
            raise PeerError(said["error"])
        return said

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        return f"its process ended with code {code}: ...{said[-LAST_WORDS:]}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class PeerError(RuntimeError):
    """Why an engine or a setting cannot be measured."""


@contextmanager
def workers(contenders: Sequence[Contender]) -> Iterator[dict[str, Worker | str]]:
    """A process for each distinct `given`; the reason instead for one that does not start."""
    with ExitStack() as stack:
        found: dict[str, Worker | str] = {}
        for contender in contenders:
            key = json.dumps(contender.given, sort_keys=True)
            if key in found:
                continue
            log = stack.enter_context(tempfile.TemporaryFile())
            try:
                worker = Worker(contender.given, log)
                stack.callback(worker.close)
                found[key] = worker
            except PeerError as error:
                found[key] = str(error)
        yield found


def measure(
    contenders: Sequence[Contender],
    cases: Sequence[Case],
    max_tokens: int,
    rounds: int,
    progress: Progress = silent,
) -> list[Row]:
    """A row for each contender, in their order. Every one runs each prompt once before it counts."""
    rows = [Row(one.engine, one.weights, one.setting, one.given["threads"]) for one in contenders]
    answers: list[list[dict[str, Any]]] = [[] for _ in contenders]
    jobs = [job_of(case, max_tokens) for case in cases]
    done, total = 0, (rounds + 1) * len(jobs) * len(contenders)
    with workers(contenders) as found:
        for turn in range(rounds + 1):
            for job in jobs:
                for index, contender in enumerate(contenders):
                    progress(done := done + 1, total)
                    if rows[index].skipped is None:
                        said = _run(found, contender, job, rows[index])
                        if turn and said is not None:
                            answers[index].append(said)
    for row, mine in zip(rows, answers, strict=True):
        if row.skipped is None:
            _fill(row, mine, answers[0])
    return rows


def _run(found: dict[str, Worker | str], contender: Contender, job: dict[str, Any], row: Row) -> dict[str, Any] | None:
    worker = found[json.dumps(contender.given, sort_keys=True)]
    try:
        if isinstance(worker, str):
            raise PeerError(worker)
        return worker.run(job | {"draft": contender.draft, "depth": contender.depth})
    except PeerError as error:
        row.skipped = str(error)
        return None


def _fill(row: Row, mine: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> None:
    row.runs = [answer["tokens_per_second"] for answer in mine]
    row.tokens_per_second, row.best = float(np.median(row.runs)), max(row.runs)
    row.prompt_ms = float(np.median([answer["prompt_ms"] for answer in mine]))
    drafted = sum(answer["drafted"] for answer in mine)
    row.acceptance = sum(answer["accepted"] for answer in mine) / drafted if drafted else None
    same = [a["text"].strip() == b["text"].strip() for a, b in zip(mine, first, strict=False)]
    row.agrees = sum(same) / len(same) if same else None


def job_of(case: Case, max_tokens: int) -> dict[str, Any]:
    """A case of one message with at most one picture."""
    (message,) = case.messages
    image = next((part.source for part in message.parts if isinstance(part, Image)), None)
    text = "".join(part.text for part in message.parts if isinstance(part, Text))
    return {"text": text, "image": None if image is None else _png(image), "max_tokens": max_tokens}


def _png(source: Any) -> str:
    picture = source if isinstance(source, PIL.Image.Image) else PIL.Image.open(source)
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def best_of(rows: Sequence[Row], engine: str) -> Row | None:
    """The engine's fastest setting, by its median."""
    mine = [row for row in rows if row.engine == engine and row.tokens_per_second is not None]
    return max(mine, key=lambda row: row.tokens_per_second, default=None)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Our best setting over the best of each other engine: the median of ratios run by run."""
    ours, found = best_of(rows, "foreglance"), {}
    for engine in dict.fromkeys(row.engine for row in rows if row.engine != "foreglance"):
        theirs = best_of(rows, engine)
        if ours is not None and theirs is not None:
            found[engine] = float(np.median(np.array(ours.runs) / np.array(theirs.runs)))
    return found


def ratios_of_best_runs(rows: Sequence[Row]) -> dict[str, float]:
    """Our fastest run over the fastest of each other engine: what is left of a ratio on a machine that is shared, where
    medians say more about who waits how."""
    fastest: dict[str, float] = {}
    for row in rows:
        if row.best is not None:
            fastest[row.engine] = max(row.best, fastest.get(row.engine, 0.0))
    ours = fastest.pop("foreglance", None)
    return {} if ours is None else {engine: ours / theirs for engine, theirs in fastest.items()}


@dataclass(frozen=True)
class Files:
    """Files of llama.cpp by the type of their matrices, and the tower's."""

    models: dict[str, Path]
    mmproj: Path | None


def files_for(
    model: str, gguf: Path | None, mmproj: Path | None, types: Sequence[str], folder: Path
) -> tuple[Files | None, str | None]:
    """The files that are given, else written into `folder`; or None and why there are none."""
    if gguf is not None:
        return Files({gguf.stem: gguf}, mmproj), None
    source = find_model(model)
    config = json.loads((source / "config.json").read_text())
    tower = folder / "mmproj.gguf" if config.get("vision_config") else None
    models = {kind: folder / f"model-{kind}.gguf" for kind in types}
    try:
        for kind, path in models.items():
            export(source, path, tower, kind=kind)
    except ModelError as error:
        return None, f"no GGUF of these weights: {error}"
    return Files(models, tower), None


def cases_for(model: str, count: int, max_tokens: int) -> tuple[list[Case], int, int]:
    """-> (cases, image rows of one, context that holds any of them and its answer)."""
    engine = Engine.load(model, Settings(weights="fp16", slots=1, prefix_cache_bytes=0, try_drafts=False))
    cases = image_cases(count) if engine.target.spec.image_token >= 0 else text_cases(count)
    rows = [engine.prepare(case.request(SamplingParams(), Speculation("none"))) for case in cases]
    return cases, rows[0].num_image_rows, max(map(len, rows)) + max_tokens + 32


def contenders(
    model: str,
    weights: Sequence[str],
    threads: int,
    depths: Sequence[int | str],
    engines: Sequence[str],
    files: Files | None,
    context: int,
    image_rows: int,
) -> list[Contender]:
    """Every engine with every setting that it might have. `depths`: 0 is drafts off."""
    made: list[Contender] = []
    common = {"model": model, "threads": threads, "context": context, "assistant": find_assistant(model)}
    if "foreglance" in engines:
        for one in weights:
            given = common | {"engine": "foreglance", "weights": one}
            made += [
                Contender("foreglance", one, _named(depth), given, "mtp" if depth else "plain", depth or "auto")
                for depth in depths
            ]
    if "transformers" in engines:
        for one in ("fp32", "bf16"):
            given = common | {"engine": "transformers", "weights": one}
            made += [Contender("transformers", one, how, given, how) for how in ("plain", "mtp", "prompt lookup")]
    if "llama.cpp" in engines and files is not None:
        for kind, path in files.models.items():
            given = common | {
                "engine": "llama.cpp",
                "gguf": str(path),
                "mmproj": None if files.mmproj is None else str(files.mmproj),
                "image_rows": image_rows,
            }
            made += [
                Contender("llama.cpp", kind, _named(depth), given | {"depth": depth})
                for depth in depths
                if depth != "auto"
            ]
    return made


def _named(depth: int | str) -> str:
    return "plain" if depth == 0 else f"drafts {depth}"


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Bars of median tokens a second, with the best run as a mark. Needs matplotlib (the extra `bench`)."""
    pyplot = plotter()
    colours = {"foreglance": "#1b6ca8", "llama.cpp": "#e08a1e", "transformers": "#8a8a8a"}
    shown = [row for row in rows if row.tokens_per_second is not None]
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.32 * len(shown)))
    names = [f"{row.engine} {row.weights}, {row.setting}" for row in shown]
    axes.barh(names, [row.tokens_per_second for row in shown], color=[colours[row.engine] for row in shown])
    axes.plot([row.best for row in shown], names, "|", color="black", markersize=9)
    axes.set(xlabel="tokens a second (bar: median, mark: best run)", title=title)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
