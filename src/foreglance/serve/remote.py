"""Pictures from other servers, when that is allowed: public addresses only, within a size and a time.

A name is resolved once, where the connection is made, and what was checked is what is connected to; so a name cannot
point elsewhere between check and use, and every redirect goes through the same gate. Proxies of the environment are not
used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore2 as httpcore

from foreglance.serve.errors import ApiError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NAT64 = ipaddress.ip_network("64:ff9b::/96")
PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # not all of it is private to every version of `ipaddress`
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}


class FetchError(Exception):
    """A picture that cannot be had, said so that the client can act on it."""


def is_public(address: Address) -> bool:
    """Whether an address is on the open network; one that carries another (mapped, 6to4, NAT64) counts as that one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(address.packed[-4:])
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address in PROTOCOLS)


class Gate(httpcore.AsyncNetworkBackend):
    """Connects to addresses that are allowed, and to nothing else."""

    def __init__(self, allowed: Callable[[Address], bool]):
        self._allowed = allowed
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        addresses = await self._resolve(host, port)
        if not all(map(self._allowed, addresses)):
            raise FetchError("the address is not a public one")
        return await self._backend.connect_tcp(str(addresses[0]), port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, path, timeout=None, socket_options=None):
        raise FetchError("the address is not a public one")

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)

    @staticmethod
    async def _resolve(host: str, port: int) -> list[Address]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise FetchError(f"the name {host!r} is not known") from None
        return [ipaddress.ip_address(address[0].partition("%")[0]) for *_, address in found]


class Remote:
    """Fetches pictures. `max_bytes` is for all of one request together, `seconds` for each."""

    def __init__(
        self,
        max_bytes: int,
        seconds: float = 10.0,
        redirects: int = 3,
        at_once: int = 4,
        allowed: Callable[[Address], bool] = is_public,
    ):
        self._max_bytes, self._seconds, self._redirects = max_bytes, seconds, redirects
        self._allowed = allowed
        self._room = asyncio.Semaphore(at_once)

    async def fetch(self, wanted: Iterable[tuple[str, str]]) -> dict[str, bytes]:
        """The bytes behind each address; `wanted` are (path of the field, address). Raises `ApiError`, a 400."""
        fetched: dict[str, bytes] = {}
        async with httpcore.AsyncConnectionPool(network_backend=Gate(self._allowed)) as pool:
            for path, url in wanted:
                if url not in fetched:
                    left = self._max_bytes - sum(map(len, fetched.values()))
                    fetched[url] = await self._one(pool, path, url, left)
        return fetched

    async def _one(self, pool: httpcore.AsyncConnectionPool, path: str, url: str, max_bytes: int) -> bytes:
        try:
            async with self._room, asyncio.timeout(self._seconds):
                return await self._follow(pool, url, max_bytes)
        except TimeoutError:
            reason = f"it did not come within {self._seconds:g} s"
        except FetchError as error:
            reason = str(error)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError):
            reason = "the connection failed"
        raise ApiError(400, f"{path}: the image cannot be fetched: {reason}", param=path, code="image_fetch_failed")

    async def _follow(self, pool: httpcore.AsyncConnectionPool, url: str, max_bytes: int) -> bytes:
        for _ in range(self._redirects + 1):
            parts = _checked(url)
            async with pool.stream("GET", _target(parts), headers=_headers(parts)) as response:
                if response.status not in REDIRECTS:
                    return await _read(response, max_bytes)
                location = dict(response.headers).get(b"Location") or dict(response.headers).get(b"location", b"")
            url = urljoin(url, location.decode("ascii", errors="replace"))
        raise FetchError(f"it is redirected more than {self._redirects} times")


def _checked(url: str) -> SplitResult:
    """The parts of an address that may be asked. They are taken apart once, here."""
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        raise FetchError("the address is malformed") from None
    if parts.scheme not in PORTS:
        raise FetchError("only http and https addresses are fetched")
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    if not (plain and parts.hostname and port_ok) or "@" in parts.netloc:
        raise FetchError("the address is malformed")
    return parts


def _target(parts: SplitResult) -> httpcore.URL:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    port = parts.port or PORTS[parts.scheme]
    return httpcore.URL(scheme=parts.scheme, host=parts.hostname, port=port, target=target)


def _headers(parts: SplitResult) -> list[tuple[str, str]]:
    """No compression: the bytes counted are the bytes that come."""
    return [
        ("Host", parts.netloc),
        ("User-Agent", "foreglance"),
        ("Accept", "image/*"),
        ("Accept-Encoding", "identity"),
    ]


async def _read(response: httpcore.Response, max_bytes: int) -> bytes:
    if response.status != 200:
        raise FetchError(f"the other server answered {response.status}")
    body = bytearray()
    async for piece in response.aiter_stream():
        body += piece
        if len(body) > max_bytes:
            raise FetchError(f"it is larger than the {max_bytes} bytes that are left for it")
    return bytes(body)
