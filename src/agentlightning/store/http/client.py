"""The store contract (base.py) over HTTP: `LightningStoreClient("http://host:4747")`.

The methods are generated from the table of operations (operations.py), but for those that wait or add spans. Calls that
are made at the same time share one request (`POST /v1/agl/calls`), so that the store commits them together.

A request that fails for a reason that may pass (no connection, a server that restarts) is retried until the retry
deadline of its calls. Every call may arrive twice without harm: the client generates the ids, a claim is repeated by
its `claim_id`, and a call that is not idempotent by nature carries a key under which the store remembers its result
(store/idempotency.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import orjson
from msgspec import Raw, Struct, structs
from pydantic import BaseModel, TypeAdapter

from agentlightning.attempt_variables import PATIENCE_SECONDS
from agentlightning.errors import AgentLightningError, ConfigError, StoreClosedError, StoreError, StoreServerError
from agentlightning.resources import named_resources
from agentlightning.rollouts import EnqueueRolloutRequest, Rollout
from agentlightning.span import LOGPROBS, Span
from agentlightning.store import validation
from agentlightning.store.base import LightningStoreBase, binder, implement, store_url
from agentlightning.store.http import BASE_PATH, operations
from agentlightning.store.http.errors import ErrorBody, Refusal, error_from
from agentlightning.store.http.operations import PROTOCOL_HEADER, PROTOCOL_VERSION, hints_of, version
from agentlightning.store.ids import claimed_id, new_hex, new_id
from agentlightning.store.instrumented import WAITING_CALLS
from agentlightning.store.paging import PageSizer, read_pages
from agentlightning.store.types import UNSET
from agentlightning.transport import Transport, TransportError
from agentlightning.transport.options import ConnectOptions
from agentlightning.util.random_ids import random_uniform

MAX_CALLS_PER_REQUEST: Final = 256
MAX_REQUEST_BYTES: Final = 1024 * 1024
"""A batch that has reached this size takes no further call."""
MAX_REQUESTS_IN_FLIGHT: Final = 4
"""Concurrent requests; with more of them, each would carry fewer calls."""
MIN_DELAY_SECONDS: Final = 0.05
MAX_DELAY_SECONDS: Final = 1.0
_RETRYABLE_STATUSES: Final = frozenset({502, 503, 504})
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
            if name == "resources":
                value = named_resources.dump_python(operations.check_resources(value), mode="json")
            given[name] = orjson.Fragment(validation.to_json(value, name, default=_plain))
    call: dict[str, Any] = {"method": method, "arguments": given}
    if method in operations.SENDS_KEY or (method == "update_attempt" and "metadata" in given):
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
    return msgspec.json.Decoder(kind, dec_hook=operations.decode_unknown).decode


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
        _check(url, token, timeout, patience)
        self.url, self.token = url.rstrip("/").removesuffix(BASE_PATH), token
        """Of the server, and the access token that calls carry."""
        self.timeout, self.patience = timeout, patience
        self._loops: dict[asyncio.AbstractEventLoop, LoopTransport] = {}
        self._lock = threading.Lock()
        self._closed: StoreClosedError | None = None
        self._process_id = os.getpid()
        self._releases: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"LightningStoreClient({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"timeout": self.timeout, "patience": self.patience}
        return functools.partial(LightningStoreClient, self.url, self.token, **options), ()

    def _transport(self) -> LoopTransport:
        """That of the running event loop. Raises StoreClosedError once closed, and in a forked process."""
        if self._process_id != os.getpid():
            raise StoreClosedError(f"the store at {self.url} was opened by a parent process; open it again in this one")
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            transport = self._loops.get(loop)
            if transport is None:
                self._loops = {loop: transport for loop, transport in self._loops.items() if not loop.is_closed()}
                transport = self._loops[loop] = LoopTransport(self, loop)
            return transport

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if releases := [task for task in self._releases if task.get_loop() is loop]:
            await asyncio.wait(releases, timeout=RELEASE_SECONDS)
        error = StoreClosedError(f"the store at {self.url} is closed; open it again with LightningStoreClient(...)")
        with self._lock:
            self._closed = error
            transports, self._loops = self._loops, {}
        for each, transport in transports.items():
            if each is loop:
                await transport.close(error)
            elif not each.is_closed():
                asyncio.run_coroutine_threadsafe(transport.close(error), each)

    async def _call(self, method: str, arguments: Mapping[str, Any], timeout: float = 0.0) -> Any:
        """The result of a call, which the server may hold for up to `timeout` seconds until there is one."""
        if timeout:
            arguments = {**arguments, "timeout": timeout}
        return _result_decoder(method)(await self._answer(method, arguments, timeout))

    async def _answer(self, method: str, arguments: Mapping[str, Any], seconds: float = 0.0) -> Raw:
        transport, body = self._transport(), _call_body(method, arguments)
        if method in operations.SLOW:
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

        return [
            item async for items in read_pages(read, arguments, operations.CURSORS[method], sizer) for item in items
        ]

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


def _check(url: str, token: str | None, timeout: float, patience: float) -> None:
    """Raise ConfigError, naming the value, for arguments of a client that are not valid."""
    try:
        parts, _ = urlsplit(url), urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"url={url!r} is not the URL of a server: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url={url!r} is not the URL of a server; use one like http://127.0.0.1:4747")
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(f"the url of {parts.hostname!r} has more than an address; give the token as token=...")
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("the access token is empty or holds characters other than printable ASCII")
    for name, value in (("timeout", timeout), ("patience", patience)):
        if not 0 <= value < math.inf or (name == "timeout" and value == 0):
            raise ConfigError(f"{name}={value} is not a duration in seconds")


def _forwarder(name: str) -> Callable[..., Any]:
    bind = binder(name)
    ids = GENERATED_IDS.get(name, {})
    send = "_read_list" if name in operations.CURSORS else "_wait" if name in WAITING_CALLS else "_call"

    async def forward(self: LightningStoreClient, *positional: Any, **keywords: Any) -> Any:
        arguments = bind(*positional, **keywords)
        arguments |= {argument: new_id(kind) for argument, kind in ids.items() if arguments.get(argument) is None}
        return await getattr(self, send)(name, arguments)

    return forward


_FORWARDED: Final = [name for name in operations.METHODS if name not in vars(LightningStoreClient)]
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


# -- requests --------------------------------------------------------------------------------------------------------


class _Result(Struct):
    value: Raw = Raw(b"null")
    error: ErrorBody | None = None


class _Results(Struct):
    results: list[_Result]


_decode_results = msgspec.json.Decoder(_Results).decode
_decode_error = msgspec.json.Decoder(Refusal).decode


class _Health(Struct):
    status: Any
    version: str = "0.x"
    protocol: int = 0


_decode_health = msgspec.json.Decoder(_Health).decode


class _RetryableError(Exception):
    """A failure that a retry may fix."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that has no result yet."""

    body: bytes
    future: asyncio.Future[Raw]
    retry_until: float = math.inf
    """On the clock of the event loop; set at the first failure."""


