"""One client of the soak: calls a server without a pause, for minutes, and keeps only counts. See line.py."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

from line import SPANS, serve
from ours import TASK, make_spans

from agentlightning.errors import AgentLightningError

T = TypeVar("T")
STEP = 1.05
"""Latencies are counted in classes this far apart."""


class Tally:
    """Calls by duration, for each slice of the run, and what went wrong."""

    def __init__(self, seconds: float, slices: int) -> None:
        self.started, self.length = time.monotonic(), seconds / slices
        self.classes = [Counter[int]() for _ in range(slices)]
        self.cycles = [0] * slices
        self.errors: Counter[str] = Counter()

    @property
    def slice(self) -> int:
        return min(len(self.cycles) - 1, int((time.monotonic() - self.started) / self.length))

    async def timed(self, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        answer = await call
        self.classes[self.slice][round(math.log(time.perf_counter() - began, STEP))] += 1
        return answer


async def soak(url: str, seconds: float, slices: int, tasks: int) -> dict[str, Any]:
    from agentlightning.store.http.client import LightningStoreClient

    store, tally = LightningStoreClient(url), Tally(seconds, slices)

    async def repeat() -> None:
        while time.monotonic() < tally.started + seconds:
            try:
                await cycle(store, tally)
                tally.cycles[tally.slice] += 1
            except AgentLightningError as error:
                tally.errors[f"{type(error).__name__}: {error}"[:200]] += 1

    try:
        await asyncio.gather(*(repeat() for _ in range(tasks)))
    finally:
        await store.close()
    return {"cycles": tally.cycles, "classes": [dict(each) for each in tally.classes], "errors": dict(tally.errors)}


async def cycle(store: Any, tally: Tally) -> None:
    await tally.timed(store.enqueue_rollout(TASK))
    claimed = await tally.timed(store.dequeue_rollout("soak", timeout=30))
    if claimed is None:
        raise AgentLightningError("nothing to claim although every caller enqueues before it claims")
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await tally.timed(store.add_many_spans(make_spans(ids)))
    await tally.timed(store.update_attempt(*ids, status="succeeded"))
    spans = await tally.timed(store.query_spans(ids[0]))
    if len(spans) != SPANS:
        raise AgentLightningError(f"{len(spans)} of {SPANS} spans came back")


if __name__ == "__main__":
    serve([soak])
