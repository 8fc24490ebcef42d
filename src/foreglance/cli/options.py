"""Options of the commands, and the one place where they become settings and requests.

Options are fields of frozen dataclasses, so commands share them by inheritance and each gets one object. Defaults and
checks are those of `SamplingParams`, `Speculation` and `Settings`. No torch here: bad options are refused at once.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, TypeVar, get_type_hints

import typer

from foreglance.request import IMAGE_POLICIES, Message, Request, RequestError, SamplingParams, Speculation
from foreglance.settings import Settings

DEFAULT_MODEL = "tiny-qwen"
DRAFTERS = ("auto", "none", "mtp", "ngram")  # those that need no second model
ASSISTANT = "assistant"
POLICIES = tuple(policy for policy in IMAGE_POLICIES if policy != "gap")  # a hole is for measurements only
CPUS = os.cpu_count() or 1  # kernels' threads wait awake, so that more of them than processors stand in their way
MODEL, DRAFTS, SAMPLING = "Model", "Drafts (never change a token)", "Sampling"
Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a command of a function that takes one `options` object, with an option for each of its fields."""

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)

        @functools.wraps(command)
        def run(**given: object) -> None:
            command(options(**given))

        run.__signature__ = inspect.Signature(
            [
                inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=_default(one), annotation=hint)
                for one, hint in ((one, hints[one.name]) for one in fields(options))
            ]
        )
        run.__annotations__ = hints
        return run

    return decorate


def _default(option) -> object:
    if option.default is not MISSING:
        return option.default
    return option.default_factory() if option.default_factory is not MISSING else inspect.Parameter.empty


