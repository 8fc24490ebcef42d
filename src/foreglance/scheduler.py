"""Who runs in a step, with how many rows, and how deep each sequence drafts. No tensors, no logits, no text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from foreglance.request import Depth
from foreglance.sequence import Sequence
from foreglance.stats import Acceptance, CostCurve, Pace

AUTO_DEEPEST = 8
PLAIN_STEPS = 8  # at most, to learn what a step without drafts costs
FIRST_PAUSE, LONGEST_PAUSE = 8, 512  # steps between two probes of a sequence while drafting does not pay
ALLOWANCE, MOST_PROBES = 0.01, 4  # share of resting steps that may go to probes; as many may be saved up
A_ROW = 0.2  # of a plain step: what one row more costs, about
STAYS = 0.98  # of plain speed, by estimates: a sequence that drafts goes on at this
HOLDS = 4  # rounds that a depth is kept for while first guesses stand


class Work(NamedTuple):
    """Rows [start, stop) of a sequence in this step. `chunk`: prompt rows; else the last row that is known and drafts.

    `at_border`: a chunk that would end here whatever the prompt goes on with.
    """

    sequence: Sequence
    start: int
    stop: int
    chunk: bool
    at_border: bool = False

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def decodes(self) -> bool:
        """Whether its rows are generated tokens and guesses."""
        return not self.chunk and self.start >= self.sequence.num_prompt


class Costs:
    """What a step costs here: seconds of the target by few rows, of a drafter by its sequences and depth. Engine-wide.

    `tour`: depths that sequences go through, whatever pays, so that costs are known (`Engine` does so at load).
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.target = CostCurve(self.pace)
        self.drafter: dict[tuple[str, int], CostCurve] = {}
        self.acceptance: dict[str, Acceptance] = {}
        self.probes: dict[str, Probes] = {}
        self.tour: deque[int] = deque()

    def add_step(self, num_rows: int, seconds: float) -> None:
        """A step without prompt chunks, and without what drafters took in it."""
        if self.tour:
            self.target.collect(num_rows, seconds)
        else:
            self.target.add(num_rows, seconds)

    def add_draft(self, kind: str, num_sequences: int, depth: int, seconds: float, is_steady: bool) -> None:
        """Guesses down to `depth`. Not `is_steady`: a sequence drafted less in the round before, or not at all, so
        that its drafter had more rows to catch up with."""
        curve = self._drafter(kind, num_sequences)
        if is_steady and self.tour:
            curve.collect(depth, seconds)
        elif is_steady:
            curve.add(depth, seconds)
        elif plain := self.target.at(1) * math.exp(self.pace.log):
            self.probing(kind).cost(seconds / plain + A_ROW)

    def _drafter(self, kind: str, num_sequences: int) -> CostCurve:
        return self.drafter.setdefault((kind, num_sequences), CostCurve(self.pace, proportional=True))

    def round(self, kind: str, num_sequences: int, depth: int) -> float:
        """Seconds, at pace 1, of a round in which every sequence drafts to `depth`."""
        target = self.target.at(num_sequences * (1 + depth))
        if not depth:
            return target
        curve, share = self._drafter(kind, num_sequences), 1
        if not curve and num_sequences > 1:
            curve, share = self._drafter(kind, 1), num_sequences
        return target + share * curve.at(depth)

    def toured(self) -> Costs:
        """These costs at the end of a tour."""
        self.tour.clear()
        for curve in (self.target, *self.drafter.values()):
            curve.settle()
        return self

    def prior(self, kind: str) -> Acceptance:
        return self.acceptance.setdefault(kind, Acceptance(fade=0.98))

    def probing(self, kind: str) -> Probes:
        if kind not in self.probes:
            self.probes[kind] = Probes()
        return self.probes[kind]


@dataclass
class Probes:
    """What sequences may spend, together, on seeing whether a text drafts by now: a share of the steps that they rest.

    In plain steps: `saved` so far, and the `price` of the last probe.
    """

    saved: float = 1.0
    price: float = 0.5

    def rest(self) -> None:
        self.saved = min(self.saved + ALLOWANCE, MOST_PROBES * self.price)

    def pay(self) -> None:
        self.saved -= self.price

    def cost(self, steps: float) -> None:
        self.price += (min(steps, 2 * self.price) - self.price) / 2


