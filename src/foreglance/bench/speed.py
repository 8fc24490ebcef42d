"""What a step costs: rows by weights by threads, against the rate at which this machine reads memory.

A step here is the engine's whole step: packing, the target's forward and output head, picks, verification, commit and
text. Its rows are one and some guesses that never stand, so that every step does the same work. Row counts take turns
step by step, a large buffer is read in every round, and what is reported are medians: of times, and of the ratios of
steps that followed each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from foreglance.bench import operations
from foreglance.bench.prompts import text_cases
from foreglance.bench.report import Progress, silent
from foreglance.drafters.base import NoDraft, Settled
from foreglance.engine import Engine
from foreglance.models.registry import auto_config
from foreglance.models.weights import find_model, open_tensors
from foreglance.ops.formats import BITS
from foreglance.prompt import Rows, make_rows
from foreglance.request import MAX_DEPTH, Message, Request, RequestError, SamplingParams, Speculation
from foreglance.settings import Settings

BUFFER = 512 << 20  # bytes read to measure bandwidth: far more than a cache holds
CACHED = 64 << 20  # bytes of weights that a processor's caches may hold: memory is not read then
STEPS = 8  # of each setting in a round
NOT_DECODED = (
    "visual.",
    "vision_tower.",
    "vision_model.",
    "embed_vision.",
    "vit_",
    "mtp.",
    "audio",
    "conv1d",
    "embed_",
)


class NeverRight(NoDraft):
    """A drafter whose guesses never stand: the last token again, as deep as it is asked. Costs nothing itself."""

    kind = "ngram"
    max_depth = MAX_DEPTH

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        return {one.sequence.id: one.sequence.generated[-1:] * one.depth for one in settled if one.depth}


@dataclass
class Speed:
    """One combination of weights and threads. Times in milliseconds; keys of tables are counts as text.

    step_ratio                    a step of k rows over one of one row
    read_bandwidth                bytes a second that this many threads read from memory
    bytes_per_step                weights that a step of one row reads; None for a format that is not known here
    decode_fraction_of_bandwidth  of `read_bandwidth`, what plain decoding reaches with these bytes; None if they are so
                                  few that they stay in a cache
    by_context, by_slots          tokens a second of plain decoding
    """

    weights: str
    threads: int
    self_test: str
    step_ms: dict[str, float]
    step_ratio: dict[str, float]
    read_bandwidth: float
    bytes_per_step: float | None
    decode_fraction_of_bandwidth: float | None
    tokens_per_second: float
    prefill_tokens_per_second: float
    by_context: dict[str, float] = field(default_factory=dict)
    by_slots: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict:
        return asdict(self)


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes a second of one pass over `buffer`, by the faster of two ways of reading it."""
    return max(_rate(buffer, torch.sum), _rate(buffer, lambda b: torch.dot(b, b)))


def _rate(buffer: torch.Tensor, read) -> float:
    began = time.perf_counter()
    read(buffer)
    return buffer.numel() * buffer.element_size() / (time.perf_counter() - began)


def step_bytes(folder: Path, weights: str) -> float | None:
    """Bytes of weights that a decode step of one row reads: every matrix of trunk and output head once, of a mixture's
    experts the chosen ones. None for a format whose bytes are not known here."""
    if weights not in BITS:
        return None
    text = auto_config(folder).to_dict()
    text = text.get("text_config", text)
    tensors, count = open_tensors(folder), 0.0
    names = list(tensors.keys())
    heads = [name for name in names if name.endswith("lm_head.weight")] or [
        name for name in names if name.endswith("embed_tokens.weight")
    ]
    for name in names:
        shape = tensors.shape(name)
        if len(shape) > 1 and (name in heads[:1] or _is_decoded(name, text["num_hidden_layers"])):
            count += np.prod(shape) * _share(name, text)
    tensors.close()
    return count * BITS[weights] / 8


def _is_decoded(name: str, num_layers: int) -> bool:
    if any(part in name for part in NOT_DECODED) or name.endswith("lm_head.weight"):
        return False
    layer = name.partition("layers.")[2].partition(".")[0]
    return not layer.isdecimal() or int(layer) < num_layers


def _share(name: str, text: dict) -> float:
    """Of a mixture's experts, how many a row goes through."""
    if ".experts." not in name and ".moe." not in name:
        return 1.0
    total = text.get("num_experts") or text.get("n_routed_experts")
    taken = text.get("num_experts_per_tok") or text.get("top_k_experts")
    return taken / total if total and taken and "gate.weight" not in name else 1.0


def random_rows(engine: Engine, count: int, seed: int = 0) -> Rows:
    """A prompt of `count` tokens of the vocabulary's beginning, as any tokenizer has them."""
    spec, rng = engine.target.spec, np.random.default_rng(seed)
    tokens = rng.integers(8, min(1000, spec.vocab_size), count)
    tokens[tokens == spec.image_token] = 8
    return make_rows(tokens.tolist(), spec.image_token, [], spec.rule)


