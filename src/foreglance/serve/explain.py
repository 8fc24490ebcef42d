"""`POST /explain`: which rows target and draft hold for a conversation, at which positions, with the picture of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreglance.explain import explain, labels_of, to_numbers
from foreglance.rows_svg import draw

if TYPE_CHECKING:
    from foreglance.engine import Engine
    from foreglance.prompt import Rows


def describe(engine: Engine, rows: Rows) -> dict[str, Any]:
    """Reads what does not change, so that any thread may call it."""
    target = engine.target
    head = None if target.head is None else target.head.spec
    explanation = explain(rows, labels_of(rows, engine.piece), target.spec.rule, head)
    return {
        "model": target.spec.name,
        **to_numbers(explanation),
        "svg": draw(explanation, False, target.spec.name),
    }
