"""`foreglance bench soak | slots`: many requests at once, over HTTP for a time or in one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foreglance.cli import lists
from foreglance.cli.bench import PICTURES, Json, Model, Weights, check_figure, progress_bar, show
from foreglance.cli.options import ModelOptions
from foreglance.cli.running import load_engine, loading
from foreglance.cli.serve import num_bytes
from foreglance.cli.show import to_stderr

SHOWN_FAILURES = 20


def soak(
    minutes: Annotated[float, typer.Option(help="How long clients ask.")] = 3.0,
    model: Model = "tiny-qwen",
    weights: Weights = "auto",
    slots: Annotated[int, typer.Option(min=1, help="Slots of the server.")] = 4,
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at once.")] = 6,
    prefix_cache_bytes: Annotated[
        int, typer.Option(parser=num_bytes, metavar="BYTES", help="Memory for kept rows; small, so that it fills soon.")
    ] = 64 << 20,
    seed: Annotated[int, typer.Option(help="Seed of what clients ask and how they behave.")] = 0,
    figure: Annotated[Path | None, typer.Option(help="Picture to draw, .svg or .png.")] = None,
    as_json: Json = False,
) -> None:
    """Mixed clients against a server of its own: memory, slots, latencies; exit code 1 if anything failed."""
    from foreglance.bench import soak as bench
    from foreglance.bench.report import machine

    check_figure(figure, PICTURES)
    plan = bench.Plan(minutes, model, weights, slots, clients, prefix_cache_bytes, seed)
    with progress_bar("seconds", max(1, int(plan.seconds))) as progress:
        report = bench.run(plan, progress)
    if figure is not None:
        bench.draw(report, figure, f"{model}, {clients} clients on {slots} slots, {minutes:g} minutes")
    body = {"machine": machine()} | report.as_json()
    if as_json:
        show(None, True, body)
    else:
        to_stderr(body["machine"])
        for made in _soak_tables(body):
            show(made, False, {})
    for words in report.failures[:SHOWN_FAILURES]:
        to_stderr(words, "red")
    if report.failures:
        raise typer.Exit(1)


def _soak_tables(body: dict[str, Any]) -> list[object]:
    from foreglance.bench.report import shown, table

    ends = ("finished", "left", "refused", "failed")
    cells = [(kind, *(told[end] for end in ends)) for kind, told in body["by_kind"].items()]
    cells.append(("all", *(sum(told[end] for told in body["by_kind"].values()) for end in ends)))
    made = [table("Requests", ("kind", *ends), cells)]
    cells = []
    for words, name in (("on", "drafts"), ("off", "no_drafts")):
        one = body["latency"][name]
        for what in ("first_token_ms", "whole_ms"):
            found = one[what] or {}
            cells.append(
                (words, what, one["answers"], *(shown(found.get(p), ".0f") for p in ("p50", "p90", "p99", "max")))
            )
    made.append(table("Latency", ("drafts", "of", "answers", "p50", "p90", "p99", "largest"), cells))
    memory = body["memory"]
    names = ("start", "after warm-up", "end", "growth", "MB a minute")
    made.append(table("Server's memory, MB", names, [[f"{value:.1f}" for value in memory.values()]]))
    idle = body["idle"]
    if idle is not None:
        made.append(table("When nobody asks", [name.replace("_", " ") for name in idle], [list(idle.values())]))
    return made


def slots(
    model: Model = "tiny-qwen",
    weights: Weights = "auto",
    slots: Annotated[str, typer.Option(help="Comma-separated counts, beside 1.")] = "1,2,4,8",
    draft: Annotated[str, typer.Option(help="Who drafts, beside drafts off: auto, mtp, ngram.")] = "auto",
    depth: Annotated[str, typer.Option(help="Draft depth, or auto.")] = "auto",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, pictures and texts in turn.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of every answer; the seed is fixed.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all settings take turns.")] = 3,
    as_json: Json = False,
) -> None:
    """Tokens a second of 1, 2, 4, 8 slots together, drafts off and on; exit code 1 if company changed a token."""
    with loading():
        from foreglance.bench import together as bench
        from foreglance.bench.report import machine, table
        from foreglance.request import SamplingParams, Speculation

        counts = lists.numbers(slots, "slots")
        options = ModelOptions(model=model, weights=weights)
        engine = load_engine(options, options.settings(slots=1, prefix_cache_bytes=0))
        chosen = engine.best_draft if draft == "auto" else draft
        deep = lists.depths(depth, "depth")[0]
        drafts = [Speculation("none")] + ([] if chosen == "none" else [Speculation(chosen, deep)])
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=True)
        with progress_bar("runs", (rounds + 1) * len(drafts) * len({1, *counts})) as progress:
            rows = bench.measure(engine, counts, drafts, sampling, prompts, rounds, progress)
    told = {"model": model, "depth": deep, "prompts": prompts, "max_tokens": max_tokens, "temperature": temperature}
    body = {"machine": machine(), **told, "results": [row.as_json() for row in rows]}
    cells = [
        (row.draft, row.slots, f"{row.tokens_per_second:.0f}", f"{row.ratio:.2f}", f"{row.differing} of {row.tokens}")
        for row in rows
    ]
    names = "draft", "slots", "tokens/s of all", "of one slot", "differ from solo runs"
    show(table(f"{model}, {prompts} prompts", names, cells), as_json, body)
    if any(row.differing for row in rows):
        raise typer.Exit(1)
