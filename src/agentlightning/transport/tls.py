"""TLS of outgoing connections: trusted authorities, and errors that say how to fix a failed handshake."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path
from typing import Final

from agentlightning.errors import ConfigError
from agentlightning.transport.base import TransportError
from agentlightning.transport.connection import Origin
from agentlightning.transport.proxy import Proxy

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
