"""How often Python's threads take turns, while there is one that does torch work.

torch gives the interpreter lock up at every operation of its thread, and with Python's own 5 ms between switches waits
long to have it back from a busy event loop: sampling beside one then takes 1.6 times as long. The setting is that of
the whole process, so it is made when the first such thread starts and put back when the last one ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

SWITCH_SECONDS: Final = 2e-4


class SwitchInterval:
    """Counts those that need it short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0
        self._ours: float | None = None
        """What was set; None where it was short enough."""

    @contextmanager
    def short(self) -> Generator[None]:
        """Within, threads switch every SWITCH_SECONDS, or more often where that was set."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                self._ours = None
                if self._before > SWITCH_SECONDS:
                    sys.setswitchinterval(SWITCH_SECONDS)
                    self._ours = sys.getswitchinterval()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and sys.getswitchinterval() == self._ours:  # else someone has set it since
                    sys.setswitchinterval(self._before)


SWITCH_INTERVAL: Final = SwitchInterval()
"""Of this process."""