class Bench:
    """A target loaded for a combination of weights and threads, and what is measured with it."""

    def __init__(self, model: str, weights: str, threads: int, context: int, slots: int):
        torch.set_num_threads(threads)
        settings = Settings(weights=weights, context=context, slots=slots, prefix_cache_bytes=0, try_drafts=False)
        self._loaded = Engine.load(model, settings)
        assert self._loaded.self_test is not None
        self.self_test, self.weights = str(self._loaded.self_test), self._loaded.self_test.weights

    def running(self, num_rows: int, prompt: int, slots: int = 1) -> Engine:
        """An engine over the same target, in mid-decode: `slots` sequences whose steps have `num_rows` rows each."""
        engine = self._loaded.with_target(self._loaded.target)
        engine.use_drafter(NeverRight())
        waiting = set()
        for slot in range(slots):
            request = Request(
                (Message.of("user", "-"),),
                SamplingParams(max_tokens=100_000, ignore_eos=True),
                Speculation("none") if num_rows == 1 else Speculation("ngram", num_rows - 1),
            )
            waiting.add(engine.add_rows(request, random_rows(engine, prompt, slot)))
        while waiting:
            waiting -= {event.request_id for event in engine.step() if event.tokens}
        engine.step()
        return engine

    def tokens_per_second(self, prompt: int, slots: int = 1, steps: int = 2 * STEPS) -> float:
        """Of plain decoding, by the median step."""
        engine = self.running(1, prompt, slots)
        return slots / float(np.median([timed_step(engine) for _ in range(steps)]))

    def prefill_rate(self, prompt: int) -> float:
        """Rows a second, up to the first token."""
        began = time.perf_counter()
        self.running(1, prompt)
        return prompt / (time.perf_counter() - began)


def timed_step(engine: Engine) -> float:
    """Seconds."""
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Sweep:
    """What to measure of each combination. Lengths in rows."""

    rows: tuple[int, ...] = (1, 2, 4, 8)
    rounds: int = 5
    prompt: int = 64
    prefill: int = 512
    contexts: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (("rows", 1, MAX_DEPTH + 1), ("contexts", 2, 1 << 20), ("slots", 1, 64)):
            odd = [value for value in self.__dict__[name] if not low <= value <= high]
            if odd:
                raise RequestError(f"--{name} takes numbers from {low} to {high}, got {odd[0]}", param=name)
        if self.rounds < 1:
            raise RequestError(f"--rounds must be at least 1, got {self.rounds}", param="rounds")

    @property
    def work(self) -> int:
        """Settings that a combination is measured at, for a progress bar."""
        return self.rounds + len(self.contexts) + len(self.slots)

    @property
    def all_rows(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.rows}))


def measure(model: str, weights: str, threads: int, sweep: Sweep, progress: Progress = silent) -> Speed:
    """One combination, freshly loaded."""
    longest = max((sweep.prompt + sweep.rounds * (STEPS + 2), sweep.prefill, *sweep.contexts)) + 64
    bench = Bench(model, weights, threads, longest, max((1, *sweep.slots)))
    engines = {rows: bench.running(rows, sweep.prompt) for rows in sweep.all_rows}
    buffer = torch.ones(BUFFER // 4)
    seconds: dict[int, list[float]] = {rows: [] for rows in sweep.all_rows}
    bandwidth, prefill, done = [], [], 0
    for _ in range(sweep.rounds):
        for engine in engines.values():  # what was read in between has left the caches
            engine.step()
        for _ in range(STEPS):
            for rows, engine in engines.items():
                seconds[rows].append(timed_step(engine))
        bandwidth += [read_bandwidth(buffer)] * STEPS
        prefill.append(bench.prefill_rate(sweep.prefill))
        progress(done := done + 1, sweep.work)
    one = np.array(seconds[1])
    size = step_bytes(find_model(model), bench.weights)
    speed = Speed(
        weights=bench.weights,
        threads=threads,
        self_test=bench.self_test,
        step_ms={str(rows): float(np.median(times)) * 1e3 for rows, times in seconds.items()},
        step_ratio={str(rows): float(np.median(np.array(seconds[rows]) / one)) for rows in sweep.all_rows if rows > 1},
        read_bandwidth=float(np.median(bandwidth)),
        bytes_per_step=size,
        decode_fraction_of_bandwidth=_fraction(size, one, np.array(bandwidth)),
        tokens_per_second=1 / float(np.median(one)),
        prefill_tokens_per_second=float(np.median(prefill)),
    )
    for rows in sweep.contexts:
        speed.by_context[str(rows)] = bench.tokens_per_second(rows)
        progress(done := done + 1, sweep.work)
    for slots in sweep.slots:
        speed.by_slots[str(slots)] = bench.tokens_per_second(sweep.prompt, slots)
        progress(done := done + 1, sweep.work)
    return speed


def _fraction(size: float | None, seconds: np.ndarray, bandwidth: np.ndarray) -> float | None:
    """None for weights that stay in a cache: they are not read from memory in each step."""
    return None if size is None or size < CACHED else float(np.median(size / seconds / bandwidth))


def by_operation(model: str, weights: str, threads: int, max_tokens: int = 24) -> list[operations.Line]:
    """Where a plain decode step's time goes."""
    torch.set_num_threads(threads)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    settings = Settings(weights=weights, prefix_cache_bytes=0, slots=1, try_drafts=False)
    (case,) = text_cases(1)
    return operations.measure(model, case.request(sampling, Speculation("none")), settings=settings)
