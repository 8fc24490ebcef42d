"""What a weight format costs in quality: every format's logits against those of fp32, on the same rows.

The text is the model's own where a prompt can ask for it: answers to pictures and questions, sampled at temperature 1
from the fp32 model, so that its perplexity there is that of its own distribution. A published model reads a bundled
text instead. Prompts are computed as chunks and the text as few rows, the way in which decoding and verifying do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foreglance.batch import TILE, Part, pack
from foreglance.bench.prompts import image_cases, text_cases
from foreglance.bench.report import Progress, silent
from foreglance.cache.store import CacheStore
from foreglance.engine import Engine
from foreglance.prompt import Rows, make_rows, spans_of
from foreglance.request import RequestError, SamplingParams, Speculation
from foreglance.settings import Settings

TEXT = Path(__file__).resolve().parent.parent / "assets" / "lighthouse.txt"
CHUNK = 256
REFERENCE = "fp32"


@dataclass(frozen=True)
class Passage:
    """Rows that are read, of which those from `start` on are scored: each predicts the next one's token."""

    rows: Rows
    start: int

    @property
    def targets(self) -> np.ndarray:
        """int64: the token that follows each scored row."""
        return self.rows.token_ids[self.start + 1 :]


@dataclass
class Quality:
    """One format against fp32. Logits are compared after taking each row's mean off, which changes no probability.

    rms_error    root mean square of the difference, over that of the reference's logits
    worst_error  largest difference of a logit
    top1         share of rows with the same best token
    divergence   mean Kullback-Leibler divergence from the reference, in nats
    perplexity   of the text
    """

    weights: str
    rms_error: float
    worst_error: float
    top1: float
    divergence: float
    perplexity: float
    tokens: int

    def as_json(self) -> dict:
        return asdict(self)


def own_passages(engine: Engine, count: int, max_tokens: int) -> list[Passage]:
    """Answers of the model itself, half of them about pictures."""
    cases = text_cases(count - count // 2)
    if engine.target.spec.image_token >= 0:
        cases += image_cases(count // 2)
    made = []
    for seed, case in enumerate(cases):
        request = case.request(SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed), Speculation("none"))
        rows = engine.prepare(request)
        (result,) = engine.generate(request)
        made.append(Passage(_with_answer(engine, rows, result.token_ids), len(rows) - 1))
    return made


def _with_answer(engine: Engine, rows: Rows, answer: Sequence[int]) -> Rows:
    """The prompt's rows and those of its answer."""
    none = np.full(len(answer), -1, np.int64)
    image = np.concatenate([rows.image, none])
    return Rows(
        np.concatenate([rows.token_ids, np.array(answer, np.int64)]),
        image,
        np.concatenate([rows.offset, np.zeros(len(answer), np.int64)]),
        engine.target.spec.rule.place(spans_of(image, rows.images)),
        rows.images,
    )


def passage_of(engine: Engine, path: Path, max_rows: int) -> list[Passage]:
    """The beginning of a text file; its first eighth is read without being scored."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as text ({error})", param="text") from error
    token_ids = engine.encode(text)[: min(max_rows, engine.context - 1)]
    spec = engine.target.spec
    return [Passage(make_rows(token_ids, -1, [], spec.rule), len(token_ids) // 8)]


@torch.inference_mode()
def logits_of(engine: Engine, passage: Passage) -> Tensor:
    """float32 [scored rows, vocab]."""
    target, rows = engine.target, passage.rows
    store = CacheStore(target.spec.caches)
    store.open(0)
    embeds = [target.embed_image(image) for image in rows.images]
    pieces, last = [], len(rows) - 1  # nothing follows the last row
    edges = [*range(0, passage.start, CHUNK), *range(passage.start, last, TILE), last]
    for start, stop in itertools.pairwise(edges):
        scored = start >= passage.start
        part = _part(rows, start, stop, embeds, scored)
        store.reserve(0, part.num_rows)
        batch = pack([part], target.spec.inputs, store.held())
        hidden = target.forward(batch, {0: store[0]})
        store.commit(0, part.num_rows, part.positions.at(part.num_rows - 1))
        if scored:
            pieces.append(target.logits(hidden))
    return torch.cat(pieces)


def _part(rows: Rows, start: int, stop: int, embeds: Sequence[Tensor], scored: bool) -> Part:
    at = slice(start, stop)
    is_image = rows.is_image[at]
    places = zip(rows.image[at][is_image], rows.offset[at][is_image], strict=True)
    images = torch.stack([embeds[image][offset] for image, offset in places]) if is_image.any() else None
    return Part(
        0,
        rows.token_ids[at],
        is_image,
        rows.positions.part(start, stop),
        num_scored=stop - start if scored else 0,
        chunk=not scored,
        embeds=images,
    )


def measure(
    model: str,
    formats: Sequence[str],
    text: Path | None,
    count: int = 8,
    max_rows: int = 400,
    progress: Progress = silent,
) -> list[Quality]:
    """A line for fp32 and one for each format. `text` None: the model's own answers, `count` of them."""
    settings = {
        name: Settings(weights=name, prefix_cache_bytes=0, slots=1, try_drafts=False) for name in (REFERENCE, *formats)
    }
    reference = Engine.load(model, settings[REFERENCE])
    if text is None:
        passages = own_passages(reference, count, max_rows // count)
    else:
        passages = passage_of(reference, text, max_rows)
    wanted = [logits_of(reference, passage) for passage in passages]
    del reference
    done, lines = 0, [_compared(REFERENCE, passages, wanted, wanted)]
    for name in formats:
        if name != REFERENCE:
            engine = Engine.load(model, settings[name])
            lines.append(_compared(name, passages, [logits_of(engine, passage) for passage in passages], wanted))
        progress(done := done + 1, len(formats))
    return lines


def _compared(name: str, passages: Sequence[Passage], found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Quality:
    ours, theirs = torch.cat(list(found)), torch.cat(list(wanted))
    targets = torch.from_numpy(np.concatenate([passage.targets for passage in passages]))
    logs, true = ours.log_softmax(-1), theirs.log_softmax(-1)
    difference = (ours - ours.mean(-1, keepdim=True)) - (theirs - theirs.mean(-1, keepdim=True))
    spread = (theirs - theirs.mean(-1, keepdim=True)).square().mean().sqrt()
    return Quality(
        weights=name,
        rms_error=float(difference.square().mean().sqrt() / spread),
        worst_error=float(difference.abs().max()),
        top1=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        divergence=float((true.exp() * (true - logs)).sum(-1).mean()),
        perplexity=math.exp(float(-logs.gather(-1, targets[:, None]).mean())),
        tokens=len(targets),
    )
