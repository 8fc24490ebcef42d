"""What a person sees: marked tokens, pictures in half blocks, statistics in words. Knows no engine.

stdout carries what was asked for, stderr everything else. Without colour or on a pipe, all of it is plain text.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from foreglance.request import DraftReport, Result, Token

DEPTH_STYLES = ("green underline", "cyan underline", "magenta underline", "yellow underline", "blue underline")
DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
PICTURE_CELLS = (32, 16)  # columns, rows; a cell shows two pixels


def to_stdout() -> Console:
    return Console(highlight=False, soft_wrap=True)


def to_stderr(text: str | Text, style: str = "") -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        Text(text) if isinstance(text, str) else text, style=style
    )


def print_json(values: dict) -> None:
    """One object, one line, the last on stdout."""
    sys.stdout.write(json.dumps(values, ensure_ascii=False) + "\n")
    sys.stdout.flush()


class TokenPrinter:
    """Writes tokens as they come; with `marked`, accepted drafts in a style for each depth."""

    def __init__(self, marked: bool):
        self._console = to_stdout()
        self._marked = marked
        self._on_terminal = self._console.is_terminal

    def __call__(self, token: Token) -> None:
        if not self._on_terminal:
            sys.stdout.write(token.text)
            sys.stdout.flush()
        elif token.text:
            style = depth_style(token.depth) if self._marked else ""
            self._console.print(Text(harmless(token.text), style), end="")

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


def depth_style(depth: int) -> str:
    """Depth 0, the target's own pick, is plain; beyond the last style they repeat it."""
    return DEPTH_STYLES[min(depth, len(DEPTH_STYLES)) - 1] if depth else ""


def harmless(text: str) -> str:
    """Text of a model without control characters, which on a terminal could do more than be read, and without those
    that turn the direction of writing, which could hide what is there."""
    return "".join(c for c in text if c in "\n\t" or (unicodedata.category(c) != "Cc" and c not in DIRECTIONS))


def legend(depths: int) -> Text:
    """What the marks of `TokenPrinter` mean."""
    text = Text("plain: picked by the target; accepted drafts of depth ", "dim")
    for depth in range(1, max(1, min(depths, len(DEPTH_STYLES))) + 1):
        more = "+" if depth == len(DEPTH_STYLES) and depths > depth else ""
        text.append(f" {depth}{more} ", depth_style(depth)).append(" ")
    return text


def picture(path: Path) -> Text:
    """A picture in half blocks: the upper pixel is the ink, the lower one the ground."""
    import PIL.Image

    image = PIL.Image.open(path).convert("RGB")
    scale = min(PICTURE_CELLS[0] / image.width, 2 * PICTURE_CELLS[1] / image.height)
    width, height = max(1, round(image.width * scale)), 2 * max(1, round(image.height * scale / 2))
    small = image.resize((width, height), PIL.Image.Resampling.BOX)
    text = Text()
    for y in range(0, height, 2):
        for x in range(width):
            ink, ground = ("rgb({},{},{})".format(*small.getpixel((x, y + dy))) for dy in (0, 1))
            text.append("▀", f"{ink} on {ground}")
        text.append("\n")
    return text


def report(result: Result, model: str) -> dict:
    """The numbers of a result, as `--json` gives them."""
    t = result.timings
    numbers = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "model": model,
        "prompt_tokens": t.prompt_tokens,
        "image_rows": t.image_rows,
        "cached_rows": t.cached_rows,
        "drafted": sum(t.drafted),
        "accepted": sum(t.accepted),
        "acceptance": t.acceptance,
        "acceptance_by_depth": t.acceptance_by_depth,
        "steps": t.steps,
        "tokens_per_step": t.tokens_per_step,
        "ttft_ms": t.ttft_ms,
        "tokens_per_second": t.tokens_per_second,
        "draft": draft_report(result.draft),
    }
    if result.error is not None:
        numbers["error"] = {"message": result.error, "param": None, "code": "engine_error"}
    return numbers


def draft_report(draft: DraftReport) -> dict:
    return {"kind": draft.kind, "depth": draft.depth, "images": draft.images, "off_because": draft.off_because}


def stats_line(result: Result) -> str:
    """One line about a result: rows, speed, drafts."""
    t = result.timings
    parts = [
        f"{t.prompt_tokens} prompt rows ({t.image_rows} of images, {t.cached_rows} reused, "
        f"{t.prompt_tokens - t.cached_rows} computed)",
        f"{t.num_tokens} tokens",
    ]
    if t.tokens_per_second is not None:
        parts.append(f"{t.tokens_per_second:.0f} tokens/s")
    if t.num_tokens:
        parts.append(f"first after {t.ttft_ms:.0f} ms")
    if t.acceptance is not None:
        parts.append(f"{sum(t.accepted)} of {sum(t.drafted)} drafts accepted ({t.acceptance:.0%})")
    if result.draft.off_because is not None:
        parts.append(f"no drafts: {result.draft.off_because}")
    return ", ".join([*parts, f"ended: {result.finish_reason}"])


def percentages(shares: Sequence[float | None]) -> str:
    return "  ".join("-" if share is None else f"{share:.0%}" for share in shares) or "-"
