"""Somebody else's model server without a model: it answers over HTTP what a test tells it to, and misbehaves on demand.

    async with ScriptedProvider([Reply(chat_answer("Hello."))]) as provider:      # one reply for each call
        ... Provider(name="them", base_urls=(provider.url + "/v1",))
    async with ScriptedProvider(lambda seen: Reply(status=500)) as provider:      # or made from the request

`seen` keeps what was asked. `chat_events`, `response_events` and `messages_events` are streams as OpenAI's and
Anthropic's servers send them. Without a model it needs no torch; it speaks as much HTTP as our clients do.
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
    return head | {"choices": [choice], "usage": _chat_usage(usage)} | more


def chat_events(
    pieces: Sequence[str], calls: Sequence[Json] = (), usage: tuple[int, int] = (10, 5), thought: str = ""
) -> list[bytes]:
    """A stream of chat completions. The arguments of each call come in two parts."""
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": thought}] if thought else []
    deltas += [{"content": piece} for piece in pieces]
    for index, call in enumerate(calls):
        function, half = call["function"], len(call["function"]["arguments"]) // 2
        parts = function["arguments"][:half], function["arguments"][half:]
        begun = {"index": index, "id": call["id"], "type": "function"}
        deltas.append({"tool_calls": [begun | {"function": {"name": function["name"], "arguments": parts[0]}}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": parts[1]}}]})
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "theirs-2026"}
    reason = "tool_calls" if calls else "stop"
    chunks: list[Json] = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append(head | {"choices": [], "usage": _chat_usage(usage)})
    return [*(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


def messages_answer(blocks: Sequence[Json], usage: tuple[int, int] = (10, 5)) -> Json:
    """A whole answer of Anthropic's messages."""
    reason = "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-theirs"}
    used = {"input_tokens": usage[0], "output_tokens": usage[1]}
    return head | {"content": list(blocks), "stop_reason": reason, "stop_sequence": None, "usage": used}


def messages_events(blocks: Sequence[Json], usage: tuple[int, int] = (10, 5)) -> list[bytes]:
    """A stream of Anthropic's messages; texts, thoughts and arguments come in two parts."""
    whole = messages_answer(blocks, usage)
    begun = whole | {"content": [], "stop_reason": None, "usage": {"input_tokens": usage[0], "output_tokens": 1}}
    events: list[Json] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(blocks):
        empty, deltas = _block_events(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": stop, "usage": {"output_tokens": usage[1]}})
    events.append({"type": "message_stop"})
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events]


def _block_events(block: Json) -> tuple[Json, list[Json]]:
    if block["type"] == "redacted_thinking":
        return block, []
    if block["type"] == "tool_use":
        arguments = orjson.dumps(block["input"]).decode()
        return block | {"input": {}}, [
            {"type": "input_json_delta", "partial_json": part} for part in _halves(arguments)
        ]
    kind = block["type"]
    deltas: list[Json] = [{"type": f"{kind}_delta", kind: part} for part in _halves(block[kind])]
    if block.get("signature"):
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    return block | {kind: ""} | ({"signature": ""} if "signature" in block else {}), deltas


def _halves(text: str) -> list[str]:
    half = len(text) // 2
    return [part for part in (text[:half], text[half:]) if part]


def response_answer(items: Sequence[Json], usage: tuple[int, int] = (10, 5), **more: Any) -> Json:
    """A whole answer of OpenAI's responses. `items` are its output on the wire."""
    used = {"input_tokens": usage[0], "output_tokens": usage[1], "total_tokens": sum(usage)}
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": "theirs-2026", "status": "completed"}
    return head | {"error": None, "incomplete_details": None, "output": list(items), "usage": used} | more


def response_events(items: Sequence[Json], usage: tuple[int, int] = (10, 5)) -> list[bytes]:
    """A stream of OpenAI's responses; texts, summaries of thoughts and arguments come in two parts."""
    whole = response_answer(items, usage)
    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    events: list[Json] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for index, item in enumerate(items):
        growing, deltas = _item_events(item)
        place = {"output_index": index, "item_id": item["id"]}
        events.append({"type": "response.output_item.added", "output_index": index, "item": growing})
        events += [place | delta for delta in deltas]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": whole})
    numbered: list[Json] = [event | {"sequence_number": number} for number, event in enumerate(events)]
    return [b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in numbered]


def _item_events(item: Json) -> tuple[Json, list[Json]]:
    """(an item as it begins, the events that show it growing)."""
    if item["type"] == "function_call":
        arguments = item["arguments"]
        done = {"arguments": arguments, "name": item["name"]}
        return item | {"arguments": ""}, _growing("function_call_arguments", arguments, {}, done)
    if item["type"] == "reasoning":
        events: list[Json] = []
        for index, part in enumerate(item["summary"]):
            events += _part_events("reasoning_summary", "reasoning_summary_text", part, {"summary_index": index})
        return item | {"summary": []}, events
    (part,) = item["content"]
    return item | {"content": []}, _part_events("content", "output_text", part, {"content_index": 0}, {"logprobs": []})


def _part_events(part_kind: str, kind: str, part: Json, place: Json, more: Json | None = None) -> list[Json]:
    """A part of an item, from its beginning to its end."""
    text, more = part["text"], more or {}
    return [
        {"type": f"response.{part_kind}_part.added", "part": part | {"text": ""}} | place,
        *_growing(kind, text, place | more, {"text": text}),
        {"type": f"response.{part_kind}_part.done", "part": part} | place,
    ]


def _growing(kind: str, text: str, more: Json, done: Json) -> list[Json]:
    deltas: list[Json] = [{"type": f"response.{kind}.delta", "delta": half} | more for half in _halves(text)]
    return [*deltas, {"type": f"response.{kind}.done"} | done | more]


def _chat_usage(usage: tuple[int, int]) -> Json:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
