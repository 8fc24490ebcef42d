"""The figure of `foreglance bench acceptance`: tokens per step by depth, and first guesses of content words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreglance.bench.acceptance import Row
from foreglance.bench.report import plotter

COLOURS = {"see": "#1b6ca8", "placeholder": "#e08a1e", "skip": "#8a8a8a", "gap": "#c44e52"}


def draw(rows: Sequence[Row], folder: Path, name: str = "acceptance") -> list[Path]:
    """Write NAME.svg and NAME.png; -> their paths. Rows of fixed depth with images, greedy, are drawn."""
    pyplot = plotter()
    drawn = [row for row in rows if row.image and row.temperature == 0 and row.depth != "auto" and row.draft != "ngram"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), gridspec_kw={"width_ratios": [3, 2]})
    figure.patch.set_facecolor("white")
    policies = [policy for policy in COLOURS if any(row.policy == policy for row in drawn)]
    for policy in policies:
        mine = sorted((row for row in drawn if row.policy == policy), key=lambda row: row.depth)
        low = [row.tokens_per_step - row.tokens_per_step_ci[0] for row in mine]
        high = [row.tokens_per_step_ci[1] - row.tokens_per_step for row in mine]
        left.errorbar(
            [row.depth for row in mine],
            [row.tokens_per_step for row in mine],
            yerr=[low, high],
            label=policy,
            color=COLOURS[policy],
            marker="o",
            capsize=3,
        )
    left.set(xlabel="draft depth", ylabel="tokens per target step", title="Image prompts, greedy")
    left.set_xticks(sorted({row.depth for row in drawn}))
    left.legend(frameon=False)
    first = [min((row for row in drawn if row.policy == policy), key=lambda row: row.depth) for policy in policies]
    right.bar(
        policies,
        [row.content_acceptance or 0.0 for row in first],
        yerr=[
            [(row.content_acceptance or 0.0) - (row.content_ci or (0, 0))[0] for row in first],
            [(row.content_ci or (0, 0))[1] - (row.content_acceptance or 0.0) for row in first],
        ],
        color=[COLOURS[policy] for policy in policies],
        capsize=3,
    )
    right.set(ylim=(0, 1), ylabel="first guesses that stood", title="Content words")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths
