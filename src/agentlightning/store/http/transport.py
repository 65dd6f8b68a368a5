"""Sends a client's calls to a server: batches them, retries them, and delivers their results.

Calls that are made at the same time share one request (`POST /v1/agl/calls`), so that the store commits them together.
A request that fails for a reason that may pass (no connection, a server that restarts) is retried until the retry
deadline of its calls; every call may arrive twice without harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import orjson
from msgspec import Raw, Struct

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    StoreClosedError,
    StoreServerError,
)
from agentlightning.store.http.encoding import BASE_PATH, PROTOCOL_HEADER, PROTOCOL_VERSION, version
from agentlightning.store.http.errors import ErrorBody, Refusal, error_from
from agentlightning.transport import Transport, TransportError
from agentlightning.transport.connector import ConnectOptions
from agentlightning.util.json_values import loads
from agentlightning.util.random_ids import random_uniform

MAX_CALLS_PER_REQUEST: Final = 256
MAX_REQUEST_BYTES: Final = 1024 * 1024
"""A batch that has reached this size takes no further call."""
MAX_REQUESTS_IN_FLIGHT: Final = 4
"""Concurrent requests; with more of them, each would carry fewer calls."""
MIN_DELAY_SECONDS: Final = 0.05
MAX_DELAY_SECONDS: Final = 1.0
_RETRYABLE_STATUSES: Final = frozenset({502, 503, 504})


class _Result(Struct):
    value: Raw = Raw(b"null")
    error: ErrorBody | None = None


class _Results(Struct):
    results: list[_Result]


_decode_results = msgspec.json.Decoder(_Results).decode
_decode_error = msgspec.json.Decoder(Refusal).decode


class _RetryableError(Exception):
    """A failure that a retry may fix."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that has no result yet."""

    body: bytes
    future: asyncio.Future[Raw]
    retry_until: float = math.inf
    """On the clock of the event loop; set at the first failure."""


class ClientTransport:
    """The connection to a server, for any number of event loops and threads. For the arguments see
    `LightningStoreClient`. Raises ConfigError, naming the value, for invalid ones."""

    def __init__(self, url: str, token: str | None, timeout: float, patience: float) -> None:
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
        self.url = url.rstrip("/").removesuffix(BASE_PATH)
        self.token = token
        self.timeout = timeout
        self.patience = patience
        self._loops: dict[asyncio.AbstractEventLoop, LoopTransport] = {}
        self._lock = threading.Lock()
        self._closed: StoreClosedError | None = None
        self._process_id = os.getpid()

    def for_running_loop(self) -> LoopTransport:
        """The transport of the running event loop. Raises StoreClosedError once closed, and in a forked process."""
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
        error = StoreClosedError(f"the store at {self.url} is closed; open it again with LightningStoreClient(...)")
        with self._lock:
            self._closed = error
            transports, self._loops = self._loops, {}
        for loop, transport in transports.items():
            if loop is asyncio.get_running_loop():
                await transport.close(error)
            elif not loop.is_closed():
                asyncio.run_coroutine_threadsafe(transport.close(error), loop)


class LoopTransport:
    """Batches, sends and retries the calls of one event loop."""

    def __init__(self, client: ClientTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._queue: deque[PendingCall] = deque()
        self._requests_in_flight = 0
        self._flush_scheduled = False
        self._pool: Transport | None = None
        self._pool_closer: AsyncGenerator[None] | None = None
        headers = {"content-type": "application/json", **PROTOCOL_HEADER}
        if client.token is not None:
            headers["authorization"] = f"Bearer {client.token}"
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._tasks: set[asyncio.Task[Any]] = set()
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
        if not self._flush_scheduled and self._requests_in_flight < MAX_REQUESTS_IN_FLIGHT:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        return call.future

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a background task, which is cancelled when the transport is closed."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _flush(self) -> None:
        self._flush_scheduled = False
        while self._queue and self._requests_in_flight < MAX_REQUESTS_IN_FLIGHT:
            if batch := self._next_batch():
                self._requests_in_flight += 1
                self._start(self._send(batch)).add_done_callback(self._on_sent)

    def _on_sent(self, _: asyncio.Task[Any]) -> None:
        self._requests_in_flight -= 1
        self._flush()

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
        except Exception as error:
            _fail(batch, StoreServerError(f"the request to {self._client.url} failed: {error!r}"))
            raise

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
        if status == 200 and PROTOCOL_HEADER.items() <= headers.items():
            return self._deliver(batch, _decode_results(content).results)
        url, error = self._client.url, _error_in(content)
        if PROTOCOL_HEADER.items() <= headers.items():
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
        health: Any = None
        if status == 200:
            with contextlib.suppress(orjson.JSONDecodeError):
                health = loads(content)
        if not isinstance(health, dict) or "status" not in health:
            kind = headers.get("content-type", "no content type")
            raise StoreServerError(
                f"the server at {url} is not a store of Agent Lightning (status {status}, {kind}); check the address"
            )
        server = cast("dict[str, Any]", health)
        protocol = server.get("protocol", 0)
        if protocol != PROTOCOL_VERSION:
            older, newer = ("server", "client") if protocol < PROTOCOL_VERSION else ("client", "server")
            raise StoreServerError(
                f"the store at {url} is Agent Lightning {server.get('version', '0.x')} (protocol {protocol}), "
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
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
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
