"""The servers of a provider: which of them is asked, whether they are well, and how many calls may be repeated.

Called by `gateway.sending` for each call that goes to the provider.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from agentlightning.gateway.upstream.budget import Budgets
from agentlightning.gateway.upstream.health import Health
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.gateway.upstream.rate_limit import Limits
from agentlightning.gateway.upstream.redaction import Redactor
from agentlightning.transport import Headers, Transport, TransportError
from agentlightning.util.rendezvous_hash import weight

logger = logging.getLogger(__name__)

RETRY_SHARE: Final = 0.2
"""Of the calls that may be sent again: a server that fails every call is not asked twice as often for it."""
RETRY_FLOOR: Final = 10.0
"""Retries saved up at most, and there from the start."""
_MAX_CONVERSATIONS: Final = 65536


class Backend:
    """One server of a provider."""

    __slots__ = ("_clock", "_rests", "headers", "health", "under_way", "url")

    def __init__(self, url: str, headers: Headers, clock: Callable[[], float]) -> None:
        self.url = url
        self.headers = headers
        self.health = Health(clock)
        self.under_way = 0
        self._clock = clock
        self._rests: dict[str, float] = {}
        """Models of which it asked to be sent no calls -> until when."""

    def rest(self, model: str, seconds: float) -> None:
        """It asked to be left alone with calls of a model for so long, as limits are a model's, and is well
        otherwise."""
        now = self._clock()
        self._rests = {each: until for each, until in self._rests.items() if until > now}
        self._rests[model] = max(self._rests.get(model, 0.0), now + seconds)

    def rest_seconds(self, model: str) -> float:
        """For how long it wants no more calls of a model."""
        return max(0.0, self._rests.get(model, 0.0) - self._clock()) if self._rests else 0.0

    def free(self, model: str) -> bool:
        """Whether it may be asked now."""
        return self.health.well and self.rest_seconds(model) == 0.0


class Backends:
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
        self.limits = Limits(
            provider.name,
            provider.max_concurrency,
            provider.requests_per_minute,
            provider.tokens_per_minute,
            provider.max_wait_seconds,
            clock,
        )
        self.retried = 0
        """Calls sent again, all together."""
        self.dollars = 0.0
        """What its calls have cost since the start."""
        self.redactor = Redactor(provider)
        headers = _headers(provider)
        self.all = [Backend(url, headers, clock) for url in provider.base_urls]
        self._open_transport = open_transport
        self._transport: Transport | None = None
        self._saved = RETRY_FLOOR
        self._order: dict[str, Sequence[Backend]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._alarm = asyncio.Event()

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    def choose(self, affinity: str, tried: Sequence[Backend] = (), model: str = "") -> Backend:
        """The server to ask: the conversation's own, or the next in its order that may be asked and was not tried.
        Where none may, the one that may be asked soonest: a call is never refused for want of a well server."""
        order = self._ordered(affinity)
        for backend in order:
            if backend.free(model) and backend not in tried:
                return backend
        untried = [backend for backend in order if backend not in tried]
        return min(untried or order, key=lambda backend: max(backend.health.seconds_left, backend.rest_seconds(model)))

    def forget(self, affinity: str) -> None:
        """A conversation is over."""
        self._order.pop(affinity, None)

    def may_repeat(self) -> bool:
        """Take one from the budget of retries."""
        if self._saved < 1:
            return False
        self._saved -= 1
        self.retried += 1
        return True

    def began(self) -> None:
        """A call is sent for the first time."""
        self._saved = min(RETRY_FLOOR, self._saved + RETRY_SHARE)
        if self._watch is None and len(self.all) > 1:
            self.watch()

    def watch(self) -> None:
        """Ask those that are not well whether they are again, and where several stand in for one another, all."""
        self._alarm.set()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._keep_watch())

    async def close(self) -> None:
        """Stop watching. The transport is closed by whoever opened it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        self._transport = None

    # -- which server ----------------------------------------------------------------------------------------------

    def _ordered(self, affinity: str) -> Sequence[Backend]:
        """By rendezvous hashing: a server that is lost moves only its own conversations, and gets them back."""
        if len(self.all) == 1:
            return self.all
        if not affinity:
            return sorted(self.all, key=lambda backend: backend.under_way)
        if (order := self._order.get(affinity)) is None:
            if len(self._order) >= _MAX_CONVERSATIONS:
                self._order.clear()
            order = sorted(self.all, key=lambda backend: weight(affinity, backend.url), reverse=True)
            self._order[affinity] = order
        return order

    # -- whether they are well -------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        while len(self.all) > 1 or any(backend.health.doubted for backend in self.all):
            doubted = [backend.health.seconds_left for backend in self.all if backend.health.doubted]
            self._alarm.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min(self.provider.health_seconds, *doubted, 3600))):
                    await self._alarm.wait()
                    continue
            due = [backend for backend in self.all if backend.health.well or not backend.health.doubted]
            await asyncio.gather(*(self._probe(backend) for backend in due))

    async def _probe(self, backend: Backend) -> None:
        """A server that answers anything but its own failure is well."""
        was_well = not backend.health.doubted
        try:
            well = await self._answers(backend, f"{backend.url.removesuffix('/v1')}/health")
            if well is None:
                well = await self._answers(backend, self.provider.url(backend.url, "models"))
        except TransportError:
            well = False
        if well is False:
            backend.health.failed(unreachable=True)
        elif backend.health.doubted:
            backend.health.succeeded()
        if was_well is backend.health.doubted:
            said = "is not well" if backend.health.doubted else "is well again"
            logger.warning("the server %s of the provider %r %s", backend.url, self.provider.name, said)

    async def _answers(self, backend: Backend, url: str) -> bool | None:
        """None: it does not know the path."""
        seconds = self.provider.connect_seconds
        answer = await self.transport.send(
            "GET", url, backend.headers, connect_seconds=seconds, timeout_seconds=seconds
        )
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
