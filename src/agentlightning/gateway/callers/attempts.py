"""The table of attempts that make calls: their LLM resources, mode and trace.

An attempt is read from the store at its first call. From then on `AttemptWatch` keeps the table current, so that a call
reads nothing; an attempt that the watch has not confirmed lately is read again. The watch also ends the calls of
attempts that have ended with 409, and forgets them: an agent that was killed at its time limit may leave a call behind,
since a proxy keeps the connection open, and the provider or the engine would continue in vain. An attempt that ended
well makes no further call that would reveal it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.attempt_address import trace_id_of
from agentlightning.errors import StoreError
from agentlightning.gateway.callers.replay import Replay
from agentlightning.gateway.errors import ApiError
from agentlightning.resources import LLM
from agentlightning.rollouts import BRANCH, Attempt, Rollout, RolloutMode
from agentlightning.span import TURN_LIMIT_REACHED, new_trace_id
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

AttemptIds = tuple[str, str]
"""(rollout_id, attempt_id)."""

RECHECK_SECONDS: Final = 5.0
"""How long an attempt is taken for running after the store said so: more than two checks of the watch."""
_ENDED: Final = frozenset({"succeeded", "failed", "timeout"})
_OPEN: Final = frozenset({"preparing", "running"})


@dataclass(slots=True)
class AttemptContext:
    """What a call needs to know of its attempt."""

    rollout_id: str
    attempt_id: str
    llms: dict[str, tuple[str, LLM]] = field(default_factory=dict[str, tuple[str, LLM]])
    """model -> (name of the resource, the resource)."""
    names_resources: bool = False
    """Whether the rollout names its resources, as those of training runs do; others get the latest."""
    trace_id: str = ""
    mode: RolloutMode | None = None
    """The mode of the rollout."""
    trainable: bool = True
    """Whether its calls may serve as training data; false in the modes val and test."""
    branch: Mapping[str, Any] | None = None
    """The calls of another rollout whose recorded answers it is given."""
    replay: Replay | None = None
    """These answers, once they were read."""
    answered: int = 0
    """Calls of the policy that were answered or are being answered."""
    checked_at: float = 0.0
    """When the store last said that the attempt is running (monotonic seconds)."""

    @property
    def given(self) -> Mapping[str, tuple[str, LLM]]:
        """The `llms` that the rollout itself names."""
        return self.llms if self.names_resources else {}

    def sampling_parameters(self, model: str) -> tuple[str, dict[str, Any]]:
        """(name of the resource, its sampling parameters) of the LLM resource of a model; empty if there is none."""
        name, llm = self.llms.get(model, ("", None))
        return (name, llm.sampling_parameters) if llm else ("", {})

    def begin_turn(self, model: str) -> int | None:
        """Count a call of the policy; returns the limit on them, None where there is none. Raises ApiError 409 if it
        has been reached."""
        _, llm = self.llms.get(model, ("", None))
        limit = None if llm is None else llm.max_calls
        if limit is None:
            return None
        if self.answered >= limit:
            message = (
                f"the rollout {self.rollout_id!r} has been given the {limit} answers that it may have"
                " (runner.max_calls, or curriculum.turns); it ends here"
            )
            raise ApiError(409, message, code=TURN_LIMIT_REACHED, retry=False)
        self.answered += 1
        return limit

    def undo_turn(self) -> None:
        """A counted call was not answered."""
        self.answered -= 1


class AttemptCache:
    """The attempts that made calls lately. One is taken for running for `recheck_seconds` after the store said so."""

    def __init__(self, store: LightningStoreBase, limit: int = 16384, recheck_seconds: float = RECHECK_SECONDS) -> None:
        self._store = store
        self._limit = limit
        self._recheck_seconds = recheck_seconds
        self._contexts: OrderedDict[AttemptIds, AttemptContext] = OrderedDict()
        self._loading: dict[AttemptIds, asyncio.Task[AttemptContext]] = {}

    async def get(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        """The context of an attempt. Concurrent callers share one query.

        Raises ApiError 404 for unknown ids, 409 if the attempt has ended or was superseded.
        """
        key = rollout_id, attempt_id
        context = self._contexts.get(key)
        if context is not None and time.monotonic() - context.checked_at < self._recheck_seconds:
            self._contexts.move_to_end(key)
            return context
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.create_task(self._load(rollout_id, attempt_id))
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        # A client that disconnects must not cancel it for the others.
        return await asyncio.shield(loading)

    async def _load(self, rollout_id: str, attempt_id: str) -> AttemptContext:
        key, now = (rollout_id, attempt_id), time.monotonic()
        rollout = await self._check(rollout_id, attempt_id)
        context = self._contexts.get(key) or AttemptContext(
            rollout_id,
            attempt_id,
            await self._llms(rollout),
            rollout.resources_id is not None,
            trace_id_of(attempt_id) or new_trace_id(),
            mode=rollout.mode,
            trainable=rollout.mode not in ("val", "test"),
            branch=rollout.metadata.get(BRANCH),
        )
        context.checked_at = now
        self._contexts[key] = context
        self._contexts.move_to_end(key)
        while len(self._contexts) > self._limit:
            self._contexts.popitem(last=False)
        return context

    def invalidate(self, rollout_id: str, attempt_id: str) -> None:
        """Query the store again at the next call."""
        if context := self._contexts.get((rollout_id, attempt_id)):
            context.checked_at = float("-inf")

    def attempts(self) -> list[AttemptIds]:
        """The cached attempts."""
        return list(self._contexts)

    async def end_reason(self, rollout_id: str, attempt_id: str) -> ApiError | None:
        """Why an attempt takes no more calls; None while it is running."""
        try:
            await self._check(rollout_id, attempt_id)
        except ApiError as api_error:
            return api_error
        return None

    async def check(self, attempts: Sequence[AttemptIds]) -> dict[AttemptIds, ApiError]:
        """Those of the attempts that take no more calls, and why; the others are confirmed. One query, and further ones
        only where the latest attempt of the rollout is neither open nor ended."""
        now = time.monotonic()
        latest = {each.rollout_id: each for each in await self._store.get_latest_attempts([ids[0] for ids in attempts])}
        reasons: dict[AttemptIds, ApiError] = {}
        for ids in attempts:
            attempt = latest.get(ids[0])
            if attempt is not None and attempt.attempt_id == ids[1] and attempt.status in _ENDED:
                reasons[ids] = _ended(attempt)
            elif attempt is None or attempt.attempt_id != ids[1] or attempt.status not in _OPEN:
                api_error = await self.end_reason(*ids)
                if api_error is not None:
                    reasons[ids] = api_error
            if ids not in reasons and (context := self._contexts.get(ids)) is not None:
                context.checked_at = max(context.checked_at, now)
        return reasons

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        self._contexts.pop((rollout_id, attempt_id), None)

    async def _check(self, rollout_id: str, attempt_id: str) -> Rollout:
        rollout = await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise ApiError(404, f"the store knows no rollout {rollout_id!r}", code="rollout_not_found")
        latest = await self._store.get_latest_attempt(rollout_id)
        if latest is None or latest.attempt_id != attempt_id:
            raise await self._not_latest(rollout_id, attempt_id)
        self._reject_ended(rollout, latest)
        return rollout

    def _reject_ended(self, rollout: Rollout, attempt: Attempt) -> None:
        if rollout.status == "cancelled":
            message = f"the rollout {rollout.rollout_id!r} was cancelled; it takes no more calls"
            raise ApiError(409, message, code="attempt_ended", retry=False)
        if attempt.status in _ENDED:
            raise _ended(attempt)

    async def _not_latest(self, rollout_id: str, attempt_id: str) -> ApiError:
        known = {attempt.attempt_id for attempt in await self._store.query_attempts(rollout_id)}
        if attempt_id not in known:
            return ApiError(404, f"rollout {rollout_id!r} has no attempt {attempt_id!r}", code="attempt_not_found")
        message = f"a later attempt of rollout {rollout_id!r} has taken the place of {attempt_id!r}; stop calling"
        return ApiError(409, message, code="attempt_superseded", retry=False)

    async def _llms(self, rollout: Rollout) -> dict[str, tuple[str, LLM]]:
        if rollout.resources_id is None:
            update = await self._store.get_latest_resources()
        else:
            update = await self._store.get_resources_by_id(rollout.resources_id)
            if update is None:
                message = (
                    f"rollout {rollout.rollout_id!r} uses resources {rollout.resources_id!r}, which are not stored"
                )
                raise ApiError(500, message, code="resources_not_found", retry=False)
        resources = update.resources if update else {}
        return {llm.model: (name, llm) for name, llm in resources.items() if isinstance(llm, LLM)}


def _ended(attempt: Attempt) -> ApiError:
    message = (
        f"the attempt {attempt.attempt_id!r} of rollout {attempt.rollout_id!r} ended as {attempt.status}; it takes no"
        " more calls"
    )
    return ApiError(409, message, code="attempt_ended", retry=False)


# -- the watch ---------------------------------------------------------------------------------------------------------

End = Callable[[ApiError], None]
"""Ends a call with an error for its caller."""

CHECK_SECONDS: Final = 2.0
"""Seconds between two checks."""
_ATTEMPTS_PER_QUERY: Final = 256


class AttemptWatch:
    """Asks the store about all attempts of the table, in few queries. While it does not answer, the log says so, and
    calls ask it themselves. `forget` drops everything known of one."""

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
