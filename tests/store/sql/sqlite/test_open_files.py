"""Files of a database that are deleted, replaced or damaged while it is open."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import httpx
import pytest

from agentlightning.errors import StoreError, StoreLostError
from agentlightning.rollouts import RolloutConfig
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.export import export_store
from agentlightning.store.http.client import LightningStoreClient


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.write_bytes(b"something else")


@pytest.mark.parametrize("change", [delete, replace])
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
async def test_what_nobody_would_ever_find_is_not_acknowledged(tmp_path: Path, suffix: str, change) -> None:
    store = LightningStore(tmp_path / "store.db")
    kept = await store.start_rollout("kept")
    await store.add_span(Span(kept.rollout_id, kept.attempt.attempt_id, "work", 1.0))
    await store.check_health()
    change(tmp_path / f"store.db{suffix}")
    for _ in range(2):
        with pytest.raises(StoreLostError, match=f"store.db{suffix} was {change.__name__}d while .* was open"):
            await store.enqueue_rollout("lost")
        with pytest.raises(StoreLostError, match="export it"):
            await store.update_worker("worker")
        with pytest.raises(StoreLostError):
            await store.check_health()
    assert [each.rollout_id for each in await store.query_rollouts()] == [kept.rollout_id], "what is there can be read"
    assert [span.name for span in await store.query_spans(kept.rollout_id)] == ["work"]
    await store.close()
    if change is delete and not suffix:
        assert not (tmp_path / "store.db").exists(), "nobody makes an empty one in its place"


async def test_a_server_whose_database_was_deleted_says_that_it_is_ill(tmp_path: Path, hub) -> None:
    store = LightningStore(tmp_path / "store.db")
    url = hub.serve(store)
    attempted = await store.start_rollout("task")
    client = LightningStoreClient(url, patience=0.1)
    (tmp_path / "store.db").unlink()
    with pytest.raises(StoreLostError, match="deleted"):
        await client.add_span(Span(attempted.rollout_id, attempted.attempt.attempt_id, "lost", 1.0))
    assert (await asyncio.to_thread(httpx.get, f"{url}/health")).status_code == 500
    assert [each.rollout_id for each in await client.query_rollouts()] == [attempted.rollout_id]
    assert (await export_store(client, tmp_path / "saved.jsonl")).rollouts == 1
    await client.close()
    await store.close()


async def test_a_store_that_moved_with_its_folder_or_is_found_by_another_name_goes_on(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    store = LightningStore(tmp_path / "there" / "store.db")
    for number in range(3):
        await store.enqueue_rollout(number)
    other = LightningStore(tmp_path / "here" / "store.db")
    await other.enqueue_rollout("by its other name")
    await other.close()
    await store.enqueue_rollout("after it was closed")
    await store.vacuum()
    await store.enqueue_rollout("after it was rewritten")
    assert await store.count_rollouts() == 6
    await store.close()


# -- damaged rows ----------------------------------------------------------------------------------------------------


def damage(path: Path, change: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(change)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("change", "call"),
    [
        ("UPDATE rollouts SET input = '{\"cut' WHERE rollout_id = 'ro-bad'", "query_rollouts"),
        ("UPDATE rollouts SET config = '{\"max_attempts\": 0}' WHERE rollout_id = 'ro-bad'", "query_rollouts"),
        ("UPDATE attempts SET metadata = 'nothing'", "query_attempts"),
        ("UPDATE span_packs SET body = substr(body, 1, 20)", "query_spans"),
        ("UPDATE span_packs SET ids = x'00'", "query_spans"),
    ],
)
async def test_a_damaged_row_names_itself_and_can_be_removed(tmp_path: Path, change: str, call: str) -> None:
    store = LightningStore(tmp_path / "store.db")
    good = await store.start_rollout("good", worker_id="worker")
    bad = await store.start_rollout("bad", rollout_id="ro-bad", worker_id="worker")
    await store.add_span(Span(bad.rollout_id, bad.attempt.attempt_id, "work", 1.0, attributes={"a": "b" * 50}))
    await store.close()
    damage(tmp_path / "store.db", change)
    store = LightningStore(tmp_path / "store.db")
    with pytest.raises(StoreError, match=r"of rollout 'ro-bad'|rollout 'ro-bad' is damaged") as caught:
        await getattr(store, call)(*(() if call == "query_rollouts" else ("ro-bad",)))
    assert "store.delete_rollouts(['ro-bad']) removes the rollout" in str(caught.value)
    if call == "query_spans":
        await store.cancel_rollout("ro-bad")
    assert await store.delete_rollouts(["ro-bad"]) == 1
    assert [each.rollout_id for each in await store.query_rollouts()] == [good.rollout_id]
    worker = await store.update_worker("worker")
    assert (worker.current_rollout_id, worker.open_attempts) == (good.rollout_id, 1)
    assert [queue.open for queue in await store.query_queues()] == [1]
    await store.close()


async def test_a_damaged_rollout_whose_time_is_up_holds_up_no_other(tmp_path: Path) -> None:
    config = RolloutConfig(timeout_seconds=0.2, max_attempts=2)
    store = LightningStore(tmp_path / "store.db")
    await store.start_rollout("bad", rollout_id="ro-bad", config=config)
    await store.close()
    damage(tmp_path / "store.db", "UPDATE rollouts SET config = '{' WHERE rollout_id = 'ro-bad'")
    store = LightningStore(tmp_path / "store.db")
    good = await store.start_rollout("good", config=RolloutConfig(timeout_seconds=0.3))
    (ended,) = await store.wait_for_rollouts(rollout_ids=[good.rollout_id], timeout=20)
    assert ended.status == "failed"
    await store.close()
