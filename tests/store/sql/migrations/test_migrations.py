"""Databases of other versions: older ones are migrated whole or not at all, newer ones are refused."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentlightning.errors import StoreError
from agentlightning.span import PROMPT_TOKEN_IDS, SUPERSEDED, Span
from agentlightning.store import LightningStore
from agentlightning.store.sql.migrations import STEPS, Schema, Step, migrate
from agentlightning.store.sql.sqlite import version_guard
from agentlightning.store.sql.sqlite.schema import SqliteSchema
from agentlightning.store.sql.tables.schema import SCHEMA_VERSION

VERSIONS = Path(__file__).parent
"""version_N.sql is a store as version N wrote it: a rollout that succeeded with one span, and one that waits."""


def old_store(path: Path, version: int = 1) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript((VERSIONS / f"version_{version}.sql").read_text())
    return connection


def bring_up(connection: sqlite3.Connection, latest: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    migrate(SqliteSchema(connection, "store.db"), latest, steps)


def shape(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    rows = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    ).fetchall()
    return [(kind, name, " ".join(sql.replace('"', "").split())) for kind, name, sql in rows]


async def test_a_store_of_version_1_is_opened_with_all_that_is_in_it(tmp_path: Path) -> None:
    old_store(tmp_path / "store.db").close()
    store = LightningStore(tmp_path / "store.db")
    done, waiting = await store.query_rollouts()
    assert (done.status, done.input, done.config.max_attempts) == ("succeeded", {"question": "6 x 7"}, 2)
    assert waiting.status == "queuing"
    (span,) = await store.query_spans(done.rollout_id)
    assert span.attributes["agentlightning.prompt_token_ids"] == [1, 2, 3]
    assert span.attributes["agentlightning.logprobs"] == [-0.5]
    claimed = await store.dequeue_rollout()
    assert claimed is not None
    assert claimed.rollout_id == waiting.rollout_id
    await store.close()


async def test_every_span_of_version_1_is_packed_as_it_was(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db")
    tokens = struct.pack("<3i600i", 600, -1, -1, *range(600))
    for number in range(2, 150):
        row = (1, f"{number:016x}", number * 3, "t" * 32, None, f"span {number}", 1.0, None, "OK", None, '{"n": null}')
        events = '[["first", 1.5, {"k": "v"}]]' if number % 2 else None
        connection.execute(
            "INSERT INTO spans (attempt_key, span_id, sequence_id, trace_id, parent_id, name, start_time, end_time, "
            "status_code, status_message, attributes, events, resource, tokens, superseded) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, events, '{"service.name": "a"}', tokens if number % 50 == 0 else None, int(number > 140)),
        )
    connection.execute("UPDATE attempts SET last_span = 447")
    connection.close()
    store = LightningStore(tmp_path / "store.db")
    spans = await store.query_spans("ro-done")
    assert [span.sequence_id for span in spans] == [1, *range(6, 450, 3)]
    assert [span.name for span in spans[1:]] == [f"span {number}" for number in range(2, 150)]
    assert [SUPERSEDED in span.attributes for span in spans] == [False] * 140 + [True] * 9
    assert spans[49].attributes == {"n": None, PROMPT_TOKEN_IDS: list(range(600))}
    assert spans[2].events[0].attributes == {"k": "v"}
    assert {span.resource.get("service.name") for span in spans[1:]} == {"a"}
    assert (await store.statistics())["spans"] == 149
    attempt = await store.get_latest_attempt("ro-done")
    assert attempt is not None
    assert (await store.add_span(Span("ro-done", attempt.attempt_id, "new", 1.0))).sequence_id == 448
    assert [queue.name for queue in await store.query_queues()] == ["default"]
    await store.close()


@pytest.mark.parametrize("version", [1, 3])
def test_an_old_database_ends_with_the_same_tables_as_a_new_one(tmp_path: Path, version: int) -> None:
    old, new = old_store(tmp_path / "old.db", version), sqlite3.connect(tmp_path / "new.db", isolation_level=None)
    bring_up(old)
    bring_up(new)
    assert shape(old) == shape(new)
    old.close()
    new.close()


def test_every_version_has_its_step() -> None:
    assert sorted(STEPS) == list(range(2, SCHEMA_VERSION + 1))


def test_each_step_above_the_version_is_taken_in_order_and_once(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db")
    latest = SCHEMA_VERSION + 2
    taken: list[int] = []

    def step(number: int) -> Step:
        def take(schema: Schema) -> None:
            taken.append(number)
            if number in STEPS:
                STEPS[number](schema)

        return take

    steps = {number: step(number) for number in range(2, latest + 1)}
    bring_up(connection, latest, steps)
    bring_up(connection, latest, steps)
    assert taken == list(range(2, latest + 1))
    connection.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db")
    before = shape(connection)

    def breaks(schema: Schema) -> None:
        schema.execute("CREATE TABLE half (done TEXT)")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        bring_up(connection, SCHEMA_VERSION + 1, {**STEPS, SCHEMA_VERSION + 1: breaks})
    assert shape(connection) == before
    connection.close()


def test_a_database_of_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db")
    connection.execute("UPDATE about SET value = '99' WHERE name = 'schema_version'")
    connection.close()
    with pytest.raises(StoreError, match=r"store\.db was written by a newer version.*99.*pip install --upgrade"):
        LightningStore(tmp_path / "store.db")


def test_what_the_steps_make_of_a_database_never_changes(tmp_path: Path) -> None:
    """Whatever the tables of today are: a column that a later version adds is the business of its own step."""
    migrated, written = old_store(tmp_path / "old.db"), old_store(tmp_path / "written.db", 3)
    bring_up(migrated, 3)
    assert [each for each in shape(migrated) if each[0] != "trigger"] == shape(written)
    migrated.close()
    written.close()


async def test_counts_that_an_older_process_did_not_keep_are_right_again(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db", 3)
    connection.execute("UPDATE counts SET number = number + 3 WHERE name IN ('queuing', 'spans')")
    connection.close()
    store = LightningStore(tmp_path / "store.db")
    statistics = await store.statistics()
    assert (statistics["rollouts.queuing"], statistics["rollouts.succeeded"], statistics["spans"]) == (1, 1, 1)
    await store.close()


async def test_a_process_that_has_an_older_store_open_writes_no_more_once_a_newer_one_migrates_it(
    tmp_path: Path,
) -> None:
    store = LightningStore(tmp_path / "store.db")
    rollout = await store.start_rollout("a task")
    newer = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    version_guard.allow(newer, SCHEMA_VERSION + 1)
    bring_up(newer, SCHEMA_VERSION + 1, {SCHEMA_VERSION + 1: lambda schema: None})
    for call in (
        lambda: store.enqueue_rollout("another"),
        lambda: store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded"),
        lambda: store.add_span(Span(rollout.rollout_id, rollout.attempt.attempt_id, "chat", 1.0)),
        lambda: store.update_worker("w1"),
        lambda: store.update_queue("default", 1),
        lambda: store.add_resources({}),
    ):
        with pytest.raises(StoreError, match=rf"schema {SCHEMA_VERSION + 1} by a newer version.*pip install --upgrade"):
            await call()
    assert [each.status for each in await store.query_rollouts()] == ["preparing"]
    newer.execute("UPDATE rollouts SET status = 'succeeded'")
    newer.close()
    await store.close()
