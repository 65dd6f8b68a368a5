"""The servers of a provider: which of them is asked, whether they are well, and how many calls may be repeated.

Called by `upstream.call` for each call that goes to the provider.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from agentlightning.gateway.upstream.budget import Budgets
from agentlightning.gateway.upstream.health import ServerHealth
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.gateway.upstream.rate_limit import RateLimiter
from agentlightning.gateway.upstream.redaction import Redactor
from agentlightning.transport import Headers, Transport, TransportError
from agentlightning.util.rendezvous_hash import weight

logger = logging.getLogger(__name__)

RETRY_SHARE: Final = 0.2
"""Of the calls that may be sent again: a server that fails every call is not asked twice as often for it."""
RETRY_FLOOR: Final = 10.0
"""Retries saved up at most, and there from the start."""
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
        """Models of which it asked to be sent no calls -> until when."""

    def pause(self, model: str, seconds: float) -> None:
        """It asked to be left alone with calls of a model for so long, as limits are a model's, and is well
        otherwise."""
        now = self._clock()
        self._paused_until = {each: until for each, until in self._paused_until.items() if until > now}
        self._paused_until[model] = max(self._paused_until.get(model, 0.0), now + seconds)

    def pause_seconds(self, model: str) -> float:
        """For how long it wants no more calls of a model."""
        return max(0.0, self._paused_until.get(model, 0.0) - self._clock()) if self._paused_until else 0.0

    def accepts(self, model: str) -> bool:
        """Whether it may be asked now."""
        return self.health.is_available and self.pause_seconds(model) == 0.0


class ServerPool:
    """The servers of one provider. Made before the event loop runs; `open_transport` is called at the first call.
    Raises ConfigError where the provider's key is not there."""

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
        """Calls sent again, all together."""
        self.dollars = 0.0
        """What its calls have cost since the start."""
        self.redactor = Redactor(provider)
        headers = _headers(provider)
        self.servers = [Server(url, headers, clock) for url in provider.base_urls]
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
        """The server to ask: the conversation's own, or the next in its order that may be asked and was not tried.
        Where none may, the one that may be asked soonest: a call is never refused for want of a well server."""
        order = self._ordered(affinity)
        for server in order:
            if server.accepts(model) and server not in tried:
                return server
        untried = [server for server in order if server not in tried]
        return min(untried or order, key=lambda server: max(server.health.seconds_left, server.pause_seconds(model)))

    def forget(self, affinity: str) -> None:
        """A conversation is over."""
        self._orders.pop(affinity, None)

    def take_retry(self) -> bool:
        """Take one from the budget of retries."""
        if self._retry_budget < 1:
            return False
        self._retry_budget -= 1
        self.num_retries += 1
        return True

    def record_start(self) -> None:
        """A call is sent for the first time."""
        self._retry_budget = min(RETRY_FLOOR, self._retry_budget + RETRY_SHARE)
        if self._probe_task is None and len(self.servers) > 1:
            self.start_probing()

    def start_probing(self) -> None:
        """Ask those that are not well whether they are again, and where several stand in for one another, all."""
        self._wake_up.set()
        if self._probe_task is None or self._probe_task.done():
            self._probe_task = asyncio.create_task(self._probe_servers())

    async def close(self) -> None:
        """Stop watching. The transport is closed by whoever opened it."""
        if self._probe_task is not None:
            self._probe_task.cancel()
            await asyncio.wait({self._probe_task})
            self._probe_task = None
        self._transport = None

    # -- which server ----------------------------------------------------------------------------------------------

    def _ordered(self, affinity: str) -> Sequence[Server]:
        """By rendezvous hashing: a server that is lost moves only its own conversations, and gets them back."""
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

    # -- whether they are well -------------------------------------------------------------------------------------

    async def _probe_servers(self) -> None:
        while len(self.servers) > 1 or any(server.health.is_suspect for server in self.servers):
            doubted = [server.health.seconds_left for server in self.servers if server.health.is_suspect]
            self._wake_up.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min(self.provider.health_seconds, *doubted, 3600))):
                    await self._wake_up.wait()
                    continue
            due = [server for server in self.servers if server.health.is_available or not server.health.is_suspect]
            await asyncio.gather(*(self._probe(server) for server in due))

    async def _probe(self, server: Server) -> None:
        """A server that answers anything but its own failure is well."""
        was_well = not server.health.is_suspect
        try:
            well = await self._responds(server, f"{server.url.removesuffix('/v1')}/health")
            if well is None:
                well = await self._responds(server, self.provider.url(server.url, "models"))
        except TransportError:
            well = False
        if well is False:
            server.health.record_failure(unreachable=True)
        elif server.health.is_suspect:
            server.health.record_success()
        if was_well is server.health.is_suspect:
            said = "is not well" if server.health.is_suspect else "is well again"
            logger.warning("the server %s of the provider %r %s", server.url, self.provider.name, said)

    async def _responds(self, server: Server, url: str) -> bool | None:
        """None: it does not know the path."""
        seconds = self.provider.connect_seconds
        answer = await self.transport.send("GET", url, server.headers, connect_seconds=seconds, timeout_seconds=seconds)
        async with answer:
            await answer.read()
        return None if answer.status in (404, 405) else answer.status < 500


def _headers(provider: Provider) -> Headers:
    """What every call to a provider carries."""
    key = provider.key()
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if provider.dialect == "anthropic":
        headers |= {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})
    elif key:
        headers["authorization"] = f"Bearer {key}"
    headers |= {name.lower(): value for name, value in provider.headers.items()}
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())
