"""The command that waits for rollouts to finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store import validation
from agentlightning.store.sql.commands.base import Command
from agentlightning.store.sql.commands.waiters import WAIT, Waiters
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.tables import statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.mapping import Row


class WaitForRollouts(Command):
    """One `wait_for_rollouts`. The result: rows of the finished rollouts, in the requested order."""

    __slots__ = ("_ids", "_minimum", "_missing", "_pending")

    writes = False

    def __init__(self, rollout_ids: Sequence[str], minimum: int | None) -> None:
        super().__init__("wait_for_rollouts")
        validation.check_texts(rollout_ids, "rollout_ids")
        self._ids = list(dict.fromkeys(rollout_ids))
        self._minimum = len(self._ids) if minimum is None else minimum
        if not 0 <= self._minimum <= len(self._ids):
            raise ConfigError(
                f"minimum={minimum} of {len(self._ids)} rollouts can never be reached; leave it out for all"
            )
        self._pending: set[str] = set()
        self._missing = 0

    def run(self, unit: UnitOfWork) -> Any:
        rows = self.on_timeout(unit)
        if self.over(rows):
            return rows
        self._pending = set(self._ids).difference(row[1] for row in rows)
        self._missing = self._minimum - len(rows)
        return WAIT

    def on_timeout(self, unit: UnitOfWork) -> list[Row]:
        return self.finished(unit.connection)

    def over(self, rows: Sequence[Row]) -> bool:
        return len(rows) >= self._minimum

    def finished(self, connection: Connection) -> list[Row]:
        rows = {row[1]: row for row in connection.all(statements.FINISHED_AMONG, self._ids)}
        if len(rows) < len(self._ids):
            self._check_known(connection)
        return [rows[rollout_id] for rollout_id in self._ids if rollout_id in rows]

    def wait(self, waiters: Waiters[Command]) -> None:
        waiters.add_wait(self, self._pending, self._missing)

    def _check_known(self, connection: Connection) -> None:
        known = {row[0] for row in connection.all(statements.KNOWN_AMONG, self._ids)}
        unknown = [rollout_id for rollout_id in self._ids if rollout_id not in known]
        if unknown:
            raise NotFoundError(f"no rollout {unknown[0]!r} in this store")
