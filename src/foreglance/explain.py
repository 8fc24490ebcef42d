"""Which rows a target and its draft hold for a prompt, and at which positions: the numbers behind the picture.

Asks `drafters.rows` and invents nothing. A column stands for a target row; a draft row stands in the column of the row
whose *input* it takes (it carries the target's state of the row before), so a draft has nothing in column 0 and what a
policy leaves out is a hole. A head of several modules has a track for each; module 2 takes inputs one row further on.
One column more stands for the first token of the answer. Draws nothing, no tensors.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

from foreglance.drafters.rows import RowMap
from foreglance.models.base import HeadSpec
from foreglance.prompt import Coordinates, PositionRule, Rows, spans_of
from foreglance.request import IMAGE_POLICIES, Request
from foreglance.sequence import Sequence

Input = Literal["token", "image", "placeholder"]

MEANING = {
    "target": "one row per token and per image cell",
    "see": "image embeddings, numbered by the family's rule",
    "skip": "no rows for images, positions stay consecutive",
    "placeholder": "the placeholder token in place of each image row",
    "gap": "no rows for images, the target's positions with a hole (measurements only)",
}


@dataclass(frozen=True)
class Cell:
    """A cache row: its index in its own cache, its position, and what its input is."""

    row: int
    position: Coordinates
    input: Input


@dataclass(frozen=True)
class Track:
    """The rows of one cache, a cell per column; None where the cache has no row. `meaning` says in words which."""

    name: str
    cells: tuple[Cell | None, ...]
    meaning: str

    @property
    def num_rows(self) -> int:
        """Rows of the prompt; the answer's is not counted."""
        return sum(cell is not None for cell in self.cells[:-1])


@dataclass(frozen=True)
class Block:
    """Columns [start, stop) of one image with its merged grid (height, width)."""

    start: int
    stop: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class Explanation:
    """All tracks over the same columns. `labels` are the tokens in words, the answer last."""

    labels: tuple[str, ...]
    blocks: tuple[Block, ...]
    tracks: tuple[Track, ...]
    axes: int

    @property
    def num_columns(self) -> int:
        return len(self.labels)

    def block_of(self, column: int) -> int | None:
        return next((i for i, block in enumerate(self.blocks) if block.start <= column < block.stop), None)


def explain(rows: Rows, labels: Many[str], rule: PositionRule, head: HeadSpec | None) -> Explanation:
    """The target's track and, if there is a head, one per policy and module. `labels` has one word per row."""
    sequence = _sequence(rows, rule)
    tracks = [_target(sequence)]
    if head is not None:
        modules = range(1, head.num_modules + 1)
        tracks += [_draft(sequence, policy, head, module) for policy in IMAGE_POLICIES for module in modules]
    return Explanation((*labels, "answer"), _blocks(rows), tuple(tracks), rule.axes)


def labels_of(rows: Rows, piece: Callable[[int], str]) -> list[str]:
    """Each row in words: "image", or its token as `piece` decodes it, with white space that can be seen and without
    control characters, which an SVG file must not hold."""
    return [
        "image" if is_image else visible(piece(int(token)))
        for token, is_image in zip(rows.token_ids, rows.is_image, strict=True)
    ]


def visible(text: str) -> str:
    shown = text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")
    return "".join(c for c in shown if unicodedata.category(c) != "Cc") or "∅"


def _sequence(rows: Rows, rule: PositionRule) -> Sequence:
    """The prompt as the drafters see it; nothing is ever generated from this one."""
    return Sequence(0, Request.from_prompt("rows are given"), rows, rule, frozenset(), lambda _: "", len(rows) + 1)


def _blocks(rows: Rows) -> tuple[Block, ...]:
    blocks, start = [], 0
    for span in spans_of(rows.image, rows.images):
        if span.grid is not None:
            blocks.append(Block(start, start + span.num_rows, span.grid))
        start += span.num_rows
    return tuple(blocks)


def _target(sequence: Sequence) -> Track:
    n = sequence.num_prompt
    positions, is_image = sequence.positions(0, n + 1), [*sequence.rows.is_image, False]
    cells = tuple(Cell(i, positions.at(i), "image" if is_image[i] else "token") for i in range(n + 1))
    return Track("target", cells, MEANING["target"])


