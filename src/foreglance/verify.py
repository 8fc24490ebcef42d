"""Drafts against picks. Pure: touches no model, no cache and no randomness.

A guess stands when it equals the target's own pick for that row (picks are coupled, see `sampling`), so what is
emitted is always the target's own text and the drafter can only change how many rows a step keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foreglance.request import LogProb


class Verdict(NamedTuple):
    """What a step gained for one sequence.

    `keep` rows of the step stay in the cache; `tokens` are what follows them: first the `accepted` drafts, then, unless
    the text ended before it, one new token of the target. `drafted` guesses were put to the test. `logprobs` are those
    of `tokens`, if they were asked for.
    """

    keep: int
    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[LogProb, ...] = ()

    def cut(self, num_tokens: int) -> Verdict:
        """The same verdict if the text ends with its first `num_tokens` tokens: the last one's own row is not kept, and
        drafts behind it were not put to the test."""
        if num_tokens >= len(self.tokens):
            return self
        return Verdict(
            num_tokens,
            self.tokens[:num_tokens],
            num_tokens,
            min(self.accepted, num_tokens),
            self.logprobs[:num_tokens],
        )


def verify(drafts: Sequence[int], picks: Sequence[int], logprobs: Sequence[LogProb] = ()) -> Verdict:
    """drafts [k], picks [<= k+1] -> Verdict.

    `picks[i]` is the target's pick after row i, where row 0 is the last token and row i >= 1 is draft i. Picks may stop
    after the first one that refutes a draft: later rows cannot stand. `logprobs` are those of the picks, or none.
    """
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == picks[num_accepted]:
        num_accepted += 1
    stop = num_accepted + 1
    return Verdict(stop, tuple(picks[:stop]), len(drafts), num_accepted, tuple(logprobs[:stop]))
