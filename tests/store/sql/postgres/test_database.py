"""Which addresses are understood, what an empty database becomes, and what is said of one that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import structs
from tests.support.postgres import PostgresCluster

from agentlightning.errors import ConfigError, MissingExtraError, StoreError, StoreFullError, StoreVersionError
from agentlightning.store import LightningStore
from agentlightning.store.clock import Clock
from agentlightning.store.sql.postgres import TABLES, PostgresDatabase, PostgresSchema
from agentlightning.store.sql.schema import SCHEMA_VERSION, Schema, migrate
from agentlightning.store.types import RolloutRecord

pytestmark = pytest.mark.integration

SECRET = "hush%40hush"


def name_of(url: str) -> str:
    return url.rsplit("/", 1)[1]


def tables(postgres: PostgresCluster, url: str, schema: str = "public") -> set[str]:
    listed = postgres.run(f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'", name_of(url))
    return {row[0] for row in listed}


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_usual_scheme_is_understood_and_no_name_shows_the_password(scheme: str) -> None:
    database = PostgresDatabase(f"{scheme}://ann:{SECRET}@db.example:5433/lightning?sslmode=require&schema=team")
    assert database.name == "postgresql://db.example:5433/lightning?schema=team"


@pytest.mark.parametrize(
    ("url", "about"),
    [
        ("mysql://ann@host/db", "not the address of a PostgreSQL database"),
        (f"postgresql://ann:{SECRET}@[::1/db", "is not the address of a PostgreSQL database .Invalid IPv6 URL."),
        (f"postgresql://ann:{SECRET}@host/db?speed=11", "'speed' is neither schema nor a parameter"),
        ("postgresql://ann:hush%hush@host/db", "cannot be read; write @"),
        ("postgresql://ann:hush/hush@host/db", "cannot be read; write @"),
        ("postgresql://ann:hush?hush@host/db", "cannot be read; write @"),
        ("postgresql://ann:hush@hush@host:port/db", "cannot be read; write @"),
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_showing_the_password(url: str, about: str) -> None:
    with pytest.raises(ConfigError, match=about) as caught:
        PostgresDatabase(url)
    assert "hush" not in str(caught.value)


def test_without_the_driver_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("psycopg", "agentlightning.store.sql.postgres"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentlightning\[postgres\]'"):
        LightningStore("postgresql://localhost/lightning")


# -- making and checking ---------------------------------------------------------------------------------------------


def test_an_empty_database_gets_our_tables_and_version(postgres: PostgresCluster, postgres_url: str) -> None:
    PostgresDatabase(postgres_url).prepare()
    assert tables(postgres, postgres_url) == set(TABLES)
    version = postgres.run("SELECT value FROM about WHERE name = 'schema_version'", name_of(postgres_url))
    assert version == [(str(SCHEMA_VERSION),)]


def test_servers_that_start_at_once_make_the_tables_once(postgres: PostgresCluster, postgres_url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: PostgresDatabase(postgres_url).prepare(), range(6)))
    assert tables(postgres, postgres_url) == set(TABLES)


def test_a_schema_keeps_a_store_apart_from_the_other_tables_of_a_database(
    postgres: PostgresCluster, postgres_url: str
) -> None:
    postgres.run("CREATE TABLE workers (name text)", name_of(postgres_url))
    with pytest.raises(StoreError, match=r"has a table 'workers' that is not ours.*schema=NAME"):
        PostgresDatabase(postgres_url).prepare()
    assert tables(postgres, postgres_url) == {"workers"}
    for schema in ("team", 'the "other" one'):
        PostgresDatabase(f"{postgres_url}?schema={schema}").prepare()
        assert tables(postgres, postgres_url, schema) == set(TABLES)


@pytest.mark.parametrize("change", ["UPDATE about SET value = '99'", "DELETE FROM about WHERE name = 'since'"])
def test_a_database_of_another_version_is_refused_with_the_way_out(
    postgres: PostgresCluster, postgres_url: str, change: str
) -> None:
    PostgresDatabase(postgres_url).prepare()
    postgres.run(change, name_of(postgres_url))
    with pytest.raises(
        StoreVersionError, match=r"another version of agentlightning .*agl store export .*agl store import"
    ):
        PostgresDatabase(postgres_url).prepare()


def migrate_to_later(url: str) -> int:
    """What a server of a later version does when it opens a store; returns the number of rollouts that it found."""
    found: list[int] = []

    def step(schema: Schema) -> None:
        schema.execute("ALTER TABLE rollouts ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'")
        found.append(schema.execute("SELECT count(*) FROM rollouts").fetchone()[0])

    with PostgresDatabase(url).open() as connection:
        migrate(PostgresSchema(connection, url, ""), SCHEMA_VERSION + 1, {SCHEMA_VERSION + 1: step})
    return found[0]


async def test_nothing_of_an_older_server_is_written_after_a_migration_however_busy_it_is(
    postgres: PostgresCluster, postgres_url: str
) -> None:
    stores = LightningStore(postgres_url), LightningStore(postgres_url)

    async def write(store: LightningStore) -> str:
        while True:
            try:
                await store.enqueue_rollout("task", queue="busy")
            except StoreVersionError as error:
                return str(error)

    writing = [asyncio.create_task(write(store)) for store in stores for _ in range(8)]
    claiming = asyncio.create_task(stores[0].dequeue_rollout(timeout=60, queues=["other"]))
    await asyncio.sleep(0.3)
    found = await asyncio.to_thread(migrate_to_later, postgres_url)
    (said,) = set(await asyncio.wait_for(asyncio.gather(*writing), 30))
    refusal = rf"its schema is {SCHEMA_VERSION + 1}, this one has {SCHEMA_VERSION}"
    assert re.search(refusal, said)
    for call in (claiming, stores[0].query_rollouts(), stores[1].check_health()):
        with pytest.raises(StoreVersionError, match=refusal):
            await asyncio.wait_for(call, 30)
    for store in stores:
        await store.close()
    counted = "SELECT count(*), count(colour) FROM rollouts"
    assert postgres.run(counted, name_of(postgres_url)) == [(found, found)]
    assert found > 0


def test_a_migration_waits_until_the_transactions_of_older_servers_have_ended(postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url)
    database.prepare()
    older = database.connect(read_only=False)
    older.begin(write=True)
    with ThreadPoolExecutor(1) as pool:
        migrating = pool.submit(migrate_to_later, postgres_url)
        time.sleep(0.5)
        assert not migrating.done()
        older.run("INSERT INTO queues (name) VALUES ('old')")
        older.commit()
        assert migrating.result(30) == 0
    with pytest.raises(StoreVersionError):
        older.begin(write=True)
    older.rollback()
    with pytest.raises(StoreVersionError):
        older.sync_clock(Clock())
    older.close()


def test_text_is_ordered_by_its_bytes_whatever_the_language_of_the_database(
    postgres: PostgresCluster, postgres_url: str
) -> None:
    PostgresDatabase(postgres_url).prepare()
    columns = postgres.run(
        "SELECT count(*), count(*) FILTER (WHERE collation_name = 'C') FROM information_schema.columns "
        "WHERE table_schema = 'public' AND data_type = 'text' AND table_name <> 'servers'",
        name_of(postgres_url),
    )
    assert columns[0][0] == columns[0][1] > 20


def test_a_weak_durability_of_the_server_is_not_taken_over(postgres: PostgresCluster, postgres_url: str) -> None:
    database = PostgresDatabase(f"{postgres_url}?options=-csynchronous_commit%3Doff")
    with database.open() as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    database = PostgresDatabase(f"{postgres_url}?options=-csynchronous_commit%3Dremote_apply")
    with database.open() as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("remote_apply",)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (("/test", "/nothing"), 'database "nothing.*" does not exist; make the database first'),
        (("agl:", "agl:wrong"), "password authentication failed.*; the password is wrong"),
        (("@127.0.0.1", "@no.such.host"), "cannot be reached: .*check that PostgreSQL runs there"),
    ],
)
def test_what_cannot_be_reached_is_said_with_the_way_out(
    postgres_url: str, change: tuple[str, str], about: str
) -> None:
    with pytest.raises(StoreError, match=about) as caught:
        PostgresDatabase(postgres_url.replace(*change)).prepare()
    password = postgres_url.split("@")[0].rsplit(":", 1)[1]
    assert password not in str(caught.value)


def test_a_server_that_is_not_there_is_said_to_be_so(postgres_url: str) -> None:
    port = postgres_url.rsplit(":", 1)[1].split("/")[0]
    with pytest.raises(StoreError, match=r"Connection refused.*check that PostgreSQL runs there"):
        PostgresDatabase(postgres_url.replace(port, "1")).prepare()


def test_a_server_without_a_free_connection_says_how_many_are_needed(
    postgres: PostgresCluster, postgres_url: str
) -> None:
    PostgresDatabase(postgres_url).prepare()
    postgres.run(
        f"CREATE ROLE ann LOGIN PASSWORD 'x' CONNECTION LIMIT 1; ALTER DATABASE {name_of(postgres_url)} OWNER TO ann"
    )
    url = postgres_url.replace(postgres_url.split("//")[1].split("@")[0], "ann:x")
    database = PostgresDatabase(url)
    with contextlib.closing(database.open()), pytest.raises(StoreError, match="a store needs three"):
        database.connect(read_only=True)


def test_a_user_who_may_not_make_tables_is_told_so(postgres: PostgresCluster, postgres_url: str) -> None:
    postgres.run("CREATE ROLE bob LOGIN PASSWORD 'x'")
    postgres.run("REVOKE CREATE ON SCHEMA public FROM PUBLIC", name_of(postgres_url))
    url = postgres_url.replace(postgres_url.split("//")[1].split("@")[0], "bob:x")
    with pytest.raises(StoreError, match=r"permission denied for schema public.*grant this user the right"):
        PostgresDatabase(url).prepare()


def test_a_full_disk_is_an_error_of_its_own() -> None:
    import psycopg.errors

    error = psycopg.errors.DiskFull('could not extend file "base/1/2": No space left on device')
    told = PostgresDatabase("postgresql://h/d").explain(error)
    assert isinstance(told, StoreFullError)
    assert "the disk of postgresql://h/d is full" in str(told)


# -- several servers -------------------------------------------------------------------------------------------------


def test_servers_tell_one_another_what_they_committed(postgres_url: str) -> None:
    speaker, hearer = PostgresDatabase(postgres_url), PostgresDatabase(postgres_url)
    speaker.prepare()
    heard: list[Any] = []
    something = threading.Event()

    def wake(queued: bool, finished: Any) -> None:
        heard.append((queued, finished))
        something.set()

    hearer.listen(wake)
    speaker.listen(lambda *_: heard.append("itself"))
    connection = speaker.connect(read_only=False)
    connection.begin(write=True)
    connection.notify(True, ["ro-1", "ro-2"])
    assert not something.wait(0.1)
    connection.commit()
    assert something.wait(10)
    assert heard == [(True, ["ro-1", "ro-2"])]
    something.clear()
    connection.begin(write=True)
    connection.notify(False, [f"ro-{number:0100}" for number in range(2_000)])
    connection.commit()
    assert something.wait(10)
    assert heard[1:] == [(False, None)]
    connection.close()
    for database in (speaker, hearer):
        database.close()
        database.close()


def test_a_listener_whose_connection_was_lost_listens_again_and_says_that_anything_may_have_happened(
    relay: Any,
) -> None:
    database = PostgresDatabase(relay.url)
    again = threading.Event()
    heard: list[Any] = []

    def wake(*news: Any) -> None:
        heard.append(news)
        again.set()

    database.listen(wake)
    relay.cut()
    assert again.wait(10)
    assert heard == [(True, None)]
    database.close()


def test_servers_agree_on_the_time_of_deadlines_whatever_their_own_clocks_say(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose own clock is an hour slow agrees with the others all the same."""
    right = Clock()
    database = PostgresDatabase(postgres_url)
    database.prepare()
    connection = database.connect(read_only=False)
    connection.sync_clock(right)
    monkeypatch.setattr(time, "time", lambda: right.steady() - 3_600)
    wrong = Clock()
    connection.sync_clock(wrong)
    assert abs(wrong.steady() - right.steady()) < 1.0
    connection.close()


