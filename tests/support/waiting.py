"""Waiting until something is so that sets no event: the state of another task, thread or process."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until a condition, which may be a coroutine function, answers with something true, which is returned. Raises
    TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """`until` in a thread."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.005)
