"""A shorter interpreter switch interval while a thread does torch work.

torch releases the interpreter lock at every operation. With Python's default of 5 ms between switches its thread waits
long to get the lock back from a busy event loop: sampling beside one then takes 1.6 times as long. The setting is
process-wide, so it is shortened when the first such thread starts and restored when the last one ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

SWITCH_SECONDS: Final = 2e-4


class SwitchInterval:
    """Counts the threads that need a short interval."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._previous = 0.0
        self._applied: float | None = None
        """The interval set here; None if it was short enough already."""

    @contextmanager
    def short(self) -> Generator[None]:
        """Within the context, threads switch every SWITCH_SECONDS, or more often if already configured so."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._previous = sys.getswitchinterval()
                self._applied = None
                if self._previous > SWITCH_SECONDS:
                    sys.setswitchinterval(SWITCH_SECONDS)
                    self._applied = sys.getswitchinterval()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and sys.getswitchinterval() == self._applied:  # Nobody else has set it since.
                    sys.setswitchinterval(self._previous)


SWITCH_INTERVAL: Final = SwitchInterval()
"""Of this process."""
