"""A provider's limits: calls under way at once, requests and tokens a minute. Calls wait their turn, first come first
served, and none waits longer than it is worth.

A minute's worth may be used at once; it is refilled evenly. Called by `gateway.sending` around each call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from agentlightning.gateway.errors import ApiError


class Rate:
    """So many a minute."""

    __slots__ = ("_clock", "_left", "_per_second", "_seen", "_size")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._size = float(per_minute)
        self._per_second = per_minute / 60
        self._left = self._size
        self._clock = clock
        self._seen = clock()

    def seconds_until(self, amount: float) -> float:
        """How long until a call that needs so much may go; more than a minute's worth goes when the minute is full."""
        return self.seconds_for(min(amount, self._size))

    def seconds_for(self, amount: float) -> float:
        """How long until so much has come, all of it."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._seen) * self._per_second)
        self._seen = now
        return max(0.0, amount - self._left) / self._per_second

    def take(self, amount: float) -> None:
        """May leave a debt."""
        self._left -= amount


class Limits:
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
        self.under_way = 0
        self._whose = whose
        self._most = max_concurrency
        self._requests = Rate(requests_per_minute, clock) if requests_per_minute else None
        self._tokens = Rate(tokens_per_minute, clock) if tokens_per_minute else None
        self._longest = max_wait_seconds
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, tokens: int) -> None:
        """Wait for a turn; `tokens` is about what the call will use. Raises ApiError 429 where that would take too
        long."""
        if self.open_to(tokens):
            return self.take(tokens)
        seconds = self._seconds_in_queue(tokens)
        if seconds > self._longest or self._longest == 0:
            raise self._refusal(seconds)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, tokens))
        self._let_in()
        try:
            async with asyncio.timeout(self._longest):
                await turn
        except BaseException as error:
            self._give_up(turn, tokens)
            if isinstance(error, TimeoutError):
                raise self._refusal(1.0) from None
            raise

    def open_to(self, tokens: int) -> bool:
        """Whether a call that will use about so much need not wait."""
        return not self._waiting and self.under_way < self._most and self._seconds_until(tokens) == 0

    def take(self, tokens: int) -> None:
        """A call that need not wait begins."""
        self.under_way += 1
        if self._requests is not None:
            self._requests.take(1)
        if self._tokens is not None:
            self._tokens.take(tokens)

    def repeated(self) -> None:
        """A call under way is sent once more, which is a request like any other and does not wait."""
        if self._requests is not None:
            self._requests.take(1)

    def leave(self, expected: int, used: int) -> None:
        """The call is over. `used` tokens count instead of those that were expected."""
        self.under_way -= 1
        if self._tokens is not None:
            self._tokens.take(used - expected)
        if self._waiting:
            self._let_in()

    def _seconds_until(self, tokens: int) -> float:
        seconds = self._requests.seconds_until(1) if self._requests is not None else 0.0
        return max(seconds, self._tokens.seconds_until(tokens)) if self._tokens is not None else seconds

    def _seconds_in_queue(self, tokens: int) -> float:
        """As far as rates tell; how long the calls under way will take is not known."""
        requests = self._requests.seconds_for(len(self._waiting) + 1) if self._requests is not None else 0.0
        if self._tokens is None:
            return requests
        return max(requests, self._tokens.seconds_for(tokens + sum(waiting for _, waiting in self._waiting)))

    def _let_in(self) -> None:
        """Those whose turn it is; an alarm for the first of the others where time alone will let it in."""
        while self._waiting and self.under_way < self._most:
            turn, tokens = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif (seconds := self._seconds_until(tokens)) > 0:
                return self._wake_in(seconds)
            else:
                self._waiting.popleft()
                self.take(tokens)
                turn.set_result(None)

    def _wake_in(self, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._let_in)

    def _give_up(self, turn: asyncio.Future[None], tokens: int) -> None:
        if turn.done() and not turn.cancelled():  # Its turn came as it gave up.
            return self.leave(tokens, 0)
        if (turn, tokens) in self._waiting:
            self._waiting.remove((turn, tokens))
        self._let_in()

    def _refusal(self, seconds: float) -> ApiError:
        message = (
            f"the provider {self._whose!r} is at its configured limits: {self.under_way} calls under way, "
            f"{len(self._waiting)} waiting; try again in {math.ceil(seconds)} s"
        )
        return ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1, math.ceil(seconds)))
