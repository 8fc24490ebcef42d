"""`foreglance demo`: a bundled picture described with drafts on and off; what it gains, and that no token differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foreglance.cli.options import DRAFTS, PromptOptions, takes
from foreglance.cli.running import check_pictures, load_engine, run
from foreglance.cli.show import (
    TokenPrinter,
    draft_report,
    legend,
    percentages,
    picture,
    print_json,
    to_stderr,
    to_stdout,
)
from foreglance.request import Request, Result, Speculation

DEPTH = "3"  # fixed, so that the few short runs below compare one setting; elsewhere the default finds its depth
PAIRS, MOST_PAIRS = 5, 41  # measured runs of each kind: more where they are short
MEASURED_SECONDS = 2.0  # what short runs may take together
QUIET_SECONDS = 3.0  # longer measurements show a progress bar
SMALL_GAIN = 1.3
WHY_SMALL = (
    "A model this small lies in the processor's caches, where a row more costs nearly as much as a step, so guesses "
    "gain little. On the shape of Qwen3.5-0.8B four rows cost 1.1 steps: docs/speed.md has the figures."
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(PromptOptions):
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask about the picture.")] = "Describe the image."
    image: Annotated[list[Path], typer.Option("--image", help="Another picture; repeat for more.")] = field(
        default_factory=list
    )
    depth: Annotated[str, typer.Option("--depth", help="Guesses ahead: auto or a number.", rich_help_panel=DRAFTS)] = (
        DEPTH
    )


@dataclass(frozen=True)
class Measured:
    """The streamed answer with drafts, the one without, and pairs of measured runs (on, off)."""

    on: Result
    off: Result
    pairs: tuple[tuple[Result, Result], ...]

    @property
    def identical(self) -> bool:
        return all(r.token_ids == self.on.token_ids for r in (self.off, *(r for pair in self.pairs for r in pair)))

    @property
    def speedup(self) -> float | None:
        """Of the two medians: the pairs took turns, so what else runs on a machine disturbs both sides alike."""
        on, off = self.speed(True), self.speed(False)
        return on / off if on and off else None

    def speed(self, on: bool) -> float | None:
        speeds = [pair[0 if on else 1].timings.tokens_per_second for pair in self.pairs]
        return median(speeds) if all(speeds) else None


@takes(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Describe a picture with drafts on and off; compare speed and tokens."""
    with as_file(files("foreglance") / "assets" / "scene.png") as bundled:
        _demo(options if options.image else replace(options, image=[bundled]))


def _demo(options: DemoOptions) -> None:
    settings = options.settings(prefix_cache_bytes=0)  # each run computes its whole prompt
    with_drafts = partial(options.request, options.question())
    without = partial(with_drafts, Speculation("none"))
    check_pictures(with_drafts(), settings)
    engine = load_engine(options, settings, options.draft, options.second_model)
    if not options.json:
        _introduce(options)
    first = _stream(partial(run, engine), with_drafts(), options.json)
    _stop_on_failure(first)
    measured = _measure(partial(run, engine), first, with_drafts, without)
    if options.json:
        print_json(_numbers(measured, engine.target.spec.name))
    else:
        from foreglance.models.weights import embedded_models

        _show(measured, options.model in embedded_models())
    if not measured.identical:
        to_stderr("the token ids with and without drafts differ: this must never happen, please report it", "red")
        raise typer.Exit(1)


def _introduce(options: DemoOptions) -> None:
    console = to_stdout()
    if console.is_terminal and not console.no_color:
        for path in options.image:
            console.print(picture(path))
    console.print(f"> {options.prompt}", style="bold", markup=False)


def _stream(run: Callable[..., Result], request: Request, quiet: bool) -> Result:
    if quiet:
        return run(request)
    printer = TokenPrinter(marked=True)
    result = run(request, printer)
    printer.end()
    console = to_stdout()
    if console.is_terminal and result.timings.accepted:
        console.print(legend(len(result.timings.accepted)))
    return result


def _stop_on_failure(result: Result) -> None:
    """A demo that was interrupted or failed has nothing to compare."""
    if result.finish_reason in ("cancelled", "error"):
        to_stderr(result.error or "cancelled", style="red")
        raise typer.Exit(1)


def _measure(
    run: Callable[[Request], Result], first: Result, on: Callable[[], Request], off: Callable[[], Request]
) -> Measured:
    """Runs on and off in turns, in the same process, each side first in every other pair."""
    began = time.perf_counter()
    silent = run(off())
    _stop_on_failure(silent)
    pair = 2 * (time.perf_counter() - began)
    count = max(PAIRS, min(MOST_PAIRS, int(MEASURED_SECONDS / pair)))
    pairs = []
    for i in _progress(range(count), count * pair > QUIET_SECONDS):
        results = [run(request()) for request in ((on, off) if i % 2 == 0 else (off, on))]
        for result in results:
            _stop_on_failure(result)
        pairs.append(tuple(results if i % 2 == 0 else reversed(results)))
    return Measured(first, silent, tuple(pairs))


def _progress(pairs: Iterable[int], shown: bool) -> Iterable[int]:
    if not shown:
        return pairs
    return track(pairs, "measuring, on and off in turns", console=Console(stderr=True), transient=True)


def _numbers(measured: Measured, model: str) -> dict:
    on = measured.on
    return {
        "text": on.text,
        "token_ids": list(on.token_ids),
        "finish_reason": on.finish_reason,
        "identical": measured.identical,
        "speedup": measured.speedup,
        "tokens_per_second": {"on": measured.speed(True), "off": measured.speed(False)},
        "acceptance": on.timings.acceptance,
        "acceptance_by_depth": on.timings.acceptance_by_depth,
        "tokens_per_step": on.timings.tokens_per_step,
        "prompt_tokens": on.timings.prompt_tokens,
        "image_rows": on.timings.image_rows,
        "model": model,
        "draft": draft_report(on.draft),
    }


def _show(measured: Measured, is_embedded: bool) -> None:
    on = measured.on
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("depth of drafts", str(on.draft.depth))
    for speed, name in ((measured.speed(True), "with drafts"), (measured.speed(False), "without")):
        table.add_row(f"tokens/s {name}", "-" if speed is None else f"{speed:.0f}")
    table.add_row(
        f"speed-up, medians of {len(measured.pairs)}", "-" if measured.speedup is None else f"{measured.speedup:.2f}x"
    )
    table.add_row("acceptance at depth 1, 2, ...", percentages(on.timings.acceptance_by_depth))
    per_step = on.timings.tokens_per_step
    table.add_row("tokens per step", "-" if per_step is None else f"{per_step:.2f}")
    table.add_row("token ids identical", "yes" if measured.identical else "NO")
    if on.draft.off_because is not None:
        table.add_row("drafts ended", on.draft.off_because)
    to_stdout().print("", table)
    if is_embedded and on.timings.acceptance and measured.speedup is not None and measured.speedup < SMALL_GAIN:
        to_stdout().print(f"[dim]{WHY_SMALL}[/dim]")
