"""Chooses a server of a provider for each call, probes their health, and limits the number of retries."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from agentlightning.gateway.upstream.budget import Budgets
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.gateway.upstream.rate_limit import RateLimiter
from agentlightning.transport import Headers, Transport, TransportError
from agentlightning.util.rendezvous_hash import weight

# -- health ----------------------------------------------------------------------------------------------------------

# Tracks the health of one server by its failures.
#
# A server that cannot be reached, or failed several times in a row, gets no calls for a pause that doubles from one
# second to thirty; then it is tried again. Needs no event loop; the clock is injected.

MAX_FAILURES: Final = 3
"""Failures in a row until a reachable server is paused."""
FIRST_SECONDS: Final = 1.0
MAX_SECONDS: Final = 30.0


class ServerHealth:
    """The health of one server."""

    __slots__ = ("_clock", "_failures", "_pause", "_until")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        """Length of the current pause in seconds; 0 while the server is healthy."""
        self._until = 0.0

    @property
    def is_available(self) -> bool:
        """Whether it may be sent calls now."""
        return self._until == 0.0 or self._clock() >= self._until

    @property
    def is_suspect(self) -> bool:
        """Whether it is paused, or has not succeeded since its pause."""
        return self._pause > 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the pause ends."""
        return max(0.0, self._until - self._clock()) if self._until else 0.0

    def record_success(self) -> None:
        self._failures, self._pause, self._until = 0, 0.0, 0.0

    def record_failure(self, unreachable: bool = False) -> None:
        """Count a failure. `unreachable`: nothing listens there, so one failure is enough for a pause."""
        self._failures += 1
        if unreachable or self._pause > 0 or self._failures >= MAX_FAILURES:
            self._pause = min(MAX_SECONDS, self._pause * 2 or FIRST_SECONDS)
            self._until = self._clock() + self._pause


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
_MAX_CONVERSATIONS: Final = 65536


class Server:
    """One server of a provider."""

    __slots__ = ("_clock", "_paused_until", "headers", "health", "in_flight", "url")

    def __init__(self, url: str, headers: Headers, clock: Callable[[], float]) -> None:
        self.url = url
        self.headers = headers
        self.health = ServerHealth(clock)
        self.in_flight = 0
        self._clock = clock
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
        return self.health.is_available and self.pause_seconds(model) == 0.0


