"""What callers hand over to the threads of a store: one thing to do, and where its answer goes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any

from agentlightning.store.idempotency import IdempotentCall
from agentlightning.store.sql.execution.unit_of_work import Unit, Wants
from agentlightning.store.sql.execution.waiters import Parked
from agentlightning.store.sql.tables.backend import Connection


class Call:
    """One thing to do, and where its answer goes. It may be run several times until its transaction is committed, so
    it keeps nothing from one time to the next."""

    __slots__ = ("answered", "deadline", "finish", "future", "idempotent", "loop", "name", "since")

    writes = True
    """Whether it changes anything. One that does not is run after all that do, on what they have written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.answered = False
        self.deadline = math.inf
        """Until when it may be parked, on time.monotonic."""
        self.since = 0.0
        self.idempotent: IdempotentCall | None = None
        """Set where it is to be done once."""
        self.finish: Callable[[Any], Any] | None = None
        """What its caller makes of the answer, before that is remembered."""

    def want(self, wants: Wants) -> None:
        """Say what is needed."""

    def run(self, unit: Unit) -> Any:
        """The answer, or PARK."""
        raise NotImplementedError

    def at_timeout(self, unit: Unit) -> Any:
        """The answer of a parked call whose time is up."""
        raise NotImplementedError

    def undo(self, unit: Unit, answer: Any) -> None:
        """What to do with an answer nobody is left to take."""

    def park(self, parked: Parked) -> None:
        """Wait for what may concern it."""
        raise NotImplementedError


class Do(Call):
    """A call that is a function of the unit."""

    __slots__ = ("_function", "_rollouts", "_workers")

    def __init__(
        self, name: str, function: Callable[[Unit], Any], rollouts: Iterable[str] = (), workers: Iterable[str] = ()
    ) -> None:
        super().__init__(name)
        self._function = function
        self._rollouts = rollouts
        self._workers = workers

    def want(self, wants: Wants) -> None:
        wants.rollouts.update(self._rollouts)
        wants.workers.update(self._workers)

    def run(self, unit: Unit) -> Any:
        return self._function(unit)


class Read(Call):
    """A call that only looks at the database."""

    __slots__ = ("look",)

    writes = False

    def __init__(self, name: str, look: Callable[[Connection], Any]) -> None:
        super().__init__(name)
        self.look = look

    def run(self, unit: Unit) -> Any:
        return self.look(unit.connection)
