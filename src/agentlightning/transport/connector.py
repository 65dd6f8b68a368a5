"""Opens connections, directly or through a proxy, and validates the options for them."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError
from agentlightning.transport.base import TransportError
from agentlightning.transport.connection import Origin
from agentlightning.transport.proxy import Proxy, ProxySettings, Tunnel

# -- tls -------------------------------------------------------------------------------------------------------------

# TLS of outgoing connections: trusted authorities, and errors that say how to fix a failed handshake.

_NAME_MISMATCH: Final = frozenset({62, 64})
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_IMPROPER: Final = range(80, 95)
"""X509_V_ERR_PATHLEN_INVALID_FOR_NON_CA and its like: errors of X509_V_FLAG_X509_STRICT only."""
_OUTDATED: Final = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """A context that trusts the authorities of the system (or SSL_CERT_FILE and SSL_CERT_DIR) and of `ca_file`."""
    context = ssl.create_default_context()
    if not _has_authorities():
        import certifi

        context.load_verify_locations(certifi.where())
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


def _has_authorities() -> bool:
    """Whether the system has authorities; small containers and Python's installer on macOS have none."""
    paths = ssl.get_default_verify_paths()
    return bool(paths.cafile) or (bool(paths.capath) and any(Path(paths.capath).iterdir()))


def check_certificates(name: str, file: str) -> None:
    """Raises ConfigError if the file holds no certificates or cannot be read. `name` is the setting."""
    try:
        _load_certificates(file, Path(file).stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        problem = "contains no certificate (PEM)" if isinstance(error, ssl.SSLError) else f"cannot be read: {error}"
        raise ConfigError(f"{name}: {file!r} {problem}; name a file with the certificates of authorities") from error


@functools.lru_cache
def _load_certificates(file: str, modified: int) -> None:
    """Once for each state of a file: the certificates of the world take 30 ms."""
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)


def tls_error(server: Origin | Proxy, error: ssl.SSLError) -> TransportError:
    """The error of a failed handshake. Only a closed connection is worth a retry (`connect`)."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return TransportError(f"{server} closed the connection during the TLS handshake: {error}", "connect")
    if not isinstance(error, ssl.SSLCertVerificationError):
        hint = "; is it http:// rather than https://?" if error.reason == "WRONG_VERSION_NUMBER" else ""
        return TransportError(f"the TLS handshake with {server} failed: {error.reason or error}{hint}", "tls")
    reason = error.verify_message
    if error.verify_code in _NAME_MISMATCH:
        hint = "use a host name that its certificate contains"
    elif error.verify_code in _IMPROPER:
        hint = "it violates RFC 5280, which Python 3.13 and later enforce: issue a new one"
    elif error.verify_code in _OUTDATED:
        hint = "renew it, or set the clock of this machine"
    else:
        hint = "name the certificate of the authority that signed it in ca_file or SSL_CERT_FILE"
    return TransportError(f"the certificate of {server} is not trusted ({reason}); {hint}", "tls")


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
