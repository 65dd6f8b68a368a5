"""Counters of rollouts, attempts and spans: rows of the table `counts`, written with what they count.

Each transaction adds what it changed, so asking for a total costs the same however many rows there are. On a database
that several servers write to, each server has rows of its own (`writer_id`), so that none waits for another; queries
add them up, and the rows of servers that are gone are merged into the shared ones when a server opens the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from agentlightning.store.sql.session.rows import RolloutRow
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection

ATTEMPTS: Final = "attempts"
SPANS: Final = "spans"
ANSWERED_BYTES: Final = "answered bytes"
"""Estimated size of the table answered_calls."""


class CounterChanges:
    """What a transaction adds to the counters."""

    def __init__(self) -> None:
        self._changes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By (name, queue)."""

    def clear(self) -> None:
        self._changes.clear()

    def count_status(self, rollouts: Iterable[RolloutRow]) -> None:
        """Count rollouts that are new, or may have changed their status."""
        changes = self._changes
        for row in rollouts:
            old, new = row.counted, row.status
            if old != new:
                row.counted = new
                changes[new, row.queue] += 1
                if old is not None:
                    changes[old, row.queue] -= 1

    def remove(self, rollouts: Iterable[RolloutRow]) -> None:
        """Take away rollouts that were deleted after they were written, with their attempts and spans."""
        for row in rollouts:
            self._changes[row.status, row.queue] -= 1
            for attempt in row.attempts.values():
                self._changes[ATTEMPTS, ""] -= 1
                self._changes[SPANS, ""] -= attempt.spans

    def add(self, name: str, number: int) -> None:
        self._changes[name, ""] += number

    def write(self, connection: Connection) -> None:
        if self._changes:
            changes = sorted(self._changes.items())
            rows = [(connection.writer_id, *key, number) for key, number in changes if number]
            self._changes.clear()
            connection.insert(statements.ADD_COUNTS, rows)
