"""The direct way of a call that is passed on as it is: from socket to socket and into the journal, without a task.

Takes the calls for which nothing has to be waited for but the provider: whose caller is known by its URL or its keys,
whose attempt was looked at lately, whose answer comes in one piece, for which there is a slot, a turn and a connection.
That is nearly all of a busy gateway's. Whatever else happens, before or after the call was sent, it hands the call to
the way that can wait (`Gateway.serve`), which goes on with it where it stands.
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
from agentlightning.gateway.callers.attribution import AttemptIds, Attribution, Caller
from agentlightning.gateway.callers.client_retries import RequestIdentity
from agentlightning.gateway.concurrency import Slots
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.passthrough import Forward, to_the_end
from agentlightning.gateway.forwarding.service import Forwarder
from agentlightning.gateway.metrics import Counters
from agentlightning.gateway.recording import raw_exchange
from agentlightning.gateway.recording.provider_response import id_of, usage_of
from agentlightning.gateway.upstream.call import UpstreamCall
from agentlightning.gateway.upstream.provider import ApiPath

logger = logging.getLogger(__name__)

_MAX_KNOWN: Final = 4096
"""Senders whose callers are remembered."""
_LONGEST: Final = 4096
"""Bytes of the headers and the URL of such a sender."""
_VARYING: Final = frozenset({b"content-length", b"idempotency-key", b"x-stainless-retry-count"})
"""Headers that differ between the calls of one sender, and say nothing of who that is."""

Headers = list[tuple[bytes, bytes]]
Known = tuple[Caller, Mapping[str, str]]
"""Who calls, and the headers of the call."""


class Line(Protocol):
    """A call as the socket has it. It is ended by `reply`, `hand_over` or `drop`, or by its caller, who hangs up."""

    url: bytes
    headers: Headers
    """Names in lower case."""
    path_params: Mapping[str, str]
    body: bytes
    caller: Known | None
    """As `Direct.identify` has found."""

    def when_gone(self, end: Callable[[], None] | None) -> None:
        """What is to be called when the caller hangs up."""
        ...

    def reply(self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer with JSON."""
        ...

    def hand_over(self, app: ASGIApp) -> None:
        """Have an application serve it instead, in a task."""
        ...

    def drop(self) -> None:
        """Hang up on the caller."""
        ...


Resume = Callable[[ApiPath, AttemptIds | None, Callable[..., Awaitable[None]]], ASGIApp]
"""Makes an application of the rest of the work on a call of an attempt: of what takes a scope, `receive` and an
outlet."""


class Direct:
    """Made by the gateway, of its parts. `resume` leads back to it."""

    def __init__(
        self,
        slots: Slots,
        attribution: Attribution,
        forwarder: Forwarder,
        counters: Counters,
        resume: Resume,
        max_body_bytes: int,
    ) -> None:
        self.slots, self.forwarder, self.counters, self.resume = slots, forwarder, counters, resume
        self.under_way: set[_Passing] = set()
        self.unfinished: set[asyncio.Future[None]] = set()
        """Records of callers that are gone, on their way into a store without a journal."""
        self._attribution = attribution
        self._max_body_bytes = max_body_bytes
        self._callers: dict[tuple[bytes, tuple[tuple[bytes, bytes], ...]], tuple[Caller, dict[str, str]]] = {}

    def take(self, path: ApiPath, line: Line) -> bool:
        """Serve a call. False, and nothing has happened, where that is for the way that can wait."""
        if self.slots.full or len(line.body) > self._max_body_bytes:
            return False
        try:
            forward = self._plan(path, line)
            if forward is None:
                return False
            passing = _Passing(self, forward, line)
            started = passing.call.try_start(passing.answered)
        except Exception:  # noqa: BLE001 - it comes up again there, at the boundary, and is recorded and told
            return False
        if started:
            self.slots.take_now()
            self.under_way.add(passing)
            line.when_gone(passing.hung_up)
        return started

    def calls(self) -> list[tuple[AttemptIds, float, Callable[[ApiError], None]]]:
        """Those under way, for `AttemptWatch`."""
        return [passing.watched for passing in self.under_way]

    async def close(self) -> None:
        """End what is under way, as if its callers had hung up."""
        for passing in list(self.under_way):
            passing.drop()
        if self.unfinished:
            await asyncio.wait(self.unfinished)

    def _plan(self, path: ApiPath, line: Line) -> Forward | None:
        if line.caller is None:
            return None
        caller, headers = line.caller
        if "content-encoding" in headers:
            return None
        caller = structs.replace(caller, repeat=RequestIdentity.of(headers, path, line.body))
        return self.forwarder.plan_now(path, caller, headers, line.body)

    def identify(self, line: Line) -> None:
        """Note who calls, where its head says so. Raises ApiError where the head is enough to refuse the call."""
        line.caller = self._caller(line)

    def _caller(self, line: Line) -> Known | None:
        """A sender says the same each time, up to the body and what varies: that is remembered of no call."""
        same = [header for header in line.headers if header[0] not in _VARYING]
        sender = line.url, tuple(same)
        if (known := self._callers.get(sender)) is not None:
            caller, headers = known
            return caller, headers if _is_plain(line, len(line.headers) - len(same)) else headers_by_name(line.headers)
        headers = headers_by_name(line.headers)
        caller = self._attribution.try_caller(headers, line.path_params)
        if caller is None:
            return None
        if "traceparent" not in headers and _bytes(line) <= _LONGEST:  # each trace is claimed
            if len(self._callers) >= _MAX_KNOWN:
                self._callers.clear()
            self._callers[sender] = caller, headers_by_name(same)
        return caller, headers


