"""Somebody else's model server without a model: it answers over HTTP what a test tells it to, and misbehaves on demand.

    async with ScriptedProvider([Reply(chat_answer("Hello."))]) as provider:      # one reply for each call
        ... Provider(name="them", base_urls=(provider.url + "/v1",))
    async with ScriptedProvider(lambda seen: Reply(status=500)) as provider:      # or made from the request

`seen` keeps what was asked. Without a model it needs no torch; it speaks as much HTTP as our clients do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import orjson

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes

    @property
    def json(self) -> Json:
        return orjson.loads(self.body)


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent, and how it ends."""

    body: Json | bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    events: Sequence[bytes] | None = None
    """A stream instead of the body."""
    end: Literal["whole", "close", "hang"] = "whole"
    """close: the connection is closed where the answer should go on; hang: nothing more is sent."""
    head: bool = True
    """False: it ends before the first byte."""
    seconds: float = 0.0
    """How long it takes."""


class ScriptedProvider:
    """Use as `async with`. GET requests (for health and models) are answered with status 200 and are not in `seen`."""

    def __init__(self, script: Iterable[Reply] | Callable[[Seen], Reply], healthy: bool = True) -> None:
        self.seen: list[Seen] = []
        self.probes = 0
        """GET requests answered."""
        self.hung_up = asyncio.Event()
        """Somebody closed a connection whose answer was not whole."""
        self.healthy = healthy
        self.models: Callable[[Seen], Reply] | None = None
        """Answers what asks for models; None: `{}`."""
        self.responses: Callable[[Seen], Reply] | None = None
        """Answers what asks for a response that was kept; None: `{}`."""
        self._script = script if callable(script) else iter(list(script))
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> Self:
        """Listen; after `stop`, on the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Close every connection and refuse new ones."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (seen := await _read(reader)) is not None and await self._answer(seen, reader, writer):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        if seen.method == "GET":
            self.probes += 1
            reply = Reply(status=200 if self.healthy else 503)
            if self.models is not None and "/models" in seen.path:
                reply = self.models(seen)
            if self.responses is not None and "/responses/" in seen.path:
                reply = self.responses(seen)
        else:
            self.seen.append(seen)
            reply = self._script(seen) if callable(self._script) else next(self._script, Reply(status=500))
        await asyncio.sleep(reply.seconds)
        if reply.head:
            await _send(writer, reply)
        if reply.end == "hang":
            await reader.read()
            self.hung_up.set()
        return reply.end == "whole"


async def _read(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, body)


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    body = reply.body if isinstance(reply.body, bytes) else orjson.dumps(reply.body)
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if reply.events is not None:
        headers = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
    lines = [
        f"HTTP/1.1 {reply.status} Scripted",
        *(f"{name}: {value}" for name, value in (headers | reply.headers).items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    if reply.events is None:
        writer.write(body if reply.end == "whole" else body[: len(body) // 2])
    for event in reply.events or ():
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
    if reply.events is not None and reply.end == "whole":
        writer.write(b"0\r\n\r\n")
    await writer.drain()


# -- what providers say ------------------------------------------------------------------------------------------------


def chat_answer(text: str | None, calls: Sequence[Json] = (), usage: tuple[int, int] = (10, 5), **more: Any) -> Json:
    """A whole answer of chat completions. `calls` are tool calls on the wire."""
    message: Json = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
    reason = "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "theirs-2026"}
    return head | {"choices": [choice], "usage": chat_usage(usage)} | more


def chat_usage(usage: tuple[int, int]) -> Json:
    """As chat completions count (prompt tokens, completion tokens)."""
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
