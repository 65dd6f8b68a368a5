"""Trying again: a store that is full, or a server that is away for a while, ends no runner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentlightning.errors import StoreAuthError, StoreError, StoreFullError, StoreServerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY = 0.05
LONGEST_DELAY = 5.0
SAY_AGAIN_SECONDS = 30.0
"""A store that stays unusable is mentioned no more often than this."""


class Patience:
    """Carries operations out, each again for up to `seconds` while the store is full or its server cannot be reached.
    Only operations that may be repeated are given to it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._said = float("-inf")

    async def __call__(self, operation: Callable[[], Awaitable[T]], /) -> T:
        """The operation's result; raises what it last raised once the time is up."""
        deadline = time.monotonic() + self.seconds
        delay = FIRST_DELAY
        while True:
            try:
                return await operation()
            except StoreAuthError:
                raise
            except (StoreFullError, StoreServerError) as error:
                if time.monotonic() + delay > deadline:
                    raise
                self._say(error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def _say(self, error: StoreError) -> None:
        now = time.monotonic()
        if now - self._said > SAY_AGAIN_SECONDS:
            self._said = now
            logger.warning("the store cannot be used, trying again for up to %g s: %s", self.seconds, error)
