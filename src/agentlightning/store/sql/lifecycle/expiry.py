"""Enforces deadlines: ends attempts that timed out, fell silent, or whose worker lost its lease."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from agentlightning.errors import StoreError
from agentlightning.store.sql.lifecycle.transitions import (
    failure,
    record_failure,
    set_aside,
    set_attempt_status,
    worker_of,
)
from agentlightning.store.sql.session.rows import AttemptRow
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.tables import statements

EXPIRY_BATCH: Final = 200
"""Attempts ended in one transaction at most; the rest follow at the next tick."""


def expire(unit: UnitOfWork) -> float | None:
    """End what is due; returns the next deadline on the steady clock."""
    now = unit.steady
    _expire_timeouts(unit, now)
    _expire_silent(unit, now)
    _expire_leases(unit, now)
    unit.flush()
    deadlines: list[Any] = [
        unit.connection.all(statement)[0][0]
        for statement in (statements.NEXT_TIMEOUT, statements.NEXT_SILENCE, statements.NEXT_LOST)
    ]
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _expire_timeouts(unit: UnitOfWork, now: float) -> None:
    for attempt in _due(unit, statements.TIMED_OUT, now):
        if attempt.timeout_at is not None and attempt.timeout_at <= now:
            _end(unit, attempt, "timeout", failure("Timeout", f"did not end {_within_limit(attempt)}"))


def _expire_silent(unit: UnitOfWork, now: float) -> None:
    for attempt in _due(unit, statements.FELL_SILENT, now):
        if attempt.silent_at is not None and attempt.silent_at <= now:
            message = f"gave no sign of life for {attempt.silence or 0:g} s"
            _end(unit, attempt, "unresponsive", failure("Unresponsive", message))


def _due(unit: UnitOfWork, statement: statements.Statement, now: float) -> list[AttemptRow]:
    unit.flush()
    ids = unit.connection.all(statement, now, EXPIRY_BATCH)
    unit.load({rollout_id for _, rollout_id in ids})
    found = [unit.rollout(rollout_id).attempts.get(attempt_id) for attempt_id, rollout_id in ids]
    attempts = [attempt for attempt in found if attempt is not None]
    unit.load_workers({attempt.worker_id for attempt in attempts if attempt.worker_id is not None})
    return attempts


def _expire_leases(unit: UnitOfWork, now: float) -> None:
    unit.flush()
    names = [row[0] for row in unit.connection.all(statements.LOST_WORKERS, now, EXPIRY_BATCH)]
    unit.load_workers(names)
    unit.load({rollout_id for name in names for rollout_id in unit.worker(name).open_attempts.values()})
    for worker in map(unit.worker, names):
        if worker.lost_at is None or worker.lost_at > now:
            continue
        unit.modify_worker(worker)
        worker.lost_at, worker.lost = None, 1
        unit.release_savepoint()
        message = f"its worker {worker.worker_id!r} gave no sign of life for {worker.lease_seconds or 0:g} s"
        for attempt_id, rollout_id in list(worker.open_attempts.items()):
            attempt = unit.rollout(rollout_id).attempts[attempt_id]
            _end(unit, attempt, "unresponsive", failure("WorkerLost", message))


def _within_limit(attempt: AttemptRow) -> str:
    with contextlib.suppress(StoreError):
        limit = attempt.rollout.read_config().timeout_seconds
        if limit is not None:
            return f"within {limit:g} s"
    return "in its time"


def _end(unit: UnitOfWork, attempt: AttemptRow, status: str, error: dict[str, str]) -> None:
    """End one attempt. One that is damaged is set aside with its rollout, so that it holds up no other."""
    worker = worker_of(unit, attempt)
    try:
        set_attempt_status(unit, attempt, status, error)
        record_failure(unit, worker, attempt)
    except StoreError as refusal:
        unit.rollback_to_savepoint()
        unit.modify_attempt(attempt)
        attempt.timeout_at = attempt.silent_at = None
        if attempt.is_current:
            set_aside(unit, attempt.rollout, refusal)
    unit.release_savepoint()
