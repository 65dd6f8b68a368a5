"""Databases of other versions: older ones are migrated whole or not at all, all others are refused with the way out."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentlightning.errors import StoreError
from agentlightning.store import LightningStore
from agentlightning.store.sql.schema import SCHEMA_VERSION, STEPS, Schema, Step, migrate
from agentlightning.store.sql.sqlite import SqliteSchema


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
    with pytest.raises(StoreError, match=message):
        LightningStore(path)
    assert dict(about(connection)) == rows
    connection.close()
