"""How many rollouts, attempts and spans there are, kept in the table `counts` beside what is counted.

A transaction writes what it added and took away with the rest, so that the counts are right whenever the rows are, and
asking for them costs the same however many rows there are. On a database that several servers write to, each server
counts in rows of its own (`shard`), so that none waits for another; whoever asks adds them up, and the rows of servers
that are gone are added to those of nobody when a server opens the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agentlightning.rollouts import ROLLOUT_TRANSITIONS
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.rows import AttemptState, RolloutState

ATTEMPTS: Final = "attempts"
SPANS: Final = "spans"
ANSWERED_BYTES: Final = "answered bytes"
"""Of the table answered_calls, about."""


class Counts:
    """What a transaction has changed so far."""

    def __init__(self) -> None:
        self._changes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By (name, queue)."""

    def clear(self) -> None:
        self._changes.clear()

    def written(self, rollouts: Iterable[RolloutState]) -> None:
        """Rollouts that are new, or may have changed their status."""
        changes = self._changes
        for state in rollouts:
            before, now = state.counted, state.status
            if before != now:
                state.counted = now
                changes[now, state.queue] += 1
                if before is not None:
                    changes[before, state.queue] -= 1

    def removed(self, rollouts: Iterable[RolloutState], tries: Iterable[AttemptState]) -> None:
        """What was deleted, after it was written."""
        for state in rollouts:
            self._changes[state.status, state.queue] -= 1
        for attempt in tries:
            self._changes[ATTEMPTS, ""] -= 1
            self._changes[SPANS, ""] -= attempt.spans

    def add(self, name: str, number: int) -> None:
        self._changes[name, ""] += number

    def write(self, connection: Connection) -> None:
        if self._changes:
            changes = sorted(self._changes.items())
            rows = [(connection.shard, *key, number) for key, number in changes if number]
            self._changes.clear()
            connection.insert(statements.ADD_COUNTS, rows)


# -- asking ----------------------------------------------------------------------------------------------------------


def by_name(connection: Connection) -> Mapping[str, int]:
    """By status of rollouts, and ATTEMPTS and SPANS."""
    return {name: int(number) for name, number in connection.all(statements.COUNTS_BY_NAME)}


def by_queue(connection: Connection, statuses: Iterable[str]) -> Mapping[str, int]:
    """Rollouts with one of `statuses`, by queue."""
    return {queue: int(number) for queue, number in connection.all(statements.COUNTS_BY_QUEUE, list(statuses))}


def total(connection: Connection, statuses: Sequence[str] | None, queues: Sequence[str] | None) -> int:
    """Rollouts with one of `statuses`, in one of `queues`."""
    wanted = {status for status in ROLLOUT_TRANSITIONS if statuses is None or status in statuses}
    found = by_queue(connection, wanted)
    return sum(number for queue, number in found.items() if queues is None or queue in queues)
