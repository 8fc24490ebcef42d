"""What a client is told when something is wrong: OpenAI's error shape, with the field named. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from foreglance.request import RequestError

# Names of `request` and of the engine, as they are called on the wire.
WIRE_NAMES = {
    "draft": "speculative.draft",
    "depth": "speculative.depth",
    "draft_images": "speculative.images",
    "image": "messages",
    "template_options": "chat_template_kwargs",
}


# What pydantic's kinds of errors are called here.
WORDS = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "too_short": "must hold at least {min_length} item(s)",
    "too_long": "must hold at most {max_length} item(s)",
    "string_too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_unicode": "must be valid Unicode",
    "union_tag_invalid": "must be one of {expected_tags}",
}


class ApiError(Exception):
    """An answer that is an error. `param` is the path of the field, such as `messages[0].content`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refused(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def broken(error: Exception) -> ApiError:
    """The server's own code failed over a request. What it says is for the log."""
    return ApiError(500, f"the server failed ({type(error).__name__})", code="server_error")


def from_request_error(error: RequestError, names: Mapping[str, str] | None = None) -> ApiError:
    """A request that the engine refuses. `names` are those of the endpoint, where they differ from `WIRE_NAMES`."""
    param = (WIRE_NAMES | dict(names or {})).get(error.param, error.param)
    return refused(param, str(error).removeprefix(f"{error.param}: "), error.code)


def from_validation(
    errors: Sequence[Mapping[str, Any]], body: Any, known: Collection[str], unsupported: Mapping[str, str]
) -> ApiError:
    """The most specific of pydantic's errors. `known` are the fields of all bodies, `unsupported` those that OpenAI has
    and that are not served, with what to do instead."""
    if errors and errors[0]["type"] == "json_invalid":
        return refused(None, f"the body is no JSON: {errors[0]['ctx']['error']}", "invalid_json")
    if not isinstance(body, Mapping):
        return refused(None, "the body must be a JSON object, sent as Content-Type: application/json", "invalid_json")
    placed = [(_resolve(error["loc"][1:], body, error["type"]), error) for error in errors]
    path, error = max(placed, key=lambda one: len(one[0]))
    name = path_name(path)
    if error["type"] == "extra_forbidden":
        return _unknown(name, str(path[-1]), known, unsupported)
    if error["type"].startswith("union_tag"):
        name = path_name((*path, error["ctx"]["discriminator"].strip("'")))
    if error["type"] in ("missing", "union_tag_not_found"):
        return refused(name, "is required", "missing_required_parameter")
    same = dict.fromkeys(_sentence(one) for at, one in placed if at == path)
    return refused(name, ", or ".join(same))


def _unknown(name: str, last: str, known: Collection[str], unsupported: Mapping[str, str]) -> ApiError:
    if name in unsupported:
        return refused(name, f"is not supported by this server; {unsupported[name]}", "unsupported_parameter")
    close = get_close_matches(last, known, 1)
    return refused(name, "is not known here" + (f"; did you mean {close[0]}?" if close else ""), "unknown_parameter")


def _sentence(error: Mapping[str, Any]) -> str:
    words = WORDS.get(error["type"])
    if words is not None:
        return words.format(**error.get("ctx", {})).replace("must be False", "must be false")
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _resolve(place: Sequence[Any], body: Any, kind: str) -> tuple[Any, ...]:
    """The part of a pydantic location that is a path into the body: tags of unions are left out."""
    path, value = [], body
    for at, step in enumerate(place):
        inside = (isinstance(value, Mapping) and step in value) or (
            isinstance(value, Sequence) and not isinstance(value, str) and isinstance(step, int) and step < len(value)
        )
        if inside:
            path.append(step)
            value = value[step]
        elif kind == "missing" and at == len(place) - 1:
            path.append(step)
    return tuple(path)


def path_name(path: Sequence[Any]) -> str:
    """`("messages", 0, "content")` -> `messages[0].content`."""
    name = ""
    for step in path:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else str(step)
    return name
