"""Who runs in a step, with how many rows, and how deep each sequence drafts. No tensors, no logits, no text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from foreglance.request import Depth
from foreglance.sequence import Sequence
from foreglance.stats import Acceptance, CostCurve

AUTO_DEEPEST = 8
PLAIN_STEPS = 8  # at most, to learn what a step without drafts costs
FIRST_PAUSE, LONGEST_PAUSE = 64, 512  # steps between two probes while drafting does not pay


@dataclass(frozen=True)
class Work:
    """Rows [start, stop) of a sequence in this step. `chunk`: prompt rows; else the last row that is known and drafts.

    `at_border`: a chunk that would end here whatever the prompt goes on with.
    """

    sequence: Sequence
    start: int
    stop: int
    chunk: bool
    at_border: bool = False


class Costs:
    """What a step costs here: seconds of the target by few rows, seconds of a drafter by depth. Engine-wide."""

    def __init__(self) -> None:
        self.target = CostCurve()
        self.drafter: dict[str, CostCurve] = {}
        self.acceptance: dict[str, Acceptance] = {}

    def of(self, kind: str) -> CostCurve:
        return self.drafter.setdefault(kind, CostCurve(proportional=True))

    def prior(self, kind: str) -> Acceptance:
        return self.acceptance.setdefault(kind, Acceptance(fade=0.99))


@dataclass
class DepthControl:
    """The depth of one sequence: fixed, or as deep as pays.

    Auto compares tokens per second for each depth, from this sequence's acceptance and this machine's costs. It begins
    at the depth that other sequences reached (1 if there were none) and may double it whenever all guesses stood. When
    no depth pays it drafts nothing and probes again after a pause that doubles, so that text which does not draft costs
    next to nothing.
    """

    wanted: Depth
    kind: str
    deepest: int
    costs: Costs
    acceptance: Acceptance = field(init=False)
    pause: int = FIRST_PAUSE
    resting: int = 0
    plain: int = 0
    ceiling: int = field(init=False)

    def __post_init__(self) -> None:
        prior = self.costs.prior(self.kind)
        self.acceptance = Acceptance(prior)
        self.ceiling = max(1, round(prior.expected_tokens(AUTO_DEEPEST) - 1)) if prior else 1

    @property
    def is_off(self) -> bool:
        """A probe between two pauses does not end it."""
        return self.wanted == "auto" and self.pause > FIRST_PAUSE

    def learn(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.acceptance.add(drafted, accepted)
            self.costs.prior(self.kind).add(drafted, accepted)
        if drafted and accepted == drafted >= self.ceiling:
            self.ceiling = min(2 * self.ceiling, AUTO_DEEPEST)

    def next(self, num_running: int, wanted_tokens: int) -> int:
        """Depth of the next round: never beyond what may still be generated."""
        limit = max(0, min(self.deepest, wanted_tokens - 1))
        if self.wanted != "auto":
            return min(self.wanted, limit)
        if not self.costs.target.knows_up_to(num_running) and self.plain < PLAIN_STEPS:
            self.plain += 1
            return 0
        if self.resting:
            self.resting -= 1
            return 0 if self.resting else min(1, limit)
        best = max(range(min(limit, self.ceiling) + 1), key=lambda depth: self._rate(depth, num_running))
        if best == 0 and limit:
            self.resting, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
        elif best:
            self.pause = FIRST_PAUSE
        return best

    def _rate(self, depth: int, num_running: int) -> float:
        seconds = self.costs.target.at(num_running * (1 + depth))
        if depth:
            seconds += self.costs.of(self.kind).at(depth)
        return self.acceptance.expected_tokens(depth) / max(seconds, 1e-9)


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
