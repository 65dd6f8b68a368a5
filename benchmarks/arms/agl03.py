"""The arm of Agent Lightning 0.3.0; runs in its own environment (benchmarks/peers.sh). See line.py for the protocol."""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its table of prices on import

from agentlightning.types import OtelResource, Span, TraceStatus
from line import ATTRIBUTES, SPANS, drive, fill, free_port, fresh, serve, serving

from agentlightning import InMemoryLightningStore
from agentlightning.store import LightningStoreClient

TASK = {"question": "What is 6 x 7?"}
_numbers = count()


def make_spans(ids: tuple[str, str], number: int = SPANS, first: int = 1) -> list[Span]:
    return [
        Span(
            rollout_id=ids[0],
            attempt_id=ids[1],
            sequence_id=first + index,
            trace_id=f"{next(_numbers):032x}",
            span_id=f"{next(_numbers):016x}",
            parent_id=None,
            name="chat policy",
            status=TraceStatus(status_code="OK"),
            attributes=ATTRIBUTES[next(_numbers) % len(ATTRIBUTES)],
            events=[],
            links=[],
            start_time=1e9,
            end_time=1e9 + 1,
            context=None,
            parent=None,
            resource=OtelResource(attributes={}, schema_url=""),
        )
        for index in range(number)
    ]


async def cycle(store: Any, batched: bool) -> int:
    await store.enqueue_rollout(TASK)
    claimed = await store.dequeue_rollout(worker_id="bench")
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


async def cycles(batched: bool, callers: int, seconds: float, thread_safe: bool = False) -> dict[str, float]:
    store = InMemoryLightningStore(thread_safe=thread_safe)
    return await drive(lambda _: cycle(store, batched), callers, seconds)


async def memory(spans: int) -> Any:
    store = InMemoryLightningStore()

    async def kept() -> str:
        claimed = await store.start_rollout(TASK)
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        made = [span.model_copy(update={"attributes": fresh(span.attributes)}) for span in make_spans(ids)]
        await store.add_many_spans(made)
        await store.update_attempt(*ids, status="succeeded")
        return ids[0]

    return await fill(kept, store.query_spans, spans // SPANS)


# -- over HTTP -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def client() -> Any:
    """A client of its server in a process of its own, as `agl store` starts it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-W", "ignore", "-m", "agentlightning.cli.store", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--log-level", "ERROR"]
    with serving(command, f"{url}/v1/agl/health"):
        store = LightningStoreClient(url)
        try:
            yield store
        finally:
            await store.close()


async def http_cycles(batched: bool, callers: int, seconds: float) -> dict[str, float]:
    async with client() as store:
        return await drive(lambda _: cycle(store, batched), callers, seconds)


async def http_spans(batch: int, callers: int, seconds: float) -> dict[str, float]:
    async with client() as store:
        started = [await store.start_rollout(TASK) for _ in range(callers)]
        ids = [(each.rollout_id, each.attempt.attempt_id) for each in started]
        given = [0] * callers

        async def add(caller: int) -> int:
            spans = make_spans(ids[caller], batch, given[caller] + 1)
            given[caller] += batch
            await (store.add_span(spans[0]) if batch == 1 else store.add_many_spans(spans))
            return batch

        return await drive(add, callers, seconds)


if __name__ == "__main__":
    serve({"cycles": cycles, "memory": memory, "http_cycles": http_cycles, "http_spans": http_spans})
