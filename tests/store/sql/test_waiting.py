"""Which waiting commands a transaction affects."""

from __future__ import annotations

import math
import sqlite3
import time
from typing import Any

from agentlightning.store.sql.schema import migrate
from agentlightning.store.sql.sqlite import SqliteSchema, _translated
from agentlightning.store.sql.waiting import _FINISHED_AMONG, Waiters


class Deadline:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline


def Command(deadline: float = math.inf) -> Any:
    return Deadline(deadline)


def test_a_wait_is_affected_once_enough_of_its_rollouts_have_finished() -> None:
    waiters, both, either = Waiters(), Command(), Command()
    waiters.add_wait(both, {"a", "b"}, 2)
    waiters.add_wait(either, {"b", "c"}, 1)
    assert waiters.affected(["a"]) == []
    assert set(waiters.affected(["b", "unknown"])) == {both, either}
    waiters.remove(both)
    assert waiters.affected(["a", "b"]) == [either]
    assert waiters.rollout_waits() == [either]


def test_claims_wait_in_order_of_arrival() -> None:
    waiters, first, second = Waiters(), Command(), Command()
    waiters.add_claim(first)
    waiters.add_claim(second)
    waiters.add_claim(first)
    assert list(waiters.claims) == [first, second]
    waiters.remove(first)
    waiters.remove(first)
    assert waiters.all() == [second]


def test_expired_waiters_stay_until_they_are_removed() -> None:
    now = time.monotonic()
    waiters, late, later = Waiters(), Command(now - 1), Command(now + 60)
    waiters.add_claim(late)
    waiters.add_wait(later, {"a"}, 1)
    assert waiters.deadline == late.deadline
    assert waiters.expired() == waiters.expired() == [late]
    waiters.remove(late)
    assert waiters.expired() == []
    assert waiters.deadline == later.deadline
    waiters.remove(later)
    assert waiters.deadline == math.inf


def test_finished_rollouts_are_found_by_their_ids_and_not_among_all_that_have_finished() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(SqliteSchema(connection, "store.db"))
    plan = connection.execute("EXPLAIN QUERY PLAN " + _translated(_FINISHED_AMONG), ['["ro-1"]']).fetchall()
    assert "(rollout_id=?)" in plan[0][3]
    connection.close()
