"""A conversation to rows: chat template, tokenizer, the places of images, and positions.

Owns `Rows` and the position rules. A row index counts cache rows; a position is a coordinate that rotary embeddings
see. They are different things (an image of merged grid H x W is H*W rows but moves the M-RoPE text coordinate by
max(H, W)), so positions travel in a type of their own and no function here turns one into the other.
Touches no device and no vision tower. Source of the M-RoPE rule: transformers `Qwen3_5Model.get_rope_index`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from foreglance.chat_format import ChatFormat, ReasoningState
from foreglance.conversation import Templated, render
from foreglance.grammar import Grammars, Guide, is_bound
from foreglance.images import Picture
from foreglance.reasoning import ReasoningBudget
from foreglance.request import Message, Request, RequestError

Coordinates = tuple[int, ...]  # one row's position, an entry per axis
SHORT = 4  # tokens whose text is kept
SHORT_RUN = 16  # rows that are checked one by one rather than as arrays
Grid = tuple[int, int]  # merged height and width of a run of image rows


@dataclass(frozen=True)
class Positions:
    """Positions of consecutive rows: `coords` [axes, n] int64."""

    coords: np.ndarray

    def __len__(self) -> int:
        return self.coords.shape[1]

    @property
    def axes(self) -> int:
        return self.coords.shape[0]

    def part(self, start: int, stop: int) -> Positions:
        return Positions(self.coords[:, start:stop])

    def at(self, row: int) -> Coordinates:
        return tuple(self.coords[:, row].tolist())

    @classmethod
    def join(cls, pieces: Sequence[Positions]) -> Positions:
        return cls(np.concatenate([piece.coords for piece in pieces], axis=1))

    @classmethod
    def run(cls, start: int, num_rows: int, axes: int) -> Positions:
        """Text rows: the same consecutive coordinate on every axis."""
        coords = np.empty((axes, num_rows), np.int64)
        coords[:] = start if num_rows == 1 else np.arange(start, start + num_rows)
        return cls(coords)


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one kind: text, or one run of an image's rows with its merged `grid` (height, width)."""

    num_rows: int
    grid: Grid | None = None


class PositionError(ValueError):
    """Positions that break the family's rule."""


class PositionRule(Protocol):
    """How a family numbers rows, and what it accepts next to what a cache already holds."""

    axes: int

    def place(self, spans: Sequence[Span]) -> Positions:
        """Positions of a whole sequence that begins at 0."""
        ...

    def following(self, last: Coordinates) -> int:
        """The coordinate of the text row that follows a row at `last`."""
        ...

    def check(self, last: Coordinates | None, new: Positions, is_image: np.ndarray) -> None:
        """Raise `PositionError` unless rows at `new` may follow a cache whose last row is at `last`."""
        ...


@dataclass(frozen=True)
class OneAxis:
    """Positions count rows, images included: the first new position is the last plus one, without holes."""

    axes: int = 1

    def place(self, spans: Sequence[Span]) -> Positions:
        return Positions.run(0, sum(span.num_rows for span in spans), 1)

    def following(self, last: Coordinates) -> int:
        return last[0] + 1

    def check(self, last: Coordinates | None, new: Positions, is_image: np.ndarray) -> None:
        want = 0 if last is None else last[0] + 1
        if new.coords[0].tolist() == list(range(want, want + len(new))):
            return
        raise PositionError(
            f"the cache {_held(last)}, so the first new row must be at position {want}, but the batch starts at "
            f"{new.at(0)[0]} and runs {_brief(new)}; one-axis positions follow each other without holes"
        )


@dataclass(frozen=True)
class MRope:
    """Temporal, height and width coordinates (Qwen-VL). Text rows have all three equal.

    An image that starts at coordinate s has its row (y, x) at (s, s + y, s + x); the text after it continues at
    s + max(H, W).
    """

    axes: int = 3

    def place(self, spans: Sequence[Span]) -> Positions:
        pieces, start = [], 0
        for span in spans:
            if span.grid is None:
                pieces.append(Positions.run(start, span.num_rows, 3))
                start += span.num_rows
            else:
                pieces.append(self._image(start, *span.grid))
                start += max(span.grid)
        return Positions.join(pieces) if pieces else Positions.run(0, 0, 3)

    @staticmethod
    def _image(start: int, height: int, width: int) -> Positions:
        y, x = np.divmod(np.arange(height * width, dtype=np.int64), width)
        return Positions(np.stack([np.full_like(y, start), start + y, start + x]))

    def following(self, last: Coordinates) -> int:
        return max(last) + 1

    def check(self, last: Coordinates | None, new: Positions, is_image: np.ndarray) -> None:
        if len(new) <= SHORT_RUN and not is_image.any() and self._goes_on(last, new):
            return
        lowest, before = new.coords.min(axis=0), self._reached(last, new)
        text_ok = lowest > before
        image_ok = (lowest >= new.coords[0]) & (new.coords[0] >= self._temporal_before(last, new))
        bad = np.flatnonzero(~np.where(is_image, image_ok, text_ok))
        if len(bad) == 0:
            return
        row, kind = int(bad[0]), "image" if is_image[bad[0]] else "token"
        raise PositionError(
            f"the cache {_held(last)} and the batch starts at {new.at(0)}; its row {row} ({kind}) at {new.at(row)} "
            "does not follow: token rows go strictly forward on every axis, image rows may share a coordinate with the "
            "row before but never go back"
        )

    @staticmethod
    def _goes_on(last: Coordinates | None, new: Positions) -> bool:
        """Whether these are text rows as `Positions.run` numbers them: what nearly all steps bring."""
        first, *others = new.coords.tolist()
        start = first[0]
        alike = all(axis == first for axis in others)
        return alike and start > (-1 if last is None else max(last)) and first == list(range(start, start + len(first)))

    @staticmethod
    def _reached(last: Coordinates | None, new: Positions) -> np.ndarray:
        """Highest coordinate on any axis before each new row [n]."""
        highest = np.concatenate([[-1 if last is None else max(last)], new.coords.max(axis=0)[:-1]])
        return np.maximum.accumulate(highest)

    @staticmethod
    def _temporal_before(last: Coordinates | None, new: Positions) -> np.ndarray:
        return np.concatenate([[-1 if last is None else last[0]], new.coords[0][:-1]])


