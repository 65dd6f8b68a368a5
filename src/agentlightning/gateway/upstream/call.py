"""One call to a provider: when it is sent, to which of its servers, and how often.

Responsible for a call's turn, its budget and its retries, for every call that goes to a provider; this is the only
place where a call is sent twice. It does not know what the bytes mean: those who call it, `gateway.forward` for calls
in the provider's own dialect and `gateway.translate` for others, say what to send and read what comes.

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
from agentlightning.gateway.dialects.sse import EventTooLongError, SSEDecoder
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.budget import Reservation
from agentlightning.gateway.upstream.failures import Failure, broken, of_answer, of_transport
from agentlightning.gateway.upstream.provider import ApiPath, Price, Usage, visible_headers
from agentlightning.gateway.upstream.servers import Backend, Backends
from agentlightning.gateway.upstream.token_bound import most_tokens
from agentlightning.transport import Answer, Arriving, Headers, TransportError

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS: Final = 0.25
_LONGEST_REST_SECONDS: Final = 300.0
"""For which a server's word is taken that it wants no calls; then it is asked again."""
_BYTES_OF_TOKEN: Final = 4
"""Of an answer in JSON, about."""
_CACHED: Final = b'"cache_control"'
_FOR_AN_HOUR: Final = b'"1h"'


@dataclass(slots=True)
class Ask:
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


