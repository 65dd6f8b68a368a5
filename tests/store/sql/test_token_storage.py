"""What prompts take in a database: each block of tokens once, and nothing once nobody needs it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentlightning.span import PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.store.sql.tokens import BLOCK


def blocks_in(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT count(*) FROM token_blocks").fetchone()[0]
    connection.close()
    return found


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


async def test_vacuum_drops_blocks_that_only_removed_rollouts_needed(tmp_path: Path) -> None:
    path, start = tmp_path / "store.db", list(range(5 * BLOCK))
    store = LightningStore(path)
    first, _ = await converse(store, 10, start)
    second, prompts = await converse(store, 2, start)
    await store.delete_rollouts([first])
    await store.vacuum()
    assert blocks_in(path) == 5 + 2
    spans = await store.query_spans(second)
    assert [span.attributes[PROMPT_TOKEN_IDS] for span in spans] == prompts
    third, prompts = await converse(store, 10, start)  # blocks that were dropped are stored again
    assert blocks_in(path) == 5 + 9 * 2
    spans = await store.query_spans(third)
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
