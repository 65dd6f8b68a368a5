"""Servers beside a test that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(enter: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What an asynchronous context gives, entered in a thread with an event loop of its own until the block ends."""
    entered: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def hold() -> None:
        left = asyncio.Event()
        try:
            async with enter() as value:
                entered.set_result((value, asyncio.get_running_loop(), left))
                await left.wait()
        except Exception as error:
            if entered.done():
                raise
            entered.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=[hold()])
    thread.start()
    value, loop, left = entered.result(60)
    try:
        yield value
    finally:
        loop.call_soon_threadsafe(left.set)
        thread.join()
