"""Proxies: which one a call goes through, as a setting or the environment says, and how a tunnel through one is opened.

Responsible for what an address of a proxy means, for the rules of `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and
`NO_PROXY` as curl and httpx have them, and for the answer to CONNECT. What is spoken through a tunnel is the business
of `dial`. The credentials of a proxy are in no text made here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Self, cast
from urllib.parse import unquote, urlsplit

from agentlightning.errors import ConfigError
from agentlightning.transport.base import Reason, TransportError
from agentlightning.transport.connection import MAX_HEAD_BYTES, Origin

_SCHEMES: Final = ("http", "https")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: ([^\r\n]*))?")
_UNREACHED: Final = frozenset({500, 502, 503, 504})
"""What a proxy says that did not get through to the server."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy."""

    secure: bool
    """Whether the proxy itself is spoken to in TLS."""
    host: str
    port: int
    authorization: bytes = field(default=b"", repr=False)
    """The value of Proxy-Authorization; b"": none."""

    def __str__(self) -> str:
        return str(Origin(self.secure, self.host, self.port))

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What the proxy is told besides the request."""
        return ((b"proxy-authorization", self.authorization),) if self.authorization else ()

    @classmethod
    def parse(cls, url: str, source: str) -> Self:
        """Of `http://[user:password@]host[:port]`, or `https://`; `source` is what the setting is called. Raises
        ConfigError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise ConfigError(f"{source} holds no address of a proxy; give one such as http://proxy:3128") from None
        if parts.scheme not in _SCHEMES:
            raise ConfigError(
                f"{source} names a proxy of the kind {parts.scheme!r}, and only http and https are spoken here; give an"
                " HTTP proxy, or go without one: NO_PROXY=*, or proxy = false of a provider"
            )
        if not parts.hostname or not parts.hostname.isascii() or not parts.hostname.isprintable():
            raise ConfigError(f"{source} names no host; give an address such as http://proxy:3128")
        given = ""
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            given = f"Basic {b64encode(words.encode()).decode()}"
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), given.encode())


def without_credentials(url: str) -> str:
    """The address of a proxy as it may be shown."""
    scheme, separator, rest = url.rpartition("://")
    account, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***' if account else ''}{at}{host}"


def secrets_of(url: str) -> list[str]:
    """What must not be shown of the address of a proxy: its password, as it is written and as it is sent."""
    proxy, parts = Proxy.parse(url, "proxy"), urlsplit(url if "://" in url else f"http://{url}")
    return [parts.password, unquote(parts.password), proxy.authorization.decode()[6:]] if parts.password else []


