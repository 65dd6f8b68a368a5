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


class Slots:
    """So many calls at once; further ones wait, in the order they came."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        """Whether a further call would wait."""
        return self._free == 0 or bool(self._waiting)

    def one(self) -> Slot:
        """To be held with `async with`."""
        return Slot(self)

    def take_now(self) -> bool:
        """Take a slot, to be given back with `give_back`; False where the call would wait."""
        if self.full:
            return False
        self._free -= 1
        return True

    async def take(self) -> None:
        if self.take_now():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came as it was cancelled
                self.give_back()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """To whoever waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                return turn.set_result(None)
        self._free += 1


class Slot:
    """A place among those there are, while it is held."""

    __slots__ = ("_held", "_slots", "_token")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._held = False

    async def __aenter__(self) -> None:
        await self.take()
        self._token = _current.set(self)

    async def __aexit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.give_back()

    async def take(self) -> None:
        await self._slots.take()
        self._held = True

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._slots.give_back()


_current: ContextVar[Slot | None] = ContextVar("slot", default=None)


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
