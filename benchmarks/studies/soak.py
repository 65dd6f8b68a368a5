"""A server at full load for as long as you like, pruned as it goes: is its memory flat, and does anything go wrong?

`agl serve` on a durable file, eight client processes of eight tasks each that enqueue, claim, add eight spans, finish
and query without a pause, and a retention of 5,000 finished rollouts that is enforced every ten seconds. Memory, open
files and the size of the database are sampled every second. The first quarter warms up; memory is flat when a line
through the rest rises by less than 5% of it (at least 8 MB) until the end.

    python benchmarks/studies/soak.py --minutes 15 [--clients 8] [--tasks 8] [--keep 5000] [--database PATH-OR-URL]

The exit status is 1 where memory grew or anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import HERE, PYTHONS, Arm

sys.path.insert(0, str(HERE / "arms"))

from line import resident_mb
from ours import hub
from soaking import STEP

from agentlightning.store.types import Retention

SLICES, WARM_UP = 12, 0.25
PYTHONS["soaking"] = PYTHONS["ours"]


class Sampler(threading.Thread):
    """Looks at the server every second, and prunes every ten."""

    def __init__(self, pid: int, url: str, database: str, keep: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.url, self.database, self.keep = pid, url, database, keep
        self.samples: list[dict[str, float]] = []
        self.pruned, self.errors, self.ended = 0, Counter[str](), threading.Event()

    def run(self) -> None:
        started = time.monotonic()
        while not self.ended.wait(1.0):
            sizes = [path.stat().st_size for path in Path(self.database).parent.glob("store.db*")]
            self.samples.append(
                {
                    "seconds": time.monotonic() - started,
                    "mb": resident_mb(self.pid),
                    "files": len(os.listdir(f"/proc/{self.pid}/fd")),
                    "database_mb": sum(sizes) / 1e6,
                }
            )
            if len(self.samples) % 10 == 0:
                self.prune()

    def prune(self) -> None:
        try:
            self.pruned += asyncio.run(prune(self.url, self.keep))
        except Exception as error:  # noqa: BLE001 (counted, and the run goes on)
            self.errors[f"prune: {type(error).__name__}: {error}"[:200]] += 1


async def prune(url: str, keep: int) -> int:
    from agentlightning.store.http.client import LightningStoreClient

    store = LightningStoreClient(url)
    try:
        return (await store.prune(Retention(max_rollouts=keep))).rollouts
    finally:
        await store.close()


def run(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    database = options.database or str(Path(folder) / "store.db")
    seconds = options.minutes * 60
    clients = [Arm("soaking") for _ in range(options.clients)]
    with hub(Path(folder), database) as (server, url):
        sampler = Sampler(server.pid, url, database, options.keep)
        sampler.start()
        for client in clients:
            client.send("soak", url=url, seconds=seconds, slices=SLICES, tasks=options.tasks)
        answers = [client.receive("soak") for client in clients]
        sampler.ended.set()
        sampler.join()
        alive = server.poll() is None
    for client in clients:
        client.close()
    return summary(answers, sampler, alive, seconds)


def summary(answers: list[dict[str, Any]], sampler: Sampler, alive: bool, seconds: float) -> dict[str, Any]:
    errors = Counter(sampler.errors)
    slices = []
    for index in range(SLICES):
        classes = Counter[int]()
        for answer in answers:
            classes.update({int(name): count for name, count in answer["classes"][index].items()})
        cycles = sum(answer["cycles"][index] for answer in answers)
        slices.append(
            {"cycles_per_second": cycles / (seconds / SLICES)}
            | {f"p{q * 100:g}_ms": quantile(classes, q) * 1e3 for q in (0.5, 0.99, 0.999)}
        )
    for answer in answers:
        errors.update(answer["errors"])
    if not alive:
        errors["the server ended"] += 1
    warm = [sample for sample in sampler.samples if sample["seconds"] > WARM_UP * seconds]
    rise, level = trend(warm), statistics.median(sample["mb"] for sample in warm)
    return {
        "seconds": seconds,
        "slices": slices,
        "cycles": sum(sum(answer["cycles"]) for answer in answers),
        "pruned": sampler.pruned,
        "errors": dict(errors),
        "memory_mb": level,
        "memory_rise_mb": rise,
        "flat": rise < max(8.0, 0.05 * level),
        "files": [warm[0]["files"], warm[-1]["files"]],
        "database_mb": [warm[0]["database_mb"], warm[-1]["database_mb"]],
        "samples": sampler.samples[:: max(1, len(sampler.samples) // 60)],
    }


def trend(samples: list[dict[str, float]]) -> float:
    """Megabytes that a line through the samples rises from the first to the last."""
    times, sizes = [each["seconds"] for each in samples], [each["mb"] for each in samples]
    slope = statistics.linear_regression(times, sizes).slope
    return slope * (times[-1] - times[0])


def quantile(classes: Counter[int], q: float) -> float:
    left = q * sum(classes.values())
    for index in sorted(classes):
        left -= classes[index]
        if left <= 0:
            return STEP**index
    return 0.0


def print_summary(found: dict[str, Any]) -> None:
    print(f"soak of {found['seconds'] / 60:g} minutes: {found['cycles']:,} rollouts, {found['pruned']:,} pruned")
    print(f"  {'part':>6}{'cycles/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'p99.9 ms':>10}")
    for index, part in enumerate(found["slices"]):
        figures = f"{part['cycles_per_second']:10,.0f}{part['p50_ms']:9.1f}{part['p99_ms']:9.1f}"
        print(f"  {index + 1:4}/{SLICES}{figures}{part['p99.9_ms']:10.1f}")
    print(f"  open files {found['files'][0]:.0f} -> {found['files'][1]:.0f}", end="")
    print(f", database {found['database_mb'][0]:.0f} -> {found['database_mb'][1]:.0f} MB after the warm-up")
    print(f"  {'MET   ' if found['flat'] else 'MISSED'}  memory {found['memory_mb']:.0f} MB", end="")
    print(f", rising by {found['memory_rise_mb']:+.1f} MB over the last three quarters")
    print(f"  {'MISSED' if found['errors'] else 'MET   '}  errors: {sum(found['errors'].values())}")
    for error, count in found["errors"].items():
        print(f"    {count} x {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--tasks", type=int, default=8, help="of each client, calling at once")
    parser.add_argument("--keep", type=int, default=5000, help="finished rollouts to keep")
    parser.add_argument("--database", help="instead of a new file: a path or a PostgreSQL URL")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="agl-soak-")
    try:
        found = run(options, folder)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(found))
    else:
        print_summary(found)
    return int(bool(found["errors"]) or not found["flat"])


if __name__ == "__main__":
    sys.exit(main())
