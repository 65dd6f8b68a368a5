"""`POST /v1/agl/calls`: many calls of the store contract in one request.

    {"calls": [{"method": "add_span", "arguments": {...}, "key": "..."}, ...]}
    {"results": [{"value": ...}, {"error": {"type": "NotFoundError", "message": "..."}}, ...]}

The results are in the order of the calls, and each call succeeds or fails on its own. The calls run concurrently, so
that the store commits them together. A call with a `key` is executed once, however often it arrives (idempotency.py).
`POST /v1/agl/waits/calls` is the same, for calls that may have to wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec import UNSET, Raw, Struct
from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, ConfigError, StoreError
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import PROTOCOL_VERSION, decoder, encode
from agentlightning.store.http.errors import RequestError, error_response
from agentlightning.store.http.operations import ACCEPTS_KEY, CALLS, call_decoder
from agentlightning.store.http.server.asgi import (
    MAX_WAIT_SECONDS,
    ChunkedResponse,
    ClientDisconnected,
    authorize,
    headers_by_name,
    read_body,
    respond,
    respond_error,
    run_until_disconnect,
)
from agentlightning.store.http.server.idempotency import call_once, claim_id_of
from agentlightning.store.http.shapes import from_wire
from agentlightning.store.idempotency import IdempotentCall

logger = logging.getLogger(__name__)

MIN_LISTS: Final = 4
"""Lists of one request that are read concurrently at first."""
MAX_LISTS: Final = 256
MAX_LISTS_BYTES: Final = 4 * 1024 * 1024
"""Fewer lists are read concurrently after some that were larger than this together."""
MAX_CALLS: Final = 4096
PROTOCOL_HEADER: Final = (b"agl-protocol", str(PROTOCOL_VERSION).encode())


class _Batch(Struct):
    calls: list[Raw]


_decode_batch = decoder(_Batch)
_decode_call = call_decoder()
_LIST_CALLS: Final = frozenset(
    {CALLS[name] for name in ("query_spans", "query_rollouts", "query_attempts", "query_resources", "read_records")}
)
_SPAN_CALLS: Final = frozenset({CALLS["add_span"], CALLS["add_many_spans"]})


class BatchEndpoint:
    """Executes the calls of a request and responds with their results."""

    def __init__(self, store: LightningStoreBase, token: str | None, max_body_bytes: int) -> None:
        self._store = store
        self._token = token
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await respond_error(send, RequestError("only POST is allowed here", 405), [(b"allow", b"POST")])
        try:
            headers = headers_by_name(scope)
            authorize(headers, self._token)
            calls = self._decode(await read_body(headers, receive, self._max_body_bytes))
            lists = [index for index, call in enumerate(calls) if type(call) in _LIST_CALLS]
            if len(lists) > MIN_LISTS:
                if any(_may_wait(call) for call in calls):
                    raise RequestError("a request with many lists cannot hold a call that waits; send that separately")
                return await self._respond_with_lists(calls, lists, send)
            results = await self._results(calls, receive)
        except AgentLightningError as error:
            return await respond_error(send, error, [PROTOCOL_HEADER])
        except ClientDisconnected:
            return None
        await respond(send, 200, b'{"results":[' + b",".join(results) + b"]}", [PROTOCOL_HEADER])

    async def _respond_with_lists(self, calls: list[Any], lists: Sequence[int], send: Send) -> None:
        """Respond to a request with many lists, which may not fit in memory together: they are read a few at a time,
        the fewer the larger they are, and sent at once. The other calls are executed first."""
        list_indexes, others = set(lists), [index for index in range(len(calls)) if index not in set(lists)]
        results = dict(zip(others, await self._call_all([calls[i] for i in others]), strict=True)) if others else {}
        response, count, position = ChunkedResponse(send, 200, [PROTOCOL_HEADER]), MIN_LISTS, 0
        await response.write(b'{"results":[')
        for index in range(len(calls)):
            if index in list_indexes and index not in results:
                batch = lists[position : position + count]
                encoded = await asyncio.gather(*(self._call(calls[each]) for each in batch))
                results |= zip(batch, encoded, strict=True)
                position += len(batch)
                fits = sum(map(len, encoded)) <= MAX_LISTS_BYTES
                count = min(2 * count, MAX_LISTS) if fits else max(1, count // 4)
            await response.write((b"," if index else b"") + results.pop(index))
        await response.write(b"]}")
        await response.close()

    def _decode(self, body: bytes) -> list[Any]:
        """The calls; for an invalid one, its error."""
        raw_calls = cast("_Batch", _decode_batch(body)).calls
        if len(raw_calls) > MAX_CALLS:
            raise RequestError(f"{len(raw_calls)} calls in one request; send at most {MAX_CALLS}", 413)
        calls: list[Any] = []
        for raw in raw_calls:
            try:
                calls.append(_decode_call(raw))
            except RequestError as error:
                calls.append(error)
        return calls

    async def _results(self, calls: list[Any], receive: Receive) -> list[bytes]:
        if not any(_may_wait(call) for call in calls):
            return await self._call_all(calls)
        return await run_until_disconnect(receive, self._call_all(calls))

    async def _call_all(self, calls: list[Any]) -> list[bytes]:
        if len(calls) == 1:
            return [await self._call(calls[0])]
        adding = [index for index, call in enumerate(calls) if type(call) in _SPAN_CALLS and call.key is None]
        if len(adding) < 2:
            return await asyncio.gather(*(self._call(call) for call in calls))
        others = sorted(set(range(len(calls))).difference(adding))
        added, called = await asyncio.gather(
            self._add_spans([calls[index] for index in adding]),
            asyncio.gather(*(self._call(calls[index]) for index in others)),
        )
        results = dict(zip(adding, added, strict=True)) | dict(zip(others, called, strict=True))
        return [results[index] for index in range(len(calls))]

    async def _add_spans(self, calls: list[Any]) -> list[bytes]:
        """Add the spans of all calls in one call of the store, which is much faster. If that fails, each call is made
        on its own, so that only those fail that have to."""
        spans_by_call = [_spans_of(call) for call in calls]
        sent = [span for spans in spans_by_call for span in spans]
        try:
            stored = await self._store.add_many_spans(sent)
        except (AgentLightningError, OverflowError, UnicodeError):
            return await asyncio.gather(*(self._call(call) for call in calls))
        results = iter([_span_result(span, each) for span, each in zip(sent, stored, strict=True)])
        encoded: list[bytes] = []
        for call, spans in zip(calls, spans_by_call, strict=True):
            values = [next(results) for _ in spans]
            encoded.append(_encode_value(values if hasattr(call.arguments, "spans") else values[0]))
        return encoded

    async def _call(self, call: Any) -> bytes:
        try:
            if isinstance(call, RequestError):
                raise call
            sent = b"" if call.key is None else encode(call.arguments)
            arguments = _arguments(call.arguments)
            method = type(call).__struct_config__.tag

            def encoded(result: Any) -> bytes:
                return _encode_value(_compact(arguments, result))

            if call.key is None or method not in ACCEPTS_KEY:
                if call.key is not None and "claim_id" in call.arguments.__struct_fields__:
                    arguments["claim_id"] = arguments.get("claim_id") or claim_id_of(f"{method} {call.key}")
                return encoded(await getattr(self._store, method)(**arguments))
            keyed = IdempotentCall.of(method, call.key, sent, encoded)
            return await call_once(self._store, method, arguments, keyed)
        except AgentLightningError as error:
            return _encode_error(error)
        except (OverflowError, UnicodeError) as error:
            return _encode_error(ConfigError(f"a value cannot be stored: {error}"))
        except Exception as error:
            logger.exception("a call of the store failed")
            return _encode_error(StoreError(f"the server failed: {type(error).__name__}; see its log"))


def _encode_value(value: Any) -> bytes:
    return b'{"value":' + encode(value) + b"}"


def _encode_error(error: AgentLightningError) -> bytes:
    return b'{"error":' + encode(error_response(error).error) + b"}"


def _spans_of(call: Any) -> list[Span]:
    arguments = call.arguments
    return arguments.spans if hasattr(arguments, "spans") else [arguments.span]


def _arguments(decoded: Struct) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in decoded.__struct_fields__:
        value = getattr(decoded, name)
        if value is not UNSET:
            arguments[name] = from_wire(value)
    return arguments


def _may_wait(call: Any) -> bool:
    """Whether the call may have to wait. Limits its timeout."""
    arguments = getattr(call, "arguments", None)
    if arguments is None or "timeout" not in arguments.__struct_fields__:
        return False
    timeout = arguments.timeout
    if timeout is None and not hasattr(arguments, "rollout_ids"):
        return False
    if timeout is UNSET or timeout is None:
        timeout = arguments.timeout = MAX_WAIT_SECONDS if hasattr(arguments, "rollout_ids") else 0.0
    arguments.timeout = min(timeout, MAX_WAIT_SECONDS)
    return timeout > 0


def _compact(arguments: dict[str, Any], result: Any) -> Any:
    """The result, with only the sequence_id of spans that were stored as sent."""
    sent = arguments.get("spans")
    if sent is not None:
        return [_span_result(span, stored) for span, stored in zip(sent, result, strict=True)]
    span = arguments.get("span")
    return result if span is None else _span_result(span, result)


def _span_result(sent: Span, stored: Span) -> int | Span:
    same = (
        stored.attributes is sent.attributes and stored.span_id == sent.span_id and stored.attempt_id == sent.attempt_id
    )
    return stored.sequence_id if same else stored
