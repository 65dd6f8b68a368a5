"""A model server: a chat completion with token ids and log-probabilities, or a stream of it.

    python benchmarks/arms/gateway_stub.py [--tokens 16] [--pieces 20] [--pause 0]

It answers at once with 2 KB; after 1 to 3 s to the user "agent"; after 1 to 3 s with 300 tokens to the user "reader",
who may have them as a stream of 300 events in that time. As an engine that decodes all its requests together, it sends
the events of all streams at its steps, every 10 ms. Prints its URL and ends with its standard input. Raw asyncio and
httptools, so that it is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

import httptools
import orjson
import uvloop

ANSWER_SECONDS, READER_TOKENS, STEP_SECONDS = (1.0, 3.0), 300, 0.01


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
    """The chunks of a stream of so many pieces, each with so many tokens."""
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
    lines = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    return [b"%x\r\n%s\r\n" % (len(line), line) for line in lines] + [b"0\r\n\r\n"]


class Steps:
    """Sends the events of all streams that are due, step by step."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._ticking = False

    def add(self, stream: Stream) -> None:
        self._streams.add(stream)
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(STEP_SECONDS, self._step)

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._streams = {each for each in self._streams if each.advance(now)}
        self._ticking = bool(self._streams)
        if self._ticking:
            loop.call_later(STEP_SECONDS, self._step)


class Stream:
    def __init__(self, transport: asyncio.WriteTransport, events: list[bytes], seconds: float) -> None:
        self._transport, self._events, self._seconds = transport, events, seconds
        self._began, self._sent = asyncio.get_running_loop().time(), 0
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def advance(self, now: float) -> bool:
        """Sends the events that are due; whether there are more."""
        share = (now - self._began) / self._seconds if self._seconds else 1.0
        due = min(len(self._events), int(share * len(self._events)))
        if due > self._sent:
            self._transport.write(b"".join(self._events[self._sent : due]))
            self._sent = due
        return due < len(self._events) and not self._transport.is_closing()


class Stub(asyncio.Protocol):
    def __init__(self, answers: dict[str, bytes], events: dict[str, list[bytes]], seconds: float, steps: Steps) -> None:
        self._answers, self._events, self._seconds, self._steps = answers, events, seconds, steps

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body: list[bytes] = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        user = next((each for each in ("reader", "agent") if b'"user":"%s"' % each.encode() in body), "")
        seconds = random.uniform(*ANSWER_SECONDS)
        if b'"stream":true' in body:
            self._steps.add(Stream(self._transport, self._events[user], seconds if user else self._seconds))
        elif user:
            asyncio.get_running_loop().call_later(seconds, self._transport.write, self._answers[user])
        else:
            self._transport.write(self._answers[user])


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between the pieces of a stream")
    options = parser.parse_args()
    whole, events = response(options.tokens), pieces(options.tokens, options.pieces)
    answers = {"": whole, "agent": whole, "reader": response(READER_TOKENS)}
    streams = {"": events, "agent": events, "reader": pieces(1, READER_TOKENS)}
    seconds, steps = options.pause * options.pieces, Steps()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stub(answers, streams, seconds, steps), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
