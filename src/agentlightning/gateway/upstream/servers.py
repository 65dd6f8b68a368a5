"""Chooses a server of a provider for each call, probes their health, and limits the number of retries."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from agentlightning.gateway.upstream.limits import Budgets, RateLimiter
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.transport import Headers, Transport, TransportError
from agentlightning.transport.servers import Server, ServerSet

# -- redaction -------------------------------------------------------------------------------------------------------

# Redacts the credentials of a provider in its responses, stream events, headers and errors.
#
# Otherwise a provider that echoes requests, or names its key in an error, would reveal it to agents and spans. Runs for
# every response before it is parsed, so it only searches the bytes.

HIDDEN: Final = "***"
MIN_BODY_SECRET_CHARS: Final = 16
"""Shorter credentials are redacted in errors and headers only: in a response they may be words of the model, and no
provider issues such keys."""
_ERROR: Final = b'"error"'
_NO_ERROR: Final = (b'"error":null', b'"error": null')


class Redactor:
    """Hides the credentials of one provider."""

    def __init__(self, provider: Provider) -> None:
        credentials = [text for text in provider.credentials() if len(text) >= MIN_BODY_SECRET_CHARS]
        self._in_bodies = _encodings(credentials)
        self._everywhere = _encodings(provider.secrets())

    def redact_body(self, data: bytes) -> bytes:
        """Redact a response or a stream event; errors are searched for every secret."""
        encodings = self._in_bodies
        if encodings != self._everywhere and data.count(_ERROR) > sum(data.count(null) for null in _NO_ERROR):
            encodings = self._everywhere
        return _replace(data, encodings)

    def redact_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        return [(name, _replace(value, self._everywhere)) for name, value in headers]


def redact_text(provider: Provider, text: str) -> str:
    """Redact a text of a provider."""
    data = text.encode("utf-8", "surrogatepass")
    return _replace(data, _encodings(provider.secrets())).decode("utf-8", "surrogatepass")


def _replace(data: bytes, encodings: Iterable[bytes]) -> bytes:
    for encoded in encodings:
        if encoded in data:
            data = data.replace(encoded, HIDDEN.encode())
    return data


def _encodings(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """How secrets may be written in a body or a header; the longest first, since one may contain another."""
    encodings: set[bytes] = set()
    for secret in secrets:
        escaped = json.dumps(secret, ensure_ascii=False)[1:-1]
        texts = (secret, escaped, escaped.replace("/", "\\/"), json.dumps(secret)[1:-1], quote(secret, safe=""))
        encodings |= {text.encode("utf-8", "surrogatepass") for text in texts}
    return tuple(sorted(encodings, key=lambda encoded: (-len(encoded), encoded)))


logger = logging.getLogger(__name__)

RETRY_SHARE: Final = 0.2
"""Retries per call: a server that fails every call must not get twice the load for it."""
RETRY_FLOOR: Final = 10.0
"""Retries available at the start, and at most."""


class ProviderServer(Server):
    """One server of a provider."""

    def __init__(self, url: str, headers: Headers, clock: Callable[[], float]) -> None:
        super().__init__(url, clock)
        self.headers = headers
        self._paused_until: dict[str, float] = {}
        """Models that the server wants no calls of -> end of the pause."""

    def pause(self, model: str, seconds: float) -> None:
        """Send no calls of a model for some seconds, as the server asked; its limits apply to each model."""
        now = self._clock()
        self._paused_until = {name: until for name, until in self._paused_until.items() if until > now}
        self._paused_until[model] = max(self._paused_until.get(model, 0.0), now + seconds)

    def pause_seconds(self, model: str) -> float:
        """Seconds until it accepts calls of a model again."""
        return max(0.0, self._paused_until.get(model, 0.0) - self._clock()) if self._paused_until else 0.0

    def accepts(self, model: str) -> bool:
        """Whether it may be sent a call of a model now."""
        return self.seconds_left == 0.0 and self.pause_seconds(model) == 0.0


class ServerPool(ServerSet[ProviderServer]):
    """The servers of one provider. May be created before the event loop runs; `open_transport` is called at the first
    call. Raises ConfigError if the provider's key is missing."""

    def __init__(
        self,
        provider: Provider,
        open_transport: Callable[[], Transport],
        budgets: Budgets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        servers = [ProviderServer(*_address(provider, url), clock) for url in provider.base_urls]
        super().__init__(servers, provider.health_seconds, watches_all=len(servers) > 1)
        self.provider = provider
        self.budgets = budgets or Budgets()
        self.rate_limiter = RateLimiter(provider, clock)
        self.num_retries = 0
        """Retries since the start."""
        self.dollars = 0.0
        """Cost of its calls since the start."""
        self.redactor = Redactor(provider)
        self._open_transport = open_transport
        self._transport: Transport | None = None
        self._retry_budget = RETRY_FLOOR

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    def choose(self, affinity: str, tried: Sequence[ProviderServer] = (), model: str = "") -> ProviderServer:
        """The server for a call: the first in the order of its affinity that accepts calls and was not tried.

        If there is none, the one that accepts calls soonest: a call is never rejected for lack of a healthy server.
        """
        order = self.in_order(affinity)
        for server in order:
            if server.accepts(model) and server not in tried:
                return server
        untried = [server for server in order if server not in tried]
        return min(untried or order, key=lambda server: max(server.seconds_left, server.pause_seconds(model)))

    def take_retry(self) -> bool:
        """Take one retry from the retry budget, which is for outages; False if it is empty."""
        if self._retry_budget < 1:
            return False
        self._retry_budget -= 1
        return True

    def record_start(self) -> None:
        """Count the first try of a call."""
        self._retry_budget = min(RETRY_FLOOR, self._retry_budget + RETRY_SHARE)
        if self._watches_all and not self._watches:
            for server in self.replicas:
                self.watch(server)

    async def fetch(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_seconds: float,
        affinity: str = "",
        server: ProviderServer | None = None,
    ) -> tuple[int, Headers, bytes]:
        """(status, headers, body) of a request that is not a model call, by default to the server of an affinity: no
        retry, limit or budget applies. A `path` with a slash in front is one of the server itself, outside its API.
        Raises TransportError."""
        server = server or self.choose(affinity)
        url = server.url.removesuffix("/v1") + path if path[0] == "/" else self.provider.url(server.url, path)
        connect_seconds = min(self.provider.connect_seconds, timeout_seconds)
        response = await self.transport.send(
            method, url, server.headers, body, connect_seconds=connect_seconds, timeout_seconds=timeout_seconds
        )
        async with response:
            return response.status, response.headers, self.redactor.redact_body(await response.read())

    async def close(self) -> None:
        """Stop the checks. The owner of the transport closes it."""
        await self.end_watches()
        self._transport = None

    async def check(self, replica: ProviderServer) -> None:
        """Any response but a server error means that it is healthy."""
        was_up = replica.up
        try:
            is_healthy = await self._responds(replica, "/health")
            if is_healthy is None:
                is_healthy = await self._responds(replica, "models")
        except TransportError:
            is_healthy = False
        if is_healthy is False:
            replica.record_failure(unreachable=True)
        elif not replica.up:
            replica.record_success()
        if was_up is not replica.up:
            change = "has recovered" if replica.up else "is unhealthy"
            logger.warning("the server %s of the provider %r %s", replica.url, self.provider.name, change)

    async def _responds(self, server: ProviderServer, path: str) -> bool | None:
        """Whether a GET succeeds; None if the server does not have the path."""
        status, _, _ = await self.fetch("GET", path, timeout_seconds=self.provider.connect_seconds, server=server)
        return None if status in (404, 405) else status < 500


def _address(provider: Provider, url: str) -> tuple[str, Headers]:
    """(URL, headers of every call) of one server. A user in the URL is sent as httpx does, on which the SDKs are built:
    it takes the place of the key in `Authorization`."""
    key, parts = provider.key(), urlsplit(url)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if provider.dialect == "anthropic":
        headers |= {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})
    elif key:
        headers["authorization"] = f"Bearer {key}"
    userinfo, at, host = parts.netloc.rpartition("@")
    if at:
        user, _, password = userinfo.partition(":")
        credentials = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        headers["authorization"] = f"Basic {credentials}"
        url = parts._replace(netloc=host).geturl()
    headers |= {name.lower(): value for name, value in provider.headers.items()}
    return url, tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
