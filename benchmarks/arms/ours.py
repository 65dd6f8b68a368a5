"""Our arm: the store in process, over HTTP, and rollouts end to end. See line.py for the protocol."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from subprocess import Popen
from typing import Any

from line import ATTRIBUTES, SPANS, announced, drive, fill, fresh, serve, serving

from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase

TASK = {"question": "What is 6 x 7?"}
_numbers = count()


def make_spans(ids: tuple[str, str], number: int = SPANS) -> list[Span]:
    return [
        Span(*ids, "chat policy", 1e9, 1e9 + 1, attributes=ATTRIBUTES[next(_numbers) % len(ATTRIBUTES)])
        for _ in range(number)
    ]


async def cycle(store: LightningStoreBase, batched: bool) -> int:
    await store.enqueue_rollout(TASK)
    claimed = await store.dequeue_rollout(timeout=10)
    assert claimed is not None
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    spans = make_spans(ids)
    if batched:
        await store.add_many_spans(spans)
    else:
        for span in spans:
            await store.add_span(span)
    await store.update_attempt(*ids, status="succeeded")
    assert len(await store.query_spans(ids[0])) == SPANS
    return 1


@asynccontextmanager
async def opened(url: str, directory: str | None) -> AsyncIterator[LightningStoreBase]:
    """A new store: `url` is "file" (in `directory`), ":memory:" or the address of a PostgreSQL database."""
    folder = tempfile.mkdtemp(prefix="agl-bench-", dir=directory)
    store = LightningStore(Path(folder) / "store.db" if url == "file" else url)
    try:
        yield store
    finally:
        await store.close()
        shutil.rmtree(folder)


async def cycles(
    url: str, batched: bool, callers: int, seconds: float, directory: str | None = None
) -> dict[str, float]:
    async with opened(url, directory) as store:
        return await drive(lambda _: cycle(store, batched), callers, seconds)


async def memory(url: str, spans: int, directory: str | None = None) -> Any:
    async with opened(url, directory) as store:

        async def kept() -> str:
            claimed = await store.start_rollout(TASK)
            ids = claimed.rollout_id, claimed.attempt.attempt_id
            made = [replace(span, attributes=fresh(span.attributes)) for span in make_spans(ids)]
            await store.add_many_spans(made)
            await store.update_attempt(*ids, status="succeeded")
            return ids[0]

        return await fill(kept, store.query_spans, spans // SPANS)


# -- over HTTP -------------------------------------------------------------------------------------------------------


@contextmanager
def hub(folder: Path, database: str) -> Iterator[tuple[Popen[bytes], str]]:
    """`agl serve` in a process of its own, and its address."""
    log = folder / "server.log"
    command = [str(Path(sys.executable).with_name("agl")), "serve", "--port", "0", "--store", database]

    def health() -> str | None:
        url = announced(log)
        return url and f"{url}/health"

    with log.open("wb") as output, serving(command, health, cwd=folder, stdout=output) as process:
        url = announced(log)
        assert url is not None
        yield process, url


@asynccontextmanager
async def client(database: str, directory: str | None) -> AsyncIterator[LightningStoreBase]:
    """A client of `agl serve` in a process of its own on a new database."""
    from agentlightning.store.http.client import LightningStoreClient

    folder = tempfile.mkdtemp(prefix="agl-bench-", dir=directory)
    where = str(Path(folder) / "store.db") if database == "file" else database
    try:
        with hub(Path(folder), where) as (_, url):
            store = LightningStoreClient(url)
            try:
                yield store
            finally:
                await store.close()
    finally:
        shutil.rmtree(folder)


async def http_cycles(
    batched: bool, callers: int, seconds: float, database: str = "file", directory: str | None = None
) -> dict[str, float]:
    async with client(database, directory) as store:
        return await drive(lambda _: cycle(store, batched), callers, seconds)


async def http_spans(
    batch: int, callers: int, seconds: float, database: str = "file", directory: str | None = None
) -> dict[str, float]:
    """Spans into attempts that run, one attempt for each caller; `batch` of them in a call."""
    async with client(database, directory) as store:
        return await drive(await adder(store, batch, callers), callers, seconds)


async def adder(store: LightningStoreBase, batch: int, callers: int) -> Callable[[int], Awaitable[int]]:
    started = [await store.start_rollout(TASK) for _ in range(callers)]
    ids = [(each.rollout_id, each.attempt.attempt_id) for each in started]

    async def add(caller: int) -> int:
        spans = make_spans(ids[caller], batch)
        await (store.add_span(spans[0]) if batch == 1 else store.add_many_spans(spans))
        return batch

    return add


# -- end to end ------------------------------------------------------------------------------------------------------


def trivial(task: Any) -> float:
    return 1.0


async def rollouts(
    number: int, hosts: int, concurrency: int, fresh_process: bool = False, directory: str | None = None
) -> dict[str, float]:
    """Trivial agents on a durable file, the runner in this process; with `fresh_process` each one in its own."""
    from agentlightning.runner import Runner

    async with opened("file", directory) as store:
        runner = Runner(
            store,
            trivial,
            secret="bench",
            server_url="http://127.0.0.1:9",
            redirect=False,
            hosts=hosts,
            concurrency=concurrency,
            fresh_process=fresh_process,
        )
        await runner.start()
        try:
            await finish(store, 4 * concurrency)
            started = time.perf_counter()
            await finish(store, number)
            return {"rollouts_per_second": number / (time.perf_counter() - started)}
        finally:
            await runner.stop()


async def finish(store: LightningStoreBase, number: int) -> None:
    ids = [made.rollout_id for made in await store.enqueue_many_rollouts([EnqueueRolloutRequest(TASK)] * number)]
    done = await store.wait_for_rollouts(rollout_ids=ids)
    assert all(rollout.status == "succeeded" for rollout in done)
    assert len(await store.query_spans(ids[-1])) == 1  # the reward


# -- spans alone -----------------------------------------------------------------------------------------------------


async def spans(batch: int, callers: int, seconds: float, url: str = "file", directory: str | None = None) -> Any:
    async with opened(url, directory) as store:
        return await drive(await adder(store, batch, callers), callers, seconds)


if __name__ == "__main__":
    serve([cycles, rollouts, memory, spans, http_cycles, http_spans])
