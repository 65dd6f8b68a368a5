"""Attempts that end while calls of theirs are under way, or while something is remembered of them.

An agent that was killed at its time limit may leave its call behind: a proxy keeps the connection, and the provider or
the engine goes on for nobody. And an attempt that ended well makes no further call by which that would be noticed. So
the store is asked, by a timer: often about attempts with calls under way, now and then about all that are remembered.
Those that have ended are forgotten, and their calls end with 409. Made by the gateway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.gateway.callers.attempts import AttemptCache
from agentlightning.gateway.callers.attribution import AttemptIds
from agentlightning.gateway.errors import ApiError

logger = logging.getLogger(__name__)

End = Callable[[ApiError], None]
"""Ends a call, whose caller is told why."""

CHECK_SECONDS: Final = 2.0
"""Between two looks; a call that is younger is not asked about."""
CACHED_RECHECK_SECONDS: Final = 30.0
"""Until an attempt that is only remembered is asked about again."""
_CACHED_PER_CHECK: Final = 64
"""Attempts that are only remembered, for each look."""


class AttemptWatch:
    """Looks after the attempts that `contexts` knows. `forget` drops what is remembered of one."""

    def __init__(
        self, contexts: AttemptCache, forget: Callable[[str, str], None], seconds: float = CHECK_SECONDS
    ) -> None:
        self.seconds = seconds
        self.fast_calls: Callable[[], Iterable[tuple[AttemptIds, float, End]]] = tuple
        """Calls without a task: (attempt, seconds since the epoch when it began, what ends it)."""
        self._attempts = contexts
        self._forget = forget
        self._calls: dict[AttemptIds, dict[End, float]] = {}
        """Calls under way, with when each began."""
        self._queue: deque[AttemptIds] = deque()
        """Still to be asked about in this round."""
        self._round_began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._check_task: asyncio.Task[None] | None = None

    @contextmanager
    def track(self, attempt: AttemptIds | None) -> Generator[None]:
        """Inside, the task is ended with a ApiError once its attempt has."""
        if attempt is None:
            yield
            return
        task, ended = asyncio.current_task(), list[ApiError]()
        assert task is not None

        def end(api_error: ApiError) -> None:
            if not ended:  # A second time would end what it does to leave: the recording of the call.
                ended.append(api_error)
                task.cancel(api_error)

        calls = self._calls.setdefault(attempt, {})
        calls[end] = time.time()
        self.start()
        try:
            yield
        except asyncio.CancelledError:
            if not ended:
                raise
            task.uncancel()
            raise ended[0] from None
        finally:
            del calls[end]
            if not calls and self._calls.get(attempt) is calls:
                del self._calls[attempt]

    def start(self) -> None:
        """Look from now on, as long as there is anything to look after."""
        if self._timer is None and self._check_task is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._start_check)

    async def close(self) -> None:
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._check_task is not None:
            self._check_task.cancel()
            await asyncio.wait({self._check_task})

    # -- looking ---------------------------------------------------------------------------------------------------

    def _start_check(self) -> None:
        self._timer = None
        self._check_task = asyncio.get_running_loop().create_task(self._check_attempts())
        self._check_task.add_done_callback(self._check_done)

    def _check_done(self, look: asyncio.Task[None]) -> None:
        self._check_task = None
        if look.cancelled():
            return
        if (error := look.exception()) is not None:
            logger.error("attempts could not be looked after", exc_info=error)
        if self._calls or self._queue or self._attempts.attempts():
            self.start()

    async def _check_attempts(self) -> None:
        """About attempts with calls that are not young, and some of those that are only remembered."""
        before = time.time() - self.seconds
        waiting = {attempt for attempt, calls in self._calls.items() if any(began < before for began in calls.values())}
        waiting |= {attempt for attempt, began, _ in self.fast_calls() if began < before}
        for attempt in [*waiting, *self._next_cached()]:
            try:
                api_error = await self._attempts.end_reason(*attempt)
            except StoreError as error:
                return logger.info("the store was asked in vain whether attempts go on: %s", error)
            if api_error is not None:
                self._end(attempt, api_error)

    def _next_cached(self) -> list[AttemptIds]:
        now = time.monotonic()
        if not self._queue and now - self._round_began >= min(CACHED_RECHECK_SECONDS, 15 * self.seconds):
            self._round_began = now
            self._queue.extend(self._attempts.attempts())
        return [self._queue.popleft() for _ in range(min(_CACHED_PER_CHECK, len(self._queue)))]

    def _end(self, attempt: AttemptIds, api_error: ApiError) -> None:
        self._forget(*attempt)
        for end in [*self._calls.get(attempt, ()), *(end for whose, _, end in self.fast_calls() if whose == attempt)]:
            end(api_error)
