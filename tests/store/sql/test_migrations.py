"""Databases of other versions: older ones are brought up to date whole or not at all, newer ones are refused."""

from __future__ import annotations

import sqlite3
import struct
from pathlib import Path

import pytest

from agentlightning.errors import StoreError
from agentlightning.span import PROMPT_TOKEN_IDS, SUPERSEDED, Span
from agentlightning.store import LightningStore
from agentlightning.store.sql.migrations import STEPS, Step, migrate
from agentlightning.store.sql.schema import SCHEMA_VERSION

VERSION_1 = Path(__file__).parent / "version_1.sql"
"""A store as version 1 wrote it: a rollout that succeeded with one span, and one that waits."""


def old_store(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(VERSION_1.read_text())
    return connection


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


def test_an_old_database_ends_with_the_same_tables_as_a_new_one(tmp_path: Path) -> None:
    old, new = old_store(tmp_path / "old.db"), sqlite3.connect(tmp_path / "new.db", isolation_level=None)
    migrate(old, "old")
    migrate(new, "new")
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
        return lambda connection: taken.append(number)

    steps = {number: step(number) for number in range(2, latest + 1)}
    migrate(connection, "store.db", latest, steps)
    migrate(connection, "store.db", latest, steps)
    assert taken == list(range(2, latest + 1))
    connection.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db")
    before = shape(connection)

    def breaks(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE half (done TEXT)")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        migrate(connection, "store.db", SCHEMA_VERSION + 1, {**STEPS, SCHEMA_VERSION + 1: breaks})
    assert shape(connection) == before
    connection.close()


def test_a_database_of_a_newer_version_is_refused_with_advice(tmp_path: Path) -> None:
    connection = old_store(tmp_path / "store.db")
    connection.execute("UPDATE about SET value = '99' WHERE name = 'schema_version'")
    connection.close()
    with pytest.raises(StoreError, match=r"store\.db was written by a newer version.*99.*pip install --upgrade"):
        LightningStore(tmp_path / "store.db")
