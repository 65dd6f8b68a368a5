"""Sends one call to a provider: waits for the rate limit and the budget, chooses a server, retries, accounts for it.

The servers of a provider are a pool, which probes their health and limits the number of retries. This is the only place
where a request is sent twice. It does not interpret bodies: `forwarding` builds the request and reads the response.

    call = UpstreamCall(pool, path, content)
    async with call:                          acquire, send and retry; raises ApiError
        call.body                             the whole response, if not streamed
        async for events in call.events()     or its events as they arrive; raises ApiError
        call.settle(Usage(...))               its usage
    call.attributes()                         for its span, failed or not

Failures become errors for the caller, without credentials. A provider with `retries` is retried here: its errors carry
`x-should-retry: false`, since further retries by the client would multiply the load of an outage. Without `retries`,
and while the retry budget is empty, the client decides by the status. What the provider itself says in
`x-should-retry` is respected and passed on.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Literal, Self
from urllib.parse import quote, unquote, urlsplit

from agentlightning import span as names
from agentlightning.gateway.answer import Usage
from agentlightning.gateway.config import Price, Provider
from agentlightning.gateway.dialects.base import ApiPath, EventTooLongError, SSEDecoder, event_data, loads_tolerantly
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.limits import Account, Budgets, RateLimiter, Reservation, max_prompt_tokens
from agentlightning.transport import Headers, Response, Transport, TransportError
from agentlightning.transport.base import CONTEXT_ERROR, error_fields, retry_after
from agentlightning.transport.servers import Server, ServerSet
from agentlightning.util.json_values import Json
from agentlightning.util.random_ids import random_uniform

logger = logging.getLogger(__name__)

# -- what the caller sees of a response --------------------------------------------------------------------------------

_VISIBLE_HEADERS: Final = frozenset(
    {
        *(b"x-request-id", b"request-id", b"apim-request-id", b"x-amzn-requestid", b"cf-ray"),
        *(b"retry-after", b"retry-after-ms", b"openai-processing-ms", b"openai-version"),
    }
)
"""Response headers for the caller: request ids, processing time and retry hints."""
_REQUEST_IDS: Final = {b"x-request-id": b"request-id", b"request-id": b"x-request-id"}
_VISIBLE_PREFIXES: Final = (b"x-ratelimit-", b"anthropic-ratelimit-")
_MAX_HEADER_BYTES: Final = 1024
_LINE_BREAKS: Final = frozenset(b"\r\n\0")


# Redacts the credentials of a provider in its responses, stream events, headers and errors.
#
# Otherwise a provider that echoes requests, or names its key in an error, would reveal it to agents and spans. Runs for
# every response before it is parsed, so it only searches the bytes.

HIDDEN: Final = "***"
_MAX_MESSAGE_CHARS: Final = 2000
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

    def visible_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The headers of a response that the SDK of the caller shows or acts upon: request ids, rate limits,
        `retry-after`.

        Names are in lower case. Account names, cookies, headers of the connection and values with line breaks are left
        out. The SDKs of OpenAI and Anthropic read the request id from different headers, so it is sent as both.
        """
        visible = [
            (name, _replace(value, self._everywhere))
            for name, value in headers
            if (name in _VISIBLE_HEADERS or name.startswith(_VISIBLE_PREFIXES))
            and len(value) <= _MAX_HEADER_BYTES
            and not _LINE_BREAKS & set(value)
        ]
        ids = {name: value for name, value in visible if name in _REQUEST_IDS}
        if len(ids) == 1:
            ((id_header, value),) = ids.items()
            visible.append((_REQUEST_IDS[id_header], value))
        return visible

    def text(self, text: str) -> str:
        """A text of the provider for agents and spans: of limited length."""
        redacted = _replace(text.encode("utf-8", "surrogatepass"), self._everywhere).decode("utf-8", "surrogatepass")
        return redacted if len(redacted) <= _MAX_MESSAGE_CHARS else redacted[:_MAX_MESSAGE_CHARS] + "..."


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


