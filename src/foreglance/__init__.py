"""foreglance: a multimodal language model engine whose speculative decoding sees images and never changes a token.

The names below are imported when they are first used, so that `foreglance --help` and `--version` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreglance.engine import Engine
    from foreglance.request import (
        Event,
        Grammar,
        Message,
        Request,
        RequestError,
        Result,
        SamplingParams,
        Speculation,
        Token,
        ToolCall,
    )
    from foreglance.settings import Settings

__all__ = [
    "Engine",
    "Event",
    "Grammar",
    "Message",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "Settings",
    "Speculation",
    "Token",
    "ToolCall",
]
__version__ = "0.1.0"

_HOMES = {"Engine": "foreglance.engine", "Settings": "foreglance.settings"}  # the rest lives in `request`


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = vars(import_module(_HOMES.get(name, "foreglance.request")))[name]
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
