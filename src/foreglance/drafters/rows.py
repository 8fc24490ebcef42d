"""Target rows to draft rows: the one place that knows what a policy means.

A draft head's row for target row t carries (target state of row t, input of row t + 1). If that input is an image row:

    see           its image embedding, numbered by the family's rule over the draft's own rows
    placeholder   the placeholder token's embedding, numbered as in `see` (what other engines feed)
    skip          no row; the draft's positions stay consecutive
    gap           no row, but the target's positions, with a hole (for measurements only)

One image of four rows (M-RoPE, 2 x 2) after three tokens, first axis:

    target   0 1 2 [3 3 3 3] 5 6 7
    see        0 1 [2 2 2 2] 4 5 6      inputs of rows 1.., one row per target row
    skip       0 1           2 3 4
    gap        1 2           5 6 7

A chained module's row carries an input further on: module i's the input of row t + 1 + i (`shift` 1 + i). It needs the
state of the module before at that row, so without image rows it has a row only if no input up to its own is one.

Touches no weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from foreglance.prompt import PositionRule, Positions
from foreglance.sequence import Sequence


@dataclass(frozen=True)
class DraftRows:
    """Rows for the head: `target_row` [n] says whose hidden state each carries; `in_image` bool [n] is true where a row
    is numbered as part of an image, also if a placeholder stands in for it; the rest is as in `Rows`."""

    target_row: np.ndarray
    token_ids: np.ndarray
    image: np.ndarray
    offset: np.ndarray
    positions: Positions
    in_image: np.ndarray

    def __len__(self) -> int:
        return len(self.target_row)

    @property
    def is_image(self) -> np.ndarray:
        return self.image >= 0


class RowMap:
    """The mapping for one sequence under one policy: row t carries the input of row t + `shift`."""

    def __init__(
        self, sequence: Sequence, policy: str, rule: PositionRule, position_of: str, placeholder: int, shift: int = 1
    ):
        self.shift = shift
        self._sequence = sequence
        self._policy = policy
        self._position_of = position_of
        self._placeholder = placeholder
        self._axes = rule.axes
        self._kept = self._keep(sequence.rows.is_image, shift if policy in ("skip", "gap") else 0)
        self._positions = self._number(rule, position_of)
        self._next = self._after(rule)
        self._before = np.concatenate([[0], np.cumsum(self._kept)])  # draft rows of target rows [0, t)

    @staticmethod
    def _keep(is_image: np.ndarray, steps: int) -> np.ndarray:
        """bool: which of the prompt's rows but its last have no image among their next `steps` inputs."""
        kept = np.ones(len(is_image) - 1, bool)
        for step in range(1, min(steps, len(is_image)) + 1):
            kept[: len(is_image) - step] &= ~is_image[step:]
        return kept

    def _number(self, rule: PositionRule, position_of: str) -> Positions:
        """Positions of the kept prompt rows, in the draft's own space (policy `gap`: in the target's)."""
        kept, first = self._kept, self.shift
        if self._policy == "skip":
            return Positions.run(0, int(kept.sum()), rule.axes)
        if position_of == "hidden":  # the last prompt row is numbered as itself, whatever its input will be
            kept, first = np.append(kept, True), 0
        coords = self._sequence.positions(first, first + len(kept)).coords
        return Positions(coords[:, kept] if self._policy == "gap" else coords - coords[:1, :1])

    def _after(self, rule: PositionRule) -> int:
        """The coordinate of the first row behind those of `_number`."""
        ahead = self.shift - 1 if self._position_of == "input" else 0
        behind = rule.following(self._sequence.rows.positions.at(-1)) + ahead  # in the target's positions
        if not len(self._positions):
            return behind if self._policy == "gap" else 0
        hole = 0
        if self._policy == "gap" and self._position_of == "input":  # an image at the prompt's end leaves one, too
            last_input = int(np.flatnonzero(self._kept)[-1]) + self.shift
            hole = behind - rule.following(self._sequence.positions(last_input, last_input + 1).at(0))
        return rule.following(self._positions.at(-1)) + hole

    def count(self, target_rows: int) -> int:
        """Draft rows for target rows [0, target_rows)."""
        prompt = min(target_rows, len(self._kept))
        return int(self._before[prompt]) + target_rows - prompt

    def is_behind_the_prompt(self, start: int) -> bool:
        """Whether row `start` and all later ones are rows of generated tokens, one coordinate apart."""
        return start > len(self._kept)

    def coordinate(self, draft_row: int) -> int:
        """Of a draft row behind the prompt, on every axis."""
        return self._next + draft_row - len(self._positions)

    def rows(self, start: int, stop: int, guesses: Many[int] = ()) -> DraftRows:
        """Draft rows for target rows [start, stop), whose inputs start + shift .. stop + shift - 1 must be known, or
        guessed: `guesses` are taken as the tokens behind the known ones."""
        if self.is_behind_the_prompt(start) and not guesses:
            return self._behind_the_prompt(start, stop)
        token_ids, image, offset = self._inputs(start + self.shift, stop + self.shift, guesses)
        kept = np.ones(stop - start, bool)
        in_prompt = max(0, min(stop, len(self._kept)) - start)
        kept[:in_prompt] = self._kept[start : start + in_prompt]
        in_image = image >= 0 if self._position_of == "input" else self._inputs(start, stop, guesses)[1] >= 0
        if self._policy == "placeholder":
            token_ids = np.where(image >= 0, self._placeholder, token_ids)
            image = np.full_like(image, -1)
        return DraftRows(
            np.arange(start, stop)[kept],
            token_ids[kept],
            image[kept],
            offset[kept],
            self.positions(self.count(start), self.count(stop)),
            in_image[kept],
        )

    def _behind_the_prompt(self, start: int, stop: int) -> DraftRows:
        """Rows of generated tokens alone, which every policy keeps."""
        token_ids, image, offset = self._sequence.inputs(start + self.shift, stop + self.shift)
        positions = self.positions(self.count(start), self.count(stop))
        return DraftRows(np.arange(start, stop), token_ids, image, offset, positions, np.zeros(len(image), bool))

    def _inputs(self, start: int, stop: int, guesses: Many[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, image indices and offsets of rows [start, stop)."""
        known = self._sequence.known
        certain = self._sequence.inputs(min(start, known), min(stop, known))
        if stop <= known:
            return certain
        assumed = np.array(guesses[max(start - known, 0) : stop - known], np.int64)
        fill = np.zeros(len(assumed), np.int64)
        return tuple(np.concatenate(pair) for pair in zip(certain, (assumed, fill - 1, fill), strict=True))

    def positions(self, start: int, stop: int) -> Positions:
        """Positions of draft rows [start, stop), prompt rows and those behind it."""
        known = len(self._positions)
        pieces = []
        if start < known:
            pieces.append(self._positions.part(start, min(stop, known)))
        if stop > known:
            first = max(start, known)
            pieces.append(Positions.run(self._next + first - known, stop - first, self._axes))
        return Positions.join(pieces) if pieces else Positions.run(0, 0, self._axes)
