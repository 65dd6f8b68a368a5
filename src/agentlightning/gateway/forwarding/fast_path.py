"""Callback-only fast path for non-streaming pass-through calls; falls back to a task when anything must be awaited.

It takes a call whose caller is known from its URL or keys, whose attempt is in the cache, and for which a concurrency
slot, the rate limit and a pooled connection are free at once: nearly all calls of a busy gateway. Anything else, before
or after the request was sent, continues on the task path (`gateway.endpoints`) from where it stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from msgspec import MsgspecError, structs
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import StoreError
from agentlightning.gateway.asgi import ResponseWriter, headers_by_name
from agentlightning.gateway.callers.attempts import AttemptIds
from agentlightning.gateway.callers.attribution import Attribution, Caller
from agentlightning.gateway.callers.client_retries import RequestIdentity
from agentlightning.gateway.concurrency import ConcurrencyLimit
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.passthrough import ForwardedCall, run_to_completion
from agentlightning.gateway.forwarding.service import ForwardingService
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.recording import raw_exchange
from agentlightning.gateway.recording.provider_response import id_of, usage_of
from agentlightning.gateway.routing import ResolvedCall
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.provider import ApiPath

logger = logging.getLogger(__name__)

_MAX_CACHED_SENDERS: Final = 4096
"""Senders whose callers are cached."""
_MAX_SENDER_BYTES: Final = 4096
"""Of the URL and headers of a cached sender."""
_VARYING_HEADERS: Final = frozenset({b"content-length", b"idempotency-key", b"x-stainless-retry-count"})
"""Headers that differ between the calls of one sender and do not identify it."""

Headers = list[tuple[bytes, bytes]]
KnownCaller = tuple[Caller, Mapping[str, str]]
"""The caller, and the headers of the call by name."""

RAW_REQUEST: Final = "agentlightning.raw_request"
"""Key of the ASGI scope for the `RawRequest`, so that the task path uses what the fast path has found out."""


class RawRequest(Protocol):
    """A request as received from the socket, before its body is parsed.

    It ends with `reply`, `hand_over` or `drop`, or when the client disconnects.
    """

    url: bytes
    headers: Headers
    """Names in lower case."""
    path_params: Mapping[str, str]
    body: bytes
    caller: KnownCaller | None
    """Set by `FastPath.identify`."""
    call: ResolvedCall | None
    """Set by `FastPath.try_serve`, if it gets so far."""

    def on_disconnect(self, end: Callable[[], None] | None) -> None:
        """Register the callback for a disconnect of the client; None removes it."""
        ...

    def reply(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send a JSON response."""
        ...

    def hand_over(self, app: ASGIApp) -> None:
        """Continue in a task, with an ASGI application."""
        ...

    def drop(self) -> None:
        """Close the connection to the client."""
        ...


ContinueInTask = Callable[[ApiPath, AttemptIds | None, Callable[..., Awaitable[None]]], ASGIApp]
"""Makes an ASGI application of the rest of the work on a call of an attempt."""


