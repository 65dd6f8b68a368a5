"""The routes of the store's server: the REST API of the table of operations, batches of calls, and health checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_args
from urllib.parse import parse_qsl

import msgspec
import orjson
from msgspec import UNSET, Struct, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.rollouts import Rollout
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.calls import BatchHandler, Call, execute, limit_wait
from agentlightning.store.http.encoding import (
    BASE_PATH,
    MAX_BODY_BYTES,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    RolloutBody,
    arguments_of,
    decode_unknown,
    encode,
    to_rest,
    version,
)
from agentlightning.store.http.endpoint import (
    Handler,
    cancel_on_disconnect,
    endpoint,
    read_body,
    refuse,
    respond,
    respond_in_parts,
)
from agentlightning.store.http.errors import RequestError, decode_error
from agentlightning.store.http.openapi import document
from agentlightning.store.http.operations import CURSORS, OPERATIONS, Operation
from agentlightning.store.idempotency import IdempotentCall
from agentlightning.store.paging import PageSizer, read_pages
from agentlightning.util.json_values import dumps, loads

_POSITION: Final = ("limit", "offset", "after", "newest_first", "sort_by", "sort_order")
_NO_FILTERS: Final = ("tokens", "filter_logic")
_FIRST_ITEMS: Final = 64
"""Items of a page that are read at once at first."""
_COUNTED_ITEMS: Final = 256
_MAX_FIELDS: Final = 10_000


def store_routes(
    store: LightningStoreBase, token: str | None = None, *, max_body_bytes: int = MAX_BODY_BYTES
) -> list[Route]:
    """Routes for a Starlette application.

    With a `token`, everything under /v1/agl requires it, except the health check. `max_body_bytes` limits request
    bodies, as sent and as decompressed.
    """
    rest, batches = RestApi(store, max_body_bytes), BatchHandler(store, max_body_bytes)
    versions = {"version": version(), "protocol": PROTOCOL_VERSION}

    async def describe(_: Request) -> Response:
        return respond(encode(document(with_token=token is not None)))

    def route(path: str, handle: Handler, *verbs: str, token: str | None = token, **options: Any) -> Route:
        route = Route(path, endpoint(handle, token, **options))
        route.methods = set(verbs)  # Starlette would add HEAD to GET
        return route

    def health(path: str, **content: Any) -> Route:
        handle = partial(rest.respond_health, **content)
        return route(path, handle, "GET", "HEAD", token=None, error_headers=PROTOCOL_HEADER)

    routes = [
        route(f"{BASE_PATH}/calls", batches.handle, "POST", error_headers=PROTOCOL_HEADER),
        *(route(BASE_PATH + each.path, partial(rest.handle, each), each.verb) for each in OPERATIONS),
        health(f"{BASE_PATH}/health", **versions),
        route(f"{BASE_PATH}/openapi.json", describe, "GET", "HEAD"),
        health("/health"),
    ]
    return [*routes, route(BASE_PATH + "/{path:path}", partial(_refuse_method, routes))]


async def _refuse_method(routes: list[Route], request: Request) -> Response:
    """Refuse a path that is unknown, or has other methods."""
    near = [route.methods or () for route in routes if route.matches(request.scope)[0] is Match.PARTIAL]
    path = request.scope["path"]
    if not near:
        raise NotFoundError(f"there is nothing at {path!r}; {BASE_PATH}/openapi.json lists all paths")
    allowed = ", ".join(sorted(set().union(*near)))
    return refuse(RequestError(f"{request.method} is not allowed at {path}", 405), {"allow": allowed})


@dataclass
class RestApi:
    """Executes the operations of the table."""

    store: LightningStoreBase
    max_body_bytes: int

    async def respond_health(self, request: Request, **versions: Any) -> Response:
        """Respond OK if the store works."""
        await self.store.check_health()
        return respond(encode({"status": "ok", **versions}), headers=PROTOCOL_HEADER)

    async def handle(self, operation: Operation, request: Request) -> Response:
        body, scope = b"", request.scope
        if operation.body is not None:
            body = await read_body(request.headers, request.receive, self.max_body_bytes)
        arguments = _arguments(operation, scope, body)
        if operation.cursor:
            return await respond_in_parts(self._page(operation, arguments), operation.status)
        call = Call(operation.method, arguments, partial(_encode_result, operation, scope))
        key = request.headers.get("idempotency-key")
        if key is not None and operation.verb != "GET":
            sent = scope["query_string"] + b"\0" + body
            call.once = IdempotentCall.of(operation.method, f"{scope['path']} {key}", sent, call.encode)
        if operation.with_attempts:
            rollout = await self.store.get_rollout_by_id(**arguments)
            result = call.encode(rollout and (await self._with_attempts([rollout]))[0])
        elif limit_wait(call):
            with cancel_on_disconnect(request.receive):
                result = await execute(self.store, call)
        else:
            result = await execute(self.store, call)
        return respond(result, operation.status)

    async def _page(self, operation: Operation, arguments: dict[str, Any]) -> AsyncIterator[bytes]:
        """A list, read page by page, so that one of any length takes little memory."""
        limit, offset, count = arguments["limit"], arguments["offset"], 0
        sizer = PageSizer() if limit < 0 else PageSizer(first=_FIRST_ITEMS)
        yield b'{"items":['
        async for items in self._pages(operation, arguments, sizer):
            shown = await self._with_attempts(items) if operation.with_attempts and items else items
            data = encode(to_rest(shown))[1:-1]
            yield b"," + data if count and items else data
            count += len(items)
            sizer.record(len(items), len(data))
        total = encode(await self._total(operation, arguments, count))
        yield b'],"limit":%d,"offset":%d,"total":%b}' % (limit, offset, total)

    def _pages(self, operation: Operation, arguments: dict[str, Any], sizer: PageSizer) -> AsyncIterator[list[Any]]:
        query = getattr(self.store, operation.method)
        return read_pages(query, arguments, CURSORS[operation.method], sizer)

    async def _with_attempts(self, rollouts: list[Rollout]) -> list[RolloutBody]:
        """Each with its latest attempt, if it has one."""
        ids = [rollout.rollout_id for rollout in rollouts]
        latest = {attempt.rollout_id: attempt for attempt in await self.store.get_latest_attempts(ids)}
        return [RolloutBody(**structs.asdict(each), attempt=latest.get(each.rollout_id, UNSET)) for each in rollouts]

    async def _total(self, operation: Operation, arguments: dict[str, Any], count: int) -> int | None:
        """The number of items without limit and offset. What the store does not keep is counted for the first page
        alone: None for one that continues."""
        limit, offset, continues = arguments["limit"], arguments["offset"], arguments.get("after") is not None
        if not continues and (limit < 0 or count < limit) and (count or not offset):
            return offset + count
        filters = {name: value for name, value in arguments.items() if name not in _POSITION and value is not None}
        method, by = operation.method, filters.keys() - _NO_FILTERS
        if method == "query_rollouts" and (not continues or by <= {"status_in", "queue_in"}):
            return await self.store.count_rollouts(**filters)
        if method == "query_spans" and by <= {"rollout_id", "attempt_id"}:
            rollout_id = filters["rollout_id"]
            attempts = await self.store.query_attempts(rollout_id) if "attempt_id" not in filters else []
            ids = [filters["attempt_id"]] if "attempt_id" in filters else [each.attempt_id for each in attempts]
            return sum([await self.store.count_spans(rollout_id, attempt_id) for attempt_id in ids])
        if not by:
            return (await self.store.statistics())[method.removeprefix("query_")]
        if continues:
            return None
        lean = {"tokens": False} if method == "query_spans" else {}
        pages = self._pages(operation, {**filters, **lean, "limit": -1, "offset": 0}, PageSizer(first=_COUNTED_ITEMS))
        return sum([len(page) async for page in pages])


def _arguments(operation: Operation, scope: Scope, body: bytes) -> dict[str, Any]:
    """The arguments of the method in a request."""
    arguments: dict[str, Any] = {}
    if operation.in_query:
        arguments = arguments_of(_decode_query(scope, operation.request))
    if operation.body is not None:
        arguments |= operation.decode_body(body)
    arguments |= {name: scope["path_params"][name] for name in operation.path_names}
    if operation.list_parameter is not None:
        arguments = {operation.list_parameter: [*arguments.values()]}
    return arguments


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
    content = to_rest(value)
    return encode({operation.result_field: content} if operation.result_field else content)
