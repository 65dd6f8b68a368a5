"""Opens connections, directly or through a proxy, and validates the options for them."""

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
    """Proxies and certificates of connections. Equal options can share connections."""

    proxies: ProxySettings = field(default_factory=ProxySettings)
    ca_file: str | None = None
    """Certificates (PEM) of trusted authorities, in addition to those of the system."""

    @classmethod
    def create(
        cls,
        proxy: str | Literal[False] | None = None,
        ca_file: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """`proxy` is the URL of a proxy for every call, False for none, None for those of the environment. Raises
        ConfigError for an invalid URL or file."""
        variables = os.environ if environment is None else environment
        for name, file in (("ca_file", ca_file), ("SSL_CERT_FILE", variables.get("SSL_CERT_FILE"))):
            if file:
                check_certificates(name, file)
        if proxy is None:
            return cls(ProxySettings.from_environment(variables), ca_file)
        return cls(ProxySettings.for_all(proxy) if proxy else ProxySettings(), ca_file)

    def check(self, url: str) -> Self:
        """Raises ConfigError if the proxy for `url` cannot be used."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self.proxies.find(Origin(secure, parts.hostname or "", parts.port or (443 if secure else 80)))
        return self


class Connector:
    """Opens connections with the same `ConnectOptions`; for one event loop."""

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._tls: ssl.SSLContext | None = None

    def proxy(self, origin: Origin) -> Proxy | None:
        """The proxy for a server. Raises ConfigError if it cannot be used."""
        return self._options.proxies.find(origin)

    async def connect(self, origin: Origin, make: Callable[[], Kind], seconds: float) -> Kind:
        """Connect a protocol made by `make` to a server. `seconds` limits the time until a request can be sent. Raises
        TransportError."""
        proxy = self.proxy(origin)
        via = f" through the proxy {proxy}" if proxy else ""
        try:
            async with asyncio.timeout(seconds):
                if proxy is None or not origin.secure:
                    return await self._connect(proxy or origin, make)
                return await self._connect_through(proxy, origin, make)
        except TimeoutError:
            raise TransportError(f"{origin} accepted no connection{via} within {seconds:g} s", "connect") from None
        except OSError as error:
            raise TransportError(f"{origin} cannot be reached{via}: {error}", "connect") from error

    async def _connect(self, server: Origin | Proxy, make: Callable[[], Kind]) -> Kind:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(
                make,
                server.host,
                server.port,
                ssl=self._context() if server.secure else None,
                server_hostname=server.host if server.secure else None,
            )
        except ssl.SSLError as error:
            raise tls_error(server, error) from error
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
                raise TransportError(f"{origin} closed the connection after the TLS handshake", "connect")
        except ssl.SSLError as error:
            tunnel.transport.abort()
            raise tls_error(origin, error) from error
        except BaseException:
            tunnel.transport.abort()
            raise
        # `start_tls` does not call `connection_made` of the new protocol.
        protocol.connection_made(secured)
        return protocol

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl_context(self._options.ca_file)
        return self._tls
