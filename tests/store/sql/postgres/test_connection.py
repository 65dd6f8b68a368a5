"""What survives the loss of a connection, and what PostgreSQL's answers mean."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import psycopg
import pytest

from agentlightning.errors import StoreError
from agentlightning.store.sql.postgres import PostgresConnection, PostgresDatabase
from agentlightning.store.sql.store import SqlStore
from agentlightning.store.sql.tx import insert

pytestmark = pytest.mark.integration

ADD = "INSERT INTO queues (name, max_open) VALUES (?, NULL) ON CONFLICT (name) DO NOTHING"
QUEUES = insert("queues", ("name",), "ON CONFLICT DO NOTHING")
TAKE = "SELECT key FROM queues WHERE name = ? FOR UPDATE"
ALL = "SELECT name, max_open FROM queues ORDER BY name"


@pytest.fixture
def database(relay: Any) -> PostgresDatabase:
    database = PostgresDatabase(relay.url)
    database.prepare()
    return database


@pytest.fixture
def connection(database: PostgresDatabase) -> Iterator[PostgresConnection]:
    connection = database.connect(read_only=False)
    yield connection
    connection.close()


def seen(database: PostgresDatabase) -> list[Any]:
    """What another connection sees."""
    other = database.connect(read_only=True)
    other.begin(write=False)
    rows = other.all(ALL)
    other.commit()
    other.close()
    return rows


def add(connection: PostgresConnection, *names: str) -> int:
    return sum([connection.run(ADD, name) for name in names])


def test_writes_wait_for_the_next_query_or_the_commit(
    connection: PostgresConnection, database: PostgresDatabase
) -> None:
    connection.begin(write=True)
    assert (add(connection, "a"), add(connection, "a")) == (1, 0)
    for number in range(2_000):  # more than are sent at once
        connection.write(QUEUES, [(f"{number:04}",), (f"{number:04}-",)])
    for row in [(1, "a"), (2, "0000")]:
        connection.write(lambda _: "UPDATE queues SET max_open = ? WHERE name = ?", [row])
    assert connection.all("SELECT count(*), max(max_open) FROM queues") == [(4_001, 2)]
    connection.write(lambda _: "DELETE FROM queues WHERE name <> ?", [("a",)])
    assert seen(database) == []
    connection.commit()
    assert seen(database) == [("a", 1)]


def test_a_write_that_is_refused_is_told_by_the_commit_and_undoes_it(
    connection: PostgresConnection, database: PostgresDatabase
) -> None:
    connection.begin(write=True)
    connection.write(insert("queues", ("name",)), [("a",), ("b",), ("a",), ("c",)])
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.commit()
    connection.rollback()
    assert seen(database) == []
    connection.begin(write=True)
    assert add(connection, "a") == 1
    connection.commit()
    assert seen(database) == [("a", None)]


def test_formats_of_parameters_are_a_list_which_psycopg_3_2_asks_for(connection: PostgresConnection) -> None:
    connection.begin(write=True)
    connection.lock("SELECT 1")
    connection.lock(TAKE, "a")
    assert [formats for _, _, formats in connection._calls] == [[], [0]]


def test_keys_are_new_and_ascend(connection: PostgresConnection) -> None:
    connection.begin(write=True)
    keys = [connection.new_key("span_packs", 0) for _ in range(150)]
    assert keys == sorted(set(keys))
    connection.rollback()


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_transaction_that_need_not_be_durable_does_not_wait_for_the_disk(
    connection: PostgresConnection, durable: bool
) -> None:
    connection.begin(write=True, durable=durable)
    assert connection.all("SHOW synchronous_commit") == [("on" if durable else "off",)]
    connection.commit()
    connection.begin(write=True)
    assert connection.all("SHOW synchronous_commit") == [("on",)]
    connection.rollback()


def test_what_was_rolled_back_is_gone(connection: PostgresConnection, database: PostgresDatabase) -> None:
    connection.begin(write=True)
    add(connection, "a")
    connection.rollback()
    connection.rollback()
    assert seen(database) == []


def test_a_connection_lost_while_idle_is_made_again(
    connection: PostgresConnection, database: PostgresDatabase, relay: Any
) -> None:
    connection.begin(write=True)
    connection.commit()
    relay.cut()
    connection.begin(write=True)
    add(connection, "a")
    connection.commit()
    assert seen(database) == [("a", None)]


def test_a_connection_lost_in_a_transaction_undoes_it_and_asks_for_another_try(
    connection: PostgresConnection, database: PostgresDatabase, relay: Any
) -> None:
    connection.begin(write=True)
    add(connection, "a")
    relay.cut()
    with pytest.raises(psycopg.OperationalError) as caught:
        add(connection, "b")
    assert database.may_retry(caught.value)
    assert database.is_fatal(caught.value)
    connection.rollback()
    connection.begin(write=True)
    add(connection, "c")
    connection.commit()
    assert seen(database) == [("c", None)]


def test_a_commit_whose_answer_was_lost_is_looked_up(
    connection: PostgresConnection, database: PostgresDatabase, relay: Any
) -> None:
    for name, answer in (("a", "pass"), ("b", "lose answer")):  # the first transaction prepares what a commit sends
        connection.begin(write=True)
        add(connection, name)
        relay.next = answer
        connection.commit()
        assert relay.next == "pass"
    assert seen(database) == [("a", None), ("b", None)]


def test_a_commit_that_never_arrived_is_not_taken_for_one(
    connection: PostgresConnection, database: PostgresDatabase, relay: Any
) -> None:
    for name in ("a", "b"):  # the first transaction of a server, and a later one
        connection.begin(write=True)
        add(connection, name)
        relay.next = "lose question"
        with pytest.raises(psycopg.OperationalError) as caught:
            connection.commit()
        assert database.may_retry(caught.value)
        connection.rollback()
        connection.begin(write=True)
        assert add(connection, name) == 1
        connection.commit()
    assert seen(database) == [("a", None), ("b", None)]


def test_readers_see_one_moment(connection: PostgresConnection, database: PostgresDatabase) -> None:
    reader = database.connect(read_only=True)
    reader.begin(write=False)
    assert reader.all(ALL) == []
    connection.begin(write=True)
    add(connection, "a")
    connection.commit()
    assert reader.all(ALL) == []
    reader.commit()
    reader.close()
    assert seen(database) == [("a", None)]


def test_a_reader_writes_nothing(database: PostgresDatabase) -> None:
    reader = database.connect(read_only=True)
    reader.begin(write=False)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        add(reader, "a")
    reader.rollback()
    reader.close()


@pytest.mark.slow  # PostgreSQL takes a second to notice
def test_of_two_that_wait_for_one_another_one_is_told_to_try_again(
    connection: PostgresConnection, database: PostgresDatabase
) -> None:
    connection.begin(write=True)
    add(connection, "a", "b")
    connection.commit()
    other = database.connect(read_only=False)
    connection.begin(write=True)
    other.begin(write=True)
    connection.all(TAKE, "a")
    other.all(TAKE, "b")
    with ThreadPoolExecutor() as pool:
        tried = [pool.submit(connection.all, TAKE, "b"), pool.submit(other.all, TAKE, "a")]
        (error,) = [error for each in tried if (error := each.exception(30)) is not None]
        assert database.may_retry(error)
        for each in (connection, other):
            each.rollback()
    other.close()


def test_who_waited_for_a_lock_sees_what_the_other_wrote(
    connection: PostgresConnection, database: PostgresDatabase
) -> None:
    other = database.connect(read_only=False)
    other.begin(write=True)
    add(other, "a")
    other.commit()
    other.begin(write=True)
    other.run("UPDATE queues SET max_open = 1 WHERE name = ?", "a")
    with ThreadPoolExecutor() as pool:
        connection.begin(write=True)
        connection.lock(TAKE, "a")
        found = pool.submit(connection.all, ALL)
        assert not wait([found], 0.1).done
        other.commit()
        assert found.result(30) == [("a", 1)]
    connection.rollback()
    other.close()


@pytest.mark.slow
def test_the_size_is_that_of_the_tables_and_vacuum_gives_space_back(connection: PostgresConnection) -> None:
    connection.begin(write=True)
    add(connection, *(f"{number:0200}" for number in range(2_000)))
    connection.commit()
    full = connection.size()
    connection.begin(write=True)
    connection.run("DELETE FROM queues")
    connection.commit()
    connection.vacuum()
    assert connection.size() < full - 300_000


@pytest.mark.parametrize("allowed", [1, 2])
def test_a_store_that_cannot_be_opened_leaves_no_connection_open(
    database: PostgresDatabase, relay: Any, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """It needs three: one that writes, one that listens, one that reads."""
    opened = list[psycopg.Connection[Any]]()
    connect = psycopg.connect

    def limited(**parameters: Any) -> psycopg.Connection[Any]:
        if len([each for each in opened if not each.closed]) == allowed:
            raise psycopg.OperationalError("FATAL:  sorry, too many clients already")
        opened.append(connect(**parameters))
        return opened[-1]

    monkeypatch.setattr(psycopg, "connect", limited)
    with pytest.raises(StoreError, match="too many clients"):
        SqlStore(relay.url)
    gc.collect()
    deadline = time.monotonic() + 30
    while not all(each.closed for each in opened):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(opened) == 1 + allowed  # the first one prepared the database


def test_a_connection_that_cannot_be_prepared_is_closed(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[psycopg.Connection[Any]]()
    connect = psycopg.connect
    monkeypatch.setattr(psycopg, "connect", lambda **given: opened.append(connect(**given)) or opened[-1])
    monkeypatch.setattr("agentlightning.store.sql.postgres.MERGE_COUNTERS", "SELECT nonsense")
    with pytest.raises(StoreError, match="nonsense"):
        database.connect(read_only=False)
    assert [each.closed for each in opened] == [True]
