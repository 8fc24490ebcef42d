"""Which drafters an engine has: what the target's own checkpoint brings, what needs no weights, and a second model.

A new kind of drafter is one file in this folder and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Drafter, NoDraft, check_pair
from foreglance.drafters.mtp import MtpDrafter
from foreglance.drafters.ngram import NgramDrafter
from foreglance.models.base import Target


@dataclass(frozen=True)
class Surroundings:
    """What a drafter is built into. `target_store` may be read by drafters without a cache of their own, never written;
    `capacity` is the budget of rows for a drafter's own store."""

    target: Target
    target_store: CacheStore
    capacity: int


DrafterFactory = Callable[[Surroundings], Drafter]


def make_drafters(around: Surroundings, second: DrafterFactory | None = None) -> dict[str, Drafter]:
    """Drafters by kind. `second` makes the drafter of a model that was named with `--draft MODEL`."""
    drafters: list[Drafter] = [NoDraft(), NgramDrafter()]
    head = around.target.head
    if head is not None:
        check_pair(around.target.spec, head.spec)
        drafters.append(MtpDrafter(head, around.capacity))
    if second is not None:
        drafters.append(second(around))
    return {drafter.kind: drafter for drafter in drafters}
