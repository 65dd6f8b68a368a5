"""Files of a database that are deleted, replaced or damaged while it is open."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.assemble import trajectory
from agentlightning.errors import RolloutRejectedError, StoreError, StoreLostError
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import RolloutConfig
from agentlightning.span import DAMAGED, PROMPT_TOKEN_IDS, Span
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


BAD = "WHERE rollout_id = 'ro-bad'"


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE rollouts SET input = '{{\"cut' {BAD}",
        f"UPDATE rollouts SET input = CAST(x'22ff22' AS TEXT) {BAD}",
        f"UPDATE rollouts SET metadata = '[' {BAD}",
        f"UPDATE rollouts SET config = '{{\"max_attempts\": 0}}' {BAD}",
        f"UPDATE rollouts SET mode = CAST(x'f09f' AS TEXT) {BAD}",
        f"UPDATE rollouts SET attempt_count = 'many' {BAD}",
    ],
)
@pytest.mark.parametrize("limit", [1, 5])
async def test_a_damaged_rollout_is_set_aside_by_name_and_its_neighbours_are_claimed(
    tmp_path: Path, change: str, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.update_queue("default", 4)
    for name in ("ro-first", "ro-bad", "ro-second", "ro-third"):
        await store.enqueue_rollout(name, rollout_id=name, priority=int(name == "ro-bad"))
    await store.close()
    damage(tmp_path / "store.db", change)
    store = LightningStore(tmp_path / "store.db")
    claimed = list[str]()
    while found := await store.dequeue_many_rollouts(limit):
        claimed += [each.rollout_id for each in found]
    assert claimed == ["ro-first", "ro-second", "ro-third"]
    (ended,) = await store.wait_for_rollouts(rollout_ids=["ro-bad"], timeout=0)
    attempt = await store.get_latest_attempt("ro-bad")
    assert attempt is not None
    assert (ended.status, attempt.status, attempt.sequence_id) == ("failed", "failed", 1)
    assert attempt.metadata["error"]["type"] == "Damaged"
    assert "rollout 'ro-bad' is damaged" in attempt.metadata["error"]["message"]
    assert bool(attempt.metadata["damaged"]) == ("SET attempt_count" not in change)
    assert caplog.text.count("a rollout is set aside as failed: rollout 'ro-bad'") == 1
    assert await store.count_rollouts(status_in=["failed"]) == 1
    assert [each.rollout_id for each in await store.query_rollouts()] == ["ro-first", "ro-bad", "ro-second", "ro-third"]
    assert await store.delete_rollouts(["ro-bad"]) == 1
    await store.requeue_rollout("ro-second", "again")
    again = await store.dequeue_rollout()
    assert again is not None
    assert again.rollout_id == "ro-second"
    await store.close()


@pytest.mark.parametrize(
    "change", [f"UPDATE rollouts SET start_time = 'noon' {BAD}", f"UPDATE rollouts SET rollout_id = x'ff' {BAD}"]
)
async def test_a_rollout_whose_row_cannot_be_mended_holds_up_no_other(tmp_path: Path, change: str) -> None:
    store = LightningStore(tmp_path / "store.db")
    for name in ("ro-bad", "ro-good"):
        await store.enqueue_rollout(name, rollout_id=name)
    await store.close()
    damage(tmp_path / "store.db", change)
    store = LightningStore(tmp_path / "store.db")
    claimed = await store.dequeue_many_rollouts(5)
    assert [each.rollout_id for each in claimed] == ["ro-good"]
    with pytest.raises(StoreError, match="is damaged in the database"):
        await store.query_rollouts()
    await store.close()


@pytest.mark.parametrize("change", ["metadata = '{'", "start_time = 'noon'", "worker_id = x'00'", "status = 'odd'"])
async def test_a_damaged_attempt_is_named_and_deleted_and_gives_its_place_back(tmp_path: Path, change: str) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.update_queue("default", 1)
    for name in ("ro-bad", "ro-good"):
        await store.enqueue_rollout(name, rollout_id=name)
    assert await store.dequeue_rollout() is not None
    await store.close()
    damage(tmp_path / "store.db", f"UPDATE attempts SET {change}")
    store = LightningStore(tmp_path / "store.db")
    with pytest.raises(StoreError, match=r"of rollout 'ro-bad' is damaged .*delete_rollouts\(\['ro-bad'\]\)"):
        await store.query_attempts("ro-bad")
    assert await store.delete_rollouts(["ro-bad"]) == 1
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == "ro-good"
    await store.close()


@pytest.mark.parametrize("table", ["rollouts SET config = '{'", "attempts SET metadata = '{'"])
async def test_a_damaged_rollout_whose_time_is_up_gives_its_place_back(tmp_path: Path, table: str) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.update_queue("default", 1)
    await store.start_rollout("bad", rollout_id="ro-bad", config=RolloutConfig(timeout_seconds=0.2, max_attempts=2))
    await store.close()
    damage(tmp_path / "store.db", f"UPDATE {table}")
    store = LightningStore(tmp_path / "store.db")
    good = await store.enqueue_rollout("good")
    claimed = await store.dequeue_rollout(timeout=20)
    assert claimed is not None
    assert claimed.rollout_id == good.rollout_id
    bad = await store.get_rollout_by_id("ro-bad")
    assert bad is not None
    assert bad.status == "failed"
    await store.close()


async def test_a_damaged_worker_is_listed_with_the_reason_and_beats_again(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    await store.update_worker("bad", {"a": 1})
    await store.update_worker("good", {"a": 2})
    await store.close()
    damage(tmp_path / "store.db", "UPDATE workers SET stats = '{' WHERE worker_id = 'bad'")
    store = LightningStore(tmp_path / "store.db")
    bad, good = await store.query_workers()
    assert (bad.stats, (bad.last_error or {})["type"], good.stats) == ({}, "Damaged", {"a": 2})
    assert (await store.update_worker("bad", {"a": 3})).stats == {"a": 3}
    await store.close()


BAD_PACK = "WHERE key = (SELECT key FROM span_packs ORDER BY key LIMIT 1 OFFSET 1)"


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE span_packs SET body = substr(body, 1, 20) {BAD_PACK}",
        f"UPDATE span_packs SET body = x'00ffffffffffffffff' {BAD_PACK}",
        f"UPDATE span_packs SET body = x'00' {BAD_PACK}",
        f"UPDATE span_packs SET ids = x'00' {BAD_PACK}",
        f"UPDATE span_packs SET ids = CAST('[\"a' AS BLOB) {BAD_PACK}",
        "DELETE FROM prompts WHERE keep > 0 AND length(ids) > 0",
    ],
)
async def test_damaged_spans_stand_in_their_lists_by_name_and_hide_no_others(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = LightningStore(tmp_path / "store.db")
    started = await store.start_rollout("task", rollout_id="ro-bad")
    ids = started.rollout_id, started.attempt.attempt_id
    prompts = [list(range(400)), list(range(800)), list(range(400))]
    for prompt in prompts:
        two = [Span(*ids, "chat", 1.0, attributes={PROMPT_TOKEN_IDS: prompt}), Span(*ids, "work", 1.0)]
        await store.add_many_spans(two)
    await store.close()
    damage(tmp_path / "store.db", change)
    store = LightningStore(tmp_path / "store.db")
    spans = await store.query_spans("ro-bad")
    assert [span.name for span in spans] == ["chat", "work", *[DAMAGED] * 2, "chat", "work"]
    assert [span.sequence_id for span in spans] == [1, 2, 3, 4, 5, 6]
    assert [span.attributes[PROMPT_TOKEN_IDS] for span in spans if span.name == "chat"] == [prompts[0], prompts[2]]
    assert "2 spans of attempt" in (message := spans[2].status_message or "")
    assert "store.delete_rollouts(['ro-bad']) removes the rollout" in message
    assert await store.newest_spans(6) == spans[::-1]
    assert [found async for _, found in store.iter_spans(["ro-bad"])] == [spans]
    assert await store.query_spans("ro-bad", after=spans[1].span_id, limit=3) == spans[2:5]
    assert caplog.text.count("2 spans of attempt") == 1
    with pytest.raises(RolloutRejectedError, match="2 spans of attempt"):
        trajectory(*ids, spans)
    await store.cancel_rollout("ro-bad")
    assert await store.delete_rollouts(["ro-bad"]) == 1
    await store.close()


@pytest.mark.parametrize("change", ["body = '{'", "body = '{\"llm\": 5}'", "body = CAST(x'22ff22' AS TEXT)"])
async def test_damaged_resources_are_named_and_left_out_of_their_lists(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = LightningStore(tmp_path / "store.db")
    for name in ("rs-1", "rs-2", "rs-3", "rs-4", "rs-5"):
        await store.add_resources({"prompt": PromptTemplate(template=change)}, name)
    await store.close()
    damage(tmp_path / "store.db", f"UPDATE resources SET {change} WHERE resources_id IN ('rs-2', 'rs-3')")
    store = LightningStore(tmp_path / "store.db")

    async def found(**wishes: Any) -> list[str]:
        return [update.resources_id for update in await store.query_resources(**wishes)]

    for _ in range(2):
        assert await found() == ["rs-1", "rs-4", "rs-5"]
    assert await found(after="rs-1", limit=1) == ["rs-4"]
    assert await found(offset=1, limit=2) == ["rs-4", "rs-5"]
    assert await found(sort_by="resources_id", sort_order="desc", limit=3) == ["rs-5", "rs-4", "rs-1"]
    assert [caplog.text.count(f"resources '{name}'") for name in ("rs-2", "rs-3")] == [1, 1]
    with pytest.raises(StoreError, match="'rs-2'"):
        await store.get_resources_by_id("rs-2")
    await store.close()
