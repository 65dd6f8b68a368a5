"""Executes calls of the store contract that arrive over HTTP, and serves `POST /v1/agl/calls`, many of them at once:

    {"calls": [{"method": "add_span", "arguments": {...}, "key": "..."}, ...]}
    {"results": [{"value": ...}, {"error": {"type": "NotFoundError", "message": "..."}}, ...]}

The results are in the order of the calls, and each call succeeds or fails on its own. The calls run concurrently, so
that the store commits them together. A call with a `key` is executed once, however often it arrives: the store
remembers its result (store/idempotency.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from agentlightning.errors import AgentLightningError, ConflictError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import PROTOCOL_HEADER, arguments_of, decoder, encode
from agentlightning.store.http.endpoint import (
    cancel_on_disconnect,
    read_body,
    respond,
    respond_in_parts,
)
from agentlightning.store.http.errors import RequestError, error_of, error_response
from agentlightning.store.http.operations import ACCEPTS_KEY, decode_call, hints_of
from agentlightning.store.idempotency import AlreadyAnsweredError, IdempotentCall, use_key
from agentlightning.store.instrumented import WAITING_CALLS
from agentlightning.store.paging import PageSizer

MAX_WAIT_SECONDS: Final = 3600.0
"""The longest time a call may wait for rollouts."""
MAX_CALLS: Final = 4096
FIRST_LISTS: Final = 4
"""Lists of one request that are read concurrently at first."""
MAX_LISTS: Final = 256
_LISTS: Final = frozenset({"query_spans", "query_rollouts", "query_attempts", "query_resources", "read_records"})
_ADDING: Final = ("add_span", "add_many_spans")
_READ_CURRENT: Final[Mapping[Any, tuple[str, str]]] = {
    Rollout: ("get_rollout_by_id", "rollout_id"),
    Attempt: ("get_attempt", "attempt_id"),
    ResourcesUpdate: ("get_resources_by_id", "resources_id"),
}
"""How to read the present state of a result that was too long to store, by its type: a method, and its argument."""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a method of the contract."""

    method: str
    arguments: dict[str, Any]
    encode: Callable[[Any], bytes]
    """Encodes the result."""
    once: IdempotentCall | None = None
    """Set if it has an idempotency key."""
    result: bytes | None = None
    """In a batch: the encoded result or error, once there is one."""


# -- one call --------------------------------------------------------------------------------------------------------


async def execute(store: LightningStoreBase, call: Call) -> bytes:
    """The encoded result. Raises what the method raises, and ConflictError if the key was used with another request."""
    method, once = getattr(store, call.method), call.once
    if once is not None and call.method.startswith("dequeue_") and call.arguments.get("claim_id") is None:
        call.arguments["claim_id"] = f"cl-{once.key[:24]}"  # a repeated claim gets the same rollouts
    if once is None or call.method not in ACCEPTS_KEY:
        return call.encode(await method(**call.arguments))
    try:
        with use_key(once):
            return call.encode(await method(**call.arguments))
    except AlreadyAnsweredError as before:
        if before.answer is not None:
            return before.answer
    reader, name = _READ_CURRENT.get(hints_of(call.method)["return"], ("", ""))
    known = call.arguments.get(name)
    current = await getattr(store, reader)(known) if isinstance(known, str) else None
    if current is None:
        raise ConflictError(
            f"{call.method} was already executed with this idempotency key; its result was too long to be stored"
        )
    return call.encode(current)


def limit_wait(call: Call) -> bool:
    """Limit how long a call waits for others. Returns whether it may have to wait."""
    if call.method not in WAITING_CALLS:
        return False
    timeout = call.arguments.get("timeout")
    if timeout is None:
        timeout = MAX_WAIT_SECONDS if call.method == "wait_for_rollouts" else 0.0
    call.arguments["timeout"] = min(timeout, MAX_WAIT_SECONDS)
    return timeout > 0


# -- batches ---------------------------------------------------------------------------------------------------------


class _Batch(Struct):
    calls: list[Raw]


_decode_batch: Final = decoder(_Batch)


