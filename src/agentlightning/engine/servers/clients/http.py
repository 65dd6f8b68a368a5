"""JSON over HTTP to one model server, and its server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson

from agentlightning.engine.servers.base import ModelServerError
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.transport import Response, Transport, TransportError
from agentlightning.transport.base import error_fields

MAX_QUOTED = 300
"""Characters of a server's message that an error quotes."""
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
"""Rejections that another server, or the same one later, may not repeat; so may every status from 500 on."""


class JsonClient:
    """Client of one server. `seconds` is the longest pause in an answer while it is sampled."""

    def __init__(
        self, transport: Transport, url: str, token: str | None, *, seconds: float, connect_seconds: float
    ) -> None:
        self.url = url.rstrip("/")
        self._transport = transport
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"application/json, text/event-stream")]
        if token:
            self._headers.append((b"authorization", f"Bearer {token}".encode()))
        self._seconds = seconds
        self._connect_seconds = connect_seconds

    async def get(self, path: str, *, seconds: float = 10.0, optional: bool = False) -> Any:
        """The JSON of the response. With `optional`, None where the server has no such path."""
        return await self._request("GET", path, None, seconds, optional)

    async def text(self, path: str, *, seconds: float = 5.0) -> str:
        """The response as text."""
        async with self._response("GET", path, None, seconds) as response:
            return (await response.read()).decode("utf-8", errors="replace")

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        optional: bool = False,
    ) -> Any:
        """As `get`."""
        return await self._request("POST", path, body, seconds, optional)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None, optional: bool
    ) -> Any:
        """The JSON of the response, or None if it is not JSON."""
        try:
            async with self._response(method, path, body, seconds) as response:
                content = await response.read()
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return None
        except ModelServerError as error:
            if optional and error.status in (404, 405):
                return None
            raise

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event up to `[DONE]`. Raises ModelServerError if the stream ends before it."""
        done = False
        async with self._response("POST", path, body, None) as response:
            async for data in _event_data(response.chunks()):
                if done or data == b"[DONE]":
                    done = True  # Read to the end, so that the connection can be reused.
                    continue
                try:
                    event = orjson.loads(data)
                except orjson.JSONDecodeError:
                    raise self.protocol_error(path, f"an event that is not JSON: {_error_message(data)}") from None
                yield event
        if not done:
            raise self.protocol_error(path, "its stream ended before the answer did")

    def protocol_error(self, path: str, message: str) -> ModelServerError:
        return ModelServerError(f"{self.url}{path}: {message}", retryable=True)

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None
    ) -> AsyncGenerator[Response]:
        timeout = self._seconds if seconds is None else seconds
        try:
            response = await self._transport.send(
                method,
                self.url + path,
                self._headers,
                b"" if body is None else orjson.dumps(body),
                connect_seconds=min(self._connect_seconds, timeout),
                timeout_seconds=timeout,
            )
            async with response:
                if response.status >= 400:
                    raise self._status_error(path, response.status, await response.read())
                yield response
        except TransportError as error:
            retryable = error.reason not in ("tls", "proxy")  # Those persist until a setting is changed.
            raise ModelServerError(f"{self.url}{path}: {error} ({error.reason})", retryable=retryable) from error

    def _status_error(self, path: str, status: int, content: bytes) -> AgentLightningError:
        message = f"{self.url}{path} answered {status}: {_error_message(content)}"
        if status in (401, 403):
            return ConfigError(f"{message}; give the token the server was started with")
        retryable = status >= 500 or status in RETRYABLE_STATUSES
        return ModelServerError(message, retryable=retryable, status=status)


class HttpModelServer:
    """What clients of model servers have in common. `url` may end in `/v1`; `token` is the server's API key."""

    kv_cache_metrics: tuple[str, ...]
    """The names of the metric that `kv_cache_usage` reads."""

    def __init__(self, transport: Transport, url: str, *, token: str | None = None, seconds: float = 600.0) -> None:
        self._http = JsonClient(transport, url.removesuffix("/v1"), token, seconds=seconds, connect_seconds=10.0)
        self.url = self._http.url

    async def health(self) -> None:
        await self._http.get("/health", seconds=5.0)

    async def kv_cache_usage(self) -> float | None:
        return largest_metric(await self._http.text("/metrics"), *self.kv_cache_metrics)


async def _event_data(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error_message(content: bytes) -> str:
    text, _, _ = error_fields(content)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


# -- prometheus ------------------------------------------------------------------------------------------------------

# Reads single values from the text that a server's `/metrics` answers (Prometheus' exposition format).


def largest_metric(text: str, *names: str) -> float | None:
    """The largest sample, over all labels, of the first of these metrics that is there; None where none is.

    >>> largest_metric('# TYPE a gauge\\na{engine="0"} 0.25\\na{engine="1"} 0.5\\n', "a")
    0.5
    """
    for name in names:
        if found := re.findall(rf"^{name}(?:{{.*}})? +(\d\S*)", text, re.MULTILINE):
            return max(map(float, found))
    return None
