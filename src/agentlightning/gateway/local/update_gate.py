"""Makes calls to an engine wait while its weights are updated.

Each engine has its own gate, so an update of one policy does not delay calls of another. Calls enter in the order they
arrived; the gate is closed within `update`. A gate rejects no call and never touches weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from agentlightning.engine.adapter_view import AdapterView

logger = logging.getLogger(__name__)

WARN_SECONDS = 30.0
"""Log a warning if a drain takes longer than this, and again after twice the time."""
MAX_NAMED = 5
"""Calls named in the warning."""


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call that waits at the gate or has entered."""

    name: str
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.name} ({time.monotonic() - self.since:.0f} s)"


class UpdateGate:
    """Calls enter an open gate at once. At a closed one they wait, and enter in order when it opens."""

    def __init__(self) -> None:
        self._in_flight: set[InFlightCall] = set()
        self._waiting: set[InFlightCall] = set()
        self._resuming: set[InFlightCall] = set()
        """Calls in flight that waited, and whose tasks have not resumed; new calls queue behind them."""
        self._open, self._drained, self._update_lock = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._open.set()

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    @property
    def num_in_flight(self) -> int:
        """Calls that have entered and not left."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, name: str = "a call") -> InFlightCall:
        """Enter once the gate is open; `leave` must follow. `name` describes the call in logs."""
        call = InFlightCall(name)
        if self._resuming:
            await asyncio.sleep(0)  # they resume first
        if not self.closed:
            self._in_flight.add(call)
            return call
        self._waiting.add(call)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self._waiting.discard(call)
            if call in self._in_flight:  # Released, then cancelled before it resumed.
                self.leave(call)
            raise
        finally:
            self._resuming.discard(call)
        return call

    def leave(self, call: InFlightCall) -> None:
        self._in_flight.remove(call)
        if not self._in_flight:
            self._drained.set()

    @asynccontextmanager
    async def update(self, *, in_flight: bool = False, drain_seconds: float | None = None) -> AsyncGenerator[bool]:
        """A context in which weights may change and new calls wait. Yields whether calls are in progress.

        With `in_flight`, calls in progress continue across the update. Otherwise they finish first, but those left
        after `drain_seconds` continue across it too. Updates of one engine run one after another.
        """
        async with self._update_lock:
            self._open.clear()
            try:
                if not in_flight:
                    await self._drain(drain_seconds)
                yield bool(self._in_flight)
            finally:
                # Released calls count as in progress at once, even if the gate closes before they resume.
                self._in_flight |= self._waiting
                self._resuming |= self._waiting
                self._waiting.clear()
                self._open.set()

    async def _drain(self, seconds: float | None) -> None:
        """Wait until all calls have left, for at most `seconds`; logs a warning about slow ones."""
        started, warn = time.monotonic(), WARN_SECONDS
        while self._in_flight:
            elapsed = time.monotonic() - started
            if seconds is not None and elapsed >= seconds:
                message = "%d calls go on across the update after %g s: %s"
                return logger.info(message, self.num_in_flight, seconds, self._names())
            if elapsed >= warn:
                logger.warning(
                    "an update has waited %.0f s for %d calls: %s", elapsed, self.num_in_flight, self._names()
                )
                warn *= 2
            until = warn if seconds is None else min(warn, seconds)
            self._drained.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), until - elapsed)

    def _names(self) -> str:
        oldest = sorted(self._in_flight, key=lambda call: call.since)
        more = len(oldest) - MAX_NAMED
        return ", ".join(map(str, oldest[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


class UpdateGates:
    """One gate for each engine, whatever its model names. The adapters of an engine share its gate."""

    def __init__(self) -> None:
        self._gates: dict[int, tuple[object, UpdateGate]] = {}
        """By id(engine). The reference keeps the id from being reused."""

    def of(self, engine: object) -> UpdateGate:
        if isinstance(engine, AdapterView):
            engine = engine.engine
        if id(engine) not in self._gates:
            self._gates[id(engine)] = engine, UpdateGate()
        return self._gates[id(engine)][1]
