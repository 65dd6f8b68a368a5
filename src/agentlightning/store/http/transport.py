"""The way of a client's calls to a server: together, kept up, and once more where an answer was lost.

Calls that are made at the same time travel in one request (`POST /v1/agl/calls`), as they are committed together at
the other end. A request that fails for a reason that may pass (no connection, a server that restarts) is sent again
until the patience of its calls is over; every call is made so that it may arrive twice. Each event loop has a line of
its own.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import os
import random
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec
import orjson
from msgspec import Raw, Struct

from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    StoreAuthError,
    StoreClosedError,
    StoreServerError,
)
from agentlightning.store.http.encoding import BASE, PROTOCOL, version
from agentlightning.store.http.errors import ErrorBody, Refusal, error_of

logger = logging.getLogger(__name__)

MAX_TOGETHER: Final = 256
"""Calls in one request at most."""
MAX_BYTES_TOGETHER: Final = 1024 * 1024
"""A request takes no further call beyond this."""
IN_FLIGHT: Final = 4
"""Requests under way at once: more would each carry less."""
FIRST_DELAY_SECONDS: Final = 0.05
LAST_DELAY_SECONDS: Final = 1.0
_PASSING: Final = frozenset({502, 503, 504})


class _Result(Struct):
    value: Raw = Raw(b"null")
    error: ErrorBody | None = None


class _Results(Struct):
    results: list[_Result]


_read_results = msgspec.json.Decoder(_Results).decode
_read_refusal = msgspec.json.Decoder(Refusal).decode


class _PassingError(Exception):
    """Something that may be mended by trying again."""


@dataclass(slots=True, eq=False)
class Call:
    """One call on its way."""

    body: bytes
    future: asyncio.Future[Raw]
    patient_until: float = math.inf
    """On the event loop's clock, from its first failure on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a client; see `LightningStoreClient`."""

    url: str
    token: str | None
    timeout: float
    patience: float

    @classmethod
    def checked(cls, url: str, token: str | None, timeout: float, patience: float) -> Settings:
        """Raises ConfigError, naming the value."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r} is no server's; use one like http://127.0.0.1:4747")
        if parts.username or parts.query or parts.fragment:
            raise ConfigError(f"the url of {parts.hostname!r} holds more than an address; give the token as token=...")
        if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
            raise ConfigError("the access token is empty or holds characters other than printable ASCII")
        for name, value in (("timeout", timeout), ("patience", patience)):
            if not 0 <= value < float("inf") or (name == "timeout" and value == 0):
                raise ConfigError(f"{name}={value} is no time to wait; use seconds")
        return cls(url.rstrip("/").removesuffix(BASE), token, timeout, patience)


class Remote:
    """A server, from any number of event loops and threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lines: dict[asyncio.AbstractEventLoop, Line] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._process_id = os.getpid()

    @property
    def name(self) -> str:
        return f"the store at {self.settings.url}"

    def line(self) -> Line:
        """The running event loop's. Raises StoreClosedError once closed, and in a forked process."""
        if self._process_id != os.getpid():
            raise StoreClosedError(f"{self.name} was opened by a parent process; open it again in this one")
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"{self.name} is closed; open it again with LightningStoreClient(...)")
            line = self._lines.get(loop)
            if line is None:
                self._lines = {known: line for known, line in self._lines.items() if not known.is_closed()}
                line = self._lines[loop] = Line(self.settings, loop)
            return line

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            lines, self._lines = list(self._lines.items()), {}
        here = asyncio.get_running_loop()
        error = StoreClosedError(f"{self.name} is closed; open it again with LightningStoreClient(...)")
        for loop, line in lines:
            if loop is here:
                await line.close(error)
            elif not loop.is_closed():
                asyncio.run_coroutine_threadsafe(line.close(error), loop)


