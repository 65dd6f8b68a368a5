"""`POST /v1/agl/calls`: many calls of the contract in one request.

    {"calls": [{"method": "add_span", "arguments": {...}, "key": "..."}, ...]}
    {"results": [{"value": ...}, {"error": {"type": "NotFoundError", "message": "..."}}, ...]}

Each call is answered for itself, in the order asked; they run at the same time, so that the store commits them
together. A call with a `key` is done once, however often it arrives (idempotency.py).
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
from agentlightning.store.http.asgi import (
    MAX_WAIT_SECONDS,
    ClientDisconnected,
    Pieces,
    admit,
    answer,
    body_of,
    headers_of,
    refuse,
    while_wanted,
)
from agentlightning.store.http.encoding import PROTOCOL, argument, decoder, encode
from agentlightning.store.http.errors import RequestError, refusal_of
from agentlightning.store.http.idempotency import do_once
from agentlightning.store.http.operations import CALLS, ONCE, call_reader
from agentlightning.store.idempotency import IdempotentCall

logger = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""Lists of one request that are read together, to begin with."""
MOST_LISTS: Final = 256
LISTS_BYTES: Final = 4 * 1024 * 1024
"""Of lists that are read together; fewer are where they were larger."""
MAX_CALLS: Final = 4096
PROTOCOL_HEADER: Final = (b"agl-protocol", str(PROTOCOL).encode())


class _Batch(Struct):
    calls: list[Raw]


_read_batch = decoder(_Batch)
_read_call = call_reader()
_READING: Final = frozenset(
    {CALLS[name] for name in ("query_spans", "query_rollouts", "query_attempts", "query_resources", "read_records")}
)
_ADDING: Final = frozenset({CALLS["add_span"], CALLS["add_many_spans"]})