class LoopTransport:
    """Batches, sends and retries the calls of one event loop."""

    def __init__(self, client: LightningStoreClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._queue: deque[PendingCall] = deque()
        self._senders = 0
        self._pool: Transport | None = None
        self._pool_closer: AsyncGenerator[None] | None = None
        headers = {"content-type": "application/json", **PROTOCOL_HEADER}
        if client.token is not None:
            headers["authorization"] = f"Bearer {client.token}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: StoreClosedError | None = None

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, body: bytes, seconds: float = 0.0) -> asyncio.Future[Raw]:
        """Send a call together with others that are made in the same step of the event loop; with `seconds`, in a
        request of its own, which may take so much longer."""
        call = PendingCall(body, self._loop.create_future())
        if seconds:
            sending = self._start(self._send([call], seconds))
            call.future.add_done_callback(lambda _: sending.cancel())  # its caller may have been cancelled
            return call.future
        self._queue.append(call)
        if len(self._queue) == 1:
            self._add_sender()
        return call.future

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task, which is cancelled when the transport is closed."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _add_sender(self) -> None:
        if self._queue and self._senders < MAX_REQUESTS_IN_FLIGHT:
            self._senders += 1
            self._start(self._send_queued()).add_done_callback(self._on_sender_ended)

    def _on_sender_ended(self, _: asyncio.Task[None]) -> None:
        """Possibly as someone cancelled every task of the loop, before it had begun."""
        self._senders -= 1
        self._add_sender()

    async def _send_queued(self) -> None:
        """Send what is queued, batch by batch; what does not fit into the batch is left to another sender."""
        while batch := self._next_batch():
            self._add_sender()
            await self._send(batch)

    def _next_batch(self) -> list[PendingCall]:
        batch: list[PendingCall] = []
        size = 0
        while self._queue and len(batch) < MAX_CALLS_PER_REQUEST:
            size += len(self._queue[0].body)
            if batch and size > MAX_REQUEST_BYTES:
                break
            call = self._queue.popleft()
            if not call.future.done():  # its caller may have been cancelled
                batch.append(call)
        return batch

    async def _send(self, batch: Sequence[PendingCall], seconds: float = 0.0) -> None:
        """Send a batch until every call has a result or an error, whatever happens."""
        delay = MIN_DELAY_SECONDS
        try:
            while batch:
                try:
                    await self._post(batch, seconds)
                except _RetryableError as error:
                    self._fail_expired(batch, str(error))
                batch = [call for call in batch if not call.future.done()]
                if batch:
                    await asyncio.sleep(delay * random_uniform(0.5, 1.0))
                    delay = min(2 * delay, MAX_DELAY_SECONDS)
        except AgentLightningError as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, self._closed)
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, its callers get it
            failure = StoreServerError(f"the request to {self._client.url} failed: {error!r}")
            failure.__cause__ = error
            _fail(batch, failure)

    def _fail_expired(self, batch: Sequence[PendingCall], reason: str) -> None:
        """Fail the calls that may not be retried any more."""
        now, seconds = self._loop.time(), self._client.patience
        for call in (*batch, *self._queue):  # queued calls have no server either
            call.retry_until = min(call.retry_until, now + seconds)
        error = StoreServerError(
            f"no store has answered at {self._client.url} for {seconds:g} seconds ({reason}); "
            f"start one with `agl serve`, or check the address"
        )
        _fail([call for call in batch if call.retry_until <= now], error)

    # -- requests --------------------------------------------------------------------------------------------------

    async def _post(self, batch: Sequence[PendingCall], seconds: float) -> None:
        """Send a batch and deliver the results. Raises the error of a store that rejected all of it, and
        _RetryableError for the calls that have no result then."""
        body = b'{"calls":[' + b",".join([call.body for call in batch]) + b"]}"
        status, headers, content = await self._request("POST", "/calls", body, self._client.timeout + seconds)
        url, ours = self._client.url, PROTOCOL_HEADER.items() <= headers.items()
        if ours and status == 200:
            return self._deliver(batch, _decode_results(content).results)
        error = _error_in(content)
        if ours:
            raise error_from(ErrorBody(error.type, f"{url}: {error.message}"))
        await self._check_server()
        raise StoreServerError(f"{url} responded with status {status}: {error.message}")

    def _deliver(self, batch: Sequence[PendingCall], results: Sequence[_Result]) -> None:
        for call, result in zip(batch, results, strict=True):
            if result.error is None:
                if not call.future.done():
                    call.future.set_result(result.value)
            elif result.error.type != StoreClosedError.__name__:
                _fail([call], error_from(result.error))
        if not all(call.future.done() for call in batch):
            raise _RetryableError(f"{self._client.url} is closing")  # it has rejected the others

    async def _check_server(self) -> None:
        """Raise StoreServerError unless a store that has our protocol version is there."""
        status, headers, content = await self._request("GET", "/health", b"", self._client.timeout)
        if status >= 500 and PROTOCOL_HEADER.items() <= headers.items():
            return  # a store that is not healthy
        url = self._client.url
        try:
            server = _decode_health(content if status == 200 else b"")
        except msgspec.MsgspecError:
            kind = headers.get("content-type", "no content type")
            raise StoreServerError(
                f"the server at {url} is not a store of Agent Lightning (status {status}, {kind}); check the address"
            ) from None
        if server.protocol != PROTOCOL_VERSION:
            older, newer = ("server", "client") if server.protocol < PROTOCOL_VERSION else ("client", "server")
            raise StoreServerError(
                f"the store at {url} is Agent Lightning {server.version} (protocol {server.protocol}), "
                f"this client is {version()} (protocol {PROTOCOL_VERSION}); "
                f"upgrade the {older}, or use the {newer} of the same version"
            )

    async def _request(self, verb: str, path: str, body: bytes, seconds: float) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body). Raises _RetryableError if a retry may help."""
        if self._pool is None:
            self._pool = Transport(ConnectOptions())
            # An event loop closes its asynchronous generators when it ends, and this one closes the connections.
            self._pool_closer = _close_at_exit(self._pool)
            await anext(self._pool_closer)
        url = self._client.url + BASE_PATH + path
        sending = self._pool.send(verb, url, self._headers, body, timeout_seconds=seconds)
        try:
            async with asyncio.timeout(seconds), await sending as response:
                content = b"".join([chunk async for chunk in response.chunks()])
        except TransportError as error:
            if error.reason == "tls":
                raise StoreServerError(str(error)) from None
            raise _RetryableError(str(error)) from None
        except TimeoutError:
            raise _RetryableError(f"no response within {seconds:g} seconds") from None
        if response.status in _RETRYABLE_STATUSES:
            raise _RetryableError(f"status {response.status}: {_error_in(content).message}")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        return response.status, headers, content

    async def close(self, error: StoreClosedError) -> None:
        """Pending calls fail with `error`."""
        self._closed = error
        _fail(self._queue, error)
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._pool is not None:
            await self._pool.close()


async def _close_at_exit(pool: Transport) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await pool.close()


def _fail(calls: Iterable[PendingCall], error: AgentLightningError | None) -> None:
    for call in calls:
        if call.future.done():
            continue
        if error is None:
            call.future.cancel()
        else:
            call.future.set_exception(error)


def _error_in(content: bytes) -> ErrorBody:
    """The error of a response; its message is the start of anything else."""
    try:
        return _decode_error(content).error
    except msgspec.MsgspecError:
        return ErrorBody("", repr(content[:120].decode("utf-8", "replace")))
