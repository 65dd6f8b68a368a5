"""The gate that sampling passes: closed around a weight update, so that nothing is drawn while weights change."""

from __future__ import annotations

import asyncio
from typing import Self


class Gate:
    """Use as `async with gate`. While it is closed callers wait, and are let in when it opens; none is turned away."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.inside = 0
        """Callers that have passed and not yet left."""
        self.waiting = 0

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def drain(self, timeout: float | None = None) -> None:
        """Close, and wait until nobody is inside. Raises TimeoutError, with the gate still closed."""
        self.close()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            raise TimeoutError(
                f"{self.inside} calls were still under way after {timeout:g} s; drain again, or resume()"
            ) from None

    async def __aenter__(self) -> Self:
        self.waiting += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self.waiting -= 1
        self.inside += 1
        self._empty.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1
        if self.inside == 0:
            self._empty.set()