def _option(*names: str, panel: str | None = None, **more):
    return typer.Option(*names, rich_help_panel=panel, **more)


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    json: Annotated[bool, _option("--json", help="Print one JSON object and nothing else on stdout.")] = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions(JsonOption):
    """Which model, and how it is laid out."""

    model: Annotated[
        str, _option("--model", panel=MODEL, help="Embedded model, checkpoint folder, GGUF file or hub name.")
    ] = DEFAULT_MODEL
    mmproj: Annotated[
        Path | None,
        _option("--mmproj", panel=MODEL, help="Vision tower of a GGUF model; default: mmproj*.gguf beside it."),
    ] = None
    weights: Annotated[str, _option("--weights", panel=MODEL, help="auto, fp32, fp16, q8 or q4.")] = Settings.weights
    no_weight_cache: Annotated[
        bool, _option("--no-weight-cache", panel=MODEL, help="Quantise anew, and keep nothing of it on disk.")
    ] = False
    threads: Annotated[
        int | None,
        _option(
            "--threads",
            min=1,
            max=CPUS,
            panel=MODEL,
            help="CPU threads; default: one for a model under 64 MB, else torch's choice.",
        ),
    ] = None

    def settings(self, **layout: int | str | None) -> Settings:
        try:
            kept = 0 if self.no_weight_cache else Settings.weight_cache_bytes
            return Settings(weights=self.weights, weight_cache_bytes=kept, **layout)
        except ValueError as error:
            raise RequestError(str(error), param="settings", code="invalid_settings") from error


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Who guesses ahead."""

    draft: Annotated[
        str,
        _option(
            "--draft",
            panel=DRAFTS,
            help=f"One of {', '.join((*DRAFTERS, ASSISTANT))}, or a second model: embedded, folder, GGUF or hub name.",
        ),
    ] = Speculation.draft
    depth: Annotated[str, _option("--depth", panel=DRAFTS, help="Guesses ahead: auto or a number.")] = Speculation.depth
    draft_images: Annotated[
        str, _option("--draft-images", panel=DRAFTS, help=f"What a draft gets for an image: {', '.join(POLICIES)}.")
    ] = Speculation.images

    @property
    def second_model(self) -> str | None:
        """The model that drafts, if it is not the target itself: what `--draft` names besides the kinds."""
        return None if self.draft in (*DRAFTERS, ASSISTANT) else self.draft

    def speculation(self) -> Speculation:
        if self.draft_images == "gap":
            raise RequestError(
                f"--draft-images gap is for measurements only; what works is {', '.join(POLICIES)}",
                param="draft_images",
                code="draft_images_unsupported",
            )
        if self.draft_images not in POLICIES:
            raise RequestError(
                f"--draft-images must be one of {', '.join(POLICIES)}, got {self.draft_images!r}", param="draft_images"
            )
        return Speculation("auto" if self.second_model else self.draft, _depth(self.depth), self.draft_images)


def _depth(value: str) -> int | str:
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise RequestError(f"--depth must be auto or a number, got {value!r}", param="depth") from None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a token is picked, and when to stop."""

    max_tokens: Annotated[int, _option("--max-tokens", panel=SAMPLING)] = SamplingParams.max_tokens
    temperature: Annotated[float, _option("--temperature", panel=SAMPLING, help="0 is greedy.")] = (
        SamplingParams.temperature
    )
    top_k: Annotated[int, _option("--top-k", panel=SAMPLING, help="0 is off.")] = SamplingParams.top_k
    top_p: Annotated[float, _option("--top-p", panel=SAMPLING, help="1 is off.")] = SamplingParams.top_p
    min_p: Annotated[float, _option("--min-p", panel=SAMPLING, help="0 is off.")] = SamplingParams.min_p
    repetition_penalty: Annotated[float, _option("--repetition-penalty", panel=SAMPLING)] = (
        SamplingParams.repetition_penalty
    )
    presence_penalty: Annotated[float, _option("--presence-penalty", panel=SAMPLING)] = SamplingParams.presence_penalty
    frequency_penalty: Annotated[float, _option("--frequency-penalty", panel=SAMPLING)] = (
        SamplingParams.frequency_penalty
    )
    logit_bias: Annotated[
        list[str], _option("--logit-bias", panel=SAMPLING, metavar="ID=VALUE", help="Repeat for more.")
    ] = field(default_factory=list)
    seed: Annotated[int, _option("--seed", panel=SAMPLING)] = SamplingParams.seed
    stop: Annotated[list[str], _option("--stop", panel=SAMPLING, help="Stop string; repeat for more.")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, _option("--ignore-eos", panel=SAMPLING, help="Go on to --max-tokens.")] = (
        SamplingParams.ignore_eos
    )
    reasoning_budget: Annotated[
        int | None, _option("--reasoning-budget", panel=SAMPLING, help="Tokens of reasoning; default: no limit.")
    ] = SamplingParams.reasoning_budget

    def sampling(self) -> SamplingParams:
        plain = {one.name: vars(self)[one.name] for one in fields(SamplingOptions)}
        return SamplingParams(**plain | {"stop": tuple(self.stop), "logit_bias": dict(map(_bias, self.logit_bias))})


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise RequestError(
            f"--logit-bias takes ID=VALUE, a token id and a number, got {text!r}", param="logit_bias"
        ) from None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(ModelOptions, DraftOptions, SamplingOptions):
    """Everything that a generated text depends on, except the conversation."""

    image: Annotated[list[Path], _option("--image", help="Picture file; repeat for more.")] = field(
        default_factory=list
    )
    system: Annotated[str | None, _option("--system", help="System message.")] = None
    context: Annotated[
        int | None, _option("--context", panel=MODEL, help="Rows for prompt and answer; default: the model's.")
    ] = Settings.context

    def settings(self, **layout: int | str | None) -> Settings:
        return super().settings(context=self.context, **layout)

    def request(self, messages: tuple[Message, ...], speculation: Speculation | None = None) -> Request:
        return Request(messages, self.sampling(), speculation or self.speculation())

    def head(self) -> tuple[Message, ...]:
        """What a conversation starts with."""
        return (Message.of("system", self.system),) if self.system else ()


@dataclass(frozen=True, kw_only=True)
class PromptOptions(GenerationOptions):
    """One question."""

    prompt: Annotated[str, _option("--prompt", help="What to ask; pictures come before it.")]

    def question(self) -> tuple[Message, ...]:
        return (*self.head(), Message.of("user", self.prompt, self.image))
