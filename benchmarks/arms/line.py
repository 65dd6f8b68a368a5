"""What every arm of a benchmark shares; runs in the environments of the peers too, so it needs nothing but Python.

An arm is a process that answers one line of JSON, `{"job": NAME, ...arguments}`, with one line of JSON. It stays for
the whole benchmark, so that imports are paid once and the arms can take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import re
import resource
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

SPANS = 8
"""Spans of one rollout."""
SPAN_BYTES = 1_500
"""Of one span as compact JSON, ids and times included (they take about 350)."""
WORDS = tuple("".join(random.Random(n).choices("abcdefghijklmnopqrstuvwxyz", k=3 + n % 7)) for n in range(500))

Job = Callable[..., Any]


def make_attributes() -> list[dict[str, Any]]:
    """The attributes of 256 model calls, no two alike: what an agent's span says, about 1,150 bytes of it."""
    draw, made = random.Random(0), []
    for index in range(256):
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "policy",
            "gen_ai.usage.input_tokens": draw.randrange(1000),
            "gen_ai.usage.output_tokens": draw.randrange(1000),
            "gen_ai.request.temperature": 0.7,
            "agent.step": index,
            "gen_ai.input.messages": "",
            "gen_ai.output.messages": "",
        }
        room = SPAN_BYTES - 350 - len(json.dumps(attributes, separators=(",", ":")))
        attributes["gen_ai.input.messages"] = text(draw, room * 2 // 3)
        attributes["gen_ai.output.messages"] = text(draw, room - room * 2 // 3)
        made.append(attributes)
    return made


def text(draw: random.Random, length: int) -> str:
    words = ""
    while len(words) < length:
        words += draw.choice(WORDS) + " "
    return words[:length]


ATTRIBUTES = make_attributes()


def serve(jobs: list[Job]) -> None:
    """Answer jobs, each by the name of its function, until the other side hangs up."""
    by_name = {job.__name__: job for job in jobs}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = by_name[order.pop("job")](**order)
            if asyncio.iscoroutine(answer):
                answer = run(answer)
        except Exception:  # noqa: BLE001 (told to the other side)
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
        gc.collect()


def run(work: Any) -> Any:
    if os.environ.get("BENCH_UVLOOP"):
        import uvloop

        return uvloop.run(work)
    return asyncio.run(work)


async def drive(cycle: Callable[[int], Awaitable[int]], callers: int, seconds: float) -> dict[str, float]:
    """Have `callers` tasks repeat `cycle` for so long; it returns how many cycles it did. The first tenth warms up."""
    started = time.perf_counter()
    begin, end = started + seconds / 10, started + seconds * 1.1
    counts, latencies = [0], list[float]()

    async def caller(index: int) -> None:
        now = time.perf_counter()
        while now < end:
            done = await cycle(index)
            then, now = now, time.perf_counter()
            if begin <= now < end:
                counts[0] += done
                latencies.append(now - then)

    cpu = time.process_time()
    await asyncio.gather(*(caller(index) for index in range(callers)))
    cpu = time.process_time() - cpu
    latencies.sort()
    return {
        "cycles_per_second": counts[0] / seconds,
        "cpu_us": cpu / max(1, counts[0]) / 1.1 * 1e6,
        "p50_ms": quantile(latencies, 0.5) * 1e3,
        "p99_ms": quantile(latencies, 0.99) * 1e3,
    }


async def fill(kept: Callable[[], Awaitable[str]], read: Callable[[str], Awaitable[Any]], rollouts: int) -> Any:
    """How much memory this process takes up more, once so many rollouts are kept and each has been read again."""
    ids = [await kept() for _ in range(100)]
    for each in ids:
        await read(each)
    gc.collect()
    before = resident_mb()

    async def caller(number: int) -> None:
        mine = [await kept() for _ in range(number)]
        for each in mine:
            await read(each)

    await asyncio.gather(*(caller(rollouts // 16) for _ in range(16)))
    gc.collect()
    return {"grown_mb": resident_mb() - before, "before_mb": before, "peak_mb": resident_mb(what="VmHWM")}


def fresh(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes whose texts belong to nobody else, as from an agent."""
    return json.loads(json.dumps(attributes))


def quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def resident_mb(pid: int | str = "self", what: str = "VmRSS") -> float:
    """Memory of a process that is in RAM, in megabytes; VmHWM is the most it ever was."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what)) / 1024


def measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns, with the CPU seconds of all threads of this process, the seconds it took, and the most
    memory that the process has had in RAM until now, in megabytes."""
    cpu, wall = time.process_time(), time.perf_counter()
    made = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**made, "cpu_seconds": cpu, "wall_seconds": wall, "peak_mb": peak}


# -- servers ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def announced(log: Path) -> str | None:
    """The address that a server of ours has printed into a file. It takes a free port itself: nobody comes between."""
    found = re.search(r" at (http://\S+)", log.read_text()) if log.exists() else None
    return found.group(1) if found else None


@contextlib.contextmanager
def serving(
    command: list[str], health: str | Callable[[], str | None], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process of its own, from the moment it answers."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **(quiet | options))
    try:
        wait_for(health if callable(health) else lambda: health, process)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(find: Callable[[], str | None], process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode} before it answered: {process.args!r}")
        with contextlib.suppress(OSError):
            if url := find():
                urllib.request.urlopen(url, timeout=5).close()
                return
        if time.monotonic() > end:
            raise RuntimeError(f"nothing answers after {seconds:g} s: {process.args!r}")
        time.sleep(0.05)
