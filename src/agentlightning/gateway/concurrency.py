"""Limits the number of calls in progress.

Every call takes a slot. A call that waits for a weight update releases its slot meanwhile (`released_slot`), so that
thousands of calls may wait for one policy while others are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class Slot:
    """One slot of the calls in progress."""

    def __init__(self, limit: asyncio.Semaphore) -> None:
        self._limit = limit
        self._is_taken = False

    async def acquire(self) -> None:
        await self._limit.acquire()
        self._is_taken = True

    def release(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._limit.release()


class ConcurrencyLimit(asyncio.Semaphore):
    """Allows so many calls at once; further calls wait in order."""

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """A context in which the call has a slot."""
        slot = Slot(self)
        await slot.acquire()
        token = _current.set(slot)
        try:
            yield
        finally:
            _current.reset(token)
            slot.release()


_current: ContextVar[Slot | None] = ContextVar("slot", default=None)


@asynccontextmanager
async def released_slot() -> AsyncGenerator[None]:
    """Release the slot of the current call inside the context, and take one again after it unless it raised."""
    slot = _current.get()
    if slot is not None:
        slot.release()
    yield
    if slot is not None:
        await slot.acquire()
