"""Running measurements that decide depth: what rows cost on this machine, and how often guesses stand.

Touches nothing else. Numbers here change how fast an answer comes, never what it is.
"""

from __future__ import annotations

import math

FASTER, SLOWER = 0.3, 0.05  # shared machines stall: follow a fast sample quickly, a slow one reluctantly


class CostCurve:
    """Seconds as a function of a small count (rows of a step, depth of a draft), learned as it goes."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def add(self, count: int, seconds: float) -> None:
        old = self._seconds.get(count)
        if old is None:
            self._seconds[count] = seconds
        else:
            self._seconds[count] = old + (FASTER if seconds < old else SLOWER) * (seconds - old)

    def at(self, count: int) -> float:
        """Measured, or interpolated between the nearest measured counts; beyond them, flat on few samples (so that a
        deeper draft is tried before it is judged)."""
        if count in self._seconds:
            return self._seconds[count]
        below = max((c for c in self._seconds if c < count), default=None)
        above = min((c for c in self._seconds if c > count), default=None)
        if below is None and above is None:
            return 0.0
        if below is None or above is None:
            return self._seconds[above if below is None else below]
        share = (count - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])


class Acceptance:
    """How often the guess at each depth stands, given that those before it stood. Old rounds fade."""

    def __init__(self, prior: Acceptance | None = None, fade: float = 0.95, weight: float = 2.0):
        self._prior = prior
        self._fade = fade
        self._weight = weight
        self._tried: list[float] = []
        self._stood: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._tried)

    def add(self, drafted: int, accepted: int) -> None:
        while len(self._tried) < drafted:
            self._tried.append(0.0)
            self._stood.append(0.0)
        for depth in range(min(drafted, accepted + 1)):
            self._tried[depth] = self._tried[depth] * self._fade + 1
            self._stood[depth] = self._stood[depth] * self._fade + (depth < accepted)

    def at(self, depth: int) -> float:
        """Probability at `depth` (1 is the first); an untried depth is taken to be like the one before it."""
        prior = self._prior.at(depth) if self._prior is not None else (self.at(depth - 1) if depth > 1 else 0.7)
        if depth > len(self._tried):
            return min(prior, self.at(depth - 1)) if depth > 1 else prior
        return (self._stood[depth - 1] + self._weight * prior) / (self._tried[depth - 1] + self._weight)

    def expected_tokens(self, depth: int) -> float:
        """Tokens gained by a step that verifies `depth` guesses: one and the run of guesses that stand."""
        chances = [math.prod(self.at(d) for d in range(1, upto + 1)) for upto in range(1, depth + 1)]
        return 1 + sum(chances)


class Alarm:
    """Notices a drafter whose first guesses hardly ever stand: nearly always a wrong pairing of states, positions or
    weights, and never an error by itself. Says so once."""

    ROUNDS, FLOOR = 100, 0.05

    def __init__(self) -> None:
        self._tried = 0
        self._stood = 0
        self._said = False

    def add(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._tried += 1
            self._stood += accepted > 0

    def message(self, kind: str) -> str | None:
        """The warning, the first time that there is reason for it."""
        if self._said or self._tried < self.ROUNDS or self._stood >= self.FLOOR * self._tried:
            return None
        self._said = True
        return (
            f"drafter {kind}: only {self._stood} of {self._tried} first guesses stood. The text is right all the same, "
            "but drafts cost time here; check that draft weights and target belong together, or switch drafts off"
        )
