"""`foreglance explain`: the rows of target and draft for a real prompt, drawn in the terminal and as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from foreglance.cli.options import ModelOptions, takes
from foreglance.cli.running import check_pictures, load_engine
from foreglance.cli.show import print_json, to_stderr, to_stdout
from foreglance.request import Request, RequestError

if TYPE_CHECKING:
    from foreglance.explain import Cell, Explanation, Slot, Track
    from foreglance.prompt import Rows

LABEL_WIDTH = 8
INPUT_STYLES = {"token": "", "image": "green", "placeholder": "yellow"}
AXIS_NAMES = {1: ("",), 3: (" t", " h", " w")}


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ModelOptions):
    image: Annotated[list[Path], typer.Option("--image", help="Picture file; repeat for more.")] = field(
        default_factory=list
    )
    prompt: Annotated[str, typer.Option("--prompt", help="The text after the pictures.")]
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None
    axes: Annotated[bool, typer.Option("--axes", help="All axes of a position, not only the first.")] = False
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw into this file.")] = None


@takes(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Draw which rows target and draft hold for a prompt, and at which positions."""
    settings = options.settings(prefix_slots=0, slots=1)
    request = Request.from_prompt(options.prompt, options.image, system=options.system)
    check_pictures(request, settings)
    _check_target(options.svg)
    explanation, name = _explain(options, request, settings)
    if options.svg is not None:
        from foreglance.cli.svg import draw

        options.svg.write_text(draw(explanation, options.axes, name), encoding="utf-8")
        to_stderr(f"drawn into {options.svg}", style="dim")
    if options.json:
        from foreglance.explain import to_numbers

        print_json({"model": name, **to_numbers(explanation)})
    else:
        _print(explanation, options.axes)


def _check_target(svg: Path | None) -> None:
    if svg is not None and not svg.absolute().parent.is_dir():
        raise RequestError(f"--svg {svg}: there is no such folder", param="svg", code="no_such_folder")


def _explain(options: ExplainOptions, request: Request, settings) -> tuple[Explanation, str]:
    engine = load_engine(options, settings)
    from foreglance.explain import explain as explain_rows

    target, rows = engine.target, engine.prepare(request)
    if target.head is None:
        to_stderr(f"the checkpoint of {target.spec.name} has no draft head, so only the target has rows", "yellow")
    head = None if target.head is None else target.head.spec
    labels = _labels(options.model, rows)
    return explain_rows(rows, labels, target.spec.rule, head), target.spec.name


def _labels(model: str, rows: Rows) -> list[str]:
    """Each row in words, special tokens too: the engine's own decoding leaves those out."""
    from transformers import AutoTokenizer

    from foreglance.models.weights import find_model

    tokenizer = AutoTokenizer.from_pretrained(find_model(model), trust_remote_code=False)
    texts = [tokenizer.decode([int(token)], skip_special_tokens=False) for token in rows.token_ids]
    return ["image" if is_image else _visible(text) for text, is_image in zip(texts, rows.is_image, strict=True)]


def _visible(text: str) -> str:
    """White space that can be seen."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "∅"


# ---------------------------------------------------------------- the terminal


def _print(explanation: Explanation, all_axes: bool) -> None:
    from foreglance.explain import MEANING, fold, shorten

    console = to_stdout()
    slots = shorten(explanation)
    widths = {slot: _width(explanation, slot, all_axes) for slot in slots}
    margin = max(len(track.name) for track in explanation.tracks) + 4
    for line in fold(slots, list(widths.values()), max(40, console.width - margin - 1)):
        for text in _band(explanation, line, widths, margin, all_axes):
            console.print(text)
        console.print()
    for track in explanation.tracks:
        console.print(Text(f"{track.name:<{margin}}{track.num_rows} rows: {MEANING[track.name]}", "dim"))


def _width(explanation: Explanation, slot: Slot, all_axes: bool) -> int:
    """Widest entry of a column, and room for a space and a bracket."""
    entries = [_short(explanation.labels[slot.start]) if not slot.is_elided else f"+{slot.stop - slot.start}"]
    entries += [str(slot.start)]
    entries += [str(c) for track in explanation.tracks for cell in slot.cells(track) for c in cell.position]
    return max(map(len, entries)) + 2


def _short(label: str) -> str:
    return label if len(label) <= LABEL_WIDTH else label[: LABEL_WIDTH - 1] + "…"


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
        pad = widths[i] - 2 - len(cell.plain)
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
