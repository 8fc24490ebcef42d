"""`foreglance generate`: one question, one answer, as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from foreglance.cli.options import PromptOptions, takes
from foreglance.cli.running import check_pictures, load_engine, run
from foreglance.cli.show import TokenPrinter, print_json, report, stats_line, to_stderr

EXIT_CODES = {"error": 1, "cancelled": 130}  # 130: what shells say of Ctrl-C


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PromptOptions):
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Mark accepted drafts in the text.")] = False


@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Answer one prompt about text and pictures."""
    settings, request = options.settings(prefix_cache_bytes=0), options.request(options.question())
    check_pictures(request, settings)
    engine = load_engine(options, settings, options.draft, options.second_model)
    if options.json:
        result = run(engine, request)
        print_json(report(result, engine.target.spec.name))
    else:
        printer = TokenPrinter(options.show_drafts)
        result = run(engine, request, printer)
        printer.end()
        to_stderr(result.error or stats_line(result), style="red" if result.error else "dim")
    if result.finish_reason in EXIT_CODES:
        raise typer.Exit(EXIT_CODES[result.finish_reason])
