"""Servers and clients that can be killed, suspended and started again, and the audit of what they acknowledged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase

AGL = str(Path(sys.executable).with_name("agl"))
PROGRAM = str(Path(__file__).with_name("program.py"))
LIMIT = 120.0
"""Seconds after which something that is waited for is held to be stuck."""


class Process:
    """A process whose output goes to a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()

    def wait(self) -> int:
        try:
            return self.popen.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.popen.args} does not end:\n{self.said()}") from None

    def end(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def dispose(self) -> None:
        if self.popen.poll() is None:
            self.kill()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


class Server:
    """`agl serve` on one port and one database, however often it is started."""

    def __init__(self, folder: Path, start: Callable[..., Process], database: str | Path | None = None) -> None:
        self.database = folder / "store.db" if database is None else database
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._start = folder, start
        self.process: Process | None = None

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> Process:
        command = [AGL, "serve", "--port", str(self.port), "--store", str(self.database), *arguments]
        self.process = self._start(command, self._folder / "server.log", environment)
        wait_until(self.answers, f"the server answers: {self.process.said()}", self.process)
        return self.process

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except OSError:
            return False
        return True


class Heard:
    """What the clients wrote down; a half line of a killed one does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        raw = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in raw if line.endswith(b"\n")]

    def of(self, kind: str) -> list[tuple[str, ...]]:
        return [tuple(line["ids"]) for line in self.lines() if line["kind"] == kind]

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def wait_for_more(self, bytes_more: int, process: Process | None = None) -> None:
        """Until the clients have got on by so much."""
        goal = self.size() + bytes_more
        wait_until(lambda: self.size() >= goal, "the clients get on", process)


class Audit:
    """Everything in a store beside everything that was acknowledged."""

    rollouts: dict[str, Rollout]
    attempts: dict[str, list[Attempt]]
    spans: dict[str, list[Span]]

    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    async def read(self, store: LightningStoreBase) -> Audit:
        self.rollouts = {each.rollout_id: each for each in await store.query_rollouts()}
        self.attempts = {rollout_id: await store.query_attempts(rollout_id) for rollout_id in self.rollouts}
        self.spans = {rollout_id: await store.query_spans(rollout_id) for rollout_id in self.rollouts}
        return self

    def check_nothing_is_lost(self) -> None:
        """Every acknowledged rollout, attempt, span and status is there."""
        span_ids = {span.span_id for spans in self.spans.values() for span in spans}
        attempt_ids = {attempt.attempt_id for attempts in self.attempts.values() for attempt in attempts}
        assert not [ids for ids in self.heard.of("made") if ids[0] not in self.rollouts]
        assert not [ids for ids in self.heard.of("claimed") if ids[1] not in attempt_ids]
        assert not [ids for ids in self.heard.of("span") if ids[2] not in span_ids]
        ends = {(rollout_id, a.attempt_id): a.status for rollout_id in self.rollouts for a in self.attempts[rollout_id]}
        assert not [ids for ids in self.heard.of("done") if ends[ids[0], ids[1]] != "succeeded"]
        assert not [ids for ids in self.heard.of("done") if self.rollouts[ids[0]].status != "succeeded"]

    def check_everything_ended_once(self) -> None:
        """No rollout is stuck, none succeeded twice, no span was kept twice."""
        statuses = Counter(each.status for each in self.rollouts.values())
        assert set(statuses) == {"succeeded"}, statuses
        done = Counter(ids[0] for ids in self.heard.of("done"))
        assert not [rollout_id for rollout_id, times in done.items() if times > 1]
        for attempts in self.attempts.values():
            assert [attempt.status for attempt in attempts].count("succeeded") == 1
        for spans in self.spans.values():
            by_attempt = defaultdict[str, list[Span]](list)
            for span in spans:
                by_attempt[span.attempt_id].append(span)
            for each in by_attempt.values():
                assert len({span.span_id for span in each}) == len(each)
                assert [span.sequence_id for span in each] == list(range(1, len(each) + 1))

    def figures(self) -> dict[str, int]:
        kinds = Counter(line["kind"] for line in self.heard.lines())
        found = {"rollouts": len(self.rollouts), "attempts": sum(map(len, self.attempts.values()))}
        found["spans"] = sum(map(len, self.spans.values()))
        return {"acknowledgements": sum(kinds.values()), **found}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], what: str, process: Process | None = None) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{LIMIT:g} s have passed and it is not so that {what}"
        assert process is None or process.popen.poll() is None, process.said()
        time.sleep(0.02)


@pytest.fixture
def start_process() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Process:
        started.append(Process(command, log, environment))
        return started[-1]

    yield start
    for process in started:
        process.dispose()


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def heard(tmp_path: Path) -> Heard:
    return Heard(tmp_path / "heard.jsonl")


@pytest.fixture
def make_server(tmp_path: Path, start_process: Callable[..., Process]) -> Callable[..., Server]:
    def make(database: str | Path | None = None) -> Server:
        return Server(tmp_path, start_process, database)

    return make


@pytest.fixture
def start_client(tmp_path: Path, start_process: Callable[..., Process], heard: Heard) -> Callable[..., Process]:
    """Runs program.py: `start_client("work", url, "--tasks", "4")`."""

    def start(verb: str, url: str | Path, *options: str) -> Process:
        command = [sys.executable, PROGRAM, verb, str(url), str(heard.path), *options]
        return start_process(command, tmp_path / "clients.log")

    return start


@pytest.fixture
def start_runner(tmp_path: Path, start_process: Callable[..., Process]) -> Callable[..., Process]:
    """Runs `agl runner` with an agent given as code whose function is called `work`."""

    def start(url: str, agent: str, *options: str, environment: dict[str, str] | None = None) -> Process:
        file = tmp_path / "agent.py"
        file.write_text(agent)
        command = [AGL, "runner", "--server", url, "--agent", f"{file}:work", "--concurrency", "4", *options]
        return start_process(command, tmp_path / "runners.log", environment)

    return start


@pytest.fixture
def connect() -> Callable[[str], AbstractAsyncContextManager[LightningStoreBase]]:
    """`async with connect(url) as store`: a client, or the database itself, closed in the end."""
    from agentlightning.store.http.client import LightningStoreClient

    @asynccontextmanager
    async def connected(url: str) -> AsyncIterator[LightningStoreBase]:
        store = LightningStoreClient(url) if url.startswith("http") else LightningStore(url)
        try:
            yield store
        finally:
            await store.close()

    return connected


@pytest.fixture
def audit(heard: Heard) -> Callable[[str | Path], Audit]:
    """Reads a database that nobody else has open any more."""

    async def read(database: str | Path) -> Audit:
        store = LightningStore(database)
        try:
            return await Audit(heard).read(store)
        finally:
            await store.close()

    return lambda database: asyncio.run(read(database))


@pytest.fixture
def tell(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Prints the figures of a test past pytest's capture."""

    def say(**figures: Any) -> None:
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
        with capsys.disabled():
            sys.stdout.write(f"\n  {request.node.name}: {text}\n")

    return say
