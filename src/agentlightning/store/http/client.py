"""The store contract (base.py) over HTTP: `LightningStoreClient("http://host:4747")`.

The methods are generated from the table of operations (operations.py), but for those that wait or add spans. Every call
may arrive twice without harm: the client generates the ids, a claim is repeated by its `claim_id`, and a call that is
not idempotent by nature carries a key under which the store remembers its result (store/idempotency.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import Raw, structs
from pydantic import BaseModel, TypeAdapter

from agentlightning.attempt_variables import PATIENCE_SECONDS
from agentlightning.errors import StoreError
from agentlightning.resources import named_resources
from agentlightning.rollouts import EnqueueRolloutRequest, Rollout
from agentlightning.span import LOGPROBS, Span
from agentlightning.store import validation
from agentlightning.store.base import LightningStoreBase, implement, store_url
from agentlightning.store.http.encoding import check_resources, decode_unknown
from agentlightning.store.http.operations import CURSORS, METHODS, SENDS_KEY, SLOW, hints_of, parameters_of
from agentlightning.store.http.transport import ClientTransport
from agentlightning.store.ids import claimed_id, new_hex, new_id
from agentlightning.store.instrumented import WAITING_CALLS
from agentlightning.store.paging import PageSizer, read_pages
from agentlightning.store.types import UNSET

WAIT_SECONDS: Final = 25.0
"""A call that waits is repeated after this time, so that nothing on the way takes the connection for dead."""
RELEASE_SECONDS: Final = 5.0
"""How long a cancelled claim, and `close`, wait until what was claimed is queued again."""
SLOW_CALL_SECONDS: Final = 3600.0
"""How much longer than others a call of a slow method may take."""
FIRST_PAGE: Final = 64
"""Items of a list that are read at first, before it is known how large they are."""
GENERATED_IDS: Final[Mapping[str, Mapping[str, str]]] = {
    "start_rollout": {"rollout_id": "ro", "claim_id": "cl"},
    "enqueue_rollout": {"rollout_id": "ro"},
    "start_attempt": {"claim_id": "cl"},
    "dequeue_rollout": {"claim_id": "cl"},
    "dequeue_many_rollouts": {"claim_id": "cl"},
    "add_resources": {"resources_id": "rs"},
}
"""Ids that the client generates when the caller gives none, so that a repeated call has the same ones: their prefixes
by method and argument."""


# -- encoding of arguments and decoding of results --------------------------------------------------------------------


@functools.cache
def _optional(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in structs.fields(kind) if field.default is None]


def _plain(value: Any) -> Any:
    """What stands in JSON for a value that JSON lacks; of our own types, without what is None by default."""
    if isinstance(value, msgspec.Struct):
        given = structs.asdict(value)
        for name in _optional(type(value)):
            if given[name] is None:
                del given[name]  # a null would be examined: it may stand for a number that JSON lacks
        return given
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(cast("Sequence[Any]", value))
    raise TypeError


def _call_body(method: str, arguments: Mapping[str, Any]) -> bytes:
    """The JSON of one call. Raises ConfigError, naming the argument, for a value that JSON cannot hold."""
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is not UNSET:
            whole = named_resources.dump_python(check_resources(value), mode="json") if name == "resources" else value
            given[name] = orjson.Fragment(validation.to_json(whole, name, default=_plain))
    call: dict[str, Any] = {"method": method, "arguments": given}
    if method in SENDS_KEY or (method == "update_attempt" and "metadata" in given):
        call["key"] = new_hex() + new_hex()
    return orjson.dumps(call)


@functools.cache
def _result_decoder(method: str) -> Callable[[bytes | Raw], Any]:
    kind = hints_of(method)["return"]
    if "ResourcesUpdate" in repr(kind):  # msgspec cannot decode a union of pydantic models
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        return lambda data: adapter.validate_json(bytes(data))
    # A span that was stored as sent is represented by its sequence_id.
    kind = {"add_span": int | Span, "add_many_spans": list[int | Span]}.get(method, kind)
    return msgspec.json.Decoder(kind, dec_hook=decode_unknown).decode


# -- the client ------------------------------------------------------------------------------------------------------


class LightningStoreClient(LightningStoreBase):
    """A store in another process or on another machine. Any number of tasks, event loops and threads may use one
    object at the same time; it can be pickled.

    url: of the server, as `agl serve` prints it; AGL_STORE by default. token: its access token; AGL_TOKEN by default.
    timeout: seconds a request may take. patience: seconds a call is retried while no server answers, so that it
    survives a restart.

    Raises ConfigError for an invalid url or token. Calls raise what the store raises, StoreServerError if no server
    answers or it has another version, and StoreAuthError if it requires another token.

        >>> store = agl.LightningStoreClient("http://127.0.0.1:4747")
        >>> isinstance(store, agl.LightningStore)
        True
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 60.0,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        url = str(store_url(url))
        token = (os.environ.get("AGL_TOKEN") or None) if token is None else token
        self._transport = ClientTransport(url, token, timeout, patience)
        self._releases: set[asyncio.Task[None]] = set()
        self.url, self.token = self._transport.url, token
        """Of the server, and the access token that calls carry."""

    def __repr__(self) -> str:
        return f"LightningStoreClient({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        there = self._transport
        options = {"timeout": there.timeout, "patience": there.patience}
        return functools.partial(LightningStoreClient, there.url, there.token, **options), ()

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if releases := [task for task in self._releases if task.get_loop() is loop]:
            await asyncio.wait(releases, timeout=RELEASE_SECONDS)
        await self._transport.close()

    async def _forward(self, method: str, arguments: Mapping[str, Any]) -> Any:
        if method in CURSORS:
            return await self._read_list(method, arguments)
        return await (self._wait if method in WAITING_CALLS else self._call)(method, arguments)

    async def _call(self, method: str, arguments: Mapping[str, Any], timeout: float = 0.0) -> Any:
        """The result of a call, which the server may hold for up to `timeout` seconds until there is one."""
        if timeout:
            arguments = {**arguments, "timeout": timeout}
        return _result_decoder(method)(await self._answer(method, arguments, timeout))

    async def _answer(self, method: str, arguments: Mapping[str, Any], seconds: float = 0.0) -> Raw:
        transport, body = self._transport.for_running_loop(), _call_body(method, arguments)
        if method in SLOW:
            seconds = SLOW_CALL_SECONDS
        return await transport.call(body, seconds)

    async def _read_list(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Read a list in calls of limited size."""
        arguments = {"limit": -1, "offset": 0, **arguments}
        validation.check_page(arguments["limit"], arguments["offset"])
        sizer = PageSizer(first=FIRST_PAGE)

        async def read(**page: Any) -> list[Any]:
            answer = await self._answer(method, page)
            items = _result_decoder(method)(answer)
            sizer.record(len(items), len(memoryview(answer)))
            return items

        return [item async for items in read_pages(read, arguments, CURSORS[method], sizer) for item in items]

    async def _wait(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Make a call that waits again and again, until it has its result or its time is over."""
        timeout, clock = arguments.get("timeout"), asyncio.get_running_loop().time
        if timeout is None:
            timeout = math.inf if method == "wait_for_rollouts" else 0.0
        deadline = clock() + timeout
        # The first call does not wait, so that it can share a request with other calls.
        first = asyncio.ensure_future(self._call(method, {**arguments, "timeout": 0.0}))
        try:
            result = await asyncio.shield(first)
            while not _is_complete(result, arguments) and (left := deadline - clock()) > 0:
                result = await self._call(method, arguments, min(left, WAIT_SECONDS))
        except asyncio.CancelledError:
            if "claim_id" in arguments:
                release = asyncio.ensure_future(self._release_claim(first, **arguments))
                self._releases.add(release)
                release.add_done_callback(self._releases.discard)
                await asyncio.wait({release}, timeout=RELEASE_SECONDS)  # its caller may end the event loop next
            raise
        return result

    async def _release_claim(self, first: asyncio.Future[Any], claim_id: str, limit: int = 1, **_: Any) -> None:
        """Requeue what was claimed for a caller that was cancelled."""
        try:
            await first
            attempts = await asyncio.gather(*(self.get_attempt(claimed_id(claim_id, each)) for each in range(limit)))
            unseen = [each.rollout_id for each in attempts if each is not None and each.status == "preparing"]
            await asyncio.gather(*(self.requeue_rollout(each, "its claim was cancelled") for each in unseen))
        except StoreError:
            return  # the timeouts of the rollout, or of its worker, requeue it

    # -- methods whose items have ids of their own --------------------------------------------------------------------

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        requests = [
            structs.replace(request, rollout_id=new_id("ro")) if request.rollout_id is None else request
            for request in rollouts
        ]
        return await self._call("enqueue_many_rollouts", {"rollouts": requests})

    async def add_span(self, span: Span) -> Span:
        sent = _with_id(span)
        return _as_stored(sent, await self._call("add_span", {"span": sent}))

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        sent = [*map(_with_id, spans)]
        return [*map(_as_stored, sent, await self._call("add_many_spans", {"spans": sent}))]


def _forwarder(name: str) -> Callable[..., Any]:
    bind = inspect.Signature(list(parameters_of(name).values())).bind
    ids = GENERATED_IDS.get(name, {})

    async def forward(self: LightningStoreClient, *positional: Any, **keywords: Any) -> Any:
        arguments = bind(*positional, **keywords).arguments
        arguments |= {argument: new_id(kind) for argument, kind in ids.items() if arguments.get(argument) is None}
        return await self._forward(name, arguments)  # pyright: ignore[reportPrivateUsage]

    return forward


_FORWARDED: Final = [name for name in METHODS if name not in vars(LightningStoreClient)]
implement(LightningStoreClient, {name: _forwarder(name) for name in _FORWARDED})


def _is_complete(result: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call that waits need not wait longer."""
    if "rollout_ids" not in arguments:
        return bool(result)  # a claim
    minimum = arguments.get("minimum")
    return len(result) >= (len(set(arguments["rollout_ids"])) if minimum is None else minimum)


def _with_id(span: Span) -> Span:
    if LOGPROBS in span.attributes:
        validation.to_json(span.attributes[LOGPROBS], LOGPROBS)  # names the place of one that is not finite
    return span if span.span_id else structs.replace(span, span_id=new_hex())


def _as_stored(sent: Span, result: int | Span) -> Span:
    return result if isinstance(result, Span) else structs.replace(sent, sequence_id=result)