def _draft(sequence: Sequence, policy: str, head: HeadSpec, module: int) -> Track:
    """Module 1 takes the next row's input, module 2 the one behind it, ...; the answer's first token stands in as 0."""
    n = sequence.num_prompt
    row_map = RowMap(sequence, policy, head.rule, head.position_of, head.placeholder, module)
    rows, cells = row_map.rows(0, max(0, n + 1 - module), (0,)), [None] * (n + 1)
    is_image = [*sequence.rows.is_image, False]
    for i, target_row in enumerate(rows.target_row):
        column = int(target_row) + module
        kind: Input = "token"
        if is_image[column]:
            kind = "image" if rows.is_image[i] else "placeholder"
        cells[column] = Cell(i, rows.positions.at(i), kind)
    if head.num_modules == 1:
        return Track(policy, tuple(cells), MEANING[policy])
    return Track(f"{policy}/{module}", tuple(cells), f"module {module}; {MEANING[policy]}")


def to_numbers(explanation: Explanation) -> dict:
    """The explanation as plain lists. `columns` are target rows; the last one is the answer's first."""
    return {
        "rows": explanation.num_columns - 1,
        "axes": explanation.axes,
        "labels": list(explanation.labels),
        "images": [{"start": b.start, "stop": b.stop, "grid": list(b.grid)} for b in explanation.blocks],
        "tracks": [
            {
                "name": track.name,
                "rows": track.num_rows,
                "columns": [column for column, cell in enumerate(track.cells) if cell is not None],
                "positions": [list(cell.position) for cell in track.cells if cell is not None],
                "inputs": [cell.input for cell in track.cells if cell is not None],
            }
            for track in explanation.tracks
        ],
    }


@dataclass(frozen=True)
class Slot:
    """Columns [start, stop) that are drawn as one: a column, or several that are left out. `block`: their image."""

    start: int
    stop: int
    block: int | None

    @property
    def is_elided(self) -> bool:
        return self.stop - self.start > 1

    def cells(self, track: Track) -> list[Cell]:
        """The rows that a track really has here."""
        return [cell for cell in track.cells[self.start : self.stop] if cell is not None]


def shorten(explanation: Explanation, text: int = 4, image: int = 2) -> list[Slot]:
    """Slots for all columns: of a long run the first and last `text` (`image`) columns, and one slot for the rest."""
    slots = []
    for start, stop, block in _runs(explanation):
        ends = text if block is None else image
        if stop - start <= 2 * ends + 1:
            slots += [Slot(i, i + 1, block) for i in range(start, stop)]
        else:
            slots += [Slot(i, i + 1, block) for i in range(start, start + ends)]
            slots.append(Slot(start + ends, stop - ends, block))
            slots += [Slot(i, i + 1, block) for i in range(stop - ends, stop)]
    return slots


def _runs(explanation: Explanation) -> Iterator[tuple[int, int, int | None]]:
    """Text and images in turn: (start, stop, index of the block or None)."""
    at = 0
    for index, block in enumerate(explanation.blocks):
        if at < block.start:
            yield at, block.start, None
        yield block.start, block.stop, index
        at = block.stop
    yield at, explanation.num_columns, None


def fold(slots: Many[Slot], widths: Many[int], room: int) -> list[list[Slot]]:
    """Break slots into lines of at most `room`, like words of a text; the slots of an image stay together.

    As few lines as `room` allows, and these about equally long.
    """
    words = list(_words(list(zip(slots, widths, strict=True))))
    lines = _fill(words, room)
    while room > 1 and len(closer := _fill(words, room - 1)) == len(lines):
        lines, room = closer, room - 1
    return lines


def _fill(words: Many[Many[tuple[Slot, int]]], room: int) -> list[list[Slot]]:
    lines: list[list[Slot]] = []
    left = 0
    for word in words:
        width = sum(w for _, w in word)
        if not lines or width > left:
            lines.append([])
            left = room
        lines[-1] += [slot for slot, _ in word]
        left -= width
    return lines


def _words(slots: Many[tuple[Slot, int]]) -> Iterator[list[tuple[Slot, int]]]:
    word: list[tuple[Slot, int]] = []
    for slot in slots:
        if word and (slot[0].block is None or slot[0].block != word[-1][0].block):
            yield word
            word = []
        word.append(slot)
    if word:
        yield word
