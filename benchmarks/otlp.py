"""How fast OTLP comes in: `python benchmarks/otlp.py [--connections 4] [--seconds 4] [--rounds 3]`.

Requests of 100 spans of about 1.5 KB, made beforehand, are posted over several connections by a process of their own.
Beside our server, in the same rounds: raw SQLite (`executemany` of such rows, transactions of 100, fully durable) and,
where its environment is there (`benchmarks/peers.sh`), the OTLP endpoint of Agent Lightning 0.3, whose store is in
memory. What we acknowledge is on the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from struct import pack_into
from typing import Any

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SPANS = 100
ROOT = Path(__file__).parents[1]
PEER = ROOT / ".peers/agl03/bin/python"
QUESTION = "What is the smallest prime above 1000? Think step by step. " * 10
ANSWER = "Let us look at 1001 = 7 x 11 x 13, so it is no prime; 1003 = 17 x 59; " * 5


def request_of(rollout_id: str, attempt_id: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    resource = {
        "service.name": "shop",
        "telemetry.sdk.language": "python",
        "agentlightning.rollout_id": rollout_id,
        "agentlightning.attempt_id": attempt_id,
    }
    for key, value in resource.items():
        pair = group.resource.attributes.add()
        pair.key, pair.value.string_value = key, value
    scope = group.scope_spans.add()
    scope.scope.name = "opentelemetry.instrumentation.genai_openai"
    for _ in range(SPANS):
        fill(scope.spans.add())
    return request


def fill(span: Any) -> None:
    span.trace_id, span.span_id, span.parent_span_id = b"\1" * 16, os.urandom(8), b"\2" * 8
    span.name, span.kind = "chat gpt-4o-mini", 3
    span.start_time_unix_nano, span.end_time_unix_nano = 1_700_000_000_000_000_000, 1_700_000_001_000_000_000
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4o-mini",
        "gen_ai.response.id": "chatcmpl-AbCdEfGhIjKlMnOp",
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 80,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.input.messages": message("user", QUESTION),
        "gen_ai.output.messages": message("assistant", ANSWER),
    }
    for key, value in attributes.items():
        pair = span.attributes.add()
        pair.key = key
        kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(pair.value, kind, value)


def message(role: str, text: str) -> str:
    return orjson.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}]).decode()


# -- the load: a process of its own ------------------------------------------------------------------------------------


async def load(port: int, connections: int, seconds: float, ids: list[list[str]]) -> dict[str, float]:
    """Spans acknowledged by a server, and the seconds it took."""
    end = time.monotonic() + seconds
    start = time.perf_counter()
    counts = await asyncio.gather(*(connection(port, end, *ids[n % len(ids)]) for n in range(connections)))
    return {"spans": sum(counts), "seconds": time.perf_counter() - start}


async def connection(port: int, end: float, rollout_id: str, attempt_id: str) -> int:
    body = Body(rollout_id, attempt_id)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/traces HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-protobuf\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body.data)
    sent = 0
    while time.monotonic() < end:
        body.renew()
        writer.write(head + body.data)
        sent += accepted(await answer(reader))
    writer.close()
    return sent


class Body:
    """A request made once; before each time it is sent its spans get new ids."""

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        request = request_of(rollout_id, attempt_id)
        spans = request.resource_spans[0].scope_spans[0].spans
        self.data = bytearray(request.SerializeToString())
        self._places = [self.data.index(span.span_id) for span in spans]
        self._next = int.from_bytes(os.urandom(7), "big")

    def renew(self) -> None:
        for place in self._places:
            pack_into("<Q", self.data, place, self._next)
            self._next += 1


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answered {head.splitlines()[0].decode()}")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.split(b":")[1]))


def accepted(body: bytes) -> int:
    partial = ExportTraceServiceResponse.FromString(body).partial_success
    if partial.rejected_spans:
        raise SystemExit(f"{partial.rejected_spans} spans were refused: {partial.error_message}")
    return SPANS


# -- what is measured --------------------------------------------------------------------------------------------------

OURS = """
import asyncio, sys, uvloop
from agentlightning.server.app import Server
from agentlightning.store import LightningStore

