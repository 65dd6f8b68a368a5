"""The state machine of rollouts and attempts: the only place where their status changes.

The tables of legal transitions are those of rollouts.py. An attempt is *current* while it is the latest one, is not
superseded (by a cancel or a requeue) and its rollout has not finished. Only a current attempt changes its rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from agentlightning.errors import ConflictError, StoreError
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, FINISHED, ROLLOUT_TRANSITIONS, WAITING, AttemptedRollout
from agentlightning.store import validation
from agentlightning.store.ids import new_id
from agentlightning.store.sql.session.rows import OPEN, AttemptRow, RolloutRow, WorkerRow, worker_columns
from agentlightning.store.sql.session.unit_of_work import UnitOfWork
from agentlightning.store.sql.tables import mapping
from agentlightning.store.types import Unset, Worker

logger = logging.getLogger(__name__)

FAILURES: Final = frozenset({"failed", "timeout", "unresponsive"})


# -- attempts --------------------------------------------------------------------------------------------------------


def set_attempt_status(unit: UnitOfWork, attempt: AttemptRow, status: str, error: dict[str, str] | None = None) -> None:
    """Change the status of a current attempt; its rollout follows."""
    if status == attempt.status:
        return
    if status not in ATTEMPT_TRANSITIONS[attempt.status]:
        raise ConflictError(
            f"attempt {attempt.attempt_id!r} of rollout {attempt.rollout.rollout_id!r} is {attempt.status!r} and "
            f"cannot become {status!r}; from there it may become: {_listed(ATTEMPT_TRANSITIONS[attempt.status])}"
        )
    unit.modify_attempt(attempt)
    if attempt.status == "unresponsive":
        _clear_error(attempt)
    if error is not None:
        _set_error(attempt, error)
    old, attempt.status = attempt.status, status
    target = _rollout_status(attempt)
    if status == "timeout" and old == "unresponsive" and attempt.rollout.status == "requeuing":
        target = "requeuing"  # the loss of the attempt already earned a retry, and the timeout does not revoke it
    _set_times(unit, attempt, keep_timeout=target not in FINISHED)
    set_rollout_status(unit, attempt.rollout, target)


def _set_times(unit: UnitOfWork, attempt: AttemptRow, keep_timeout: bool) -> None:
    """Update end time and deadlines after a change of status."""
    is_open = attempt.status in OPEN
    attempt.silent_at = None
    if is_open and attempt.silence is not None:
        attempt.silent_at = unit.steady + attempt.silence
        unit.note_deadline(attempt.silent_at)
    if not keep_timeout or not (is_open or attempt.status == "unresponsive"):
        attempt.timeout_at = None
    attempt.end_time = None if is_open else unit.wall
    if attempt.worker_id is not None:
        unit.attempt_changed(attempt)


def _rollout_status(attempt: AttemptRow) -> str:
    """The status of a rollout whose latest attempt this is."""
    if attempt.status in ("preparing", "running", "succeeded"):
        return attempt.status
    config = attempt.rollout.read_config()
    retry = attempt.status in config.retry_condition and attempt.sequence_id < config.max_attempts
    return "requeuing" if retry else "failed"


def _set_error(attempt: AttemptRow, error: dict[str, str]) -> None:
    attempt.metadata = validation.to_json({**attempt.read_metadata(), "error": error}, "attempt metadata")


def _clear_error(attempt: AttemptRow) -> None:
    """The attempt was taken for lost, and is not."""
    metadata = attempt.read_metadata()
    if metadata.pop("error", None) is not None:
        attempt.metadata = validation.to_json(metadata, "attempt metadata")


def failure(kind: str, message: str) -> dict[str, str]:
    """The `error` in the metadata of an attempt that the store ended."""
    return {"type": kind, "message": message, "traceback": ""}


def record_heartbeat(unit: UnitOfWork, attempt: AttemptRow, time: float) -> None:
    """A current attempt that was preparing or unresponsive is running."""
    if attempt.status in ("preparing", "unresponsive") and attempt.is_current:
        set_attempt_status(unit, attempt, "running")
    unit.modify_attempt(attempt)
    attempt.last_heartbeat_time = time
    if attempt.silence is not None and attempt.status in OPEN:
        attempt.silent_at = unit.steady + attempt.silence


def update_fields(
    unit: UnitOfWork, attempt: AttemptRow, worker_id: str | Unset, metadata: dict[str, Any] | Unset
) -> None:
    """Change the worker that runs an attempt, and merge into its metadata."""
    unit.modify_attempt(attempt)
    if not isinstance(worker_id, Unset):
        before, attempt.worker_id = attempt.worker_id, worker_id
        unit.attempt_changed(attempt, before)
    if not isinstance(metadata, Unset):
        if attempt.metadata != "{}":
            metadata = {**attempt.read_metadata(), **metadata}
        attempt.metadata = validation.to_json(metadata, "metadata")


# -- rollouts --------------------------------------------------------------------------------------------------------


def set_rollout_status(unit: UnitOfWork, rollout: RolloutRow, status: str) -> None:
    """Change the status of a rollout along the table. A rollout that waits for a retry of a lost attempt counts as
    claimed again when that attempt comes back."""
    old = rollout.status
    if status == old:
        return
    allowed = ROLLOUT_TRANSITIONS[old]
    if old == "requeuing" and status in ("running", "succeeded"):
        allowed = ROLLOUT_TRANSITIONS["preparing"]
    if status not in allowed:
        raise _illegal(rollout.rollout_id, old, status)
    _apply(unit, rollout, status)


def _apply(unit: UnitOfWork, rollout: RolloutRow, status: str) -> None:
    """Change the status and notify the queues and those who wait."""
    old = rollout.status
    unit.modify_rollout(rollout)
    rollout.status = status
    if status in FINISHED:
        rollout.end_time = unit.wall
        unit.finished.add(rollout.rollout_id)
    else:
        rollout.end_time = None
    unit.queues.status_changed(rollout, old, status)


def _illegal(rollout_id: str, old: str, new: str) -> ConflictError:
    return ConflictError(
        f"rollout {rollout_id!r} is {old!r} and cannot become {new!r}; from there it may become: "
        f"{_listed(ROLLOUT_TRANSITIONS[old])}"
    )


def _listed(statuses: frozenset[str]) -> str:
    return ", ".join(sorted(statuses)) or "nothing, it has ended"


def update_rollout_status(unit: UnitOfWork, rollout: RolloutRow, status: str) -> None:
    """Set the status that `update_rollout` was given."""
    old = rollout.status
    if status == old:
        return
    if status == "requeuing" and old not in WAITING:
        requeue(unit, rollout, "update_rollout set it to requeuing")
        return
    if status == "cancelled":
        cancel(unit, rollout)
        return
    if status in ("preparing", "queuing"):
        raise ConflictError(
            f"rollout {rollout.rollout_id!r} cannot be set to {status!r}: use dequeue_rollout or start_attempt to "
            "claim it, requeue_rollout to queue it again"
        )
    if status not in ROLLOUT_TRANSITIONS[old]:
        raise _illegal(rollout.rollout_id, old, status)
    set_rollout_status(unit, rollout, status)
    latest = rollout.latest
    if latest is not None and not latest.superseded and latest.status in OPEN:  # it follows, and is not retried
        unit.modify_attempt(latest)
        latest.status = status
        _set_times(unit, latest, keep_timeout=status not in FINISHED)
    elif status in FINISHED:
        fence(unit, rollout)


def requeue(unit: UnitOfWork, rollout: RolloutRow, reason: str) -> None:
    """Queue a claimed or finished rollout again; its attempts are superseded."""
    close_attempts(unit, rollout, reason)
    set_rollout_status(unit, rollout, "requeuing")


def cancel(unit: UnitOfWork, rollout: RolloutRow) -> None:
    """Cancel a rollout that has not finished; its attempts are superseded."""
    close_attempts(unit, rollout, "the rollout was cancelled")
    set_rollout_status(unit, rollout, "cancelled")


def give_up(unit: UnitOfWork, rollout: RolloutRow) -> None:
    """Cancel a rollout whose row is damaged, whatever its status."""
    fence(unit, rollout)
    _apply(unit, rollout, "cancelled")


def set_aside(unit: UnitOfWork, rollout: RolloutRow, error: StoreError) -> None:
    """Fail a rollout that cannot be read, so that it holds up no other. Its latest attempt has the reason, and what was
    replaced in its row."""
    logger.error("a rollout is set aside as failed: %s", error)
    unit.modify_rollout(rollout, fields_changed=True)
    metadata = {"error": failure("Damaged", str(error)), "damaged": rollout.repair()}
    text = validation.to_json(metadata, "attempt metadata")
    latest = rollout.latest
    if latest is not None and latest.status in OPEN:
        unit.modify_attempt(latest)
        latest.metadata, latest.status = text, "failed"
        _set_times(unit, latest, keep_timeout=False)
    else:
        rollout.attempt_count += 1
        names = (rollout.attempt_count, new_id("at"), "failed", unit.wall, unit.wall, None, None, text)
        unit.add_attempt(rollout, (*names, 0, 0, 0, 0, None, None, None))
    _apply(unit, rollout, "failed")


def close_attempts(unit: UnitOfWork, rollout: RolloutRow, reason: str) -> None:
    """Supersede every attempt of a rollout. One that is open becomes unresponsive."""
    latest = rollout.latest
    if latest is not None and latest.status in OPEN:
        unit.modify_attempt(latest)
        _set_error(latest, failure("Superseded", reason))
        latest.status = "unresponsive"
        _set_times(unit, latest, keep_timeout=False)
    fence(unit, rollout)


def fence(unit: UnitOfWork, rollout: RolloutRow) -> None:
    """Mark the latest attempt as superseded; each claim has marked those before it."""
    latest = rollout.latest
    if latest is not None and not latest.superseded:
        unit.modify_attempt(latest)
        latest.superseded = 1
        latest.timeout_at = latest.silent_at = None
        unit.attempt_changed(latest)


# -- claims ----------------------------------------------------------------------------------------------------------


def claim(
    unit: UnitOfWork, rollout: RolloutRow, worker_id: str | None, attempt_id: str | None = None
) -> AttemptedRollout:
    """Start the next attempt of a rollout."""
    old = rollout.status
    if "preparing" not in ROLLOUT_TRANSITIONS[old] and "requeuing" not in ROLLOUT_TRANSITIONS[old]:
        raise ConflictError(f"rollout {rollout.rollout_id!r} has {old}; enqueue the task as a new rollout")
    worker = None if worker_id is None else unit.worker(worker_id)
    if rollout.attempt_count:
        close_attempts(unit, rollout, f"attempt {rollout.attempt_count + 1} was started")
    _apply(unit, rollout, "preparing")
    rollout.attempt_count += 1
    config = mapping.DEFAULT_CONFIG if rollout.config is None else rollout.read_config()
    steady = unit.steady
    timeout_at = None if config.timeout_seconds is None else steady + config.timeout_seconds
    silent_at = None if config.unresponsive_seconds is None else steady + config.unresponsive_seconds
    attempt = unit.add_attempt(
        rollout,
        (
            *(rollout.attempt_count, attempt_id or new_id("at"), "preparing", unit.wall, None, worker_id, None),
            *("{}", 0, 0, 0, 0, timeout_at, config.unresponsive_seconds, silent_at),
        ),
    )
    if timeout_at is not None:
        unit.note_deadline(timeout_at)
    if silent_at is not None:
        unit.note_deadline(silent_at)
    if worker is not None:
        record_worker_heartbeat(unit, worker)
    return rollout.to_attempted(attempt)


def release_claim(unit: UnitOfWork, claimed: Iterable[tuple[AttemptedRollout, int]]) -> None:
    """Revert a claim whose caller is gone, unless the claim was answered again meanwhile, to a caller that repeated
    it: otherwise nobody has seen these attempts. With each comes how often its claim had been answered."""
    for each, claims in claimed:
        rollout = unit.find_rollout(each.rollout_id)
        latest = None if rollout is None else rollout.latest
        if rollout is None or latest is None or latest.attempt_id != each.attempt.attempt_id:
            continue
        if latest.status != "preparing" or latest.superseded or latest.claims != claims:
            continue
        unit.remove_attempt(latest)
        rollout.attempt_count -= 1
        _apply(unit, rollout, "requeuing" if rollout.attempt_count else "queuing")


def repeat_claim(unit: UnitOfWork, attempt: AttemptRow) -> AttemptedRollout:
    """Answer a repeated claim. From now on, the first caller no longer releases it."""
    if attempt.status == "preparing" and not attempt.superseded:
        unit.modify_attempt(attempt)
        attempt.claims += 1
    return attempt.rollout.to_attempted(attempt)


# -- workers ---------------------------------------------------------------------------------------------------------


def update_worker(unit: UnitOfWork, worker_id: str, stats: str | None, lease_seconds: float | None) -> Worker:
    """The heartbeat of a worker, which keeps its open attempts alive. stats is JSON."""
    worker = unit.worker(worker_id)
    unit.load(set(worker.open_attempts.values()))
    unit.modify_worker(worker)
    if stats is not None:
        worker.stats = stats
    if lease_seconds is not None:
        worker.lease_seconds = lease_seconds
    record_worker_heartbeat(unit, worker)
    for attempt_id, rollout_id in worker.open_attempts.items():
        attempt = unit.rollout(rollout_id).attempts[attempt_id]
        if attempt.status in OPEN:
            unit.modify_attempt(attempt)
            attempt.last_heartbeat_time = unit.wall
            if attempt.silence is not None:
                attempt.silent_at = unit.steady + attempt.silence
    latest = next(reversed(worker.open_attempts.items()), None)
    current = None if latest is None else (latest[1], latest[0])
    return mapping.to_worker(worker_columns(worker), current, len(worker.open_attempts))


def record_worker_heartbeat(unit: UnitOfWork, worker: WorkerRow) -> None:
    unit.modify_worker(worker)
    worker.last_heartbeat_time = unit.wall
    worker.lost = 0
    worker.lost_at = None
    if worker.lease_seconds is not None:
        worker.lost_at = unit.steady + worker.lease_seconds
        unit.note_deadline(worker.lost_at)


def record_failure(unit: UnitOfWork, worker: WorkerRow | None, attempt: AttemptRow) -> None:
    """Set the last error of a worker to that of an attempt."""
    if worker is None:
        return
    error = attempt.read_metadata().get("error")
    details = error if isinstance(error, dict) else {}
    unit.modify_worker(worker)
    worker.last_error = validation.to_json(
        {
            "rollout_id": attempt.rollout.rollout_id,
            "attempt_id": attempt.attempt_id,
            "type": details.get("type", attempt.status),
            "message": details.get("message", f"the attempt became {attempt.status}"),
            "time": unit.wall,
        },
        "last_error",
    )


def worker_of(unit: UnitOfWork, attempt: AttemptRow) -> WorkerRow | None:
    """The worker that runs an attempt. Must come before the first change of a command."""
    return None if attempt.worker_id is None else unit.worker(attempt.worker_id)
