"""foreglance: a multimodal language model engine whose speculative decoding sees images and never changes a token."""

from foreglance.engine import Engine
from foreglance.request import (
    Event,
    Message,
    Request,
    RequestError,
    Result,
    SamplingParams,
    Speculation,
    Token,
)
from foreglance.settings import Settings

__all__ = [
    "Engine",
    "Event",
    "Message",
    "Request",
    "RequestError",
    "Result",
    "SamplingParams",
    "Settings",
    "Speculation",
    "Token",
]
__version__ = "0.1.0"
