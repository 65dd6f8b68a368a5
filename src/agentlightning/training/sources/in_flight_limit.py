"""How many groups of rollouts run at the same time, by the load of the engine that answers them.

Additive-increase rules of networks, with factors: while the key-value cache is less than 0.6 full the limit grows by
1.25 for each turnover (as many groups finished as the limit allows); from 0.8 on it shrinks to what fills 0.7; from 0.9
on the youngest groups beyond it are cancelled, and run again later. The limit never goes below the groups of one step,
so a step always has what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

GROW_BELOW: Final = 0.6
GROWTH: Final = 1.25
TRIM_ABOVE: Final = 0.8
TRIM_TO: Final = 0.7
CANCEL_ABOVE: Final = 0.9

Usage = Callable[[], Awaitable[float | None]]
"""The share of the engine's key-value cache that is in use; None: unknown."""


async def unknown_usage() -> float | None:
    """Of an engine that does not report it."""
    return None


@dataclass(slots=True)
class InFlightLimit:
    """The number of groups that may run at the same time; no limit until the engine is first overloaded."""

    usage: Usage = unknown_usage
    groups: float = math.inf
    _finished: int = 0
    """Groups that finished since the limit last changed."""

    def count(self, finished: int) -> None:
        """Groups that have finished."""
        self._finished += finished

    async def adapt(self, running: int, least: int, most: int) -> int:
        """Change the limit, between `least` and `most` groups, by the present load; returns how many of the `running`
        groups are to be cancelled."""
        used = await self.usage()
        if used is None:
            return 0
        if used > TRIM_ABOVE:
            self._set(max(least, min(self.groups, math.floor(running * TRIM_TO / used))))
            return max(0, running - int(self.groups)) if used > CANCEL_ABOVE else 0
        if used < GROW_BELOW and self.groups < most and self._finished >= self.groups:
            self._set(min(most, self.groups * GROWTH))
        return 0

    def _set(self, groups: float) -> None:
        if groups != self.groups:
            self.groups, self._finished = groups, 0
