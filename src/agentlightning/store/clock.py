"""Time as the store uses it: one clock for people, one for deadlines.

Times that people read are seconds since the epoch. Deadlines are kept on *steady* time, which belongs to the database
and passes only while some server has it open: the database holds what it was when a server was last alive, and servers
that share a database agree on it (`Connection.keep_time`). So neither an outage of the server, nor a suspended machine,
nor a machine whose clock is set, before or after a restart, ends an attempt that is alive or keeps a dead one.
"""

from __future__ import annotations

import time
from typing import Final

MARK_SECONDS: Final = 1.0
"""A server that has deadlines to watch says this often that it is alive."""
GAP_SECONDS: Final = 2.5
"""Where nobody has said so for longer than this, nobody was alive."""


class Clock:
    """`wall` for people, `steady` for deadlines.

    Used by the writer's thread, but for `wall`.
    """

    def __init__(self) -> None:
        self._marked = (self.reading(), time.time())
        """A reading, and the steady time at that moment."""
        self._agreed = False

    def wall(self) -> float:
        return time.time()

    def reading(self) -> float:
        """Of this machine's clock that nobody sets, and that goes on while the machine is suspended."""
        return _machine_seconds()

    def steady(self) -> float:
        """Right while it is not `stale`."""
        reading, steady = self._marked
        return steady + self.reading() - reading

    @property
    def stale(self) -> bool:
        """The database has to be asked how much time has passed, and told that a server is alive."""
        return not self._agreed or not 0 <= self.reading() - self._marked[0] < MARK_SECONDS

    @property
    def next_mark(self) -> float:
        """Seconds until it is stale."""
        return MARK_SECONDS - (self.reading() - self._marked[0]) if self._agreed else 0.0

    def witnessed(self) -> float:
        """Seconds that pass for certain although nobody said that he was alive: so deadlines come on a server that is
        always late. None at its start."""
        return min(MARK_SECONDS, max(0.0, self.reading() - self._marked[0])) if self._agreed else 0.0

    def carry_on(self, reading: float, steady: float, now: float) -> float:
        """Steady time at the reading `now`, of a database where it was `steady` at `reading`."""
        passed = now - reading
        return steady + (passed if 0 <= passed <= GAP_SECONDS else self.witnessed())

    def agree(self, reading: float, steady: float) -> None:
        """From now on, steady time is `steady` at this machine's `reading`."""
        self._marked = (reading, steady)
        self._agreed = True

    def doubt(self) -> None:
        """What was agreed on was not committed."""
        self._agreed = False


def _machine_seconds() -> float:
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
