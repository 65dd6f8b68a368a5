"""The door from synchronous code to the asynchronous parts: runs one piece of work in an event loop of its own."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop of its own; SIGTERM ends it as Ctrl-C does, with KeyboardInterrupt.

    Where the calling thread runs an event loop already (a notebook), it does so in another thread, and waits for it.
    """
    try:
        if _loop_is_running():
            return _run_in_thread(work)
        return uvloop.run(_until_signalled(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.set_result((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1, "agl-event-loop") as executor:
        done = executor.submit(contextvars.copy_context().run, uvloop.run, main())
        try:
            return done.result()
        except KeyboardInterrupt:
            loop, task = running.result()
            loop.call_soon_threadsafe(task.cancel)
            wait([done])
            raise


async def _until_signalled(work: Coroutine[Any, Any, T]) -> T:
    if threading.current_thread() is threading.main_thread():
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work
