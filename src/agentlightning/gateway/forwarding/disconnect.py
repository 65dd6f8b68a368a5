"""Cancels the task of a forwarded call when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from starlette.types import Receive

from agentlightning.gateway.asgi import ClientDisconnected, wait_for_disconnect


@contextmanager
def cancel_on_disconnect(receive: Receive) -> Generator[None]:
    """Within it, a disconnect of the client cancels the current task; raises ClientDisconnected after one."""
    task, disconnected, exited = asyncio.current_task(), False, False
    assert task is not None

    def on_disconnect(watcher: asyncio.Task[None]) -> None:
        nonlocal disconnected
        if not watcher.cancelled() and not exited:
            disconnected = True
            task.cancel()

    watcher = asyncio.create_task(wait_for_disconnect(receive))
    watcher.add_done_callback(on_disconnect)
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        task.uncancel()
        raise ClientDisconnected from None
    finally:
        exited = True
        watcher.cancel()