@dataclass
class BatchHandler:
    """Executes the calls of a request and responds with their results."""

    store: LightningStoreBase
    max_body_bytes: int

    async def handle(self, request: Request) -> Response:
        headers, ((name, protocol),) = request.headers, PROTOCOL_HEADER.items()
        client = headers.get(name, protocol)
        if client != protocol:
            raise RequestError(f"the client has protocol {client}, and this server {protocol}; use the same version")
        raw_calls: list[Raw] = _decode_batch(await read_body(headers, request.receive, self.max_body_bytes)).calls
        if len(raw_calls) > MAX_CALLS:
            raise RequestError(f"{len(raw_calls)} calls in one request; send at most {MAX_CALLS}", 413)
        calls = [_decode(raw) for raw in raw_calls]
        waiting = [call for call in calls if limit_wait(call)]
        with cancel_on_disconnect(request.receive) if waiting else nullcontext():
            return await self._respond(calls)

    async def _respond(self, calls: Sequence[Call]) -> Response:
        lists = [call for call in calls if call.method in _LISTS]
        if len(lists) > FIRST_LISTS:
            await self._execute_all([call for call in calls if call.method not in _LISTS])
            return await respond_in_parts(self._parts(calls, lists), headers=PROTOCOL_HEADER)
        await self._execute_all(calls)
        results = b",".join([call.result or b"" for call in calls])
        return respond(b'{"results":[%b]}' % results, headers=PROTOCOL_HEADER)

    async def _parts(self, calls: Sequence[Call], lists: Sequence[Call]) -> AsyncIterator[bytes]:
        """A response with many lists, which may not fit in memory together: they are read a few at a time, the fewer
        the larger they are, and sent at once."""
        sizer, rest, separator = PageSizer(max_items=MAX_LISTS, first=FIRST_LISTS), iter(lists), b'{"results":['
        for call in calls:
            while call.result is None:
                group = list(islice(rest, sizer.items))
                await self._execute_all(group)
                sizer.record(len(group), sum(len(each.result or b"") for each in group))
            yield separator + call.result
            separator, call.result = b",", b""
        yield b"]}"

    async def _execute_all(self, calls: Sequence[Call]) -> None:
        if len(calls) == 1:
            return await self._execute(calls[0])
        adding = [call for call in calls if call.method in _ADDING and call.once is None]
        if len(adding) < 2:
            await asyncio.gather(*map(self._execute, calls))
            return
        others = [call for call in calls if call.method not in _ADDING or call.once is not None]
        await asyncio.gather(self._add_spans(adding), *map(self._execute, others))

    async def _add_spans(self, calls: Sequence[Call]) -> None:
        """Add the spans of all calls in one call of the store, which is much faster. If that fails, each call is made
        on its own, so that only those fail that have to."""
        sent = [_spans_of(call) for call in calls]
        try:
            stored = iter(await self.store.add_many_spans([span for spans in sent for span in spans]))
        except (AgentLightningError, OverflowError, UnicodeError):
            await asyncio.gather(*map(self._execute, calls))
            return
        for call, spans in zip(calls, sent, strict=True):
            added = list(islice(stored, len(spans)))
            call.result = call.encode(added if "spans" in call.arguments else added[0])

    async def _execute(self, call: Call) -> None:
        if call.result is None:  # it could be decoded
            try:
                call.result = await execute(self.store, call)
            except Exception as error:  # noqa: BLE001  the boundary: a call that fails does not fail the others
                call.result = _encode_error(error)


def _decode(raw: Raw) -> Call:
    try:
        decoded = decode_call(raw)
    except RequestError as error:
        return Call("", {}, encode, result=_encode_error(error))
    method: str = type(decoded).__struct_config__.tag
    arguments = arguments_of(decoded.arguments)
    call = Call(method, arguments, partial(_encode_result, arguments))
    if decoded.key is not None:
        call.once = IdempotentCall.of(method, decoded.key, encode(decoded.arguments), call.encode)
    return call


def _encode_error(error: Exception) -> bytes:
    return b'{"error":' + encode(error_response(error_of(error)).error) + b"}"


def _encode_result(arguments: Mapping[str, Any], result: Any) -> bytes:
    """The result; of a span that was stored as sent, only its sequence_id."""
    if "spans" in arguments:
        result = [_span_result(*each) for each in zip(arguments["spans"], result, strict=True)]
    elif "span" in arguments:
        result = _span_result(arguments["span"], result)
    return b'{"value":' + encode(result) + b"}"


def _span_result(sent: Span, stored: Span) -> int | Span:
    same = (
        stored.attributes is sent.attributes and stored.span_id == sent.span_id and stored.attempt_id == sent.attempt_id
    )
    return stored.sequence_id if same else stored


def _spans_of(call: Call) -> Sequence[Span]:
    return call.arguments["spans"] if "spans" in call.arguments else [call.arguments["span"]]
