"""One call to a provider: when it is sent, to which of its servers, and how often.

Responsible for a call's turn, its budget and its retries, for every call that goes to a provider; this is the only
place where a call is sent twice. It does not know what the bytes mean: those who call it, `forwarding.passthrough` for
calls in the provider's own dialect and `translation.call` for others, say what to send and read what comes.

    call = Call(backends, ask)
    async with call:                          waits for its turn, sends, repeats; raises ApiError
        call.body                             the whole answer, where nobody watches
        async for events in call.events()     or its events as they come; raises ApiError
        call.settle(Usage(...))               what it used
    call.attributes()                         of its span, failed or not

    if call.start(on_end):                    sent already: the first try is over when `on_end` is called,
        call.whole                            with its answer in `body`, and `leave` ends the call,
        async with call                       or else this goes on from there
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self

from agentlightning import span as names
from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.dialects.sse import EventTooLongError, SSEDecoder
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.budget import Reservation
from agentlightning.gateway.upstream.failures import Failure, from_response, from_transport, unreadable_response
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.provider import ApiPath, visible_headers
from agentlightning.gateway.upstream.servers import Server, ServerPool
from agentlightning.gateway.upstream.token_bound import max_prompt_tokens
from agentlightning.transport import Headers, PendingResponse, Response, TransportError

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS: Final = 0.25
_MAX_PAUSE_SECONDS: Final = 300.0
"""For which a server's word is taken that it wants no calls; then it is asked again."""
_BYTES_OF_TOKEN: Final = 4
"""Of an answer in JSON, about."""
_CACHED: Final = b'"cache_control"'
_FOR_AN_HOUR: Final = b'"1h"'


@dataclass(slots=True)
class UpstreamRequest:
    """What is sent, and for whom."""

    path: ApiPath | Literal["messages/count_tokens"]
    body: bytes
    stream: bool = False
    """Whether the answer is read as it comes. A call that is not streamed is repeated even where its body breaks off,
    as nothing of it was shown."""
    headers: Headers = ()
    """Besides those the provider is configured with, which win."""
    affinity: str = ""
    """Calls that name the same go to the same server while it is well: "rollout/attempt"."""
    rollout_id: str = ""
    """Who pays; "" where nobody is known to."""
    max_output_tokens: int | None = None
    """The limit the request sets, of all its answers together."""
    price: Price | None = None
    """The route's."""
    model: str = ""
    """As the provider calls it: limits are a model's."""


