"""The bodies of requests, as pydantic models: what is known, of which type. Pure.

A field that is not here is refused, so nothing is accepted and ignored; a field that is null counts as absent. Ranges
are checked where the values live, in `request`. `UNSUPPORTED` says what to do instead of fields of OpenAI's that have
no meaning here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

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
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "use /v1/chat/completions or /v1/responses"),
    "reasoning_effort": "use reasoning_budget and chat_template_kwargs",
    "reasoning": "use reasoning_budget and chat_template_kwargs",
    "response_format.json_schema.description": "say it in a message",
    "text.format.description": "say it in a message",
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


class CalledFunction(Body):
    name: String
    arguments: String = Field(description="The text of a JSON object.")


class MadeCall(Body):
    id: String
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: String | list[TextPart] | None = None
    tool_calls: list[MadeCall] | None = None
    reasoning_content: String | None = None
    refusal: None = None


class ToolMessage(Body):
    role: Literal["tool"]
    tool_call_id: String
    content: String | list[TextPart]


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def _whole_json(value: Any) -> Any:
    """Any JSON, its text checked like that of other fields."""
    _whole(json.dumps(value, ensure_ascii=False))
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_whole_json)]


class Function(Body):
    name: String
    description: String | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="Kept to where a call is forced, or calls are not parallel.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: String


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: String
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = Field(None, description="A schema is always kept to.")


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatBody(ChoicesBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables that the chat template reads.")
    reasoning_budget: int | None = Field(None, description="Tokens of reasoning after which the answer begins.")
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


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: String


class ReasoningItem(Body):
    """The reasoning before an answer, as it was given; it belongs to the message behind it."""

    type: Literal["reasoning"]
    id: String
    summary: Annotated[list[dict], Field(max_length=0)]
    content: list[ReasoningText] | None = None
    status: String | None = None
    encrypted_content: None = None


class CallItem(Body):
    """A call that an earlier answer made, as it was given."""

    type: Literal["function_call"]
    call_id: String
    name: String
    arguments: String = Field(description="The text of a JSON object.")
    id: String | None = None
    status: String | None = None


class CallOutputItem(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: String
    output: String | list[InputText]
    id: String | None = None
    status: String | None = None


ITEMS = ("reasoning", "function_call", "function_call_output")


def _item_kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else item.type
    return kind if kind in ITEMS else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_item_kind),
]


class OfFunctions(Body):
    type: Literal["function"]


class FunctionTool(Function, OfFunctions):
    """A tool as responses name it: one level less than chat."""


class NamedFunctionTool(NamedFunction, OfFunctions):
    """The one that must be called."""


class NamedSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None


class ResponseBody(SamplingBody):
    input: String | Annotated[list[InputItem], Field(min_length=1)]
    instructions: String | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables that the chat template reads.")
    reasoning_budget: int | None = Field(None, description="Tokens of reasoning after which the answer begins.")
    metadata: dict[String, String] | None = Field(None, description="Given back with the answer.")
    store: Literal[False] | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["disabled"] | None = None


class TokenizeBody(Body):
    content: String
    add_special: bool | None = Field(None, description="Also the tokens that are put around any text.")
    with_pieces: bool | None = Field(None, description="Also the text of each token.")


class SlotBody(Body):
    filename: String | None = None


class DetokenizeBody(Body):
    tokens: list[Annotated[int, Field(ge=0)]]
