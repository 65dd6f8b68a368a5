"""The options of connections: their proxies, and the certificates they trust. Validates them.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` have the same meaning as for curl and httpx, including CIDR
networks in NO_PROXY. Errors never contain the credentials of a proxy.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies_environment

from agentlightning.errors import ConfigError
from agentlightning.transport.base import Origin, TransportError

# -- proxies -----------------------------------------------------------------------------------------------------------

_SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy."""

    origin: Origin
    """With https, the connection to the proxy itself uses TLS."""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)
    """Its credentials, if it needs any."""

    def __str__(self) -> str:
        return str(self.origin)

    @classmethod
    def parse(cls, url: str, source: str) -> Self:
        """Parse `http://[user:password@]host[:port]` or `https://`. `source` names the setting in errors. Raises
        ConfigError."""
        try:
            parts = _split(url)
            origin = Origin.of(parts)
        except ValueError:
            raise ConfigError(f"{source} is no valid proxy URL; use one such as http://proxy:3128") from None
        if parts.scheme not in _SCHEMES:
            raise ConfigError(
                f"{source} names a proxy of the kind {parts.scheme!r}, which is unsupported; use http, https or none: "
                "NO_PROXY=*, or proxy = false of a provider"
            )
        if not origin.host or not origin.host.isascii() or not origin.host.isprintable():
            raise ConfigError(f"{source} has no valid host; use a URL such as http://proxy:3128")
        if parts.username is None:
            return cls(origin)
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return cls(origin, ((b"proxy-authorization", b"Basic " + b64encode(credentials.encode())),))


def _split(url: str) -> SplitResult:
    return urlsplit(url if "://" in url else f"http://{url}")


def without_credentials(url: str) -> str:
    """The URL of a proxy for display."""
    scheme, separator, rest = url.rpartition("://")
    account, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***' if account else ''}{at}{host}"


def secrets_of(url: str) -> list[str]:
    """The secrets in the URL of a proxy: its password, as written and as sent."""
    if not (password := _split(url).password):
        return []
    return [password, unquote(password), Proxy.parse(url, "proxy").headers[0][1].decode()[6:]]


def _excludes(entry: str, origin: Origin) -> bool:
    """Whether an entry of NO_PROXY means a server: `[scheme://]host[:port]`, where the host is a domain with its
    subdomains, an address, a network, or `*`."""
    scheme, _, name = entry.lower().rpartition("://")
    if match := re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d+)", name):
        name = match[1]
        if int(match[2]) != origin.port:
            return False
    if scheme not in ("", "all", origin.scheme):
        return False
    try:
        network = ipaddress.ip_network(name.strip("[]"), strict=False)
    except ValueError:
        domain = name.removeprefix("*").strip(".")
        return name == "*" or (bool(domain) and f".{origin.host.lower().rstrip('.')}".endswith(f".{domain}"))
    address = address_of(origin.host)
    return address is not None and address in network


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine itself."""
    if (address := address_of(host)) is not None:
        return address.is_loopback or address.is_unspecified
    name = host.lower().rstrip(".")
    return name == "localhost" or name.endswith(".localhost")


# -- tls -------------------------------------------------------------------------------------------------------------

# TLS of outgoing connections: trusted authorities, and errors that say how to fix a failed handshake.

_HINTS: Final = (
    # X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
    ((62, 64), "use a host name that its certificate contains"),
    # X509_V_ERR_PATHLEN_INVALID_FOR_NON_CA and its like: errors of X509_V_FLAG_X509_STRICT only
    (range(80, 95), "it violates RFC 5280, which Python 3.13 and later enforce: issue a new one"),
    # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED
    ((9, 10), "renew it, or set the clock of this machine"),
)
"""Errors of OpenSSL -> what to do."""


def ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """A context that trusts the authorities of the system (or SSL_CERT_FILE and SSL_CERT_DIR) and of `ca_file`."""
    context, system = ssl.create_default_context(), ssl.get_default_verify_paths()
    # Small containers and Python's installer on macOS have no authorities.
    if not system.cafile and not (system.capath and any(Path(system.capath).iterdir())):
        import certifi

        context.load_verify_locations(certifi.where())
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


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


def tls_error(server: Origin, error: ssl.SSLError) -> TransportError:
    """The error of a failed handshake. Only a closed connection is worth a retry (`connect`)."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return TransportError(f"{server} closed the connection during the TLS handshake: {error}", "connect")
    if not isinstance(error, ssl.SSLCertVerificationError):
        hint = "; is it http:// rather than https://?" if error.reason == "WRONG_VERSION_NUMBER" else ""
        return TransportError(f"the TLS handshake with {server} failed: {error.reason or error}{hint}", "tls")
    other = "name the certificate of the authority that signed it in ca_file or SSL_CERT_FILE"
    hint = next((hint for codes, hint in _HINTS if error.verify_code in codes), other)
    return TransportError(f"the certificate of {server} is not trusted ({error.verify_message}); {hint}", "tls")


# -- options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """Proxies and certificates of connections. Equal options can share connections. The URL of a proxy is parsed when
    it is used first, so an invalid one that is never used is no error."""

    http: str | None = field(default=None, repr=False)
    """The URL of the proxy for http; None: no proxy."""
    https: str | None = field(default=None, repr=False)
    no_proxy: tuple[str, ...] = ()
    given: bool = False
    """Whether a setting names the proxy, not the environment: then calls to this machine itself use it, too."""
    ca_file: str | None = None
    """Certificates (PEM) of trusted authorities, in addition to those of the system."""

    @classmethod
    def create(cls, proxy: str | Literal[False] | None = None, ca_file: str | None = None) -> Self:
        """`proxy` is the URL of a proxy for every call, False for none, None for those of the environment
        (`http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in lower or upper case). Raises ConfigError for an
        invalid URL or file."""
        for name, file in (("ca_file", ca_file), ("SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE"))):
            if file:
                check_certificates(name, file)
        if proxy:
            Proxy.parse(proxy, "proxy")
            return cls(proxy, proxy, given=True, ca_file=ca_file)
        found = {kind: url.strip() for kind, url in getproxies_environment().items()} if proxy is None else {}
        http, https = (found.get(kind) or found.get("all") for kind in _SCHEMES)
        return cls(http, https, tuple(re.split(r"[,\s]+", found.get("no", ""))), ca_file=ca_file)

    def proxy(self, origin: Origin) -> Proxy | None:
        """The proxy for a server; None for a direct connection. Raises ConfigError if the proxy is invalid."""
        url = self.https if origin.secure else self.http
        if url is None or (not self.given and is_this_machine(origin.host)):
            return None
        if any(_excludes(entry, origin) for entry in self.no_proxy):
            return None
        return Proxy.parse(url, "proxy" if self.given else f"{origin.scheme.upper()}_PROXY (or ALL_PROXY)")

    def check(self, url: str) -> Self:
        """Raises ConfigError if the proxy for `url` cannot be used."""
        self.proxy(Origin.of(urlsplit(url)))
        return self