# -- the servers of a provider -----------------------------------------------------------------------------------------

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
        is_left = self._retry_budget >= 1
        self._retry_budget -= is_left
        return is_left

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
        """Stop the checks, and close the connections. A later call opens them again."""
        await self.end_watches()
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def check(self, replica: ProviderServer) -> None:
        """Any response but a server error means that it is healthy."""
        was_up, status, seconds = replica.up, 500, self.provider.connect_seconds
        try:
            for path in ("/health", "models"):
                status, _, _ = await self.fetch("GET", path, timeout_seconds=seconds, server=replica)
                if status not in (404, 405):
                    break
        except TransportError:
            status = 500
        if status >= 500:
            replica.record_failure(unreachable=True)
        elif not replica.up:
            replica.record_success()
        if was_up is not replica.up:
            change = "has recovered" if replica.up else "is unhealthy"
            logger.warning("the server %s of the provider %r %s", replica.url, self.provider.name, change)


def _address(provider: Provider, url: str) -> tuple[str, Headers]:
    """(URL, headers of every call) of one server. A user in the URL is sent as httpx does, on which the SDKs are built:
    it takes the place of the key in `Authorization`."""
    key, parts = provider.key(), urlsplit(url)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if provider.dialect == "anthropic":
        headers |= {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})
    elif key:
        headers["authorization"] = f"Bearer {key}"
    if parts.username is not None:
        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["authorization"] = f"Basic {base64.b64encode(account.encode()).decode()}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    headers |= {name.lower(): value for name, value in provider.headers.items()}
    return url, tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items())


# -- one call ----------------------------------------------------------------------------------------------------------

_BACKOFF_SECONDS: Final = 0.25
_MAX_PAUSE_SECONDS: Final = 300.0
"""The longest `Retry-After` that is respected; after it the server is tried again. Without `retries`, longer ones than
the calls may wait are left to the caller."""


# -- failures ----------------------------------------------------------------------------------------------------------

_RETRYABLE: Final = frozenset({408, 409, 429})
"""Statuses below 500 that the SDKs of OpenAI and Anthropic retry; they retry all from 500."""
_KEY: Final = re.compile(r"api[ _-]?key|access token|credentials?\b", re.IGNORECASE)
_REFUSED: Final = re.compile(
    r"invalid|incorrect|not valid|expired|revoked|missing|no such|unknown|wrong", re.IGNORECASE
)
_MASKED: Final = re.compile(r"\S*\*{3}\S*")
"""What a provider shows of a key that it refuses."""


class ProviderError(ApiError):
    """A failed try, and the error for the caller if there is no further one."""

    is_retryable = False
    """Whether another try may succeed."""
    counts_against_health = False
    """Whether the server counts as unhealthy for it."""
    unreachable = False


def from_transport(pool: ServerPool, error: TransportError) -> ProviderError:
    """The failure of a try without a response."""
    provider, reason = pool.provider, error.reason
    problem, code = {
        "timeout": (f"sent nothing for {provider.timeout_seconds:g} s", "provider_timeout"),
        "tls": ("cannot be reached over TLS", "provider_tls"),
        "proxy": ("cannot be reached through its proxy", "proxy_refused"),
        "connect": ("cannot be reached", "provider_unreachable"),
        "closed": ("closed the connection before its response was complete", "provider_closed"),
        "protocol": ("sent an invalid HTTP response", "provider_protocol"),
    }[reason]
    message = f"the provider {provider.name!r} {problem}: {pool.redactor.text(str(error))}"
    failure = ProviderError(504 if reason == "timeout" else 502, message, code=code, retry=provider.final)
    failure.is_retryable, failure.counts_against_health = reason in ("connect", "closed"), reason != "proxy"
    failure.unreachable = reason in ("connect", "tls")
    return failure


