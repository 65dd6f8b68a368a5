"""The clocks of a store: wall time for people, steady time for deadlines.

Wall time is seconds since the epoch. Deadlines are kept in *steady* time, which belongs to the database and passes only
while some server has it open: the database holds the steady time at which a server was last alive, and servers that
share a database agree on it (`Connection.sync_clock`). So neither an outage of the server, nor a suspended machine, nor
a machine whose clock is set, before or after a restart, ends an attempt that is alive or keeps a dead one.
"""

from __future__ import annotations

import time
from typing import Final

SYNC_SECONDS: Final = 1.0
"""A server that has deadlines to enforce records this often that it is alive."""
OUTAGE_SECONDS: Final = 2.5
"""When no server has done so for longer than this, none was alive."""


class Clock:
    """Used by the writer's thread, except for `wall`."""

    def __init__(self) -> None:
        self._reference = (self.reading(), time.time())
        """A reading, and the steady time at that moment."""
        self._synced = False

    def wall(self) -> float:
        return time.time()

    def reading(self) -> float:
        """A clock of this machine that nobody sets, and that goes on while the machine is suspended."""
        boottime = getattr(time, "CLOCK_BOOTTIME", None)
        return time.monotonic() if boottime is None else time.clock_gettime(boottime)

    def steady(self) -> float:
        """Valid while the clock is not `stale`."""
        reading, steady = self._reference
        return steady + self.reading() - reading

    @property
    def stale(self) -> bool:
        """Whether to synchronise with the database, which also records that this server is alive."""
        return not self._synced or not 0 <= self.reading() - self._reference[0] < SYNC_SECONDS

    @property
    def fresh_seconds(self) -> float:
        """Seconds until the clock is stale."""
        return SYNC_SECONDS - (self.reading() - self._reference[0]) if self._synced else 0.0

    def certain_seconds(self) -> float:
        """Seconds that have passed for certain, even if no server recorded that it was alive: so deadlines come on a
        server that is always late. None at its start."""
        return min(SYNC_SECONDS, max(0.0, self.reading() - self._reference[0])) if self._synced else 0.0

    def advance(self, reading: float, steady: float, now: float) -> float:
        """Steady time at the reading `now`, of a database where it was `steady` at `reading`."""
        passed = now - reading
        return steady + (passed if 0 <= passed <= OUTAGE_SECONDS else self.certain_seconds())

    def sync(self, reading: float, steady: float) -> None:
        """Set steady time to `steady` at this machine's `reading`."""
        self._reference = (reading, steady)
        self._synced = True

    def invalidate(self) -> None:
        """The transaction of the last `sync` was rolled back."""
        self._synced = False
