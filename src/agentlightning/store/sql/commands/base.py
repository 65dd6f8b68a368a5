"""Commands: units of work that event loops submit to the store's threads, each with the future of its result."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any

from agentlightning.store.idempotency import IdempotentCall
from agentlightning.store.sql.commands.waiters import Waiters
from agentlightning.store.sql.session.unit_of_work import Prefetch, UnitOfWork
from agentlightning.store.sql.tables.backend import Connection


class Command:
    """One operation and the future of its result. It may run several times before its transaction commits, so it
    carries no state from one run to the next."""

    __slots__ = ("convert", "deadline", "done", "future", "idempotent", "loop", "name", "submitted_at")

    writes = True
    """Whether it changes anything. Commands that only read run after those that write, on what they have written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.done = False
        self.deadline = math.inf
        """Until when it may wait, on time.monotonic."""
        self.submitted_at = 0.0
        self.idempotent: IdempotentCall | None = None
        """Set for a command that has an idempotency key."""
        self.convert: Callable[[Any], Any] | None = None
        """Turns the result into what its caller returns, which is what an idempotency key stores."""

    def prefetch(self, needs: Prefetch) -> None:
        """Add the rows that this command needs to those loaded for its batch."""

    def run(self, unit: UnitOfWork) -> Any:
        """Return the result, or WAIT."""
        raise NotImplementedError

    def on_timeout(self, unit: UnitOfWork) -> Any:
        """Return the result of a command whose deadline passed while it waited."""
        raise NotImplementedError

    def undo(self, unit: UnitOfWork, result: Any) -> None:
        """Revert a committed result whose caller is gone."""

    def wait(self, waiters: Waiters[Command]) -> None:
        """Register for the events that this command waits for."""
        raise NotImplementedError


class FunctionCommand(Command):
    """Runs a function of the unit of work."""

    __slots__ = ("_function", "_rollouts", "_workers")

    def __init__(
        self,
        name: str,
        function: Callable[[UnitOfWork], Any],
        rollouts: Iterable[str] = (),
        workers: Iterable[str] = (),
    ) -> None:
        super().__init__(name)
        self._function = function
        self._rollouts = rollouts
        self._workers = workers

    def prefetch(self, needs: Prefetch) -> None:
        needs.rollouts.update(self._rollouts)
        needs.workers.update(self._workers)

    def run(self, unit: UnitOfWork) -> Any:
        return self._function(unit)


class ReadCommand(Command):
    """Runs a query."""

    __slots__ = ("query",)

    writes = False

    def __init__(self, name: str, query: Callable[[Connection], Any]) -> None:
        super().__init__(name)
        self.query = query

    def run(self, unit: UnitOfWork) -> Any:
        return self.query(unit.connection)
