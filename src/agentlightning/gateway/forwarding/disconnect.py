"""Cancels the task of a forwarded call when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from starlette.types import Receive, Scope

from agentlightning.gateway.asgi import ClientDisconnected, wait_for_disconnect

ON_DISCONNECT: Final = "agentlightning.hang_up"
"""Key of an ASGI scope: a function that registers the callback for a disconnect; None removes it."""


@contextmanager
def cancel_on_disconnect(scope: Scope, receive: Receive) -> Generator[None]:
    """Within it, a disconnect of the client cancels the current task; raises ClientDisconnected after one.

    A server that sets `ON_DISCONNECT` in the scope calls back; other servers need a task that reads `receive`.
    """
    task, disconnected, exited = asyncio.current_task(), False, False
    assert task is not None

    def on_disconnect() -> None:
        nonlocal disconnected
        if not exited:
            disconnected = True
            task.cancel()

    stop_watching = _watch(scope, receive, on_disconnect)
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        task.uncancel()
        raise ClientDisconnected from None
    finally:
        exited = True
        stop_watching()


def _watch(scope: Scope, receive: Receive, on_disconnect: Callable[[], None]) -> Callable[[], Any]:
    """Call `on_disconnect` when the client disconnects. Returns what stops watching."""
    register: Callable[[Callable[[], None] | None], None] | None = scope.get(ON_DISCONNECT)
    if register is not None:
        register(on_disconnect)
        return lambda: register(None)
    watcher = asyncio.create_task(wait_for_disconnect(receive))
    watcher.add_done_callback(lambda done: None if done.cancelled() else on_disconnect())
    return watcher.cancel