class Batches:
    """The endpoint."""

    def __init__(self, store: LightningStoreBase, token: str | None, max_body_bytes: int) -> None:
        self._store = store
        self._token = token
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await refuse(send, RequestError("only POST is allowed here", 405), [(b"allow", b"POST")])
        try:
            headers = headers_of(scope)
            admit(headers, self._token)
            calls = self._read(await body_of(headers, receive, self._max_body_bytes))
            lists = [index for index, call in enumerate(calls) if type(call) in _READING]
            if len(lists) > AT_ONCE:
                if any(_waits(call) for call in calls):
                    raise RequestError("a call that waits is beside many lists; send it in a request of its own")
                return await self._answer_lists(calls, lists, send)
            results = await self._answers(calls, receive)
        except AgentLightningError as error:
            return await refuse(send, error, [PROTOCOL_HEADER])
        except ClientDisconnected:
            return None
        await answer(send, 200, b'{"results":[' + b",".join(results) + b"]}", [PROTOCOL_HEADER])

    async def _answer_lists(self, calls: list[Any], lists: Sequence[int], send: Send) -> None:
        """Answer calls that read many lists, which together may be more than the memory holds: those are read a few at
        a time, as few as they are large, and leave at once. The other calls are made before."""
        reading, others = set(lists), [index for index in range(len(calls)) if index not in set(lists)]
        done = dict(zip(others, await self._all([calls[index] for index in others]), strict=True)) if others else {}
        written, together, next_one = Pieces(send, 200, [PROTOCOL_HEADER]), AT_ONCE, 0
        await written.write(b'{"results":[')
        for index in range(len(calls)):
            if index in reading and index not in done:
                some = lists[next_one : next_one + together]
                found = await asyncio.gather(*(self._one(calls[each]) for each in some))
                done |= zip(some, found, strict=True)
                next_one += len(some)
                fits = sum(map(len, found)) <= LISTS_BYTES
                together = min(2 * together, MOST_LISTS) if fits else max(1, together // 4)
            await written.write((b"," if index else b"") + done.pop(index))
        await written.write(b"]}")
        await written.close()

    def _read(self, body: bytes) -> list[Any]:
        """The calls; an error stands for one that cannot be read."""
        raws = cast("_Batch", _read_batch(body)).calls
        if len(raws) > MAX_CALLS:
            raise RequestError(f"{len(raws)} calls in one request; send at most {MAX_CALLS}", 413)
        calls: list[Any] = []
        for raw in raws:
            try:
                calls.append(_read_call(raw))
            except RequestError as error:
                calls.append(error)
        return calls

    async def _answers(self, calls: list[Any], receive: Receive) -> list[bytes]:
        if not any(_waits(call) for call in calls):
            return await self._all(calls)
        return await while_wanted(receive, self._all(calls))

    async def _all(self, calls: list[Any]) -> list[bytes]:
        if len(calls) == 1:
            return [await self._one(calls[0])]
        adding = [index for index, call in enumerate(calls) if type(call) in _ADDING]
        if len(adding) < 2:
            return await asyncio.gather(*(self._one(call) for call in calls))
        others = [index for index, call in enumerate(calls) if type(call) not in _ADDING]
        added, done = await asyncio.gather(
            self._add([calls[index] for index in adding]),
            asyncio.gather(*(self._one(calls[index]) for index in others)),
        )
        results = dict(zip(adding, added, strict=True)) | dict(zip(others, done, strict=True))
        return [results[index] for index in range(len(calls))]

    async def _add(self, calls: list[Any]) -> list[bytes]:
        """The spans of all these calls at once, which costs the store a fraction; each call for itself where one of
        them is refused, so that it is alone in that."""
        given = [_spans_of(call) for call in calls]
        sent = [span for spans in given for span in spans]
        try:
            kept = await self._store.add_many_spans(sent)
        except (AgentLightningError, OverflowError, UnicodeError):
            return await asyncio.gather(*(self._one(call) for call in calls))
        told = iter([_told(span, each) for span, each in zip(sent, kept, strict=True)])
        results: list[bytes] = []
        for call, spans in zip(calls, given, strict=True):
            values = [next(told) for _ in spans]
            results.append(_value(values if hasattr(call.arguments, "spans") else values[0]))
        return results

    async def _one(self, call: Any) -> bytes:
        try:
            if isinstance(call, RequestError):
                raise call
            sent = b"" if call.key is None else encode(call.arguments)
            arguments = _arguments(call.arguments)
            method = type(call).__struct_config__.tag

            def encoded(result: Any) -> bytes:
                return _value(_shortened(arguments, result))

            if call.key is None or method not in ONCE:
                return encoded(await getattr(self._store, method)(**arguments))
            once = IdempotentCall.of(method, call.key, sent, encoded)
            return await do_once(self._store, method, arguments, once)
        except AgentLightningError as error:
            return _error(error)
        except (OverflowError, UnicodeError) as error:
            return _error(ConfigError(f"a value cannot be stored: {error}"))
        except Exception as error:
            logger.exception("a call of the store failed")
            return _error(StoreError(f"the server failed: {type(error).__name__}; its log says more"))


def _value(value: Any) -> bytes:
    return b'{"value":' + encode(value) + b"}"


def _spans_of(call: Any) -> list[Span]:
    arguments = call.arguments
    return arguments.spans if hasattr(arguments, "spans") else [arguments.span]


def _error(error: AgentLightningError) -> bytes:
    return b'{"error":' + encode(refusal_of(error).error) + b"}"


def _arguments(given: Struct) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name in given.__struct_fields__:
        value = getattr(given, name)
        if value is not UNSET:
            arguments[name] = argument(value)
    return arguments


def _waits(call: Any) -> bool:
    """Whether it may have to wait. Shortens what it waits at most."""
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


def _shortened(arguments: dict[str, Any], value: Any) -> Any:
    """Spans that were kept as they were sent are told by their sequence_id."""
    sent = arguments.get("spans")
    if sent is not None:
        return [_told(span, kept) for span, kept in zip(sent, value, strict=True)]
    span = arguments.get("span")
    return value if span is None else _told(span, value)


def _told(sent: Span, kept: Span) -> int | Span:
    same = kept.attributes is sent.attributes and kept.span_id == sent.span_id and kept.attempt_id == sent.attempt_id
    return kept.sequence_id if same else kept