def _held(last: Coordinates | None) -> str:
    if last is None:
        return "is empty"
    return f"holds its last row at position {last[0] if len(last) == 1 else last}"


def _brief(new: Positions) -> str:
    shown = [str(c) for c in new.coords[0][:8]]
    return "[" + ", ".join(shown) + (", ..." if len(new) > 8 else "") + "]"


@dataclass(frozen=True)
class ImageInput:
    """A picture as the vision tower takes it.

    `digest` identifies pixels and processing; `grid` is the merged grid (height, width), one row each; `patches` is the
    tower's own input and opaque here. `layout` are the token ids that a prompt has for it, the placeholder once per row
    among them (Gemma-4: between two tags); None: its rows alone. `runs` are the grids of its runs of rows if they are
    more than the one of `grid` (Step: crops, then the whole picture, with tags around each).
    """

    digest: str
    grid: Grid
    patches: Any = None
    layout: tuple[int, ...] | None = None
    runs: tuple[Grid, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(height * width for height, width in self.runs or (self.grid,))

    def tokens(self, image_token: int) -> tuple[int, ...]:
        return self.layout or (image_token,) * self.num_rows


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence. All arrays have length n.

    token_ids  int64; an image row holds the placeholder id, which is never looked up
    image      int64; index into `images`, -1 for a token row
    offset     int64; which row of its image, counted over all of its runs
    positions  on the family's axes
    reasoning  where it leaves the model: inside a block of reasoning ("open"), behind any ("done"), or neither ("none")
    """

    token_ids: np.ndarray
    image: np.ndarray
    offset: np.ndarray
    positions: Positions
    images: tuple[ImageInput, ...] = ()
    reasoning: ReasoningState = "done"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_image(self) -> np.ndarray:
        return self.image >= 0

    @property
    def num_image_rows(self) -> int:
        return int(self.is_image.sum())

    def identities(self) -> np.ndarray:
        """int64 [n]: what a row is, for prefix reuse. Token rows: the id. Image rows: a negative hash of the image's
        pixels and processing and of the row's place in it, never of its size or placeholder."""
        ids = self.token_ids.copy()
        for index, image in enumerate(self.images):
            mine = self.image == index
            ids[mine] = image_identities(image)[self.offset[mine]]
        return ids


def image_identities(image: ImageInput) -> np.ndarray:
    """int64 [rows], all negative."""
    stem = int.from_bytes(hashlib.sha256(image.digest.encode()).digest()[:8], "little")
    mixed = (stem + np.arange(image.num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    return -(mixed >> np.uint64(2)).astype(np.int64) - 1


def spans_of(image: np.ndarray, images: Sequence[ImageInput]) -> list[Span]:
    """Runs of text rows and of images, in order, from each row's image index [n] of a whole prompt."""
    edges = [0, *(np.flatnonzero(np.diff(image)) + 1).tolist(), len(image)]
    pairs = [(start, stop) for start, stop in itertools.pairwise(edges) if stop > start]
    grids, spans = [iter(one.runs or (one.grid,)) for one in images], []
    for start, stop in pairs:
        if image[start] < 0:
            spans.append(Span(stop - start))
            continue
        while start < stop:  # runs of one image may follow each other directly
            height, width = next(grids[image[start]])
            spans.append(Span(height * width, (height, width)))
            start += height * width
    return spans


def make_rows(token_ids: Sequence[int], image_token: int, images: Sequence[ImageInput], rule: PositionRule) -> Rows:
    """Expand each placeholder to its image's rows and number everything.

    Raises `RequestError` if placeholders and images do not match one to one.
    """
    places = [i for i, token in enumerate(token_ids) if token == image_token]
    if len(places) != len(images):
        raise RequestError(
            f"the prompt has {len(places)} image placeholders for {len(images)} images; text must not contain the "
            "placeholder token itself",
            param="messages",
            code="image_count_mismatch",
        )
    tokens, image, offset, used = [], [], [], 0
    for token in token_ids:
        is_place = token == image_token
        layout = images[used].tokens(image_token) if is_place else (token,)
        is_row = [is_place and inner == image_token for inner in layout]
        tokens += layout
        image += [used if row else -1 for row in is_row]
        offset += [
            before if row else 0 for row, before in zip(is_row, itertools.accumulate(is_row, initial=0), strict=False)
        ]
        used += is_place
    image_array = np.array(image, np.int64)
    return Rows(
        np.array(tokens, np.int64),
        image_array,
        np.array(offset, np.int64),
        rule.place(spans_of(image_array, images)),
        tuple(images),
    )


class Tokenizer(Templated, Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    @property
    def all_special_ids(self) -> list[int]: ...


@dataclass(frozen=True)
class Prompter:
    """Renders conversations of one model to rows. `prepare` is the family's image processor.

    `format` is how the model writes reasoning and tool calls; `grammars` None: no grammar can be asked for.
    """

    tokenizer: Tokenizer
    image_token: int
    rule: PositionRule
    prepare: Callable[[Picture], ImageInput]
    format: ChatFormat = field(default_factory=ChatFormat)
    grammars: Grammars | None = None

    def rows(
        self,
        messages: Sequence[Message],
        pictures: Iterable[Picture],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Rows:
        """Rows of a conversation. Raises `RequestError` for what the chat template does not take."""
        options = options or {}
        text = render(self.tokenizer, self.format, messages, tools, options)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        images = [self.prepare(picture) for picture in pictures]
        state = self.format.state_after(text)
        if state == "none" and not options.get("enable_thinking") and self.format.reads("enable_thinking"):
            asked = render(self.tokenizer, self.format, messages, tools, {**options, "enable_thinking": True})
            if self.format.state_after(asked) == "open":  # so this model reasons when it is asked to, and was not
                state = "done"
        return replace(make_rows(token_ids, self.image_token, images, self.rule), reasoning=state)

    def rows_of(self, request: Request, pictures: Iterable[Picture]) -> Rows:
        """Rows of a request's conversation, tools and options."""
        tools = () if request.tool_choice == "none" else request.tools
        return self.rows(request.messages, pictures, tools, request.template_options)

    def guide(self, request: Request, state: ReasoningState, vocab_size: int, eos: frozenset[int]) -> Guide | None:
        """What the tokens of an answer may be; None: anything. Raises `RequestError` for what cannot be held to."""
        matcher = None
        if is_bound(request):
            if self.grammars is None:
                raise RequestError("grammar: this engine was made without grammars", param="grammar")
            matcher = self.grammars.matcher(request, self.format, state)
        budget = self._budget(request.sampling.reasoning_budget, state)
        return None if matcher is None and budget is None else Guide(matcher, budget, vocab_size, eos)

    def _budget(self, limit: int | None, state: ReasoningState) -> ReasoningBudget | None:
        tags = self.format.reasoning
        if limit is None:
            return None
        if tags is None:
            raise RequestError(
                "reasoning_budget: the chat template of this model marks no reasoning", param="reasoning_budget"
            )
        if state == "done":
            return None
        return ReasoningBudget(limit, tags, state, self.encode(tags.end, special=False), self.decode_markup)

    def raw_rows(self, prompt: str | Sequence[int]) -> Rows:
        """Rows of text or token ids as they are; text gets the special tokens that the tokenizer puts around any."""
        return make_rows(self.encode(prompt) if isinstance(prompt, str) else prompt, self.image_token, (), self.rule)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of text, with the special tokens that the tokenizer puts around any."""
        return self.tokenizer.encode(text, add_special_tokens=special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        if len(token_ids) <= SHORT:
            return self._decode_short(tuple(token_ids))
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_markup(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, with the special tokens that reasoning and tool calls are written with and no others."""
        if len(token_ids) <= SHORT:
            return self._decode_short_markup(tuple(token_ids))
        return self._decode_markup(token_ids)

    # Text comes token by token, and the same few tokens are decoded again and again.

    @cached_property
    def _decode_short(self) -> Callable[[tuple[int, ...]], str]:
        return lru_cache(1 << 14)(lambda ids: self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def _decode_short_markup(self) -> Callable[[tuple[int, ...]], str]:
        return lru_cache(1 << 14)(self._decode_markup)

    def _decode_markup(self, token_ids: Sequence[int]) -> str:
        dropped = self._dropped
        return self.tokenizer.decode([i for i in token_ids if i not in dropped], skip_special_tokens=False)

    @cached_property
    def _dropped(self) -> frozenset[int]:
        words = set(self.format.words)
        special = self.tokenizer.all_special_ids
        return frozenset(i for i in special if self.tokenizer.decode([i], skip_special_tokens=False) not in words)

    def piece(self, token_id: int) -> str:
        """The text of one token by itself, special tokens too."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)
