"""What one hub carries: claims per second, their latency, fairness and memory with 1,000 runners.

    python benchmarks/studies/hub.py [--runners 1000] [--processes 8] [--rollouts 20000] [--postgres] [--hubs 1]

`agl serve` runs as a process of its own, as for users. The runners are asyncio tasks in several processes; each has
its own connection and worker id, registers, sends a heartbeat every two seconds, and claims one rollout after another,
which it reports at once as succeeded: the store is the limit, not the agents. A claim's latency is the time of its
request. Fairness is Jain's index over the claims of the runners: 1 if all got the same number, 1/N if one got
everything. With `--hubs 2` the runners are divided among servers that share a temporary PostgreSQL database;
`--postgres` uses one for a single server, too. `processors_needed` is the CPU time of servers, runners and database
together, as a multiple of the time it took: where it is near the number of processors, these are the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import psutil

from agentlightning.errors import AgentLightningError
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.ids import new_id

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.support.postgres import PostgresCluster

HEARTBEAT_SECONDS = 2.0
START_SECONDS = 300.0
Claims = dict[str, list[float]]
"""By worker: the latency of each claim that got a rollout, in seconds."""


async def simulate(url: str, names: list[str], barrier: Barrier) -> tuple[Claims, int]:
    """The runners of one process: their claims, and how many calls failed."""
    clients = [LightningStoreClient(url) for _ in names]
    for start in range(0, len(names), 50):  # not all connections at one moment
        chunk = zip(clients[start : start + 50], names[start : start + 50], strict=True)
        await asyncio.gather(*(client.update_worker(name, lease_seconds=30) for client, name in chunk))
    await asyncio.to_thread(barrier.wait, START_SECONDS)
    claims: Claims = {name: [] for name in names}
    errors = Counter[str]()
    beats = [asyncio.create_task(beat(client, name, errors)) for client, name in zip(clients, names, strict=True)]
    await asyncio.gather(*(claim(client, name, claims[name]) for client, name in zip(clients, names, strict=True)))
    for task in beats:
        task.cancel()
    await asyncio.gather(*beats, return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    return claims, errors.total()


async def claim(client: LightningStoreClient, name: str, latencies: list[float]) -> None:
    """Claim and report until nothing is left."""
    while True:
        began = time.perf_counter()
        claimed = await client.dequeue_many_rollouts(1, name, 0, claim_id=new_id("cl"))
        if not claimed:
            return
        latencies.append(time.perf_counter() - began)
        [rollout] = claimed
        await client.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")


async def beat(client: LightningStoreClient, name: str, errors: Counter[str]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        try:
            await client.update_worker(name, lease_seconds=30)
        except AgentLightningError as error:
            errors[type(error).__name__] += 1


def run_process(url: str, names: list[str], barrier: Barrier, results: Any) -> None:
    began = time.process_time()
    claims, errors = asyncio.run(simulate(url, names, barrier))
    results.put((claims, errors, time.process_time() - began))


def start_hub(database: str, stack: ExitStack) -> tuple[str, int]:
    """A real `agl serve`: its URL and process id."""
    agl = Path(sys.executable).parent / "agl"
    command = [str(agl), "serve", "--port", "0", "--store", database, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stack.callback(process.wait, 60)
    stack.callback(process.send_signal, signal.SIGTERM)
    assert process.stdout is not None
    return json.loads(process.stdout.readline())["url"], process.pid


def memory(pid: int) -> tuple[float, float]:
    """Resident memory now and at most, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024, int(fields["VmHWM"].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def database_cpu_seconds(cluster: PostgresCluster | None) -> float:
    """Of PostgreSQL's processes, those of connections among them; 0 for SQLite, whose work is the server's."""
    if cluster is None:
        return 0.0
    found = [p for p in psutil.process_iter(["name", "cmdline"]) if p.info["name"] == "postgres"]
    roots = [p for p in found if str(cluster.port) in " ".join(p.info["cmdline"] or [])]
    family = {child.pid: child for root in roots for child in (root, *root.children(recursive=True))}
    return sum(sum(each.cpu_times()[:2]) for each in family.values())


async def enqueue(url: str, number: int) -> None:
    client = LightningStoreClient(url)
    for start in range(0, number, 1000):
        requests = [EnqueueRolloutRequest({"n": n}) for n in range(start, min(start + 1000, number))]
        await client.enqueue_many_rollouts(requests)
    await client.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        if options.postgres or options.hubs > 1:
            cluster = stack.enter_context(PostgresCluster())
            database = cluster.new_database()
        else:
            cluster = None
            database = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hub.db")
        hubs = [start_hub(database, stack) for _ in range(options.hubs)]
        asyncio.run(enqueue(hubs[0][0], options.rollouts))
        idle = memory(hubs[0][1])[0]
        context = mp.get_context("spawn")
        barrier, results = context.Barrier(options.processes + 1), context.Queue()
        names = [f"runner-{n:05}" for n in range(options.runners)]
        parts = [names[n :: options.processes] for n in range(options.processes)]
        processes = [
            context.Process(target=run_process, args=(hubs[n % len(hubs)][0], part, barrier, results))
            for n, part in enumerate(parts)
        ]
        for process in processes:
            process.start()
        barrier.wait(START_SECONDS)
        before, began = sum(cpu_seconds(pid) for _, pid in hubs), time.perf_counter()
        database_before = database_cpu_seconds(cluster)
        found = [results.get(timeout=600) for _ in processes]
        seconds = time.perf_counter() - began
        cpu = sum(cpu_seconds(pid) for _, pid in hubs) - before
        database_cpu = database_cpu_seconds(cluster) - database_before
        peak = max(memory(pid)[1] for _, pid in hubs)
        for process in processes:
            process.join(60)
        claims: Claims = {name: latencies for part, _, _ in found for name, latencies in part.items()}
    runners_cpu = sum(spent for _, _, spent in found)
    return summary(claims, options, seconds, cpu) | {
        "database_cpu_ms_per_rollout": round(1000 * database_cpu / options.rollouts, 3),
        "runners_cpu_ms_per_rollout": round(1000 * runners_cpu / options.rollouts, 3),
        "processors_needed": round((cpu + database_cpu + runners_cpu) / seconds, 2),
        "processors": os.cpu_count(),
        "failed_heartbeats": sum(errors for _, errors, _ in found),
        "runners_cpu_seconds": round(runners_cpu, 1),
        "idle_mib": round(idle, 1),
        "peak_mib": round(peak, 1),
    }


def summary(claims: Claims, options: argparse.Namespace, seconds: float, cpu: float) -> dict[str, Any]:
    latencies = sorted(latency for each in claims.values() for latency in each)
    numbers = [len(each) for each in claims.values()]
    total = sum(numbers)
    if total != options.rollouts:
        raise SystemExit(f"{total} claims for {options.rollouts} rollouts: some were lost or claimed twice")
    return {
        "runners": options.runners,
        "processes": options.processes,
        "hubs": options.hubs,
        "store": "PostgreSQL" if options.postgres or options.hubs > 1 else "SQLite",
        "rollouts": total,
        "seconds": round(seconds, 2),
        "claims_per_second": round(total / seconds),
        "hub_cpu_ms_per_rollout": round(1000 * cpu / total, 3),
        "p50_ms": round(1000 * latencies[total // 2], 1),
        "p99_ms": round(1000 * latencies[int(total * 0.99)], 1),
        "max_ms": round(1000 * latencies[-1], 1),
        "jain": round(total**2 / (len(numbers) * sum(n * n for n in numbers)), 3),
        "claims_of_a_runner": [min(numbers), max(numbers)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--hubs", type=int, default=1)
    options = parser.parse_args()
    for name, value in measure(options).items():
        print(f"{name:<24} {value}")


if __name__ == "__main__":
    main()
