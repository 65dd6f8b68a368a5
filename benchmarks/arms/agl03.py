"""The arm of Agent Lightning 0.3.0; runs in its own environment (benchmarks/peers.sh). See line.py for the protocol."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its table of prices on import

from agentlightning.types import OtelResource, Span, TraceStatus
from line import ATTRIBUTES, SPANS, drive, fill, free_port, fresh, serve, serving

import agentlightning as agl
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


# -- end to end ------------------------------------------------------------------------------------------------------


class Trivial(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 1.0


def rollouts(number: int, strategy: str, runners: int) -> dict[str, float]:
    """Trivial agents: `strategy` is "shm" (threads of one process) or "cs" (processes, its default)."""
    measured = {}

    @agl.algo
    async def ask(store: Any) -> None:
        await store.add_resources({"prompt": agl.PromptTemplate(template="{question}", engine="f-string")})
        await finish(store, 4 * runners)
        started = time.perf_counter()
        await finish(store, number)
        measured["rollouts_per_second"] = number / (time.perf_counter() - started)

    tracer = agl.OtelTracer()
    runner = agl.LitAgentRunner(tracer, poll_interval=0.05, interval_jitter=0.0)  # its default looks every 5 s only
    options: Any = {"type": strategy, "n_runners": runners}
    options |= {"main_thread": "algorithm"} if strategy == "shm" else {"server_port": free_port()}
    trainer = agl.Trainer(n_runners=runners, algorithm=ask, runner=runner, tracer=tracer, strategy=options)
    trainer.fit(Trivial())
    return measured


async def finish(store: Any, number: int) -> None:
    ids = [(await store.enqueue_rollout(TASK)).rollout_id for _ in range(number)]
    while len(done := await store.wait_for_rollouts(rollout_ids=ids, timeout=0)) < number:  # noqa: ASYNC110 (it waits no longer)
        await asyncio.sleep(0.05)
    assert all(rollout.status == "succeeded" for rollout in done)


if __name__ == "__main__":
    serve([cycles, memory, rollouts, http_cycles, http_spans])
