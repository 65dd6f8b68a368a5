"""How connections are opened: directly or through a proxy, and whose certificates are believed.

Called by `pool` for each new connection, and by those who configure one, to learn at the start what cannot work. It
knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, TypeVar
from urllib.parse import urlsplit

from agentlightning.transport.base import TransportError
from agentlightning.transport.connection import Origin
from agentlightning.transport.proxy import Proxy, ProxySettings, Tunnel
from agentlightning.transport.tls import check_certificates, ssl_context, tls_error

Kind = TypeVar("Kind", bound=asyncio.Protocol)


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """What is set of it. Equal ones can share their connections."""

    proxies: ProxySettings = field(default_factory=ProxySettings)
    ca_file: str | None = None
    """Certificates (PEM) of authorities that are believed besides those of the system."""

    @classmethod
    def create(
        cls,
        proxy: str | Literal[False] | None = None,
        ca_file: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """`proxy` is the address of one for every call, False for none, None for what the environment says. Raises
        ConfigError where an address or a file cannot be used."""
        known = os.environ if environment is None else environment
        for name, file in (("ca_file", ca_file), ("SSL_CERT_FILE", known.get("SSL_CERT_FILE"))):
            if file:
                check_certificates(name, file)
        if proxy is None:
            return cls(ProxySettings.from_environment(known), ca_file)
        return cls(ProxySettings.for_all(proxy) if proxy else ProxySettings(), ca_file)

    def check(self, url: str) -> Self:
        """Raises ConfigError where the proxy on the way to `url` cannot be used."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self.proxies.find(Origin(secure, parts.hostname or "", parts.port or (443 if secure else 80)))
        return self


class Connector:
    """Opens connections as a `Dial` says; for one event loop."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._tls: ssl.SSLContext | None = None

    def proxy(self, origin: Origin) -> Proxy | None:
        """The one on the way to a server. Raises ConfigError where it cannot be used."""
        return self._options.proxies.find(origin)

    async def connect(self, origin: Origin, make: Callable[[], Kind], seconds: float) -> Kind:
        """A protocol made by `make`, connected to a server. `seconds` is for everything until a request can be sent.
        Raises TransportError."""
        proxy = self.proxy(origin)
        way = f" through the proxy {proxy}" if proxy else ""
        try:
            async with asyncio.timeout(seconds):
                if proxy is None or not origin.secure:
                    return await self._connect(proxy or origin, make)
                return await self._connect_through(proxy, origin, make)
        except TimeoutError:
            raise TransportError(f"{origin} took no connection{way} within {seconds:g} s", "connect") from None
        except OSError as error:
            raise TransportError(f"{origin} cannot be reached{way}: {error}", "connect") from error

    async def _connect(self, place: Origin | Proxy, make: Callable[[], Kind]) -> Kind:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(
                make,
                place.host,
                place.port,
                ssl=self._context() if place.secure else None,
                server_hostname=place.host if place.secure else None,
            )
        except ssl.SSLError as error:
            raise tls_error(place, error) from error
        return protocol

    async def _connect_through(self, proxy: Proxy, origin: Origin, make: Callable[[], Kind]) -> Kind:
        tunnel = await self._connect(proxy, lambda: Tunnel(proxy, origin))
        protocol, context = make(), self._context()
        try:
            await tunnel.opened
            secured = await asyncio.get_running_loop().start_tls(
                tunnel.transport, protocol, context, server_hostname=origin.host
            )
            if secured is None or secured.is_closing():
                raise TransportError(f"{origin} closed the connection before it was asked", "connect")
        except ssl.SSLError as error:
            tunnel.transport.abort()
            raise tls_error(origin, error) from error
        except BaseException:
            tunnel.transport.abort()
            raise
        # `start_tls` tells a protocol of what it reads, and not that it is connected.
        protocol.connection_made(secured)
        return protocol

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl_context(self._options.ca_file)
        return self._tls
