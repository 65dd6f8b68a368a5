"""What was written with relaxed durability survives the end of the process, and costs no wait for the disk."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.store import LightningStore
from agentlightning.store.durability import is_relaxed, relaxed
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.sql.tx import Tx

pytestmark = pytest.mark.integration

KILLED = """
import asyncio, os, signal, sys
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.durability import relaxed

async def main():
    store = LightningStore(sys.argv[1])
    rollout = await store.start_rollout({}, rollout_id="ro-killed")
    ids = rollout.rollout_id, rollout.attempt.attempt_id

    async def record(caller):
        with relaxed():
            for number in range(20):
                tokens = {"agentlightning.prompt_token_ids": list(range(100 * number))}
                await store.add_many_spans([Span(*ids, f"{caller}-{number}", 1.0, attributes=tokens)])

    await asyncio.gather(*(record(caller) for caller in range(8)))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["file", "postgres"])
async def test_what_was_answered_survives_kill_9(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = str(tmp_path / "store.db") if kind == "file" else request.getfixturevalue("postgres_store_url")
    command = [sys.executable, "-c", KILLED, url]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    store = LightningStore(url)
    spans = await store.query_spans("ro-killed")
    assert {span.name for span in spans} == {f"{caller}-{number}" for caller in range(8) for number in range(20)}
    for span in spans:
        number = int(span.name.split("-")[1])
        assert span.attributes["agentlightning.prompt_token_ids"] == list(range(100 * number))
    await store.close()


async def test_only_calls_within_it_do_without_the_disk_and_never_those_beside_them(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")

    def synchronous(tx: Tx) -> int:
        return tx.all("PRAGMA synchronous")[0][0]

    normal, full = 1, 2
    assert await store.do("look", synchronous) == full
    with relaxed():
        assert is_relaxed()
        assert await store.do("look", synchronous) == normal
        within = asyncio.create_task(store.do("look", synchronous))
    assert not is_relaxed()
    assert await asyncio.gather(within, store.do("look", synchronous)) == [full, full]
    assert await store.do("look", synchronous) == full
    await store.close()