class Line:
    """The calls of one event loop."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._waiting: deque[Call] = deque()
        self._in_flight = 0
        self._scheduled = False
        self._session: aiohttp.ClientSession | None = None
        self._keeper: AsyncGenerator[None] | None = None
        self._greeted = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed: StoreClosedError | None = None

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, body: bytes) -> asyncio.Future[Raw]:
        """Send a call, with others that are made now."""
        call = self._new(body)
        self._waiting.append(call)
        if not self._scheduled and self._in_flight < IN_FLIGHT:
            self._scheduled = True
            self._loop.call_soon(self._depart)
        return call.future

    async def call_alone(self, body: bytes, seconds: float, path: str = "/calls") -> Raw:
        """Send a call in a request of its own, which may take `seconds` longer than others. It ends when cancelled."""
        call = self._new(body)
        sending = self.start(self._send([call], seconds, path))
        try:
            return await call.future
        finally:
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something in the background; it ends with the line."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _new(self, body: bytes) -> Call:
        if self._closed is not None:
            raise self._closed
        return Call(body, self._loop.create_future())

    def _depart(self) -> None:
        self._scheduled = False
        while self._waiting and self._in_flight < IN_FLIGHT:
            batch = self._together()
            if batch:
                self._in_flight += 1
                self.start(self._send_counted(batch))

    def _together(self) -> list[Call]:
        batch: list[Call] = []
        size = 0
        while self._waiting and len(batch) < MAX_TOGETHER:
            call = self._waiting[0]
            size += len(call.body)
            if batch and size > MAX_BYTES_TOGETHER:
                break
            self._waiting.popleft()
            if not call.future.done():  # a caller that was cancelled meanwhile
                batch.append(call)
        return batch

    async def _send_counted(self, batch: list[Call]) -> None:
        try:
            await self._send(batch, 0.0, "/calls")
        finally:
            self._in_flight -= 1
            self._depart()

    async def _send(self, batch: list[Call], seconds: float, path: str) -> None:
        """Until each call of the batch is answered, or its patience is over: nobody waits forever, whatever happens."""
        try:
            await self._send_patiently(batch, seconds, path)
        except AgentLightningError as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, self._closed)
            raise
        except Exception as error:
            _fail(batch, StoreServerError(f"the request to {self._settings.url} failed: {error!r}"))
            raise

    async def _send_patiently(self, batch: list[Call], seconds: float, path: str) -> None:
        delay = FIRST_DELAY_SECONDS
        while batch:
            try:
                await self._greet()
                batch = self._settle(batch, await self._exchange(batch, seconds, path))
                reason = f"{self._settings.url} is closing"
            except _PassingError as error:
                self._greeted = False
                reason = str(error)
            batch = self._patient(batch, reason)
            if batch:
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, LAST_DELAY_SECONDS)

    def _patient(self, batch: Sequence[Call], reason: str) -> list[Call]:
        """The calls that can be sent again; the others are told why not."""
        now, url, patience = self._loop.time(), self._settings.url, self._settings.patience
        for call in (*batch, *self._waiting):  # those that still wait for their turn have no server either
            call.patient_until = min(call.patient_until, now + patience)
        over = [call for call in batch if call.patient_until <= now]
        _fail(
            over,
            StoreServerError(
                f"no store answers at {url}, for {patience:g} seconds ({reason}); "
                f"start one with `agl serve`, or check the address"
            ),
        )
        return [call for call in batch if call.patient_until > now and not call.future.done()]

    def _settle(self, batch: Sequence[Call], results: Sequence[_Result]) -> list[Call]:
        """Hand out the results; returns the calls a closing server refused."""
        again: list[Call] = []
        for call, result in zip(batch, results, strict=True):
            if call.future.done():
                continue
            if result.error is None:
                call.future.set_result(result.value)
            elif result.error.type == StoreClosedError.__name__:
                again.append(call)
            else:
                call.future.set_exception(error_of(result.error))
        return again

    # -- requests --------------------------------------------------------------------------------------------------

    async def _exchange(self, batch: Sequence[Call], seconds: float, path: str) -> list[_Result]:
        body = b'{"calls":[' + b",".join([call.body for call in batch]) + b"]}"
        status, headers, answer = await self._request("POST", path, body, self._settings.timeout + seconds)
        if status == 200 and headers.get("agl-protocol") == str(PROTOCOL):
            results = _read_results(answer).results
            if len(results) == len(batch):
                return results
        self._refused(status, headers, answer)
        self._greeted = False
        await self._greet()  # says what it is if it is not a store of ours
        raise StoreServerError(f"{self._settings.url} answered {status}: {_said(answer)}")

    def _refused(self, status: int, headers: Any, answer: bytes) -> None:
        """Raise what a store of ours says about a whole request."""
        if "agl-protocol" not in headers:
            return
        if status == 401:
            raise StoreAuthError(f"{self._settings.url}: {_said(answer)}")
        if 400 <= status < 500:
            raise error_of(ErrorBody("", _said(answer)), status)

    async def _greet(self) -> None:
        """Make sure, once for a connection, that a store that we understand is there. Raises StoreServerError."""
        if self._greeted:
            return
        status, headers, answer = await self._request("GET", "/health", None, self._settings.timeout)
        if status >= 500 and headers.get("agl-protocol") == str(PROTOCOL):
            return  # one of ours that is ill: each call is told how far
        told = _parsed(answer) if status == 200 else None
        url, mine = self._settings.url, version()
        if not isinstance(told, dict) or "status" not in told:
            kind = headers.get("content-type", "no content type")
            raise StoreServerError(
                f"what answers at {url} is no store of Agent Lightning (status {status}, {kind}); check the address"
            )
        known = cast("dict[str, Any]", told)
        protocol = known.get("protocol", 0)
        if protocol != PROTOCOL:
            older, newer = ("server", "client") if protocol < PROTOCOL else ("client", "server")
            raise StoreServerError(
                f"the store at {url} is Agent Lightning {known.get('version', '0.x')} (protocol {protocol}), this is "
                f"{mine} (protocol {PROTOCOL}); upgrade the {older}, or use the {newer} of the same version"
            )
        self._greeted = True

    async def _request(self, verb: str, path: str, body: bytes | None, seconds: float) -> tuple[int, Any, bytes]:
        """(status, headers, body). Raises _PassingError where another try may help."""
        session = self._opened()
        try:
            async with session.request(
                verb,
                self._settings.url + BASE + path,
                data=io.BytesIO(body) if body and len(body) > MAX_BYTES_TOGETHER else body,  # the rest goes at once
                headers=None if body is None else {"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=seconds, connect=10.0),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"url={self._settings.url!r} cannot be asked: {error}") from None
        except aiohttp.ClientSSLError as error:
            raise StoreServerError(f"{self._settings.url} cannot be trusted: {error}") from None
        except TimeoutError:
            raise _PassingError(f"no answer within {seconds:g} seconds") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _PassingError(str(error) or type(error).__name__) from None
        if response.status in _PASSING:
            raise _PassingError(f"status {response.status}: {_said(answer)}")
        return response.status, response.headers, answer

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            token = self._settings.token
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
                headers={"authorization": f"Bearer {token}"} if token else None,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
            )
            # An event loop that ends closes its asynchronous generators, and this one the session.
            self._keeper = _keep(self._session)
            self.start(_begin(self._keeper))
        return self._session

    async def close(self, error: StoreClosedError) -> None:
        """Whoever still waits gets `error`."""
        self._closed = error
        _fail(self._waiting, error)
        self._waiting.clear()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()


async def _keep(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await session.close()


async def _begin(generator: AsyncGenerator[None]) -> None:
    await anext(generator)


def _fail(calls: Any, error: AgentLightningError | None) -> None:
    for call in calls:
        if call.future.done():
            continue
        if error is None:
            call.future.cancel()
        else:
            call.future.set_exception(error)


def _parsed(answer: bytes) -> Any:
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None


def _said(answer: bytes) -> str:
    """The message of a refusal, or the beginning of something else."""
    try:
        return _read_refusal(answer).error.message
    except msgspec.MsgspecError:
        return repr(answer[:120].decode("utf-8", "replace"))
