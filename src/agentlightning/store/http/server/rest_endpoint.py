"""The REST API: an ASGI endpoint for each path in the table of operations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast, get_args
from urllib.parse import parse_qsl

import msgspec
import orjson
from msgspec import Struct, structs
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, ConfigError, NotFoundError
from agentlightning.rollouts import AttemptedRollout, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.encoding import decode_unknown, encode
from agentlightning.store.http.errors import RequestError, decode_error
from agentlightning.store.http.operations import ACCEPTS_KEY, Operation
from agentlightning.store.http.server.asgi import (
    MAX_WAIT_SECONDS,
    ChunkedResponse,
    ClientDisconnected,
    Headers,
    authorize,
    headers_by_name,
    read_body,
    respond,
    respond_error,
    run_until_disconnect,
)
from agentlightning.store.http.server.idempotency import call_once, claim_id_of
from agentlightning.store.http.shapes import from_wire, statistics_body, to_rest
from agentlightning.store.idempotency import IdempotentCall
from agentlightning.store.paging import PageSizer
from agentlightning.tracing import conventions
from agentlightning.util.json_values import dumps, loads

BoundOperation = tuple[Operation, dict[str, str]]
"""An operation, and values for its path parameters that the path itself determines."""
_POSITION: Final = frozenset({"limit", "offset", "after", "newest_first", "sort_by", "sort_order"})
_MAX_FIELDS: Final = 10_000


def operations_by_path(operations: Sequence[Operation]) -> dict[str, list[BoundOperation]]:
    """The operations at each path. A path that another one matches (`attempts/latest`, `attempts/{attempt_id}`) has the
    verbs of that one too."""
    paths: dict[str, list[BoundOperation]] = {}
    for operation in operations:
        paths.setdefault(operation.path, []).append((operation, {}))
    for path, bound in paths.items():
        verbs = {operation.verb for operation, _ in bound}
        for operation in operations:
            match = compile_path(operation.path)[0].fullmatch(path) if "{" in operation.path else None
            fixed = (
                {} if match is None else {name: value for name, value in match.groupdict().items() if "{" not in value}
            )
            if fixed and operation.path != path and operation.verb not in verbs:
                bound.append((operation, fixed))
    return paths


def _normalized(span: Span) -> Span:
    """The span with our attributes added where it uses other conventions, such as those of 0.x for rewards."""
    name = conventions.complete(span.name, span.attributes, span.events)
    return span if name == span.name else replace(span, name=name)


class RestEndpoint:
    """Serves the operations at one path."""

    def __init__(
        self,
        bound: list[BoundOperation],
        store: LightningStoreBase,
        token: str | None,
        max_body_bytes: int,
    ) -> None:
        self._operations = {operation.verb: (operation, fixed) for operation, fixed in bound}
        self._store = store
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._allowed = (b"allow", ", ".join(sorted(self._operations)).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error_headers: Headers = ()
        try:
            headers = headers_by_name(scope)
            authorize(headers, self._token)
            if scope["method"] not in self._operations:
                error_headers = [self._allowed]
                raise RequestError(f"{scope['method']} is not allowed at {scope['path']}", 405)
            operation, fixed = self._operations[scope["method"]]
            scope["path_params"] |= fixed
            body = b"" if operation.body is None else await read_body(headers, receive, self._max_body_bytes)
            arguments = self._arguments(operation, scope, body)
            if operation.cursor:
                await self._respond_page(operation, arguments, send)
            else:
                key = headers.get("idempotency-key")
                if key is None or operation.verb == "GET":
                    result = await self._call(operation, arguments, receive, scope)
                else:
                    result = await self._call_once(operation, arguments, key, body, receive, scope)
                await respond(send, operation.status, result)
        except AgentLightningError as error:
            await respond_error(send, error, error_headers)
        except (OverflowError, UnicodeError) as error:
            await respond_error(send, ConfigError(f"a value cannot be stored: {error}"))
        except ClientDisconnected:
            return

    # -- requests --------------------------------------------------------------------------------------------------

    def _arguments(self, operation: Operation, scope: Scope, body: bytes) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if operation.body is None:
            arguments |= operation.arguments(_query(scope, operation.request))
        elif operation.body_parameter is not None:
            arguments[operation.body_parameter] = operation.decode_body(body)
            arguments |= operation.arguments(_query(scope, operation.query_request))
        else:
            empty = operation.empty_is_allowed and body in (b"", b"null")  # 0.x clients send null for nothing
            arguments |= operation.arguments(operation.decode_body(b"{}" if empty else body))
        for name in operation.path_names:
            arguments[name] = scope["path_params"][name]
        if operation.list_parameter:
            arguments[operation.list_parameter] = [arguments.pop(operation.path_names[0])]
        arguments = {name: from_wire(value) for name, value in arguments.items()}
        if "span" in arguments:
            arguments["span"] = _normalized(arguments["span"])
        elif operation.method == "add_many_spans":
            arguments["spans"] = [_normalized(span) for span in arguments["spans"]]
        return arguments

    # -- responses -------------------------------------------------------------------------------------------------

    async def _call(self, operation: Operation, arguments: dict[str, Any], receive: Receive, scope: Scope) -> bytes:
        work = getattr(self._store, operation.method)

        async def call() -> bytes:
            value = await work(**arguments)
            if operation.with_attempts and value is not None:
                (value,) = await self._with_attempts([value])
            return _response_body(operation, scope, value)

        if operation.waits:
            timeout = arguments.get("timeout")
            if timeout is None:
                timeout = MAX_WAIT_SECONDS if operation.method == "wait_for_rollouts" else 0.0
            arguments["timeout"] = min(timeout, MAX_WAIT_SECONDS)
            if arguments["timeout"] > 0:
                return await run_until_disconnect(receive, call())
        return await call()

    async def _call_once(
        self, operation: Operation, arguments: dict[str, Any], key: str, body: bytes, receive: Receive, scope: Scope
    ) -> bytes:
        """The response to a request with an idempotency key."""
        name = f"{scope['path']} {key}"
        if operation.method not in ACCEPTS_KEY:
            if "claim_id" in operation.parameters and arguments.get("claim_id") is None:
                arguments["claim_id"] = claim_id_of(name)
            return await self._call(operation, arguments, receive, scope)
        sent = scope["query_string"] + b"\0" + body
        call = IdempotentCall.of(operation.method, name, sent, partial(_response_body, operation, scope))
        return await call_once(self._store, operation.method, arguments, call)

    async def _respond_page(self, operation: Operation, arguments: dict[str, Any], send: Send) -> None:
        """Read and send the list page by page, so that one of any length takes little memory."""
        response, sizer = ChunkedResponse(send, operation.status), PageSizer()
        await response.write(b'{"items":[')
        count = 0
        async for items in self._pages(operation, arguments, sizer):
            data = _encode_items(items)
            await response.write(b"," + data if count and items else data)
            count += len(items)
            sizer.record(len(items), len(data))
        total = encode(await self._total(operation, arguments, count))
        await response.write(b'],"limit":%d,"offset":%d,"total":%b}' % (arguments["limit"], arguments["offset"], total))
        await response.close()

    async def _with_attempts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Each with its latest attempt, if it has one."""
        ids = [rollout.rollout_id for rollout in rollouts]
        latest = {attempt.rollout_id: attempt for attempt in await self._store.get_latest_attempts(ids)}
        return [
            AttemptedRollout(**structs.asdict(rollout), attempt=latest[rollout.rollout_id])
            if rollout.rollout_id in latest
            else rollout
            for rollout in rollouts
        ]

    async def _pages(
        self, operation: Operation, arguments: dict[str, Any], sizer: PageSizer
    ) -> AsyncIterator[list[Any]]:
        """The pages of a list; at least one."""
        query = getattr(self._store, operation.method)
        filters = {name: value for name, value in arguments.items() if name in operation.parameters}
        left, offset = arguments["limit"], arguments["offset"]
        by_offset = _is_sorted(arguments) or "after" not in operation.parameters
        while True:
            wanted = sizer.items if left < 0 else min(sizer.items, left)
            filters |= {"limit": wanted, "offset": offset}
            items = await query(**filters)
            yield await self._with_attempts(items) if operation.with_attempts and items else items
            left -= len(items) if left > 0 else 0
            if len(items) < wanted or left == 0:
                return
            offset = offset + len(items) if by_offset else 0
            if not by_offset:
                filters["after"] = getattr(items[-1], cast("str", operation.cursor))

    async def _total(self, operation: Operation, arguments: dict[str, Any], count: int) -> int | None:
        """The number of items without limit and offset. What the store does not keep is counted for the first page
        alone: None for one that continues."""
        limit, offset, continues = arguments["limit"], arguments["offset"], "after" in arguments
        if not continues and (limit < 0 or count < limit) and (count or not offset):
            return offset + count
        filters = {name: value for name, value in arguments.items() if name not in _POSITION}
        if operation.method == "query_rollouts":
            kept = filters.keys() <= {"status_in", "queue_in"}
            return None if continues and not kept else await self._store.count_rollouts(**filters)
        if operation.method == "query_attempts":
            latest = await self._store.get_latest_attempt(filters["rollout_id"])
            return 0 if latest is None else latest.sequence_id
        if operation.method == "query_spans" and filters.keys() <= {
            "rollout_id",
            "attempt_id",
            "tokens",
            "filter_logic",
        }:
            rollout_id, one = filters["rollout_id"], filters.get("attempt_id")
            attempts = await self._store.query_attempts(rollout_id) if one is None else []
            ids = [attempt.attempt_id for attempt in attempts] if one is None else [one]
            return sum([await self._store.count_spans(rollout_id, attempt_id) for attempt_id in ids])
        if not filters.keys() - {"filter_logic"}:
            return (await self._store.statistics())[operation.method.removeprefix("query_")]
        if continues:
            return None
        lean = {"tokens": False} if "tokens" in operation.parameters else {}
        pages = self._pages(operation, {**filters, **lean, "limit": -1, "offset": 0}, PageSizer(first=256))
        return sum([len(page) async for page in pages])


