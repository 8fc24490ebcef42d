"""The protocol of a drafter, and the check that a drafter and a target belong together."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from torch import Tensor

from foreglance.cache.prefix import Hit, Memory
from foreglance.cache.store import CacheStore
from foreglance.models.base import HeadSpec, ModelError, ModelSpec
from foreglance.sequence import Sequence


class Settled(NamedTuple):
    """A sequence after commit, as a drafter sees it.

    first_row  row index of the first row that this step committed
    hidden     the target's states of the committed rows [keep, hidden], which the next step may write over; None if the
               drafter does not want them
    depth      how many tokens to guess now; 0: only keep up
    """

    sequence: Sequence
    first_row: int
    hidden: Tensor | None
    depth: int


class Drafter(Protocol):
    """Guesses what the target will pick. "No drafter" is a drafter that guesses nothing.

    wants_hidden  whether `Settled.hidden` must be given
    reads_target  whether it reads the target's cache (then commit must come before propose: it always does)
    max_depth     the deepest guess that makes sense
    stores        its own caches, for integrity checks
    keys          of the memories that it can go on with
    """

    kind: str
    wants_hidden: bool
    reads_target: bool
    max_depth: int
    stores: tuple[CacheStore, ...]
    keys: tuple[str, ...]

    def key(self, sequence: Sequence) -> str | None:
        """Which memory this drafter needs to go on with a reused prefix; None: it needs none."""
        ...

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        """A sequence begins, perhaps on stored rows: with the draft's own, if this drafter has a `key`."""
        ...

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        """Catch up with what was committed and guess; -> guesses by sequence id, all sequences in one batch."""
        ...

    def remember(self, sequence: Sequence) -> Memory:
        """Its state of a sequence as it is now, for a checkpoint."""
        ...

    def retire(self, sequence: Sequence) -> None:
        """A sequence has ended, for whatever reason: give everything back."""
        ...


class Stateless:
    """What drafters share that keep nothing of a sequence."""

    stores: tuple[CacheStore, ...] = ()
    keys: tuple[str, ...] = ()

    def key(self, sequence: Sequence) -> str | None:
        return None

    def admit(self, sequence: Sequence, hit: Hit | None) -> None:
        pass

    def remember(self, sequence: Sequence) -> Memory:
        return Memory()

    def retire(self, sequence: Sequence) -> None:
        pass


class NoDraft(Stateless):
    """Drafts off."""

    kind = "none"
    wants_hidden = False
    reads_target = False
    max_depth = 0

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        return {}


def check_pair(target: ModelSpec, head: HeadSpec) -> None:
    """Refuse, in one sentence that names both sides, a head that cannot work with a target."""
    pairs = (
        ("family", target.family, head.family),
        ("vocabulary", target.vocab_size, head.vocab_size),
        ("hidden size", target.hidden_size, head.hidden_size),
        ("position axes", target.rule.axes, head.rule.axes),
    )
    for word, ours, theirs in pairs:
        if ours != theirs:
            raise ModelError(
                f"the draft head ({head.family}, {word} {theirs}) cannot draft for target {target.name} "
                f"({target.family}, {word} {ours}): the {word} must be equal"
            )


def check_vocabulary(target: str, ours: Mapping[str, int], draft: str, theirs: Mapping[str, int]) -> None:
    """Refuse, in one sentence that names both sides, a draft model whose token ids mean other tokens. Both sides are
    tokenizers' words with their ids; how far a model pads its vocabulary beyond them does not matter."""
    if ours == theirs:
        return
    ours_by_id, theirs_by_id = ({id: word for word, id in words.items()} for words in (ours, theirs))
    ids = sorted(ours_by_id.keys() | theirs_by_id.keys())
    first = next((id for id in ids if ours_by_id.get(id) != theirs_by_id.get(id)), ids[0])
    raise ModelError(
        f"{draft} ({len(theirs)} tokens, id {first} is {_word(theirs_by_id, first)}) cannot draft for target {target} "
        f"({len(ours)} tokens, id {first} is {_word(ours_by_id, first)}): their vocabularies must be equal"
    )


def _word(by_id: Mapping[int, str], id: int) -> str:
    return repr(by_id[id]) if id in by_id else "no token"
