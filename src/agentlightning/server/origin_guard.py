"""Whether a request may come from a web page: what a browser on this machine sends is not always what its user wants.

A page of another site can send requests to a server on loopback, which nobody else reaches; the browser then says where
the page came from (`Origin`). A page whose name its owner points to loopback afterwards is of this server, as far as
the browser knows (DNS rebinding): where no token is asked for, the name in `Host` has to be one that no stranger can
have. Called by the server's door for every request.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

_MAX_CACHED_HOSTS: Final = 1024
"""Names whose verdict is remembered."""


class OriginGuard:
    """`hosts`: further names under which this server is reached, where it asks for no token. `origins`: pages of other
    sites that may use it, as `https://name:port`; "*" for all. With `any_host` any name will do: a page that does not
    know the token gets nowhere. With `keyless`, model calls need no key: a page must be of a name that is ours all the
    same, while programs, which send no `Origin`, may use any."""

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
        self._known: dict[bytes, bool] = {}

    def rejection(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers (names in lower case) is refused; None where it is not."""
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

    def _is_own_host(self, host: bytes) -> bool:
        if (known := self._known.get(host)) is None:
            if len(self._known) >= _MAX_CACHED_HOSTS:
                self._known.clear()
            name = _name_in(host)
            known = self._known[host] = name is not None and (_is_private(name) or name in self._hosts)
        return known


def _name_in(host: bytes) -> str | None:
    """The name of `name:port`, in lower case."""
    try:
        return (urlsplit(f"//{host.decode('ascii')}").hostname or "").rstrip(".").lower() or None
    except (ValueError, UnicodeDecodeError):
        return None


def _is_private(name: str) -> bool:
    """Whether no stranger can make the name lead elsewhere: an address, a name without a domain, or this machine's."""
    if "." not in name or name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))
