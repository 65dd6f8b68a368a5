"""Forwards a call in the dialect of its provider: passes the response on and records it.

The response is recorded before its last bytes are sent, so that everything an agent received is recorded.
`forwarding.translated` serves callers whose dialect the provider does not speak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from agentlightning.gateway.answer import Json, Usage
from agentlightning.gateway.dialects.sse import event_data, loads
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.record import ProviderRecord
from agentlightning.gateway.forwarding.request import AddedFields, upstream_request
from agentlightning.gateway.http import MAX_INLINE_BYTES, PASSED, ResponseWriter, offload
from agentlightning.gateway.upstream.call import UpstreamCall, UpstreamRequest
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.span import Span
from agentlightning.util.json_values import dumps

RecordSpans = Callable[[list[Span]], Awaitable[None] | None]
"""Records spans durably: they survive a crash once it returned None, or once its awaitable is done. Raises
StoreError."""

_FINAL_EVENTS: Final = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
)
"""Types of the events that end a stream."""


@dataclass(slots=True)
class ForwardedCall:
    """One call to a provider in its own dialect. `run` it once. Raises ApiError 400 for a request that cannot be
    sent."""

    record: ProviderRecord
    headers: Mapping[str, str]
    """Of the request, by lower-case name."""
    is_recorded: bool = field(default=False, init=False)
    _request: UpstreamRequest = field(init=False)
    _added: AddedFields = field(default_factory=AddedFields, init=False)
    _final_events: list[bytes] = field(default_factory=list[bytes], init=False)
    """The end of a stream, which waits until the response is recorded."""

    def __post_init__(self) -> None:
        self._request = upstream_request(self.record, self.headers, self._added)

    async def run(self, keep: RecordSpans, writer: ResponseWriter) -> None:
        """Send the request, pass the response on and record it. Failures are recorded as well. Raises ApiError if the
        provider fails, and the errors of `keep`."""
        assert self.record.route.servers is not None
        call = UpstreamCall(self.record.route.servers, self._request)

        def may_start() -> bool:  # Before its head the provider may still fail, which the caller's SDK would retry.
            if answered := self._request.stream and 200 <= call.status < 300:
                writer.extra_headers = call.visible_headers()
            return answered

        try:
            with writer.kept_alive(may_start):
                async with call:
                    writer.extra_headers = call.visible_headers()
                    try:
                        await (self._send_stream if self._request.stream else self._send_whole)(call, keep, writer)
                    finally:
                        self._settle(call, is_end=False)
        except BaseException as error:
            if call.status and not writer.started:
                writer.extra_headers = call.visible_headers()
            if not self.is_recorded:
                failed = error
                await self._keep(keep, call, lambda of_call: [self.record.failed_span(of_call, failed)])
            raise

    # -- the response ----------------------------------------------------------------------------------------------

    async def _send_whole(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        try:
            data = loads(call.body)
        except ValueError as error:
            raise self._not_json(error) from None
        self.record.response.read(data)
        self._settle(call)
        body = self._whole(call, data)
        await self._keep(keep, call, self.record.spans)
        self._remember(body)
        await writer.send_json(200, body)

    async def _send_stream(self, call: UpstreamCall, keep: RecordSpans, writer: ResponseWriter) -> None:
        async for events in call.events():
            if chunk := b"".join([self._read_event(event) for event in events]):
                await writer.send_events(chunk)
        if not self._final_events and not any(choice.given_reason for choice in self.record.response.choices.values()):
            raise self._protocol_error("ended its stream before the response was complete")
        self._settle(call)
        ending = self._ending(call)
        await self._keep(keep, call, self.record.spans)
        self._remember(b"")
        await writer.send_events(ending)
        await writer.close()

    def _settle(self, call: UpstreamCall, is_end: bool = True) -> None:
        """Account for the usage. What is answered in the background costs what the last poll says."""
        if self.record.is_pending:
            call.settle(Usage())
        elif is_end:
            call.settle(self.record.response.usage)

    async def _keep(self, keep: RecordSpans, call: UpstreamCall, make: Callable[[Json], list[Span]]) -> None:
        """Record the call if it has an attempt, even if this task is cancelled meanwhile."""
        if self.record.caller.attempt is None:
            return
        self.is_recorded, of_call, size = True, call.attributes(), len(self._request.body) // PASSED
        if size <= MAX_INLINE_BYTES:
            return await run_to_completion(keep(make(of_call)))

        async def record() -> None:
            if (pending := keep(await offload(size, lambda: make(of_call)))) is not None:
                await pending

        await run_to_completion(record())

    @property
    def _provider(self) -> Provider:
        assert self.record.route.provider is not None
        return self.record.route.provider

    def _protocol_error(self, problem: str) -> ApiError:
        message = f"the provider {self._provider.name!r} {problem}"
        return ApiError(502, message, code="provider_protocol", retry=self._provider.final)

    # -- what the caller gets; a translated call does all this in its own way ----------------------------------------

    def _not_json(self, error: ValueError) -> ApiError:
        """The error for a whole response that cannot be parsed."""
        return self._protocol_error("sent a response that is not JSON")

    def _whole(self, call: UpstreamCall, data: Any) -> bytes:
        """The body for the caller."""
        return dumps(data) if self._added and self._added.remove_from(data) else call.body

    def _read_event(self, event: bytes) -> bytes:
        """Read an event, and return the bytes to send now."""
        data = event_data(event)
        self.record.response.read(data)
        if self._added and isinstance(data, dict):
            event = self._added.filter_event(event, cast("Json", data))
        if not self._final_events and not is_final(event, data):
            return event
        self._final_events.append(event)
        return b""

    def _ending(self, call: UpstreamCall) -> bytes:
        """The bytes that end the stream."""
        return b"".join(self._final_events) + call.trailing_bytes

    def _remember(self, body: bytes) -> None:
        """Remember the answer, once it is recorded. `body`: what is sent of one that is not streamed."""


def is_final(event: bytes, data: Any) -> bool:
    """Whether an event, and its data, end a stream."""
    if data is None:
        return b"[DONE]" in event
    kind = cast("Json", data).get("type") if isinstance(data, dict) else None
    return isinstance(kind, str) and kind in _FINAL_EVENTS


async def run_to_completion(work: Awaitable[None] | None) -> None:
    """Await work that must complete even if the current task is cancelled meanwhile."""
    if work is None:
        return
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
