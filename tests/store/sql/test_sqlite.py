"""The files of SQLite: the log beside the database, and vacuum, which returns free pages while others write."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentlightning.span import PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.store.sql import sqlite
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration


async def converse(store: LightningStoreBase, turns: int, start: Sequence[int]) -> tuple[str, list[list[int]]]:
    """A rollout whose prompts begin with `start` and grow by 256 tokens with each turn; (its id, the prompts)."""
    await store.enqueue_rollout("task")
    rollout = await store.dequeue_rollout()
    assert rollout is not None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    said, prompts = list(start), list[list[int]]()
    for turn in range(turns):
        prompts.append(list(said))
        attributes = {PROMPT_TOKEN_IDS: said, RESPONSE_TOKEN_IDS: [turn]}
        await store.add_span(Span(*ids, "chat", 1.0, attributes=attributes))
        said = [*said, *([turn] * 256)]
    await store.update_attempt(*ids, status="succeeded")
    return ids[0], prompts


async def test_a_store_opens_and_is_read_while_another_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    store = SqlStore(path)
    await store.enqueue_rollout("task")
    await store.close()
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    opened = SqlStore(path)
    assert len(await opened.query_rollouts()) == 1
    await opened.close()
    writer.close()
    assert pragma(path, "auto_vacuum") == 2


@pytest.mark.slow
async def test_a_long_conversation_takes_space_for_what_is_new(tmp_path: Path) -> None:
    async def size(turns: int) -> int:
        path = tmp_path / f"{turns}.db"
        store = LightningStore(path)
        await converse(store, turns, [])
        await store.vacuum()
        await store.close()
        return path.stat().st_size

    short, long = await size(50), await size(200)
    assert long < 4.2 * short


def pragma(path: Path, name: str) -> int:
    connection = sqlite3.connect(path)
    number = connection.execute(f"PRAGMA {name}").fetchone()[0]
    connection.close()
    return number


async def emptied(path: Path) -> SqlStore:
    """A store with free space in its file."""
    store = SqlStore(path)
    first, _ = await converse(store, 1, range(200_000))
    await store.delete_rollouts([first])
    return store


async def test_others_write_while_a_store_is_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    store = await emptied(path)
    other = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)  # waits for nobody
    sizes: list[int] = []

    def pause(seconds: float) -> None:
        other.execute("INSERT INTO queues (name) VALUES (?)", [f"queue {len(sizes)}"])
        sizes.append(other.execute("PRAGMA page_count").fetchone()[0])

    monkeypatch.setattr(sqlite, "STEP_PAGES", 16)
    monkeypatch.setattr(sqlite.time, "sleep", pause)
    full = pragma(path, "page_count")
    await store.vacuum()
    assert len(sizes) > 3
    assert sizes[-1] < full / 2
    assert sizes == sorted(sizes, reverse=True)
    other.close()
    assert len(await store.query_queues()) == 1 + len(sizes)
    await store.close()


async def test_the_log_beside_the_database_does_not_grow_with_what_is_written(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    attempted = await store.start_rollout("task")
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    for _ in range(50):
        await store.add_many_spans([Span(*ids, "work", 1.0, attributes={"text": "x" * 50_000}) for _ in range(10)])
    assert (tmp_path / "store.db").stat().st_size > 15_000_000
    assert (tmp_path / "store.db-wal").stat().st_size < 10_000_000
    await store.close()
