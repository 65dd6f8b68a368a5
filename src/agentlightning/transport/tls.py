"""TLS of outgoing connections: trusted authorities, and errors that say how to fix a failed handshake."""

from __future__ import annotations

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
"""X509_V_ERR_PATHLEN_INVALID_FOR_NON_CA and its like: what only X509_V_FLAG_X509_STRICT minds."""
_OUTDATED: Final = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


def ssl_context(ca_file: str | None) -> ssl.SSLContext:
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


def check_certificates(name: str, file: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError) as error:
        said = "holds no certificate (PEM)" if isinstance(error, ssl.SSLError) else f"cannot be read: {error}"
        raise ConfigError(f"{name}: {file!r} {said}; name a file with the certificates of authorities") from error


def tls_error(place: Origin | Proxy, error: ssl.SSLError) -> TransportError:
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