@pytest.mark.parametrize("length", [48, 49, 63])
async def test_a_schema_may_have_any_name_that_postgresql_takes(postgres_url: str, length: int) -> None:
    url = f"{postgres_url}?schema={'s' * length}"
    here, there = LightningStore(url), LightningStore(url)
    waiting = asyncio.create_task(there.dequeue_rollout(timeout=30))
    await asyncio.sleep(0.05)
    made = await here.enqueue_rollout("task")
    claimed = await waiting
    assert claimed is not None
    assert claimed.rollout_id == made.rollout_id
    await here.close()
    await there.close()


def test_a_schema_whose_name_postgresql_would_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the 63 bytes"):
        PostgresDatabase(f"postgresql://localhost/lightning?schema={'s' * 64}")


class Mode(enum.StrEnum):
    TRAIN = "train"


class Name(str):
    """Of a library, such as numpy.str_."""

    def __repr__(self) -> str:
        return f"Name({str(self)!r})"


async def test_texts_and_numbers_may_be_of_a_subclass(postgres_store_url: str) -> None:
    store = LightningStore(postgres_store_url)
    mode = Mode.TRAIN
    made = await store.enqueue_rollout("task", mode=mode, rollout_id=Name("ro-1"))  # type: ignore[arg-type]
    assert (made.mode, made.queue) == ("train", "train")
    (found,) = await store.query_rollouts(rollout_id_in=[Name("ro-1")], mode_in=[mode], status_in=[Name("queuing")])  # type: ignore[list-item]
    assert (found.mode, found.queue) == ("train", "train")
    claimed = await store.dequeue_rollout(Name("worker"), queues=[Name("train")], claim_id=Name("cl-1"))
    assert claimed is not None
    assert claimed.attempt.worker_id == "worker"
    await store.close()


