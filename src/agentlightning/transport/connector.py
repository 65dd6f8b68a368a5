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
from pathlib import Path
from typing import Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError
from agentlightning.transport.base import TransportError
from agentlightning.transport.connection import Origin
from agentlightning.transport.proxy import Proxy, ProxySettings, Tunnel

Kind = TypeVar("Kind", bound=asyncio.Protocol)

_NAME_MISMATCH: Final = frozenset({62, 64})
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_IMPROPER: Final = range(80, 95)
"""X509_V_ERR_PATHLEN_INVALID_FOR_NON_CA and its like: what only X509_V_FLAG_X509_STRICT minds."""
_OUTDATED: Final = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


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
                _check_certificates(name, file)
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
            raise _tls_failure(place, error) from error
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
            raise _tls_failure(origin, error) from error
        except BaseException:
            tunnel.transport.abort()
            raise
        # `start_tls` tells a protocol of what it reads, and not that it is connected.
        protocol.connection_made(secured)
        return protocol

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = make_context(self._options.ca_file)
        return self._tls


def make_context(ca_file: str | None) -> ssl.SSLContext:
    """Believes the authorities of the system, or of SSL_CERT_FILE and SSL_CERT_DIR, and those of `ca_file`."""
    context = ssl.create_default_context()
    if not _has_authorities():
        import certifi

        context.load_verify_locations(certifi.where())
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


def _has_authorities() -> bool:
    """Whether the system has any: small containers, and Python's own installer on macOS, have none."""
    paths = ssl.get_default_verify_paths()
    return bool(paths.cafile) or (bool(paths.capath) and any(Path(paths.capath).iterdir()))


def _check_certificates(name: str, file: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError) as error:
        said = "holds no certificate (PEM)" if isinstance(error, ssl.SSLError) else f"cannot be read: {error}"
        raise ConfigError(f"{name}: {file!r} {said}; name a file with the certificates of authorities") from error


def _tls_failure(place: Origin | Proxy, error: ssl.SSLError) -> TransportError:
    """What went wrong before a word was said in private. One that the network cut off may go better the next time;
    nothing else does."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return TransportError(f"{place} closed the connection while TLS was agreed on: {error}", "connect")
    if not isinstance(error, ssl.SSLCertVerificationError):
        out = "; is it http:// rather than https://?" if error.reason == "WRONG_VERSION_NUMBER" else ""
        return TransportError(f"{place} and this client cannot agree on TLS: {error.reason or error}{out}", "tls")
    said = error.verify_message
    if error.verify_code in _NAME_MISMATCH:
        out = "call it by a name its certificate has"
    elif error.verify_code in _IMPROPER:
        out = "it was not made as RFC 5280 has it, which Python insists on from 3.13 on: have it made anew"
    elif error.verify_code in _OUTDATED:
        out = "its certificate has to be renewed, or the clock of this machine set"
    else:
        out = "give the certificate of the authority that signed it as ca_file, or in SSL_CERT_FILE"
    return TransportError(f"the certificate of {place} is not to be trusted ({said}); {out}", "tls")
