"""One model server: what an engine of several servers asks of each, and the HTTP they have in common.

A `Backend` speaks one server's own paths (`policy.vllm`, `policy.sglang`). It is called by `policy.replicas`, which
decides which server is asked, what is asked again, and who gets which weights. A backend repeats nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from agentlightning.engine.base import FinishReason, SamplingParams
from agentlightning.errors import AgentLightningError, ConfigError, ContextLengthError, PolicyError
from agentlightning.transport import Response, Transport, TransportError
from agentlightning.weight_sync.base import Courier, Lend

SAID = 300
"""Characters of a server's own words that an error quotes."""
TRANSIENT = frozenset({408, 409, 425, 429})
"""Refusals that another server, or the same one later, may not repeat; so may all from 500 on."""


class BackendError(PolicyError):
    """A server that gave no answer, or not all of it."""

    def __init__(self, message: str, *, again: bool, status: int | None = None) -> None:
        super().__init__(message)
        self.again = again
        """Whether another server may do better."""
        self.status = status


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to be drawn."""

    model: str
    """The name of the model, or of an adapter, on the server."""
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    """Each ends the answer, and is part of it."""
    adapter: bool = False
    """Whether `model` is an adapter."""


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place, likeliest first."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some more tokens of an answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Top, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended."""

    finish_reason: FinishReason
    weights: tuple[tuple[str, int], ...] = ()
    """(label of the weights, tokens they drew), in order; empty where the server does not say."""


Receive = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says it serves."""

    model: str
    context_length: int
    adapters: frozenset[str] = field(default_factory=frozenset[str])


class Backend(Protocol):
    """One server. All of its methods raise BackendError."""

    supported_params: frozenset[str]
    """What of `DISTRIBUTION_PARAMS` it draws with, its log-probabilities too."""

    @property
    def url(self) -> str: ...

    async def served(self) -> Served:
        """The model it serves. Raises ConfigError where it serves none of the name asked for."""
        ...

    async def check(self, *, weights_change: bool) -> None:
        """Raises ConfigError where it was started in a way that gives wrong log-probabilities or, with
        `weights_change`, that does not let its weights be replaced."""
        ...

    async def health(self) -> None:
        """Returns when the server can draw."""
        ...

    async def draw(self, ask: Ask, receive: Receive, *, stream: bool) -> End:
        """Draw one answer. `receive` gets all of it, with `stream` as it is drawn. Cancelling frees the server.

        Raises ContextLengthError where the prompt leaves no room."""
        ...

    async def label(self) -> str | None:
        """The label of the weights it has; None where it keeps none."""
        ...

    async def load(self, directory: Path, label: str, ready: Callable[[], None]) -> None:
        """Replace the weights by those in `directory`, in place. Answers being drawn wait, and go on with the new
        weights; what was computed with the old ones is forgotten. `ready` is called right before they go on."""
        ...

    async def load_adapter(self, name: str, directory: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...


class Receiver(Backend, Protocol):
    """A server that also takes weights without the disk."""

    async def join(self, courier: Courier) -> None:
        """Have its workers meet `courier`. Raises ConfigError where it was not started for that."""
        ...

    async def receive(self, courier: Courier, lend: Lend, label: str, ready: Callable[[], None]) -> None:
        """As `load`, with weights that `courier` brings from where `lend` shows them. Where that fails the server may
        hold half of each until `load` or `receive` succeeds."""
        ...

    async def forget_half(self) -> None:
        """Let go of what came of a transfer that broke off. Returns once the server waits for no more of it."""
        ...


class Http:
    """JSON over HTTP to one server. `seconds` is the longest silence in an answer that is being drawn."""

    def __init__(
        self, transport: Transport, url: str, token: str | None, *, seconds: float, connect_seconds: float
    ) -> None:
        self.url = url.rstrip("/")
        self._transport = transport
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"application/json, text/event-stream")]
        if token:
            self._headers.append((b"authorization", f"Bearer {token}".encode()))
        self._seconds = seconds
        self._connect = connect_seconds

    async def get(self, path: str, *, seconds: float = 10.0) -> Any:
        return await self.call("GET", path, seconds=seconds)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None) -> Any:
        return await self.call("POST", path, body, seconds=seconds)

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> Any:
        """The JSON answered, or None where there was no JSON."""
        async with self._asked(method, path, body, seconds) as answer:
            content = await answer.read()
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError:
            return None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The JSON of each server-sent event, up to `[DONE]`. Raises BackendError where the stream breaks off."""
        done = False
        async with self._asked("POST", path, body, None) as answer:
            async for data in _events(answer.chunks()):
                if done or data == b"[DONE]":
                    done = True  # What is left is read too: the connection is then good for the next call.
                    continue
                try:
                    event = orjson.loads(data)
                except orjson.JSONDecodeError:
                    raise self.broken(path, f"an event that is not JSON: {_said(data)}") from None
                yield event
        if not done:
            raise self.broken(path, "its stream ended before the answer did")

    def broken(self, path: str, what: str) -> BackendError:
        return BackendError(f"{self.url}{path}: {what}", again=True)

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None
    ) -> AsyncGenerator[Response]:
        silence = self._seconds if seconds is None else seconds
        try:
            answer = await self._transport.send(
                method,
                self.url + path,
                self._headers,
                b"" if body is None else orjson.dumps(body),
                connect_seconds=min(self._connect, silence),
                timeout_seconds=silence,
            )
            async with answer:
                if answer.status >= 400:
                    raise self._refused(path, answer.status, await answer.read())
                yield answer
        except TransportError as error:
            again = error.reason not in ("tls", "proxy")  # they stay as they are until a setting is changed
            raise BackendError(f"{self.url}{path}: {error} ({error.reason})", again=again) from error

    def _refused(self, path: str, status: int, content: bytes) -> AgentLightningError:
        message = f"{self.url}{path} answered {status}: {_said(content)}"
        if status in (401, 403):
            return ConfigError(f"{message}; give the token the server was started with")
        return BackendError(message, again=status >= 500 or status in TRANSIENT, status=status)


TOO_LONG = ("maximum model length", "maximum context length", "longer than the model's context", "context length")


def refusal(error: BackendError, ask: Ask) -> AgentLightningError:
    """The error that a failure of `ask` is for those who asked."""
    if error.status not in (400, 422):
        return error
    if any(words in str(error) for words in TOO_LONG):
        return ContextLengthError(
            f"the prompt has {len(ask.prompt)} tokens, which leaves no room for an answer; shorten the prompt, or use "
            f"a model with a longer context ({error})"
        )
    return ConfigError(f"the model server cannot draw what was asked: {error}")


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _said(content: bytes) -> str:
    """The message in a server's error, however it is wrapped."""
    try:
        value: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        value = content.decode("utf-8", errors="replace")
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if value.get(key)), orjson.dumps(value))
    text = value.decode() if isinstance(value, bytes) else str(value)
    return text if len(text) <= SAID else text[:SAID] + "..."
