"""Attempts and workers: heartbeats, updates, and the deadlines of both."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Final

from agentlightning.errors import StoreError
from agentlightning.rollouts import Attempt
from agentlightning.store import validation
from agentlightning.store.sql import mapping
from agentlightning.store.sql.rollouts import beat_worker, failure, is_current, set_aside, set_attempt_status
from agentlightning.store.sql.schema import OPEN, AttemptRow, WorkerRow
from agentlightning.store.sql.tx import Tx
from agentlightning.store.types import Worker

FAILURES: Final = frozenset({"failed", "timeout", "unresponsive"})
EXPIRY_BATCH: Final = 200
"""Attempts ended in one transaction at most; the rest follow at the next tick."""

# -- heartbeats and updates ------------------------------------------------------------------------------------------


def beat(tx: Tx, attempt: AttemptRow, time: float, **changes: Any) -> None:
    """Record a heartbeat, with other changes. A current attempt that was preparing or unresponsive is running."""
    if attempt.status in ("preparing", "unresponsive") and is_current(attempt):
        set_attempt_status(tx, attempt, "running")
    if attempt.silence is not None and attempt.status in OPEN:
        changes["silent_at"] = tx.steady + attempt.silence
    tx.set(attempt, last_heartbeat_time=time, **changes)


def update(
    tx: Tx,
    rollout_id: str,
    attempt_id: str,
    status: str | None = None,
    worker_id: str | None = None,
    last_heartbeat_time: float | None = None,
    metadata: dict[str, Any] | None = None,
) -> Attempt:
    """Change what is given of a current attempt; any other is returned unchanged."""
    row = tx.attempt(rollout_id, attempt_id)
    if row.superseded or (row.status == "unresponsive" and not is_current(row)):
        attempt = mapping.to_attempt(row, rollout_id)
        return replace(attempt, metadata={**attempt.metadata, "superseded": True})
    failed = status in FAILURES and status != row.status
    worker = worker_of(tx, row) if failed else None
    if worker_id is not None:
        worker = tx.worker(worker_id)
    if last_heartbeat_time is not None:
        beat(tx, row, last_heartbeat_time)
    if status is not None:
        set_attempt_status(tx, row, status)
    if metadata is not None:
        merged = metadata if row.metadata == "{}" else {**mapping.metadata_of(row), **metadata}
        tx.set(row, metadata=validation.to_json(merged, "metadata"))
    if worker_id is not None:
        tx.set(row, worker_id=worker_id)
        if worker is not None:
            beat_worker(tx, worker)
    if failed:
        record_failure(tx, worker, row)
    return mapping.to_attempt(row, rollout_id)


def worker_of(tx: Tx, attempt: AttemptRow) -> WorkerRow | None:
    """The worker that runs an attempt."""
    return None if attempt.worker_id is None else tx.worker(attempt.worker_id)


def record_failure(tx: Tx, worker: WorkerRow | None, attempt: AttemptRow) -> None:
    """Set the last error of a worker to that of an attempt."""
    if worker is None:
        return
    error = mapping.metadata_of(attempt).get("error")
    details = error if isinstance(error, dict) else {}
    last_error = {
        "rollout_id": attempt.rollout.rollout_id,
        "attempt_id": attempt.attempt_id,
        "type": details.get("type", attempt.status),
        "message": details.get("message", f"the attempt became {attempt.status}"),
        "time": tx.wall,
    }
    tx.set(worker, last_error=validation.to_json(last_error, "last_error"))


def update_worker(tx: Tx, worker_id: str, stats: str | None, lease_seconds: float | None) -> Worker:
    """The heartbeat of a worker, which keeps its open attempts alive. stats is JSON."""
    worker = tx.worker(worker_id)
    given = {"stats": stats, "lease_seconds": lease_seconds}
    beat_worker(tx, worker, **{name: value for name, value in given.items() if value is not None})
    attempts = _open_attempts(tx, worker)
    for attempt in attempts:
        silent_at = attempt.silent_at if attempt.silence is None else tx.steady + attempt.silence
        tx.set(attempt, last_heartbeat_time=tx.wall, silent_at=silent_at)
    current = (attempts[-1].rollout.rollout_id, attempts[-1].attempt_id) if attempts else None
    return mapping.to_worker(worker, current, len(attempts))


def _open_attempts(tx: Tx, worker: WorkerRow) -> list[AttemptRow]:
    """Those of a worker that are open still, the newest last."""
    tx.load(worker.open_attempts.values())
    rollouts = [(attempt_id, tx.rollouts[rollout_id]) for attempt_id, rollout_id in worker.open_attempts.items()]
    found = [None if rollout is None else rollout.attempts.get(attempt_id) for attempt_id, rollout in rollouts]
    return [row for row in found if row is not None and row.status in OPEN and not row.superseded]


# -- deadlines -------------------------------------------------------------------------------------------------------

_DUE: Final = (
    "SELECT a.attempt_id, r.rollout_id FROM attempts a JOIN rollouts r ON r.key = a.rollout_key "
    "WHERE a.{0} IS NOT NULL AND a.{0} <= ? ORDER BY a.{0} LIMIT ?"
)
_LOST: Final = "SELECT worker_id FROM workers WHERE lost_at IS NOT NULL AND lost_at <= ? ORDER BY lost_at LIMIT ?"
_NEXT: Final = (
    "SELECT (SELECT min(timeout_at) FROM attempts WHERE timeout_at IS NOT NULL), "
    "(SELECT min(silent_at) FROM attempts WHERE silent_at IS NOT NULL), "
    "(SELECT min(lost_at) FROM workers WHERE lost_at IS NOT NULL)"
)


def expire(tx: Tx) -> float | None:
    """End attempts that timed out, fell silent, or whose worker lost its lease. Returns the next deadline on the steady
    clock."""
    now = tx.steady
    for attempt in _due(tx, "timeout_at"):
        if attempt.timeout_at is not None and attempt.timeout_at <= now:
            _end(tx, attempt, "timeout", failure("Timeout", f"did not end {_within_limit(attempt)}"))
    for attempt in _due(tx, "silent_at"):
        if attempt.silent_at is not None and attempt.silent_at <= now:
            message = f"gave no sign of life for {attempt.silence or 0:g} s"
            _end(tx, attempt, "unresponsive", failure("Unresponsive", message))
    names = [name for (name,) in tx.all(_LOST, now, EXPIRY_BATCH)]
    tx.load_workers(names)
    for worker in map(tx.worker, names):
        if worker.lost_at is not None and worker.lost_at <= now:
            tx.set(worker, lost_at=None, lost=1)
            message = f"its worker {worker.worker_id!r} gave no sign of life for {worker.lease_seconds or 0:g} s"
            for attempt in _open_attempts(tx, worker):
                _end(tx, attempt, "unresponsive", failure("WorkerLost", message))
    (deadlines,) = tx.all(_NEXT)
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


def _due(tx: Tx, column: str) -> list[AttemptRow]:
    ids = tx.all(_DUE.format(column), tx.steady, EXPIRY_BATCH)
    tx.load(rollout_id for _, rollout_id in ids)
    found = [tx.rollout(rollout_id).attempts.get(attempt_id) for attempt_id, rollout_id in ids]
    attempts = [attempt for attempt in found if attempt is not None]
    tx.load_workers(attempt.worker_id for attempt in attempts if attempt.worker_id is not None)
    return attempts


def _within_limit(attempt: AttemptRow) -> str:
    with contextlib.suppress(StoreError):
        limit = mapping.config_of(attempt.rollout).timeout_seconds
        if limit is not None:
            return f"within {limit:g} s"
    return "in its time"


def _end(tx: Tx, attempt: AttemptRow, status: str, error: dict[str, str]) -> None:
    """End one attempt. One that is damaged is set aside with its rollout, so that it holds up no other."""
    worker = worker_of(tx, attempt)
    try:
        set_attempt_status(tx, attempt, status, error)
        record_failure(tx, worker, attempt)
    except StoreError as refusal:  # before anything was changed
        tx.set(attempt, timeout_at=None, silent_at=None)
        if is_current(attempt):
            set_aside(tx, attempt.rollout, refusal)