class Call:
    """One call, sent as often as it takes. Use once, as `async with`."""

    __slots__ = (
        *("ask", "body", "cost", "headers", "rest", "retries", "status", "usage", "whole"),
        *("_answer", "_arriving", "_backend", "_backends", "_chunks", "_entered", "_events", "_expected", "_failure"),
        *("_first", "_left", "_lost", "_reservation", "_settled", "_unanswered", "_uncharged"),
    )

    def __init__(self, backends: Backends, ask: Ask) -> None:
        self.ask = ask
        self.body = b""
        """The whole answer, where it is not streamed."""
        self.rest = b""
        """What a streamed answer ended with that is no whole event."""
        self.whole = False
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
        self._backends = backends
        self._backend: Backend | None = None
        self._answer: Answer | None = None
        self._arriving: Arriving | None = None
        self._entered = False
        self._left = False
        self._unanswered = False
        self._failure: Failure | None = None
        """Of the first try, where `start` made it."""
        self._chunks: AsyncIterator[bytes] | None = None
        self._first = b""
        self._events = 0
        self._reservation: Reservation | None = None
        self._expected = 0
        self._settled = False
        self._lost = Usage()
        """What was drawn by tries whose answer broke off, and is charged for."""
        self._uncharged = Usage()
        """Of that, what no budget knows yet."""

    @property
    def price(self) -> Price | None:
        return self.ask.price or self._backends.provider.price

    def attributes(self) -> dict[str, Any]:
        """For the span of the call: who served it, how often it was sent, what all tries used and cost."""
        attributes: dict[str, Any] = {
            names.PROVIDER_NAME: self._backends.provider.name,
            names.PROVIDER_RETRIES: self.retries,
        }
        if self.usage is not None:
            attributes[names.INPUT_TOKENS] = self.usage.input_tokens + self._lost.input_tokens
            attributes[names.OUTPUT_TOKENS] = self.usage.output_tokens + self._lost.output_tokens
        if self.cost is not None:
            attributes[names.COST] = self.cost
        return attributes

    def start(self, on_end: Callable[[], None]) -> bool:
        """Send a call that is not streamed at once, and call `on_end` when that has been answered or has failed. False,
        and nothing has happened, where something has to be waited for: a turn, a budget, a connection. Raises
        TransportError for what cannot be sent."""
        backends, expected = self._backends, self._expect()
        if backends.budgets.config or not backends.limits.open_to(expected):
            return False
        backend = backends.choose(self.ask.affinity, model=self.ask.model)
        if backend.rest_seconds(self.ask.model):
            return False
        provider = backends.provider
        arriving = backends.transport.send_now(
            "POST",
            provider.url(backend.url, self.ask.path),
            self._headers(backend),
            self.ask.body,
            partial(self._arrived, on_end),
            timeout_seconds=provider.timeout_seconds,
        )
        if arriving is None:
            return False
        self._arriving, self._backend, self._entered = arriving, backend, True
        backend.under_way += 1
        backends.limits.take(expected)
        backends.began()
        return True

    def _arrived(self, on_end: Callable[[], None]) -> None:
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        assert self._backend is not None
        provider, error = self._backends.provider, arriving.error
        self.status, self.headers = arriving.status, arriving.headers
        self._backend.under_way -= 1
        if error is not None:
            if not arriving.stale:  # else this was no try, and says nothing of the server
                self._fail(error)
        elif 200 <= self.status < 300:
            self.body, self.whole = self._backends.redactor.answer(arriving.whole()), True
            self._backend.health.succeeded()
        else:
            self._failure = of_answer(provider, self.status, self.headers, arriving.whole())
        if self._failure is not None:
            self._judge(self._failure)
        on_end()

    def leave(self) -> None:
        """The end of a call that was started and is answered, or that nobody waits for any more. Once is enough."""
        if self._left:
            return
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.drop()
            self._unanswered = True
            if self._backend is not None:
                self._backend.under_way -= 1
        self._leave()

    async def __aenter__(self) -> Self:
        if not self._entered:
            await self._enter()
        try:
            await self._send()
        except BaseException:
            await self._end()
            raise
        return self

    async def _enter(self) -> None:
        """Wait for a turn."""
        backends, expected = self._backends, self._expect()
        if backends.budgets.config:
            prompt = expected - self._most
            worst = self.price.dollars(self._worst(prompt)) if self.price else 0.0
            self._reservation = await backends.budgets.reserve(self.ask.rollout_id, worst, expected)
        try:
            await backends.limits.enter(expected)
        except BaseException:
            self._release()
            raise
        self._entered = True
        backends.began()

    def _expect(self) -> int:
        """Tokens that the call will use at most, roughly."""
        counted = self._backends.budgets.config or self._backends.provider.tokens_per_minute
        self._expected = (self._prompt if counted else 0) + self._most
        return self._expected

    def _worst(self, prompt: int) -> Usage:
        """What the call uses where all that may be charged for is: a prompt that is kept in a cache costs more."""
        if _CACHED not in self.ask.body:
            return Usage(prompt, self._most)
        hour = prompt if _FOR_AN_HOUR in self.ask.body else 0
        return Usage(prompt, self._most, written_tokens=prompt - hour, written_hour_tokens=hour)

    @property
    def _prompt(self) -> int:
        """Tokens of the request at most."""
        return most_tokens(self.ask.body, self._backends.provider.image_tokens)

    @property
    def _most(self) -> int:
        most = self.ask.max_output_tokens
        return self._backends.provider.max_output_tokens if most is None else most

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._settled and self._answer is not None:
            # Cut off: what was sent of it was drawn, and will be charged.
            self.settle(Usage(self._prompt // 2, self._events))
        await self._end()

    def passed_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer that the caller sees."""
        return self._backends.redactor.headers(visible_headers(self.headers))

    async def events(self) -> AsyncIterator[list[bytes]]:
        """The events of a streamed answer as they come, those of each read together. Raises ApiError where they break
        off, and for an event without end."""
        if self._chunks is None:
            return
        events, redactor = SSEDecoder(), self._backends.redactor
        chunk: bytes | None = self._first
        try:
            while chunk is not None:
                found = events.feed(chunk)
                self._events += len(found)
                yield [redactor.answer(event) for event in found]
                chunk = await anext(self._chunks, None)
            self.rest = redactor.answer(events.rest)
        except EventTooLongError as error:
            raise broken(self._backends.provider, str(error)) from None
        except TransportError as error:
            failure = of_transport(self._backends.provider, error)
            self._judge(failure)
            raise failure.api_error from error

    def settle(self, usage: Usage | None) -> None:
        """What the call used, as its provider says; None: it did not say, and an estimate is kept. Once is enough."""
        if self._settled:
            return
        self._settled = True
        self.usage = usage or Usage(self._prompt // 2, self._events or len(self.body) // 4)
        if self.price is not None:
            self.cost = self.price.dollars(self.usage) + self.price.dollars(self._lost)
            self._backends.dollars += self.cost
        if self._reservation is not None:
            self._reservation.settle(*self._of(self.usage + self._uncharged))

    def _of(self, usage: Usage) -> tuple[float, int]:
        """(US dollars, tokens)."""
        return self.price.dollars(usage) if self.price is not None else 0.0, usage.tokens

    # -- sending ---------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        tried: list[Backend] = []
        failure = self._failure
        if failure is None:
            failure = await self._try(await self._choose())
        while failure is not None:
            tried.append(self._backend or self._backends.all[0])
            pause = self._pause(failure, tried)
            if pause is None or not self._backends.may_repeat():
                raise failure.api_error
            self._charge_lost()
            self.retries += 1
            self._backends.limits.repeated()
            logger.info("asking the provider %r again: %s", self._backends.provider.name, failure.api_error.message)
            await asyncio.sleep(pause)
            failure = await self._try(await self._choose(tried))

    async def _choose(self, tried: Sequence[Backend] = ()) -> Backend:
        """The server to ask, once it wants to be asked again. Raises ApiError 429 where that would take too long."""
        backends, model, waited = self._backends, self.ask.model, 0.0
        while True:
            backend = backends.choose(self.ask.affinity, tried, model)
            if (seconds := backend.rest_seconds(model)) == 0.0:
                return backend
            if waited + seconds > backends.provider.max_wait_seconds:
                message = f"the provider {backends.provider.name!r} asked for no calls for another {seconds:.0f} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1.0, seconds))
            waited += seconds
            await asyncio.sleep(seconds)

    def _charge_lost(self) -> None:
        """Another try follows one whose answer broke off. Raises ApiError 402 where no budget has room for it."""
        uncharged, self._uncharged = self._uncharged, Usage()
        if self._reservation is not None and uncharged.tokens:
            self._reservation.charge(*self._of(uncharged))

    async def _try(self, backend: Backend) -> Failure | None:
        """Ask one server, up to the first byte that somebody may be shown. Returns what went wrong."""
        self._backend, self.status = backend, 0
        backend.under_way += 1
        try:
            failure = await self._ask(backend)
        except TransportError as error:
            failure = self._fail(error)
        except BaseException:
            self._unanswered = True
            await self._hang_up()
            raise
        if failure is None:
            backend.health.succeeded()
            return None
        await self._hang_up()
        self._judge(failure)
        return failure

    async def _ask(self, backend: Backend) -> Failure | None:
        provider, ask = self._backends.provider, self.ask
        answer = self._answer = await self._backends.transport.send(
            "POST",
            provider.url(backend.url, ask.path),
            self._headers(backend),
            ask.body,
            connect_seconds=provider.connect_seconds,
            timeout_seconds=provider.timeout_seconds,
        )
        self.status, self.headers = answer.status, answer.headers
        await answer.__aenter__()
        if not 200 <= answer.status < 300:
            return of_answer(provider, answer.status, answer.headers, await answer.read())
        if ask.stream:
            self._chunks = answer.chunks()
            self._first = await anext(self._chunks, b"")
        else:
            self.body = self._backends.redactor.answer(await answer.read())
        return None

    def _fail(self, error: TransportError) -> Failure:
        self._failure = of_transport(self._backends.provider, error)
        if 200 <= self.status < 300:
            self._lose()
        else:
            self._unanswered = error.reason == "timeout"
        return self._failure

    def _lose(self) -> None:
        """An answer broke off before its end: it was drawn, or some of it was, and will be charged. How long it was is
        said by its head, or is not known."""
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        most = 0 if self.ask.stream else self._most
        drawn = min(most, int(length) // _BYTES_OF_TOKEN) if length.isdigit() else most
        lost = Usage(self._prompt // 2, drawn)
        self._lost, self._uncharged = self._lost + lost, self._uncharged + lost

    def _headers(self, backend: Backend) -> Headers:
        own, given = backend.headers, self.ask.headers
        return (*own, *_others(given, own)) if given else own

    def _judge(self, failure: Failure) -> None:
        """What a failure says of the server."""
        if self._backend is None:
            return
        if failure.sick:
            self._backend.health.failed(failure.unreachable)
            if self._backend.health.doubted:
                self._backends.watch()
        if failure.rest_seconds is not None:
            self._backend.rest(self.ask.model, min(failure.rest_seconds, _LONGEST_REST_SECONDS))

    def _pause(self, failure: Failure, tried: Sequence[Backend]) -> float | None:
        """How long to wait before the next try; None: there is none."""
        provider = self._backends.provider
        if not failure.repeatable or self.retries >= provider.retries:
            return None
        after = self._backends.choose(self.ask.affinity, tried, self.ask.model)
        if after not in tried and after.free(self.ask.model):
            return 0.0
        if failure.rest_seconds is not None:
            if failure.rest_seconds <= provider.max_wait_seconds:
                return failure.rest_seconds
            failure.api_error.retry = True  # Nobody has waited: the caller may.
            return None
        return _BACKOFF_SECONDS * 2**self.retries * random.uniform(0.5, 1.0)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _hang_up(self) -> None:
        if self._backend is not None:
            self._backend.under_way -= 1
        answer, self._answer, self._chunks = self._answer, None, None
        if answer is not None:
            await answer.__aexit__(None, None, None)

    async def _end(self) -> None:
        if self._answer is not None:
            await self._hang_up()
        self._leave()

    def _leave(self) -> None:
        if self._unanswered and not self._settled:
            # It was sent and never answered: its prompt was read, and will be charged.
            self.settle(Usage(self._prompt // 2, 0))
        elif self._lost.tokens and not self._settled:
            self.settle(Usage())
        self._left = True
        self._backends.limits.leave(self._expected, (self.usage.tokens if self.usage else 0) + self._lost.tokens)
        self._release()

    def _release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()


def _others(given: Headers, own: Headers) -> list[tuple[bytes, bytes]]:
    named = {name for name, _ in own}
    return [(name, value) for name, value in given if name not in named]
