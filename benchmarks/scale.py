"""What each operation costs with 10^3, 10^4, 10^5 and 10^6 rollouts in one database: `python benchmarks/scale.py`.

The database is filled to each size with finished rollouts (one attempt and one span each) and, for every ten of them, a
waiting one, in four priorities; then every operation is called by 32 tasks on rollouts drawn from all of them. Flat
means that the cost at the largest size is at most 1.5 times the lowest of the other sizes. Filling to 10^6 takes some
minutes: `--largest 100000` is enough to see a trend.

    python benchmarks/scale.py [--largest 1000000] [--database PATH-OR-URL] [--check] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("arms")))

from ours import TASK, make_spans

from agentlightning.rollouts import Attempt, AttemptedRollout, EnqueueRolloutRequest, Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.store.ids import new_id
from agentlightning.store.types import RolloutRecord

CALLERS, CALLS, REPEATS, FLAT = 32, 256, 5, 1.5
Table = dict[int, dict[str, tuple[float, float]]]
"""By size and operation: microseconds on the wall and of CPU."""
Operation = Callable[[int], Awaitable[Any]]


class Filler:
    """A database that grows."""

    def __init__(self, store: LightningStoreBase) -> None:
        self.store, self.size, self.finished = store, 0, list[str]()

    async def grow(self, size: int, chunk: int = 1000) -> None:
        while self.size < size:
            number = min(chunk, size - self.size)
            waiting = number // 10
            records = [record(n) for n in range(number - waiting)]
            await self.store.add_records(records)
            self.finished += [each.rollout.rollout_id for each in records]
            requests = [EnqueueRolloutRequest(TASK, mode="train", priority=n % 4) for n in range(waiting)]
            await self.store.enqueue_many_rollouts(requests)
            self.size += number


def record(number: int) -> RolloutRecord:
    """What a short rollout leaves behind; every twentieth has failed."""
    now, status = time.time(), "failed" if number % 20 == 0 else "succeeded"
    rollout_id, attempt_id = new_id("ro"), new_id("at")
    rollout = Rollout(rollout_id, TASK, now, status, "train", end_time=now, queue="train")
    attempt = Attempt(rollout_id, attempt_id, 1, now, status, now, "worker", now)
    span = Span(rollout_id, attempt_id, "work", now, now, 1, "0" * 32, attempt_id[-16:], attributes={"step": number})
    return RolloutRecord(rollout, (attempt,), (span,))


class Operations:
    """Every operation as a function of a number; each has what it works on prepared."""

    def __init__(self, filler: Filler) -> None:
        self.store, self.finished = filler.store, filler.finished
        self.open: list[AttemptedRollout] = []
        self.closed: list[AttemptedRollout] = []

    def some_id(self) -> str:
        return random.choice(self.finished)

    async def enqueue(self, _: int) -> None:
        await self.store.enqueue_rollout(TASK, mode="train")

    async def dequeue(self, _: int) -> None:
        claimed = await self.store.dequeue_rollout("worker", timeout=10)
        assert claimed is not None
        self.open.append(claimed)

    async def add_spans(self, number: int) -> None:
        claimed = self.open[number]
        await self.store.add_many_spans(make_spans((claimed.rollout_id, claimed.attempt.attempt_id)))

    async def query_recent(self, number: int) -> None:
        assert len(await self.store.query_spans(self.open[number].rollout_id)) == 8

    async def heartbeat(self, number: int) -> None:
        await self.store.update_worker(f"worker-{number % CALLERS}")

    async def finish(self, number: int) -> None:
        claimed = self.open[number]
        await self.store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        self.closed.append(claimed)

    async def query_old(self, _: int) -> None:
        assert await self.store.query_spans(self.some_id())

    async def look_up(self, _: int) -> None:
        assert await self.store.get_rollout_by_id(self.some_id())

    async def wait(self, _: int) -> None:
        ids = [self.some_id() for _ in range(8)]
        assert await self.store.wait_for_rollouts(rollout_ids=ids, timeout=5)

    async def list_page(self, _: int) -> None:
        await self.store.query_rollouts(after=self.some_id(), limit=50)

    async def list_newest(self, _: int) -> None:
        assert await self.store.query_rollouts(newest_first=True, limit=50)

    async def list_failed(self, _: int) -> None:
        assert await self.store.query_rollouts(status_in=["failed"], limit=50)

    async def queues(self, _: int) -> None:
        await self.store.query_queues()

    async def statistics(self, _: int) -> None:
        await self.store.statistics()

    async def delete(self, number: int) -> None:
        await self.store.delete_rollouts([self.closed[number].rollout_id])

    def in_order(self) -> dict[str, tuple[Operation, int]]:
        """(operation, how many calls): what comes first prepares what follows."""
        return {
            "enqueue": (self.enqueue, CALLS),
            "dequeue": (self.dequeue, CALLS),
            "add 8 spans": (self.add_spans, CALLS),
            "query spans just written": (self.query_recent, CALLS),
            "worker heartbeat": (self.heartbeat, CALLS),
            "finish": (self.finish, CALLS),
            "delete one": (self.delete, CALLS),
            "query spans of any rollout": (self.query_old, CALLS),
            "get rollout": (self.look_up, CALLS),
            "wait for 8 finished": (self.wait, CALLS),
            "page of 50 by cursor": (self.list_page, 64),
            "page of 50 newest": (self.list_newest, 64),
            "page of 50 failed": (self.list_failed, 64),
            "query queues": (self.queues, 16),
            "statistics": (self.statistics, 4),
        }


async def timed(operation: Operation, calls: int) -> tuple[float, float]:
    """Microseconds for one of `calls`: on the wall, and of CPU (all threads), which other programs disturb less."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            await operation(number)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(min(CALLERS, calls))))
    return (time.perf_counter() - wall) / calls * 1e6, (time.process_time() - cpu) / calls * 1e6


