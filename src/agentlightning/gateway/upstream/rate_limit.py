"""Limits the concurrent calls, requests per minute and tokens per minute of one provider.

Calls beyond the limits wait in order of arrival, up to a maximum. Rates are token buckets with the capacity of one
minute, refilled evenly.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress

from agentlightning.gateway.errors import ApiError


class TokenBucket:
    """A rate per minute; None: no limit."""

    __slots__ = ("_available", "_capacity", "_clock", "_per_second", "_refilled_at")

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self._capacity = float(per_minute or 0)
        self._per_second = self._capacity / 60
        self._available = self._capacity
        self._clock = clock
        self._refilled_at = clock()

    def seconds_until(self, amount: float) -> float:
        """Seconds until a call of `amount` may start. One beyond the capacity starts when the bucket is full."""
        return self.seconds_for(min(amount, self._capacity))

    def seconds_for(self, amount: float) -> float:
        """Seconds until `amount` is available in full."""
        if not self._per_second:
            return 0.0
        now = self._clock()
        self._available = min(self._capacity, self._available + (now - self._refilled_at) * self._per_second)
        self._refilled_at = now
        return max(0.0, amount - self._available) / self._per_second

    def take(self, amount: float) -> None:
        """Take an amount; the balance may become negative."""
        self._available -= amount


class RateLimiter:
    """The limits of one provider: `acquire` before a call, `release` after it."""

    def __init__(
        self,
        provider_name: str,
        max_concurrency: int,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        max_wait_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = 0
        self._provider_name = provider_name
        self._max_concurrency = max_concurrency
        self._requests = TokenBucket(requests_per_minute, clock)
        self._tokens = TokenBucket(tokens_per_minute, clock)
        self._max_wait_seconds = max_wait_seconds
        self._waiting: list[int] = []
        """The estimates of the calls that wait."""
        self._turn = asyncio.Lock()
        """Held by the first of these."""
        self._released = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, tokens: int) -> None:
        """Wait until a call with an estimate of `tokens` may start. Raises ApiError 429 if that would take too long."""
        if not self._waiting and self._may_start(tokens):
            return self._record_start(tokens)
        seconds = self._seconds_in_queue(tokens)
        if seconds > self._max_wait_seconds or self._max_wait_seconds == 0:
            raise self._limit_error(seconds)
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                await self._wait(tokens)
        except TimeoutError:
            raise self._limit_error(1.0) from None

    async def _wait(self, tokens: int) -> None:
        self._waiting.append(tokens)
        try:
            async with self._turn:
                while not self._may_start(tokens):
                    self._released.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._seconds_until(tokens) or None):
                            await self._released.wait()
                self._record_start(tokens)
        finally:
            self._waiting.remove(tokens)

    def record_retry(self) -> None:
        """Count a retry, which is a further request and does not wait."""
        self._requests.take(1)

    def release(self, estimated: int, used: int) -> None:
        """Count the end of a call, and replace its estimate by the `used` tokens."""
        self.in_flight -= 1
        self._tokens.take(used - estimated)
        self._released.set()

    def _may_start(self, tokens: int) -> bool:
        return self.in_flight < self._max_concurrency and self._seconds_until(tokens) == 0

    def _record_start(self, tokens: int) -> None:
        self.in_flight += 1
        self._requests.take(1)
        self._tokens.take(tokens)

    def _seconds_until(self, tokens: int) -> float:
        return max(self._requests.seconds_until(1), self._tokens.seconds_until(tokens))

    def _seconds_in_queue(self, tokens: int) -> float:
        """Seconds until the rates allow a new call. The duration of the calls in flight is unknown."""
        tokens += sum(self._waiting)
        return max(self._requests.seconds_for(len(self._waiting) + 1), self._tokens.seconds_for(tokens))

    def _limit_error(self, seconds: float) -> ApiError:
        message = (
            f"the provider {self._provider_name!r} is at its configured limits: {self.in_flight} calls in flight, "
            f"{self.num_waiting} waiting; try again in {math.ceil(seconds)} s"
        )
        return ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1, math.ceil(seconds)))
