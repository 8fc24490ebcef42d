"""The command line: `foreglance demo | generate | chat | explain | models | serve | bench`.

A border of the project: words typed by a person become requests here, and whatever is wrong with them becomes one
sentence on stderr and exit code 2. Owns no rule about tokens; never touches tensors.
"""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foreglance import __version__
from foreglance.cli import bench, bench_load, bench_speed, chat, demo, explain, export, generate, models, serve
from foreglance.cli.show import print_json, to_stderr
from foreglance.request import RequestError

UsageError = typer.BadParameter.__mro__[1]  # click's; recent versions of typer carry a click of their own
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Commands(TyperGroup):
    """Commands whose errors are sentences; with `--json` also an object on stdout."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RequestError as error:
            to_stderr(f"foreglance: {error}", style="red")
            self._answer(ctx, str(error), error.param, error.code)
            raise typer.Exit(2) from error
        except UsageError as error:
            self._answer(ctx, error.format_message(), None, "usage")
            raise
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            to_stderr(f"foreglance: {error}", style="red")
            self._answer(ctx, str(error), None, "not_written")
            raise typer.Exit(2) from error

    @staticmethod
    def _answer(ctx: Any, message: str, param: str | None, code: str) -> None:
        if ctx.meta["json"]:
            print_json({"error": {"message": message, "param": param, "code": code}})


app = typer.Typer(
    cls=Commands,
    help="Vision-language models whose speculative decoding sees images and never changes a token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foreglance {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (
    demo.demo,
    generate.generate,
    chat.chat,
    explain.explain,
    models.models,
    serve.serve,
    export.export_gguf,
):
    app.command()(command)
for command in (
    bench_speed.make_checkpoint,
    bench_speed.speed,
    bench_speed.peers,
    bench_speed.quality,
    bench_load.slots,
    bench_load.soak,
):
    bench.app.command()(command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
