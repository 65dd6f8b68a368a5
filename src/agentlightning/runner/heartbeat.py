"""Heartbeats of a runner: a thread that renews the worker's lease, however busy the runner's event loop is.

It pauses while that loop has not run for HUNG_AFTER_SECONDS: a runner that hangs must lose its attempts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from agentlightning.errors import AgentLightningError, StoreClosedError
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

HUNG_AFTER_SECONDS = 300.0
"""An event loop that has not run for this long counts as hung."""


class Heartbeat:
    """Sends a heartbeat every `interval` seconds from `start` to `stop`. `stats` is called in its thread."""

    def __init__(
        self,
        store: LightningStoreBase,
        worker_id: str,
        *,
        lease_seconds: float | None,
        interval: float,
        stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._store, self._worker_id, self._lease, self._interval = store, worker_id, lease_seconds, interval
        self._stats = stats
        self._last_alive = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="agl-heartbeat", daemon=True)
        self._ready = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def loop_is_alive(self) -> None:
        """Called by the runner's event loop to show that it runs."""
        self._last_alive = time.monotonic()

    async def stop(self) -> None:
        """Stop sending. Idempotent, and harmless before `start`."""
        if self._loop is None or self._work is None:
            return
        loop, self._loop = self._loop, None
        try:
            loop.call_soon_threadsafe(self._work.cancel)
        except RuntimeError:
            return  # it has ended already
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat())
        except asyncio.CancelledError:
            return

    async def _beat(self) -> None:
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        self._ready.set()
        while True:
            await asyncio.sleep(self._interval)
            if time.monotonic() - self._last_alive > HUNG_AFTER_SECONDS:
                continue
            try:
                await self._store.update_worker(self._worker_id, self._stats(), lease_seconds=self._lease)
            except StoreClosedError:
                return
            except AgentLightningError as error:
                logger.warning("the heartbeat of %s did not reach the store: %s", self._worker_id, error)
