"""The calls that a store answers most: enqueue, claim, add spans, update an attempt. Each decides in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.errors import ConflictError
from agentlightning.rollouts import Attempt, AttemptedRollout, Rollout
from agentlightning.store.base import UNSET, Unset
from agentlightning.store.ids import claimed_id
from agentlightning.store.sql.commands.base import Call
from agentlightning.store.sql.execution.unit_of_work import Unit, Wants
from agentlightning.store.sql.execution.waiters import PARK, Parked
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.spans import write
from agentlightning.store.sql.spans.write import Kept, SpanGroup
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.sql.tables.rows import AttemptState


class Enqueue(Call):
    """Queue rollouts; those whose id is there already are returned as they are."""

    __slots__ = ("_made", "_named", "_resources")

    def __init__(self, name: str, made: Sequence[tuple[Rollout, Row]], named: Iterable[str]) -> None:
        super().__init__(name)
        self._made = made
        self._named = frozenset(named)
        """The ids that were made by the caller."""
        self._resources = {rollout.resources_id for rollout, _ in made}

    def want(self, wants: Wants) -> None:
        wants.rollouts.update(self._named)
        wants.new_rollouts += len(self._made)

    def run(self, unit: Unit) -> list[Rollout]:
        for resources_id in self._resources:
            unit.known_resources(resources_id)
        answers: list[Rollout] = []
        for rollout, row in self._made:
            there = unit.find_rollout(rollout.rollout_id) if rollout.rollout_id in self._named else None
            if there is not None:
                answers.append(there.to_rollout())
                continue
            unit.add_rollout(row)
            answers.append(rollout)
        return answers


class Start(Call):
    """Make a rollout and claim it at once."""

    __slots__ = ("_claim_id", "_made", "_named", "_worker_id")

    def __init__(self, made: tuple[Rollout, Row], named: bool, worker_id: str | None, claim_id: str | None) -> None:
        super().__init__("start_rollout")
        self._made = made
        self._named = named
        self._worker_id = worker_id
        self._claim_id = claim_id

    def want(self, wants: Wants) -> None:
        wants.new_rollouts += 1
        if self._named:
            wants.rollouts.add(self._made[0].rollout_id)
        if self._claim_id is not None:
            wants.attempts.add(claimed_id(self._claim_id, 0))
        if self._worker_id is not None:
            wants.workers.add(self._worker_id)

    def run(self, unit: Unit) -> AttemptedRollout:
        rollout, row = self._made
        unit.known_resources(rollout.resources_id)
        before = repeated(unit, self._claim_id, 1)
        if before:
            return before[0].rollout.to_attempted(before[0])
        if self._named and unit.find_rollout(rollout.rollout_id) is not None:
            raise ConflictError(f"rollout {rollout.rollout_id!r} exists already; use start_attempt")
        if self._worker_id is not None:
            unit.worker(self._worker_id)
        state = unit.add_rollout(row)
        attempt_id = None if self._claim_id is None else claimed_id(self._claim_id, 0)
        return transitions.claim(unit, state, self._worker_id, attempt_id)


class Claim(Call):
    """Claim waiting rollouts; parks while there is none, and behind those that wait already."""

    __slots__ = ("_answered", "_claim_id", "_limit", "_queues", "_since", "_worker_id")

    def __init__(
        self, name: str, limit: int, worker_id: str | None, queues: Sequence[str] | None, claim_id: str | None
    ) -> None:
        super().__init__(name)
        self._limit = limit
        self._worker_id = worker_id
        self._queues = None if queues is None else tuple(dict.fromkeys(queues))
        self._claim_id = claim_id
        self._answered: list[int] = []
        """For each attempt that this call was given: how often its claim had been answered by then."""
        self._since: int | None = None
        """The transaction it came in."""

    def want(self, wants: Wants) -> None:
        wants.claims += self._limit
        if self._claim_id is not None:
            wants.attempts.add(claimed_id(self._claim_id, 0))
        if self._worker_id is not None:
            wants.workers.add(self._worker_id)

    def run(self, unit: Unit) -> Any:
        before = repeated(unit, self._claim_id, self._limit)
        if before:
            answer = [transitions.hand_out_again(unit, attempt) for attempt in before]
            self._answered = [attempt.claims for attempt in before]
            return answer
        if self._since is None:
            self._since = unit.number
        if self._worker_id is not None and unit.worker(self._worker_id).lost and self._since != unit.number:
            return []  # it fell silent while it waited: it would take what its own lease has just given back
        if len(unit.line):
            unit.lined_up = True
            return PARK
        found = unit.queues.take(self._queues, self._limit)
        if not found:
            return PARK
        self._answered = [1] * len(found)
        return [
            transitions.claim(
                unit, state, self._worker_id, None if self._claim_id is None else claimed_id(self._claim_id, index)
            )
            for index, state in enumerate(found)
        ]

    def at_timeout(self, unit: Unit) -> list[AttemptedRollout]:
        self._answered = []
        return []

    def undo(self, unit: Unit, answer: Any) -> None:
        transitions.unclaim(unit, zip(answer, self._answered, strict=True))

    def park(self, parked: Parked) -> None:
        parked.add_claim(self, self._queues)


def repeated(unit: Unit, claim_id: str | None, limit: int) -> list[AttemptState]:
    """What an earlier call with the same claim_id claimed."""
    if claim_id is None:
        return []
    found: list[AttemptState] = []
    for index in range(limit):
        attempt = unit.attempt_by_id(claimed_id(claim_id, index))
        if attempt is None:
            break
        found.append(attempt)
    return found


class AddSpans(Call):
    """Keep the spans of one call, all or none."""

    __slots__ = ("_groups",)

    def __init__(self, name: str, groups: Sequence[SpanGroup]) -> None:
        super().__init__(name)
        self._groups = groups

    def want(self, wants: Wants) -> None:
        for group in self._groups:
            wants.rollouts.add(group.rollout_id)

    def run(self, unit: Unit) -> list[Kept]:
        return write.add(unit, self._groups)


class UpdateAttempt(Call):
    """Change an attempt that speaks for its rollout; another is returned as it stands."""

    __slots__ = ("_attempt_id", "_heartbeat", "_metadata", "_rollout_id", "_status", "_worker_id")

    def __init__(
        self,
        rollout_id: str,
        attempt_id: str,
        status: str | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> None:
        super().__init__("update_attempt")
        self._rollout_id = rollout_id
        self._attempt_id = attempt_id
        self._status = status
        self._worker_id = worker_id
        self._heartbeat = last_heartbeat_time
        self._metadata = metadata

    def want(self, wants: Wants) -> None:
        wants.rollouts.add(self._rollout_id)
        if isinstance(self._worker_id, str):
            wants.workers.add(self._worker_id)

    def run(self, unit: Unit) -> Attempt:
        state = unit.attempt(self._rollout_id, self._attempt_id)
        if state.superseded or (state.status == "unresponsive" and not state.speaks):
            attempt = state.to_attempt()
            return replace(attempt, metadata={**attempt.metadata, "superseded": True})
        worker_id, status = self._worker_id, self._status
        failed = status in transitions.FAILURES and status != state.status
        worker = transitions.worker_of(unit, state) if failed else None
        if isinstance(worker_id, str):
            worker = unit.worker(worker_id)
        if not isinstance(self._heartbeat, Unset):
            transitions.hear(unit, state, self._heartbeat)
        if not isinstance(status, Unset):
            transitions.move_attempt(unit, state, status)
        if worker_id is not UNSET or self._metadata is not UNSET:
            transitions.describe(unit, state, worker_id, self._metadata)
        if isinstance(worker_id, str) and worker is not None:
            transitions.hear_worker(unit, worker)
        if failed:
            transitions.note_failure(unit, worker, state)
        return state.to_attempt()


def until(timeout: float | None, now: float) -> float:
    """When a call that waits `timeout` seconds gives up; None: never."""
    return math.inf if timeout is None else now + max(0.0, timeout)
