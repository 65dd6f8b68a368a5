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
from agentlightning.gateway.callers.attempts import Contexts
from agentlightning.gateway.callers.attribution import Ids
from agentlightning.gateway.errors import Problem

logger = logging.getLogger(__name__)

End = Callable[[Problem], None]
"""Ends a call, whose caller is told why."""

SECONDS: Final = 2.0
"""Between two looks; a call that is younger is not asked about."""
REMEMBERED_SECONDS: Final = 30.0
"""Until an attempt that is only remembered is asked about again."""
_AT_ONCE: Final = 64
"""Attempts that are only remembered, for each look."""


class AttemptWatch:
    """Looks after the attempts that `contexts` knows. `forget` drops what is remembered of one."""

    def __init__(self, contexts: Contexts, forget: Callable[[str, str], None], seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.direct: Callable[[], Iterable[tuple[Ids, float, End]]] = tuple
        """Calls without a task: (attempt, seconds since the epoch when it began, what ends it)."""
        self._contexts = contexts
        self._forget = forget
        self._calls: dict[Ids, dict[End, float]] = {}
        """Calls under way, with when each began."""
        self._remembered: deque[Ids] = deque()
        """Still to be asked about in this round."""
        self._round_began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None

    @contextmanager
    def under_way(self, attempt: Ids | None) -> Generator[None]:
        """Inside, the task is ended with a Problem once its attempt has."""
        if attempt is None:
            yield
            return
        task, ended = asyncio.current_task(), list[Problem]()
        assert task is not None

        def end(problem: Problem) -> None:
            if not ended:  # A second time would end what it does to leave: the recording of the call.
                ended.append(problem)
                task.cancel(problem)

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
        if self._timer is None and self._look is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._begin)

    async def close(self) -> None:
        """Look no more."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait({self._look})

    # -- looking ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._timer = None
        self._look = asyncio.get_running_loop().create_task(self._ask())
        self._look.add_done_callback(self._done)

    def _done(self, look: asyncio.Task[None]) -> None:
        self._look = None
        if look.cancelled():
            return
        if (error := look.exception()) is not None:
            logger.error("attempts could not be looked after", exc_info=error)
        if self._calls or self._remembered or self._contexts.attempts():
            self.start()

    async def _ask(self) -> None:
        """About attempts with calls that are not young, and some of those that are only remembered."""
        before = time.time() - self.seconds
        waiting = {attempt for attempt, calls in self._calls.items() if any(began < before for began in calls.values())}
        waiting |= {attempt for attempt, began, _ in self.direct() if began < before}
        for attempt in [*waiting, *self._next_remembered()]:
            try:
                problem = await self._contexts.ended(*attempt)
            except StoreError as error:
                return logger.info("the store was asked in vain whether attempts go on: %s", error)
            if problem is not None:
                self._end(attempt, problem)

    def _next_remembered(self) -> list[Ids]:
        now = time.monotonic()
        if not self._remembered and now - self._round_began >= min(REMEMBERED_SECONDS, 15 * self.seconds):
            self._round_began = now
            self._remembered.extend(self._contexts.attempts())
        return [self._remembered.popleft() for _ in range(min(_AT_ONCE, len(self._remembered)))]

    def _end(self, attempt: Ids, problem: Problem) -> None:
        self._forget(*attempt)
        for end in [*self._calls.get(attempt, ()), *(end for whose, _, end in self.direct() if whose == attempt)]:
            end(problem)
