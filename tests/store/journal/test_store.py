"""A journal in front of a store: what was taken is there after a kill, and visible to whoever asks."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import orjson
import pytest

from agentlightning.errors import StoreClosedError, StoreError, StoreFullError
from agentlightning.span import Span, SpanEvent, new_span_id
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.instrumented import instrument
from agentlightning.store.journal import segments
from agentlightning.store.journal import store as journal_module
from agentlightning.store.journal.store import JournaledStore, recover_journals, with_journal
from agentlightning.store.sql.store import SqlStore


@pytest.fixture
def database(tmp_path):
    return tmp_path / "store.db"


@pytest.fixture
async def bare(database):
    store = SqlStore(database)
    yield store
    await store.close()


@pytest.fixture
async def store(bare, database):
    async with with_journal(bare, database) as store:
        yield store


@pytest.fixture
async def attempted(bare):
    return await bare.start_rollout({"question": "6*7"})


def span_of(attempted, name="call", **fields):
    ids = {"rollout_id": attempted.rollout_id, "attempt_id": attempted.attempt.attempt_id}
    return Span(**ids, name=name, start_time=1.0, end_time=2.0, span_id=new_span_id(), **fields)


def files(database):
    return sorted(path.name for path in database.parent.glob("*-calls-*"))


async def test_whoever_asks_sees_what_was_taken_before(store, attempted):
    for number in range(20):
        assert store.append([span_of(attempted, f"call {number}")]) is None
        spans = await store.query_spans(attempted.rollout_id)
        assert [span.name for span in spans] == [f"call {place}" for place in range(number + 1)]


async def test_what_is_written_after_comes_after(store, attempted):
    store.append([span_of(attempted, "call")])
    await store.add_span(span_of(attempted, "reward"))
    store.append([span_of(attempted, "call again")])
    ((_, spans),) = [each async for each in store.iter_spans([attempted.rollout_id])]
    assert [(span.sequence_id, span.name) for span in spans] == [(1, "call"), (2, "reward"), (3, "call again")]


async def test_spans_reach_the_store_by_themselves_and_leave_the_journal(store, bare, attempted, database):
    store.append([span_of(attempted)])
    assert store.pending == 1
    for _ in range(500):
        if not store.pending:
            break
        await asyncio.sleep(0.01)
    assert len(await bare.query_spans(attempted.rollout_id)) == 1
    assert store.pending == 0


async def test_nothing_is_left_of_a_journal_that_was_closed(bare, attempted, database):
    async with with_journal(bare, database) as store:
        store.append([span_of(attempted)])
        assert files(database)
    assert files(database) == []
    assert len(await bare.query_spans(attempted.rollout_id)) == 1
    with pytest.raises(StoreClosedError):
        store.append([span_of(attempted)])


async def test_attempts_that_were_superseded_are_named(store, attempted):
    told = []
    store.on_superseded = lambda *ids: told.append(ids)
    store.append([span_of(attempted)])
    await store.flush()
    assert told == []
    await store.start_attempt(attempted.rollout_id)
    store.append([span_of(attempted)])
    await store.flush()
    assert told == [(attempted.rollout_id, attempted.attempt.attempt_id)]


KILLED = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from agentlightning.span import Span, SpanEvent
    from agentlightning.store.journal.store import with_journal
    from agentlightning.store.sql.store import SqlStore

    async def main():
        store = SqlStore(sys.argv[1])
        async with with_journal(store, Path(sys.argv[1])) as journal:
            rollout = await journal.start_rollout({})
            for number in range(int(sys.argv[2])):
                event = SpanEvent("e", 1.5, {"n": number})
                span = Span(rollout.rollout_id, rollout.attempt.attempt_id, f"call {number}", 1.0, 2.0,
                            span_id=f"{number:016x}", attributes={"agentlightning.prompt_token_ids": [1, 2, number]},
                            events=(event,), parent_id="aa" if number % 2 else None)
                journal.append([span])
            print(rollout.rollout_id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
"""


async def kill_one(database, count):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(database), str(count)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.strip()


@pytest.mark.chaos
async def test_what_was_taken_before_a_kill_is_there_after_it(database):
    rollout_id = await kill_one(database, 40)
    assert files(database)
    bare = SqlStore(database)
    assert await bare.query_spans(rollout_id) == []
    async with with_journal(bare, database) as store:
        spans = await store.query_spans(rollout_id)
        assert files(database) == []
    await bare.close()
    assert [span.name for span in spans] == [f"call {number}" for number in range(40)]
    assert spans[3].attributes == {"agentlightning.prompt_token_ids": [1, 2, 3]}
    assert (spans[3].parent_id, spans[4].parent_id, spans[3].events) == ("aa", None, (SpanEvent("e", 1.5, {"n": 3}),))


