"""Checkpoints of the write-ahead log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentlightning.span import Span
from agentlightning.store.sql.store import SqlStore


async def test_the_log_beside_the_database_does_not_grow_with_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.sql.sqlite.checkpointer.LOG_BYTES", 500_000)
    store = SqlStore(tmp_path / "store.db")
    attempted = await store.start_rollout("task")
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    for _ in range(60):
        await store.add_many_spans([Span(*ids, "work", 1.0, attributes={"text": "x" * 10_000}) for _ in range(10)])
    assert (tmp_path / "store.db-wal").stat().st_size < 4_000_000
    assert (await store.statistics())["spans"] == 600
    await store.close()


async def test_a_store_closes_while_its_log_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.store.sql.sqlite.checkpointer.LOG_BYTES", 0)
    for number in range(20):
        store = SqlStore(tmp_path / "store.db")
        await store.enqueue_rollout(number)
        await asyncio.wait_for(store.close(), 30)
