"""The most frequent commands on rollouts and attempts: enqueue, start, claim, update an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.errors import ConflictError, StoreError
from agentlightning.rollouts import Attempt, AttemptedRollout, Rollout
from agentlightning.store.ids import claimed_id
from agentlightning.store.sql.commands.base import Command
from agentlightning.store.sql.commands.waiters import WAIT, Waiters
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.session.rows import AttemptRow, RolloutRow
from agentlightning.store.sql.session.unit_of_work import Prefetch, UnitOfWork
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.types import UNSET, Unset


class EnqueueRollouts(Command):
    """Queues rollouts. Those whose id exists already are returned unchanged."""

    __slots__ = ("_new", "_resources", "_with_id")

    def __init__(self, name: str, new: Sequence[tuple[Rollout, Row]], with_id: Iterable[str]) -> None:
        super().__init__(name)
        self._new = new
        self._with_id = frozenset(with_id)
        """The ids chosen by the caller: only these can exist already."""
        self._resources = {rollout.resources_id for rollout, _ in new}

    def prefetch(self, needs: Prefetch) -> None:
        needs.rollouts.update(self._with_id)
        needs.new_rollouts += len(self._new)

    def run(self, unit: UnitOfWork) -> list[Rollout]:
        for resources_id in self._resources:
            unit.check_resources(resources_id)
        results: list[Rollout] = []
        for rollout, columns in self._new:
            existing = unit.find_rollout(rollout.rollout_id) if rollout.rollout_id in self._with_id else None
            if existing is not None:
                results.append(existing.to_rollout())
                continue
            unit.add_rollout(columns)
            results.append(rollout)
        return results


class StartRollout(Command):
    """Creates a rollout and claims it."""

    __slots__ = ("_claim_id", "_has_id", "_new", "_worker_id")

    def __init__(self, new: tuple[Rollout, Row], has_id: bool, worker_id: str | None, claim_id: str | None) -> None:
        super().__init__("start_rollout")
        self._new = new
        self._has_id = has_id
        """The caller chose the id of the rollout."""
        self._worker_id = worker_id
        self._claim_id = claim_id

    def prefetch(self, needs: Prefetch) -> None:
        needs.new_rollouts += 1
        if self._has_id:
            needs.rollouts.add(self._new[0].rollout_id)
        if self._claim_id is not None:
            needs.attempts.add(claimed_id(self._claim_id, 0))
        if self._worker_id is not None:
            needs.workers.add(self._worker_id)

    def run(self, unit: UnitOfWork) -> AttemptedRollout:
        rollout, columns = self._new
        unit.check_resources(rollout.resources_id)
        before = claimed_before(unit, self._claim_id, 1)
        if before:
            return before[0].rollout.to_attempted(before[0])
        if self._has_id and unit.find_rollout(rollout.rollout_id) is not None:
            raise ConflictError(f"rollout {rollout.rollout_id!r} exists already; use start_attempt")
        if self._worker_id is not None:
            unit.worker(self._worker_id)
        row = unit.add_rollout(columns)
        attempt_id = None if self._claim_id is None else claimed_id(self._claim_id, 0)
        return transitions.claim(unit, row, self._worker_id, attempt_id)


class ClaimRollouts(Command):
    """Claims waiting rollouts. Waits while there is none, and behind the claims that already wait."""

    __slots__ = ("_answer_counts", "_claim_id", "_first_transaction", "_limit", "_queues", "_worker_id")

    def __init__(
        self, name: str, limit: int, worker_id: str | None, queues: Sequence[str] | None, claim_id: str | None
    ) -> None:
        super().__init__(name)
        self._limit = limit
        self._worker_id = worker_id
        self._queues = None if queues is None else tuple(dict.fromkeys(queues))
        self._claim_id = claim_id
        self._answer_counts: list[int] = []
        """For each attempt of the result: how often its claim had been answered by then."""
        self._first_transaction: int | None = None

    def prefetch(self, needs: Prefetch) -> None:
        needs.claims += self._limit
        if self._claim_id is not None:
            needs.attempts.add(claimed_id(self._claim_id, 0))
        if self._worker_id is not None:
            needs.workers.add(self._worker_id)

    def run(self, unit: UnitOfWork) -> Any:
        before = claimed_before(unit, self._claim_id, self._limit)
        if before:
            result = [transitions.repeat_claim(unit, attempt) for attempt in before]
            self._answer_counts = [attempt.claims for attempt in before]
            return result
        if self._first_transaction is None:
            self._first_transaction = unit.number
        waited = self._first_transaction != unit.number
        if waited and self._worker_id is not None and unit.worker(self._worker_id).lost:
            return []  # its lease ran out while it waited: it would claim what that has just given back
        if len(unit.waiting_ahead):
            unit.claims_queued = True
            return WAIT
        found = self._take(unit)
        if not found:
            return WAIT
        self._answer_counts = [1] * len(found)
        return [
            transitions.claim(
                unit, rollout, self._worker_id, None if self._claim_id is None else claimed_id(self._claim_id, index)
            )
            for index, rollout in enumerate(found)
        ]

    def _take(self, unit: UnitOfWork) -> list[RolloutRow]:
        """The rollouts to claim. Damaged ones are set aside."""
        while True:
            found, damaged = unit.queues.take(self._queues, self._limit), dict[RolloutRow, StoreError]()
            for rollout in found:
                try:
                    rollout.to_rollout()
                except StoreError as error:
                    damaged[rollout] = error
            if not damaged:
                return found
            for rollout, error in damaged.items():
                transitions.set_aside(unit, rollout, error)
            unit.release_savepoint()
            for rollout in found:
                unit.queues.put_back(rollout)

    def on_timeout(self, unit: UnitOfWork) -> list[AttemptedRollout]:
        self._answer_counts = []
        return []

    def undo(self, unit: UnitOfWork, result: Any) -> None:
        transitions.release_claim(unit, zip(result, self._answer_counts, strict=True))

    def wait(self, waiters: Waiters[Command]) -> None:
        waiters.add_claim(self, self._queues)


def claimed_before(unit: UnitOfWork, claim_id: str | None, limit: int) -> list[AttemptRow]:
    """What an earlier command with the same claim_id claimed."""
    if claim_id is None:
        return []
    found: list[AttemptRow] = []
    for index in range(limit):
        attempt = unit.attempt_by_id(claimed_id(claim_id, index))
        if attempt is None:
            break
        found.append(attempt)
    return found


class UpdateAttempt(Command):
    """Changes a current attempt; any other is returned unchanged."""

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

    def prefetch(self, needs: Prefetch) -> None:
        needs.rollouts.add(self._rollout_id)
        if isinstance(self._worker_id, str):
            needs.workers.add(self._worker_id)

    def run(self, unit: UnitOfWork) -> Attempt:
        row = unit.attempt(self._rollout_id, self._attempt_id)
        if row.superseded or (row.status == "unresponsive" and not row.is_current):
            attempt = row.to_attempt()
            return replace(attempt, metadata={**attempt.metadata, "superseded": True})
        worker_id, status = self._worker_id, self._status
        failed = status in transitions.FAILURES and status != row.status
        worker = transitions.worker_of(unit, row) if failed else None
        if isinstance(worker_id, str):
            worker = unit.worker(worker_id)
        if not isinstance(self._heartbeat, Unset):
            transitions.record_heartbeat(unit, row, self._heartbeat)
        if not isinstance(status, Unset):
            transitions.set_attempt_status(unit, row, status)
        if worker_id is not UNSET or self._metadata is not UNSET:
            transitions.update_fields(unit, row, worker_id, self._metadata)
        if isinstance(worker_id, str) and worker is not None:
            transitions.record_worker_heartbeat(unit, worker)
        if failed:
            transitions.record_failure(unit, worker, row)
        return row.to_attempt()
