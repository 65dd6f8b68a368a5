"""How SQLite finds rollouts by their state: never by reading the whole table for a state that few have."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import orjson
import pytest
from sqlalchemy.dialects import sqlite

from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.store import LightningStore
from agentlightning.store.sql import queries
from agentlightning.store.sql.queries import RolloutFilters
from agentlightning.store.sql.tables import statements


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    store = LightningStore(tmp_path / "store.db")
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, rollout_id=f"r{n}") for n in range(20)])
    await store.cancel_rollout("r7")
    await store.close()
    return tmp_path / "store.db"


@pytest.mark.parametrize(
    ("states", "index"),
    [
        (["running"], "rollouts_open"),
        (["preparing", "running"], "rollouts_open"),
        (["queuing"], "rollouts_waiting"),
        (["cancelled"], "rollouts_finished"),
        (["failed", "succeeded"], "rollouts_finished"),
    ],
)
@pytest.mark.parametrize("newest_first", [False, True])
def test_few_rollouts_of_some_states_are_found_by_an_index(database, states, index, newest_first):
    filters = RolloutFilters(states)
    statement = statements.query_rollouts(filters.present, False, None, newest_first, False, filters.index)
    compiled = statement.compiled(sqlite.dialect())
    values = compiled.arrange((orjson.dumps(states).decode(), 10, 0))
    with sqlite3.connect(database) as connection:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {compiled.sql}", values)]
    assert index in next(line for line in plan if " rollouts" in line)


def test_states_of_several_kinds_have_no_index_in_common():
    assert RolloutFilters(["running", "queuing"]).index is None
    assert RolloutFilters(["running"], mode_in=["train"], any_of=True).index is None
    assert RolloutFilters().index is None


async def test_states_that_many_have_are_read_in_order_of_creation(database, monkeypatch):
    """Sorting all of them would cost more."""
    asked = []
    query = statements.query_rollouts
    monkeypatch.setattr(statements, "query_rollouts", lambda *given: asked.append(given[-1]) or query(*given))
    store = LightningStore(database)
    found = [await store.query_rollouts(status_in=["queuing"], limit=3)]
    monkeypatch.setattr(queries, "MOST_SORTED", 5)
    found.append(await store.query_rollouts(status_in=["queuing"], limit=3))
    assert asked == ["waiting", None]
    assert [[each.rollout_id for each in page] for page in found] == [["r0", "r1", "r2"]] * 2
    asked.clear()
    assert await store.query_rollouts(status_in=["failed"]) == []
    assert asked == [], "the store keeps their number"
    await store.close()
