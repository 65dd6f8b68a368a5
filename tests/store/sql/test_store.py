"""The SQLite store: where it keeps things, what it says when it cannot, and several threads and loops at once."""

from __future__ import annotations

import abc
import asyncio
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError, StoreFullError
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreClient
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration

# -- where -----------------------------------------------------------------------------------------------------------


async def test_the_default_store_is_a_file_under_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LightningStore()
    await store.enqueue_rollout("task")
    await store.close()
    assert (tmp_path / ".agentlightning" / "store.db").exists()


@pytest.mark.parametrize("form", ["{path}", "sqlite:///{path}"])
async def test_what_was_stored_is_there_when_opened_again(tmp_path: Path, form: str) -> None:
    url = form.format(path=tmp_path / "deep" / "er" / "store.db")
    store = LightningStore(url)
    made = await store.enqueue_rollout({"question": "?"})
    await store.close()
    store = LightningStore(url)
    assert await store.query_rollouts() == [made]
    await store.close()


@pytest.mark.parametrize(("url", "advice"), [("redis://host", "sqlite:///PATH"), ("", "empty")])
def test_a_url_that_is_no_store_is_refused_with_advice(url: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        LightningStore(url)


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, and they are longer than a header\n" * 10)
    with pytest.raises(StoreError, match=r"notes\.txt.*not a store"):
        LightningStore(path)
    assert path.read_text().startswith("these are my notes")


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()
    with pytest.raises(StoreError, match="customers"):
        LightningStore(path)


def test_a_file_that_is_no_database_is_not_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "notes.txt", list[sqlite3.Connection]()
    path.write_text("these are my notes\n" * 100)
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **options: opened.append(connect(*args, **options)) or opened[-1]
    )
    with pytest.raises(StoreError):
        LightningStore(path)
    assert opened
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")


async def test_a_directory_holds_its_store_in_store_db(tmp_path: Path) -> None:
    await LightningStore(tmp_path).close()
    assert (tmp_path / "store.db").is_file()


async def test_the_url_of_a_server_opens_its_store(tmp_path: Path) -> None:
    store = LightningStore("http://127.0.0.1:4747")
    assert isinstance(store, LightningStoreClient)
    await store.close()


async def test_a_damaged_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = LightningStore(path)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest("task" * 100) for _ in range(200)])
    await store.close()
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    path.write_bytes(content)

    async def look() -> None:
        store = LightningStore(path)
        try:
            await store.query_rollouts()
        finally:
            await store.close()

    with pytest.raises(StoreError, match=r"store\.db.*recover"):
        await look()


# -- callers ---------------------------------------------------------------------------------------------------------


async def test_a_failing_call_does_not_spoil_those_committed_with_it(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    calls = [
        store.enqueue_rollout(index) if index % 3 else store.requeue_rollout(f"nope-{index}", "why")
        for index in range(60)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, NotFoundError) for answer in answers] == [index % 3 == 0 for index in range(60)]
    assert len(await store.query_rollouts()) == 40
    await store.close()


async def test_a_call_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    attempted = await store.start_rollout("task", rollout_id="mine")
    good = Span("mine", attempted.attempt.attempt_id, "good", 1.0)
    bad = Span("mine", "at-unknown", "bad", 1.0)
    with pytest.raises(NotFoundError):
        await store.add_many_spans([good, bad])
    assert await store.query_spans("mine") == []
    with pytest.raises(ConflictError):
        await store.start_rollout("task", rollout_id="mine")
    assert len(await store.query_attempts("mine")) == 1
    await store.close()


async def test_one_store_serves_many_event_loops(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")
    claimed: list[str] = []

    async def runner() -> None:
        while (attempted := await store.dequeue_rollout(timeout=1.0)) is not None:
            claimed.append(attempted.rollout_id)
            await store.update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status="succeeded")

    threads = [threading.Thread(target=lambda: asyncio.run(runner())) for _ in range(4)]
    for thread in threads:
        thread.start()
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(index) for index in range(100)])
    ids = [rollout.rollout_id for rollout in made]
    finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=60)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert len(finished) == 100
    assert sorted(claimed) == sorted(ids)
    await store.close()


