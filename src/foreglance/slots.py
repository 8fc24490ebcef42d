"""The numbered places in which conversations run and stay afterwards, as people know them from other servers.

Owns which sequence has which number, what the conversation last finished there was, and its way to a file and back. The
rows lie in the prefix cache, which may give them up for others; a slot only knows what they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from foreglance.cache import files
from foreglance.cache.prefix import NO_DRAFT, PrefixCache
from foreglance.drafters.base import Drafter
from foreglance.models.base import ModelSpec
from foreglance.models.fingerprint import Origin
from foreglance.request import DraftReport, RequestError
from foreglance.sequence import Sequence

State = Literal["idle", "prefill", "decoding"]


@dataclass(frozen=True)
class SlotInfo:
    """What a slot holds. Counts in rows (a token or one image embedding) and tokens.

    rows         of the running sequence so far; of a finished conversation what another request can begin with
    prompt_rows  of the request, `image_rows` of them image rows; `cached_rows` were there before it came
    draft        who drafts or drafted, and why not; `draft_rows` are rows of its own
    generated    tokens of the answer; `steps` those of the target that gained them
    drafted, accepted  guesses by depth, from 1 on
    text         the conversation's text, if it was asked for
    """

    id: int
    state: State = "idle"
    request_id: str | None = None
    rows: int = 0
    prompt_rows: int = 0
    image_rows: int = 0
    cached_rows: int = 0
    draft: DraftReport | None = None
    draft_rows: int = 0
    generated: int = 0
    steps: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    text: str | None = None


def info_of(slot: int, sequence: Sequence, draft_rows: int) -> SlotInfo:
    """A running sequence's."""
    counters = sequence.counters
    deepest = max((depth + 1 for depth, n in enumerate(counters.drafted) if n), default=0)
    return SlotInfo(
        slot,
        "prefill" if sequence.in_prefill else "decoding",
        sequence.request.id,
        sequence.committed,
        sequence.num_prompt,
        sequence.rows.num_image_rows,
        counters.cached_rows,
        sequence.report,
        draft_rows,
        len(sequence.generated),
        counters.steps,
        tuple(counters.drafted[:deepest]),
        tuple(counters.accepted[:deepest]),
    )


@dataclass(frozen=True)
class SlotFile:
    """What was saved or restored."""

    rows: int
    num_bytes: int


@dataclass(frozen=True)
class Conversation:
    """A finished one: what its rows are (`Sequence.identities`), whose draft memory goes with them, and what was said
    of it at its end."""

    identities: np.ndarray
    key: str
    info: SlotInfo


class SlotTable:
    """`count` slots. A conversation that goes on gets the slot it had, if that is free."""

    def __init__(self, count: int):
        self._running: dict[int, int] = {}  # slot by sequence
        self._last: list[Conversation | None] = [None] * count
        self._used = [0] * count
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._last)

    def take(self, sequence: int, identities: np.ndarray) -> int:
        """Give a sequence whose prompt is these rows a free slot: the one whose conversation it goes on with, else one
        that is empty, else the least recently used."""
        taken = set(self._running.values())
        free = [slot for slot in range(len(self._last)) if slot not in taken]
        best = max(free, key=lambda slot: (self._shared(slot, identities), -self._used[slot], -slot))
        self._running[sequence] = best
        self._used[best] = next(self._clock)
        return best

    def _shared(self, slot: int, identities: np.ndarray) -> int:
        """Common first rows of a slot's conversation and a prompt, if they are most of that conversation."""
        last = self._last[slot]
        if last is None:
            return 0
        shared = common_prefix(last.identities, identities)
        return shared if 2 * shared >= len(last.identities) else 0

    def give_back(self, sequence: int, conversation: Conversation) -> None:
        """A sequence has ended."""
        slot = self._running.pop(sequence)
        self.put(slot, conversation)

    def slot_of(self, sequence: int) -> int | None:
        return self._running.get(sequence)

    def sequence_in(self, slot: int) -> int | None:
        return next((sequence for sequence, own in self._running.items() if own == slot), None)

    def conversation_in(self, slot: int) -> Conversation | None:
        return self._last[slot]

    def put(self, slot: int, conversation: Conversation | None) -> None:
        """What a slot holds from now on; None: nothing."""
        self._last[slot] = conversation
        self._used[slot] = 0 if conversation is None else next(self._clock)


