"""The routes of the store's server: the REST API of the table of operations, batches of calls, and health checks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, get_args
from urllib.parse import parse_qsl

import msgspec
import orjson
from msgspec import Struct, structs
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.rollouts import AttemptedRollout, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.asgi import (
    ChunkedResponse,
    Endpoint,
    Handler,
    Headers,
    read_body,
    respond,
    respond_error,
    run_until_disconnect,
)
from agentlightning.store.http.calls import PROTOCOL_HEADERS, BatchHandler, Call, execute, limit_wait
from agentlightning.store.http.encoding import (
    BASE_PATH,
    MAX_BODY_BYTES,
    PROTOCOL_VERSION,
    arguments_of,
    decode_unknown,
    encode,
    to_rest,
    version,
)
from agentlightning.store.http.errors import RequestError, decode_error
from agentlightning.store.http.openapi import document
from agentlightning.store.http.operations import CURSORS, OPERATIONS, Operation
from agentlightning.store.paging import PageSizer, read_pages
from agentlightning.tracing import conventions
from agentlightning.util.json_values import dumps, loads

_POSITION: Final = ("limit", "offset", "after", "newest_first", "sort_by", "sort_order")
_NO_FILTERS: Final = ("tokens", "filter_logic")
_FIRST_ITEMS: Final = 64
"""Items of a page that are read at once at first."""
_COUNTED_ITEMS: Final = 256
_MAX_FIELDS: Final = 10_000
_STARTED: Final = time.monotonic()


def store_routes(
    store: LightningStoreBase, token: str | None = None, *, max_body_bytes: int = MAX_BODY_BYTES
) -> list[Route]:
    """Routes for a Starlette application.

    With a `token`, everything under /v1/agl requires it, except the health check. `max_body_bytes` limits request
    bodies, as sent and as decompressed.
    """

    def route(path: str, handle: Handler, *verbs: str, token: str | None = token, headers: Headers = ()) -> Route:
        route = Route(path, Endpoint(handle, token, headers))
        route.methods = set(verbs)  # Starlette would add HEAD to GET
        return route

    def health(**content: Any) -> Handler:
        return partial(_respond_health, store, encode({"status": "ok", **content}))

    versions = {"version": version(), "protocol": PROTOCOL_VERSION}
    rest = RestApi(store, max_body_bytes)
    batches = BatchHandler(store, max_body_bytes)
    described = partial(_respond_document, token is not None)
    routes = [
        route(f"{BASE_PATH}/calls", batches, "POST", headers=PROTOCOL_HEADERS),
        *(route(BASE_PATH + each.path, partial(rest.handle, each), each.verb) for each in OPERATIONS),
        route(f"{BASE_PATH}/health", health(**versions), "GET", "HEAD", token=None, headers=PROTOCOL_HEADERS),
        route(f"{BASE_PATH}/openapi.json", described, "GET", "HEAD"),
        route("/health", health(), "GET", "HEAD", token=None, headers=PROTOCOL_HEADERS),
    ]
    others = partial(_refuse, routes)
    return [*routes, route(BASE_PATH + "/{path:path}", others), route("/health", others, token=None)]


async def _respond_health(
    store: LightningStoreBase, body: bytes, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send
) -> None:
    """Respond with a fixed body if the store works, else with its error."""
    await store.check_health()
    await respond(send, 200, body, PROTOCOL_HEADERS)


async def _respond_document(
    with_token: bool, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send
) -> None:
    await respond(send, 200, encode(document(with_token)))


async def _refuse(routes: list[Route], scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
    """Refuse a path that is unknown, or has other methods."""
    verbs = [verb for route in routes if route.matches(scope)[0] is Match.PARTIAL for verb in route.methods or ()]
    if not verbs:
        raise NotFoundError(f"there is nothing at {scope['path']!r}; {BASE_PATH}/openapi.json lists all paths")
    error = RequestError(f"{scope['method']} is not allowed at {scope['path']}", 405)
    await respond_error(send, error, [(b"allow", ", ".join(sorted(set(verbs))).encode())])


class RestApi:
    """Executes the operations of the table."""

    def __init__(self, store: LightningStoreBase, max_body_bytes: int) -> None:
        self._store = store
        self._max_body_bytes = max_body_bytes

    async def handle(
        self, operation: Operation, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        body = b"" if operation.body is None else await read_body(headers, receive, self._max_body_bytes)
        arguments = _arguments(operation, scope, body)
        if operation.cursor:
            return await self._respond_page(operation, arguments, send)
        call = Call(operation.method, arguments, partial(_encode_result, operation, scope))
        key = headers.get("idempotency-key")
        if key is not None and operation.verb != "GET":
            call.key, call.sent = f"{scope['path']} {key}", scope["query_string"] + b"\0" + body
        if operation.with_attempts:
            rollout = await self._store.get_rollout_by_id(**arguments)
            result = call.encode(rollout and (await self._with_attempts([rollout]))[0])
        elif limit_wait(call):
            result = await run_until_disconnect(receive, execute(self._store, call))
        else:
            result = await execute(self._store, call)
        await respond(send, operation.status, result)

    async def _respond_page(self, operation: Operation, arguments: dict[str, Any], send: Send) -> None:
        """Read and send the list page by page, so that one of any length takes little memory."""
        response, count = ChunkedResponse(send, operation.status), 0
        sizer = PageSizer() if arguments["limit"] < 0 else PageSizer(first=_FIRST_ITEMS)
        await response.write(b'{"items":[')
        async for items in self._pages(operation, arguments, sizer):
            shown = await self._with_attempts(items) if operation.with_attempts and items else items
            data = encode(to_rest(shown))[1:-1]
            await response.write(b"," + data if count and items else data)
            count += len(items)
            sizer.record(len(items), len(data))
        total = encode(await self._total(operation, arguments, count))
        await response.write(b'],"limit":%d,"offset":%d,"total":%b}' % (arguments["limit"], arguments["offset"], total))
        await response.close()

    def _pages(self, operation: Operation, arguments: dict[str, Any], sizer: PageSizer) -> AsyncIterator[list[Any]]:
        query = getattr(self._store, operation.method)
        return read_pages(query, arguments, CURSORS[operation.method], sizer)

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

    async def _total(self, operation: Operation, arguments: dict[str, Any], count: int) -> int | None:
        """The number of items without limit and offset. What the store does not keep is counted for the first page
        alone: None for one that continues."""
        limit, offset, continues = arguments["limit"], arguments["offset"], arguments.get("after") is not None
        if not continues and (limit < 0 or count < limit) and (count or not offset):
            return offset + count
        filters = {name: value for name, value in arguments.items() if name not in _POSITION and value is not None}
        method, by = operation.method, filters.keys() - _NO_FILTERS
        if method == "query_rollouts" and (not continues or by <= {"status_in", "queue_in"}):
            return await self._store.count_rollouts(**filters)
        if method == "query_attempts":
            latest = await self._store.get_latest_attempt(**filters)
            return 0 if latest is None else latest.sequence_id
        if method == "query_spans" and by <= {"rollout_id", "attempt_id"}:
            rollout_id, ids = filters["rollout_id"], [filters.get("attempt_id")]
            if ids == [None]:
                ids = [attempt.attempt_id for attempt in await self._store.query_attempts(rollout_id)]
            return sum([await self._store.count_spans(rollout_id, attempt_id) for attempt_id in ids])
        if not by:
            return (await self._store.statistics())[method.removeprefix("query_")]
        if continues:
            return None
        lean = {"tokens": False} if method == "query_spans" else {}
        pages = self._pages(operation, {**filters, **lean, "limit": -1, "offset": 0}, PageSizer(first=_COUNTED_ITEMS))
        return sum([len(page) async for page in pages])


def _arguments(operation: Operation, scope: Scope, body: bytes) -> dict[str, Any]:
    """The arguments of the method in a request."""
    arguments = arguments_of(_decode_query(scope, operation.request)) if operation.in_query else {}
    if operation.body is not None:
        arguments |= operation.decode_body(body)
    arguments |= {name: scope["path_params"][name] for name in operation.path_names}
    if operation.list_parameter is not None:
        arguments = {operation.list_parameter: [*arguments.values()]}
    if "span" in arguments:
        arguments["span"] = _normalize(arguments["span"])
    elif "spans" in arguments:
        arguments["spans"] = [*map(_normalize, arguments["spans"])]
    return arguments


def _normalize(span: Span) -> Span:
    """The span with our attributes added where it uses other conventions, such as those of 0.x for rewards."""
    name = conventions.complete(span.name, span.attributes, span.events)
    return span if name == span.name else replace(span, name=name)


def _decode_query(scope: Scope, kind: type[Struct]) -> Struct:
    """Raises RequestError if the query string does not fit the type."""
    fields = {field.encode_name: field.type for field in structs.fields(kind)}
    values: dict[str, Any] = {}
    try:
        text = scope["query_string"].decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise RequestError(f"the query string cannot be read: {error}") from None
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


def _encode_result(operation: Operation, scope: Scope, value: Any) -> bytes:
    """The response body. Raises NotFoundError for None, unless that is a result."""
    if value is None and not operation.none_is_result:
        name = operation.path_names[-1]
        raise NotFoundError(f"no {name} {scope['path_params'][name]!r} in this store")
    content = _with_totals(value) if operation.method == "statistics" else to_rest(value)
    return encode({operation.result_field: content} if operation.result_field else content)


def _with_totals(counts: Mapping[str, int]) -> dict[str, int | float | str]:
    """The counts, with what 0.x clients expect: a name, the totals and the uptime of the server in seconds."""
    names = ("attempts", "spans", "resources", "workers")
    totals = {f"total_{name}": counts[name] for name in names if name in counts}
    rollouts = sum(number for name, number in counts.items() if name.startswith("rollouts."))
    uptime = time.monotonic() - _STARTED
    return {**counts, "total_rollouts": rollouts, **totals, "name": "LightningStore", "uptime": uptime}
