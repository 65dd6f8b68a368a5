"""A client that is killed, suspended and cut off by the tests here: `program.py VERB URL HEARD [options]`.

It writes down what the store has acknowledged, one line of JSON in the file HEARD, in the moment it is told: what is in
the file must be in the store, whatever happened in between. URL is a server's address or a database.

work: makes rollouts and executes them with several tasks until SIGTERM, then executes what still waits, and ends.
hold: claims one rollout, adds a span, waits for a line on its standard input, adds another span and reports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from agentlightning.rollouts import AttemptedRollout, RolloutConfig
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase

T = TypeVar("T")

TEXT = "what an agent says, at some length " * 8


class Heard:
    """The acknowledgements, and the longest time one took."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.longest = 0.0

    async def timed(self, call: Awaitable[T]) -> T:
        started = time.monotonic()
        answer = await call
        self.longest = max(self.longest, time.monotonic() - started)
        return answer

    def write(self, kind: str, *ids: str, **more: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, "ids": ids, "pid": os.getpid(), **more}).encode() + b"\n")


def open_store(url: str) -> LightningStoreBase:
    if not url.startswith("http"):
        return LightningStore(url)
    from agentlightning.store.http.client import LightningStoreClient

    return LightningStoreClient(url)


class Client:
    """One process that makes rollouts and executes them."""

    def __init__(self, store: LightningStoreBase, options: argparse.Namespace) -> None:
        self.store, self.options, self.heard = store, options, Heard(options.heard)
        self.worker = f"worker-{os.getpid()}"
        self.config = RolloutConfig(max_attempts=options.attempts)
        self.stopping = asyncio.Event()

    async def work(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stopping.set)
        if self.options.lease is not None:  # before anything is claimed
            await self.store.update_worker(self.worker, lease_seconds=self.options.lease)
        beating = asyncio.create_task(self.beat())
        await asyncio.gather(*(self.repeat() for _ in range(self.options.tasks)))
        beating.cancel()
        self.heard.write("ended", longest=self.heard.longest)

    async def beat(self) -> None:
        while (lease := self.options.lease) is not None:
            await self.store.update_worker(self.worker, lease_seconds=lease)
            await asyncio.sleep(lease / 4)

    async def repeat(self) -> None:
        while True:
            ends = self.stopping.is_set()
            if not ends:
                made = await self.heard.timed(self.store.enqueue_rollout({"text": TEXT}, config=self.config))
                self.heard.write("made", made.rollout_id)
            claimed = await self.heard.timed(self.store.dequeue_rollout(self.worker, timeout=0.2))
            if claimed is not None:
                await self.execute(claimed)
            elif ends:
                return

    async def execute(self, claimed: AttemptedRollout) -> None:
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        self.heard.write("claimed", *ids)
        for step in range(3):
            span = await self.heard.timed(self.store.add_span(new_span(ids, step)))
            self.heard.write("span", *ids, span.span_id)
        await asyncio.sleep(self.options.pause)
        for span in await self.heard.timed(self.store.add_many_spans([new_span(ids, step) for step in range(3, 8)])):
            self.heard.write("span", *ids, span.span_id)
        attempt = await self.heard.timed(self.store.update_attempt(*ids, status="succeeded"))
        self.heard.write("superseded" if attempt.metadata.get("superseded") else "done", *ids)

    async def hold(self) -> None:
        await self.store.update_worker(self.worker, lease_seconds=self.options.lease)
        claimed = await self.store.dequeue_rollout(self.worker, timeout=60)
        assert claimed is not None
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        await self.store.add_span(new_span(ids, 1))
        self.heard.write("claimed", *ids)
        sys.stdin.readline()
        late = await self.store.add_span(new_span(ids, 2))
        attempt = await self.store.update_attempt(*ids, status="succeeded")
        self.heard.write("ended", *ids, attributes=late.attributes, status=attempt.status, metadata=attempt.metadata)


def new_span(ids: tuple[str, str], step: int) -> Span:
    now = time.time()
    return Span(*ids, "work", now, now, attributes={"step": step, "text": TEXT})


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["work", "hold"])
    parser.add_argument("url")
    parser.add_argument("heard")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--lease", type=float)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that the agent of a rollout takes")
    options = parser.parse_args()
    store = open_store(options.url)
    try:
        await getattr(Client(store, options), options.verb)()
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
