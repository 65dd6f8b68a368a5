"""The write-ahead log of SQLite."""

from __future__ import annotations

from pathlib import Path

from agentlightning.span import Span
from agentlightning.store.sql.store import SqlStore


async def test_the_log_beside_the_database_does_not_grow_with_what_is_written(tmp_path: Path) -> None:
    store = SqlStore(tmp_path / "store.db")
    attempted = await store.start_rollout("task")
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    for _ in range(50):
        await store.add_many_spans([Span(*ids, "work", 1.0, attributes={"text": "x" * 50_000}) for _ in range(10)])
    assert (tmp_path / "store.db").stat().st_size > 15_000_000
    assert (tmp_path / "store.db-wal").stat().st_size < 8_000_000
    await store.close()
