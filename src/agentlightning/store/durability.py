"""How durable the calls of a task are: by default, what has returned survives a power failure.

Producers that record more often than a disk can sync, such as the gateway, write with `relaxed`: what has returned then
survives the end of the process, `kill -9` included, though not yet a power failure. A store commits such calls together
with others that are durable, and of its own accord without waiting for the disk. Stores without a disk ignore it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_relaxed: ContextVar[bool] = ContextVar("agentlightning_relaxed_durability", default=False)
is_relaxed = _relaxed.get
"""Whether the calls of this task need not survive a power failure."""


@contextmanager
def relaxed() -> Generator[None]:
    """Store calls made within it survive the end of the process, and not that of the machine."""
    token = _relaxed.set(True)
    try:
        yield
    finally:
        _relaxed.reset(token)
