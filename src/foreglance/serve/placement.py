"""Which replica gets a request: the one that holds its conversation or its image, unless that one has too much to do.

Pure: bodies and counts in, names out. Knows nothing of Ray, of sockets or of engines.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

RAW_HEAD = 256  # characters, or token ids, of a raw prompt that make it the same as another one
HOMES = 65536  # conversations whose replica is remembered
SYSTEM_ROLES = ("system", "developer")
IMAGE_PARTS = ("image_url", "input_image")


def prefix_of(body: bytes) -> str | None:
    """A name for what later turns of a conversation begin with too; None where there is nothing of that kind.

    Of a conversation: its system messages and the first message after them, which is cut behind its last image, so that
    several questions about one image have one name. Of a raw prompt: its head.
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, Mapping):
        return None
    prompt = fields.get("messages", fields.get("input", fields.get("prompt")))
    if not isinstance(prompt, str | list) or not prompt:
        return None
    head = [fields.get("instructions"), _head(prompt)]
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()


def _head(prompt: str | list) -> Any:
    if isinstance(prompt, str) or not isinstance(prompt[0], Mapping):
        return prompt[:RAW_HEAD]
    head = []
    for message in prompt:
        if isinstance(message, Mapping) and message.get("role") in SYSTEM_ROLES:
            head.append(message)
        else:
            return [*head, _opening(message)]
    return head


def _opening(message: Any) -> Any:
    """A message up to its last image, or whole if it has none."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list):
        return message
    images = [i for i, part in enumerate(parts) if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS]
    return parts[: images[-1] + 1] if images else message


class Placement:
    """Remembers where prefixes live. `capacity` is how many requests a replica answers at once."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, prefix: str | None, num_open: Mapping[str, int]) -> str:
        """One of the replicas, given how many requests each has open; what is chosen is the prefix's home from now on.

        Home is left only if it would let the request wait while another replica has less to do.
        """
        home = self._homes.get(prefix) if prefix is not None else None
        if home not in num_open or (num_open[home] >= self._capacity and num_open[home] > min(num_open.values())):
            home = min(num_open, key=lambda name: (num_open[name], _mix(prefix, name)))
        if prefix is not None:
            self._homes[prefix] = home
            self._homes.move_to_end(prefix)
            if len(self._homes) > HOMES:
                self._homes.popitem(last=False)
        return home

    def forget(self, name: str) -> None:
        """A replica has lost what it held."""
        for prefix in [prefix for prefix, home in self._homes.items() if home == name]:
            del self._homes[prefix]


def _mix(prefix: str | None, name: str) -> bytes:
    """Spreads prefixes over replicas that have equally much to do."""
    return hashlib.sha256(f"{prefix}:{name}".encode()).digest()