async def test_the_answer_to_a_loop_that_is_gone_is_given_back(tmp_path: Path) -> None:
    store = LightningStore(tmp_path / "store.db")

    def leave_at_once() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(store.dequeue_rollout(timeout=30))
        loop.run_until_complete(asyncio.sleep(0.02))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

    await asyncio.to_thread(leave_at_once)
    made = await store.enqueue_rollout("task")
    attempted = await store.dequeue_rollout(timeout=10)
    assert attempted is not None
    assert attempted.rollout_id == made.rollout_id
    await store.close()


def test_a_forgotten_store_ends_its_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    store = LightningStore(tmp_path / "store.db")
    own = set(threading.enumerate()) - before
    assert {"agl-store-writer", "agl-store-reader"} <= {thread.name for thread in own}
    del store
    gc.collect()
    assert not any(thread.is_alive() for thread in own if thread.name.startswith("agl-store"))


FORK = """
import asyncio, os, sys
from agentlightning.errors import StoreClosedError
from agentlightning.store import LightningStore

store = LightningStore(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        asyncio.run(store.enqueue_rollout("child"))
    except StoreClosedError as error:
        print(error)
    sys.exit(0)
os.waitpid(child, 0)
asyncio.run(store.enqueue_rollout("parent"))
"""


async def test_a_forked_child_is_told_to_open_its_own_and_the_parent_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    command = [sys.executable, "-c", FORK, str(path)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert "opened by a parent process" in done.stdout
    store = LightningStore(path)
    assert [rollout.input for rollout in await store.query_rollouts()] == ["parent"]
    await store.close()


# -- the disk --------------------------------------------------------------------------------------------------------


async def test_a_full_disk_is_told_to_the_callers_and_the_store_goes_on_once_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqlStore(path)
    attempted = await store.start_rollout("task")
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    kept = [await store.add_span(Span(*ids, "before", 1.0))]
    await _limit_pages(store, 100)
    big = [{PROMPT_TOKEN_IDS: list(range(start, start + 20_000))} for start in range(20)]
    calls = [store.add_span(Span(*ids, "big", 1.0, attributes=each)) for each in big]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, StoreFullError)]
    kept += [answer for answer in answers if isinstance(answer, Span)]
    assert refused
    assert len(refused) + len(kept) == 21
    assert "store.db" in str(refused[0])
    assert "MB free" in str(refused[0])
    assert await store.query_spans(ids[0]) == kept
    await _limit_pages(store, 1_000_000)
    kept.append(await store.add_span(Span(*ids, "after", 1.0)))
    assert await store.query_spans(ids[0]) == kept
    await store.close()


async def _limit_pages(store: SqlStore, pages: int) -> None:
    """What a full disk looks like to SQLite."""
    await store.do("limit", lambda tx: tx.connection.raw.execute(f"PRAGMA max_page_count = {pages}").fetchone())


# -- speed of import -------------------------------------------------------------------------------------------------


def test_importing_the_store_imports_no_database_library() -> None:
    code = "import sys, agentlightning.store; print('sqlite3' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


async def test_a_store_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = InMemoryLightningStore()
    await store.enqueue_rollout("task")
    await store.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
async def test_ids_of_the_caller_cost_no_more_the_more_there_are(tmp_path: Path) -> None:
    store, seconds = LightningStore(tmp_path / "store.db"), list[float]()
    for number in (2_000, 16_000):
        requests = [EnqueueRolloutRequest("task", rollout_id=f"{number}-{each}") for each in range(number)]
        start = time.perf_counter()
        for _ in range(2):  # the second time they are there
            await store.enqueue_many_rollouts(requests)
        seconds.append(time.perf_counter() - start)
    assert seconds[1] < 30 * seconds[0]  # 64 times where each is looked for among all
    await store.close()


def test_a_store_of_ones_own_that_lacks_a_method_says_which() -> None:
    class Half(LightningStore):
        async def close(self) -> None: ...

    with pytest.raises(TypeError, match=r"Half is not a whole store: it has no add_many_spans, .*, wait_for_rollouts"):
        Half()


def test_a_store_of_ones_own_may_have_abstract_methods() -> None:
    class Placed(SqlStore):
        @abc.abstractmethod
        def place(self) -> str: ...

    with pytest.raises(TypeError, match="place"):
        Placed(":memory:")