async def test_numbers_are_written_as_what_they_are_not_as_they_show_themselves(postgres_store_url: str) -> None:
    class Float(float):
        def __repr__(self) -> str:
            return f"np.float64({float(self)})"

    store = LightningStore(postgres_store_url)
    claimed = await store.start_rollout("task")
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    assert (await store.update_attempt(*ids, last_heartbeat_time=Float(1.5))).last_heartbeat_time == 1.5
    found = await store.get_attempt(ids[1])
    assert found is not None
    assert found.last_heartbeat_time == 1.5
    assert await store.query_rollouts(rollout_id_in=[ids[0], Name('a"b\\'), ""]) == [
        await store.get_rollout_by_id(ids[0])
    ]
    await store.close()


async def test_the_number_of_an_attempt_may_be_a_truth_value_and_a_nul_is_refused_by_name(
    postgres_store_url: str,
) -> None:
    store = LightningStore(postgres_store_url)
    claimed = await store.start_rollout("task")
    (record,) = await store.read_records([claimed.rollout_id])
    attempts = (structs.replace(record.attempts[0], attempt_id="at-2", rollout_id="ro-2", sequence_id=True),)
    copy = RolloutRecord(structs.replace(record.rollout, rollout_id="ro-2"), attempts, ())
    assert await store.add_records([copy]) == 1
    assert [attempt.sequence_id for attempt in await store.query_attempts("ro-2")] == [1]
    with pytest.raises(ConfigError, match=r"mode='a\\x00b' contains a NUL"):
        await store.enqueue_rollout("task", mode="a\0b", queue="q")  # type: ignore[arg-type]
    await store.close()
