"""`foreglance serve`: the OpenAI-compatible server and its page."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from foreglance.cli.options import MODEL, DraftOptions, ModelOptions, takes
from foreglance.cli.running import load_engine
from foreglance.cli.show import print_json, to_stderr
from foreglance.request import RequestError
from foreglance.serve.settings import LOOPBACK_NAMES, ServerSettings, digest, is_loopback
from foreglance.settings import Settings

if TYPE_CHECKING:
    from foreglance.engine import Engine

WHERE, LIMITS, CACHES = "Who may ask", "Limits", "Caches"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def num_bytes(text: str) -> int:
    """`1500`, `500M` or `4GiB` as a number of bytes."""
    found = re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", str(text).strip(), re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no number of bytes such as 1500, 500M or 4G")
    return int(found[1]) * UNITS[found[2].upper()]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, DraftOptions):
    host: Annotated[str, typer.Option("--host", rich_help_panel=WHERE, help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", rich_help_panel=WHERE, min=0, max=65535, help="0: any.")] = 8321
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", rich_help_panel=WHERE, help="Keys that are taken, one a line; # is a comment."),
    ] = None
    allow_host: Annotated[
        list[str],
        typer.Option("--allow-host", rich_help_panel=WHERE, help="A further name of this server; repeat for more."),
    ] = field(default_factory=list)
    cors_origin: Annotated[
        list[str],
        typer.Option("--cors-origin", rich_help_panel=WHERE, help="Web pages of this origin may ask; repeat for more."),
    ] = field(default_factory=list)
    allow_remote_images: Annotated[
        bool,
        typer.Option(
            "--allow-remote-images", rich_help_panel=WHERE, help="Fetch images from public http(s) addresses."
        ),
    ] = ServerSettings.remote_images
    alias: Annotated[
        list[str], typer.Option("--alias", rich_help_panel=MODEL, help="A further name for the model; repeat for more.")
    ] = field(default_factory=list)
    slots: Annotated[
        int, typer.Option("--slots", rich_help_panel=LIMITS, min=1, help="Answers that are generated at once.")
    ] = Settings.slots
    context: Annotated[
        int | None,
        typer.Option("--context", rich_help_panel=LIMITS, help="Rows for prompt and answer; default: the model's."),
    ] = Settings.context
    queue: Annotated[
        int, typer.Option("--queue", rich_help_panel=LIMITS, min=0, help="Requests that may wait; then 429.")
    ] = ServerSettings.queue
    max_body_mb: Annotated[
        int, typer.Option("--max-body-mb", rich_help_panel=LIMITS, min=1, help="Size of a request, with its images.")
    ] = ServerSettings.max_body >> 20
    max_images: Annotated[
        int, typer.Option("--max-images", rich_help_panel=LIMITS, min=0, help="Images in a request.")
    ] = Settings.max_images
    max_pixels: Annotated[
        int, typer.Option("--max-pixels", rich_help_panel=LIMITS, min=1, help="Pixels of an image.")
    ] = Settings.max_pixels
    grace: Annotated[
        float, typer.Option("--grace", rich_help_panel=LIMITS, min=0, help="Seconds to finish when told to stop.")
    ] = ServerSettings.grace
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", rich_help_panel=LIMITS, min=1, max=64, help="Copies, each in its own process, on Ray Serve."
        ),
    ] = None
    prefix_cache_bytes: Annotated[
        int,
        typer.Option(
            "--prefix-cache-bytes",
            rich_help_panel=CACHES,
            parser=num_bytes,
            metavar="BYTES",
            help="Memory for computed rows that later requests may begin with, such as 500M or 4G; 0: none.",
        ),
    ] = Settings.prefix_cache_bytes
    slot_save_path: Annotated[
        Path | None,
        typer.Option("--slot-save-path", rich_help_panel=CACHES, help="Folder to which POST /slots saves."),
    ] = ServerSettings.slot_save_path
    slots_debug: Annotated[
        bool, typer.Option("--slots-debug", rich_help_panel=CACHES, help="GET /slots shows the text of conversations.")
    ] = ServerSettings.slots_debug
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for each request.")] = False

    def engine_settings(self) -> Settings:
        return self.settings(
            slots=self.slots,
            context=self.context,
            max_images=self.max_images,
            max_pixels=self.max_pixels,
            prefix_cache_bytes=self.prefix_cache_bytes,
        )

    def server_settings(self) -> ServerSettings:
        return ServerSettings(
            aliases=tuple(self.alias),
            speculation=self.speculation(),
            api_keys=() if self.api_key_file is None else _keys(self.api_key_file),
            cors_origins=tuple(map(_origin, self.cors_origin)),
            hosts=_hosts(self.host, self.allow_host),
            queue=self.queue,
            max_body=self.max_body_mb << 20,
            grace=self.grace,
            remote_images=self.allow_remote_images,
            slot_save_path=None if self.slot_save_path is None else _folder(self.slot_save_path),
            slots_debug=self.slots_debug,
        )


def _keys(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--api-key-file {path} cannot be read: {error}", param="api_key_file") from error
    keys = tuple(digest(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise RequestError(f"--api-key-file {path} holds no key; write one a line", param="api_key_file")
    return keys


def _folder(path: Path) -> Path:
    folder = path.expanduser()
    if not folder.is_dir():
        raise RequestError(f"--slot-save-path {path} is no folder", param="slot_save_path")
    return folder


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if text != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or text.count("/") != 2):
        raise RequestError(f"--cors-origin takes an origin like https://example.org, got {text!r}", param="cors_origin")
    return text


def _hosts(host: str, more: list[str]) -> frozenset[str]:
    """Bound to loopback, the names of loopback; elsewhere any name, unless some are given."""
    if not is_loopback(host) and not more:
        return frozenset()
    return LOOPBACK_NAMES | {name.lower() for name in (host, *more)}


@takes(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model to clients of OpenAI's API, with a page to try it at /."""
    from foreglance.serve.run import bind, run

    settings = options.server_settings()
    if options.replicas is not None and (settings.slot_save_path is not None or settings.slots_debug):
        raise RequestError("slots are those of one engine; leave out --replicas", param="replicas")
    bound = bind(options.host, options.port)
    load = partial(load_engine, options, options.engine_settings(), options.draft, options.second_model)
    if options.replicas is None:
        from foreglance.serve.app import create_app

        engine = load()
        ready = partial(_greet, options, bound, engine.target.spec.name, engine.context)
        run(create_app(engine, settings), bound, settings.grace, ready, options.access_log)
    else:
        _serve_replicas(options, settings, bound, load)


def _serve_replicas(
    options: ServeOptions, settings: ServerSettings, bound: socket.socket, load: Callable[[], Engine]
) -> None:
    from foreglance.serve.balancer import Balancer, name_of
    from foreglance.serve.replicas import Cluster, create_balanced_app
    from foreglance.serve.run import run

    cluster = Cluster(load, settings)
    try:
        started = cluster.add_all(map(name_of, range(options.replicas)))
        balancer = Balancer(cluster, started, options.slots)

        def ready() -> None:
            _greet(options, bound, *balancer.serves)

        run(create_balanced_app(balancer, settings), bound, settings.grace, ready, options.access_log)
    finally:
        cluster.close()


def _greet(options: ServeOptions, bound: socket.socket, model: str, context: int) -> None:
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{bound.getsockname()[1]}"
    what = model if options.replicas is None else f"{options.replicas} replicas of {model}"
    to_stderr(
        f"{what} at {url}: page at {url}/, API at {url}/v1, {options.slots} slots of {context} rows; Ctrl-C stops it"
    )
    if not is_loopback(options.host) and options.api_key_file is None:
        to_stderr("anyone who reaches this address may use the server; --api-key-file asks for keys", "yellow")
    if options.json:
        print_json({"url": url, "model": model})