async def measure(filler: Filler) -> dict[str, tuple[float, float]]:
    costs: dict[str, list[tuple[float, float]]] = {}
    for turn in range(REPEATS + 1):
        for name, (operation, calls) in Operations(filler).in_order().items():
            cost = await timed(operation, calls)
            if turn:  # the first one warms up
                costs.setdefault(name, []).append(cost)
    return {name: (median(wall for wall, _ in each), median(cpu for _, cpu in each)) for name, each in costs.items()}


async def run(options: argparse.Namespace, where: str | Path) -> Table:
    store = LightningStore(where)
    filler, table = Filler(store), Table()
    size = 1000
    while size <= options.largest:
        started = time.perf_counter()
        await filler.grow(size)
        filled = time.perf_counter()
        table[size] = await measure(filler)
        spent = time.perf_counter() - filled
        print(f"{size:,}: filled in {filled - started:.0f} s, measured in {spent:.0f} s", file=sys.stderr)
        size *= 10
    await store.close()
    return table


def growth(table: Table, which: int) -> dict[str, float]:
    """The cost at the largest size beside the lowest at the others."""
    last, *others = reversed(table)
    return {n: table[last][n][which] / min(table[size][n][which] for size in others or [last]) for n in table[last]}


def print_table(table: Table) -> None:
    print("microseconds for one call, 32 callers; growth: the largest size beside the lowest of the others")
    print(f"  {'':28}" + "".join(f"{size:>12,}" for size in table) + f"{'growth':>10}{'of CPU':>10}")
    cpu = growth(table, 1)
    for name, times in growth(table, 0).items():
        costs = "".join(f"{row[name][0]:12,.0f}" for row in table.values())
        print(
            f"  {name:28}{costs}{times:10.2f}{cpu[name]:10.2f}  {'' if times <= FLAT else f'MISSED: more than {FLAT}'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1_000_000, help="how many rollouts in the end")
    parser.add_argument("--database", help="a file that is not there yet, or an empty PostgreSQL database")
    parser.add_argument("--check", action="store_true", help="exit with 1 where something is not flat")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="agl-bench-")
    try:
        table = asyncio.run(run(options, options.database or Path(folder) / "store.db"))
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps({"microseconds": table, "growth": growth(table, 0), "cpu": growth(table, 1), "limit": FLAT}))
    else:
        print_table(table)
    return int(options.check and max(growth(table, 0).values()) > FLAT)


if __name__ == "__main__":
    sys.exit(main())
