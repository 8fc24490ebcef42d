"""`foreglance explain`: the rows of target and draft for a real prompt, drawn in the terminal and as an SVG file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreglance.cli.options import ModelOptions, takes
from foreglance.cli.running import check_pictures, load_engine
from foreglance.cli.show import print_json, to_stderr, to_stdout
from foreglance.request import Request, RequestError
from foreglance.settings import Settings

if TYPE_CHECKING:
    from foreglance.explain import Explanation


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ModelOptions):
    image: Annotated[list[Path], typer.Option("--image", help="Picture file; repeat for more.")] = field(
        default_factory=list
    )
    prompt: Annotated[str, typer.Option("--prompt", help="The text after the pictures.")]
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None
    axes: Annotated[bool, typer.Option("--axes", help="All axes of a position, not only the first.")] = False
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw into this file.")] = None
    plan: Annotated[bool, typer.Option("--plan", help="The kernel calls of a step instead, with their times.")] = False


@takes(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Draw which rows target and draft hold for a prompt, and at which positions."""
    settings = options.settings(prefix_cache_bytes=0, slots=1, try_drafts=False)
    request = Request.from_prompt(options.prompt, options.image, system=options.system)
    check_pictures(request, settings)
    _check_target(options.svg)
    if options.plan:
        _explain_plan(options, request, settings)
        return
    explanation, name = _explain(options, request, settings)
    if options.svg is not None:
        from foreglance.rows_svg import draw

        options.svg.write_text(draw(explanation, options.axes, name), encoding="utf-8")
        to_stderr(f"drawn into {options.svg}", style="dim")
    if options.json:
        from foreglance.explain import to_numbers

        print_json({"model": name, **to_numbers(explanation)})
    else:
        from foreglance.cli.rows_text import draw_lines

        console = to_stdout()
        for line in draw_lines(explanation, options.axes, console.width):
            console.print(line)


def _explain_plan(options: ExplainOptions, request: Request, settings: Settings) -> None:
    from dataclasses import asdict

    from rich.table import Table

    engine = load_engine(options, settings)
    from foreglance.bench.plans import profile

    reports = profile(engine, request)
    if options.json:
        print_json({"model": engine.target.spec.name, "plans": [asdict(one) for one in reports]})
        return
    if not reports:
        to_stderr("nothing is recorded here: the package runs on torch's kernels (docs/kernels.md)", "yellow")
    for report in reports:
        rows = f"{report.num_rows} row{'s' if report.num_rows > 1 else ''}"
        title = f"{report.who}, {rows}: {report.microseconds:,.0f} µs, {report.runs:.3g} times a step"
        table = Table(title=title, title_justify="left")
        for column in ("line", "kernel", "on", "µs", "share"):
            table.add_column(column, justify="right" if column in ("line", "µs", "share") else "left")
        for number, line in enumerate(report.lines, 1):
            share = line.microseconds / report.microseconds
            table.add_row(str(number), line.kernel, line.what, f"{line.microseconds:.1f}", f"{share:.1%}")
        to_stdout().print(table)


def _check_target(svg: Path | None) -> None:
    if svg is not None and not svg.absolute().parent.is_dir():
        raise RequestError(f"--svg {svg}: there is no such folder", param="svg", code="no_such_folder")


def _explain(options: ExplainOptions, request: Request, settings: Settings) -> tuple[Explanation, str]:
    engine = load_engine(options, settings)
    from foreglance.explain import explain as explain_rows
    from foreglance.explain import labels_of

    target, rows = engine.target, engine.prepare(request)
    if target.head is None:
        to_stderr(f"the checkpoint of {target.spec.name} has no draft head, so only the target has rows", "yellow")
    head = None if target.head is None else target.head.spec
    labels = labels_of(rows, engine.piece)
    return explain_rows(rows, labels, target.spec.rule, head), target.spec.name
