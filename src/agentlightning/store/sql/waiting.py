"""Commands: work that event loops submit to the threads of a store; and who waits for which rollouts to finish."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from agentlightning.store.idempotency import IdempotentCall

WAIT: Final[Any] = object()
"""What a claim returns when it has to wait."""


def given(name: str | None) -> tuple[str, ...]:
    """The id, if there is one."""
    return () if name is None else (name,)


class Command:
    """One operation and the future of its result: a function of a transaction, or of a connection if it only `reads`.
    It may run several times before its transaction commits."""

    done = False
    durable = True
    """Whether its result survives a power failure, not only the end of the process."""
    submitted_at = 0.0
    idempotent: IdempotentCall | None = None
    """Set for a command that has an idempotency key."""
    convert: Callable[[Any], Any] | None = None
    """Turns the result into what its caller returns, which is what an idempotency key stores."""

    def __init__(
        self,
        name: str,
        run: Callable[[Any], Any],
        rollouts: Iterable[str] = (),
        workers: Iterable[str] = (),
        attempts: Iterable[str] = (),
        new_rollouts: int = 0,
        reads: bool = False,
    ) -> None:
        self.name = name
        self.run = run
        self.rollouts, self.workers, self.attempts = rollouts, workers, attempts
        """Ids of rows that are loaded with those of its batch. Others are loaded when it needs them."""
        self.new_rollouts = new_rollouts
        self.reads = reads
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


class Wait:
    """One caller that waits for rollouts to finish. Used in its event loop."""

    def __init__(self, rollout_ids: Sequence[str], minimum: int) -> None:
        self.ids = rollout_ids
        self.loop = asyncio.get_running_loop()
        self._may_remain = len(rollout_ids) - minimum
        self._unfinished: set[str] = set()
        self._enough = asyncio.Event()

    def begin(self) -> None:
        """Before the database is read: from now on, what finishes is noted."""
        self._unfinished = set(self.ids)
        self._enough.clear()

    def note(self, finished: Iterable[str]) -> None:
        self._unfinished.difference_update(finished)
        if len(self._unfinished) <= self._may_remain:
            self._enough.set()

    async def enough(self, seconds: float | None) -> None:
        """Wait until enough have finished, or any may have, `seconds` at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._enough.wait(), seconds)


class Waits:
    """Who waits for which rollouts. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rollout: dict[str, set[Wait]] = {}

    @contextmanager
    def add(self, wait: Wait) -> Generator[None]:
        with self._lock:
            for rollout_id in wait.ids:
                self._by_rollout.setdefault(rollout_id, set()).add(wait)
        try:
            yield
        finally:
            with self._lock:
                for rollout_id in wait.ids:
                    self._by_rollout[rollout_id].remove(wait)
                    if not self._by_rollout[rollout_id]:
                        del self._by_rollout[rollout_id]

    def notify(self, finished: Iterable[str] | None) -> None:
        """These rollouts have finished; None: any may have."""
        found: dict[Wait, list[str]] = {}
        with self._lock:
            for rollout_id in self._by_rollout if finished is None else finished:
                for wait in self._by_rollout.get(rollout_id, ()):
                    found.setdefault(wait, []).append(rollout_id)
        for wait, ids in found.items():
            with suppress(RuntimeError):  # its loop is closed
                wait.loop.call_soon_threadsafe(wait.note, ids)