@dataclass(frozen=True, slots=True)
class _NoProxyEntry:
    """What `NO_PROXY` names: one of its entries."""

    name: str
    """A domain, with all below it; "*": every host."""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None
    """Instead of a domain."""
    port: int | None = None
    scheme: str | None = None

    @classmethod
    def parse(cls, entry: str) -> Self:
        scheme, _, rest = entry.lower().rpartition("://")
        host, port = rest, None
        if found := re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d+)", rest):
            host, port = found[1], int(found[2])
        host = host.strip("[]")
        try:
            network = ipaddress.ip_network(host, strict=False)
        except ValueError:
            network = None
        name = host if host == "*" else host.removeprefix("*").strip(".")
        return cls(name, network, port, None if scheme in ("", "all") else scheme)

    def matches(self, origin: Origin, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
        if self.port not in (None, origin.port) or self.scheme not in (None, "https" if origin.secure else "http"):
            return False
        if self.network is not None:
            return address is not None and address in self.network
        host = origin.host.lower().rstrip(".")
        return self.name == "*" or host == self.name or (bool(self.name) and host.endswith(f".{self.name}"))


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Which proxy leads to which server. Addresses are read when one is needed: a proxy that nobody goes through may be
    of any kind."""

    http: tuple[str, str] | None = field(default=None, repr=False)
    """(what the setting is called, its address) for http; None: no proxy."""
    https: tuple[str, str] | None = field(default=None, repr=False)
    no_proxy: tuple[_NoProxyEntry, ...] = ()
    loopback: bool = False
    """Whether calls to this machine itself go through it too."""

    @classmethod
    def for_all(cls, url: str, source: str = "proxy") -> Self:
        """One for every call. Raises ConfigError."""
        Proxy.parse(url, source)
        return cls((source, url), (source, url), loopback=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """As `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy` say, or the same in capitals."""
        # A web server hands a request's header `Proxy` to a CGI program as HTTP_PROXY.
        known = {name: value for name, value in environment.items() if name != "HTTP_PROXY"}
        every = _variable(known, "all_proxy")
        http = _variable(known if "REQUEST_METHOD" in environment else environment, "http_proxy")
        listed = _variable(environment, "no_proxy")
        entries = re.split(r"[,\s]+", listed[1]) if listed else []
        return cls(
            http or every,
            _variable(known, "https_proxy") or every,
            tuple(_NoProxyEntry.parse(entry) for entry in entries if entry),
        )

    def find(self, origin: Origin) -> Proxy | None:
        """The proxy that calls to a server go through; None: they go there directly. Raises ConfigError where the one
        that is set cannot be used."""
        setting = self.https if origin.secure else self.http
        if setting is None:
            return None
        try:
            address = ipaddress.ip_address(origin.host)
        except ValueError:
            address = None
        if not self.loopback and _is_this_machine(origin.host, address):
            return None
        if any(each.matches(origin, address) for each in self.no_proxy):
            return None
        return _parse(setting[1], setting[0])


_parse = lru_cache(maxsize=16)(Proxy.parse)


def _variable(environment: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """(name, value); the one in small letters wins, and switches the other off where it is empty."""
    for each in (name, name.upper()):
        if each in environment:
            return (each, environment[each].strip()) if environment[each].strip() else None
    return None


def _is_this_machine(host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if address is not None:
        return address.is_loopback or address.is_unspecified
    name = host.lower().rstrip(".")
    return name == "localhost" or name.endswith(".localhost")


class Tunnel(asyncio.Protocol):
    """Asks a proxy for a way to a server. When `head` is done, what is written to the transport goes there."""

    def __init__(self, proxy: Proxy, origin: Origin) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises TransportError where the proxy refuses."""
        self.transport: asyncio.Transport
        self._proxy, self._origin = proxy, origin
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        host = f"[{self._origin.host}]" if ":" in self._origin.host else self._origin.host
        where = f"{host}:{self._origin.port}".encode()
        lines = [b"CONNECT %s HTTP/1.1" % where, b"host: %s" % where]
        lines += [b"%s: %s" % header for header in self._proxy.headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        if self.opened.done():
            return
        self._received += data
        head, found, more = bytes(self._received).partition(b"\r\n\r\n")
        if found:
            self._read(head, bool(more))
        elif len(self._received) > MAX_HEAD_BYTES:
            self._fail("answers in more than a proxy has to say", "protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("closed the connection before it answered", "connect")

    def _read(self, head: bytes, more: bool) -> None:
        status = _STATUS.match(head)
        code = int(status[1]) if status else 0
        if status is None or (more and 200 <= code < 300):
            self._fail("does not answer in HTTP", "protocol")
        elif 200 <= code < 300:
            self.opened.set_result(None)
        elif code in (401, 407):  # some say the one to credentials that are wrong
            self._fail("wants credentials, or others than it was given: http://USER:PASSWORD@HOST:PORT", "proxy")
        else:
            said = f"status {code} {(status[2] or b'').decode('latin-1')[:200]}".rstrip()
            self._fail(f"gave no way there: {said}", "connect" if code in _UNREACHED else "proxy")

    def _fail(self, what: str, reason: Reason) -> None:
        if not self.opened.done():
            self.opened.set_exception(TransportError(f"{self._origin}: the proxy {self._proxy} {what}", reason))
