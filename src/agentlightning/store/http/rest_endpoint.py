"""The REST API: each path of the table in api.py as an ASGI endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
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
from agentlightning.store.http.asgi import (
    MAX_WAIT_SECONDS,
    ClientDisconnected,
    Headers,
    Pieces,
    admit,
    answer,
    body_of,
    headers_of,
    refuse,
    while_wanted,
)
from agentlightning.store.http.encoding import argument, encode, read_hook, rendered, statistics_body
from agentlightning.store.http.errors import RequestError, refusal
from agentlightning.store.http.idempotency import claim_id_of, do_once
from agentlightning.store.http.operations import ONCE, Operation
from agentlightning.store.idempotency import IdempotentCall
from agentlightning.tracing import conventions

Reached = tuple[Operation, dict[str, str]]
"""An operation, and the parameters of its path that are fixed here."""
PAGE: Final = 500
"""Items read from the store at once: a list is answered in such pieces, however long it is."""
PAGE_OF_SPANS: Final = 100
"""These may be large."""
PAGE_OF_SORTED_SPANS: Final = 2000
"""The store reads all spans of the rollout for each page of these."""
FIRST_ITEMS: Final = 8
PIECE_BYTES: Final = 4 * 1024 * 1024
"""Of the items that are read at once, as far as one can tell from those before."""
_PLACE: Final = frozenset({"limit", "offset", "after", "newest_first", "sort_by", "sort_order"})
_MAX_FIELDS: Final = 10_000


def gathered(operations: Sequence[Operation]) -> dict[str, list[Reached]]:
    """The operations at each path. A path that is also one of another's (`attempts/latest`, `attempts/{attempt_id}`)
    has the other's verbs too."""
    paths: dict[str, list[Reached]] = {}
    for operation in operations:
        paths.setdefault(operation.path, []).append((operation, {}))
    for path, reached in paths.items():
        taken = {operation.verb for operation, _ in reached}
        for operation in operations:
            match = compile_path(operation.path)[0].fullmatch(path) if "{" in operation.path else None
            fixed = (
                {} if match is None else {name: value for name, value in match.groupdict().items() if "{" not in value}
            )
            if fixed and operation.path != path and operation.verb not in taken:
                reached.append((operation, fixed))
    return paths


def _in_our_words(span: Span) -> Span:
    """A span of another vocabulary, 0.x's own above all, with what it means in ours: a reward is a reward here too."""
    name = conventions.complete(span.name, span.attributes, span.events)
    return span if name == span.name else replace(span, name=name)


