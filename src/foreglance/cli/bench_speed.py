"""`foreglance bench make-checkpoint | speed | peers | quality`: what a run costs, here and elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from foreglance.cli import lists
from foreglance.cli.bench import PICTURES, Json, check_figure, progress_bar, show
from foreglance.cli.lists import chosen, numbers
from foreglance.cli.options import CPUS
from foreglance.cli.running import loading
from foreglance.cli.show import print_json, to_stderr
from foreglance.request import RequestError
from foreglance.settings import WeightFormat

FORMATS = tuple(name for name in get_args(WeightFormat) if name != "auto")
ENGINES = ("foreglance", "transformers", "llama.cpp")

Checkpoint = Annotated[str, typer.Option("--model", "--checkpoint", help="Embedded model, folder, GGUF or hub name.")]
Formats = Annotated[str, typer.Option("--weights", help=f"Comma-separated: {', '.join(FORMATS)}; or all.")]


def make_checkpoint(
    out: Annotated[Path, typer.Option(help="New or empty folder.")],
    shape: Annotated[str, typer.Option(help="qwen3.5-0.8b, or tiny.")] = "qwen3.5-0.8b",
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Share of the head's guesses that stand.")] = 0.7,
    reads: Annotated[
        str, typer.Option(help="What its head goes by: embedding, or hidden (always right if fed the right state).")
    ] = "embedding",
    as_json: Json = False,
) -> None:
    """Write a checkpoint of real shape whose greedy answer and acceptance are known, to measure engines on."""
    with loading():
        from foreglance.bench.checkpoint import write_checkpoint

        known = write_checkpoint(out, shape, acceptance, reads)
    body = {"out": str(out), "shape": shape, "acceptance": known.acceptance, "reads": reads, "cycle": len(known.cycle)}
    text = f"wrote {out}: {shape}, a cycle of {len(known.cycle)} tokens, acceptance {known.acceptance:.2f}"
    show(text, as_json, body)


def speed(
    model: Checkpoint = "tiny-qwen",
    weights: Formats = "fp16",
    threads: Annotated[str, typer.Option(help="Comma-separated counts.")] = "1",
    rows: Annotated[str, typer.Option(help="Comma-separated: rows of a step, beside 1.")] = "2,4,8",
    contexts: Annotated[str, typer.Option(help="Comma-separated: rows held while decoding, e.g. 256,2048,8192.")] = "",
    slots: Annotated[str, typer.Option(help="Comma-separated: sequences decoding at once, e.g. 1,2,4,8.")] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Rows of the prompt that prefill is measured with.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all settings take turns.")] = 7,
    operations: Annotated[bool, typer.Option(help="Also the time by operation.")] = True,
    as_json: Json = False,
) -> None:
    """What a step costs by rows, weights and threads, against the rate at which this machine reads memory."""
    with loading():
        from foreglance.bench import speed as bench
        from foreglance.bench.report import machine

        sweep = bench.Sweep(
            rows=numbers(rows, "rows"),
            rounds=rounds,
            prefill=prefill,
            contexts=numbers(contexts, "contexts"),
            slots=numbers(slots, "slots"),
        )
        results, lines = [], []
        for count in numbers(threads, "threads", CPUS):
            for name in chosen(weights, FORMATS, "weights"):
                with progress_bar(f"{name}, {count} thread(s)", sweep.work) as progress:
                    results.append(bench.measure(model, name, count, sweep, progress))
        if not results:
            raise RequestError("--threads needs at least one number", param="threads")
        if operations:
            lines = bench.by_operation(model, results[0].weights, results[0].threads)
        body = {"machine": machine(), "checkpoint": model} | results[0].as_json()
        body |= {"results": [one.as_json() for one in results], "operations": [asdict(line) for line in lines]}
    if as_json:
        print_json(body)
        return
    to_stderr(body["machine"])
    for table in _speed_tables(results, lines):
        show(table, False, {})


def _speed_tables(results: Sequence[Any], lines: Sequence[Any]) -> Iterator[object]:
    from foreglance.bench.report import shown, table

    rows = list(results[0].step_ratio)
    cells = [
        (
            one.weights,
            one.threads,
            f"{one.step_ms['1']:.2f}",
            *(f"{one.step_ratio[count]:.2f}" for count in rows),
            f"{one.tokens_per_second:.1f}",
            f"{one.prefill_tokens_per_second:.0f}",
            "-" if one.bytes_per_step is None else f"{one.bytes_per_step / 1e6:.0f}",
            f"{one.read_bandwidth / 1e9:.1f}",
            shown(one.decode_fraction_of_bandwidth),
        )
        for one in results
    ]
    names = ["weights", "threads", "step ms", *(f"{count} rows / 1" for count in rows), "tokens/s", "prefill tokens/s"]
    yield table("A step", [*names, "MB/step", "GB/s read", "of bandwidth"], cells)
    for title, field in (("Tokens/s by rows held", "by_context"), ("Tokens/s by slots", "by_slots")):
        counts = list(asdict(results[0])[field])
        if counts:
            told = [(one.weights, one.threads, *(f"{v:.1f}" for v in asdict(one)[field].values())) for one in results]
            yield table(title, ("weights", "threads", *counts), told)
    if lines:
        told = [(x.scope, x.operation, f"{x.calls:.1f}", f"{x.microseconds:.0f}", f"{x.share:.1%}") for x in lines]
        yield table("Time of a plain step", ("in", "operation", "calls", "µs", "share"), told)


def peers(
    model: Checkpoint = "tiny-qwen",
    weights: Formats = "fp16",
    threads: Annotated[int, typer.Option(min=1, max=CPUS, help="CPU threads of every engine.")] = 1,
    depths: Annotated[
        str, typer.Option(help="Comma-separated draft depths; 0 is off, auto is ours alone.")
    ] = "0,1,2,3,auto",
    engines: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(ENGINES)}.")] = "all",
    gguf: Annotated[
        Path | None, typer.Option(help="The same weights for llama.cpp; default: exported for this run.")
    ] = None,
    mmproj: Annotated[Path | None, typer.Option(help="The vision tower for llama.cpp.")] = None,
    gguf_types: Annotated[
        str, typer.Option(help="Comma-separated types to export: f32, f16, bf16, q8_0, q4_0.")
    ] = "f16,q8_0",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, each with a picture if the model takes any.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which everybody takes turns.")] = 3,
    figure: Annotated[Path | None, typer.Option(help="Picture to draw, .svg or .png.")] = None,
    as_json: Json = False,
) -> None:
    """The same prompts through foreglance, transformers and llama.cpp, interleaved in one run."""
    with loading(), tempfile.TemporaryDirectory(prefix="foreglance-") as temporary:
        from foreglance.bench import peers as bench
        from foreglance.bench.report import machine

        check_figure(figure, PICTURES)
        wanted = chosen(engines, ENGINES, "engines")
        kinds = lists.depths(depths)
        files, why = None, None
        if "llama.cpp" in wanted:
            files, why = bench.files_for(model, gguf, mmproj, gguf_types.split(","), Path(temporary))
        cases, image_rows, context = bench.cases_for(model, prompts, max_tokens)
        contenders = bench.contenders(
            model, chosen(weights, FORMATS, "weights"), threads, kinds, wanted, files, context, image_rows
        )
        with progress_bar("prompts", (rounds + 1) * len(cases) * len(contenders)) as progress:
            rows = bench.measure(contenders, cases, max_tokens, rounds, progress)
        if why is not None:
            rows.append(bench.Row("llama.cpp", "-", "-", threads, skipped=why))
        body = {
            "machine": machine(threads),
            "checkpoint": model,
            "threads": threads,
            "image_rows": image_rows,
            "max_tokens": max_tokens,
            "ratios": bench.ratios(rows),
            "ratios_of_best_runs": bench.ratios_of_best_runs(rows),
            "rows": [row.as_json() for row in rows],
        }
        if figure is not None:
            bench.draw(rows, figure, f"{Path(model).name}, {threads} thread(s), {'image' if image_rows else 'text'}")
    if as_json:
        print_json(body)
    else:
        to_stderr(body["machine"])
        show(_peers_table(rows), False, {})
        for engine, ratio in body["ratios"].items():
            fastest = body["ratios_of_best_runs"][engine]
            show(f"best setting / best setting of {engine}: {ratio:.2f}, fastest runs {fastest:.2f}", False, {})


def _peers_table(rows: Sequence[Any]) -> object:
    from foreglance.bench.report import shown, table

    cells = [
        (
            row.engine,
            row.weights,
            row.setting,
            row.threads,
            shown(row.tokens_per_second, ".1f"),
            shown(row.best, ".1f"),
            shown(row.prompt_ms, ".0f"),
            shown(row.acceptance),
            row.skipped if row.skipped is not None else shown(row.agrees, ".0%"),
        )
        for row in rows
    ]
    names = "engine", "weights", "setting", "threads", "tokens/s", "best", "prompt ms", "acceptance", "same text"
    return table("Peers", names, cells)


def quality(
    model: Checkpoint = "tiny-qwen",
    weights: Formats = "all",
    text: Annotated[
        Path | None, typer.Option(help="Text file to read; default: own answers (embedded models) or a bundled text.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=16, help="Tokens to read.")] = 400,
    as_json: Json = False,
) -> None:
    """What each weight format changes against fp32: logits, best tokens, perplexity."""
    with loading():
        from foreglance.bench import quality as bench
        from foreglance.bench.report import machine, table
        from foreglance.models.weights import embedded_models

        path = text or (None if model in embedded_models() else bench.TEXT)
        formats = chosen(weights, FORMATS, "weights")
        with progress_bar("formats", len(formats)) as progress:
            lines = bench.measure(model, formats, path, max_rows=max_rows, progress=progress)
        read = "own answers" if path is None else path.name
        body = {"machine": machine(), "model": model, "text": read, "results": [line.as_json() for line in lines]}
    cells = [
        (
            one.weights,
            f"{one.rms_error:.2e}",
            f"{one.worst_error:.2e}",
            f"{one.top1:.2%}",
            f"{one.divergence:.2e}",
            f"{one.perplexity:.4f}",
            one.tokens,
        )
        for one in lines
    ]
    names = "weights", "rms error", "worst error", "same best token", "divergence", "perplexity", "tokens"
    show(table(f"{model} on {read}, against fp32", names, cells), as_json, body)
