"""The size of a SQLite file: each token block is stored once, and vacuum returns free pages while others write."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from agentlightning.span import PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.store.sql.spans.token_blocks import BLOCK
from agentlightning.store.sql.sqlite import backend
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration


def blocks_in(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT count(*) FROM token_blocks").fetchone()[0]


async def converse(store: LightningStoreBase, turns: int, start: Sequence[int]) -> tuple[str, list[list[int]]]:
    """A rollout whose prompts begin with `start` and grow by two blocks with each turn; (its id, the prompts)."""
    await store.enqueue_rollout("task")
    rollout = await store.dequeue_rollout()
    assert rollout is not None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    said, prompts = list(start), list[list[int]]()
    for turn in range(turns):
        prompts.append(list(said))
        attributes = {PROMPT_TOKEN_IDS: said, RESPONSE_TOKEN_IDS: [turn]}
        await store.add_span(Span(*ids, "chat", 1.0, attributes=attributes))
        said = [*said, *([turn] * 2 * BLOCK)]
    await store.update_attempt(*ids, status="succeeded")
    return ids[0], prompts


async def test_turns_groups_and_branches_share_their_blocks(tmp_path: Path) -> None:
    path, start = tmp_path / "store.db", list(range(5 * BLOCK))
    store = LightningStore(path)
    await converse(store, 10, start)
    assert blocks_in(path) == 5 + 9 * 2
    group = [await converse(store, 10, start) for _ in range(4)]
    assert blocks_in(path) == 5 + 9 * 2
    _, _ = await converse(store, 3, [*start, *([-1] * BLOCK)])
    assert blocks_in(path) == 5 + 9 * 2 + 1 + 2 * 2
    await store.close()
    store = LightningStore(path)
    for rollout_id, prompts in group:
        spans = await store.query_spans(rollout_id)
        assert [span.attributes[PROMPT_TOKEN_IDS] for span in spans] == prompts
    await store.close()


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

    monkeypatch.setattr(backend, "STEP_PAGES", 16)
    monkeypatch.setattr(backend.time, "sleep", pause)
    full = pragma(path, "page_count")
    await store.vacuum()
    assert len(sizes) > 3
    assert sizes[-1] < full / 2
    assert sizes == sorted(sizes, reverse=True)
    other.close()
    assert len(await store.query_queues()) == 1 + len(sizes)
    await store.close()


async def test_every_block_of_a_long_chain_that_nothing_needs_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = LightningStore(path)
    first, _ = await converse(store, 3, list(range(5 * BLOCK)))
    await converse(store, 1, list(range(2 * BLOCK)))
    await store.close()
    connection = sqlite3.connect(path, isolation_level=None)
    key = "(SELECT key FROM rollouts WHERE rollout_id = ?)"
    attempt = f"(SELECT key FROM attempts WHERE rollout_key = {key})"
    connection.execute(f"DELETE FROM span_packs WHERE attempt_key = {attempt}", [first])
    connection.close()
    store = LightningStore(path)
    assert blocks_in(path) > 2
    await store.vacuum()
    assert blocks_in(path) == 2
    await store.close()
