"""Limits the number of calls in progress.

Every call takes a slot. A call that waits for a weight update releases its slot meanwhile (`released_slot`), so that
thousands of calls may wait for one policy while others are served.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class ConcurrencyLimit:
    """Allows `limit` calls at once; further calls wait in order."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiters: deque[asyncio.Future[None]] = deque()

    def slot(self) -> Slot:
        """A slot to take with `async with`."""
        return Slot(self)

    async def acquire(self) -> None:
        if self._free and not self._waiters:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it got the slot while it was cancelled
                self.release()
            elif turn in self._waiters:
                self._waiters.remove(turn)
            raise

    def release(self) -> None:
        """Pass the slot to the call that has waited longest."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                return turn.set_result(None)
        self._free += 1


class Slot:
    """One slot of a `ConcurrencyLimit`."""

    __slots__ = ("_is_taken", "_limit", "_token")

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._is_taken = False

    async def __aenter__(self) -> None:
        await self.acquire()
        self._token = _current.set(self)

    async def __aexit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.release()

    async def acquire(self) -> None:
        await self._limit.acquire()
        self._is_taken = True

    def release(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._limit.release()


_current: ContextVar[Slot | None] = ContextVar("slot", default=None)


@asynccontextmanager
async def released_slot() -> AsyncGenerator[None]:
    """Release the slot of the current call inside the context, and take one again after it unless it raised."""
    slot = _current.get()
    if slot is None:
        yield
        return
    slot.release()
    yield
    await slot.acquire()
