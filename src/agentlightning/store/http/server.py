"""The routes of the store's server: the REST API of the table of operations, batches of calls, and health checks.

`POST /v1/agl/calls` executes many calls of the store contract at once:

    {"calls": [{"method": "add_span", "arguments": {...}, "key": "..."}, ...]}
    {"results": [{"value": ...}, {"error": {"type": "NotFoundError", "message": "..."}}, ...]}

The results are in the order of the calls, and each call succeeds or fails on its own. The calls run concurrently, so
that the store commits them together. A call with a `key` is executed once, however often it arrives: the store
remembers its result (store/idempotency.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, get_args
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, Raw, Struct, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from agentlightning.errors import AgentLightningError, ConfigError, ConflictError, NotFoundError
from agentlightning.resources import ResourcesUpdate
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http import BASE_PATH, operations
from agentlightning.store.http import endpoint as endpoints
from agentlightning.store.http.errors import RequestError, decode_error, error_body, error_of
from agentlightning.store.http.operations import PROTOCOL_HEADER, Operation, RolloutBody, arguments_of, encode, to_rest
from agentlightning.store.idempotency import AlreadyAnsweredError, IdempotentCall, use_key
from agentlightning.store.instrumented import WAITING_CALLS
from agentlightning.store.paging import PageSizer, read_pages
from agentlightning.util.json_values import dumps

_POSITION: Final = ("limit", "offset", "after", "newest_first", "sort_by", "sort_order")
_NO_FILTERS: Final = ("tokens", "filter_logic")
_FIRST_ITEMS: Final = 64
"""Items of a page that are read at once at first."""
_COUNTED_ITEMS: Final = 256
_MAX_FIELDS: Final = 10_000

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
    if once is None or call.method not in operations.ACCEPTS_KEY:
        return call.encode(await method(**call.arguments))
    try:
        with use_key(once):
            return call.encode(await method(**call.arguments))
    except AlreadyAnsweredError as before:
        if before.answer is not None:
            return before.answer
    reader, name = _READ_CURRENT.get(operations.hints_of(call.method)["return"], ("", ""))
    known = call.arguments.get(name)
    current = await getattr(store, reader)(known) if isinstance(known, str) else None
    if current is None:
        raise ConflictError(
            f"{call.method} was already executed with this idempotency key; its result was too long to be stored"
        )
    return call.encode(current)


def while_connected(request: Request, calls: Sequence[Call]) -> AbstractContextManager[None]:
    """A context for these calls: if one may wait for others, a disconnect of the client cancels them. A client may be
    gone without one, so no wait is longer than `MAX_WAIT_SECONDS`."""
    waits = False
    for call in calls:
        if call.method in WAITING_CALLS:
            without = MAX_WAIT_SECONDS if call.method == "wait_for_rollouts" else 0.0
            given = call.arguments.get("timeout")
            seconds = call.arguments["timeout"] = min(without if given is None else given, MAX_WAIT_SECONDS)
            waits |= seconds > 0
    return endpoints.cancel_on_disconnect(request.receive) if waits else nullcontext()


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass
class StoreApi:
    """Responds to the requests of a store: batches of calls, and the operations of the table."""

    store: LightningStoreBase
    max_body_bytes: int

    # -- batches ---------------------------------------------------------------------------------------------------

    async def perform_batch(self, request: Request) -> Response:
        headers, ((name, protocol),) = request.headers, PROTOCOL_HEADER.items()
        client = headers.get(name, protocol)
        if client != protocol:
            raise RequestError(f"the client has protocol {client}, and this server {protocol}; use the same version")
        raw_calls: list[Raw] = _decode_batch(
            await endpoints.read_body(headers, request.receive, self.max_body_bytes)
        ).calls
        if len(raw_calls) > MAX_CALLS:
            raise RequestError(f"{len(raw_calls)} calls in one request; send at most {MAX_CALLS}", 413)
        calls = [_decode(raw) for raw in raw_calls]
        with while_connected(request, calls):
            return await self._respond(calls)

    async def _respond(self, calls: Sequence[Call]) -> Response:
        lists = [call for call in calls if call.method in _LISTS]
        if len(lists) > FIRST_LISTS:
            await self._execute_all([call for call in calls if call.method not in _LISTS])
            return await endpoints.respond_in_parts(self._parts(calls, lists), headers=PROTOCOL_HEADER)
        await self._execute_all(calls)
        results = b",".join([call.result or b"" for call in calls])
        return endpoints.respond(b'{"results":[%b]}' % results, headers=PROTOCOL_HEADER)

    async def _parts(self, calls: Sequence[Call], lists: Sequence[Call]) -> AsyncIterator[bytes]:
        """A response with many lists, which may not fit in memory together: they are read a few at a time, the fewer
        the larger they are, and sent at once."""
        sizer, rest, separator = PageSizer(max_items=MAX_LISTS, first=FIRST_LISTS), iter(lists), b'{"results":['
        for call in calls:
            while call.result is None:
                group = list(islice(rest, sizer.items))
                await self._execute_each(group)
                sizer.record(len(group), sum(len(each.result or b"") for each in group))
            yield separator + call.result
            separator, call.result = b",", b""
        yield b"]}"

    async def _execute_all(self, calls: Sequence[Call]) -> None:
        if len(calls) == 1:
            return await self._execute(calls[0])
        adding = [call for call in calls if call.method in _ADDING and call.once is None]
        others = [call for call in calls if call.method not in _ADDING or call.once is not None]
        together = self._add_spans if len(adding) > 1 else self._execute_each
        await asyncio.gather(together(adding), self._execute_each(others))

    async def _execute_each(self, calls: Sequence[Call]) -> None:
        await asyncio.gather(*map(self._execute, calls))

    async def _add_spans(self, calls: Sequence[Call]) -> None:
        """Add the spans of all calls in one call of the store, which is much faster. If that fails, each call is made
        on its own, so that only those fail that have to."""
        given = [call.arguments for call in calls]
        sent = [arguments["spans"] if "spans" in arguments else [arguments["span"]] for arguments in given]
        try:
            stored = iter(await self.store.add_many_spans([span for spans in sent for span in spans]))
        except (AgentLightningError, OverflowError, UnicodeError):
            return await self._execute_each(calls)
        for call, spans in zip(calls, sent, strict=True):
            added = list(islice(stored, len(spans)))
            call.result = call.encode(added if "spans" in call.arguments else added[0])

    async def _execute(self, call: Call) -> None:
        if call.result is None:  # it could be decoded
            try:
                call.result = await execute(self.store, call)
            except Exception as error:  # noqa: BLE001  the boundary: a call that fails does not fail the others
                call.result = _encode_error(error)

    # -- operations ------------------------------------------------------------------------------------------------

    async def respond_health(self, request: Request, **versions: Any) -> Response:
        """Respond OK if the store works."""
        await self.store.check_health()
        return endpoints.respond(encode({"status": "ok", **versions}), headers=PROTOCOL_HEADER)

    async def perform(self, operation: Operation, request: Request) -> Response:
        body, scope = b"", request.scope
        if operation.body is not None:
            body = await endpoints.read_body(request.headers, request.receive, self.max_body_bytes)
        arguments = _arguments(operation, scope, body)
        if operation.cursor:
            return await endpoints.respond_in_parts(self._page(operation, arguments), operation.status)
        call = Call(operation.method, arguments, partial(_encode_result, operation, scope))
        key = request.headers.get("idempotency-key")
        if key is not None and operation.verb != "GET":
            sent = scope["query_string"] + b"\0" + body
            call.once = IdempotentCall.of(operation.method, f"{scope['path']} {key}", sent, call.encode)
        if operation.with_attempts:
            rollout = await self.store.get_rollout_by_id(**arguments)
            result = call.encode(rollout and (await self._with_attempts([rollout]))[0])
        else:
            with while_connected(request, [call]):
                result = await execute(self.store, call)
        return endpoints.respond(result, operation.status)

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
        return read_pages(query, arguments, operations.CURSORS[operation.method], sizer)

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


# -- calls in batches ------------------------------------------------------------------------------------------------


class _Batch(Struct):
    calls: list[Raw]


_decode_batch: Final = operations.decoder(_Batch)


def _decode(raw: Raw) -> Call:
    try:
        decoded = operations.decode_call(raw)
    except RequestError as error:
        return Call("", {}, encode, result=_encode_error(error))
    method: str = type(decoded).__struct_config__.tag
    arguments = arguments_of(decoded.arguments)
    call = Call(method, arguments, partial(_encode_answer, arguments))
    if decoded.key is not None:
        call.once = IdempotentCall.of(method, decoded.key, encode(decoded.arguments), call.encode)
    return call


def _encode_error(error: Exception) -> bytes:
    return b'{"error":' + encode(error_body(error_of(error))) + b"}"


def _encode_answer(arguments: Mapping[str, Any], result: Any) -> bytes:
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


# -- operations ------------------------------------------------------------------------------------------------------


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
    lists = {field.encode_name for field in structs.fields(kind) if _is_list(field.type)}
    try:
        text = scope["query_string"].decode("ascii")
        found = parse_qs(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise RequestError(f"the query string cannot be read: {error}") from None
    values = {name: given if name in lists else given[-1] for name, given in found.items()}
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=operations.decode_unknown)
    except (msgspec.ValidationError, ConfigError) as error:
        texts = {name: given for name, given in values.items() if isinstance(given, str)}
        numbers = {name: int(text) for name, text in texts.items() if text.removeprefix("-").isdecimal()}
        raise decode_error(error, dumps(values | numbers)) from None


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list or any(_is_list(each) for each in get_args(kind))


def _encode_result(operation: Operation, scope: Scope, value: Any) -> bytes:
    """The response body. Raises NotFoundError for None, unless that is a result."""
    if value is None and not operation.none_is_result:
        name = operation.path_names[-1]
        raise NotFoundError(f"no {name} {scope['path_params'][name]!r} in this store")
    content = to_rest(value)
    return encode({operation.result_field: content} if operation.result_field else content)


# -- routes ----------------------------------------------------------------------------------------------------------


def store_routes(
    store: LightningStoreBase, token: str | None = None, *, max_body_bytes: int = endpoints.MAX_BODY_BYTES
) -> list[Route]:
    """Routes for a Starlette application.

    With a `token`, everything under /v1/agl requires it, except the health check. `max_body_bytes` limits request
    bodies, as sent and as decompressed.
    """
    api = StoreApi(store, max_body_bytes)
    versions = {"version": operations.version(), "protocol": operations.PROTOCOL_VERSION}

    async def describe(_: Request) -> Response:
        return endpoints.respond(encode(operations.document(with_token=token is not None)))

    def route(path: str, handle: endpoints.Handler, *verbs: str, token: str | None = token, **options: Any) -> Route:
        route = Route(path, endpoints.endpoint(handle, token, **options))
        route.methods = set(verbs)  # Starlette would add HEAD to GET
        return route

    def health(path: str, **content: Any) -> Route:
        handle = partial(api.respond_health, **content)
        return route(path, handle, "GET", "HEAD", token=None, error_headers=PROTOCOL_HEADER)

    routes = [
        route(f"{BASE_PATH}/calls", api.perform_batch, "POST", error_headers=PROTOCOL_HEADER),
        *(route(BASE_PATH + each.path, partial(api.perform, each), each.verb) for each in operations.OPERATIONS),
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
    return endpoints.refuse(RequestError(f"{request.method} is not allowed at {path}", 405), {"allow": allowed})
