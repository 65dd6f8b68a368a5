"""Retries of store operations while the store is full, busy or unreachable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentlightning.errors import StoreError, StoreFullError, StoreServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_SECONDS = 0.05
MAX_DELAY_SECONDS = 5.0
WARN_EVERY_SECONDS = 30.0
"""Minimum time between two warnings."""


class StoreRetry:
    """Runs operations, retrying each for up to `seconds` while the store is full, or it or its server is unreachable.
    Operations must be idempotent."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._last_warning = float("-inf")

    async def __call__(self, operation: Callable[[], Awaitable[T]], /) -> T:
        """The operation's result. Raises its last error after `seconds`."""
        deadline = time.monotonic() + self.seconds
        delay = FIRST_DELAY_SECONDS
        while True:
            try:
                return await operation()
            except StoreError as error:
                # Embedded stores raise a StoreError as such where their database is busy or cannot be reached.
                if type(error) not in (StoreError, StoreFullError, StoreServerError):
                    raise
                if time.monotonic() + delay > deadline:
                    raise
                self._warn(error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    def _warn(self, error: StoreError) -> None:
        now = time.monotonic()
        if now - self._last_warning > WARN_EVERY_SECONDS:
            self._last_warning = now
            logger.warning("the store cannot be used, retrying for up to %g s: %s", self.seconds, error)
