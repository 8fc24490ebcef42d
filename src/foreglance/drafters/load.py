"""Which drafters an engine has: what the target's own checkpoint brings, what needs no weights, and a second model.

A new kind of drafter is one file in this folder and one line here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from foreglance.cache.store import CacheStore
from foreglance.drafters.base import Drafter, NoDraft, check_pair, check_vocabulary
from foreglance.drafters.independent import IndependentDrafter
from foreglance.drafters.mtp import MtpDrafter
from foreglance.drafters.mtp_chain import ChainDrafter
from foreglance.drafters.ngram import NgramDrafter
from foreglance.drafters.shared_cache import SharedCacheDrafter
from foreglance.models import gemma4_assistant
from foreglance.models.base import Target
from foreglance.models.registry import (
    Loaded,
    auto_config,
    check_small_files,
    load_model,
    load_tokenizer,
    model_type_of,
)
from foreglance.models.weights import find_model, in_words, named
from foreglance.ops.base import Ops
from foreglance.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What a drafter is built into. `target_store` may be read by drafters without a cache of their own, never written;
    `capacity` is the budget of rows for a drafter's own store."""

    target: Target
    target_store: CacheStore
    capacity: int


DrafterFactory = Callable[[Surroundings], Drafter]


def make_drafters(around: Surroundings, second: DrafterFactory | None = None) -> dict[str, Drafter]:
    """Drafters by kind. `second` makes the drafter of a second model, see `load_second`."""
    drafters: list[Drafter] = [NoDraft(), NgramDrafter()]
    head = around.target.head
    if head is not None:
        check_pair(around.target.spec, head.spec)
        drafters.append((MtpDrafter if head.spec.num_modules == 1 else ChainDrafter)(head, around.capacity))
    if second is not None:
        drafters.append(second(around))
    return {drafter.kind: drafter for drafter in drafters}


def load_second(name: str, settings: Settings, target: Loaded, instrument: Callable[[Ops], Ops]) -> DrafterFactory:
    """A second model as the draft of `target`: an assistant that was made for it, or any supported text decoder with
    the same vocabulary. Whether they fit is checked before weights are read."""
    folder, spec = find_model(name), target.target.spec
    with in_words(named(folder)):
        check_small_files(folder)
        if model_type_of(folder) == gemma4_assistant.FAMILY:
            reader = gemma4_assistant.load(folder.name, folder, auto_config(folder), target.target)
            return lambda around: SharedCacheDrafter(reader, around.target_store)
        check_vocabulary(spec.name, target.tokenizer.get_vocab(), folder.name, load_tokenizer(folder).get_vocab())
    draft = load_model(name, settings, instrument, text_only=True).target
    if draft.spec.context < spec.context:
        log.warning(
            "draft %s holds %d rows, target %s %d: no drafts beyond them",
            draft.spec.name,
            draft.spec.context,
            spec.name,
            spec.context,
        )
    return lambda around: IndependentDrafter(draft, spec.vocab_size, around.capacity)
