"""Whether one server is well, as far as its answers and our questions tell.

A server that cannot be reached, or that failed several times in a row, is left alone for a while that doubles from one
second to thirty; then it is tried again. Pure: the clock is handed in, and who asks and tells is `upstream.servers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_FAILURES: Final = 3
"""In a row, until a server that can be reached is left alone."""
FIRST_SECONDS: Final = 1.0
MAX_SECONDS: Final = 30.0


class ServerHealth:
    """Of one server."""

    __slots__ = ("_clock", "_failures", "_pause", "_until")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        """For how long it is left alone now; 0 while it is well."""
        self._until = 0.0

    @property
    def is_available(self) -> bool:
        """Whether it may be asked."""
        return self._until == 0.0 or self._clock() >= self._until

    @property
    def is_suspect(self) -> bool:
        """Left alone, or not yet seen to be well again."""
        return self._pause > 0

    @property
    def seconds_left(self) -> float:
        """Until it may be asked again."""
        return max(0.0, self._until - self._clock()) if self._until else 0.0

    def record_success(self) -> None:
        self._failures, self._pause, self._until = 0, 0.0, 0.0

    def record_failure(self, unreachable: bool = False) -> None:
        """`unreachable`: there is no server, so that one failure is enough."""
        self._failures += 1
        if unreachable or self._pause > 0 or self._failures >= MAX_FAILURES:
            self._pause = min(MAX_SECONDS, self._pause * 2 or FIRST_SECONDS)
            self._until = self._clock() + self._pause