def from_response(pool: ServerPool, status: int, headers: Headers, body: bytes) -> ProviderError:
    """The failure of a try with an error response."""
    provider, failed = pool.provider, status >= 500
    subject, key = f"the provider {provider.name!r}", provider.key()
    text, code, param = (text and pool.redactor.text(text) for text in error_fields(body, loads_tolerantly))
    message, given = text or f"{subject} responded with status {status}", f"{code} {text}"
    hint = {b"true": True, b"false": False}.get(dict(headers).get(b"x-should-retry", b""))
    if status == 401 or (status == 403 and _KEY.search(given) and _REFUSED.search(given)):
        # It is not the caller's key, so it must not see what the provider shows of it.
        shown = _MASKED.sub(HIDDEN, (text or "").replace(key or HIDDEN, HIDDEN))
        used = "the configured API key" if key or provider.headers else "the call, for which no API key is configured"
        message = f"{subject} rejected {used} (status {status})" + (f": {shown}" if shown else "")
        return ProviderError(502, message, code="provider_key_refused", retry=False)
    if status == 407:  # Addressed to the client of the proxy, which is the gateway.
        message = f"{subject} cannot be reached through its proxy: it requires other credentials"
        return ProviderError(502, message, code="proxy_refused", retry=provider.final)
    if status < 400:
        failed, status, code, hint = True, 502, "provider_protocol", False
    elif failed:
        code = code or "provider_error"
    elif code is None and status in (400, 413, 422) and CONTEXT_ERROR.search(message):
        code = "context_length_exceeded"
    failure = ProviderError(status, message, code=code, param=param, retry=hint, retry_after=retry_after(headers))
    failure.is_retryable, failure.counts_against_health = bool(hint), failed
    if hint is None:
        failure.retry, failure.is_retryable = provider.final, failed or status in _RETRYABLE
    return failure


def unreadable_response(pool: ServerPool, problem: str) -> ApiError:
    """The error for a complete response that cannot be parsed."""
    message = f"the provider {pool.provider.name!r} sent an unreadable response: {pool.redactor.text(problem)}"
    return ApiError(502, message, code="provider_protocol", retry=pool.provider.final)


GATHER_SECONDS: Final = 0.05
"""How long the next part of a stream gathers: fewer and larger parts cost less to pass on."""
_BYTES_PER_TOKEN: Final = 4
"""Bytes of a JSON response for each output token, roughly."""
_CACHE_MARK: Final = b'"cache_control"'
_HOUR_MARK: Final = b'"1h"'


