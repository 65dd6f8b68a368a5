"""How many durable rollouts the store carries: `python benchmarks/store.py [--callers 64] [--seconds 5]`.

A cycle is what one rollout costs: enqueue, dequeue, eight spans (two with tokens) in one call, finish, query its
spans. Every answer is on the disk before the next call is made; throughput comes from many callers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store import LightningStore, LightningStoreBase

SPANS = 8
TOKENS = {
    PROMPT_TOKEN_IDS: list(range(100)),
    RESPONSE_TOKEN_IDS: list(range(48)),
    LOGPROBS: [-0.5] * 48,
}


def spans_of(rollout_id: str, attempt_id: str) -> list[Span]:
    plain = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "calculator", "gen_ai.usage.input_tokens": 10}
    attributes = [{**plain, **TOKENS} if index % 4 == 0 else plain for index in range(SPANS)]
    return [Span(rollout_id, attempt_id, "execute_tool calculator", 1.0, 2.0, attributes=each) for each in attributes]


async def cycle(store: LightningStoreBase) -> None:
    await store.enqueue_rollout({"question": "What is 6 x 7?"})
    rollout = await store.dequeue_rollout(timeout=10)
    assert rollout is not None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    await store.add_many_spans(spans_of(*ids))
    await store.update_attempt(*ids, status="succeeded")
    assert len(await store.query_spans(ids[0])) == SPANS


async def measure(store: LightningStoreBase, callers: int, seconds: float) -> tuple[int, float, float]:
    """(cycles, wall seconds, CPU seconds)."""
    end = time.monotonic() + seconds
    counts = [0] * callers

    async def caller(index: int) -> None:
        while time.monotonic() < end:
            await cycle(store)
            counts[index] += 1

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller(index) for index in range(callers)))
    return sum(counts), time.perf_counter() - wall, time.process_time() - cpu


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for where in (Path(folder) / "store.db", ":memory:"):
            store = LightningStore(where)
            await measure(store, options.callers, 0.3)
            cycles, wall, cpu = await measure(store, options.callers, options.seconds)
            await store.close()
            name = "durable file" if isinstance(where, Path) else "in memory"
            print(
                f"{name}: {cycles / wall:,.0f} cycles/s, {cycles * SPANS / wall:,.0f} spans/s "
                f"({options.callers} callers, {cpu / cycles * 1e6:.0f} us of CPU for a cycle, "
                f"{cpu / wall:.2f} cores busy)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--directory", type=Path, default=None, help="where the database file goes")
    parser.add_argument("--uvloop", action="store_true")
    options = parser.parse_args()
    if options.uvloop:
        import uvloop

        uvloop.run(run(options))
    else:
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