@dataclass
class DepthControl:
    """The depth of one sequence: fixed, or as deep as pays.

    Auto compares tokens per second for each depth, from this sequence's acceptance and this machine's costs. It begins
    at the depth that other sequences reached (1 if there were none) and may double it whenever all guesses stood. When
    no depth pays it rests, and probes after pauses that double, as long as the probes of all sequences stay within
    their allowance: text that does not draft costs next to nothing, be it one long answer or many short ones. A probe
    goes on while its guesses stand.

    rested   steps since no depth pays, probes among them; the next probe is when there were `probe_at`
    drafted  rounds since the last rest
    plain    steps without drafts to learn what they cost
    ceiling  the deepest guess by now
    """

    wanted: Depth
    kind: str
    deepest: int
    costs: Costs
    acceptance: Acceptance = field(init=False)
    probes: Probes = field(init=False)
    rested: int = 0
    probe_at: int = 0
    drafted: int = 0
    depth: int = 0
    is_lucky: bool = False
    plain: int = 0
    ceiling: int = field(init=False)

    def __post_init__(self) -> None:
        prior = self.costs.prior(self.kind)
        self.acceptance, self.probes = Acceptance(prior), self.costs.probing(self.kind)
        self.ceiling = max(1, round(prior.expected_tokens(AUTO_DEEPEST) - 1)) if prior else 1

    @property
    def asks_for_costs(self) -> bool:
        """Whether this step's cost would tell it something. At rest every eighth does: to learn costs time, too."""
        return self.wanted == "auto" and self.deepest > 0 and not (self.rested & 7)

    @property
    def is_off(self) -> bool:
        """A probe between two pauses does not end it."""
        return self.wanted == "auto" and self.rested > FIRST_PAUSE

    def learn(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.is_lucky = accepted > 0
        self.drafted += 1
        self.acceptance.add(drafted, accepted)
        self.costs.prior(self.kind).add(drafted, accepted)
        if accepted == drafted >= self.ceiling:
            self.ceiling = min(2 * self.ceiling, AUTO_DEEPEST)

    def next(self, num_running: int, wanted_tokens: int) -> int:
        """Depth of the next round: never beyond what may still be generated."""
        limit = max(0, min(self.deepest, wanted_tokens - 1))
        if self.wanted != "auto" or not limit:
            return limit if self.wanted == "auto" else min(self.wanted, limit)
        if self.rested and not self.is_lucky and not self._may_probe:  # to decide costs time, too
            return self._rest()
        if self.costs.tour:
            return min(self.costs.tour.popleft(), limit)
        if not self.costs.target.knows_up_to(num_running) and self.plain < PLAIN_STEPS:
            self.plain += 1
            return 0
        if self.depth and self.is_lucky and self.drafted % HOLDS:
            return min(self.depth, limit)
        best, pays = self._best(num_running, min(limit, self.ceiling))
        if not pays:
            self.depth = 0
            return best if self._probes(num_running) else self._rest()
        if self.rested:
            self.rested, self.probe_at, self.drafted = 0, FIRST_PAUSE, 0
        self.depth = best
        return best

    def _rest(self) -> int:
        self.rested += 1
        self.probes.rest()
        return 0

    @property
    def _may_probe(self) -> bool:
        return self.rested >= self.probe_at and (self._is_free or self.probes.saved >= self.probes.price)

    @property
    def _is_free(self) -> bool:
        """The first probe after drafts that paid: a few unlucky guesses look like a change of text."""
        return self.probe_at > 0 and self.drafted >= HOLDS

    def _probes(self, num_running: int) -> bool:
        """Whether a sequence for which no depth pays drafts all the same: in a probe, and while its guesses stand."""
        if self.rested and self.is_lucky:
            self.is_lucky = False
            plain, one = (self.costs.round(self.kind, num_running, depth) for depth in (0, 1))
            return 2 * plain > one
        if not self._may_probe:
            return False
        if not self._is_free:
            self.probes.pay()
        self.drafted, self.rested = 0, self.rested + 1
        self.probe_at = self.rested + min(max(FIRST_PAUSE, self.rested), LONGEST_PAUSE)
        return True

    def _best(self, num_running: int, deepest: int) -> tuple[int, bool]:
        """The depth of most tokens per second among those above 0, and whether that is more than without drafts."""
        best, most, expected, run = 1, 0.0, 1.0, 1.0
        for depth, chance in enumerate(self.acceptance.chances(deepest), 1):
            run *= chance
            expected += run
            rate = expected / max(self.costs.round(self.kind, num_running, depth), 1e-9)
            if rate > most:
                best, most = depth, rate
        plain = self.costs.round(self.kind, num_running, 0)
        return best, most * plain > (1.0 if self.rested else STAYS)


class Scheduler:
    """First come, first served over `slots`. A step takes every decoding sequence and one prompt chunk."""

    def __init__(self, slots: int, grid: int, whole_images: bool):
        self._slots, self._grid, self._whole_images = slots, grid, whole_images
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots; -> the new ones."""
        fresh = []
        while self._waiting and len(self._running) < self._slots:
            fresh.append(self._waiting.popleft())
            self._running.append(fresh[-1])
        return fresh

    def pick(self) -> list[Work]:
        """Rows of this step. Which chunk a prompt row falls in depends on the rows before it, not on who else runs."""
        ready = [s for s in self._running if not self.has_chunks(s)]
        work = [Work(s, s.committed, s.committed + 1 + len(s.draft), False) for s in ready]
        prefill = next((s for s in self._running if self.has_chunks(s)), None)
        if prefill is not None:
            border = prefill.next_border(self._grid, self._whole_images)
            end = prefill.chunks_end(self._whole_images)
            work.append(Work(prefill, prefill.prefilled, min(border, end), True, border <= end))
        return work

    def has_chunks(self, sequence: Sequence) -> bool:
        """Whether a sequence has prompt chunks still to compute."""
        return sequence.prefilled < sequence.chunks_end(self._whole_images)

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self._running, *self._waiting) if s.request.id == request_id), None)

    def remove(self, gone: Iterable[Sequence]) -> None:
        ids = {s.id for s in gone}
        self._running = [s for s in self._running if s.id not in ids]
        self._waiting = deque(s for s in self._waiting if s.id not in ids)
