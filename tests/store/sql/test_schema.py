"""Databases of other versions: older ones are migrated whole or not at all, all others are refused with the way out."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agentlightning.errors import StoreVersionError
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.sql.schema import SCHEMA_VERSION, STEPS, Schema, Step, migrate
from agentlightning.store.sql.sqlite import SqliteSchema

Start = Callable[..., "subprocess.Popen[str]"]


def store_in(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    migrate(SqliteSchema(connection, "store.db"))
    return connection


def bring_up(connection: sqlite3.Connection, latest: int, steps: Mapping[int, Step]) -> None:
    migrate(SqliteSchema(connection, "store.db"), latest, steps)


def shape(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def about(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT name, value FROM about").fetchall()


def test_every_version_has_its_step() -> None:
    assert sorted(STEPS) == list(range(2, SCHEMA_VERSION + 1))


def test_each_step_above_the_version_is_taken_in_order_and_once(tmp_path: Path) -> None:
    connection = store_in(tmp_path / "store.db")
    taken: list[int] = []

    def step(number: int) -> Step:
        return lambda schema: taken.append(number)

    later = range(SCHEMA_VERSION + 1, SCHEMA_VERSION + 4)
    for _ in range(2):
        bring_up(connection, later[-1], {number: step(number) for number in later})
    assert taken == list(later)
    assert about(connection) == [("schema_version", str(later[-1])), ("since", "2.0.0")]
    connection.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    connection = store_in(tmp_path / "store.db")
    before = shape(connection)

    def breaks(schema: Schema) -> None:
        schema.execute("CREATE TABLE half (done TEXT)")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        bring_up(connection, SCHEMA_VERSION + 1, {SCHEMA_VERSION + 1: breaks})
    assert shape(connection) == before
    assert about(connection) == [("schema_version", str(SCHEMA_VERSION)), ("since", "2.0.0")]
    connection.close()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"schema_version": "99", "since": "2.0.0"}, "99"),
        ({"schema_version": "0", "since": "2.0.0"}, "0"),
        ({"schema_version": "new", "since": "2.0.0"}, "new"),
        ({"schema_version": "1"}, "of a development one"),
        ({"schema_version": "1", "since": "2.0"}, "of a development one"),
        ({"schema_version": "4"}, "of a development one"),
    ],
)
def test_a_database_of_another_version_is_refused_untouched_with_the_way_out(
    tmp_path: Path, rows: dict[str, str], said: str
) -> None:
    path = tmp_path / "store.db"
    connection = store_in(path)
    connection.execute("DELETE FROM about")
    connection.executemany("INSERT INTO about VALUES (?, ?)", rows.items())
    message = rf"store\.db was written by another version of agentlightning \(its schema is {said}, .*agl store export"
    with pytest.raises(StoreVersionError, match=message):
        LightningStore(path)
    assert dict(about(connection)) == rows
    connection.close()


# -- two versions at once ----------------------------------------------------------------------------------------------

LATER = SCHEMA_VERSION + 1
REFUSAL = (
    rf"was written by another version of agentlightning \(its schema is {LATER}, this one has {SCHEMA_VERSION}\); "
    r"use that version, or export it with that version \(agl store export FILE\.jsonl\) and import"
)


def migrate_to_later(path: Path) -> int:
    """What a process of a later version does when it opens a store; returns the number of rollouts that it found."""
    found: list[int] = []

    def step(schema: Schema) -> None:
        schema.execute("ALTER TABLE rollouts ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'")
        found.append(schema.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    migrate(SqliteSchema(connection, str(path)), LATER, {LATER: step})
    connection.close()
    return found[0]


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    found = connection.execute(query).fetchall()
    connection.close()
    return found


async def test_a_process_that_has_a_store_open_is_refused_once_a_later_version_has_migrated_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = LightningStore(path)
    attempted = await store.start_rollout("before")
    unfinished = await store.enqueue_rollout("waits", queue="_private")
    claiming = asyncio.create_task(store.dequeue_rollout(timeout=60))
    waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[unfinished.rollout_id], timeout=60))
    await asyncio.sleep(0.05)
    assert migrate_to_later(path) == 2
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    calls = [
        claiming,
        waiting,
        store.enqueue_rollout("after"),
        store.add_span(Span(*ids, "work", 1.0)),
        store.update_attempt(*ids, status="succeeded"),
        store.get_rollout_by_id(ids[0]),
        store.query_spans(ids[0]),
        store.check_health(),
    ]
    for error in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20):
        assert isinstance(error, StoreVersionError)
        assert re.search(f"{re.escape(str(path))} {REFUSAL}", str(error))
    for _ in range(3):
        with pytest.raises(StoreVersionError):
            await store.enqueue_rollout("later")
    await store.close()
    with pytest.raises(StoreVersionError, match=REFUSAL):
        LightningStore(path)
    assert rows(path, "SELECT input, status, colour FROM rollouts ORDER BY key") == [
        ('"before"', "preparing", "red"),
        ('"waits"', "queuing", "red"),
    ]
    assert rows(path, "SELECT count(*) FROM span_packs") == [(0,)]


BUSY = """
import asyncio, sys
from agentlightning.errors import StoreVersionError
from agentlightning.store import LightningStore

async def write(store):
    while True:
        try:
            await store.enqueue_rollout("task")
        except StoreVersionError as error:
            return str(error)

async def main():
    store = LightningStore(sys.argv[1])
    print("open")
    print(*set(await asyncio.gather(*(write(store) for _ in range(8)))), sep="\\n")
    await store.close()

asyncio.run(main())
"""


@pytest.mark.integration
async def test_nothing_of_an_older_version_is_written_after_a_migration_however_busy_it_is(
    tmp_path: Path, start_process: Start
) -> None:
    path = tmp_path / "store.db"
    busy = [start_process(BUSY, path) for _ in range(2)]
    for process in busy:
        assert process.stdout is not None
        assert (await asyncio.to_thread(process.stdout.readline)).strip() == "open"
    await asyncio.sleep(0.5)
    found = migrate_to_later(path)
    for process in busy:
        said = (await asyncio.to_thread(process.communicate, timeout=60))[0].strip()
        assert re.search(REFUSAL, said)
        assert "\n" not in said
        assert process.returncode == 0
    assert found > 0
    assert rows(path, "SELECT count(*), count(colour) FROM rollouts") == [(found, found)]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]
