"""How many calls are worked on at once.

The gateway takes a slot for every call. One that waits for an update of the weights gives it back meanwhile
(`without_slot`): thousands may wait for one policy, and calls of others still find a slot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class ConcurrencyLimit:
    """So many calls at once; further ones wait, in the order they came."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        """Whether a further call would wait."""
        return self._free == 0 or bool(self._waiters)

    def slot(self) -> Slot:
        """To be held with `async with`."""
        return Slot(self)

    def try_acquire(self) -> bool:
        """Take a slot, to be given back with `give_back`; False where the call would wait."""
        if self.full:
            return False
        self._free -= 1
        return True

    async def acquire(self) -> None:
        if self.try_acquire():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came as it was cancelled
                self.release()
            elif turn in self._waiters:
                self._waiters.remove(turn)
            raise

    def release(self) -> None:
        """To whoever waits longest."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                return turn.set_result(None)
        self._free += 1


class Slot:
    """A place among those there are, while it is held."""

    __slots__ = ("_held", "_limit", "_token")

    def __init__(self, slots: ConcurrencyLimit) -> None:
        self._limit = slots
        self._held = False

    async def __aenter__(self) -> None:
        await self.acquire()
        self._token = _current.set(self)

    async def __aexit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.release()

    async def acquire(self) -> None:
        await self._limit.acquire()
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self._limit.release()


_current: ContextVar[Slot | None] = ContextVar("slot", default=None)


@asynccontextmanager
async def released_slot() -> AsyncGenerator[None]:
    """Within, this call has given its slot back; after it, unless that failed, it has one again."""
    slot = _current.get()
    if slot is None:
        yield
        return
    slot.release()
    yield
    await slot.acquire()
