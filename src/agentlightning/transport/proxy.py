"""Selects the HTTP proxy for a call, by a setting or the environment, and opens tunnels through it with CONNECT.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` have the same meaning as for curl and httpx, including CIDR
networks in NO_PROXY. Errors never contain the credentials of a proxy.
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
"""Statuses of a proxy that could not reach the server."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy."""

    secure: bool
    """Whether the connection to the proxy itself uses TLS."""
    host: str
    port: int
    authorization: bytes = field(default=b"", repr=False)
    """The value of Proxy-Authorization; b"": none."""

    def __str__(self) -> str:
        return str(Origin(self.secure, self.host, self.port))

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Headers for the proxy."""
        return ((b"proxy-authorization", self.authorization),) if self.authorization else ()

    @classmethod
    def parse(cls, url: str, source: str) -> Self:
        """Parse `http://[user:password@]host[:port]` or `https://`. `source` names the setting in errors. Raises
        ConfigError."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise ConfigError(f"{source} is no valid proxy URL; use one such as http://proxy:3128") from None
        if parts.scheme not in _SCHEMES:
            raise ConfigError(
                f"{source} names a proxy of the kind {parts.scheme!r}, which is unsupported; use http, https or none: "
                "NO_PROXY=*, or proxy = false of a provider"
            )
        if not parts.hostname or not parts.hostname.isascii() or not parts.hostname.isprintable():
            raise ConfigError(f"{source} has no valid host; use a URL such as http://proxy:3128")
        authorization = ""
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = f"Basic {b64encode(credentials.encode()).decode()}"
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), authorization.encode())


def without_credentials(url: str) -> str:
    """The URL of a proxy for display."""
    scheme, separator, rest = url.rpartition("://")
    account, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***' if account else ''}{at}{host}"


def secrets_of(url: str) -> list[str]:
    """The secrets in the URL of a proxy: its password, as written and as sent."""
    proxy, parts = Proxy.parse(url, "proxy"), urlsplit(url if "://" in url else f"http://{url}")
    return [parts.password, unquote(parts.password), proxy.authorization.decode()[6:]] if parts.password else []


@dataclass(frozen=True, slots=True)
class _NoProxyEntry:
    """One entry of `NO_PROXY`."""

    name: str
    """A domain with its subdomains; "*": every host."""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None
    """A network instead of a domain."""
    port: int | None = None
    scheme: str | None = None

    @classmethod
    def parse(cls, entry: str) -> Self:
        scheme, _, rest = entry.lower().rpartition("://")
        host, port = rest, None
        if match := re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d+)", rest):
            host, port = match[1], int(match[2])
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
    """Maps servers to proxies. URLs are parsed when first used, so an invalid one that is never used is no error."""

    http: tuple[str, str] | None = field(default=None, repr=False)
    """(name of the setting, URL) for http; None: no proxy."""
    https: tuple[str, str] | None = field(default=None, repr=False)
    no_proxy: tuple[_NoProxyEntry, ...] = ()
    loopback: bool = False
    """Whether calls to this machine itself use the proxy too."""

    @classmethod
    def for_all(cls, url: str, source: str = "proxy") -> Self:
        """One proxy for every call. Raises ConfigError for an invalid URL."""
        Proxy.parse(url, source)
        return cls((source, url), (source, url), loopback=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """The settings of `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in lower or upper case."""
        # A CGI server sets HTTP_PROXY from the header `Proxy` of a request.
        trusted = {name: value for name, value in environment.items() if name != "HTTP_PROXY"}
        fallback = _variable(trusted, "all_proxy")
        http = _variable(trusted if "REQUEST_METHOD" in environment else environment, "http_proxy")
        no_proxy = _variable(environment, "no_proxy")
        entries = re.split(r"[,\s]+", no_proxy[1]) if no_proxy else []
        return cls(
            http or fallback,
            _variable(trusted, "https_proxy") or fallback,
            tuple(_NoProxyEntry.parse(entry) for entry in entries if entry),
        )

    def find(self, origin: Origin) -> Proxy | None:
        """The proxy for a server; None for a direct connection. Raises ConfigError if the proxy is invalid."""
        setting = self.https if origin.secure else self.http
        if setting is None:
            return None
        try:
            address = ipaddress.ip_address(origin.host)
        except ValueError:
            address = None
        if not self.loopback and is_this_machine(origin.host):
            return None
        if any(entry.matches(origin, address) for entry in self.no_proxy):
            return None
        return _parse(setting[1], setting[0])


_parse = lru_cache(maxsize=16)(Proxy.parse)


def _variable(environment: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """(name, value); the lower-case variable takes precedence, even if it is empty."""
    for key in (name, name.upper()):
        if key in environment:
            return (key, environment[key].strip()) if environment[key].strip() else None
    return None


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.lower().rstrip(".")
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class Tunnel(asyncio.Protocol):
    """Sends CONNECT to a proxy. Once `opened` is done, the transport is connected to the server."""

    def __init__(self, proxy: Proxy, origin: Origin) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises TransportError if the proxy rejects the request."""
        self.transport: asyncio.Transport
        self._proxy, self._origin = proxy, origin
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        host = f"[{self._origin.host}]" if ":" in self._origin.host else self._origin.host
        authority = f"{host}:{self._origin.port}".encode()
        lines = [b"CONNECT %s HTTP/1.1" % authority, b"host: %s" % authority]
        lines += [b"%s: %s" % header for header in self._proxy.headers]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        if self.opened.done():
            return
        self._received += data
        head, separator, rest = bytes(self._received).partition(b"\r\n\r\n")
        if separator:
            self._read(head, bool(rest))
        elif len(self._received) > MAX_HEAD_BYTES:
            self._fail("sent a response that is too long", "protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("closed the connection before its response", "connect")

    def _read(self, head: bytes, has_rest: bool) -> None:
        status = _STATUS.match(head)
        code = int(status[1]) if status else 0
        if status is None or (has_rest and 200 <= code < 300):
            self._fail("sent an invalid HTTP response", "protocol")
        elif 200 <= code < 300:
            self.opened.set_result(None)
        elif code in (401, 407):  # Some proxies send 401 for wrong credentials.
            self._fail("requires credentials, or other ones: http://USER:PASSWORD@HOST:PORT", "proxy")
        else:
            status_line = f"status {code} {(status[2] or b'').decode('latin-1')[:200]}".rstrip()
            self._fail(f"opened no connection: {status_line}", "connect" if code in _UNREACHED else "proxy")

    def _fail(self, problem: str, reason: Reason) -> None:
        if not self.opened.done():
            self.opened.set_exception(TransportError(f"{self._origin}: the proxy {self._proxy} {problem}", reason))
