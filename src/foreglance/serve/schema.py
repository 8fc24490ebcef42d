"""The bodies of requests, as pydantic models: what is known, of which type. Pure.

A field that is not here is refused, so nothing is accepted and ignored; a field that is null counts as absent. Ranges
are checked where the values live, in `request`. `UNSUPPORTED` says what to do instead of fields of OpenAI's that have
no meaning here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from foreglance.request import DRAFT_KINDS, IMAGE_POLICIES, MAX_DEPTH, MAX_LOGPROBS

POLICIES = tuple(policy for policy in IMAGE_POLICIES if policy != "gap")  # a hole is for measurements only
MAX_STOPS = 16
NO_STORE = "nothing is stored here"
NO_AUDIO = "there is no audio"
LEAVE_OUT = "leave it out"

UNSUPPORTED = {
    **dict.fromkeys(("audio", "modalities"), NO_AUDIO),
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), NO_STORE),
    **dict.fromkeys(("service_tier", "verbosity", "prediction", "web_search_options", "moderation"), LEAVE_OUT),
    **dict.fromkeys(("functions", "function_call"), "use tools and tool_choice"),
    **dict.fromkeys(("best_of", "suffix", "echo"), LEAVE_OUT),
    **dict.fromkeys(("background", "conversation", "previous_response_id", "context_management"), NO_STORE),
    **dict.fromkeys(("max_tool_calls", "prompt", "include"), LEAVE_OUT),
    "n_predict": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "cache_prompt": "a finished conversation is always reused",
    "id_slot": "any free slot is used",
}


def _whole(text: str) -> str:
    """Half a surrogate pair, which JSON can spell, is no text."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("must be valid Unicode") from None
    return text


String = Annotated[str, AfterValidator(_whole)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def known_fields() -> frozenset[str]:
    """The names of all fields, for telling what a misspelt one may have meant."""
    return frozenset(name for body in _bodies(Body) for name in body.model_fields)


def _bodies(parent: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in parent.__subclasses__():
        yield child
        yield from _bodies(child)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorDetail


class Speculative(Body):
    """Who guesses ahead. Never changes a token; `depth` 0 is drafts off."""

    draft: Literal[DRAFT_KINDS] | None = None
    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)] | Literal["auto"] | None = None
    images: Literal[POLICIES] | None = Field(None, description="What a draft gets for an image row.")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingBody(Body):
    """What all endpoints that generate share."""

    model: String | None = None
    temperature: float | None = Field(None, description="0 is greedy; default 1.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 is off.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token ids to what is added to their logits.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(None, description="Default: drawn at random.")
    stop: Annotated[String, Field(min_length=1)] | Annotated[list[String], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    speculative: Speculative | None = None


class ChoicesBody(SamplingBody):
    """What chat and plain completions share."""

    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    return_tokens: bool | None = Field(None, description="Give token ids, texts and draft depths; only with n = 1.")


class TextPart(Body):
    type: Literal["text"]
    text: String


class ImageUrl(Body):
    url: String = Field(description="A data URL; http(s) only if the server fetches remote images.")
    detail: Literal["auto"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Content = String | list[Part]


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: String | list[TextPart]


class UserMessage(Body):
    role: Literal["user"]
    content: Content


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: String | list[TextPart]


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class ChatBody(ChoicesBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    store: Literal[False] | None = None


class CompletionBody(ChoicesBody):
    prompt: String | list[String] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class InputText(Body):
    type: Literal["input_text"]
    text: String


class InputImage(Body):
    type: Literal["input_image"]
    image_url: String = Field(description="A data URL; http(s) only if the server fetches remote images.")
    detail: Literal["auto"] | None = None


class OutputText(Body):
    """A piece of an earlier answer, as it was given; annotations and log-probabilities are not read."""

    type: Literal["output_text"]
    text: String
    annotations: list[dict] | None = None
    logprobs: list[dict] | None = None


InputPart = Annotated[InputText | InputImage | OutputText, Field(discriminator="type")]


class InputMessage(Body):
    """A turn. `id` and `status` are there when an earlier answer is handed back as it was given."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: String | list[InputPart]
    id: String | None = None
    status: String | None = None


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: TextFormat | None = None


class ResponseBody(SamplingBody):
    input: String | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: String | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: int | None = None
    metadata: dict[String, String] | None = Field(None, description="Given back with the answer.")
    store: Literal[False] | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["disabled"] | None = None


class TokenizeBody(Body):
    content: String
    add_special: bool | None = Field(None, description="Also the tokens that are put around any text.")
    with_pieces: bool | None = Field(None, description="Also the text of each token.")


class DetokenizeBody(Body):
    tokens: list[Annotated[int, Field(ge=0)]]
