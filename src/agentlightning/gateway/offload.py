"""Runs work on large requests in threads, so that it does not block the event loop.

The loop serves all agents and the heartbeats of runners. Work on small requests runs in the loop, because a thread
would cost more than it saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

MAX_INLINE_BYTES: Final = 8 * 1024
"""Largest request handled in the loop: reading, rendering and encoding it takes some milliseconds."""
PASSED: Final = 8
"""How many times faster a request is passed on, or shown in a span, than it is read: its size is divided by this."""
_WORKERS: Final = 4

_pool: Final = ThreadPoolExecutor(_WORKERS, thread_name_prefix="gateway-request")


async def offload(size: int, work: Callable[[], T]) -> T:
    """Return `work()`; in a thread if the request has more than `MAX_INLINE_BYTES`."""
    if size <= MAX_INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)
