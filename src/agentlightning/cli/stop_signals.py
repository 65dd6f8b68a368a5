"""SIGINT and SIGTERM, for programs that end in good order: the first asks, a later one insists."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn


class Signals:
    """Counts the signals to stop: the first sets `asked`, the second insists, the third ends the process."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._count = 0
        self._insist: Callable[[], object] = end_now

    def install(self) -> None:
        """In the running loop, which has to be the main thread's."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._hear)

    def on_second(self, insist: Callable[[], object]) -> None:
        """What the second signal does; without it, that ends the process."""
        self._insist = insist

    async def while_running(self, work: Awaitable[Any]) -> bool:
        """Wait until `work` has ended or we are asked to stop, which then is True and ends `work`. Raises what it
        raises."""
        working, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.asked.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            return self.asked.is_set()
        finally:
            for task in (working, asked):
                task.cancel()
            await asyncio.gather(working, asked, return_exceptions=True)

    def _hear(self) -> None:
        self._count += 1
        self.asked.set()
        if self._count == 2:
            self._insist()
        elif self._count > 2:
            end_now()


def end_now() -> NoReturn:
    """End the process as it stands. What the store has acknowledged is safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)
