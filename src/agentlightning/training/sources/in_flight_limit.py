"""How many groups of rollouts run at the same time, by the load of the engine that answers them.

Additive-increase rules of networks, with factors, as in prime-rl: while the key-value cache is less than 0.6 full the
limit grows by 1.25 for each turnover (as many groups finished as the limit allows); above 0.8 it shrinks to what fills
0.7, and groups beyond it that no runner has begun wait; above 0.9 the youngest groups beyond it are cancelled, and run
again later. One group may always run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

GROW_BELOW: Final = 0.6
GROWTH: Final = 1.25
TRIM_ABOVE: Final = 0.8
TRIM_TO: Final = 0.7
CANCEL_ABOVE: Final = 0.9
READ_SECONDS: Final = 1.0
"""How often the load is read."""
SETTLE_SECONDS: Final = 10.0
"""After the limit has shrunk: time until runners have stopped what was cancelled, and the load shows it."""

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
    clock: Callable[[], float] = time.monotonic
    peak: float | None = None
    """The highest load since it was last reset; None: the engine has reported none."""
    _recent: float | None = None
    """The highest load since `load` was last called."""
    _shrunk: float = -math.inf
    """When the limit last shrank."""
    _finished: int = 0
    """Groups that finished since the limit last changed."""

    def count(self, finished: int) -> None:
        """Groups that have finished."""
        self._finished += finished

    async def read(self) -> None:
        """Read the load every `READ_SECONDS`."""
        while True:
            if (used := await self.usage()) is not None:
                self.peak = max(used, self.peak or 0.0)
                self._recent = max(used, self._recent or 0.0)
            await asyncio.sleep(READ_SECONDS)

    def load(self) -> float | None:
        """The highest share of the cache in use since the last call; None where none was read."""
        used, self._recent = self._recent, None
        return used

    def is_overload(self, used: float) -> bool:
        """Whether the limit is to shrink now."""
        return used > TRIM_ABOVE and self.clock() >= self._shrunk + SETTLE_SECONDS

    def shrink(self, used: float, running: int) -> None:
        """Allow the groups that fill `TRIM_TO` of the cache, where `running` groups fill `used`."""
        self._set(max(1, min(self.groups, math.floor(running * TRIM_TO / used))))
        self._shrunk = self.clock()

    def grow(self, used: float, most: int) -> None:
        """Allow more groups, up to `most`, where the cache has room and as many have finished as were allowed."""
        if used < GROW_BELOW and self.groups < most and self._finished >= self.groups:
            self._set(min(most, self.groups * GROWTH))

    def _set(self, groups: float) -> None:
        if groups != self.groups:
            self.groups, self._finished = groups, 0

    def metrics(self) -> dict[str, float]:
        """`kv_cache_usage`, the highest since the last call, and `groups_limit`; what is unknown is left out."""
        found = {} if self.peak is None else {"kv_cache_usage": self.peak}
        self.peak = None
        return found if self.groups == math.inf else {**found, "groups_limit": float(int(self.groups))}
