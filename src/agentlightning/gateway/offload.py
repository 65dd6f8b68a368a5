"""Work that grows with a request, off the event loop where the request is large.

One loop serves every agent: whatever takes a second in it takes a second from all of them, heartbeats of runners among
it. Small requests are worked on at once, since handing them over costs more than it saves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

MAX_INLINE_BYTES: Final = 8 * 1024
"""Bytes of a request that is worked on in the loop: reading, rendering and encoding it takes some milliseconds."""
_WORKERS: Final = 4

_pool: Final = ThreadPoolExecutor(_WORKERS, thread_name_prefix="gateway-request")


async def offload(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread for a request of more than `SMALL` bytes. Raises what it raises."""
    if size <= MAX_INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_pool, work)
