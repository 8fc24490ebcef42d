"""An engine for a command, and a request through it as it streams. Everything loud goes to stderr.

torch and transformers are imported here, inside functions, so that a command without work starts at once.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from foreglance.cli.show import to_stderr
from foreglance.images import open_pictures
from foreglance.request import Request, RequestError, Result, Token
from foreglance.settings import Settings

if TYPE_CHECKING:
    from foreglance.cli.options import ModelOptions
    from foreglance.engine import Engine


class Interrupt:
    """Whether Ctrl-C was pressed. A flag, not an exception: an engine must not be left in the middle of a step."""

    def __init__(self) -> None:
        self.pressed = False

    def press(self, *_: object) -> None:
        if self.pressed:  # the second time, out at once
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def hush() -> None:
    """Keep the libraries' chatter off stderr; must run before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for category in (DeprecationWarning, FutureWarning, UserWarning):
        warnings.simplefilter("ignore", category)


@contextmanager
def loading() -> Iterator[None]:
    """Anything wrong with a model is the user's to mend."""
    hush()
    from foreglance.models.base import ModelError

    try:
        yield
    except ModelError as error:
        raise RequestError(str(error), param="model", code="model_unusable") from error


SMALL_MODEL = 64 << 20  # bytes of weights
LONG_LOAD = 2.0  # seconds that nobody minds to wait without a bar


def threads_for(model: str) -> int:
    """One thread for a model so small that waiting for a second one costs more than it brings; else torch's choice."""
    import torch

    from foreglance.models.base import ModelError
    from foreglance.models.weights import find_model, stored_bytes

    try:
        stored = stored_bytes(find_model(model))
    except ModelError:
        return torch.get_num_threads()  # loading will say what is wrong
    return 1 if stored <= SMALL_MODEL else torch.get_num_threads()


@contextmanager
def loading_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal's stderr once loading takes longer than `LONG_LOAD`; -> what hears how far it is: name of the
    checkpoint, bytes done, bytes in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console, began = Console(stderr=True), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)

    def hear(name: str, done: int, of: int) -> None:
        if console.is_terminal and time.monotonic() - began > LONG_LOAD:
            bar.start()
            bar.update(task, description=f"loading {name}", completed=done, total=of)

    try:
        yield hear
    finally:
        if bar.live.is_started:
            bar.stop()


def load_engine(options: ModelOptions, settings: Settings, draft: str = "auto", second: str | None = None) -> Engine:
    """Load the model that the options name, and a second one that drafts: `second`, or the assistant that lies beside
    the target. Anything wrong with them is the user's to mend, so it is a `RequestError`."""
    hush()
    import torch

    from foreglance.engine import Engine
    from foreglance.models.base import ModelError
    from foreglance.models.gguf.folder import names_of
    from foreglance.models.weights import find_assistant, find_model, heard_by

    try:
        model, second = names_of(options.model, options.mmproj, second)
    except ModelError as error:
        raise RequestError(str(error), param="model", code="model_unusable") from error
    if options.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(options.threads or threads_for(model))
    if second is not None:
        try:
            find_model(second)
        except ModelError as error:
            raise RequestError(f"--draft: {error}", param="draft", code="draft_unavailable") from error
    try:
        if second is None and draft in ("auto", "assistant"):
            second = find_assistant(model)
        if draft in ("none", "ngram"):  # nobody will use the drafter that would be tried
            settings = replace(settings, try_drafts=False)
        with loading_bar() as hear, heard_by(hear):
            engine = Engine.load(model, settings, draft_model=second)
    except ModelError as error:
        raise RequestError(str(error), param="model", code="model_unusable") from error
    to_stderr(f"{engine.target.spec.name}: {engine.self_test}", style="dim")
    return engine


def check_pictures(request: Request, settings: Settings) -> None:
    """Refuse bad pictures before a model is loaded."""
    open_pictures(request.messages, settings.max_images, settings.max_pixels)


def run(engine: Engine, request: Request, on_token: Callable[[Token], None] = lambda token: None) -> Result:
    """Stream one request. Ctrl-C cancels it between two steps; the result then holds what was there."""
    engine.add(request)
    with interruptible() as interrupt:
        while True:
            if interrupt.pressed:
                engine.cancel(request.id)
            for event in engine.step():
                if event.request_id != request.id:
                    continue
                for token in event.tokens:
                    on_token(token)
                if event.result is not None:
                    return event.result
