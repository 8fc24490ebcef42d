"""One running request: its rows, what it generated, and when it ends. The only mutable noun of the engine.

Decides end of text, length and stop strings. Knows no model, no cache internals and no other sequence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foreglance.detokenize import Decode, Detokenizer, overlap
from foreglance.grammar import Guide
from foreglance.prompt import Coordinates, PositionRule, Positions, Rows
from foreglance.request import MAX_DEPTH, DraftReport, Event, FinishReason, LogProb, Request, Result, Timings, Token
from foreglance.sampling import is_plain
from foreglance.verify import Verdict

MIN_IMAGE = 16  # rows of an image at whose end a prompt chunk ends


def _runs(image: np.ndarray) -> list[tuple[int, int]]:
    """Each image's first row and the row behind its last, from the image index [n] of each row."""
    numbers, first = np.unique(image, return_index=True)
    last = np.unique(image[::-1], return_index=True)[1]
    return [(int(a), len(image) - int(b)) for number, a, b in zip(numbers, first, last, strict=True) if number >= 0]


class StopStrings:
    """Holds text back while it may be the start of a stop string; says where one was found."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """-> (text that is safe to give out, whether a stop string was completed)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the one that is complete first, however the text arrived
            safe, self._held = self._held[: min(found)[1]], ""
            return safe, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def copy(self) -> StopStrings:
        """The same state, to look ahead with."""
        twin = StopStrings(self._stops)
        twin._held = self._held
        return twin


@dataclass
class Counters:
    """What timings are made of. Times in seconds of `time.perf_counter`."""

    added: float = field(default_factory=time.perf_counter)
    begun: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    cached_rows: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DEPTH)

    def count(self, verdict: Verdict) -> None:
        """A depth is tried only if the depths before it were accepted."""
        for depth in range(min(verdict.drafted, verdict.accepted + 1)):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < verdict.accepted


