"""Notices attempts that have ended, cancels their calls with 409 and drops what the gateway caches of them.

An agent that was killed at its time limit may leave a call behind: a proxy keeps the connection open, and the provider
or the engine continues in vain. An attempt that ended well makes no further call that would reveal it. So a timer
queries the store: often about attempts with calls in flight, now and then about all cached ones. A check takes a share
of the cache, in few queries, so that what is cached stays in proportion to the attempts that run or ended lately.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import ceil
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptIds
from agentlightning.gateway.errors import ApiError

logger = logging.getLogger(__name__)

End = Callable[[ApiError], None]
"""Ends a call with an error for its caller."""

CHECK_SECONDS: Final = 2.0
"""Seconds between two checks; younger calls are not checked."""
CACHED_RECHECK_SECONDS: Final = 10.0
"""Seconds until a cached attempt without calls is checked again."""
_CHECKS_PER_ROUND: Final = 5
"""Checks in which every cached attempt without calls is checked again."""
_ATTEMPTS_PER_QUERY: Final = 256


class AttemptWatch:
    """Checks the attempts in `contexts`. `forget` drops everything cached of one."""

    def __init__(
        self, contexts: AttemptCache, forget: Callable[[str, str], None], seconds: float = CHECK_SECONDS
    ) -> None:
        self.seconds = seconds
        self._attempts = contexts
        self._forget = forget
        self._calls: dict[AttemptIds, dict[End, float]] = {}
        """Calls in flight, with the start of each."""
        self._queue: deque[AttemptIds] = deque()
        """Attempts left to check in this round."""
        self._share = 0
        """How many of them a check takes."""
        self._round_began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._check_task: asyncio.Task[None] | None = None

    @contextmanager
    def track(self, attempt: AttemptIds | None) -> Generator[None]:
        """Within it, the end of the attempt cancels the current task and raises ApiError."""
        if attempt is None:
            yield
            return
        task, errors = asyncio.current_task(), list[ApiError]()
        assert task is not None

        def end(api_error: ApiError) -> None:
            if not errors:  # A second cancellation would interrupt the recording of the call.
                errors.append(api_error)
                task.cancel(api_error)

        calls = self._calls.setdefault(attempt, {})
        calls[end] = time.time()
        self.start()
        try:
            yield
        except asyncio.CancelledError:
            if not errors:
                raise
            task.uncancel()
            raise errors[0] from None
        finally:
            del calls[end]
            if not calls and self._calls.get(attempt) is calls:
                del self._calls[attempt]

    def start(self) -> None:
        """Check regularly from now on, as long as there are calls or cached attempts."""
        if self._timer is None and self._check_task is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._start_check)

    async def close(self) -> None:
        """Stop checking."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._check_task is not None:
            self._check_task.cancel()
            await asyncio.wait({self._check_task})

    # -- checks ----------------------------------------------------------------------------------------------------

    def _start_check(self) -> None:
        self._timer = None
        self._check_task = asyncio.get_running_loop().create_task(self._check_attempts())
        self._check_task.add_done_callback(self._check_done)

    def _check_done(self, check: asyncio.Task[None]) -> None:
        self._check_task = None
        if check.cancelled():
            return
        if (error := check.exception()) is not None:
            logger.error("the check for ended attempts failed", exc_info=error)
        if self._calls or self._queue or self._attempts.attempts():
            self.start()

    async def _check_attempts(self) -> None:
        """Check the attempts of calls that are old enough, and some of the cached ones."""
        before = time.time() - self.seconds
        due = {attempt for attempt, calls in self._calls.items() if any(began < before for began in calls.values())}
        attempts = list(dict.fromkeys([*due, *self._next_cached()]))
        for start in range(0, len(attempts), _ATTEMPTS_PER_QUERY):
            try:
                ended = await self._attempts.end_reasons(attempts[start : start + _ATTEMPTS_PER_QUERY])
            except StoreError as error:
                return logger.info("the store could not say which attempts have ended: %s", error)
            for attempt, api_error in ended.items():
                self._end(attempt, api_error)

    def _next_cached(self) -> list[AttemptIds]:
        now = time.monotonic()
        if not self._queue and now - self._round_began >= min(CACHED_RECHECK_SECONDS, _CHECKS_PER_ROUND * self.seconds):
            self._round_began = now
            self._queue.extend(self._attempts.attempts())
            self._share = ceil(len(self._queue) / _CHECKS_PER_ROUND)
        return [self._queue.popleft() for _ in range(min(self._share, len(self._queue)))]

    def _end(self, attempt: AttemptIds, api_error: ApiError) -> None:
        self._forget(*attempt)
        for end in list(self._calls.get(attempt, ())):
            end(api_error)
