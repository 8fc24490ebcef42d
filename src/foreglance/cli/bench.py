"""`foreglance bench ...`: each command prints a table and, with `--json`, one object on the last line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from foreglance.cli import lists
from foreglance.cli.options import ModelOptions
from foreglance.cli.running import load_engine, loading
from foreglance.cli.show import print_json, to_stderr
from foreglance.request import IMAGE_POLICIES, MAX_DEPTH, RequestError

WIDE = 200  # columns of a table that goes into a file
KINDS = ("image", "text")
PICTURES = (".svg", ".png")

app = typer.Typer(help="Measure acceptance, exactness and speed on this machine.", no_args_is_help=True)

Model = Annotated[str, typer.Option("--model", help="Embedded model, folder or hub name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on the last line, nothing else on stdout.")]
Weights = Annotated[str, typer.Option(help="auto, fp32, fp16, q8 or q4.")]


@contextmanager
def progress_bar(text: str, total: int) -> Iterator:
    """A progress bar on stderr; -> a function of (done, of)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done, of=total: progress.update(task, completed=done, total=of)


def _engine(model: str, weights: str, slots: int = 1, second: str | None = None):
    """Every run computes its whole prompt: no prefix is reused."""
    options = ModelOptions(model=model, weights=weights)
    return load_engine(options, options.settings(slots=slots, prefix_cache_bytes=0), second=second)


def check_figure(figure: Path | None, endings: tuple[str, ...] = ()) -> None:
    """Before anything is measured: whether a figure can be drawn, and into a file that ends so."""
    from foreglance.bench.report import plotter

    if figure is None:
        return
    plotter()
    if endings and figure.suffix not in endings:
        raise RequestError(f"--figure takes a file that ends in {' or '.join(endings)}, got {figure}", param="figure")


def show(made: object, as_json: bool, body: dict) -> None:
    from rich.console import Console

    if as_json:
        print_json(body)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(made)


@app.command()
def acceptance(
    model: Model = "tiny-qwen",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out conversations of each kind.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    depths: Annotated[str, typer.Option(help="Comma-separated; auto is allowed.")] = "1,2,3,4,5,6",
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.8",
    policies: Annotated[str, typer.Option(help="Comma-separated: see, placeholder, skip, gap.")] = (
        "see,placeholder,skip,gap"
    ),
    kinds: Annotated[str, typer.Option(help="Comma-separated: image, text.")] = "image,text",
    file: Annotated[
        Path | None, typer.Option(help='JSONL with your own prompts: {"prompt": ..., "image": PATH} a line.')
    ] = None,
    draft: Annotated[str | None, typer.Option(help="A second model that drafts; default: the model's own.")] = None,
    head: Annotated[
        Path | None, typer.Option(help="safetensors file of another draft head, in place of the checkpoint's own.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Folder for acceptance.svg and acceptance.png.")] = None,
    weights: Weights = "auto",
    as_json: Json = False,
) -> None:
    """Acceptance by depth and policy, with images and without, and the speed against drafts off."""
    from foreglance.bench import acceptance as bench
    from foreglance.bench.content import content_tokens
    from foreglance.bench.figure import draw
    from foreglance.bench.prompts import cases_of, image_cases, text_cases
    from foreglance.bench.report import machine

    asked = lists.chosen(policies, IMAGE_POLICIES, "policies")
    deep, warm, sorts = lists.depths(depths), lists.temperatures(temperatures), lists.chosen(kinds, KINDS, "kinds")
    given = None if file is None else cases_of(file, prompts)
    check_figure(figure)
    with _model_with(model, head) as found:
        engine = _engine(found, weights, second=draft)
    drafter = engine.best_draft
    wanted = [
        bench.Setting(drafter, policy, depth, temperature)
        for policy in (asked if drafter == "mtp" else ["see"])  # others have no rows of their own for an image
        for depth in deep
        for temperature in warm
        if drafter != "none"
    ]
    wanted += [bench.Setting("ngram", "see", 3, temperature) for temperature in warm]
    rows = []
    for kind in sorts:
        made = image_cases if kind == "image" else text_cases
        cases = made(prompts) if given is None else [case for case in given if case.kind == kind]
        if cases:
            with progress_bar(f"{kind} prompts", len(cases) * len(wanted)) as progress:
                rows += bench.measure(engine, cases, wanted, max_tokens, content_tokens(engine), progress)
    if figure is not None:
        to_stderr(f"wrote {', '.join(map(str, draw(rows, figure)))}")
    body = {"machine": machine(), "max_tokens": max_tokens, "results": [row.as_json() for row in rows]}
    show(_acceptance_table(rows), as_json, body)


