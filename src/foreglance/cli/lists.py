"""Options that name several things with commas between them. Whatever is wrong is a `RequestError`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreglance.request import MAX_DEPTH, RequestError


def parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str, param: str, high: int | None = None) -> tuple[int, ...]:
    """ "1,2" -> (1, 2), each from 1 to `high`; nothing from an empty text."""
    try:
        found = tuple(map(int, parts_of(text)))
    except ValueError:
        raise RequestError(f"--{param} takes numbers with commas between them, got {text!r}", param=param) from None
    if any(number < 1 or (high is not None and number > high) for number in found):
        raise RequestError(
            f"--{param} takes numbers from 1 {'up' if high is None else f'to {high}'}, got {text!r}", param=param
        )
    return found


def depths(text: str, param: str = "depths") -> list[int | str]:
    """ "1,auto" -> [1, "auto"]."""
    parts = parts_of(text)
    known = ("auto", *map(str, range(MAX_DEPTH + 1)))
    if not parts or any(part not in known for part in parts):
        raise RequestError(f"--{param} takes auto and numbers from 0 to {MAX_DEPTH}, got {text!r}", param=param)
    return [part if part == "auto" else int(part) for part in parts]


def temperatures(text: str) -> list[float]:
    """ "0,0.8" -> [0.0, 0.8]."""
    try:
        found = [float(part) for part in parts_of(text)]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(one) and one >= 0 for one in found):
        raise RequestError(f"--temperatures takes numbers from 0 up, got {text!r}", param="temperatures")
    return found


def chosen(text: str, known: Sequence[str], param: str) -> list[str]:
    """Some of `known`, in the order given; "all" is all of them."""
    names = list(known) if text == "all" else parts_of(text)
    odd = [name for name in names if name not in known]
    if odd or not names:
        raise RequestError(f"--{param} takes some of {', '.join(known)}, or all; got {text!r}", param=param)
    return names