@dataclass(eq=False)
class UpstreamCall:
    """One call to a provider, on behalf of a rollout, with its retries. Use it once, as `async with`.

    Its tokens and dollars are estimated and reserved before it is sent, and settled after it. A try whose response
    breaks off is charged for by the provider, so it counts as well."""

    pool: ServerPool
    path: ApiPath | Literal["messages/count_tokens"]
    content: bytes
    """The body of the request."""
    stream: bool = False
    """Whether the response is passed on as it arrives. Other calls are retried even if their body breaks off, since the
    caller has seen nothing of it."""
    request_headers: Headers = ()
    """Sent in addition to the headers in the provider's configuration, which take precedence."""
    affinity: str = ""
    """Calls with the same key go to the same server while it is healthy: "rollout/attempt"."""
    rollout_id: str = ""
    """The rollout that pays; "" if unknown."""
    max_output_tokens: int = 0
    """The output limit of the request, for all its choices together."""
    price: Price | None = None
    """The price of the route; None: it costs nothing."""
    model: str = ""
    """The provider's name of the model, which rate limits refer to."""

    def __post_init__(self) -> None:
        self.usage: Usage | None = None
        """Usage of the response."""
        self.cost: float | None = None
        """US dollars of all tries; None without a price or a response."""
        self.body = b""
        """The whole response, if it is not streamed."""
        self.headers: Headers = ()
        """Headers of the last response."""
        self.trailing_bytes = b""
        """The incomplete event at the end of a streamed response."""
        self.status = 0
        """Status of the last response; 0 if there was none."""
        self.retries = 0
        """The times the request was sent again."""
        self._provider = provider = self.pool.provider
        self._reservation = Reservation(self.pool.budgets, Account(), self.rollout_id, 0.0, 0)
        """What the call may cost, where there is a budget."""
        self._estimated_tokens = 0
        """The tokens that the rate limit reckons with until the usage is known."""
        self._charged = Usage()
        """Usage of all tries."""
        self._num_events = 0
        self._server: ProviderServer | None = None
        self._response: Response | None = None
        self._unanswered = False
        """Whether a request was sent and got no response."""
        self._chunks: AsyncIterator[bytes] | None = None
        self._first_chunk = b""
        self._undo = ExitStack()
        self._failures = 0
        """The retries that followed a failure, and not a rate limit."""
        self._wait_left = provider.max_wait_seconds

    # -- tokens and dollars ----------------------------------------------------------------------------------------

    def attributes(self) -> Json:
        """Attributes of the call's span: the provider, the retries, the usage and cost of all tries."""
        attributes: Json = {names.PROVIDER_NAME: self._provider.name, names.PROVIDER_RETRIES: self.retries}
        charged = self._charged
        if self.usage is not None or charged.tokens:
            attributes |= {names.INPUT_TOKENS: charged.input_tokens, names.OUTPUT_TOKENS: charged.output_tokens}
        return attributes if self.cost is None else attributes | {names.COST: self.cost}

    async def _reserve(self) -> None:
        """Estimate the call's tokens, and reserve its worst case where there is a budget. The prompt counts only for a
        budget or a token limit. Raises ApiError 402 if it exceeds the budget."""
        budgets, output = self.pool.budgets, self.max_output_tokens
        prompt = self._max_prompt_tokens if budgets.config or self._provider.tokens_per_minute else 0
        self._estimated_tokens = prompt + output
        if budgets.config:
            # Writing a prompt to a cache costs more than reading it.
            written = prompt if _CACHE_MARK in self.content else 0
            hour = written if _HOUR_MARK in self.content else 0
            worst = Usage(prompt, output, written_tokens=written - hour, written_hour_tokens=hour)
            self._reservation = await budgets.reserve(self.rollout_id, self._dollars(worst), worst.tokens)

    def settle(self, usage: Usage | None) -> None:
        """Record the usage that the provider reports; None: it is estimated from the response. Idempotent."""
        if self.usage is None:
            output_tokens = self._num_events or len(self.body) // _BYTES_PER_TOKEN
            self.usage = usage or Usage(self._max_prompt_tokens // 2, output_tokens)
            self._charge(self.usage, is_last=True)

    def _charge(self, usage: Usage, *, is_last: bool = False) -> None:
        """Record what a try costs."""
        self._charged += usage
        dollars = self._dollars(usage)
        if self.price is not None:
            self.cost = (self.cost or 0.0) + dollars
            self.pool.dollars += dollars
        (self._reservation.settle if is_last else self._reservation.spend)(dollars, usage.tokens)

    def _charge_lost(self) -> None:
        """Record a response that broke off, by its Content-Length or else by the output limit."""
        length = dict(self.headers).get(b"content-length", b"")
        limit = 0 if self.stream else self.max_output_tokens
        output_tokens = min(limit, int(length) // _BYTES_PER_TOKEN) if length.isdigit() else limit
        self._charge(Usage(self._max_prompt_tokens // 2, output_tokens))

    def _dollars(self, usage: Usage) -> float:
        return self.price.dollars(usage) if self.price is not None else 0.0

    @property
    def _max_prompt_tokens(self) -> int:
        return max_prompt_tokens(self.content, self._provider.image_tokens)

    # -- tries -----------------------------------------------------------------------------------------------------

    def visible_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response that the caller gets."""
        return self.pool.redactor.visible_headers(self.headers)

    async def __aenter__(self) -> Self:
        limiter = self.pool.rate_limiter
        with ExitStack() as undo:
            await self._reserve()
            undo.callback(self._reservation.release)
            await limiter.acquire(self._estimated_tokens)
            undo.callback(lambda: limiter.release(self._estimated_tokens, self._charged.tokens))
            self.pool.record_start()
            undo.callback(self._finish)
            await self._send()
            self._undo = undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._undo.close()

    def _finish(self) -> None:
        """Close the response. The provider charges for one that was cut off or is unreadable, and for a request that it
        may have read."""
        if self._unanswered or self._response is not None:
            self.settle(None)
        self._close_response()

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a streamed response, those together that arrived together. Raises ApiError if the stream breaks
        off or an event is too long."""
        if self._chunks is None:
            return
        decoder, redactor = SSEDecoder(), self.pool.redactor
        chunk: bytes | None = self._first_chunk
        try:
            while chunk is not None:
                if events := decoder.feed(chunk):
                    self._num_events += events.startswith(b"data:") + events.count(b"\ndata:")
                    yield redactor.redact_body(events)
                chunk = await anext(self._chunks, None)
            if rest := redactor.redact_body(decoder.rest):
                if event_data(rest) is not None or b"[DONE]" in rest:  # Only its blank line is missing.
                    yield rest + b"\n\n"
                else:
                    self.trailing_bytes = rest
        except EventTooLongError as error:
            raise unreadable_response(self.pool, str(error)) from None
        except TransportError as error:
            failure = from_transport(self.pool, error)
            self._update_health(failure)
            raise failure from error

    async def _send(self) -> None:
        """Send until a try succeeds. Raises ApiError after the last one."""
        tried: list[ProviderServer] = []
        while True:
            tried.append(server := await self._choose_server(tried))
            if (failure := await self._send_once(server)) is None:
                return
            if (pause := self._retry_pause(failure, tried)) is None:
                raise failure
            if self._charged.tokens:
                self._reservation.check()
            self.retries += 1
            self.pool.num_retries += 1
            self.pool.rate_limiter.record_retry()
            logger.info("retrying a call to the provider %r: %s", self._provider.name, failure.message)
            await self._pause(pause)

    async def _choose_server(self, tried: Sequence[ProviderServer]) -> ProviderServer:
        """The server for the next try, once its pause is over. Raises ApiError 429 if that would take too long."""
        while True:
            server = self.pool.choose(self.affinity, tried, self.model)
            if (seconds := server.pause_seconds(self.model)) == 0.0:
                return server
            if seconds > self._wait_left:
                message = f"the provider {self._provider.name!r} asked for no calls for another {seconds:.0f} s"
                raise ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1.0, seconds))
            await self._pause(seconds)

    async def _pause(self, seconds: float) -> None:
        self._wait_left -= seconds
        await asyncio.sleep(seconds)

    async def _send_once(self, server: ProviderServer) -> ProviderError | None:
        """Send to one server, and read up to the first byte that the caller may see. Returns the failure, if any."""
        provider, failure, given = self._provider, None, {name for name, _ in server.headers}
        self._server, self.status = server, 0
        server.requests.add(self)
        try:
            response = self._response = await self.pool.transport.send(
                "POST",
                provider.url(server.url, self.path),
                [*server.headers, *(header for header in self.request_headers if header[0] not in given)],
                self.content,
                connect_seconds=provider.connect_seconds,
                timeout_seconds=provider.timeout_seconds,
            )
            self.status, self.headers = response.status, response.headers
            if not 200 <= response.status < 300:
                failure = from_response(self.pool, response.status, response.headers, await response.read())
            elif self.stream:
                self._chunks = response.chunks(GATHER_SECONDS)
                self._first_chunk = await anext(self._chunks, b"")
            else:
                self.body = self.pool.redactor.redact_body(await response.read())
        except TransportError as error:
            if 200 <= self.status < 300:
                self._charge_lost()
            else:
                self._unanswered = error.reason == "timeout"
            failure = from_transport(self.pool, error)
        except BaseException:
            self._unanswered = True
            self._close_response()
            raise
        if failure is None:
            server.record_success()
        else:
            self._close_response()
            self._update_health(failure)
        return failure

    def _close_response(self) -> None:
        if self._server is not None:
            self._server.requests.discard(self)
        response, self._response, self._chunks = self._response, None, None
        if response is not None:
            response.close()

    def _update_health(self, failure: ProviderError) -> None:
        """Record a failure with its server."""
        server, provider, seconds = self._server, self._provider, failure.retry_after
        if server is None:
            return
        if failure.counts_against_health:
            server.record_failure(failure.unreachable)
            if not server.up:
                self.pool.watch(server)
        if seconds is not None and (provider.retries or seconds <= provider.max_wait_seconds):
            server.pause(self.model, min(seconds, _MAX_PAUSE_SECONDS))

    def _retry_pause(self, failure: ProviderError, tried: Sequence[ProviderServer]) -> float | None:
        """Seconds until the next try; None if there is none. A rate limit that says when it ends is waited for, or
        another server is asked; all else takes a retry of this call, and one of the provider's budget."""
        after = failure.retry_after
        if not failure.is_retryable or not self._provider.retries:
            return None
        server = self.pool.choose(self.affinity, tried, self.model)
        is_free = server not in tried and server.accepts(self.model)
        if after and not is_free and after > self._wait_left:
            failure.retry = True  # The gateway does not wait, but the caller may.
            return None
        if after and failure.status == 429:
            return 0.0 if is_free else max(after, _BACKOFF_SECONDS)
        if self._failures >= self._provider.retries:
            return None
        if not self.pool.take_retry():
            failure.retry = failure.retry or None  # The caller may.
            return None
        self._failures += 1
        if is_free:
            return 0.0
        return after or _BACKOFF_SECONDS * 2**self.retries * random_uniform(0.5, 1.0)
