"""The gate that sampling passes: one for each engine, closed around an update of its weights.

Responsible for holding calls back in the order they came, and for knowing who is under way. The gateway leads every
call that an engine answers through the gate of that engine, so an update of one policy holds nobody up who asks
another; the trainer closes it with `update`. It turns nobody away, and never touches weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from agentlightning.errors import ConfigError

logger = logging.getLogger(__name__)

WARN_SECONDS = 30.0
"""A drain that takes longer says whom it waits for; again after twice the time."""
MAX_NAMED = 5
"""How many calls such a message names."""
CANNOT_GO_ON = (
    "this policy cannot change its weights while answers are drawn; leave in_flight false, and they finish first"
)


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call that waits or has passed."""

    name: str
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.name} ({time.monotonic() - self.since:.0f} s)"


class UpdateGate:
    """Open, or closed: then callers wait, and are let in when it opens, in the order they came."""

    def __init__(self, *, closed: bool = False) -> None:
        self._closed_by_caller = closed
        """Closed by `close`, until `open`."""
        self._updating = False
        """Closed by `update`, until its end."""
        self._in_flight: set[InFlightCall] = set()
        self._waiters: dict[InFlightCall, asyncio.Future[None]] = {}
        self._num_resuming = 0
        """Let in, and not yet awake."""
        self._all_resumed = asyncio.Event()
        """Set while that is 0."""
        self._all_resumed.set()
        self._drained = asyncio.Event()
        self._drained.set()
        self._update_lock = asyncio.Lock()

    @property
    def closed(self) -> bool:
        return self._closed_by_caller or self._updating

    @property
    def num_in_flight(self) -> int:
        """Calls that have passed and not yet left."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    # -- for calls -------------------------------------------------------------------------------------------------

    async def enter(self, name: str = "a call") -> InFlightCall:
        """Pass, once it is open. Whoever has entered leaves with `leave`; `name` is for those who wait for that."""
        visitor = InFlightCall(name)
        while self._num_resuming and not self.closed:
            await self._all_resumed.wait()  # Those who have waited go first.
        if self.closed:
            await self._wait(visitor)
        else:
            self._admit(visitor)
        return visitor

    def leave(self, visitor: InFlightCall) -> None:
        self._in_flight.remove(visitor)
        if not self._in_flight:
            self._drained.set()

    async def _wait(self, visitor: InFlightCall) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters[visitor] = future
        try:
            await future
        except asyncio.CancelledError:
            self._waiters.pop(visitor, None)
            if not future.cancelled():  # It was let in, and hung up before it woke.
                self._resumed()
                self.leave(visitor)
            raise
        self._resumed()

    def _resumed(self) -> None:
        self._num_resuming -= 1
        if self._num_resuming == 0:
            self._all_resumed.set()

    def _admit(self, visitor: InFlightCall) -> None:
        self._in_flight.add(visitor)
        self._drained.clear()

    # -- for updates -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Calls that come from now on wait; those under way go on."""
        self._closed_by_caller = True

    def open(self) -> None:
        """Let in all who wait, unless an update is under way: then at its end."""
        self._closed_by_caller = False
        self._admit_waiting()

    async def drain(self, timeout: float | None = None) -> None:
        """Close, and wait until nobody is inside. Raises TimeoutError, with the gate still closed."""
        self.close()
        if not await self._wait_until_drained(timeout):
            raise TimeoutError(
                f"{self.num_in_flight} calls were still under way after {timeout:g} s: {self._names()}; "
                "drain again, or resume"
            )

    @asynccontextmanager
    async def update(
        self, *, in_flight: bool = False, drain_seconds: float | None = None, can_go_on: bool = True
    ) -> AsyncGenerator[bool]:
        """Within, weights may change: who comes waits, and is served after it. Yields whether calls are under way.

        With `in_flight` those under way are not waited for. Else they finish first; after `drain_seconds` those left
        are not waited for either. Where answers cannot go on across an update (`can_go_on` False), all are waited for
        as long as it takes. Updates of one engine follow one another; a gate closed by `close` stays so. Raises
        ConfigError for `in_flight` where answers cannot go on.
        """
        if in_flight and not can_go_on:
            raise ConfigError(CANNOT_GO_ON)
        async with self._update_lock:
            self._updating = True
            try:
                if not (in_flight or await self._wait_until_drained(drain_seconds if can_go_on else None)):
                    logger.info(
                        "%d calls go on across the update after %g s: %s",
                        self.num_in_flight,
                        drain_seconds,
                        self._names(),
                    )
                yield bool(self._in_flight)
            finally:
                self._updating = False
                self._admit_waiting()

    def _admit_waiting(self) -> None:
        """They count as inside at once, whatever happens to the gate before they wake."""
        if self.closed:
            return
        waiting, self._waiters = self._waiters, {}
        for visitor, future in waiting.items():
            if not future.done():
                self._admit(visitor)
                self._num_resuming += 1
                self._all_resumed.clear()
                future.set_result(None)

    async def _wait_until_drained(self, timeout: float | None) -> bool:
        """Wait until nobody is inside, for at most `timeout` seconds; says now and then for whom."""
        started, warn = time.monotonic(), WARN_SECONDS
        while self._in_flight:
            spent = time.monotonic() - started
            left = math.inf if timeout is None else timeout - spent
            if left <= 0:
                return False
            if spent >= warn:
                logger.warning("an update has waited %.0f s for %d calls: %s", spent, self.num_in_flight, self._names())
                warn *= 2
            await self._wait_drained(min(left, warn - spent))
        return True

    async def _wait_drained(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), seconds)

    def _names(self) -> str:
        oldest = sorted(self._in_flight, key=lambda visitor: visitor.since)
        more = len(oldest) - MAX_NAMED
        return ", ".join(map(str, oldest[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


class UpdateGates:
    """The gate of each engine, whatever names it is served under."""

    def __init__(self) -> None:
        self._gates: dict[int, tuple[object, UpdateGate]] = {}
        """By identity; the engine is kept, so that no other can have its identity."""
        self._closed = False

    def of(self, engine: object) -> UpdateGate:
        known = self._gates.get(id(engine))
        if known is None:
            known = self._gates[id(engine)] = (engine, UpdateGate(closed=self._closed))
        return known[1]

    @property
    def closed(self) -> bool:
        """Whether all are."""
        return self._closed

    def close(self) -> None:
        self._closed = True
        for gate in self._all():
            gate.close()

    def open(self) -> None:
        self._closed = False
        for gate in self._all():
            gate.open()

    async def drain(self, timeout: float | None = None) -> None:
        """Close, and wait until nobody is inside any. Raises TimeoutError, with the gates still closed."""
        self.close()
        ends = await asyncio.gather(*(gate.drain(timeout) for gate in self._all()), return_exceptions=True)
        for error in filter(None, ends):
            raise error

    def _all(self) -> list[UpdateGate]:
        return [gate for _, gate in self._gates.values()]
