"""Clients of model servers: what a pool of servers asks of them, and JSON over HTTP with server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agentlightning.engine.base import FinishReason, SamplingParams, TopLogprobs
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError
from agentlightning.transport import Response, Transport, TransportError
from agentlightning.transport.base import CONTEXT_ERROR, error_fields

# -- what a pool and its clients say to each other ---------------------------------------------------------------------


class ModelServerError(PolicyError):
    """A server that gave no answer, or only a part of it."""

    def __init__(self, message: str, *, retryable: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        """Whether another server may succeed."""
        self.status = status
        """HTTP status, if the server answered."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One answer to sample."""

    model: str
    """The name of the model, or of an adapter, on the server."""
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    """Each ends the answer, and is part of it."""
    adapter: bool = False
    """Whether `model` is an adapter."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next tokens of an answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an answer."""

    finish_reason: FinishReason
    weights: tuple[tuple[str, int], ...] = ()
    """(label of the weights, number of tokens they sampled), in order; empty if the server does not report it."""


PROBE_PROMPT = (1, 2, 3)
"""A prompt that every vocabulary contains."""

OnChunk = Callable[[TokenChunk], None]


@dataclass(frozen=True, slots=True)
class ServedModelInfo:
    """What a server reports about the model it serves."""

    model: str
    context_length: int
    adapters: frozenset[str] = field(default_factory=frozenset[str])


# -- HTTP --------------------------------------------------------------------------------------------------------------

MAX_QUOTED = 300
"""Characters of a server's message that an error quotes."""
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
"""Rejections that another server, or the same one later, may not repeat; so may every status from 500 on."""


def server_url(url: str) -> str:
    """The address of a server, which may be given as that of its API.

    >>> server_url("http://gpu1:8000/v1/")
    'http://gpu1:8000'
    """
    return url.rstrip("/").removesuffix("/v1")


class JsonClient:
    """Client of one server. `url` may end in `/v1`; `token` is the server's API key, and `seconds` the longest pause in
    an answer while it is sampled."""

    def __init__(
        self,
        transport: Transport,
        url: str,
        token: str | None = None,
        *,
        seconds: float = 600.0,
        connect_seconds: float = 10.0,
    ) -> None:
        self.url = server_url(url)
        self._transport = transport
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"application/json, text/event-stream")]
        if token:
            self._headers.append((b"authorization", f"Bearer {token}".encode()))
        self._seconds = seconds
        self._connect_seconds = connect_seconds

    async def get(self, path: str, *, seconds: float = 10.0, optional: bool = False) -> Any:
        """The JSON of the response. With `optional`, None where the server has no such path."""
        return await self._request("GET", path, None, seconds, optional)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None, optional: bool = False
    ) -> Any:
        """As `get`."""
        return await self._request("POST", path, body, seconds, optional)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None, optional: bool
    ) -> Any:
        """The JSON of the response, or None if it is not JSON."""
        try:
            async with self._response(method, path, body, seconds) as response:
                return orjson.loads(await response.read())
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
                if (status := response.status) >= 400:
                    message = f"{self.url}{path} answered {status}: {_error_message(await response.read())}"
                    if status in (401, 403):
                        raise ConfigError(f"{message}; give the token the server was started with")
                    retryable = status >= 500 or status in RETRYABLE_STATUSES
                    raise ModelServerError(message, retryable=retryable, status=status)
                yield response
        except TransportError as error:
            retryable = error.reason not in ("tls", "proxy")  # Those persist until a setting is changed.
            raise ModelServerError(f"{self.url}{path}: {error} ({error.reason})", retryable=retryable) from error


# -- model servers -----------------------------------------------------------------------------------------------------


class HttpModelServer(JsonClient):
    """Client of one model server; subclasses speak the API of one program (`vllm`, `sglang`). A server
    that sends nothing for `seconds` while it samples has failed.

    The pool decides which server samples, what is retried, and which weights each gets; a client never retries. Every
    method raises ModelServerError."""

    supported_params: frozenset[str]
    """See `Engine.supported_params`."""
    kv_cache_metrics: tuple[str, ...]
    """The names of the metric that `kv_cache_usage` reads."""

    async def model_info(self) -> ServedModelInfo:
        """The served model. Raises ConfigError if the server names none."""
        cards: list[dict[str, Any]] = ((await self.get("/v1/models")) or {}).get("data", [])
        bases = [card for card in cards if not card.get("parent")]
        if not bases or not bases[0].get("max_model_len"):
            names = ", ".join(str(card.get("id")) for card in bases) or "none"
            raise ConfigError(f"{self.url}/v1/models names no model with its max_model_len: it serves {names}")
        adapters = frozenset(str(card["id"]) for card in cards if card.get("parent"))
        return ServedModelInfo(str(bases[0]["id"]), int(bases[0]["max_model_len"]), adapters)

    async def verify(self, *, weights_change: bool) -> None:
        """Raises ConfigError if the server was started in a way that gives wrong log-probabilities or, with
        `weights_change`, that does not let its weights be replaced. Default: it never is."""

    async def health(self) -> None:
        """Returns if the server can sample."""
        await self.get("/health", seconds=5.0)

    async def kv_cache_usage(self) -> float | None:
        """The share of its memory for keys and values that is in use; None if it does not report it."""
        async with self._response("GET", "/metrics", None, 5.0) as response:
            text = (await response.read()).decode("utf-8", errors="replace")
        return largest_metric(text, *self.kv_cache_metrics)

    async def sample(self, request: SampleRequest, on_chunk: OnChunk, *, stream: bool) -> Completion:
        """Sample one answer. `on_chunk` gets all of its tokens; with `stream`, as they are sampled. Cancelling the call
        ends the request on the server. Raises ContextLengthError if the prompt leaves no room."""
        raise NotImplementedError

    async def _complete(
        self, path: str, body: Mapping[str, Any], request: SampleRequest, read: Callable[[Any], Completion | None]
    ) -> Completion:
        """`sample` by a request whose response, or with `stream` in its body each of whose events, `read` passes on;
        it returns the end of the answer once it is known. A rejection of the request itself becomes ContextLengthError
        or ConfigError."""
        completion = None
        try:
            if not body["stream"]:
                completion = read(await self.post(path, body))
            else:
                async with aclosing(self.events(path, body)) as events:
                    async for event in events:
                        completion = read(event) or completion
        except ModelServerError as error:
            if error.status not in (400, 422):
                raise
            if CONTEXT_ERROR.search(str(error)):
                raise ContextLengthError(
                    f"the prompt has {len(request.prompt)} tokens, which leaves no room for an answer; shorten the"
                    f" prompt, or use a model with a longer context ({error})"
                ) from None
            raise ConfigError(f"the model server cannot sample with these parameters: {error}") from None
        if completion is None:
            raise self.protocol_error(path, "its answer has no end")
        return completion

    async def weight_label(self) -> str | None:
        """The label of the server's weights; None if it keeps none."""
        raise NotImplementedError

    async def load_weights(self, directory: Path, label: str, on_loaded: Callable[[], None]) -> None:
        """Replace the weights in place by those in `directory`. Running answers wait, then continue with the new
        weights; everything cached with the old ones is dropped. `on_loaded` is called right before they continue."""
        raise NotImplementedError

    async def load_adapter(self, name: str, directory: Path) -> None:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError


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
