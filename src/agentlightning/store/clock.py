"""Time as the store uses it: one clock for people, one for deadlines.

Times that people read are seconds since the epoch. Deadlines are kept on a steady clock that starts at the same value
and then advances with `time.monotonic`, so that setting the machine's clock neither kills attempts nor keeps dead ones
alive while the store is open; after a restart they are still comparable with what was stored.
"""

from __future__ import annotations

import time


class Clock:
    """`wall` for people, `steady` for deadlines."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def wall(self) -> float:
        return time.time()

    def steady(self) -> float:
        return self._offset + time.monotonic()