class FastPath:
    """Serves calls that need no task. `continue_in_task` makes the application that finishes those that do.

    Its twin is the task path of `ForwardingService`; `test_fast_path` holds both to the same responses and records.
    """

    def __init__(
        self,
        limit: ConcurrencyLimit,
        attribution: Attribution,
        forwarder: ForwardingService,
        counters: Counters,
        continue_in_task: ContinueInTask,
        max_body_bytes: int,
    ) -> None:
        self.limit, self.forwarder, self.counters, self.continue_in_task = limit, forwarder, counters, continue_in_task
        self.in_flight: set[_FastCall] = set()
        self.pending_records: set[asyncio.Future[None]] = set()
        """Spans of disconnected clients that a store without a journal is still writing."""
        self._attribution = attribution
        self._max_body_bytes = max_body_bytes
        self._callers: dict[tuple[bytes, tuple[tuple[bytes, bytes], ...]], tuple[Caller, dict[str, str]]] = {}

    def try_serve(self, path: ApiPath, raw: RawRequest) -> bool:
        """Start serving a call. Returns False if the task path has to serve it, with `raw.call` if that is known."""
        if self.limit.full or len(raw.body) > self._max_body_bytes:
            return False
        try:
            forwarded = self._plan(path, raw)
            if forwarded is None:
                return False
            fast_call = _FastCall(self, forwarded, raw)
            started = fast_call.call.try_start(fast_call.on_response)
        except Exception:  # noqa: BLE001 - it recurs on the task path, whose boundary records and reports it
            return False
        if started:
            self.limit.try_acquire()
            self.in_flight.add(fast_call)
            raw.on_disconnect(fast_call.on_disconnect)
        return started

    def calls(self) -> list[tuple[AttemptIds, float, Callable[[ApiError], None]]]:
        """Calls in flight, for `AttemptWatch`."""
        return [fast_call.watched for fast_call in self.in_flight]

    async def close(self) -> None:
        """End the calls in flight as if their clients had disconnected."""
        for fast_call in list(self.in_flight):
            fast_call.drop()
        if self.pending_records:
            await asyncio.wait(self.pending_records)

    def _plan(self, path: ApiPath, raw: RawRequest) -> ForwardedCall | None:
        if raw.caller is None:
            return None
        caller, headers = raw.caller
        if "content-encoding" in headers:
            return None
        caller = structs.replace(caller, repeat=RequestIdentity.of(headers, path, raw.body))
        raw.caller = caller, headers
        raw.call, forwarded = self.forwarder.try_plan(path, headers, caller, raw.body)
        return forwarded

    def identify(self, raw: RawRequest) -> None:
        """Set `raw.caller` if the head names the caller. Raises ApiError if the head alone rejects the call."""
        raw.caller = self._caller(raw)

    def _caller(self, raw: RawRequest) -> KnownCaller | None:
        """The caller, cached by URL and headers without those that vary between the calls of one sender."""
        stable = [header for header in raw.headers if header[0] not in _VARYING_HEADERS]
        sender = raw.url, tuple(stable)
        if (cached := self._callers.get(sender)) is not None:
            caller, headers = cached
            return caller, headers if _is_plain(raw, len(raw.headers) - len(stable)) else headers_by_name(raw.headers)
        headers = headers_by_name(raw.headers)
        caller = self._attribution.try_caller(headers, raw.path_params)
        if caller is None:
            return None
        if "traceparent" not in headers and _size_of(raw) <= _MAX_SENDER_BYTES:  # Each call of a trace must claim it.
            if len(self._callers) >= _MAX_CACHED_SENDERS:
                self._callers.clear()
            self._callers[sender] = caller, headers_by_name(stable)
        return caller, headers


def _is_plain(raw: RawRequest, varying: int) -> bool:
    """Whether Content-Length is the only varying header."""
    return varying == 0 or (varying == 1 and b"content-length" in dict(raw.headers))


def _size_of(raw: RawRequest) -> int:
    return len(raw.url) + sum(len(name) + len(value) for name, value in raw.headers)


