"""The toy family with a chain of draft modules, one for each depth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from foreglance.models.base import HeadSpec
from support.toy import HIDDEN, IMAGE, VOCAB, ToyHead, ToyTarget

KINDS = (("full",), ("sliding",), ("full", "sliding", "recurrent"))


class ToyChain:
    """Modules with weights of their own; each is a `ToyHead`, which takes its input's share of the next token."""

    def __init__(self, target: ToyTarget, kinds: Sequence[Sequence[str]], position_of: str):
        generator = torch.Generator().manual_seed(7)
        self.modules = tuple(ToyHead(target, own, generator, position_of) for own in kinds)
        caches = tuple(cache for module in self.modules for cache in module.spec.caches)
        rule = target.spec.rule
        self.spec = HeadSpec("toy", VOCAB, HIDDEN, rule, caches, len(kinds), position_of, IMAGE)


@lru_cache
def chained_target(rule, kinds=KINDS, position_of="input", **options) -> ToyTarget:
    target = ToyTarget(rule=rule, position_of=position_of, **options)
    target.head = ToyChain(target, kinds, position_of)
    return target