class UpstreamCall:
    """One call, sent as often as it takes. Use once, as `async with`."""

    __slots__ = (
        *("ask", "body", "cost", "headers", "retries", "status", "succeeded", "trailing_bytes", "usage"),
        *(
            "_response",
            "_pending",
            "_server",
            "_pool",
            "_chunks",
            "_acquired",
            "_num_events",
            "_estimated_tokens",
            "_failure",
        ),
        *("_first_chunk", "_released", "_lost", "_reservation", "_settled", "_unanswered", "_uncharged"),
    )

    def __init__(self, pool: ServerPool, request: UpstreamRequest) -> None:
        self.ask = request
        self.body = b""
        """The whole answer, where it is not streamed."""
        self.trailing_bytes = b""
        """What a streamed answer ended with that is no whole event."""
        self.succeeded = False
        """What `start` has sent is answered well."""
        self.headers: Headers = ()
        """Of the last answer."""
        self.status = 0
        """Of the last answer; 0: there was none."""
        self.retries = 0
        self.usage: Usage | None = None
        """Of the answer."""
        self.cost: float | None = None
        """US dollars; None where the provider has no price, or nothing was used."""
        self._pool = pool
        self._server: Server | None = None
        self._response: Response | None = None
        self._pending: PendingResponse | None = None
        self._acquired = False
        self._released = False
        self._unanswered = False
        self._failure: Failure | None = None
        """Of the first try, where `start` made it."""
        self._chunks: AsyncIterator[bytes] | None = None
        self._first_chunk = b""
        self._num_events = 0
        self._reservation: Reservation | None = None
        self._estimated_tokens = 0
        self._settled = False
        self._lost = Usage()
        """What was drawn by tries whose answer broke off, and is charged for."""
        self._uncharged = Usage()
        """Of that, what no budget knows yet."""

    @property
    def price(self) -> Price | None:
        return self.ask.price or self._pool.provider.price

    def attributes(self) -> dict[str, Any]:
        """For the span of the call: who served it, how often it was sent, what all tries used and cost."""
        attributes: dict[str, Any] = {
            names.PROVIDER_NAME: self._pool.provider.name,
            names.PROVIDER_RETRIES: self.retries,
        }
        if self.usage is not None:
            attributes[names.INPUT_TOKENS] = self.usage.input_tokens + self._lost.input_tokens
            attributes[names.OUTPUT_TOKENS] = self.usage.output_tokens + self._lost.output_tokens
        if self.cost is not None:
            attributes[names.COST] = self.cost
        return attributes

    def try_start(self, on_end: Callable[[], None]) -> bool:
        """Send a call that is not streamed at once, and call `on_end` when that has been answered or has failed. False,
        and nothing has happened, where something has to be waited for: a turn, a budget, a connection. Raises
        TransportError for what cannot be sent."""
        pool, expected = self._pool, self._estimate_tokens()
        if pool.budgets.config or not pool.rate_limiter.allows(expected):
            return False
        server = pool.choose(self.ask.affinity, model=self.ask.model)
        if server.pause_seconds(self.ask.model):
            return False
        provider = pool.provider
        pending = pool.transport.try_send(
            "POST",
            provider.url(server.url, self.ask.path),
            self._headers(server),
            self.ask.body,
            partial(self._on_response, on_end),
            timeout_seconds=provider.timeout_seconds,
        )
        if pending is None:
            return False
        self._pending, self._server, self._acquired = pending, server, True
        server.in_flight += 1
        pool.rate_limiter.record_start(expected)
        pool.record_start()
        return True

    def _on_response(self, on_end: Callable[[], None]) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        assert self._server is not None
        provider, error = self._pool.provider, pending.error
        self.status, self.headers = pending.status, pending.headers
        self._server.in_flight -= 1
        if error is not None:
            if not pending.stale:  # else this was no try, and says nothing of the server
                self._transport_failure(error)
        elif 200 <= self.status < 300:
            self.body, self.succeeded = self._pool.redactor.redact_body(pending.body()), True
            self._server.health.record_success()
        else:
            self._failure = from_response(provider, self.status, self.headers, pending.body())
        if self._failure is not None:
            self._update_health(self._failure)
        on_end()

    def release(self) -> None:
        """The end of a call that was started and is answered, or that nobody waits for any more. Once is enough."""
        if self._released:
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.drop()
            self._unanswered = True
            if self._server is not None:
                self._server.in_flight -= 1
        self._release_all()

    async def __aenter__(self) -> Self:
        if not self._acquired:
            await self._acquire()
        try:
            await self._send()
        except BaseException:
            await self._end()
            raise
        return self

    async def _acquire(self) -> None:
        """Wait for a turn."""
        pool, expected = self._pool, self._estimate_tokens()
        if pool.budgets.config:
            prompt = expected - self._max_output_tokens
            worst = self.price.dollars(self._worst_usage(prompt)) if self.price else 0.0
            self._reservation = await pool.budgets.reserve(self.ask.rollout_id, worst, expected)
        try:
            await pool.rate_limiter.acquire(expected)
        except BaseException:
            self._release_reservation()
            raise
        self._acquired = True
        pool.record_start()

    def _estimate_tokens(self) -> int:
        """Tokens that the call will use at most, roughly."""
        counted = self._pool.budgets.config or self._pool.provider.tokens_per_minute
        self._estimated_tokens = (self._max_prompt_tokens if counted else 0) + self._max_output_tokens
        return self._estimated_tokens

    def _worst_usage(self, prompt: int) -> Usage:
        """What the call uses where all that may be charged for is: a prompt that is kept in a cache costs more."""
        if _CACHED not in self.ask.body:
            return Usage(prompt, self._max_output_tokens)
        hour = prompt if _FOR_AN_HOUR in self.ask.body else 0
        return Usage(prompt, self._max_output_tokens, written_tokens=prompt - hour, written_hour_tokens=hour)

    @property
    def _max_prompt_tokens(self) -> int:
        """Tokens of the request at most."""
        return max_prompt_tokens(self.ask.body, self._pool.provider.image_tokens)

    @property
    def _max_output_tokens(self) -> int:
        most = self.ask.max_output_tokens
        return self._pool.provider.max_output_tokens if most is None else most

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled and self._response is not None:
            self.settle(None)  # Cut off or unreadable: what arrived was sampled, and will be charged.
        await self._end()

    def visible_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer that the caller sees."""
        return self._pool.redactor.redact_headers(visible_headers(self.headers))

    async def events(self) -> AsyncIterator[list[bytes]]:
        """The events of a streamed answer as they come, those of each read together. Raises ApiError where they break
        off, and for an event without end."""
        if self._chunks is None:
            return
        events, redactor = SSEDecoder(), self._pool.redactor
        chunk: bytes | None = self._first_chunk
        try:
            while chunk is not None:
                found = events.feed(chunk)
                self._num_events += len(found)
                yield [redactor.redact_body(event) for event in found]
                chunk = await anext(self._chunks, None)
            self.trailing_bytes = redactor.redact_body(events.rest)
        except EventTooLongError as error:
            raise unreadable_response(self._pool.provider, str(error)) from None
        except TransportError as error:
            failure = from_transport(self._pool.provider, error)
            self._update_health(failure)
            raise failure.api_error from error

    def settle(self, usage: Usage | None) -> None:
        """What the call used, as its provider says; None: it did not say, and an estimate is kept. Once is enough."""
        if self._settled:
            return
        self._settled = True
        self.usage = usage or Usage(self._max_prompt_tokens // 2, self._num_events or len(self.body) // 4)
        if self.price is not None:
            self.cost = self.price.dollars(self.usage) + self.price.dollars(self._lost)
            self._pool.dollars += self.cost
        if self._reservation is not None:
            self._reservation.settle(*self._spend_of(self.usage + self._uncharged))

    def _spend_of(self, usage: Usage) -> tuple[float, int]:
        """(US dollars, tokens)."""
        return self.price.dollars(usage) if self.price is not None else 0.0, usage.tokens

    # -- sending ---------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        tried: list[Server] = []
        failure = self._failure
        if failure is None:
            failure = await self._send_once(await self._choose_server())
        while failure is not None:
            tried.append(self._server or self._pool.servers[0])
            pause = self._pause(failure, tried)
            if pause is None or not self._pool.take_retry():
                raise failure.api_error
            self._charge_lost()
            self.retries += 1
            self._pool.rate_limiter.record_retry()
            logger.info("asking the provider %r again: %s", self._pool.provider.name, failure.api_error.message)
            await asyncio.sleep(pause)
            failure = await self._send_once(await self._choose_server(tried))

    async def _choose_server(self, tried: Sequence[Server] = ()) -> Server:
        """The server to ask, once it wants to be asked again. Raises ApiError 429 where that would take too long."""
        pool, model, waited = self._pool, self.ask.model, 0.0
        while True:
            server = pool.choose(self.ask.affinity, tried, model)
            if (seconds := server.pause_seconds(model)) == 0.0:
                return server
            if waited + seconds > pool.provider.max_wait_seconds:
                message = f"the provider {pool.provider.name!r} asked for no calls for another {seconds:.0f} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1.0, seconds))
            waited += seconds
            await asyncio.sleep(seconds)

    def _charge_lost(self) -> None:
        """Another try follows one whose answer broke off. Raises ApiError 402 where no budget has room for it."""
        uncharged, self._uncharged = self._uncharged, Usage()
        if self._reservation is not None and uncharged.tokens:
            self._reservation.charge(*self._spend_of(uncharged))

    async def _send_once(self, server: Server) -> Failure | None:
        """Ask one server, up to the first byte that somebody may be shown. Returns what went wrong."""
        self._server, self.status = server, 0
        server.in_flight += 1
        try:
            failure = await self._exchange(server)
        except TransportError as error:
            failure = self._transport_failure(error)
        except BaseException:
            self._unanswered = True
            await self._close_response()
            raise
        if failure is None:
            server.health.record_success()
            return None
        await self._close_response()
        self._update_health(failure)
        return failure

    async def _exchange(self, server: Server) -> Failure | None:
        provider, ask = self._pool.provider, self.ask
        answer = self._response = await self._pool.transport.send(
            "POST",
            provider.url(server.url, ask.path),
            self._headers(server),
            ask.body,
            connect_seconds=provider.connect_seconds,
            timeout_seconds=provider.timeout_seconds,
        )
        self.status, self.headers = answer.status, answer.headers
        await answer.__aenter__()
        if not 200 <= answer.status < 300:
            return from_response(provider, answer.status, answer.headers, await answer.read())
        if ask.stream:
            self._chunks = answer.chunks()
            self._first_chunk = await anext(self._chunks, b"")
        else:
            self.body = self._pool.redactor.redact_body(await answer.read())
        return None

    def _transport_failure(self, error: TransportError) -> Failure:
        self._failure = from_transport(self._pool.provider, error)
        if 200 <= self.status < 300:
            self._count_lost()
        else:
            self._unanswered = error.reason == "timeout"
        return self._failure

    def _count_lost(self) -> None:
        """An answer broke off before its end: it was drawn, or some of it was, and will be charged. How long it was is
        said by its head, or is not known."""
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        most = 0 if self.ask.stream else self._max_output_tokens
        drawn = min(most, int(length) // _BYTES_OF_TOKEN) if length.isdigit() else most
        lost = Usage(self._max_prompt_tokens // 2, drawn)
        self._lost, self._uncharged = self._lost + lost, self._uncharged + lost

    def _headers(self, server: Server) -> Headers:
        own, given = server.headers, self.ask.headers
        return (*own, *_without_duplicates(given, own)) if given else own

    def _update_health(self, failure: Failure) -> None:
        """What a failure says of the server."""
        if self._server is None:
            return
        if failure.counts_against_health:
            self._server.health.record_failure(failure.unreachable)
            if self._server.health.is_suspect:
                self._pool.start_probing()
        if failure.retry_after_seconds is not None:
            self._server.pause(self.ask.model, min(failure.retry_after_seconds, _MAX_PAUSE_SECONDS))

    def _pause(self, failure: Failure, tried: Sequence[Server]) -> float | None:
        """How long to wait before the next try; None: there is none."""
        provider = self._pool.provider
        if not failure.is_retryable or self.retries >= provider.retries:
            return None
        after = self._pool.choose(self.ask.affinity, tried, self.ask.model)
        if after not in tried and after.accepts(self.ask.model):
            return 0.0
        if failure.retry_after_seconds is not None:
            if failure.retry_after_seconds <= provider.max_wait_seconds:
                return failure.retry_after_seconds
            failure.api_error.retry = True  # Nobody has waited: the caller may.
            return None
        return _BACKOFF_SECONDS * 2**self.retries * random.uniform(0.5, 1.0)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _close_response(self) -> None:
        if self._server is not None:
            self._server.in_flight -= 1
        answer, self._response, self._chunks = self._response, None, None
        if answer is not None:
            await answer.__aexit__(None, None, None)

    async def _end(self) -> None:
        if self._response is not None:
            await self._close_response()
        self._release_all()

    def _release_all(self) -> None:
        if self._unanswered and not self._settled:
            # It was sent and never answered: its prompt was read, and will be charged.
            self.settle(Usage(self._max_prompt_tokens // 2, 0))
        elif self._lost.tokens and not self._settled:
            self.settle(Usage())
        self._released = True
        self._pool.rate_limiter.release(
            self._estimated_tokens, (self.usage.tokens if self.usage else 0) + self._lost.tokens
        )
        self._release_reservation()

    def _release_reservation(self) -> None:
        if self._reservation is not None:
            self._reservation.release()


def _without_duplicates(given: Headers, own: Headers) -> list[tuple[bytes, bytes]]:
    named = {name for name, _ in own}
    return [(name, value) for name, value in given if name not in named]