class _FastCall:
    """One call in flight."""

    __slots__ = ("_forwarded", "_owner", "_raw", "call")

    def __init__(self, owner: FastPath, forwarded: ForwardedCall, raw: RawRequest) -> None:
        self._owner, self._forwarded, self._raw = owner, forwarded, raw
        self.call: UpstreamCall = forwarded.upstream_call()

    def on_response(self) -> None:
        """Called when the upstream response is complete or has failed."""
        owner, forwarded, call, raw = self._owner, self._forwarded, self.call, self._raw
        raw.on_disconnect(None)
        owner.in_flight.discard(self)
        owner.limit.release()
        if not call.succeeded:
            return self._hand_over(partial(owner.forwarder.run, forwarded, call=call))
        try:
            body, pending = self._record()
        except Exception as error:  # noqa: BLE001 - the task path has the boundary
            return self._hand_over(partial(self._fail, error))
        if pending is not None:
            return self._hand_over(partial(self._finish, pending, body))
        self._end()
        raw.reply(200, body, call.visible_headers())

    def _record(self) -> tuple[bytes, Awaitable[None] | None]:
        """(body for the caller, what must be awaited before it is sent)."""
        forwarded, call, forwarder = self._forwarded, self.call, self._owner.forwarder
        if forwarder.record_raw is None or forwarded.adds_fields or not raw_exchange.may_defer(call.body):
            return forwarded.read_body(call), forwarded.record(forwarder.record, call)
        try:
            usage = usage_of(forwarded.path, call.body)
        except MsgspecError:
            return forwarded.read_body(call), forwarded.record(forwarder.record, call)
        call.settle(usage)
        forwarded.response.usage = usage
        if forwarded.is_stored:
            forwarded.response.id = id_of(call.body)
        record = raw_exchange.write(forwarded, call, self._raw.body, time.time())
        forwarded.recorded = True
        return call.body, forwarder.record_raw(record)

    def on_disconnect(self) -> None:
        """Called when the client disconnects before the upstream response."""
        self._owner.in_flight.discard(self)
        self._owner.limit.release()
        self._owner.counters.requests += 1
        self._owner.counters.cancelled += 1
        self.call.release()
        try:
            pending = self._forwarded.record_failure(self._owner.forwarder.record, self.call, asyncio.CancelledError())
        except StoreError as error:  # No caller is left to get the error, and `close` has further calls to end.
            return logger.error("a call whose client disconnected could not be recorded: %s", error)
        if pending is not None:
            work = asyncio.ensure_future(pending)
            self._owner.pending_records.add(work)
            work.add_done_callback(self._owner.pending_records.discard)

    @property
    def watched(self) -> tuple[AttemptIds, float, Callable[[ApiError], None]]:
        """(attempt, start time, callback that ends the call)."""
        attempt = self._forwarded.caller.attempt
        assert attempt is not None
        return attempt, self._forwarded.started, self.end

    def end(self, api_error: ApiError) -> None:
        """End the call because its attempt has ended."""
        self._raw.on_disconnect(None)
        self._owner.in_flight.discard(self)
        self._owner.limit.release()
        self.call.release()
        self._hand_over(partial(self._fail, api_error))

    def drop(self) -> None:
        """End the call because the server stops."""
        self._raw.on_disconnect(None)
        self.on_disconnect()
        self._raw.drop()

    def _end(self) -> None:
        self._owner.counters.requests += 1
        self.call.release()
        self._owner.forwarder.count_usage(self._forwarded)

    # -- continuing in a task ---------------------------------------------------------------------------------

    def _hand_over(self, work: Callable[..., Awaitable[None]]) -> None:
        app = self._owner.continue_in_task(self._forwarded.path, self._forwarded.caller.attempt, work)

        async def rest(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:  # It may have been cancelled before it started.
                self.call.release()

        self._raw.hand_over(rest)

    async def _finish(
        self, pending: Awaitable[None], body: bytes, scope: Any, receive: Any, writer: ResponseWriter
    ) -> None:
        """Send the response once its record is durable."""
        try:
            await run_to_completion(pending)
        finally:
            self.call.release()
        self._owner.forwarder.count_usage(self._forwarded)
        writer.extra_headers = self.call.visible_headers()
        await writer.send_json(200, body)

    async def _fail(self, error: Exception, scope: Any, receive: Any, writer: ResponseWriter) -> None:
        """Record the failure of a response that cannot be parsed or recorded, or of a call that was ended."""
        self.call.settle(None)
        self.call.release()
        await run_to_completion(self._forwarded.record_failure(self._owner.forwarder.record, self.call, error))
        raise error