class SlotKeeper:
    """Finished conversations of a table's slots: what is left of them, saving, restoring and forgetting them.

    Everything that is asked for in vain raises `RequestError`.
    """

    def __init__(
        self,
        table: SlotTable,
        prefixes: PrefixCache,
        spec: ModelSpec,
        drafters: Mapping[str, Drafter],
        origin: Origin | None,
        context: int,
    ):
        self._table, self._prefixes, self._context = table, prefixes, context
        self._spec, self._drafters, self._origin = spec, drafters, origin

    def info(self, slot: int) -> SlotInfo:
        """Of the conversation last finished in a slot."""
        last = self._table.conversation_in(slot)
        if last is None:
            return SlotInfo(slot)
        points = self._prefixes.path(last.identities, last.key)[1]
        return replace(last.info, id=slot, state="idle", rows=points[-1].rows if points else 0)

    def save(self, slot: int, path: Path) -> SlotFile:
        """Write a slot's conversation to a file, its draft included."""
        last = self._idle(slot)
        key, points = (NO_DRAFT, []) if last is None else self._prefixes.path(last.identities, last.key)
        if not points:
            raise RequestError(f"slot {slot} holds no rows to save", param="id_slot", code="slot_empty")
        try:
            return SlotFile(points[-1].rows, files.save(path, points, self._names(key), key))
        except files.NotWrittenError as error:
            raise RequestError(str(error), param="filename", code="slot_not_written") from error

    def restore(self, slot: int, path: Path) -> SlotFile:
        """Put a saved conversation where the next request that begins with it finds it."""
        self._idle(slot)
        try:
            key = files.read_key(path)
            points = files.load(path, self._layout(key))
        except files.SlotFileError as error:
            raise RequestError(str(error), param="filename", code="slot_file") from error
        self._prefixes.restore(points, key)
        identities = np.concatenate([point.identities for point in points])
        info = SlotInfo(slot, image_rows=int((identities < 0).sum()), draft_rows=points[-1].draft_rows)
        self._table.put(slot, Conversation(identities, key, info))
        return SlotFile(points[-1].rows, path.stat().st_size)

    def erase(self, slot: int) -> int:
        """Forget a slot's conversation, but for rows that others share; -> rows forgotten."""
        last = self._idle(slot)
        self._table.put(slot, None)
        return 0 if last is None else self._prefixes.erase(last.identities, last.key)

    def _idle(self, slot: int) -> Conversation | None:
        """What lies in a slot where nothing runs."""
        if not 0 <= slot < len(self._table):
            raise RequestError(
                f"there is no slot {slot}, only 0 to {len(self._table) - 1}", param="id_slot", code="slot_unknown"
            )
        if self._table.sequence_in(slot) is not None:
            raise RequestError(
                f"slot {slot} runs a request; wait until it has ended, or cancel it", param="id_slot", code="slot_busy"
            )
        return self._table.conversation_in(slot)

    def _names(self, key: str) -> dict[str, str]:
        """What a file of a conversation with this draft memory has in common with the engines that can use it."""
        names = {"family": self._spec.family}
        if self._origin is None:  # an engine put together by hand
            return names | {"weights": self._spec.name}
        return names | self._origin.names | (self._origin.draft_names if key.startswith("model/") else {})

    def _layout(self, key: str) -> files.Layout:
        drafter = next((one for one in self._drafters.values() if key in one.keys), None)
        if drafter is None and key != NO_DRAFT:
            raise files.SlotFileError(f"the file holds rows of draft {key!r}, which this engine does not have")
        stores = () if drafter is None else drafter.stores
        return files.Layout(
            self._names(key),
            (tuple(self._spec.caches), *(store.specs for store in stores)),
            self._spec.rule.axes,
            len(stores) if drafter is not None and drafter.wants_hidden else 0,
            self._spec.hidden_size,
            self._spec.vocab_size,
            self._context,
            self._prefixes.budget,
        )


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix of two int64 arrays."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