class ServerPool:
    """The servers of one provider. May be created before the event loop runs; `open_transport` is called at the first
    call. Raises ConfigError if the provider's key is missing."""

    def __init__(
        self,
        provider: Provider,
        open_transport: Callable[[], Transport],
        budgets: Budgets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.provider = provider
        self.budgets = budgets or Budgets()
        self.rate_limiter = RateLimiter(
            provider.name,
            provider.max_concurrency,
            provider.requests_per_minute,
            provider.tokens_per_minute,
            provider.max_wait_seconds,
            clock,
        )
        self.num_retries = 0
        """Retries since the start."""
        self.dollars = 0.0
        """Cost of its calls since the start."""
        self.redactor = Redactor(provider)
        self.servers = [Server(*_address(provider, url), clock) for url in provider.base_urls]
        self._open_transport = open_transport
        self._transport: Transport | None = None
        self._retry_budget = RETRY_FLOOR
        self._orders: dict[str, Sequence[Server]] = {}
        self._probe_task: asyncio.Task[None] | None = None
        self._wake_up = asyncio.Event()

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    def choose(self, affinity: str, tried: Sequence[Server] = (), model: str = "") -> Server:
        """The server for a call: the first in the order of its affinity that accepts calls and was not tried.

        If there is none, the one that accepts calls soonest: a call is never rejected for lack of a healthy server.
        """
        order = self._ordered(affinity)
        for server in order:
            if server.accepts(model) and server not in tried:
                return server
        untried = [server for server in order if server not in tried]
        return min(untried or order, key=lambda server: max(server.health.seconds_left, server.pause_seconds(model)))

    def forget(self, affinity: str) -> None:
        """Drop the cached order of an affinity key."""
        self._orders.pop(affinity, None)

    def take_retry(self) -> bool:
        """Take one retry from the retry budget, which is for outages; False if it is empty."""
        if self._retry_budget < 1:
            return False
        self._retry_budget -= 1
        return True

    def record_start(self) -> None:
        """Count the first try of a call."""
        self._retry_budget = min(RETRY_FLOOR, self._retry_budget + RETRY_SHARE)
        if self._probe_task is None and len(self.servers) > 1:
            self.start_probing()

    def start_probing(self) -> None:
        """Probe unhealthy servers until they recover; all servers regularly if there are several."""
        self._wake_up.set()
        if self._probe_task is None or self._probe_task.done():
            self._probe_task = asyncio.create_task(self._probe_servers())

    async def fetch(
        self, method: str, url: str, headers: Headers, body: bytes = b"", *, timeout_seconds: float
    ) -> tuple[int, Headers, bytes]:
        """(status, headers, body) of a request that is not a model call: no retry, limit or budget applies. Raises
        TransportError."""
        connect_seconds = min(self.provider.connect_seconds, timeout_seconds)
        response = await self.transport.send(
            method, url, headers, body, connect_seconds=connect_seconds, timeout_seconds=timeout_seconds
        )
        async with response:
            return response.status, response.headers, await response.read()

    async def close(self) -> None:
        """Stop probing. The owner of the transport closes it."""
        if self._probe_task is not None:
            self._probe_task.cancel()
            await asyncio.wait({self._probe_task})
            self._probe_task = None
        self._transport = None

    # -- choice ----------------------------------------------------------------------------------------------------

    def _ordered(self, affinity: str) -> Sequence[Server]:
        """Servers by rendezvous hash: the loss of a server moves only its own conversations, until it is back."""
        if len(self.servers) == 1:
            return self.servers
        if not affinity:
            return sorted(self.servers, key=lambda server: server.in_flight)
        if (order := self._orders.get(affinity)) is None:
            if len(self._orders) >= _MAX_CONVERSATIONS:
                self._orders.clear()
            order = sorted(self.servers, key=lambda server: weight(affinity, server.url), reverse=True)
            self._orders[affinity] = order
        return order

    # -- health ----------------------------------------------------------------------------------------------------

    async def _probe_servers(self) -> None:
        while len(self.servers) > 1 or any(server.health.is_suspect for server in self.servers):
            pauses = [server.health.seconds_left for server in self.servers if server.health.is_suspect]
            self._wake_up.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min(self.provider.health_seconds, *pauses, 3600))):
                    await self._wake_up.wait()
                    continue
            due = [server for server in self.servers if server.health.is_available or not server.health.is_suspect]
            await asyncio.gather(*(self._probe(server) for server in due))

    async def _probe(self, server: Server) -> None:
        """Probe a server: any response but a server error means that it is healthy."""
        was_healthy = not server.health.is_suspect
        try:
            is_healthy = await self._responds(server, f"{server.url.removesuffix('/v1')}/health")
            if is_healthy is None:
                is_healthy = await self._responds(server, self.provider.url(server.url, "models"))
        except TransportError:
            is_healthy = False
        if is_healthy is False:
            server.health.record_failure(unreachable=True)
        elif server.health.is_suspect:
            server.health.record_success()
        if was_healthy is server.health.is_suspect:
            change = "is unhealthy" if server.health.is_suspect else "has recovered"
            logger.warning("the server %s of the provider %r %s", server.url, self.provider.name, change)

    async def _responds(self, server: Server, url: str) -> bool | None:
        """Whether a GET succeeds; None if the server does not have the path."""
        seconds = self.provider.connect_seconds
        status, _, _ = await self.fetch("GET", url, server.headers, timeout_seconds=seconds)
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
