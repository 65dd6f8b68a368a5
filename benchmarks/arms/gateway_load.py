"""Agents at work: each has an attempt of its own, thinks, calls, reads the whole answer, and thinks again.

    python benchmarks/arms/gateway_load.py --seconds 10 [--user agent] URL URL ...   (one URL an agent)

Without a user they do not think, and the stub answers at once. The prompts of a "reader" grow from 2 to 60 KB and begin
anew (see gateway_stub.py for the answers). Prints calls, errors and the latencies of
the calls as JSON. Raw asyncio and httptools, so that it is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time

import httptools
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


class Agent(asyncio.Protocol):
    """One connection with one call under way."""

    def __init__(self, url: str, user: str | None) -> None:
        self.host, port, self.path = re.fullmatch(r"http://([^:/]+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
        self.port, self.latencies, self.errors = int(port), list[float](), 0
        self._turns, self._user = random.randrange(MAX_TURNS), user

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(exc or ConnectionError("closed"))

    def on_message_complete(self) -> None:
        self._answered.set_result(self._parser.get_status_code())

    def _request(self) -> bytes:
        body = BODY | ({"user": self._user} if self._user else {})
        if self._user == "reader":
            self._turns = self._turns % MAX_TURNS + 1
            turns = [
                {"role": "assistant" if each % 2 else "user", "content": "Seven times six. " * (TURN_BYTES // 17)}
                for each in range(self._turns)
            ]
            body["messages"] = [*BODY["messages"], *turns]  # type: ignore[misc]
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def work(self, end: float) -> None:
        loop, think = asyncio.get_running_loop(), THINK_SECONDS if self._user else 0.0
        await asyncio.sleep(random.uniform(0, think))
        await loop.create_connection(lambda: self, self.host, self.port)
        while time.perf_counter() < end:
            self._answered, self._parser = loop.create_future(), httptools.HttpResponseParser(self)
            request, began = self._request(), time.perf_counter()
            self._transport.write(request)  # type: ignore[attr-defined]
            status = await self._answered
            self.latencies.append(time.perf_counter() - began)
            self.errors += status != 200
            if think:
                await asyncio.sleep(think * random.uniform(0.5, 1.5))
        self._transport.close()  # type: ignore[attr-defined]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--user", choices=["agent", "reader"], default=None)
    options = parser.parse_args()
    agents = [Agent(url, options.user) for url in options.urls]
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
