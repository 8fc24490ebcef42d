"""An explanation as a self-contained SVG: a white card, so that it reads the same on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from foreglance.explain import Explanation, Slot, Track, fold, shorten

COLUMN, ROW, MARGIN, PAD = 50, 38, 152, 24  # pixels: width of a column, height of a track, track names, card edge
HEAD, AXIS_HEIGHT = 74, 12  # above the tracks of a band; more height for each axis after the first
COLUMNS = 18  # columns of a band
FILLS = {"token": ("#e8eef8", "#5b7db1"), "image": ("#d5efdb", "#3c8a57"), "placeholder": ("#fdecc8", "#b98416")}
INPUT_WORDS = {"token": "token", "image": "image embedding", "placeholder": "placeholder token"}
HOLE = "#b7bcc6"
STYLE = """
  text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1d2430 }
  .title { font: 600 16px system-ui, sans-serif } .note { font: 12px system-ui, sans-serif; fill: #5a6472 }
  .name { font: 600 13px system-ui, sans-serif } .label { font-size: 10px; fill: #39424f }
  .row { font-size: 9px; fill: #8a93a1 } .position { font-size: 13px; font-weight: 600 }
  .image { font: 600 11px system-ui, sans-serif; fill: #2f7148 }
"""


def draw(explanation: Explanation, all_axes: bool, model: str) -> str:
    axes = explanation.axes if all_axes else 1
    track_height = ROW + (axes - 1) * AXIS_HEIGHT
    slots = shorten(explanation, text=5, image=2)
    bands = fold(slots, [1] * len(slots), COLUMNS)
    band_height = HEAD + len(explanation.tracks) * track_height + 22
    width = 2 * PAD + MARGIN + COLUMN * max(len(band) for band in bands)
    width = max(width, 760)
    parts, y = [_title(explanation, model)], PAD + 64
    for band in bands:
        parts.append(_band(explanation, band, y, axes, track_height))
        y += band_height
    parts.append(_legend(explanation, y))
    height = y + 34 + 18 * len(explanation.tracks) + PAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="Rows and positions of target and draft"><style>{STYLE}</style>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12" fill="#ffffff" stroke="#d5dae2"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start", tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{title}{escape(text)}</text>'


def _title(explanation: Explanation, model: str) -> str:
    rows = explanation.num_columns - 1
    images = sum(block.stop - block.start for block in explanation.blocks)
    return "\n".join(
        [
            _text(PAD, PAD + 14, f"Rows and positions: {model}, {rows} rows, {images} of them of images", "title"),
            _text(PAD, PAD + 34, "Numbers in cells are positions, small ones the row in its own cache.", "note"),
            _text(PAD, PAD + 50, "A draft row stands under the row whose input it takes.", "note"),
        ]
    )


def _band(explanation: Explanation, band: Sequence[Slot], y: int, axes: int, track_height: int) -> str:
    """One line of columns with all tracks."""
    parts = []
    for i, slot in enumerate(band):
        x = PAD + MARGIN + i * COLUMN
        if slot.block is not None and (i == 0 or band[i - 1].block != slot.block):
            count = sum(other.block == slot.block for other in band)
            parts.append(_bracket(explanation, slot.block, x, y, count))
        parts.append(_column_head(explanation, slot, x, y))
    for number, track in enumerate(explanation.tracks):
        top = y + HEAD + number * track_height
        name = track.name if number == 0 else f"draft {track.name}"
        parts.append(_text(PAD, top + track_height / 2 + 2, name, "name"))
        parts += [_cell(slot, track, PAD + MARGIN + i * COLUMN, top, axes, track_height) for i, slot in enumerate(band)]
    return "\n".join(parts)


def _bracket(explanation: Explanation, block: int, x: int, y: int, num_slots: int) -> str:
    height, width = explanation.blocks[block].grid
    words = f"image {block + 1}: {height} × {width} = {height * width} rows"
    if num_slots * COLUMN < 7 * len(words):
        words = f"{height} × {width}"
    left, right = x + 3, x + num_slots * COLUMN - 3
    path = f'<path d="M{left} {y + 32} V{y + 26} H{right} V{y + 32}" fill="none" stroke="#3c8a57" stroke-width="1.5"/>'
    return path + _text((left + right) / 2, y + 20, words, "image", "middle")


def _column_head(explanation: Explanation, slot: Slot, x: int, y: int) -> str:
    middle = x + COLUMN / 2
    if slot.is_elided:
        label, row = f"{slot.stop - slot.start} more", f"{slot.start}–{slot.stop - 1}"
        return _text(middle, y + 48, label, "label", "middle") + _text(middle, y + 62, row, "row", "middle")
    label = explanation.labels[slot.start]
    row = f"row {slot.start}" if slot.start < explanation.num_columns - 1 else "first"
    short = label if len(label) <= 7 else label[:6] + "…"
    return _text(middle, y + 48, short, "label", "middle", label) + _text(middle, y + 62, row, "row", "middle")


def _cell(slot: Slot, track: Track, x: int, y: int, axes: int, height: int) -> str:
    """A filled box for a row, a dashed one for a hole, a stack of dots for rows left out."""
    cells = slot.cells(track)
    if not cells:
        return (
            f'<rect x="{x + 3}" y="{y + 3}" width="{COLUMN - 6}" height="{height - 6}" rx="5" fill="none" '
            f'stroke="{HOLE}" stroke-dasharray="3 3"/>'
        )
    fill, edge = FILLS[cells[0].input]
    middle = x + COLUMN / 2
    box = (
        f'<rect x="{x + 3}" y="{y + 3}" width="{COLUMN - 6}" height="{height - 6}" rx="5" fill="{fill}" '
        f'stroke="{edge}"/>'
    )
    if slot.is_elided:
        return box + _text(middle, y + height / 2 + 4, "…", "position", "middle")
    if axes == 1:
        position = _text(middle, y + 17, str(cells[0].position[0]), "position", "middle")
    else:
        position = "".join(
            _text(middle, y + 15 + axis * AXIS_HEIGHT, str(c), "label", "middle")
            for axis, c in enumerate(cells[0].position)
        )
    return box + position + _text(middle, y + height - 7, f"{cells[0].row}", "row", "middle")


def _legend(explanation: Explanation, y: int) -> str:
    parts, x = [], PAD
    used = {cell.input for track in explanation.tracks for cell in track.cells if cell is not None}
    for kind, (fill, edge) in FILLS.items():
        if kind in used:
            parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}" stroke="{edge}"/>')
            parts.append(_text(x + 20, y + 11, INPUT_WORDS[kind], "note"))
            x += 50 + 7 * len(INPUT_WORDS[kind])
    parts.append(
        f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="none" stroke="{HOLE}" stroke-dasharray="3 3"/>'
    )
    parts.append(_text(x + 20, y + 11, "no row", "note"))
    for i, track in enumerate(explanation.tracks):
        row = y + 38 + 18 * i
        parts.append(_text(PAD, row, track.name, "name"))
        parts.append(_text(PAD + MARGIN, row, f"{track.num_rows} rows: {track.meaning}", "note"))
    return "\n".join(parts)
