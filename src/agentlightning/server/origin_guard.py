"""Rejects requests from web pages of other sites, which a browser on this machine may send without its user's consent.

Such pages can reach a server on loopback; the browser names their site in `Origin`. With DNS rebinding a page appears
to be of this server: without a token, `Host` must therefore be a name that no stranger can control. Checked for every
request by `RequestTracker`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

_MAX_CACHED_HOSTS: Final = 1024
"""Bound of the cache of host names."""


class OriginGuard:
    """Checks `Host` and `Origin`.

    `hosts` are further names of this server. `origins` are other sites whose pages are allowed, as `https://name:port`;
    "*" for all. With `any_host` every name is allowed, since a page without the token can do nothing. With `keyless`,
    model calls need no key: pages then need a known name all the same, but programs, which send no `Origin`, do not.
    """

    def __init__(
        self,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        *,
        any_host: bool = False,
        keyless: bool = False,
    ) -> None:
        self._any_host = any_host
        self._any_page = any_host and not keyless
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in origins)
        self._is_own_host = lru_cache(_MAX_CACHED_HOSTS)(self._is_host)

    def rejection(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers (names in lower case) is rejected; None if it is allowed."""
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value
                if not self._any_host and not self._is_own_host(value):
                    return (
                        f"{_shown(value)} is no name of this server; use its IP address, or allow the name: "
                        "agl serve --allow-host NAME"
                    )
            elif name == b"origin":
                origin = value
        if origin is None or self._is_allowed(origin, host):
            return None
        return f"a page of {_shown(origin)} may not use this server; only pages of this server may"

    def _is_allowed(self, origin: bytes, host: bytes | None) -> bool:
        if b"*" in self._origins or origin.lower() in self._origins:
            return True
        if host is None or origin.partition(b"://")[2].lower() != host.lower():
            return False
        return self._any_page or self._is_own_host(host)

    def _is_host(self, host: bytes) -> bool:
        name = _name_in(host)
        return name is not None and (_is_private(name) or name in self._hosts)


def _name_in(host: bytes) -> str | None:
    """The name of `name:port`, in lower case."""
    try:
        return (urlsplit(f"//{host.decode('ascii')}").hostname or "").rstrip(".").lower() or None
    except (ValueError, UnicodeDecodeError):
        return None


def _is_private(name: str) -> bool:
    """Whether no stranger can control the name: an address, a name without a domain, or the name of this machine."""
    if "." not in name or name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))
