"""Whatever is asked of a store, in whatever order: status changes only along the tables, and nothing is lost."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentlightning.errors import ConflictError
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, FINISHED, ROLLOUT_TRANSITIONS, Attempt, Rollout, RolloutConfig
from agentlightning.span import SUPERSEDED, Span
from agentlightning.store.clock import Clock
from agentlightning.store.sql.store import SqlStore

pytestmark = pytest.mark.integration

attempt_statuses = st.sampled_from(sorted(ATTEMPT_TRANSITIONS))
rollout_statuses = st.sampled_from(sorted(ROLLOUT_TRANSITIONS))
numbers = st.integers(0, 10_000)
configs = st.builds(
    RolloutConfig,
    timeout_seconds=st.none() | st.just(100.0),
    unresponsive_seconds=st.none() | st.just(60.0),
    max_attempts=st.integers(1, 3),
    retry_condition=st.sets(st.sampled_from(["failed", "timeout", "unresponsive"])).map(tuple),
)


def reachable(table: dict[str, frozenset[str]], old: str) -> set[str]:
    """Every status that some number of legal changes leads to."""
    found, todo = {old}, [old]
    while todo:
        for new in table[todo.pop()] - found:
            found.add(new)
            todo.append(new)
    return found


class PassingClock(Clock):
    """A clock that a test sets forward."""

    passed = 0.0

    def steady(self) -> float:
        return super().steady() + self.passed


class Statuses(RuleBasedStateMachine):
    """Users who do everything at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = PassingClock()
        self.store = SqlStore(":memory:", self.clock)
        self.rollouts: dict[str, Rollout] = {}
        self.attempts: dict[str, Attempt] = {}
        self.spans = 0

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()

    def ask(self, awaitable: Any) -> Any:
        """The answer, or None where the tables forbid it."""
        try:
            return self.runner.run(awaitable)
        except ConflictError:
            return None

    def pick(self, number: int) -> Attempt | None:
        attempts = list(self.attempts.values())
        return attempts[number % len(attempts)] if attempts else None

    def pick_rollout(self, number: int) -> str | None:
        ids = list(self.rollouts)
        return ids[number % len(ids)] if ids else None

    @rule(config=configs)
    def enqueue(self, config: RolloutConfig) -> None:
        self.ask(self.store.enqueue_rollout("task", config=config))

    @rule()
    def dequeue(self) -> None:
        waiting = [rollout for rollout in self.rollouts.values() if rollout.status in ("queuing", "requeuing")]
        claimed = self.ask(self.store.dequeue_rollout("w"))
        assert (claimed.rollout_id if claimed else None) == (waiting[0].rollout_id if waiting else None)

    @rule(number=numbers, status=attempt_statuses)
    def update_attempt(self, number: int, status: Any) -> None:
        if attempt := self.pick(number):
            before = self.rollouts[attempt.rollout_id]
            latest = max(
                (each for each in self.attempts.values() if each.rollout_id == attempt.rollout_id),
                key=lambda each: each.sequence_id,
            )
            told = self.ask(self.store.update_attempt(attempt.rollout_id, attempt.attempt_id, status=status))
            if told is None:
                assert status not in ATTEMPT_TRANSITIONS[attempt.status]
            if latest != attempt:
                assert told is not None
                assert told.metadata["superseded"]
                assert self.runner.run(self.store.get_rollout_by_id(attempt.rollout_id)) == before

    @rule(number=numbers)
    def heartbeat(self, number: int) -> None:
        if attempt := self.pick(number):
            self.ask(self.store.update_attempt(attempt.rollout_id, attempt.attempt_id, last_heartbeat_time=1.0))

    @rule(number=numbers)
    def add_span(self, number: int) -> None:
        if attempt := self.pick(number):
            span = Span(attempt.rollout_id, attempt.attempt_id, "work", 1.0)
            assert self.ask(self.store.add_span(span)) is not None
            self.spans += 1

    @rule(number=numbers, what=st.sampled_from(["start", "requeue", "cancel"]))
    def by_rollout(self, number: int, what: str) -> None:
        if rollout_id := self.pick_rollout(number):
            if what == "start":
                self.ask(self.store.start_attempt(rollout_id))
            elif what == "requeue":
                self.ask(self.store.requeue_rollout(rollout_id, "asked for"))
            else:
                self.ask(self.store.cancel_rollout(rollout_id))

    @rule(number=numbers, status=rollout_statuses)
    def update_rollout(self, number: int, status: Any) -> None:
        if rollout_id := self.pick_rollout(number):
            self.ask(self.store.update_rollout(rollout_id, status=status))

    @rule(seconds=st.sampled_from([30.0, 61.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.passed += seconds
        self.runner.run(self.store.update_worker("nobody"))  # the clock looks within any transaction once it is due
        statuses = {
            attempt.attempt_id: attempt.status
            for rollout_id in self.rollouts
            for attempt in self.runner.run(self.store.query_attempts(rollout_id))
        }
        for attempt in self.attempts.values():
            limits = self.rollouts[attempt.rollout_id].config
            if attempt.status in ("preparing", "running") and seconds > (limits.timeout_seconds or math.inf):
                assert statuses[attempt.attempt_id] == "timeout"
            elif attempt.status in ("preparing", "running") and seconds > (limits.unresponsive_seconds or math.inf):
                assert statuses[attempt.attempt_id] in ("timeout", "unresponsive")

    @invariant()
    def statuses_moved_along_the_tables(self) -> None:
        for rollout in self.runner.run(self.store.query_rollouts()):
            old = self.rollouts.get(rollout.rollout_id)
            if old is not None:
                assert rollout.status in reachable(ROLLOUT_TRANSITIONS, old.status)
            assert (rollout.end_time is not None) == (rollout.status in FINISHED)
            self.rollouts[rollout.rollout_id] = rollout
            self.look_at_attempts(rollout)

    def look_at_attempts(self, rollout: Rollout) -> None:
        attempts = self.runner.run(self.store.query_attempts(rollout.rollout_id))
        assert [attempt.sequence_id for attempt in attempts] == list(range(1, len(attempts) + 1))
        for attempt in attempts:
            old = self.attempts.get(attempt.attempt_id)
            if old is not None:
                assert attempt.status in reachable(ATTEMPT_TRANSITIONS, old.status)
            self.attempts[attempt.attempt_id] = attempt
        open_ones = [attempt for attempt in attempts if attempt.status in ("preparing", "running")]
        if rollout.status in ("preparing", "running"):
            assert [attempt.status for attempt in open_ones] == [rollout.status]
            assert open_ones == attempts[-1:]
        else:
            assert not open_ones
        if rollout.status == "succeeded":
            assert attempts[-1].status == "succeeded"

    @invariant()
    def no_span_is_lost(self) -> None:
        spans = [span for rollout_id in self.rollouts for span in self.runner.run(self.store.query_spans(rollout_id))]
        assert len(spans) == self.spans
        assert all(span.attributes.get(SUPERSEDED, True) is True for span in spans)


Statuses.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestStatuses = Statuses.TestCase
