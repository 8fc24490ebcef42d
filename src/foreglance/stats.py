"""Running measurements that decide depth: what rows cost on this machine, and how often guesses stand.

Touches nothing else. Numbers here change how fast an answer comes, never what it is.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass, field

# Variances of logarithms. Between two samples the pace of the machine moves by two hundredths and one cost, against all
# others, by a thousandth; a cost that was just met may be off by a fifth.
PACE_MOVES, COST_MOVES, UNSURE = 4e-4, 1e-6, 0.04
LOW = 0.1  # the quantile of samples that is a cost: stalls, and caches that others emptied, come on top at any count
LEAST_SPREAD, MOST_SPREAD = 0.03, 0.5  # how far samples lie from that
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 9.0


@dataclass
class Pace:
    """How slow the machine is at present: the logarithm of what all costs are multiplied by, and its variance.

    Costs are compared with each other, so a machine that becomes twice as slow must change none of them: what they
    have in common goes in here. `spread` is how far samples lie from what was expected, which says how busy it is.
    """

    log: float = 0.0
    variance: float = 0.0
    spread: float = 0.1
    samples: int = 0


@dataclass
class _Cost:
    """The logarithm of seconds at pace 1, its variance, and the sample of the pace at which it was last measured."""

    log: float
    variance: float
    at: int
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = math.exp(self.log)

    def correct(self, log: float, pace: Pace) -> None:
        """Step towards a sample as one does to a quantile (a long way down, a short way up), and share the step out
        between pace and cost by how uncertain each is, as a Kalman filter of two states does."""
        self.variance = min(self.variance + COST_MOVES * (pace.samples - self.at), UNSURE)
        total = pace.variance + self.variance + pace.spread**2
        surprise = log - pace.log - self.log
        step = 2 * pace.spread * (LOW if surprise > 0 else LOW - 1)
        pace.spread += (max(LEAST_SPREAD, min(abs(surprise), MOST_SPREAD)) - pace.spread) / 30
        pace.log += pace.variance / total * step
        pace.variance *= 1 - pace.variance / total
        self.log += self.variance / total * step
        self.variance *= 1 - self.variance / total
        self.at, self.seconds = pace.samples, math.exp(self.log)


class CostCurve:
    """Seconds, at pace 1, as a function of a small count (rows of a step, depth of a draft), learned as it goes.

    A count is believed after some samples, beginning with the fastest of them: the first two runs of a shape are
    slow (one as it is, one while it is recorded), and one stalled sample must not keep a depth from ever being tried
    again. Later samples move it slowly: what moves all costs is the pace. Beyond the measured counts the curve goes on
    as a line. From a single count it is `proportional` (a draft of depth k is k forwards) or flat (rows of a step are
    nearly free until they are measured).
    """

    ENOUGH = 4

    def __init__(self, pace: Pace | None = None, proportional: bool = False) -> None:
        self._pace = Pace() if pace is None else pace
        self._proportional = proportional
        self._first: dict[int, list[float]] = {}
        self._costs: dict[int, _Cost] = {}
        self._known: list[int] = []  # the believed counts, ascending

    def __bool__(self) -> bool:
        return bool(self._costs or self._first)

    def collect(self, count: int, seconds: float) -> None:
        """A sample that is not looked at before `settle`."""
        self._first.setdefault(count, []).append(math.log(max(seconds, 1e-9)) - self._pace.log)

    def settle(self) -> None:
        """Believe what was sampled often enough; what lies between believed counts half, since few samples say little
        and a depth that looks dear by chance is not tried again."""
        known = self._known
        for count in [count for count, samples in self._first.items() if len(samples) >= self.ENOUGH]:
            samples = self._first.pop(count)
            log = min(samples)
            if known and known[0] < count < known[-1]:
                log = (log + math.log(max(self.at(count), 1e-9))) / 2
            self._costs[count] = _Cost(log, UNSURE / (len(samples) - self.ENOUGH + 1), self._pace.samples)
        self._known = sorted(self._costs)

    def add(self, count: int, seconds: float) -> None:
        pace = self._pace
        pace.samples += 1
        pace.variance += PACE_MOVES
        if count in self._costs:
            self._costs[count].correct(math.log(max(seconds, 1e-9)), pace)
            return
        self.collect(count, seconds)
        self.settle()

    def knows_up_to(self, count: int) -> bool:
        """Whether `count` or less is believed, so that `at(count)` is no guess from dearer ones."""
        return any(known <= count for known in self._costs)

    def at(self, count: int) -> float:
        """Measured, or on the line through the two nearest measured counts. Before anything is believed, the fastest
        sample."""
        known = self._costs.get(count)
        if known is not None:
            return known.seconds
        if not self._costs:
            return min((math.exp(min(samples)) for samples in self._first.values()), default=0.0)
        if len(self._costs) == 1:
            ((only, cost),) = self._costs.items()
            return cost.seconds * count / only if self._proportional else cost.seconds
        place = min(max(bisect(self._known, count), 1), len(self._known) - 1)
        left, right = self._known[place - 1 : place + 1]  # around the count, or the two nearest on its one side
        low, high = self._costs[left].seconds, self._costs[right].seconds
        return max(0.0, low + max(0.0, high - low) / (right - left) * (count - left))


class Acceptance:
    """How often the guess at each depth stands, given that those before it stood. Old rounds fade, at depths too that
    are not tried any more, which become like the one before them."""

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
        self._tried = [tried * self._fade for tried in self._tried]
        self._stood = [stood * self._fade for stood in self._stood]
        for depth in range(min(drafted, accepted + 1)):
            self._tried[depth] += 1
            self._stood[depth] += depth < accepted

    def chances(self, deepest: int) -> list[float]:
        """Probabilities at depths 1 to `deepest`; an untried depth is taken to be like the one before it, at most.

        The prior is worth a few rounds, so that one unlucky guess decides nothing; more if it has seen many itself.
        """
        prior, chances, last = None if self._prior is None else self._prior, [], 0.7
        expected = [] if prior is None else prior.chances(deepest)
        for i in range(deepest):
            before = last if prior is None else expected[i]
            if i < len(self._tried):
                weight = LEAST_WEIGHT if prior is None else min(LEAST_WEIGHT + prior.tried(i + 1) / 4, MOST_WEIGHT)
                last = (self._stood[i] + weight * before) / (self._tried[i] + weight)
            else:
                last = min(before, last) if i else before
            chances.append(last)
        return chances

    def at(self, depth: int) -> float:
        """Probability at `depth` (1 is the first)."""
        return self.chances(depth)[-1]

    def tried(self, depth: int) -> float:
        """Rounds, faded, that put a guess at `depth` to the test."""
        return self._tried[depth - 1] if depth <= len(self._tried) else 0.0

    def expected_tokens(self, depth: int) -> float:
        """Tokens gained by a step that verifies `depth` guesses: one and the run of guesses that stand."""
        expected, run = 1.0, 1.0
        for chance in self.chances(depth):
            run *= chance
            expected += run
        return expected


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
