"""An explanation as lines of text, folded to the width of a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from foreglance.explain import Cell, Explanation, Slot, Track, fold, shorten

LABEL_WIDTH = 7
INPUT_STYLES = {"token": "", "image": "green", "placeholder": "yellow"}
AXIS_NAMES = {1: ("",), 3: (" t", " h", " w")}


def draw_lines(explanation: Explanation, all_axes: bool, room: int) -> Iterator[Text]:
    slots = shorten(explanation)
    widths = {slot: _width(explanation, slot) for slot in slots}
    margin = max(len(track.name) for track in explanation.tracks) + 4
    for line in fold(slots, list(widths.values()), max(40, room - margin - 1)):
        yield from _band(explanation, line, widths, margin, all_axes)
        yield Text()
    for track in explanation.tracks:
        yield Text(f"{track.name:<{margin}}{track.num_rows} rows: {track.meaning}", "dim")


def _width(explanation: Explanation, slot: Slot) -> int:
    """Widest entry of a column, and room for a space and a bracket."""
    entries = [_short(explanation.labels[slot.start]) if not slot.is_elided else f"+{slot.stop - slot.start}"]
    entries += [str(slot.start)]
    entries += [str(c) for track in explanation.tracks for cell in slot.cells(track) for c in cell.position]
    return max(map(cell_len, entries)) + 2


def _short(label: str) -> str:
    return label if cell_len(label) <= LABEL_WIDTH else set_cell_size(label, LABEL_WIDTH - 1) + "…"


def _band(
    explanation: Explanation, line: Sequence[Slot], widths: dict[Slot, int], margin: int, all_axes: bool
) -> list[Text]:
    """Image headings, tokens, target row numbers, and a line per track (and axis)."""
    total = [widths[slot] for slot in line]
    last = explanation.num_columns - 1
    rows = ["…" if slot.is_elided else "" if slot.start == last else str(slot.start) for slot in line]
    tokens = [
        f"+{slot.stop - slot.start}" if slot.is_elided else _short(explanation.labels[slot.start]) for slot in line
    ]
    lines = [
        _heading(explanation, line, total, margin),
        _row("", [Text(token, "bold") for token in tokens], line, total, margin),
        _row("row", [Text(row, "dim") for row in rows], line, total, margin),
    ]
    axes = AXIS_NAMES[explanation.axes] if all_axes else ("",)
    for track in explanation.tracks:
        for axis, name in enumerate(axes):
            cells = [_entry(slot, track, axis) for slot in line]
            lines.append(_row(track.name + name, cells, line, total, margin))
    return [text for text in lines if text.plain.strip()]


def _heading(explanation: Explanation, line: Sequence[Slot], widths: Sequence[int], margin: int) -> Text:
    """`image 1: 4x4` above the first column of each image."""
    text = " " * margin
    at = margin
    for i, slot in enumerate(line):
        if slot.block is not None and (i == 0 or line[i - 1].block != slot.block):
            height, width = explanation.blocks[slot.block].grid
            text = f"{text:<{at}}[image {slot.block + 1}: {height}x{width} = {height * width} rows "
        at += widths[i]
    return Text(text.rstrip(), "green")


def _row(name: str, cells: Sequence[Text], line: Sequence[Slot], widths: Sequence[int], margin: int) -> Text:
    """One line; images stand in brackets."""
    text = Text(f"{name:<{margin}}")
    for i, (cell, slot) in enumerate(zip(cells, line, strict=True)):
        opens = slot.block is not None and (i == 0 or line[i - 1].block != slot.block)
        closes = slot.block is not None and (i + 1 == len(line) or line[i + 1].block != slot.block)
        pad = widths[i] - 2 - cell.cell_len
        text.append("[" if opens else " ").append(" " * pad).append(cell).append("]" if closes else " ")
    return text


def _entry(slot: Slot, track: Track, axis: int) -> Text:
    """A position, dots for positions left out, a dot for a row that does not exist."""
    cells: list[Cell] = slot.cells(track)
    if not cells:
        return Text("·", "dim")
    if slot.is_elided:
        return Text("…", INPUT_STYLES[cells[0].input])
    return Text(str(cells[0].position[axis]), INPUT_STYLES[cells[0].input])
