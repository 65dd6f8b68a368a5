"""A provider's limits: calls under way at once, requests and tokens a minute. Calls wait their turn, first come first
served, and none waits longer than it is worth.

A minute's worth may be used at once; it is refilled evenly. Called by `upstream.call` around each call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from agentlightning.gateway.errors import ApiError


class TokenBucket:
    """So many a minute."""

    __slots__ = ("_available", "_capacity", "_clock", "_per_second", "_refilled_at")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity = float(per_minute)
        self._per_second = per_minute / 60
        self._available = self._capacity
        self._clock = clock
        self._refilled_at = clock()

    def seconds_until(self, amount: float) -> float:
        """How long until a call that needs so much may go; more than a minute's worth goes when the minute is full."""
        return self.seconds_for(min(amount, self._capacity))

    def seconds_for(self, amount: float) -> float:
        """How long until so much has come, all of it."""
        now = self._clock()
        self._available = min(self._capacity, self._available + (now - self._refilled_at) * self._per_second)
        self._refilled_at = now
        return max(0.0, amount - self._available) / self._per_second

    def take(self, amount: float) -> None:
        """May leave a debt."""
        self._available -= amount


class RateLimiter:
    """Of one provider. `enter` before a call, `leave` after it."""

    def __init__(
        self,
        whose: str,
        max_concurrency: int,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        max_wait_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight = 0
        self._provider_name = whose
        self._max_concurrency = max_concurrency
        self._requests = TokenBucket(requests_per_minute, clock) if requests_per_minute else None
        self._tokens = TokenBucket(tokens_per_minute, clock) if tokens_per_minute else None
        self._max_wait_seconds = max_wait_seconds
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, tokens: int) -> None:
        """Wait for a turn; `tokens` is about what the call will use. Raises ApiError 429 where that would take too
        long."""
        if self.allows(tokens):
            return self.record_start(tokens)
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

    def allows(self, tokens: int) -> bool:
        """Whether a call that will use about so much need not wait."""
        return not self._waiters and self.in_flight < self._max_concurrency and self._seconds_until(tokens) == 0

    def record_start(self, tokens: int) -> None:
        """A call that need not wait begins."""
        self.in_flight += 1
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is not None:
            self._tokens.take(tokens)

    def record_retry(self) -> None:
        """A call under way is sent once more, which is a request like any other and does not wait."""
        if self._requests is not None:
            self._requests.take(1)

    def release(self, expected: int, used: int) -> None:
        """The call is over. `used` tokens count instead of those that were expected."""
        self.in_flight -= 1
        if self._tokens is not None:
            self._tokens.take(used - expected)
        if self._waiters:
            self._admit_waiting()

    def _seconds_until(self, tokens: int) -> float:
        seconds = self._requests.seconds_until(1) if self._requests is not None else 0.0
        return max(seconds, self._tokens.seconds_until(tokens)) if self._tokens is not None else seconds

    def _seconds_in_queue(self, tokens: int) -> float:
        """As far as rates tell; how long the calls under way will take is not known."""
        requests = self._requests.seconds_for(len(self._waiters) + 1) if self._requests is not None else 0.0
        if self._tokens is None:
            return requests
        return max(requests, self._tokens.seconds_for(tokens + sum(waiting for _, waiting in self._waiters)))

    def _admit_waiting(self) -> None:
        """Those whose turn it is; an alarm for the first of the others where time alone will let it in."""
        while self._waiters and self.in_flight < self._max_concurrency:
            turn, tokens = self._waiters[0]
            if turn.done():
                self._waiters.popleft()
            elif (seconds := self._seconds_until(tokens)) > 0:
                return self._schedule_admission(seconds)
            else:
                self._waiters.popleft()
                self.record_start(tokens)
                turn.set_result(None)

    def _schedule_admission(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._admit_waiting)

    def _abandon(self, turn: asyncio.Future[None], tokens: int) -> None:
        if turn.done() and not turn.cancelled():  # Its turn came as it gave up.
            return self.release(tokens, 0)
        if (turn, tokens) in self._waiters:
            self._waiters.remove((turn, tokens))
        self._admit_waiting()

    def _limit_error(self, seconds: float) -> ApiError:
        message = (
            f"the provider {self._provider_name!r} is at its configured limits: {self.in_flight} calls under way, "
            f"{len(self._waiters)} waiting; try again in {math.ceil(seconds)} s"
        )
        return ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1, math.ceil(seconds)))
