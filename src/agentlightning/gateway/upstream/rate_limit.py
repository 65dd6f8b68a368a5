"""Limits the concurrent calls, requests per minute and tokens per minute of one provider.

Calls beyond the limits wait in order of arrival, up to a maximum. Rates are token buckets with the capacity of one
minute, refilled evenly.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

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
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, tokens: int) -> None:
        """Wait until a call with an estimate of `tokens` may start. Raises ApiError 429 if that would take too long."""
        if not self._waiters and self.in_flight < self._max_concurrency and self._seconds_until(tokens) == 0:
            return self._record_start(tokens)
        seconds = self._seconds_in_queue(tokens)
        if seconds > self._max_wait_seconds or self._max_wait_seconds == 0:
            raise self._limit_error(seconds)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((turn, tokens))
        self._admit_waiting()
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                await turn
        except BaseException as error:
            self._abandon(turn, tokens)
            if isinstance(error, TimeoutError):
                raise self._limit_error(1.0) from None
            raise

    def record_retry(self) -> None:
        """Count a retry, which is a further request and does not wait."""
        self._requests.take(1)

    def release(self, estimated: int, used: int) -> None:
        """Count the end of a call, and replace its estimate by the `used` tokens."""
        self.in_flight -= 1
        self._tokens.take(used - estimated)
        if self._waiters:
            self._admit_waiting()

    def _record_start(self, tokens: int) -> None:
        self.in_flight += 1
        self._requests.take(1)
        self._tokens.take(tokens)

    def _seconds_until(self, tokens: int) -> float:
        return max(self._requests.seconds_until(1), self._tokens.seconds_until(tokens))

    def _seconds_in_queue(self, tokens: int) -> float:
        """Seconds until the rates allow a new call. The duration of the calls in flight is unknown."""
        waiting = sum(each for _, each in self._waiters)
        return max(self._requests.seconds_for(len(self._waiters) + 1), self._tokens.seconds_for(tokens + waiting))

    def _admit_waiting(self) -> None:
        """Start the waiting calls that the limits allow, and set a timer for the next."""
        while self._waiters and self.in_flight < self._max_concurrency:
            turn, tokens = self._waiters[0]
            if turn.done():
                self._waiters.popleft()
            elif (seconds := self._seconds_until(tokens)) > 0:
                return self._schedule_admission(seconds)
            else:
                self._waiters.popleft()
                self._record_start(tokens)
                turn.set_result(None)

    def _schedule_admission(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._admit_waiting)

    def _abandon(self, turn: asyncio.Future[None], tokens: int) -> None:
        if turn.done() and not turn.cancelled():  # It was admitted while it gave up.
            return self.release(tokens, 0)
        if (turn, tokens) in self._waiters:
            self._waiters.remove((turn, tokens))
        self._admit_waiting()

    def _limit_error(self, seconds: float) -> ApiError:
        message = (
            f"the provider {self._provider_name!r} is at its configured limits: {self.in_flight} calls in flight, "
            f"{len(self._waiters)} waiting; try again in {math.ceil(seconds)} s"
        )
        return ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1, math.ceil(seconds)))