async def main(path):
    store = LightningStore(path)
    ids = []
    for _ in range(8):
        started = await store.start_rollout({})
        ids.append([started.rollout_id, started.attempt.attempt_id])
    async with Server(store, secret="s") as server:
        print(server.port, ids, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await store.close()

uvloop.run(main(sys.argv[1]))
"""

THEIRS = """
import asyncio, socket, sys
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore

async def main():
    store = InMemoryLightningStore()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = LightningStoreServer(store, "127.0.0.1", port)
    await server.start()
    ids = []
    for _ in range(8):
        started = await server.start_rollout({})
        ids.append([started.rollout_id, started.attempt.attempt_id])
    print(port, ids, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()

asyncio.run(main())
"""


def served(python: str, code: str, options: argparse.Namespace, folder: str) -> float:
    """Spans a second that a server acknowledges, it and the load each in a process of their own."""
    path = str(Path(folder) / f"{time.time_ns()}.db")
    # A peer must not find our packages.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([python, "-c", code, path], **pipes, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if line[:1].isdigit()), None)
            if line is None:
                raise SystemExit(f"the server of {python} did not start")
            port, _, ids = line.partition(" ")
            loading = [sys.executable, __file__, "--load", port, "--ids", ids.strip().replace("'", '"')]
            loading += ["--connections", str(options.connections), "--seconds", str(options.seconds)]
            done = orjson.loads(subprocess.run(loading, check=True, capture_output=True).stdout)
        finally:
            server.send_signal(signal.SIGKILL)
    return done["spans"] / done["seconds"]


def raw_sqlite(options: argparse.Namespace, folder: str) -> float:
    """Rows a second: the columns of a span, its attributes as one text."""
    database = sqlite3.connect(Path(folder) / f"{time.time_ns()}.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute(
        "CREATE TABLE spans (key INTEGER PRIMARY KEY, attempt INTEGER, span_id TEXT, sequence INTEGER, trace_id TEXT, "
        "parent_id TEXT, name TEXT, start REAL, end REAL, status TEXT, attributes TEXT, UNIQUE (attempt, span_id))"
    )
    text = message("user", QUESTION) + message("assistant", ANSWER) + "x" * 350
    rows, start = 0, time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        batch = [
            (1, os.urandom(8).hex(), rows + n, "01" * 16, "02" * 8, "chat gpt-4o-mini", 1.7e9, 1.7e9 + 1, "UNSET", text)
            for n in range(SPANS)
        ]
        database.execute("BEGIN IMMEDIATE")
        database.executemany(
            "INSERT INTO spans (attempt, span_id, sequence, trace_id, parent_id, name, start, end, status, attributes) "
            "VALUES (?,?,?,?,?,?,?,?,?,?)",
            batch,
        )
        database.execute("COMMIT")
        rows += SPANS
    seconds = time.perf_counter() - start
    database.close()
    return rows / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where the database files go")
    parser.add_argument("--load", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--ids", default="[]", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        ids = orjson.loads(options.ids)
        result = asyncio.run(load(options.load, options.connections, options.seconds, ids))
        print(orjson.dumps(result).decode())
        return
    compare(options)


def compare(options: argparse.Namespace) -> None:
    size = request_of("ro-" + "0" * 24, "at-" + "0" * 24).ByteSize() / SPANS
    arms: dict[str, Callable[[str], float]] = {
        "ours, durable": lambda folder: served(sys.executable, OURS, options, folder),
        "raw SQLite, durable": lambda folder: raw_sqlite(options, folder),
    }
    if PEER.exists():
        arms["0.3, in memory"] = lambda folder: served(str(PEER), THEIRS, options, folder)
    found: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for _ in range(options.rounds):
            for name, measure in arms.items():
                found[name].append(measure(folder))
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"requests of {SPANS} spans of {size:,.0f} bytes, {options.connections} connections")
    for name, values in found.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        ratio = medians["ours, durable"] / medians[name]
        print(f"{name:<20} {medians[name]:>9,.0f} spans/s ({spread}); ours is {ratio:.2f} times that")


if __name__ == "__main__":
    main()
