"""Handles SIGINT and SIGTERM: the first signal requests a graceful stop, the second a quick one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Self


class StopSignals:
    """The first signal sets `requested`, the second calls the `on_second` handler, the third exits the process."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._count = 0
        self._second: Callable[[], object] = exit_now

    def __enter__(self) -> Self:
        """Install the handlers in the running event loop, which must be that of the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the default handlers: those of a closed loop would ignore Ctrl-C."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def on_second(self, handler: Callable[[], object]) -> None:
        """Set what the second signal does; by default it exits the process."""
        self._second = handler

    async def while_running(self, work: Awaitable[Any]) -> bool:
        """Wait until `work` is done or a stop is requested, which cancels `work`. Returns whether a stop was requested.
        Raises what `work` raises."""
        working, requested = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait({working, requested}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            return self.requested.is_set()
        finally:
            for task in (working, requested):
                task.cancel()
            await asyncio.gather(working, requested, return_exceptions=True)

    def _handle(self) -> None:
        self._count += 1
        self.requested.set()
        if self._count == 2:
            self._second()
        elif self._count > 2:
            exit_now()


def exit_now() -> NoReturn:
    """Exit the process at once. What the store has acknowledged is safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)
