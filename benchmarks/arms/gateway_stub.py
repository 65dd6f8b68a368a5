"""A model server: a chat completion with token ids and log-probabilities, or a stream of it.

    python benchmarks/arms/gateway_stub.py [--tokens 16] [--pieces 20] [--pause 0]

It answers at once with 2 KB; after 1.2 s to the user "agent"; after 1.2 s with 300 tokens to the user "reader", who may
have them as a stream of 300 events in 1.2 s. Prints its URL and ends with its standard input. Raw asyncio and
httptools, so that it is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import httptools
import orjson
import uvloop

ANSWER_SECONDS, READER_TOKENS = 1.2, 300


def chat_completion(tokens: int) -> dict:
    ids = list(range(1000, 1000 + tokens))
    logprobs = [
        {"token": f"t{each}", "logprob": -0.25 - each / 7e4, "bytes": [116], "top_logprobs": []} for each in ids
    ]
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1763750000,
        "model": "stub",
        "prompt_token_ids": list(range(64)),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The answer is forty-two, as everybody knows. " * 3},
                "finish_reason": "stop",
                "logprobs": {"content": logprobs},
                "token_ids": ids,
            }
        ],
        "usage": {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens},
    }


def response(tokens: int) -> bytes:
    body = orjson.dumps(chat_completion(tokens))
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def pieces(tokens: int, count: int) -> list[bytes]:
    """The events of a stream of so many pieces, each with so many tokens."""
    whole = chat_completion(tokens)
    head = {"id": whole["id"], "object": "chat.completion.chunk", "created": whole["created"], "model": "stub"}
    logged = whole["choices"][0]["logprobs"]["content"]
    events = []
    for number in range(count):
        ids = [number * tokens + place for place in range(tokens)]
        choice = {"index": 0, "delta": {"content": f"piece {number} "}, "finish_reason": None}
        choice |= {"logprobs": {"content": logged}, "token_ids": ids}
        events.append(head | {"choices": [choice]} | ({} if number else {"prompt_token_ids": list(range(64))}))
    events.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    used = {"prompt_tokens": 64, "completion_tokens": tokens * count, "total_tokens": 64 + tokens * count}
    events.append(head | {"choices": [], "usage": used})
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


class Stub(asyncio.Protocol):
    def __init__(self, whole: bytes, long: bytes, events: list[bytes], long_events: list[bytes], pause: float) -> None:
        self._whole, self._long, self._events, self._long_events, self._pause = whole, long, events, long_events, pause

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._stream: asyncio.Task | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        reads = b'"user":"reader"' in self._body
        if b'"stream":true' in self._body:
            pause = ANSWER_SECONDS / READER_TOKENS if reads else self._pause
            self._stream = asyncio.ensure_future(self._send_events(self._long_events if reads else self._events, pause))
        elif b'"user":"agent"' in self._body:
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._transport.write, self._whole)
        elif reads:
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._transport.write, self._long)
        else:
            self._transport.write(self._whole)

    async def _send_events(self, events: list[bytes], pause: float) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        began = time.perf_counter()
        for number, event in enumerate(events, 1):
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            await asyncio.sleep(max(0.0, began + number * pause - time.perf_counter()) if pause else 0)
        self._transport.write(b"0\r\n\r\n")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between the pieces of a stream")
    options = parser.parse_args()
    whole, long = response(options.tokens), response(READER_TOKENS)
    events, long_events = pieces(options.tokens, options.pieces), pieces(1, READER_TOKENS)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Stub(whole, long, events, long_events, options.pause), "127.0.0.1", 0, backlog=2048
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
