"""Running measurements that decide depth: what rows cost on this machine, and how often guesses stand.

Touches nothing else. Numbers here change how fast an answer comes, never what it is.
"""

from __future__ import annotations

import math

FASTER, SLOWER = 0.3, 0.05  # shared machines stall: follow a fast sample quickly, a slow one reluctantly
STALL = 2.0  # and count no sample as more than so many times what was known: a stall may be a hundred short steps long
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 9.0


class CostCurve:
    """Seconds as a function of a small count (rows of a step, depth of a draft), learned as it goes.

    A count is believed after `ENOUGH` samples, beginning with the fastest of them: one stalled sample must not keep a
    depth from ever being tried again. Beyond the measured counts the curve goes on as a line. From a single count it is
    `proportional` (a draft of depth k is k forwards) or flat (rows of a step are nearly free until they are measured).
    """

    ENOUGH = 3

    def __init__(self, proportional: bool = False) -> None:
        self._proportional = proportional
        self._first: dict[int, list[float]] = {}
        self._seconds: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._seconds or self._first)

    def add(self, count: int, seconds: float) -> None:
        if count in self._seconds:
            old = self._seconds[count]
            self._seconds[count] = old + (FASTER if seconds < old else SLOWER) * (min(seconds, STALL * old) - old)
            return
        samples = self._first.setdefault(count, [])
        samples.append(seconds)
        if len(samples) >= self.ENOUGH:
            self._seconds[count] = min(self._first.pop(count))

    def knows_up_to(self, count: int) -> bool:
        """Whether `count` or less is believed, so that `at(count)` is no guess from dearer ones."""
        return any(known <= count for known in self._seconds)

    def at(self, count: int) -> float:
        """Measured, or on the line through the two nearest measured counts, and never more than what a larger count
        costs. Before anything is believed, the fastest sample."""
        if not self._seconds:
            return min((min(samples) for samples in self._first.values()), default=0.0)
        larger = min((seconds for known, seconds in self._seconds.items() if known > count), default=float("inf"))
        return min(self._on_curve(count), larger)

    def _on_curve(self, count: int) -> float:
        if count in self._seconds:
            return self._seconds[count]
        if len(self._seconds) == 1:
            ((known, seconds),) = self._seconds.items()
            return seconds * count / known if self._proportional else seconds
        left, right = self._neighbours(count)
        slope = max(0.0, (self._seconds[right] - self._seconds[left]) / (right - left))
        return max(0.0, self._seconds[left] + slope * (count - left))

    def _neighbours(self, count: int) -> tuple[int, int]:
        """The believed counts around `count`, or the two nearest on its one side."""
        below = sorted(c for c in self._seconds if c < count)
        above = sorted(c for c in self._seconds if c > count)
        if below and above:
            return below[-1], above[0]
        return (below[-2], below[-1]) if below else (above[0], above[1])


class Acceptance:
    """How often the guess at each depth stands, given that those before it stood. Old rounds fade."""

    def __init__(self, prior: Acceptance | None = None, fade: float = 0.95):
        self._prior = prior
        self._fade = fade
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
        weight = self._weight(depth)
        return (self._stood[depth - 1] + weight * prior) / (self._tried[depth - 1] + weight)

    def _weight(self, depth: int) -> float:
        """How many rounds the prior is worth: a few, so that one unlucky guess decides nothing; more if it has seen
        many rounds itself."""
        seen = 0.0 if self._prior is None else self._prior.tried(depth)
        return min(LEAST_WEIGHT + seen / 4, MOST_WEIGHT)

    def tried(self, depth: int) -> float:
        """Rounds, faded, that put a guess at `depth` to the test."""
        return self._tried[depth - 1] if depth <= len(self._tried) else 0.0

    def expected_tokens(self, depth: int) -> float:
        """Tokens gained by a step that verifies `depth` guesses: one and the run of guesses that stand."""
        chances = [math.prod(self.at(d) for d in range(1, upto + 1)) for upto in range(1, depth + 1)]
        return 1 + sum(chances)


class Alarm:
    """Notices a drafter whose first guesses hardly ever stand: nearly always a wrong pairing of states, positions or
    weights, and never an error by itself. Says so once."""

    ROUNDS, FLOOR = 100, 0.05

    def __init__(self, rounds: int = ROUNDS) -> None:
        self._rounds = rounds
        self._tried = 0
        self._stood = 0
        self._said = False

    @property
    def is_content(self) -> bool:
        """Enough guesses stood that the first `rounds` cannot give reason for a warning any more."""
        return self._stood >= self.FLOOR * self._rounds

    def add(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._tried += 1
            self._stood += accepted > 0

    def message(self, kind: str) -> str | None:
        """The warning, the first time that there is reason for it."""
        if self._said or self._tried < self._rounds or self._stood >= self.FLOOR * self._tried:
            return None
        self._said = True
        return (
            f"drafter {kind}: only {self._stood} of {self._tried} first guesses stood. The text is right all the same, "
            "but drafts cost time here; check that draft weights and target belong together, or switch drafts off"
        )
