"""Commands: work that event loops submit to the threads of a store; and the registry of those that wait for a rollout,
to be claimed or to finish, by which the ones that a transaction affects are found without running every one again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.store import validation
from agentlightning.store.idempotency import IdempotentCall
from agentlightning.store.sql.schema import ROLLOUT, RolloutColumns, select
from agentlightning.store.sql.tx import Connection, Tx


class Wait:
    """The type of WAIT."""


WAIT: Final = Wait()
"""What a command returns when it has to wait."""


def given(*ids: str | None) -> list[str]:
    """The ids that are there."""
    return [each for each in ids if each is not None]


QueueNames = tuple[str, ...] | None
"""The queues that a claim takes from; None for every one that is not private."""


class Command:
    """One operation and the future of its result: a function of a transaction, or of a connection if it only `reads`.
    It may run several times before its transaction commits."""

    done = False
    durable = True
    """Whether its result survives a power failure, not only the end of the process."""
    deadline = math.inf
    """Until when it may wait, on time.monotonic."""
    submitted_at = 0.0
    idempotent: IdempotentCall | None = None
    """Set for a command that has an idempotency key."""
    convert: Callable[[Any], Any] | None = None
    """Turns the result into what its caller returns, which is what an idempotency key stores."""

    def __init__(
        self,
        name: str,
        run: Callable[[Any], Any],
        rollouts: Iterable[str] = (),
        workers: Iterable[str] = (),
        attempts: Iterable[str] = (),
        new_rollouts: int = 0,
        reads: bool = False,
    ) -> None:
        self.name = name
        self.run = run
        """Returns the result, or WAIT."""
        self.rollouts, self.workers, self.attempts = rollouts, workers, attempts
        """Ids of rows that are loaded with those of its batch. Others are loaded when it needs them."""
        self.new_rollouts = new_rollouts
        self.reads = reads
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def on_timeout(self, tx: Tx) -> Any:
        """Return the result of a command whose deadline passed while it waited."""
        raise NotImplementedError

    def undo(self, tx: Tx, result: Any) -> None:
        """Revert a committed result whose caller is gone."""

    def wait(self, waiters: Waiters) -> None:
        """Register for the events that this command waits for."""
        raise NotImplementedError


# -- waiting for rollouts to finish ------------------------------------------------------------------------------------

_FINISHED_AMONG: Final = (
    f"SELECT {select('r', ROLLOUT)} FROM rollouts r "
    "WHERE r.rollout_id = ANY (?) AND coalesce(r.status, '') IN ('succeeded', 'failed', 'cancelled')"
)
"""`coalesce` keeps SQLite from the index of the status, in which it would read every rollout that has finished."""
_KNOWN_AMONG: Final = "SELECT rollout_id FROM rollouts WHERE rollout_id = ANY (?)"


def check_known(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Raises NotFoundError for the first of these ids that is unknown."""
    known = {row[0] for row in connection.all(_KNOWN_AMONG, list(rollout_ids))}
    for rollout_id in rollout_ids:
        if rollout_id not in known:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")


class WaitForRollouts(Command):
    """One `wait_for_rollouts`. The result: the finished rollouts, in the requested order."""

    def __init__(self, rollout_ids: Sequence[str], minimum: int | None) -> None:
        super().__init__("wait_for_rollouts", self._run, reads=True)
        validation.check_texts(rollout_ids, "rollout_ids")
        self._ids = list(dict.fromkeys(rollout_ids))
        self._minimum = len(self._ids) if minimum is None else minimum
        if not 0 <= self._minimum <= len(self._ids):
            raise ConfigError(
                f"minimum={minimum} of {len(self._ids)} rollouts can never be reached; leave it out for all"
            )
        self._pending: set[str] = set()
        self._missing = 0

    def _run(self, connection: Connection) -> Any:
        rows = self.finished(connection)
        if self.over(rows):
            return rows
        self._pending = set(self._ids).difference(row.rollout_id for row in rows)
        self._missing = self._minimum - len(rows)
        return WAIT

    def on_timeout(self, tx: Tx) -> list[RolloutColumns]:
        return self.finished(tx.connection)

    def over(self, rows: Sequence[RolloutColumns]) -> bool:
        return len(rows) >= self._minimum

    def finished(self, connection: Connection) -> list[RolloutColumns]:
        rows = {row[1]: RolloutColumns(*row) for row in connection.all(_FINISHED_AMONG, self._ids)}
        if len(rows) < len(self._ids):
            check_known(connection, self._ids)
        return [rows[rollout_id] for rollout_id in self._ids if rollout_id in rows]

    def wait(self, waiters: Waiters) -> None:
        waiters.add_wait(self, self._pending, self._missing)


# -- the registry ------------------------------------------------------------------------------------------------------


class _RolloutWait:
    """How many of which rollouts one command waits for."""

    __slots__ = ("finished", "missing", "pending")

    def __init__(self, pending: set[str], missing: int) -> None:
        self.pending = pending
        self.missing = missing
        self.finished: set[str] = set()


class Waiters:
    """Used by the thread of the committer alone."""

    def __init__(self) -> None:
        self.claims: dict[Command, None] = {}
        """In order of arrival."""
        self._waits: dict[Command, _RolloutWait] = {}
        self._by_rollout: dict[str, dict[Command, None]] = {}

    def all(self) -> list[Command]:
        return [*self.claims, *self._waits]

    def add_claim(self, command: Command) -> None:
        self.claims.setdefault(command)

    def add_wait(self, command: Command, pending: set[str], missing: int) -> None:
        """Wait until `missing` of the rollouts `pending` have finished."""
        self.remove(command)
        self._waits[command] = _RolloutWait(pending, missing)
        for rollout_id in pending:
            self._by_rollout.setdefault(rollout_id, {})[command] = None

    def remove(self, command: Command) -> None:
        """Does nothing for one that does not wait."""
        self.claims.pop(command, None)
        wait = self._waits.pop(command, None)
        for rollout_id in () if wait is None else wait.pending:
            members = self._by_rollout[rollout_id]
            del members[command]
            if not members:
                del self._by_rollout[rollout_id]

    def affected(self, finished: Iterable[str]) -> list[Command]:
        """The waits that may be over now that these rollouts have finished. Running them tells whether one of the
        rollouts was queued again meanwhile."""
        found: dict[Command, None] = {}
        for rollout_id in finished:
            for command in self._by_rollout.get(rollout_id, ()):
                wait = self._waits[command]
                wait.finished.add(rollout_id)
                if len(wait.finished) >= wait.missing:
                    found[command] = None
        return list(found)

    def rollout_waits(self) -> list[Command]:
        """Every command that waits for rollouts to finish."""
        return list(self._waits)

    @property
    def deadline(self) -> float:
        """The earliest deadline, on time.monotonic."""
        return min((command.deadline for command in self.all()), default=math.inf)

    def expired(self) -> list[Command]:
        """Those whose deadline has passed. They stay until they are removed: the transaction that answers them may be
        rolled back."""
        now = time.monotonic()
        return [command for command in self.all() if command.deadline <= now]
