"""How rollouts and attempts change status: the tables of rollouts.py, applied to what a unit holds in memory.

An attempt *speaks* for its rollout while it is the latest one, has not been fenced off (by a cancel or a requeue) and
the rollout has not finished. Only then does what it does move the rollout.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConflictError, StoreError
from agentlightning.rollouts import ATTEMPT_TRANSITIONS, FINISHED, ROLLOUT_TRANSITIONS, WAITING, AttemptedRollout
from agentlightning.store.base import Unset
from agentlightning.store.ids import new_id
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.rows import OPEN, AttemptState, RolloutState, WorkerState

if TYPE_CHECKING:
    from agentlightning.store.sql.execution.unit_of_work import Unit

logger = logging.getLogger(__name__)

EXPIRE_AT_ONCE: Final = 200
"""Attempts ended in one transaction at most; the rest follow at the next tick."""
FAILURES: Final = frozenset({"failed", "timeout", "unresponsive"})


# -- attempts --------------------------------------------------------------------------------------------------------


def move_attempt(unit: Unit, state: AttemptState, status: str, error: dict[str, str] | None = None) -> None:
    """Change the status of an attempt that speaks; its rollout follows."""
    if status == state.status:
        return
    if status not in ATTEMPT_TRANSITIONS[state.status]:
        raise ConflictError(
            f"attempt {state.attempt_id!r} of rollout {state.rollout.rollout_id!r} is {state.status!r} and cannot "
            f"become {status!r}; from there it may become: {_named(ATTEMPT_TRANSITIONS[state.status])}"
        )
    unit.touch_attempt(state)
    if state.status == "unresponsive":
        _forget_error(state)
    if error is not None:
        _record_error(state, error)
    before, state.status = state.status, status
    target = _rollout_status(state)
    if status == "timeout" and before == "unresponsive" and state.rollout.status == "requeuing":
        target = "requeuing"  # the retry that was promised when it was lost is not taken back because time passes
    _set_times(unit, state, keep_timeout=target not in FINISHED)
    move_rollout(unit, state.rollout, target)


def _set_times(unit: Unit, state: AttemptState, keep_timeout: bool) -> None:
    """After a change of status."""
    is_open = state.status in OPEN
    state.silent_at = None
    if is_open and state.silence is not None:
        state.silent_at = unit.steady + state.silence
        unit.remind(state.silent_at)
    if not keep_timeout or not (is_open or state.status == "unresponsive"):
        state.timeout_at = None
    state.end_time = None if is_open else unit.wall
    if state.worker_id is not None:
        unit.changed_work(state)


def _rollout_status(state: AttemptState) -> str:
    """What a rollout is when its latest attempt is in `state`."""
    if state.status in ("preparing", "running", "succeeded"):
        return state.status
    config = state.rollout.read_config()
    retry = state.status in config.retry_condition and state.sequence_id < config.max_attempts
    return "requeuing" if retry else "failed"


def _record_error(state: AttemptState, error: dict[str, str]) -> None:
    state.metadata = mapping.dump({**state.read_metadata(), "error": error}, "attempt metadata")


def _forget_error(state: AttemptState) -> None:
    """It was thought lost and is not."""
    metadata = state.read_metadata()
    if metadata.pop("error", None) is not None:
        state.metadata = mapping.dump(metadata, "attempt metadata")


def hear(unit: Unit, state: AttemptState, time: float) -> None:
    """A sign of life: what was preparing or thought lost is running."""
    if state.status in ("preparing", "unresponsive") and state.speaks:
        move_attempt(unit, state, "running")
    unit.touch_attempt(state)
    state.last_heartbeat_time = time
    if state.silence is not None and state.status in OPEN:
        state.silent_at = unit.steady + state.silence


def describe(unit: Unit, state: AttemptState, worker_id: str | Unset, metadata: dict[str, Any] | Unset) -> None:
    """Change who runs an attempt, and add to its metadata."""
    unit.touch_attempt(state)
    if not isinstance(worker_id, Unset):
        before, state.worker_id = state.worker_id, worker_id
        unit.changed_work(state, before)
    if not isinstance(metadata, Unset):
        if state.metadata != "{}":
            metadata = {**state.read_metadata(), **metadata}
        state.metadata = mapping.dump(metadata, "metadata")


# -- rollouts --------------------------------------------------------------------------------------------------------


def move_rollout(unit: Unit, rollout: RolloutState, status: str) -> None:
    """Change the status of a rollout, along the table. What was queued again for a lost attempt is claimed anew when
    the attempt comes back."""
    old = rollout.status
    if status == old:
        return
    steps = ROLLOUT_TRANSITIONS[old]
    if old == "requeuing" and status in ("running", "succeeded"):
        steps = ROLLOUT_TRANSITIONS["preparing"]
    if status not in steps:
        raise _illegal(rollout.rollout_id, old, status)
    unit.move_rollout(rollout, status)


def _illegal(rollout_id: str, old: str, new: str) -> ConflictError:
    return ConflictError(
        f"rollout {rollout_id!r} is {old!r} and cannot become {new!r}; from there it may become: "
        f"{_named(ROLLOUT_TRANSITIONS[old])}"
    )


def set_status(unit: Unit, rollout: RolloutState, status: str) -> None:
    """What `update_rollout(status=...)` asks for."""
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
    _finish_by_hand(unit, rollout, status)


def _finish_by_hand(unit: Unit, rollout: RolloutState, status: str) -> None:
    """Running, succeeded or failed, said of the rollout: its open attempt shares the fate, and is not tried again."""
    move_rollout(unit, rollout, status)
    latest = rollout.latest
    if latest is not None and not latest.superseded and latest.status in OPEN:
        unit.touch_attempt(latest)
        latest.status = status
        _set_times(unit, latest, keep_timeout=status not in FINISHED)
    elif status in FINISHED:
        fence(unit, rollout)


def requeue(unit: Unit, rollout: RolloutState, reason: str) -> None:
    """Queue a claimed or finished rollout again; its attempts are fenced off."""
    close(unit, rollout, reason)
    move_rollout(unit, rollout, "requeuing")


def cancel(unit: Unit, rollout: RolloutState) -> None:
    """Cancel a rollout that has not finished; its attempts are fenced off."""
    close(unit, rollout, "the rollout was cancelled")
    move_rollout(unit, rollout, "cancelled")


def close(unit: Unit, rollout: RolloutState, reason: str) -> None:
    """Fence off every attempt of a rollout. One still open becomes unresponsive."""
    latest = rollout.latest
    if latest is not None and latest.status in OPEN:
        unit.touch_attempt(latest)
        _record_error(latest, failure("Superseded", reason))
        latest.status = "unresponsive"
        _set_times(unit, latest, keep_timeout=False)
    fence(unit, rollout)


def fence(unit: Unit, rollout: RolloutState) -> None:
    """Only the latest attempt can be without a fence: each claim fences off those before it."""
    latest = rollout.latest
    if latest is not None and not latest.superseded:
        unit.touch_attempt(latest)
        latest.superseded = 1
        latest.timeout_at = latest.silent_at = None
        unit.changed_work(latest)


# -- claiming --------------------------------------------------------------------------------------------------------


def claim(unit: Unit, rollout: RolloutState, worker_id: str | None, attempt_id: str | None = None) -> AttemptedRollout:
    """Start the next attempt of a rollout."""
    old = rollout.status
    if "preparing" not in ROLLOUT_TRANSITIONS[old] and "requeuing" not in ROLLOUT_TRANSITIONS[old]:
        raise ConflictError(f"rollout {rollout.rollout_id!r} has {old}; enqueue the task as a new rollout")
    worker = None if worker_id is None else unit.worker(worker_id)
    if rollout.attempts:
        close(unit, rollout, f"attempt {rollout.attempts + 1} was started")
    unit.move_rollout(rollout, "preparing")
    rollout.attempts += 1
    config = mapping.DEFAULT_CONFIG if rollout.config is None else rollout.read_config()
    steady = unit.steady
    timeout_at = None if config.timeout_seconds is None else steady + config.timeout_seconds
    silent_at = None if config.unresponsive_seconds is None else steady + config.unresponsive_seconds
    attempt = unit.add_attempt(
        rollout,
        (
            *(rollout.attempts, attempt_id or new_id("at"), "preparing", unit.wall, None, worker_id, None),
            *("{}", 0, 0, 0, 0, timeout_at, config.unresponsive_seconds, silent_at),
        ),
    )
    if timeout_at is not None:
        unit.remind(timeout_at)
    if silent_at is not None:
        unit.remind(silent_at)
    if worker is not None:
        hear_worker(unit, worker)
    return rollout.to_attempted(attempt)


def unclaim(unit: Unit, claimed: Iterable[tuple[AttemptedRollout, int]]) -> None:
    """Put back what was claimed for a caller that is gone, unless the claim was answered again meanwhile, to one who
    repeated it: otherwise nobody has seen these attempts. With each, how often its claim had been answered by then."""
    for each, claims in claimed:
        rollout = unit.find_rollout(each.rollout_id)
        latest = None if rollout is None else rollout.latest
        if rollout is None or latest is None or latest.attempt_id != each.attempt.attempt_id:
            continue
        if latest.status != "preparing" or latest.superseded or latest.claims != claims:
            continue
        unit.remove_attempt(latest)
        rollout.attempts -= 1
        unit.move_rollout(rollout, "requeuing" if rollout.attempts else "queuing")


def hand_out_again(unit: Unit, state: AttemptState) -> AttemptedRollout:
    """The answer to a claim that is repeated. Whoever made it before does not take it back from now on."""
    if state.status == "preparing" and not state.superseded:
        unit.touch_attempt(state)
        state.claims += 1
    return state.rollout.to_attempted(state)


# -- workers ---------------------------------------------------------------------------------------------------------


def hear_worker(unit: Unit, worker: WorkerState) -> None:
    """A sign of life of a worker."""
    unit.touch_worker(worker)
    worker.last_heartbeat_time = unit.wall
    worker.lost = 0
    worker.lost_at = None
    if worker.lease_seconds is not None:
        worker.lost_at = unit.steady + worker.lease_seconds
        unit.remind(worker.lost_at)


def note_failure(unit: Unit, worker: WorkerState | None, state: AttemptState) -> None:
    """Remember how the last failed attempt of a worker ended."""
    if worker is None:
        return
    error = state.read_metadata().get("error")
    told = error if isinstance(error, dict) else {}
    unit.touch_worker(worker)
    worker.last_error = mapping.dump(
        {
            "rollout_id": state.rollout.rollout_id,
            "attempt_id": state.attempt_id,
            "type": told.get("type", state.status),
            "message": told.get("message", f"the attempt became {state.status}"),
            "time": unit.wall,
        },
        "last_error",
    )


def worker_of(unit: Unit, state: AttemptState) -> WorkerState | None:
    """Before the call changes anything."""
    return None if state.worker_id is None else unit.worker(state.worker_id)


# -- the clock -------------------------------------------------------------------------------------------------------


def expire(unit: Unit) -> float | None:
    """End the attempts whose time is up, and those of workers whose lease has run out; returns the next deadline on the
    steady clock."""
    now = unit.steady
    _expire_timeouts(unit, now)
    _expire_silent(unit, now)
    _expire_leases(unit, now)
    unit.write_first()
    nexts: list[Any] = [
        unit.connection.all(statement)[0][0]
        for statement in (statements.NEXT_TIMEOUT, statements.NEXT_SILENCE, statements.NEXT_LOST)
    ]
    return min((deadline for deadline in nexts if deadline is not None), default=None)


def _expire_timeouts(unit: Unit, now: float) -> None:
    for state in _due(unit, statements.TIMED_OUT, now):
        if state.timeout_at is not None and state.timeout_at <= now:
            _end(unit, state, "timeout", failure("Timeout", f"did not end {_within(state)}"))


def _expire_silent(unit: Unit, now: float) -> None:
    for state in _due(unit, statements.FELL_SILENT, now):
        if state.silent_at is not None and state.silent_at <= now:
            message = f"gave no sign of life for {state.silence or 0:g} s"
            _end(unit, state, "unresponsive", failure("Unresponsive", message))


def _due(unit: Unit, statement: statements.Statement, now: float) -> list[AttemptState]:
    unit.write_first()
    rows = unit.connection.all(statement, now, EXPIRE_AT_ONCE)
    unit.load({rollout_id for _, rollout_id in rows})
    found = [unit.rollout(rollout_id).tries.get(attempt_id) for attempt_id, rollout_id in rows]
    states = [state for state in found if state is not None]
    unit.load_workers({state.worker_id for state in states if state.worker_id is not None})
    return states


def _expire_leases(unit: Unit, now: float) -> None:
    unit.write_first()
    names = [row[0] for row in unit.connection.all(statements.LOST_WORKERS, now, EXPIRE_AT_ONCE)]
    unit.load_workers(names)
    unit.load({rollout_id for name in names for rollout_id in unit.worker(name).work.values()})
    for worker in map(unit.worker, names):
        if worker.lost_at is None or worker.lost_at > now:
            continue
        unit.touch_worker(worker)
        worker.lost_at, worker.lost = None, 1
        unit.settle()
        message = f"its worker {worker.worker_id!r} gave no sign of life for {worker.lease_seconds or 0:g} s"
        for attempt_id, rollout_id in list(worker.work.items()):
            state = unit.rollout(rollout_id).tries[attempt_id]
            _end(unit, state, "unresponsive", failure("WorkerLost", message))


def _within(state: AttemptState) -> str:
    with contextlib.suppress(StoreError):
        limit = state.rollout.read_config().timeout_seconds
        if limit is not None:
            return f"within {limit:g} s"
    return "in its time"


def _end(unit: Unit, state: AttemptState, status: str, error: dict[str, str]) -> None:
    """One that is damaged is let be, so that it holds up no other."""
    worker = worker_of(unit, state)
    try:
        move_attempt(unit, state, status, error)
        note_failure(unit, worker, state)
    except StoreError as refusal:
        unit.undo()
        logger.error("an attempt whose time is up cannot be ended: %s", refusal)
        unit.touch_attempt(state)
        state.timeout_at = state.silent_at = None
    unit.settle()


def failure(kind: str, message: str) -> dict[str, str]:
    return {"type": kind, "message": message, "traceback": ""}


def _named(statuses: frozenset[str]) -> str:
    return ", ".join(sorted(statuses)) or "nothing, it has ended"
