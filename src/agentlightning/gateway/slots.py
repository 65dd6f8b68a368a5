"""How many calls are worked on at once.

The gateway takes a slot for every call. One that waits for an update of the weights gives it back meanwhile
(`without_slot`): thousands may wait for one policy, and calls of others still find a slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar


class Slot:
    """A place among those there are, while it is held."""

    __slots__ = ("_free", "_held", "_token")

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._held = False

    async def __aenter__(self) -> None:
        await self.take()
        self._token = _current.set(self)

    async def __aexit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.give_back()

    async def take(self) -> None:
        await self._free.acquire()
        self._held = True

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._free.release()


_current: ContextVar[Slot | None] = ContextVar("slot", default=None)


class Slots:
    """So many calls at once; further ones wait, in the order they came."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    @property
    def full(self) -> bool:
        """Whether a further call would wait."""
        return self._free.locked()

    def one(self) -> Slot:
        """To be held with `async with`."""
        return Slot(self._free)


@asynccontextmanager
async def without_slot() -> AsyncGenerator[None]:
    """Within, this call has given its slot back; after it, unless that failed, it has one again."""
    slot = _current.get()
    if slot is None:
        yield
        return
    slot.give_back()
    yield
    await slot.take()