@contextmanager
def _model_with(model: str, head: Path | None) -> Iterator[str]:
    """What to load a model by, with another draft head if one is given."""
    from foreglance.bench.heads import with_head
    from foreglance.models.weights import find_model

    if head is None:
        yield model
        return
    with loading(), tempfile.TemporaryDirectory(prefix="foreglance-") as temporary:
        yield str(with_head(find_model(model), head, Path(temporary)))


def _acceptance_table(rows: list) -> object:
    from foreglance.bench.report import shown, table

    cells = [
        (
            f"{row.draft}/{row.policy}",
            "image" if row.image else "text",
            row.temperature,
            row.depth,
            " ".join(shown(rate) for rate in row.acceptance_by_depth),
            shown(row.content_acceptance),
            shown(row.tokens_per_step),
            "-" if row.tokens_per_step_ci is None else "{:.2f} to {:.2f}".format(*row.tokens_per_step_ci),
            shown(row.speedup),
            f"{row.differing} of {row.tokens}",
        )
        for row in rows
    ]
    names = "draft", "prompts", "T", "depth", "acceptance by depth", "content", "tokens/step", "95 %", "x off", "differ"
    return table("Acceptance", names, cells)


@app.command()
def exactness(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="Repeat for more; TARGET+DRAFT names an independent draft. Default: all embedded."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to compare at least.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the random settings.")] = 0,
    slots: Annotated[int, typer.Option(min=1, help="Slots at most.")] = 4,
    weights: Annotated[str, typer.Option(help="Comma-separated formats.")] = "fp32,fp16,q8,q4",
    draft_weights: Annotated[str, typer.Option(help="Comma-separated formats of draft heads.")] = "same,q8",
    replay: Annotated[
        Path | None, typer.Option(help="Run one round again: a file with what an earlier run printed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Drafts on against drafts off over random settings; exit code 1 at the first token that differs."""
    from foreglance.bench import exactness as bench
    from foreglance.bench.report import table

    @cache
    def engines(name: str, weights: str, draft_weights: str):
        target, _, draft = name.partition("+")
        options = ModelOptions(model=target, weights=weights)
        settings = options.settings(try_drafts=False, draft_weights=draft_weights)
        return load_engine(options, settings, second=draft or None)

    if replay is not None:
        report = bench.replay(_round_of(replay), engines)
    else:
        formats = (
            tuple(lists.chosen(weights, bench.FORMATS, "weights")),
            tuple(lists.chosen(draft_weights, ("same", *bench.FORMATS), "draft-weights")),
        )
        plan = bench.Plan(tuple(model) if model else bench.MODELS, *formats, slots)
        with progress_bar("tokens compared", tokens) as progress:
            report = bench.run(plan, tokens, seed, engines, progress)
    groups = [*report.by_weights.items(), *report.by_family.items(), *report.by_draft.items()]
    cells = [(name, count.tokens, count.differing, count.accepted) for name, count in groups]
    cells.append((f"all {report.rounds} rounds", report.tokens, report.differing, report.accepted))
    names = "by weights, family and draft", "tokens", "differing", "accepted drafts"
    show(table(f"Exactness ({report.reused} rows reused)", names, cells), as_json, report.as_json())
    if report.differing:
        to_stderr("this must never happen; keep the next line in a file and see it again with --replay FILE", "red")
        to_stderr(json.dumps(report.reproduction))
        raise typer.Exit(1)


def _round_of(path: Path):
    from foreglance.bench.exactness import Round

    try:
        return Round.of(json.loads(path.read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"--replay {path}: this is no round that an earlier run printed ({error})", param="replay"
        ) from error


@app.command()
def holes(
    model: Model = "tiny-qwen",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out conversations.")] = 50,
    images: Annotated[int, typer.Option(min=1, help="Images in each.")] = 1,
    before: Annotated[int, typer.Option(min=0, help="Text turns before the image, for a long context.")] = 0,
    depth: Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Draft depth.")] = 3,
    weights: Weights = "auto",
    as_json: Json = False,
) -> None:
    """What a hole in the draft's positions costs, apart from missing rows and from wrongly paired states."""
    from foreglance.bench import holes as bench
    from foreglance.bench.prompts import Case, image_cases, talk_before, text_cases
    from foreglance.bench.report import machine, table

    engine = _engine(model, weights)
    past = talk_before(before, text_cases(before))
    cases = [Case(case.kind, (*past, *case.messages)) for case in image_cases(prompts, images)]
    with progress_bar("variants", len(cases) * len(bench.VARIANTS)) as progress:
        rows = bench.measure(engine, cases, depth, progress=progress)
    cells = [(row.variant, _with_interval(row.acceptance), _with_interval(row.tokens_per_step)) for row in rows]
    made = table("Holes", ("draft rows of the image", "acceptance at depth 1", "tokens/step"), cells)
    show(
        made, as_json, {"machine": machine(), "images": images, "before": before, "results": [asdict(r) for r in rows]}
    )


def _with_interval(value: tuple[float, float, float] | None) -> str:
    return "-" if value is None else "{:.3f} ({:.3f} to {:.3f})".format(*value)


@app.command()
def prefix(
    model: Model = "tiny-qwen",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out pictures.")] = 20,
    chats: Annotated[int, typer.Option(min=1, help="Chats of five turns.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer of a chat.")] = 32,
    weights: Weights = "auto",
    as_json: Json = False,
) -> None:
    """What rows that are kept save: first tokens, rows of a five-turn chat with images, and files of slots."""
    from foreglance.bench import prefix as bench
    from foreglance.bench.report import machine, table

    options = ModelOptions(model=model, weights=weights)
    engine = load_engine(options, options.settings(slots=1))
    with progress_bar("pictures", prompts) as progress:
        firsts = bench.first_tokens(engine, prompts, progress)
    with progress_bar("chats", chats) as progress:
        turns = bench.five_turns(engine, chats, max_tokens, progress)
    saved = bench.saved(engine, max_tokens)
    if as_json:
        told = {"first_token": [asdict(one) for one in firsts], "chat": [asdict(turn) for turn in turns]}
        print_json({"machine": machine(), "model": model, "draft": engine.best_draft, **told, "slot": asdict(saved)})
        return
    names = "first token", "prompt rows", "computed", "of cold, engine", "of cold, whole", "differ"
    cells = [(x.case, f"{x.prompt_rows:.0f}", f"{x.rows:.0f}", x.engine, x.whole, x.differing) for x in firsts]
    show(table(f"{model}, draft {engine.best_draft}: an image prompt", names, cells), False, {})
    names = "turn", "prompt rows", "image rows", "new", "computed", "first token, of cold"
    cells = [
        (at, *(f"{n:.1f}" for n in (x.prompt_rows, x.image_rows, x.new_rows, x.computed_rows)), x.first_token)
        for at, x in enumerate(turns, 1)
    ]
    show(table("Five turns", names, cells), False, {})
    cell = saved.rows, saved.file_bytes, saved.cached_bytes, f"{saved.save_ms:.0f} ms", f"{saved.restore_ms:.0f} ms"
    show(table("Slot", ("rows", "bytes of the file", "kept in memory", "save", "restore"), [cell]), False, {})


@app.command()
def operations(
    model: Model = "tiny-qwen",
    draft: Annotated[str, typer.Option(help="mtp, ngram or none.")] = "mtp",
    depth: Annotated[int, typer.Option(min=0, max=MAX_DEPTH, help="Draft depth.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 64,
    as_json: Json = False,
) -> None:
    """Where a decode step's time goes, by operation."""
    from foreglance.bench import operations as bench
    from foreglance.bench.prompts import image_cases
    from foreglance.bench.report import machine, table
    from foreglance.request import SamplingParams, Speculation

    request = image_cases(1)[0].request(
        SamplingParams(max_tokens=max_tokens), Speculation(draft, 0 if draft == "none" else depth)
    )
    lines = bench.measure(model, request)
    cells = [(x.scope, x.operation, f"{x.calls:.1f}", f"{x.microseconds:.0f}", f"{x.share:.1%}") for x in lines]
    made = table("Time of a decode step", ("in", "operation", "calls", "µs", "share"), cells)
    shares = bench.in_kernels(model, request, (0,) if draft == "none" or not depth else (0, depth))
    body = {"machine": machine(), "draft": draft, "depth": depth, "lines": [asdict(x) for x in lines]}
    show(made, as_json, body | {"in_kernels": [asdict(x) for x in shares]})
    if not as_json:
        cells = [(str(x.depth), f"{x.step:.0f}", f"{x.kernels:.0f}", f"{x.share:.0%}") for x in shares]
        show(table("Recorded steps", ("depth", "µs", "in kernels, µs", "share"), cells), as_json, {})
