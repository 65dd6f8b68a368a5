"""Deleting rollouts deletes their prompts and no others, in every kind of database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreBase
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.types import Retention

pytestmark = pytest.mark.integration

NOTHING = Retention(max_rollouts=0)


@pytest.fixture(params=["memory", "file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_store_url")
    return ":memory:" if request.param == "memory" else str(tmp_path / "store.db")


@pytest.fixture
async def store(url: str) -> AsyncIterator[LightningStoreBase]:
    store = LightningStore(url)
    yield store
    await store.close()


async def kept(store: LightningStoreBase) -> int:
    """Prompts in the database."""
    sql = cast("SqlStore", store)
    return await sql.read("count", lambda connection: connection.all("SELECT count(*) FROM prompts")[0][0])


def prompt(*values: int) -> list[int]:
    """A hundred tokens of each value, and a rest."""
    return [value for value in values for _ in range(100)] + [7]


async def finish(store: LightningStoreBase, *prompts: Sequence[int]) -> str:
    """A finished rollout that has a span with each of the prompts; its id."""
    rollout = await store.start_rollout("task")
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    for each in prompts:
        await store.add_span(Span(*ids, "chat", 1.0, attributes={PROMPT_TOKEN_IDS: list(each)}))
    await store.update_attempt(*ids, status="succeeded")
    return rollout.rollout_id


async def prompts_of(store: LightningStoreBase, rollout_id: str) -> list[list[int]]:
    return [span.attributes[PROMPT_TOKEN_IDS] for span in await store.query_spans(rollout_id)]


async def test_prompts_go_with_their_rollouts_and_no_others(store: LightningStoreBase) -> None:
    said = [prompt(1, 2, 3), prompt(1, 2, 3, 4, 5), prompt(1, 2, 9)]
    *_, last = [await finish(store, *said) for _ in range(3)]
    assert await kept(store) == 9
    pruned = await store.prune(Retention(max_rollouts=1))
    assert pruned.rollouts == 2
    assert await kept(store) == 3
    assert await prompts_of(store, last) == said
    await store.prune(NOTHING)
    assert await kept(store) == 0


async def test_a_prompt_that_was_dropped_is_stored_again(store: LightningStoreBase) -> None:
    for _ in range(2):
        rollout_id = await finish(store, prompt(1, 2, 3), prompt(1, 2, 3, 4))
        assert await prompts_of(store, rollout_id) == [prompt(1, 2, 3), prompt(1, 2, 3, 4)]
        assert await store.delete_rollouts([rollout_id]) == 1
        assert await kept(store) == 0


@pytest.mark.parametrize("url", ["file", "postgres"], indirect=True)
async def test_servers_that_write_and_prune_at_once_lose_no_tokens(store: LightningStoreBase, url: str) -> None:
    other = LightningStore(url)
    said = [prompt(1, 2), prompt(1, 2, 3)]

    async def work(store: LightningStoreBase) -> None:
        for _ in range(10):
            rollout_id = await finish(store, *said)
            assert await prompts_of(store, rollout_id) == said
            await store.delete_rollouts([rollout_id])

    await asyncio.gather(*(work(each) for each in (store, other) for _ in range(3)))
    await other.close()
    assert await kept(store) == 0


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=3), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_whatever_is_removed_nothing_more_and_nothing_less_goes(trees: list[list[list[int]]], order: object) -> None:
    async def check() -> None:
        store = InMemoryLightningStore()
        rollouts = {await finish(store, *(prompt(*values) for values in tree)): tree for tree in trees}
        removal = list(rollouts)
        order.shuffle(removal)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        for rollout_id in removal:
            del rollouts[rollout_id]
            await store.delete_rollouts([rollout_id])
            assert await kept(store) == sum(map(len, rollouts.values()))
            for left, tree in rollouts.items():
                assert await prompts_of(store, left) == [prompt(*values) for values in tree]
        await store.close()

    asyncio.run(check())
