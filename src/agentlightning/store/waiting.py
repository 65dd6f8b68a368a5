"""Waiting for rollouts to finish, without looking at the database each time something else happens."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store import codec, statements
from agentlightning.store.codec import Row
from agentlightning.store.engine import PARK, Park, Transaction


class Wait:
    """One `wait_for_rollouts`."""

    def __init__(self, rollout_ids: Sequence[str], minimum: int | None) -> None:
        self._ids = list(dict.fromkeys(rollout_ids))
        self._json = codec.dump(self._ids, "rollout_ids")
        self._minimum = len(self._ids) if minimum is None else minimum
        if not 0 <= self._minimum <= len(self._ids):
            raise ConfigError(
                f"minimum={minimum} of {len(self._ids)} rollouts can never be reached; leave it out for all"
            )
        self._pending: set[str] = set()
        self._missing = 0
        self._seen: set[str] = set()

    def look(self, transaction: Transaction) -> list[Row] | Park:
        """The rows of the finished rollouts, or PARK while there are too few."""
        rows = self.finished(transaction)
        if len(rows) >= self._minimum:
            return rows
        self._pending = set(self._ids).difference(row[1] for row in rows)
        self._missing = self._minimum - len(rows)
        self._seen = set()
        return PARK

    def finished(self, transaction: Transaction) -> list[Row]:
        """The rows of those that have finished, in the order asked for."""
        rows = {row[1]: row for row in transaction.all(statements.FINISHED_AMONG, self._json)}
        if len(rows) < len(self._ids):
            self._check_known(transaction)
        return [rows[rollout_id] for rollout_id in self._ids if rollout_id in rows]

    def concerns(self, transaction: Transaction) -> bool:
        """Whether looking again may find enough. A rollout queued again meanwhile is noticed by looking."""
        self._seen |= self._pending & transaction.finished
        return transaction.foreign or len(self._seen) >= self._missing

    def _check_known(self, transaction: Transaction) -> None:
        known = {row[0] for row in transaction.all(statements.KNOWN_AMONG, self._json)}
        unknown = [rollout_id for rollout_id in self._ids if rollout_id not in known]
        if unknown:
            raise NotFoundError(f"no rollout {unknown[0]!r} in this store")
