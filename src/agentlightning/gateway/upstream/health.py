"""Tracks the health of one server by its failures.

A server that cannot be reached, or failed several times in a row, gets no calls for a pause that doubles from one
second to thirty; then it is tried again. Needs no event loop; the clock is injected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_FAILURES: Final = 3
"""Failures in a row until a reachable server is paused."""
FIRST_SECONDS: Final = 1.0
MAX_SECONDS: Final = 30.0


class ServerHealth:
    """The health of one server."""

    __slots__ = ("_clock", "_failures", "_pause", "_until")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        """Length of the current pause in seconds; 0 while the server is healthy."""
        self._until = 0.0

    @property
    def is_available(self) -> bool:
        """Whether it may be sent calls now."""
        return self._until == 0.0 or self._clock() >= self._until

    @property
    def is_suspect(self) -> bool:
        """Whether it is paused, or has not succeeded since its pause."""
        return self._pause > 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the pause ends."""
        return max(0.0, self._until - self._clock()) if self._until else 0.0

    def record_success(self) -> None:
        self._failures, self._pause, self._until = 0, 0.0, 0.0

    def record_failure(self, unreachable: bool = False) -> None:
        """Count a failure. `unreachable`: nothing listens there, so one failure is enough for a pause."""
        self._failures += 1
        if unreachable or self._pause > 0 or self._failures >= MAX_FAILURES:
            self._pause = min(MAX_SECONDS, self._pause * 2 or FIRST_SECONDS)
            self._until = self._clock() + self._pause
