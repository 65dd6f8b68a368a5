"""The prompts of an attempt are stored once, however many calls and branches begin with the same tokens."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store.sql.pack import LONG_PROMPT
from agentlightning.store.sql.prompts import PromptReader
from agentlightning.store.sql.store import SqlStore

BLOCK = LONG_PROMPT // 4
"""Tokens from which a prompt is kept apart from its span."""


async def stored(store: SqlStore) -> int:
    """Bytes of the prompts in the database."""
    sql = "SELECT coalesce(sum(length(ids)), 0) FROM prompts"
    return await store.read("bytes", lambda connection: connection.all(sql)[0][0])


async def started(store: SqlStore) -> tuple[str, str]:
    rollout = await store.start_rollout("task")
    return rollout.rollout_id, rollout.attempt.attempt_id


async def call(store: SqlStore, ids: tuple[str, str], *prompts: list[int]) -> None:
    await store.add_many_spans([Span(*ids, "chat", 1.0, attributes={PROMPT_TOKEN_IDS: each}) for each in prompts])


async def prompts_of(store: SqlStore, ids: tuple[str, str]) -> list[list[int]]:
    return [span.attributes[PROMPT_TOKEN_IDS] for span in await store.query_spans(*ids)]


def turns(count: int, new: int, seed: int = 0) -> list[list[int]]:
    """Each prompt is all that was said before, and `new` tokens of it are new."""
    source, said, prompts = random.Random(seed), list[int](), list[list[int]]()
    for _ in range(count):
        said = [*said, *(source.randrange(100_000) for _ in range(new))]
        prompts.append(said)
    return prompts


@pytest.mark.parametrize("at_once", [1, 5, 40])
async def test_a_conversation_takes_space_for_what_is_new_in_each_turn(at_once: int) -> None:
    store = SqlStore(":memory:")
    ids, said = await started(store), turns(40, 300)
    for start in range(0, 40, at_once):
        await call(store, ids, *said[start : start + at_once])
    assert await stored(store) == 4 * 40 * 300
    assert await prompts_of(store, ids) == said
    await store.close()


async def test_branches_store_what_they_have_in_common_once() -> None:
    store = SqlStore(":memory:")
    ids, trunk = await started(store), list(range(10 * BLOCK))
    said = [trunk + [branch] * (2 * BLOCK) for branch in range(5)]
    said += [[*said[0], *range(BLOCK)], [*said[1], *range(BLOCK)]]
    await call(store, ids, *said)
    assert await stored(store) == 4 * (10 * BLOCK + 5 * 2 * BLOCK + 2 * BLOCK)
    assert await prompts_of(store, ids) == said
    await store.close()


async def test_a_short_prompt_is_kept_with_its_span() -> None:
    store = SqlStore(":memory:")
    ids = await started(store)
    await call(store, ids, list(range(BLOCK - 1)))
    assert await stored(store) == 0
    assert await prompts_of(store, ids) == [list(range(BLOCK - 1))]
    await store.close()


async def test_a_conversation_goes_on_where_it_was_after_a_restart_and_at_another_server(tmp_path: Path) -> None:
    said = turns(12, 100)
    store = SqlStore(tmp_path / "store.db")
    ids = await started(store)
    for number, prompt in enumerate(said[:10]):
        if number % 3 == 2:
            await store.close()
            store = SqlStore(tmp_path / "store.db")
        await call(store, ids, prompt)
    assert await stored(store) == 4 * 1_000
    other = SqlStore(tmp_path / "store.db")
    await call(other, ids, said[10])
    await call(store, ids, said[11])
    assert await stored(store) == 4 * 1_200
    for each in (store, other):
        assert await prompts_of(each, ids) == said
        await each.close()


async def test_a_conversation_is_not_read_again_because_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = SqlStore(tmp_path / "store.db"), SqlStore(tmp_path / "store.db")
    ids, others, said = await started(store), await started(other), turns(8, 100)
    reads: list[int] = []
    load = PromptReader.load_trees
    monkeypatch.setattr(PromptReader, "load_trees", lambda *args: (reads.append(1), load(*args)))
    for number, prompt in enumerate(said):
        await call(other, others, prompt[number:])
        await call(store, ids, prompt)
    assert not reads
    assert await prompts_of(store, ids) == said
    await store.close()
    await other.close()


async def test_an_attempt_that_another_process_deleted_is_not_continued(tmp_path: Path) -> None:
    store, other = SqlStore(tmp_path / "store.db"), SqlStore(tmp_path / "store.db")
    ids, said = await started(store), turns(3, 200)
    await call(store, ids, said[0])
    await other.update_attempt(*ids, status="succeeded")
    await other.delete_rollouts([ids[0]])
    again = await started(other)  # with the key of the one before
    await call(other, again, said[0][100:])
    for prompt in said:
        await call(store, again, prompt)
    for each in (store, other):
        assert await prompts_of(each, again) == [said[0][100:], *said]
        await each.close()


async def test_an_attempt_of_a_prompt_as_long_as_that_of_the_deleted_one_is_not_taken_for_it(tmp_path: Path) -> None:
    store, other = SqlStore(tmp_path / "store.db"), SqlStore(tmp_path / "store.db")
    ids = await started(store)
    await call(store, ids, [1] * 200)
    await other.cancel_rollout(ids[0])
    await other.delete_rollouts([ids[0]])
    again = await started(other)  # with the keys of the one before
    await call(other, again, [1] * 100 + [2] * 100)
    await call(store, again, [1] * 150)
    for each in (store, other):
        assert await prompts_of(each, again) == [[1] * 100 + [2] * 100, [1] * 150]
        await each.close()


async def test_a_call_that_is_undone_leaves_no_prompt_that_others_continue() -> None:
    store = SqlStore(":memory:")
    ids, (first, second) = await started(store), turns(2, 200)
    good = Span(*ids, "chat", 1.0, attributes={PROMPT_TOKEN_IDS: first})
    bad = Span(ids[0], "at-unknown", "chat", 1.0)
    answers = await asyncio.gather(store.add_many_spans([good, bad]), call(store, ids, second), return_exceptions=True)
    assert isinstance(answers[0], Exception)
    assert await prompts_of(store, ids) == [second]
    await store.close()


prompts = st.lists(
    st.tuples(st.integers(0, 4 * BLOCK), st.integers(0, 3 * BLOCK), st.integers(0, 2)).map(
        lambda shape: list(range(shape[0])) + [shape[2]] * shape[1]
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60)
@given(prompts, st.integers(1, 4), st.integers(1, 5))
def test_prompts_come_back_whatever_they_share_and_however_they_are_read(
    several: list[list[int]], at_once: int, page: int
) -> None:
    async def check() -> None:
        store = SqlStore(":memory:")
        ids = await started(store)
        for start in range(0, len(several), at_once):
            await call(store, ids, *several[start : start + at_once])
        spans = await store.query_spans(*ids)
        assert [span.attributes[PROMPT_TOKEN_IDS] for span in spans] == several
        paged = list[Span]()
        while some := await store.query_spans(*ids, after=paged[-1].span_id if paged else None, limit=page):
            paged += some
        assert paged == spans
        assert [found async for _, found in store.iter_spans([ids[0]])] == [spans]
        assert await store.newest_spans(len(spans)) == spans[::-1]
        counts = await store.query_spans(*ids, tokens=False)
        assert [span.attributes["gen_ai.usage.input_tokens"] for span in counts] == list(map(len, several))
        await store.close()

    asyncio.run(check())
