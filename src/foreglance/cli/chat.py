"""`foreglance chat`: a conversation with pictures by path. One engine, whose prefix cache keeps earlier turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from foreglance.cli.options import GenerationOptions, takes
from foreglance.cli.running import load_engine, run
from foreglance.cli.show import TokenPrinter, print_json, report, stats_line, to_stderr, to_stdout
from foreglance.images import open_picture
from foreglance.request import Message, RequestError, Result

if TYPE_CHECKING:
    from foreglance.engine import Engine

HELP = """/image PATH  add a picture to the next message
/stats       numbers of the last answer
/reset       forget the conversation
/help        this
/quit        end (so does the end of input; Ctrl-C stops an answer)"""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(GenerationOptions):
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Mark accepted drafts in the text.")] = False


@takes(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Talk about text and pictures; earlier turns are not computed again."""
    settings = options.settings()
    options.request((Message.of("user", "checks the options"),))
    for path in options.image:
        open_picture(path, settings.max_pixels)
    conversation = Conversation(options, load_engine(options, settings, options.draft, options.second_model))
    if not options.json:
        to_stderr("/help shows the commands", style="dim")
    for line in _lines(prompted=not options.json and sys.stdin.isatty()):
        if not conversation.hear(line):
            break
    if options.json:
        print_json({"model": conversation.model, "turns": conversation.turns})


def _lines(prompted: bool) -> Iterator[str]:
    """Non-empty lines of stdin until it ends; Ctrl-C at the prompt ends it too."""
    if not prompted:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  arrow keys and history
    while True:
        try:
            line = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            to_stdout().print()
            return
        if line:
            yield line


class Conversation:
    """What was said, pictures that wait for the next message, and the numbers of each turn."""

    def __init__(self, options: ChatOptions, engine: Engine):
        self.turns: list[dict] = []
        self.model = engine.target.spec.name
        self._options = options
        self._engine = engine
        self._messages = options.head()
        self._pictures = [str(path) for path in options.image]
        self._last: Result | None = None

    def hear(self, line: str) -> bool:
        """A message or a command; False ends the chat."""
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/image":
            self._add_picture(rest.strip().strip("'\""))  # terminals quote a file that is dropped on them
        elif command == "/reset":
            self._messages, self._pictures = self._options.head(), []
            to_stderr("the conversation starts anew", style="dim")
        elif command == "/stats":
            to_stderr("nothing was said yet" if self._last is None else stats_line(self._last), style="dim")
        elif command == "/help":
            to_stderr(HELP)
        elif command.startswith("/") and "/" not in command[1:]:
            to_stderr(f"unknown command {command}\n{HELP}", style="red")
        else:
            self._say(line)
        return True

    def _add_picture(self, path: str) -> None:
        try:
            open_picture(path, self._engine.settings.max_pixels)
        except RequestError as error:
            to_stderr(str(error), style="red")
            return
        self._pictures.append(path)
        to_stderr(f"{path} goes with your next message", style="dim")

    def _say(self, text: str) -> None:
        """One turn. What is refused is said and leaves the conversation as it was."""
        messages = (*self._messages, Message.of("user", text, self._pictures))
        pictures, self._pictures = self._pictures, []
        try:
            result = self._answer(messages)
        except RequestError as error:
            more = "; /reset starts anew" if error.code == "context_length_exceeded" else ""
            to_stderr(f"{error}{more}", style="red")
            return
        self._last = result
        self.turns.append({"user": text, "images": pictures, **report(result, self.model)})
        if result.error:
            to_stderr(result.error, style="red")
            return
        self._messages = (*messages, Message.of("assistant", result.text))

    def _answer(self, messages: tuple[Message, ...]) -> Result:
        request = self._options.request(messages)
        if self._options.json:
            return run(self._engine, request)
        printer = TokenPrinter(self._options.show_drafts)
        result = run(self._engine, request, printer)
        printer.end()
        to_stderr(stats_line(result), style="dim")
        return result
