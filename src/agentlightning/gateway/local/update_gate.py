"""Makes calls to an engine wait while its weights are updated.

Each engine has its own gate, so an update of one policy does not delay calls of another. Calls enter in the order they
arrived; the trainer closes the gate with `update`. A gate rejects no call and never touches weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from agentlightning.engine.adapter_view import AdapterView
from agentlightning.errors import ConfigError

logger = logging.getLogger(__name__)

WARN_SECONDS = 30.0
"""Log a warning if a drain takes longer than this, and again after twice the time."""
MAX_NAMED = 5
"""Calls named in the warning."""
CANNOT_GO_ON = (
    "this policy cannot change its weights while answers are drawn; leave in_flight false, and they finish first"
)


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call that waits at the gate or has entered."""

    name: str
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.name} ({time.monotonic() - self.since:.0f} s)"


class UpdateGate:
    """A gate that is open or closed. At a closed gate calls wait; they enter in order when it opens."""

    def __init__(self, *, closed: bool = False) -> None:
        self._closed_by_caller = closed
        """Closed by `close`, until `open`."""
        self._updating = False
        """Closed by `update`, until its end."""
        self._in_flight: set[InFlightCall] = set()
        self._waiters: dict[InFlightCall, asyncio.Future[None]] = {}
        self._num_resuming = 0
        """Waiters released whose tasks have not resumed; new calls queue behind them."""
        self._all_resumed = asyncio.Event()
        """Set while `_num_resuming` is 0."""
        self._all_resumed.set()
        self._drained = asyncio.Event()
        self._drained.set()
        self._update_lock = asyncio.Lock()

    @property
    def closed(self) -> bool:
        return self._closed_by_caller or self._updating

    @property
    def num_in_flight(self) -> int:
        """Calls that have entered and not left."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    # -- for calls -------------------------------------------------------------------------------------------------

    async def enter(self, name: str = "a call") -> InFlightCall:
        """Enter once the gate is open; `leave` must follow. `name` describes the call in logs."""
        call = InFlightCall(name)
        while self._num_resuming and not self.closed:
            await self._all_resumed.wait()  # Earlier calls go first.
        if self.closed:
            await self._wait(call)
        else:
            self._admit(call)
        return call

    def leave(self, call: InFlightCall) -> None:
        self._in_flight.remove(call)
        if not self._in_flight:
            self._drained.set()

    async def _wait(self, call: InFlightCall) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters[call] = future
        try:
            await future
        except asyncio.CancelledError:
            self._waiters.pop(call, None)
            if not future.cancelled():  # Released, then cancelled before it resumed.
                self._resumed()
                self.leave(call)
            raise
        self._resumed()

    def _resumed(self) -> None:
        self._num_resuming -= 1
        if self._num_resuming == 0:
            self._all_resumed.set()

    def _admit(self, call: InFlightCall) -> None:
        self._in_flight.add(call)
        self._drained.clear()

    # -- for updates -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Make new calls wait. Calls in progress continue."""
        self._closed_by_caller = True

    def open(self) -> None:
        """Release waiting calls, or let the end of the current update release them."""
        self._closed_by_caller = False
        self._admit_waiting()

    async def drain(self, timeout: float | None = None) -> None:
        """Close, and wait until all calls in progress have left. Raises TimeoutError, with the gate still closed."""
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
        """A context in which weights may change and new calls wait. Yields whether calls are in progress.

        With `in_flight`, calls in progress continue across the update. Otherwise they finish first, but those left
        after `drain_seconds` continue across it too. If answers cannot continue across an update (`can_go_on` False),
        all are awaited. Updates of one engine run one after another, and a gate closed by `close` stays closed. Raises
        ConfigError for `in_flight` if answers cannot continue.
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
        """Released calls count as in progress at once, even if the gate closes before they resume."""
        if self.closed:
            return
        waiting, self._waiters = self._waiters, {}
        for call, future in waiting.items():
            if not future.done():
                self._admit(call)
                self._num_resuming += 1
                self._all_resumed.clear()
                future.set_result(None)

    async def _wait_until_drained(self, timeout: float | None) -> bool:
        """Wait until all calls have left, for at most `timeout` seconds; logs a warning about slow ones."""
        started, warn = time.monotonic(), WARN_SECONDS
        while self._in_flight:
            elapsed = time.monotonic() - started
            left = math.inf if timeout is None else timeout - elapsed
            if left <= 0:
                return False
            if elapsed >= warn:
                logger.warning(
                    "an update has waited %.0f s for %d calls: %s", elapsed, self.num_in_flight, self._names()
                )
                warn *= 2
            await self._wait_drained(min(left, warn - elapsed))
        return True

    async def _wait_drained(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), seconds)

    def _names(self) -> str:
        oldest = sorted(self._in_flight, key=lambda call: call.since)
        more = len(oldest) - MAX_NAMED
        return ", ".join(map(str, oldest[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


class UpdateGates:
    """One gate for each engine, whatever its model names. The adapters of an engine share its gate."""

    def __init__(self) -> None:
        self._gates: dict[int, tuple[object, UpdateGate]] = {}
        """By id(engine). The reference keeps the id from being reused."""
        self._closed = False

    def of(self, engine: object) -> UpdateGate:
        if isinstance(engine, AdapterView):
            engine = engine.engine
        entry = self._gates.get(id(engine))
        if entry is None:
            entry = self._gates[id(engine)] = (engine, UpdateGate(closed=self._closed))
        return entry[1]

    @property
    def closed(self) -> bool:
        """Whether all gates are closed."""
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
        """Close all gates, and wait until all calls have left. Raises TimeoutError, with the gates still closed."""
        self.close()
        results = await asyncio.gather(*(gate.drain(timeout) for gate in self._all()), return_exceptions=True)
        for error in filter(None, results):
            raise error

    def _all(self) -> list[UpdateGate]:
        return [gate for _, gate in self._gates.values()]