@pytest.mark.chaos
async def test_a_record_that_was_cut_off_ends_the_journal_and_costs_nothing_else(database):
    rollout_id = await kill_one(database, 5)
    (path,) = database.parent.glob("*-calls-*")
    path.write_bytes(path.read_bytes()[:-3])
    bare = SqlStore(database)
    async with with_journal(bare, database) as store:
        spans = await store.query_spans(rollout_id)
    await bare.close()
    assert [span.name for span in spans] == [f"call {number}" for number in range(4)]


async def test_a_record_that_the_disk_spoilt_is_not_believed(database, bare, attempted):
    left = segments.Segments(database.with_name(f"{database.name}-calls"))
    for number in range(5):
        left.append(orjson.dumps([span_of(attempted, f"call {number}")]))
    left.close(keep=True)
    (path,) = database.parent.glob("*-calls-*")
    path.write_bytes(path.read_bytes().replace(b"call 3", b"call 9"))
    await recover_journals(bare)
    spans = await bare.query_spans(attempted.rollout_id)
    assert [span.name for span in spans] == [f"call {number}" for number in range(3)]


async def test_what_is_in_the_store_already_is_not_written_twice(database, bare, attempted):
    span = span_of(attempted)
    async with with_journal(bare, database) as first:
        first.append([span])
        (path,) = database.parent.glob("*-calls-*")
        left = path.read_bytes()
        await first.flush()
    path.write_bytes(left)
    async with with_journal(bare, database) as store:
        assert len(await store.query_spans(attempted.rollout_id)) == 1
    assert files(database) == []


async def test_the_journal_of_a_process_that_lives_is_left_alone(store, bare, attempted, database):
    store.append([span_of(attempted)])
    mine = files(database)
    async with with_journal(bare, database):
        assert files(database) == mine


async def test_a_span_that_the_store_refuses_does_not_hold_up_the_others(store, attempted, caplog):
    stranger = replace(span_of(attempted, "stranger"), rollout_id="ro-unknown")
    store.append([span_of(attempted, "one"), stranger, span_of(attempted, "two")])
    assert [span.name for span in await store.query_spans(attempted.rollout_id)] == ["one", "two"]
    assert stranger.span_id in caplog.text


async def test_one_refused_span_of_many_costs_no_commit_for_each_of_the_others(store, bare, attempted):
    spans = [span_of(attempted, f"call {number}") for number in range(500)]
    spans[250] = replace(spans[250], rollout_id="no such rollout")
    before = bare.counters()["commits"]
    for span in spans:
        store.append([span])
    await store.flush()
    assert bare.counters()["commits"] - before <= 5
    kept = await store.query_spans(attempted.rollout_id)
    assert [span.name for span in kept] == [span.name for span in spans if span.rollout_id == attempted.rollout_id]


async def test_a_journal_beside_another_database_is_set_aside(tmp_path, caplog):
    """As where the database was replaced while its server was down."""
    old, new = SqlStore(tmp_path / "old" / "store.db"), SqlStore(tmp_path / "new" / "store.db")
    attempted = await old.start_rollout({})
    for _ in range(2):
        async with with_journal(Failing(old), old.path) as store:
            store.append([span_of(attempted, f"call {number}") for number in range(3)])
        (left,) = old.path.parent.glob("*-calls-*")
        left.rename(new.path.with_name(left.name))
        await recover_journals(new)
    aside = sorted(new.path.parent.glob("unread-*"))
    assert len(aside) == 2
    assert f"3 of 3 spans are refused, as those of another database would be; the records are kept in {aside[1]}" in (
        caplog.text
    )
    for path in aside:
        path.rename(old.path.with_name(left.name))
        await recover_journals(old)
    assert len(await old.query_spans(attempted.rollout_id)) == 6
    await old.close()
    await new.close()


async def test_a_full_disk_is_an_error_to_whoever_records(store, attempted, monkeypatch):
    real, tries = os.pwrite, []

    def write(file, data, place):
        tries.append(file)
        if len(tries) == 1:
            return real(file, data[:10], place)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.os, "pwrite", write)
    with pytest.raises(StoreFullError, match="No space left"):
        store.append([span_of(attempted, "lost")])
    monkeypatch.undo()
    store.append([span_of(attempted, "kept")])
    assert [span.name for span in await store.query_spans(attempted.rollout_id)] == ["kept"]


class Failing:
    """A store that cannot be written for a while."""

    def __init__(self, store):
        self.store, self.error = store, StoreFullError("the disk is full")
        self.tried = asyncio.Event()

    async def add_many_spans(self, spans):
        self.tried.set()
        if self.error is not None:
            raise self.error
        return await self.store.add_many_spans(spans)


async def test_while_the_store_fails_nothing_is_taken_and_what_was_taken_is_not_lost(bare, attempted, database):
    failing = Failing(bare)
    async with with_journal(failing, database) as store:
        store.append([span_of(attempted, "taken")])
        await asyncio.wait_for(failing.tried.wait(), 5)
        await store.flush()
        with pytest.raises(StoreError, match="disk is full"):
            store.append([span_of(attempted, "refused")])
        failing.error = None
        for _ in range(100):
            if not store.pending:
                break
            await asyncio.sleep(0.02)
        store.append([span_of(attempted, "after")])
    assert [span.name for span in await bare.query_spans(attempted.rollout_id)] == ["taken", "after"]


