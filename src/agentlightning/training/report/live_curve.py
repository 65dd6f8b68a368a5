"""The reward curve of a run that is not over: drawn again every half minute, in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agentlightning.training.report.reward_curve import draw_curve

logger = logging.getLogger(__name__)

SECONDS: Final = 30.0
"""The least time between two drawings; drawing one takes less than one."""


class LiveCurve:
    """Draws the curve while the run goes on. Without matplotlib it draws nothing; what fails is logged once."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._drawn = clock()
        self._thread: threading.Thread | None = None
        self._works = find_spec("matplotlib") is not None

    def draw(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Draw the steps that `read` returns, unless this was done a moment ago."""
        now = self._clock()
        busy = self._thread is not None and self._thread.is_alive()
        if not self._works or busy or now - self._drawn < SECONDS:
            return
        self._drawn = now
        self._thread = threading.Thread(target=self._draw, args=(read(),), name="curve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a drawing to end, and begin no other."""
        self._works = False
        if self._thread is not None:
            self._thread.join()

    def _draw(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        beside = self._path.with_name(f".{self._path.name}")
        try:
            draw_curve(metrics, {}, beside)
            beside.replace(self._path)
        except Exception as error:  # noqa: BLE001  A picture must not end a run.
            self._works = False
            logger.warning("%s is not drawn while the run goes on: %s: %s", self._path, type(error).__name__, error)
