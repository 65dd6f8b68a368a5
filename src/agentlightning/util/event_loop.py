"""Runs a coroutine from synchronous code, also where an event loop is already running; and functions of either kind."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a new event loop. SIGTERM raises KeyboardInterrupt, as Ctrl-C does.

    If the calling thread already runs an event loop (in a notebook), the new loop runs in another thread.
    """
    try:
        asyncio.get_running_loop()
        run = _run_in_thread
    except RuntimeError:
        run = _run_here
    try:
        return run(work)
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


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    from anyio.from_thread import start_blocking_portal

    async def main() -> T:
        return await work

    with start_blocking_portal(backend_options={"use_uvloop": True}) as portal:  # An interrupt cancels `work`.
        return portal.call(main)


def _run_here(work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        if threading.current_thread() is threading.main_thread() and (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return uvloop.run(main())
