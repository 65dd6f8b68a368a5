"""Keeps the table of attempts current: asks the store which have ended, ends their calls with 409 and forgets them.

An agent that was killed at its time limit may leave a call behind: a proxy keeps the connection open, and the provider
or the engine continues in vain. An attempt that ended well makes no further call that would reveal it. So a timer asks
the store about all attempts in the table, in few queries; calls need not ask it then. While the store does not answer,
the log says so, and calls ask it themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.gateway.callers.attempts import AttemptCache, AttemptIds
from agentlightning.gateway.errors import ApiError

logger = logging.getLogger(__name__)

End = Callable[[ApiError], None]
"""Ends a call with an error for its caller."""

CHECK_SECONDS: Final = 2.0
"""Seconds between two checks."""
_ATTEMPTS_PER_QUERY: Final = 256


class AttemptWatch:
    """Checks the attempts of the table. `forget` drops everything known of one."""

    def __init__(
        self, attempts: AttemptCache, forget: Callable[[str, str], None], seconds: float = CHECK_SECONDS
    ) -> None:
        self.seconds = seconds
        self._attempts = attempts
        self._forget = forget
        self._calls: dict[AttemptIds, set[End]] = {}
        """What ends the calls in flight."""
        self._is_blind = False
        """Whether the store did not answer the last check."""
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

        calls = self._calls.setdefault(attempt, set())
        calls.add(end)
        self.start()
        try:
            yield
        except asyncio.CancelledError:
            if not errors:
                raise
            task.uncancel()
            raise errors[0] from None
        finally:
            calls.discard(end)
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
        if self._calls or self._attempts.attempts():
            self.start()

    async def _check_attempts(self) -> None:
        attempts = list(dict.fromkeys([*self._calls, *self._attempts.attempts()]))
        for start in range(0, len(attempts), _ATTEMPTS_PER_QUERY):
            try:
                ended = await self._attempts.check(attempts[start : start + _ATTEMPTS_PER_QUERY])
            except StoreError as error:
                if not self._is_blind:
                    logger.warning(
                        "the store does not say which attempts have ended, so calls ask it themselves: %s", error
                    )
                self._is_blind = True
                return
            for attempt, api_error in ended.items():
                self._end(attempt, api_error)
        if self._is_blind:
            self._is_blind = False
            logger.warning("the store says again which attempts have ended")

    def _end(self, attempt: AttemptIds, api_error: ApiError) -> None:
        self._forget(*attempt)
        for end in list(self._calls.get(attempt, ())):
            end(api_error)
