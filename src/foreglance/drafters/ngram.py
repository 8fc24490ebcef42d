"""Prompt look-up: guesses that what followed the last tokens before follows them again. No weights, no cache.

(Saxena, "Prompt Lookup Decoding", 2023.) An image row matches nothing, so a guess never runs over one.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from foreglance.drafters.base import Settled, Stateless
from foreglance.request import MAX_DEPTH
from foreglance.sequence import Sequence

LONGEST = 4
SHORTEST = 2
IMAGE = -1


class NgramDrafter(Stateless):
    """Looks up the latest earlier occurrence of the last `LONGEST` to `SHORTEST` tokens."""

    kind = "ngram"
    wants_hidden = False
    reads_target = False
    max_depth = MAX_DEPTH

    def propose(self, settled: Many[Settled]) -> dict[int, tuple[int, ...]]:
        wanted = [one for one in settled if one.depth and not one.sequence.in_prefill]
        return {one.sequence.id: look_up(history(one.sequence), one.depth) for one in wanted}


def history(sequence: Sequence) -> np.ndarray:
    """int64: every known token, `IMAGE` for image rows."""
    prompt = np.where(sequence.rows.is_image, IMAGE, sequence.rows.token_ids)
    return np.concatenate([prompt, np.array(sequence.generated, np.int64)])


def look_up(tokens: np.ndarray, depth: int) -> tuple[int, ...]:
    """tokens int64 [n] -> up to `depth` guesses; empty if the last tokens did not occur before."""
    for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        tail = tokens[-size:]
        if (tail == IMAGE).any():
            continue
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        found = np.flatnonzero((windows == tail).all(axis=1))
        if len(found):
            after = tokens[found[-1] + size :][:depth]
            stop = np.flatnonzero(after == IMAGE)
            return tuple(int(t) for t in (after[: stop[0]] if len(stop) else after))
    return ()
