"""Sets of servers that answer the same calls: which of them are healthy, and the order in which a call tries them.

The model servers that sample from a policy (`engine.servers`) and the servers of a provider (`gateway.upstream`) are
such sets. What a call is, what shows that a server is healthy, and when a call is sent again, they decide themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

MAX_FAILURES: Final = 3
"""Failures in a row until a server that can be reached is paused."""


class Server:
    """One server of a set. One that cannot be reached, or failed several times in a row, is paused; the pause doubles
    with each further failure, from the first to the longest of `pauses`, in seconds of `clock`."""

    pauses = 1.0, 30.0

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self.requests: set[Any] = set()
        """Those in flight."""
        self.failed = asyncio.Event()
        """Set when a pause begins."""
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        """The length of the current pause; 0 while the server is up."""
        self._until = 0.0

    @property
    def up(self) -> bool:
        """Whether it is not paused, and has succeeded since its last pause."""
        return self._pause == 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until its pause ends."""
        return max(0.0, self._until - self._clock()) if self._until else 0.0

    def record_success(self) -> None:
        self._failures, self._pause, self._until = 0, 0.0, 0.0

    def record_failure(self, unreachable: bool = False) -> None:
        """Count a failure. `unreachable`: one is enough for a pause."""
        first, longest = self.pauses
        self._failures += 1
        if unreachable or self._pause > 0 or self._failures >= MAX_FAILURES:
            self._pause = min(longest, self._pause * 2 or first)
            self._until = self._clock() + self._pause
            self.failed.set()


S = TypeVar("S", bound=Server)


class ServerSet(Generic[S]):
    """`replicas` that answer the same calls. Each that is watched is checked again and again: every `health_seconds`
    while it is up, and when its pause ends. With `watches_all`, for ever; otherwise until it is up."""

    def __init__(self, replicas: Sequence[S], health_seconds: float, watches_all: bool) -> None:
        self.replicas = list(replicas)
        self._health_seconds = health_seconds
        self._watches_all = watches_all
        self._watches: dict[S, asyncio.Task[None]] = {}

    def in_order(self, affinity: str) -> Sequence[S]:
        """The servers in the order in which a call prefers them: by rendezvous hash (Thaler and Ravishankar, 1998), so
        that the loss of a server moves only its own conversations, until it is back; without affinity by load."""
        if len(self.replicas) == 1:
            return self.replicas
        if not affinity:
            return sorted(self.replicas, key=lambda each: len(each.requests))

        def weight(replica: S) -> bytes:
            return hashlib.blake2b(f"{affinity}\n{replica.url}".encode(), digest_size=8).digest()

        return sorted(self.replicas, key=weight, reverse=True)

    def watch(self, replica: S) -> None:
        """Check `replica` from now on. Needs a running event loop."""
        if replica not in self._watches or self._watches[replica].done():
            self._watches[replica] = asyncio.create_task(self._watch(replica), name=f"health of {replica.url}")

    async def check(self, replica: S) -> None:
        """Find out whether `replica` is healthy, and record it. Raises nothing."""
        raise NotImplementedError

    async def end_watches(self) -> None:
        watches, self._watches = self._watches.values(), {}
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, replica: S) -> None:
        while self._watches_all or not replica.up:
            replica.failed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._health_seconds if replica.up else replica.seconds_left):
                    await replica.failed.wait()
                    continue
            await self.check(replica)
