"""Agents at work: each has an attempt of its own, thinks, calls, reads the whole answer, and thinks again.

    python benchmarks/arms/gateway_load.py --seconds 10 [--user agent] [--stream] URL URL ...   (one URL an agent)
    python benchmarks/arms/gateway_load.py --seconds 10 --rollouts URL URL ...   (the server's, one for each worker)

Without a user they do not think, and the stub answers at once. The prompts of a "reader" grow from 2 to 60 KB and begin
anew (see gateway_stub.py for the answers). With --rollouts, each starts a rollout over HTTP, makes three calls in it
without a pause, says that it has succeeded, and starts another one; a "call" is then a rollout. Prints calls, errors
and the latencies of the calls as JSON. Raw asyncio and httptools, so that it is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import time

import httptools
import orjson
import uvloop

BODY = {
    "model": "stub",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is six times seven, and why does everybody ask?"},
    ],
    "temperature": 1.0,
    "max_tokens": 64,
    "logprobs": True,
    "return_token_ids": True,
}
TURN_BYTES, MAX_TURNS = 2000, 30
THINK_SECONDS = 0.3


@functools.cache
def prompt(user: str | None, streams: bool, turns: int) -> bytes:
    body = BODY | ({"user": user} if user else {}) | ({"stream": True} if streams else {})
    content = "Seven times six. " * (TURN_BYTES // 17)
    history = [{"role": "assistant" if each % 2 else "user", "content": content} for each in range(turns)]
    return orjson.dumps(body | {"messages": [*BODY["messages"], *history]})  # type: ignore[misc]


class Agent(asyncio.Protocol):
    """One connection with one call under way."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.host, port, self.path = re.fullmatch(r"http://([^:/]+):(\d+)(/?.*)", url).groups()  # type: ignore[union-attr]
        self.port, self.latencies, self.errors = int(port), list[float](), 0
        self._turns, self._user, self._streams = random.randrange(MAX_TURNS), options.user, options.stream
        self._one = self._rollout if options.rollouts else self._call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def on_body(self, body: bytes) -> None:
        self._body += body

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(exc or ConnectionError("closed"))

    def on_message_complete(self) -> None:
        self._answered.set_result(self._parser.get_status_code())

    def _prompt(self) -> bytes:
        if self._user == "reader":
            self._turns = self._turns % MAX_TURNS + 1
        return prompt(self._user, self._streams, self._turns if self._user == "reader" else 0)

    async def _post(self, path: str, data: bytes) -> bytes:
        """The answer's body; one that is not a success is counted."""
        self._answered, self._parser = asyncio.get_running_loop().create_future(), httptools.HttpResponseParser(self)
        self._body = b""
        head = f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)  # type: ignore[attr-defined]
        self.errors += await self._answered not in (200, 201)
        return self._body

    async def _call(self) -> None:
        await self._post(self.path, self._prompt())

    async def _rollout(self) -> None:
        started = json.loads(await self._post("/v1/agl/rollouts", b'{"input":{"question":"6*7"}}'))
        rollout, attempt = started["rollout_id"], started["attempt"]["attempt_id"]
        for _ in range(3):
            await self._post(f"/rollout/{rollout}/attempt/{attempt}/v1/chat/completions", self._prompt())
        await self._post(f"/v1/agl/rollouts/{rollout}/attempts/{attempt}", b'{"status":"succeeded"}')

    async def work(self, end: float) -> None:
        loop, think = asyncio.get_running_loop(), THINK_SECONDS if self._user else 0.0
        await asyncio.sleep(random.uniform(0, think))
        await loop.create_connection(lambda: self, self.host, self.port)
        while time.perf_counter() < end:
            began = time.perf_counter()
            await self._one()
            self.latencies.append(time.perf_counter() - began)
            if think:
                await asyncio.sleep(think * random.uniform(0.5, 1.5))
        self._transport.close()  # type: ignore[attr-defined]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--user", choices=["agent", "reader"], default=None)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--rollouts", action="store_true")
    options = parser.parse_args()
    agents = [Agent(url, options) for url in options.urls]
    began = time.perf_counter()
    await asyncio.gather(*(each.work(began + options.seconds) for each in agents))
    latencies = sorted(latency for each in agents for latency in each.latencies)
    figures = {"calls": len(latencies), "errors": sum(each.errors for each in agents)}
    figures |= {"rate": len(latencies) / (time.perf_counter() - began)}
    figures |= {
        name: 1e3 * latencies[int(share * (len(latencies) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    uvloop.run(main())