class Sequence:
    """The state of one request while it runs.

    rows       the prompt, `num_prompt` of them; fixed
    generated  token ids picked so far; the last one is not in the cache yet
    draft      guesses that it carries into its next step
    prefilled  prompt rows in the cache
    embeds     image embeddings [rows, width] by image index, once computed
    undrafted  why its drafter has no more guesses for it, in words; None: it has
    guide      what its tokens may be; None: anything
    picks_plainly  whether temperature and noise alone decide its picks, so that native code can make them
    picks_at_once  whether, besides, nothing else is asked of its logits
    """

    def __init__(
        self,
        id: int,
        request: Request,
        rows: Rows,
        rule: PositionRule,
        eos: frozenset[int],
        decode: Decode,
        context: int,
        guide: Guide | None = None,
    ):
        self.id = id
        self.request = request
        self.rows = rows
        self.num_prompt = len(rows)
        self.generated: list[int] = []
        self.draft: tuple[int, ...] = ()
        self.undrafted: str | None = None
        self.guide = guide
        self.picks_plainly = guide is None and is_plain(request.sampling)
        self.picks_at_once = self.picks_plainly and request.sampling.logprobs is None
        self.prefilled = 0
        self.embeds: dict[int, Tensor] = {}
        self.counters = Counters()
        self.report = DraftReport(request.speculation.draft, request.speculation.depth, request.speculation.images)
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self._image_runs = _runs(rows.image)
        self._limit = min(request.sampling.max_tokens, context - len(rows))
        self._axes = rule.axes
        self._next_coordinate = rule.following(rows.positions.at(-1))
        self._eos = frozenset() if request.sampling.ignore_eos else eos
        self._decode = decode
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(request.sampling.stop)
        self._text = ""

    # What follows is derived, never stored twice.

    @property
    def in_prefill(self) -> bool:
        return self.prefilled < self.num_prompt

    @property
    def committed(self) -> int:
        """Rows in the target's cache."""
        return self.prefilled if self.in_prefill else self.num_prompt + max(0, len(self.generated) - 1)

    @property
    def known(self) -> int:
        """Rows whose input is known: the prompt and every generated token."""
        return self.num_prompt + len(self.generated)

    @property
    def wanted(self) -> int:
        """Tokens that may still be generated, by the request and by the context."""
        return self._limit - len(self.generated)

    def chunks_end(self, whole_images: bool) -> int:
        """Prompt rows that are computed in chunks: all but the last one, which is computed as an answer's rows are, so
        that it comes out the same if all others are there already. With `whole_images` (families whose image rows see
        each other) the last row may belong to an image, which is then computed whole."""
        inside = whole_images and self.rows.image[-1] >= 0
        return self.num_prompt if inside else self.num_prompt - 1

    def next_border(self, grid: int, whole_images: bool) -> int:
        """Where the next chunk ends if the prompt goes on: at the next multiple of `grid`, absolute, or at the end of
        an image before it, so that another question about the image finds it there. The rows before it decide, and none
        behind it. With `whole_images` a border inside an image moves behind it."""
        stop = (self.prefilled // grid + 1) * grid
        for first, end in self._image_runs:
            if self.prefilled < end < stop and end - first >= MIN_IMAGE:
                return end
            if whole_images and first < stop < end:
                return end
        return stop

    def inputs(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, image indices and image offsets of known rows [start, stop); each [stop - start]."""
        if stop <= self.num_prompt:
            part = slice(start, stop)
            return self.rows.token_ids[part], self.rows.image[part], self.rows.offset[part]
        if start >= self.num_prompt:
            tokens = np.array(self.generated[start - self.num_prompt : stop - self.num_prompt], np.int64)
            fill = np.zeros(len(tokens), np.int64)
            return tokens, fill - 1, fill
        head = min(start, self.num_prompt), self.num_prompt
        tail = self.generated[max(start - self.num_prompt, 0) : stop - self.num_prompt]
        fill = np.zeros(len(tail), np.int64)
        pieces = (
            (self.rows.token_ids, np.array(tail, np.int64)),
            (self.rows.image, fill - 1),
            (self.rows.offset, fill),
        )
        return tuple(np.concatenate([array[head[0] : head[1]], more]) for array, more in pieces)

    def embeddings(self, image: np.ndarray, offset: np.ndarray) -> Tensor | None:
        """Embeddings [m, width] of the image rows among rows with these image indices and offsets, in order."""
        if image.max(initial=-1) < 0:
            return None
        indices = np.unique(image[image >= 0])
        return torch.cat([self.embeds[int(i)][torch.from_numpy(offset[image == i])] for i in indices])

    def positions(self, start: int, stop: int) -> Positions:
        """Positions of rows [start, stop), known or about to be drafted."""
        if stop <= self.num_prompt:
            return self.rows.positions.part(start, stop)
        first = max(start, self.num_prompt)
        tail = Positions.run(self._next_coordinate + first - self.num_prompt, stop - first, self._axes)
        if start >= self.num_prompt:
            return tail
        return Positions.join([self.rows.positions.part(start, self.num_prompt), tail])

    def coordinate(self, row: int) -> int:
        """Of a row behind the prompt, on every axis."""
        return self._next_coordinate + row - self.num_prompt

    def position(self, row: int) -> Coordinates:
        """Of one row, known or about to be drafted."""
        if row < self.num_prompt:
            return self.rows.positions.at(row)
        return (self.coordinate(row),) * self._axes

    def identities(self, stop: int) -> np.ndarray:
        """int64 [stop]: what the first rows are, for prefix reuse."""
        tail = np.array(self.generated[: max(0, stop - self.num_prompt)], np.int64)
        return np.concatenate([self.rows.identities()[:stop], tail])

    def allowed(self, tokens: Many[int]) -> np.ndarray | None:
        """Ids of what may follow `tokens`, which begin with the generated ones; None: anything."""
        return None if self.guide is None else self.guide.allowed(tokens)

    def limit(self, verdict: Verdict) -> Verdict:
        """Cut a verdict at the end of text, at a stop string or at the length limit, so that no row behind the end is
        committed: what a finished sequence leaves for reuse must not depend on drafts."""
        return verdict.cut(self._end_among(verdict.tokens[: self.wanted]) + 1)

    def _end_among(self, tokens: tuple[int, ...]) -> int:
        """Place of the token that ends the text, else of the last one."""
        if not self.request.sampling.stop:
            if self._eos.isdisjoint(tokens):
                return len(tokens) - 1
            return next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens) - 1)
        detokenizer, stops = self._detokenizer.copy(), self._stops.copy()
        for i, token in enumerate(tokens):
            if token in self._eos or stops.push(detokenizer.push(token))[1]:
                return i
        return len(tokens) - 1

    def advance(self, num_rows: int) -> None:
        """Prompt rows [prefilled, prefilled + num_rows) are in the cache."""
        self.prefilled += num_rows

    def take(self, verdict: Verdict) -> Event:
        """Append what a step gained, up to a stop string; decide whether the sequence ends."""
        now = time.perf_counter()
        if not self.generated:
            self.counters.first_token = now
        else:
            self.counters.steps += 1
            self.counters.count(verdict)
        self.counters.last_token = now
        self.draft = ()
        tokens = []
        logprobs = verdict.logprobs or (None,) * len(verdict.tokens)
        for depth, (token, logprob) in enumerate(zip(verdict.tokens, logprobs, strict=True)):
            if self.finish is not None:
                break
            tokens.append(self._append(token, depth + 1 if depth < verdict.accepted else 0, logprob))
        self._check_guide()
        return self.event(tuple(tokens), verdict.drafted)

    def _check_guide(self) -> None:
        """A text that its grammar could not be asked about to the end does not pass for one that follows it."""
        failure = None if self.guide is None else self.guide.failure(self.generated)
        if failure is not None:
            self.finish, self.error = "error", failure

    def _append(self, token: int, depth: int, logprob: LogProb | None) -> Token:
        self.generated.append(token)
        text, stopped = self._stops.push("" if token in self._eos else self._detokenizer.push(token))
        if stopped or token in self._eos:
            self.finish = "stop"
        elif self.wanted == 0:
            self.finish = "length"
        if self.finish is not None and not stopped:
            rest, stopped = self._stops.push(self._detokenizer.flush())
            text += rest
            if stopped:
                self.finish = "stop"
            else:
                text += self._stops.flush()
        self._text += text
        if logprob is None:
            return Token(token, depth, text)
        return Token(token, depth, text, logprob.chosen, logprob.top)

    def end(self, reason: FinishReason, error: str | None = None) -> Event:
        """End from outside (cancelled, failed); the one final event."""
        self.finish, self.error = reason, error
        return self.event(())

    def event(self, tokens: tuple[Token, ...], drafted: int = 0) -> Event:
        return Event(self.request.id, tokens, self.result() if self.finish is not None else None, drafted)

    def result(self) -> Result:
        assert self.finish is not None
        return Result(
            self.request.id,
            self._text,
            tuple(self.generated),
            self.finish,
            self._timings(),
            self.report,
            self.error,
        )

    def _timings(self) -> Timings:
        c = self.counters
        deepest = max((d + 1 for d, n in enumerate(c.drafted) if n), default=0)
        return Timings(
            prompt_tokens=self.num_prompt,
            image_rows=self.rows.num_image_rows,
            cached_rows=c.cached_rows,
            steps=c.steps,
            drafted=tuple(c.drafted[:deepest]),
            accepted=tuple(c.accepted[:deepest]),
            ttft_ms=max(0.0, c.first_token - c.added) * 1e3,
            decode_ms=max(0.0, c.last_token - c.first_token) * 1e3,
            num_tokens=len(self.generated),
            queued_ms=max(0.0, c.begun - c.added) * 1e3,
        )
