"""Runs a coroutine from synchronous code, also where an event loop is already running; and functions of either kind."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new event loop. SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    If the calling thread already runs an event loop (in a notebook), the new loop runs in another thread.
    """
    try:
        if _loop_is_running():
            return _run_in_thread(work)
        return uvloop.run(_until_signalled(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@asynccontextmanager
async def in_background(*work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run `work` while the body runs."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def result_of(value: Any) -> Any:
    """What a function of the user has returned; of a coroutine, what that returns."""
    return await value if inspect.isawaitable(value) else value


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