def _is_sorted(arguments: dict[str, Any]) -> bool:
    """Whether a list is sorted otherwise than by creation."""
    return arguments.get("sort_by") is not None or arguments.get("sort_order") == "desc"


def _query(scope: Scope, kind: type[Struct]) -> Struct:
    """Decode the query string. Raises RequestError if it does not fit the type."""
    values: dict[str, Any] = {}
    try:
        pairs = parse_qsl(
            scope["query_string"].decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError as error:
        raise RequestError(f"the query string cannot be read: {error}") from None
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in pairs:
        if _is_list(fields.get(name)):
            values.setdefault(name, []).append(value)
        else:
            values[name] = value if _is_text(fields.get(name)) else _scalar(value)
    try:
        return msgspec.convert(values, kind, dec_hook=decode_unknown)
    except (msgspec.ValidationError, ConfigError) as error:
        raise decode_error(error, dumps(values)) from None


def _scalar(value: str) -> Any:
    """The value as a number, true, false or null if it is one."""
    try:
        return loads(value)
    except orjson.JSONDecodeError:
        return value


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list or any(_is_list(each) for each in get_args(kind))


def _is_text(kind: Any) -> bool:
    """Whether the type takes the text as it is: str, or a Literal of strings."""
    return kind is str or any(isinstance(each, str) or _is_text(each) for each in get_args(kind))


def _response_body(operation: Operation, scope: Scope, value: Any) -> bytes:
    if value is None and not operation.none_is_result and operation.method != "vacuum":
        name = operation.path_names[-1]
        raise NotFoundError(f"no {name} {scope['path_params'][name]!r} in this store")
    content = statistics_body(cast("dict[str, int]", value)) if operation.method == "statistics" else to_rest(value)
    return encode({operation.result_field: content} if operation.result_field else content)


def _encode_items(items: list[Any]) -> bytes:
    return encode(to_rest(items))[1:-1]
