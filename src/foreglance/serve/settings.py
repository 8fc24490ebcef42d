"""Settings of the server beside those of the engine, with the defaults that the command line shows."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from foreglance.request import Speculation

LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


@dataclass(frozen=True)
class ServerSettings:
    """Who may ask, how much, and what is served beside answers.

    aliases       further names that a request may call the model by
    speculation   what a request gets that does not say
    api_keys      SHA-256 digests of the keys that are taken; empty: no key is needed
    cors_origins  web pages of these origins may ask; none by default
    hosts         host names that a request may be addressed to; empty: any (set when bound to loopback, so that no web
                  page reaches the server through a name of its own)
    queue         requests that may wait beyond the slots; one more is answered 429
    choices       the largest `n`
    max_body      bytes of one request's body
    body_timeout  seconds that a body may stand still while it is sent
    grace         seconds that open requests get to finish when the server is told to stop
    remote_images whether http(s) image addresses are fetched
    slot_save_path folder in which slots are saved and found again; None: they are not
    slots_debug   whether /slots shows the text of conversations
    """

    aliases: tuple[str, ...] = ()
    speculation: Speculation = field(default_factory=Speculation)
    api_keys: tuple[bytes, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()
    queue: int = 64
    choices: int = 16
    max_body: int = 64 << 20
    body_timeout: float = 30.0
    grace: float = 30.0
    remote_images: bool = False
    slot_save_path: Path | None = None
    slots_debug: bool = False

    def knows(self, key: bytes) -> bool:
        """Whether a key, as it came, is one of ours; takes as long for a wrong key as for a right one."""
        given = digest(key)
        return any([hmac.compare_digest(given, known) for known in self.api_keys])


def digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def is_loopback(host: str) -> bool:
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