def _is_plain(line: Line, varying: int) -> bool:
    """Whether nothing varies but the length of the body."""
    return varying == 0 or (varying == 1 and b"content-length" in dict(line.headers))


def _bytes(line: Line) -> int:
    return len(line.url) + sum(len(name) + len(value) for name, value in line.headers)


class _Passing:
    """One call under way."""

    __slots__ = ("_direct", "_forward", "_line", "call")

    def __init__(self, direct: Direct, forward: Forward, line: Line) -> None:
        self._direct, self._forward, self._line = direct, forward, line
        self.call: UpstreamCall = forward.call()

    def answered(self) -> None:
        """The provider has answered, or failed."""
        direct, forward, call, line = self._direct, self._forward, self.call, self._line
        line.when_gone(None)
        direct.under_way.discard(self)
        direct.slots.give_back()
        if not call.succeeded:
            return self._hand_over(partial(direct.forwarder.run, forward, call=call))
        try:
            body, kept = self._record()
        except Exception as error:  # noqa: BLE001 - the boundary is there too
            return self._hand_over(partial(self._fail, error))
        if kept is not None:
            return self._hand_over(partial(self._finish, kept, body))
        self._end()
        line.reply(200, body, call.visible_headers())

    def _record(self) -> tuple[bytes, Awaitable[None] | None]:
        """(what the caller is shown, what is to be awaited first)."""
        forward, call, forwarder = self._forward, self.call, self._direct.forwarder
        if forwarder.keep_record is None or forward.strips or not raw_exchange.may_defer(call.body):
            return forward.take(call), forward.keep(forwarder.keep, call)
        try:
            usage = usage_of(forward.path, call.body)
        except MsgspecError:
            return forward.take(call), forward.keep(forwarder.keep, call)
        call.settle(usage)
        forward.response.usage = usage
        if forward.stored:
            forward.response.id = id_of(call.body)
        record = raw_exchange.write(forward, call, self._line.body, time.time())
        forward.recorded = True
        return call.body, forwarder.keep_record(record)

    def hung_up(self) -> None:
        """The caller is gone before the provider has answered."""
        self._direct.under_way.discard(self)
        self._direct.slots.give_back()
        self._direct.counters.requests += 1
        self._direct.counters.cancelled += 1
        self.call.release()
        try:
            kept = self._forward.keep_failure(self._direct.forwarder.keep, self.call, asyncio.CancelledError())
        except StoreError as error:  # there is nobody left to tell, and others are to be ended as well
            return logger.error("a call that its caller gave up could not be recorded: %s", error)
        if kept is not None:
            work = asyncio.ensure_future(kept)
            self._direct.unfinished.add(work)
            work.add_done_callback(self._direct.unfinished.discard)

    @property
    def watched(self) -> tuple[AttemptIds, float, Callable[[ApiError], None]]:
        """Its attempt, when it began, and what ends it."""
        attempt = self._forward.caller.attempt
        assert attempt is not None
        return attempt, self._forward.started, self.end

    def end(self, api_error: ApiError) -> None:
        """Its attempt has ended before the provider has answered."""
        self._line.when_gone(None)
        self._direct.under_way.discard(self)
        self._direct.slots.give_back()
        self.call.release()
        self._hand_over(partial(self._fail, api_error))

    def drop(self) -> None:
        """The server ends."""
        self._line.when_gone(None)
        self.hung_up()
        self._line.drop()

    def _end(self) -> None:
        self._direct.counters.requests += 1
        self.call.release()
        self._direct.forwarder.count_usage(self._forward)

    # -- where it has to be waited ---------------------------------------------------------------------------------

    def _hand_over(self, work: Callable[..., Awaitable[None]]) -> None:
        app = self._direct.resume(self._forward.path, self._forward.caller.attempt, work)

        async def rest(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:  # it may have been cancelled before it began
                self.call.release()

        self._line.hand_over(rest)

    async def _finish(
        self, kept: Awaitable[None], body: bytes, scope: Any, receive: Any, writer: ResponseWriter
    ) -> None:
        """The answer waits for its record."""
        try:
            await to_the_end(kept)
        finally:
            self.call.release()
        self._direct.forwarder.count_usage(self._forward)
        writer.extra_headers = self.call.visible_headers()
        await writer.send_json(200, body)

    async def _fail(self, error: Exception, scope: Any, receive: Any, writer: ResponseWriter) -> None:
        """The answer cannot be read, or not be kept."""
        self.call.settle(None)
        self.call.release()
        await to_the_end(self._forward.keep_failure(self._direct.forwarder.keep, self.call, error))
        raise error
