"""Which token ids are content words of the made-up scenes: what only the picture can tell."""

from __future__ import annotations

from foreglance.bench.scenes import content_words
from foreglance.engine import Engine


def content_tokens(engine: Engine) -> frozenset[int]:
    """Ids whose text, without spaces and case, is a content word or a piece of a written one."""
    words = {word.lower() for word in content_words()}
    texts = ((token, engine.decode([token]).strip().lower()) for token in range(engine.target.spec.vocab_size))
    return frozenset(token for token, text in texts if text in words)