async def test_what_the_store_never_took_is_kept_for_the_next(bare, attempted, database):
    failing = Failing(bare)
    async with with_journal(failing, database) as store:
        store.append([span_of(attempted, "taken")])
    assert files(database)
    async with with_journal(bare, database) as store:
        assert [span.name for span in await store.query_spans(attempted.rollout_id)] == ["taken"]


async def test_whoever_opens_the_store_without_a_journal_takes_over_what_was_left(bare, attempted, database):
    async with with_journal(Failing(bare), database) as store:
        store.append([span_of(attempted, "taken")])
    assert files(database)
    await recover_journals(bare)
    assert [span.name for span in await bare.query_spans(attempted.rollout_id)] == ["taken"]
    assert files(database) == []
    await recover_journals(InMemoryLightningStore())


async def test_an_observed_store_takes_over_what_was_left_too(bare, attempted, database):
    async with with_journal(Failing(bare), database) as store:
        store.append([span_of(attempted, "taken")])
    await recover_journals(instrument(bare, []))
    assert [span.name for span in await bare.query_spans(attempted.rollout_id)] == ["taken"]
    assert files(database) == []


async def test_a_long_journal_is_cut_into_files_that_go_when_they_are_written(
    store, bare, attempted, database, monkeypatch
):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 5000)
    seen = 0
    for round in range(5):
        for number in range(20):
            store.append([span_of(attempted, "call", attributes={"text": "x" * 1000, "n": round * 20 + number})])
        seen = max(seen, len(files(database)))
        await store.flush()
        assert len(files(database)) == 1
    assert seen > 3
    spans = await bare.query_spans(attempted.rollout_id)
    assert [span.attributes["n"] for span in spans] == list(range(100))


async def test_more_than_the_store_can_follow_has_to_wait(store, attempted, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_PENDING", 10)
    waits = [store.append([span_of(attempted, str(number))]) for number in range(30)]
    waiting = [wait for wait in waits if wait is not None]
    assert len(waiting) == 19
    await asyncio.gather(*waiting)
    assert len(await store.query_spans(attempted.rollout_id)) == 30


def test_it_is_a_store(database):
    store = SqlStore(database)
    assert isinstance(with_journal(store, database), JournaledStore)
    asyncio.run(store.close())


async def test_a_mistake_in_the_journal_ends_nothing(bare, attempted, database, monkeypatch, caplog):
    async with with_journal(bare, database) as store:
        failing = [OSError(30, "Read-only file system")]
        real = segments.Segments.written

        def written(self, count):
            if failing:
                raise failing.pop()
            real(self, count)

        monkeypatch.setattr(segments.Segments, "written", written)
        store.append([span_of(attempted, "one")])
        await asyncio.wait_for(store.flush(), 5)
        for _ in range(100):
            if store._failure is None:
                break
            await asyncio.sleep(0.02)
        store.append([span_of(attempted, "two")])
        assert [span.name for span in await store.query_spans(attempted.rollout_id)] == ["one", "two"]
    assert "Read-only" in caplog.text


@pytest.mark.parametrize("left", [b"\x01\x93raw", b'{"spans": []}', b'[{"unknown": "shape"}]', b"[truncated"])
async def test_records_of_another_version_keep_nobody_from_opening_the_store(bare, attempted, database, caplog, left):
    async with with_journal(Failing(bare), database) as store:
        store.append([span_of(attempted, "one")])
        store._segments.append(left)
        store._segments._segments[-1].records = 2
    async with with_journal(bare, database) as store:
        assert await store.query_spans(attempted.rollout_id) == []
    (aside,) = database.parent.glob("unread-*")
    assert left in aside.read_bytes()
    assert aside.name in caplog.text
    await recover_journals(bare)


async def test_what_comes_while_some_are_written_gathers_again(bare, attempted, database):
    """A caller that never rests must not cause a transaction for each call."""
    slow = Slow(bare)
    async with with_journal(slow, database) as store:
        store.append([span_of(attempted, "first")])
        await asyncio.wait_for(slow.writing.wait(), 5)
        for number in range(50):
            store.append([span_of(attempted, f"call {number}")])
            if number == 5:
                slow.go_on.set()
            await asyncio.sleep(0)
        await store.flush()
        assert slow.calls <= 4
    assert len(await bare.query_spans(attempted.rollout_id)) == 51


class Slow:
    """A store whose first write takes a while."""

    def __init__(self, store):
        self.store, self.calls = store, 0
        self.writing, self.go_on = asyncio.Event(), asyncio.Event()

    async def add_many_spans(self, spans):
        self.calls += 1
        self.writing.set()
        await self.go_on.wait()
        return await self.store.add_many_spans(spans)