class Endpoint:
    """Everything at one path."""

    def __init__(
        self,
        reached: list[Reached],
        store: LightningStoreBase,
        token: str | None,
        max_body_bytes: int,
    ) -> None:
        self._operations = {operation.verb: (operation, fixed) for operation, fixed in reached}
        self._store = store
        self._token = token
        self._max_body_bytes = max_body_bytes
        self._allowed = (b"allow", ", ".join(sorted(self._operations)).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        more: Headers = ()
        try:
            headers = headers_of(scope)
            admit(headers, self._token)
            if scope["method"] not in self._operations:
                more = [self._allowed]
                raise RequestError(f"{scope['method']} is not allowed at {scope['path']}", 405)
            operation, fixed = self._operations[scope["method"]]
            scope["path_params"] |= fixed
            sent = b"" if operation.body is None else await body_of(headers, receive, self._max_body_bytes)
            arguments = self._arguments(operation, scope, sent)
            if operation.pages:
                await self._answer_page(operation, arguments, send)
            else:
                key = headers.get("idempotency-key")
                if key is None or operation.verb == "GET":
                    body = await self._do(operation, arguments, receive, scope)
                else:
                    body = await self._do_once(operation, arguments, key, sent, receive, scope)
                await answer(send, operation.status, body)
        except AgentLightningError as error:
            await refuse(send, error, more)
        except (OverflowError, UnicodeError) as error:
            await refuse(send, ConfigError(f"a value cannot be stored: {error}"))
        except ClientDisconnected:
            return

    # -- the question ----------------------------------------------------------------------------------------------

    def _arguments(self, operation: Operation, scope: Scope, body: bytes) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if operation.body is None:
            arguments |= operation.arguments(_query(scope, operation.request))
        elif operation.whole is not None:
            arguments[operation.whole] = operation.read(body)
            arguments |= operation.arguments(_query(scope, operation.query_request))
        else:
            empty = operation.empty_is_allowed and body in (b"", b"null")  # 0.x clients send null for nothing
            arguments |= operation.arguments(operation.read(b"{}" if empty else body))
        for name in operation.path_names:
            arguments[name] = scope["path_params"][name]
        if operation.single:
            arguments[operation.single] = [arguments.pop(operation.path_names[0])]
        plain = {name: argument(value) for name, value in arguments.items()}
        if "span" in plain:
            plain["span"] = _in_our_words(plain["span"])
        elif operation.method == "add_many_spans":
            plain["spans"] = [_in_our_words(span) for span in plain["spans"]]
        return plain

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _do(self, operation: Operation, arguments: dict[str, Any], receive: Receive, scope: Scope) -> bytes:
        work = getattr(self._store, operation.method)

        async def done() -> bytes:
            value = await work(**arguments)
            if operation.attempts and value is not None:
                (value,) = await self._with_attempts([value])
            return _body(operation, value, scope)

        if operation.waits:
            timeout = arguments.get("timeout")
            if timeout is None:
                timeout = MAX_WAIT_SECONDS if operation.method == "wait_for_rollouts" else 0.0
            arguments["timeout"] = min(timeout, MAX_WAIT_SECONDS)
            if arguments["timeout"] > 0:
                return await while_wanted(receive, done())
        return await done()

    async def _do_once(
        self, operation: Operation, arguments: dict[str, Any], key: str, sent: bytes, receive: Receive, scope: Scope
    ) -> bytes:
        """The answer to a request that its sender may repeat."""
        name = f"{scope['path']} {key}"
        if operation.method not in ONCE:
            if "claim_id" in operation.parameters and arguments.get("claim_id") is None:
                arguments["claim_id"] = claim_id_of(name)
            return await self._do(operation, arguments, receive, scope)
        call = IdempotentCall.of(
            operation.method, name, scope["query_string"] + b"\0" + sent, lambda value: _body(operation, value, scope)
        )
        return await do_once(self._store, operation.method, arguments, call)

    async def _answer_page(self, operation: Operation, arguments: dict[str, Any], send: Send) -> None:
        """Read and answer in pieces, so that a list of any length takes little memory."""
        written, pace = Pieces(send, operation.status), Pace(_most(operation, arguments))
        await written.write(b'{"items":[')
        count = 0
        async for items in self._pieces(operation, arguments, pace):
            data = _items(items)
            await written.write(b"," + data if count and items else data)
            count += len(items)
            pace.took(len(items), len(data))
        total = await self._total(operation, arguments, count)
        await written.write(b'],"limit":%d,"offset":%d,"total":%d}' % (arguments["limit"], arguments["offset"], total))
        await written.close()

    async def _with_attempts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Each with its latest attempt, where it has one."""
        ids = [rollout.rollout_id for rollout in rollouts]
        latest = {attempt.rollout_id: attempt for attempt in await self._store.get_latest_attempts(ids)}
        return [
            AttemptedRollout(**structs.asdict(rollout), attempt=latest[rollout.rollout_id])
            if rollout.rollout_id in latest
            else rollout
            for rollout in rollouts
        ]

    async def _pieces(self, operation: Operation, arguments: dict[str, Any], pace: Pace) -> AsyncIterator[list[Any]]:
        """At least one."""
        work = getattr(self._store, operation.method)
        filters = {name: value for name, value in arguments.items() if name in operation.parameters}
        left, offset = arguments["limit"], arguments["offset"]
        by_offset = _by_offset(operation, arguments)
        while True:
            wanted = pace.items if left < 0 else min(pace.items, left)
            filters |= {"limit": wanted, "offset": offset}
            items = await work(**filters)
            yield await self._with_attempts(items) if operation.attempts and items else items
            left -= len(items) if left > 0 else 0
            if len(items) < wanted or left == 0:
                return
            offset = offset + len(items) if by_offset else 0
            if not by_offset:
                filters["after"] = getattr(items[-1], cast("str", operation.pages))

    async def _total(self, operation: Operation, arguments: dict[str, Any], count: int) -> int:
        """How many there are without limit and offset."""
        limit, offset = arguments["limit"], arguments["offset"]
        if "after" not in arguments and (limit < 0 or count < limit) and (count or not offset):
            return offset + count
        filters = {name: value for name, value in arguments.items() if name not in _PLACE}
        if operation.method == "query_rollouts":
            return await self._store.count_rollouts(**filters)
        total = 0
        unbounded = filters | {"limit": -1, "offset": 0}
        pace = Pace(_most(operation, unbounded))
        async for piece in self._pieces(operation, unbounded, pace):
            total += len(piece)
            pace.took(len(piece), len(_items(piece)))
        return total


class Pace:
    """How many items of a list are read at once: few at first, then as many, up to `most`, as make PIECE_BYTES."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.items = min(FIRST_ITEMS, most)

    def took(self, items: int, size: int) -> None:
        """So many items were so many bytes."""
        fitting = PIECE_BYTES * items // max(size, 1)
        self.items = max(1, min(fitting, 4 * self.items, self._most))


def _by_offset(operation: Operation, arguments: dict[str, Any]) -> bool:
    return _is_sorted(arguments) or "after" not in operation.parameters


def _most(operation: Operation, arguments: dict[str, Any]) -> int:
    if operation.method != "query_spans":
        return PAGE
    return PAGE_OF_SORTED_SPANS if _by_offset(operation, arguments) else PAGE_OF_SPANS


def _is_sorted(arguments: dict[str, Any]) -> bool:
    """Whether a list has another order than that of creation."""
    return arguments.get("sort_by") is not None or arguments.get("sort_order") == "desc"


def _query(scope: Scope, kind: type[Struct]) -> Struct:
    """The query string as a request. Raises RequestError where it does not fit."""
    given: dict[str, Any] = {}
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
            given.setdefault(name, []).append(value)
        else:
            given[name] = value if _is_text(fields.get(name)) else _scalar(value)
    try:
        return msgspec.convert(given, kind, dec_hook=read_hook)
    except (msgspec.ValidationError, ConfigError) as error:
        raise refusal(error, orjson.dumps(given)) from None


def _scalar(value: str) -> Any:
    """A number, true, false or null as such."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list or any(_is_list(each) for each in get_args(kind))


def _is_text(kind: Any) -> bool:
    """Whether text fits it as it is: str, or one of some words."""
    return kind is str or any(isinstance(each, str) or _is_text(each) for each in get_args(kind))


def _body(operation: Operation, value: Any, scope: Scope) -> bytes:
    if value is None and not operation.absent and operation.method != "vacuum":
        name = operation.path_names[-1]
        raise NotFoundError(f"no {name} {scope['path_params'][name]!r} in this store")
    shown = statistics_body(cast("dict[str, int]", value)) if operation.method == "statistics" else rendered(value)
    return encode({operation.scalar: shown} if operation.scalar else shown)


def _items(items: list[Any]) -> bytes:
    return encode(rendered(items))[1:-1]
