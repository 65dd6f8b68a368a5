"""How rollouts and attempts change status: the tables of rollouts.py, applied within a transaction.

An attempt *speaks* for its rollout while it is the latest one, has not been fenced off (by a cancel or a requeue) and
the rollout has not finished. Only then does what it does move the rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.rollouts import (
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    Attempt,
    AttemptedRollout,
    Rollout,
)
from agentlightning.store import codec, statements
from agentlightning.store.base import Unset
from agentlightning.store.codec import Row
from agentlightning.store.engine import Transaction
from agentlightning.store.ids import new_id

OPEN: Final = frozenset({"preparing", "running"})
EXPIRE_AT_ONCE: Final = 200
"""Attempts ended in one transaction at most; the rest follow at the next tick."""


@dataclass(slots=True)
class State:
    """An attempt and what matters of its rollout: one row of `statements.ATTEMPT` and `statements.STATE`."""

    attempt_id: str
    sequence_id: int
    status: str
    start_time: float
    end_time: float | None
    worker_id: str | None
    last_heartbeat_time: float | None
    metadata: str
    key: int
    superseded: int
    last_span: int
    timeout_at: float | None
    silence: float | None
    rollout_key: int
    rollout_id: str
    rollout_status: str
    config: str | None
    attempts: int
    rollout_end_time: float | None

    @property
    def speaks(self) -> bool:
        return not self.superseded and self.rollout_status not in FINISHED

    def to_attempt(self) -> Attempt:
        row = (
            self.attempt_id,
            self.sequence_id,
            self.status,
            self.start_time,
            self.end_time,
            self.worker_id,
            self.last_heartbeat_time,
            self.metadata,
        )
        return codec.to_attempt(self.rollout_id, row)


# -- finding ---------------------------------------------------------------------------------------------------------


def find_rollout(transaction: Transaction, rollout_id: str) -> Row:
    """Its row, in the columns of `statements.ROLLOUT`."""
    row = transaction.one(statements.FIND_ROLLOUT, rollout_id)
    if row is None:
        raise NotFoundError(f"no rollout {rollout_id!r} in this store")
    return row


def find_attempt(transaction: Transaction, rollout_id: str, attempt_id: str) -> State:
    """The attempt and its rollout; "latest" is the latest one."""
    if attempt_id == "latest":
        row = transaction.one(statements.LATEST_ATTEMPT, rollout_id)
    else:
        row = transaction.one(statements.FIND_ATTEMPT, attempt_id, rollout_id)
    if row is None:
        find_rollout(transaction, rollout_id)
        raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
    return State(*row)


def latest_attempt(transaction: Transaction, rollout_id: str) -> State | None:
    row = transaction.one(statements.LATEST_ATTEMPT, rollout_id)
    return None if row is None else State(*row)


# -- making and describing ------------------------------------------------------------------------------------------


def check_resources(transaction: Transaction, resources_ids: set[str | None]) -> None:
    """Raises NotFoundError for the first that was never published. None stands for the latest."""
    for resources_id in resources_ids:
        if resources_id is not None and transaction.one(statements.KNOWN_RESOURCES, resources_id) is None:
            raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")


def insert_once(transaction: Transaction, rollout: Rollout, row: Row) -> Rollout:
    """The rollout, or the one that has its id already."""
    if transaction.run(statements.INSERT_ROLLOUT_ONCE, *row):
        return rollout
    return codec.to_rollout(find_rollout(transaction, rollout.rollout_id))


def describe(transaction: Transaction, state: State, worker_id: str | Unset, metadata: dict[str, Any] | Unset) -> None:
    """Change who runs an attempt, and add to its metadata."""
    if not isinstance(worker_id, Unset):
        state.worker_id = worker_id
    if not isinstance(metadata, Unset):
        state.metadata = codec.dump({**codec.load_dict(state.metadata), **metadata}, "metadata")
    transaction.run(statements.CHANGE_ATTEMPT, state.worker_id, state.metadata, state.key)


# -- attempts --------------------------------------------------------------------------------------------------------


def move_attempt(transaction: Transaction, state: State, status: str, error: dict[str, str] | None = None) -> None:
    """Change the status of an attempt that speaks; its rollout follows."""
    if status == state.status:
        return
    if status not in ATTEMPT_TRANSITIONS[state.status]:
        raise ConflictError(
            f"attempt {state.attempt_id!r} of rollout {state.rollout_id!r} is {state.status!r} and cannot become "
            f"{status!r}; from there it may become: {_named(ATTEMPT_TRANSITIONS[state.status])}"
        )
    if state.status == "unresponsive":
        _forget_error(state)
    if error is not None:
        state.metadata = codec.dump({**codec.load_dict(state.metadata), "error": error}, "attempt metadata")
    state.status = status
    target = _rollout_status(state)
    _write_attempt(transaction, state, keep_timeout=target not in FINISHED)
    move_rollout(transaction, state, target)


def _write_attempt(transaction: Transaction, state: State, keep_timeout: bool) -> None:
    is_open = state.status in OPEN
    silent_at = None
    if is_open and state.silence is not None:
        silent_at = transaction.clock.steady() + state.silence
        transaction.remind(silent_at)
    if not keep_timeout or not (is_open or state.status == "unresponsive"):
        state.timeout_at = None
    state.end_time = None if is_open else transaction.clock.wall()
    transaction.run(
        statements.MOVE_ATTEMPT, state.status, state.end_time, state.metadata, state.timeout_at, silent_at, state.key
    )


def _rollout_status(state: State) -> str:
    """What a rollout is when its latest attempt is in `state`."""
    if state.status in ("preparing", "running", "succeeded"):
        return state.status
    config = codec.load_config(state.config)
    retry = state.status in config.retry_condition and state.sequence_id < config.max_attempts
    return "requeuing" if retry else "failed"


def _forget_error(state: State) -> None:
    """It was thought lost and is not."""
    metadata = codec.load_dict(state.metadata)
    metadata.pop("error", None)
    state.metadata = codec.dump(metadata, "attempt metadata")


def hear(transaction: Transaction, state: State, time: float) -> None:
    """A sign of life: what was preparing or thought lost is running."""
    if state.speaks and state.status in ("preparing", "unresponsive"):
        move_attempt(transaction, state, "running")
    state.last_heartbeat_time = time
    transaction.run(statements.SIGN_OF_LIFE, time, state.last_span, transaction.clock.steady(), state.key)


# -- rollouts --------------------------------------------------------------------------------------------------------


def move_rollout(transaction: Transaction, state: State, status: str) -> None:
    """Change the status of a rollout, along the table. What was queued again for a lost attempt is claimed anew when
    the attempt comes back."""
    old = state.rollout_status
    if status == old:
        return
    steps = ROLLOUT_TRANSITIONS[old]
    if old == "requeuing" and status in ("running", "succeeded"):
        steps = ROLLOUT_TRANSITIONS["preparing"]
    if status not in steps:
        raise _illegal(state.rollout_id, old, status)
    state.rollout_status = status
    state.rollout_end_time = transaction.clock.wall() if status in FINISHED else None
    write_rollout(transaction, state)


def _illegal(rollout_id: str, old: str, new: str) -> ConflictError:
    return ConflictError(
        f"rollout {rollout_id!r} is {old!r} and cannot become {new!r}; from there it may become: "
        f"{_named(ROLLOUT_TRANSITIONS[old])}"
    )


def write_rollout(transaction: Transaction, state: State) -> None:
    transaction.run(
        statements.MOVE_ROLLOUT, state.rollout_status, state.rollout_end_time, state.attempts, state.rollout_key
    )
    if state.rollout_status in FINISHED:
        transaction.finished.add(state.rollout_id)
    elif state.rollout_status in WAITING:
        transaction.queued = True


def set_status(transaction: Transaction, row: Row, status: str) -> None:
    """What `update_rollout(status=...)` asks for."""
    rollout_id, old = row[1], row[5]
    if status == old:
        return
    if status == "requeuing" and old not in WAITING:
        requeue(transaction, row, "update_rollout set it to requeuing")
        return
    if status == "cancelled":
        cancel(transaction, row)
        return
    if status in ("preparing", "queuing"):
        raise ConflictError(
            f"rollout {rollout_id!r} cannot be set to {status!r}: use dequeue_rollout or start_attempt to claim it, "
            "requeue_rollout to queue it again"
        )
    if status not in ROLLOUT_TRANSITIONS[old]:
        raise _illegal(rollout_id, old, status)
    _finish_by_hand(transaction, row, status)


def _finish_by_hand(transaction: Transaction, row: Row, status: str) -> None:
    """Running, succeeded or failed, said of the rollout: its open attempt shares the fate, and is not tried again."""
    state = latest_attempt(transaction, row[1]) or _without_attempt(row)
    move_rollout(transaction, state, status)
    if state.attempts and not state.superseded and state.status in OPEN:
        state.status = status
        _write_attempt(transaction, state, keep_timeout=status not in FINISHED)
    elif status in FINISHED:
        transaction.run(statements.FENCE, state.rollout_key)


def requeue(transaction: Transaction, row: Row, reason: str) -> None:
    """Queue a claimed or finished rollout again; its attempts are fenced off."""
    state = close(transaction, row, reason)
    move_rollout(transaction, state, "requeuing")


def cancel(transaction: Transaction, row: Row) -> None:
    """Cancel a rollout that has not finished; its attempts are fenced off."""
    state = close(transaction, row, "the rollout was cancelled")
    move_rollout(transaction, state, "cancelled")


def close(transaction: Transaction, row: Row, reason: str) -> State:
    """Fence off every attempt of a rollout. One still open becomes unresponsive."""
    state = latest_attempt(transaction, row[1]) if row[10] else None
    if state is None:
        return _without_attempt(row)
    if state.status in OPEN:
        error = _error("Superseded", reason)
        state.metadata = codec.dump({**codec.load_dict(state.metadata), "error": error}, "attempt metadata")
        state.status = "unresponsive"
        _write_attempt(transaction, state, keep_timeout=False)
    transaction.run(statements.FENCE, state.rollout_key)
    return state


def _without_attempt(row: Row) -> State:
    """The state of a rollout that was never claimed; what is said of its attempt means nothing."""
    key, rollout_id, _, _, _, status, start_time, end_time, config, _, attempts = row
    return State(
        "", 0, "preparing", start_time, None, None, None, "{}", 0, 0, 0, None, None,
        key, rollout_id, status, config, attempts, end_time,
    )  # fmt: skip


# -- claiming --------------------------------------------------------------------------------------------------------


def claim(transaction: Transaction, row: Row, worker_id: str | None) -> AttemptedRollout:
    """Start the next attempt of the rollout of `row`, which may be claimed."""
    key, rollout_id, old, attempts = row[0], row[1], row[5], row[10]
    if "preparing" not in ROLLOUT_TRANSITIONS[old] and "requeuing" not in ROLLOUT_TRANSITIONS[old]:
        raise ConflictError(f"rollout {rollout_id!r} has {old}; enqueue the task as a new rollout")
    if attempts:
        close(transaction, row, f"attempt {attempts + 1} was started")
    transaction.run(statements.MOVE_ROLLOUT, "preparing", None, attempts + 1, key)
    rollout = codec.to_rollout(row)
    attempt = _start(transaction, key, rollout, attempts + 1, worker_id)
    return AttemptedRollout(
        rollout_id=rollout_id,
        input=rollout.input,
        start_time=rollout.start_time,
        status="preparing",
        mode=rollout.mode,
        resources_id=rollout.resources_id,
        config=rollout.config,
        metadata=rollout.metadata,
        attempt=attempt,
    )


def _start(
    transaction: Transaction, rollout_key: int, rollout: Rollout, sequence_id: int, worker_id: str | None
) -> Attempt:
    config = rollout.config
    wall, steady = transaction.clock.wall(), transaction.clock.steady()
    attempt_id = new_id("at")
    timeout_at = None if config.timeout_seconds is None else steady + config.timeout_seconds
    silent_at = None if config.unresponsive_seconds is None else steady + config.unresponsive_seconds
    transaction.run(
        statements.INSERT_ATTEMPT,
        *(rollout_key, sequence_id, attempt_id, "preparing", wall, None, worker_id, None, "{}", 0, 0),
        *(timeout_at, config.unresponsive_seconds, silent_at),
    )
    for deadline in (timeout_at, silent_at):
        if deadline is not None:
            transaction.remind(deadline)
    if worker_id is not None:
        transaction.run(statements.HEAR_WORKER, worker_id, wall, "{}")
    return Attempt(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=wall,
        worker_id=worker_id,
    )


def unclaim(claimed: list[AttemptedRollout], transaction: Transaction) -> None:
    """Put back what was claimed for a caller that is gone: nobody has seen these attempts."""
    for rollout in claimed:
        state = latest_attempt(transaction, rollout.rollout_id)
        if state is None or state.attempt_id != rollout.attempt.attempt_id or state.status != "preparing":
            continue
        transaction.run(statements.DELETE_ATTEMPT, state.key)
        state.attempts -= 1
        state.rollout_status = "requeuing" if state.attempts else "queuing"
        write_rollout(transaction, state)


# -- the clock -------------------------------------------------------------------------------------------------------


def expire(transaction: Transaction) -> float | None:
    """End the attempts whose time is up; returns the next deadline on the steady clock."""
    now = transaction.clock.steady()
    for row in transaction.all(statements.TIMED_OUT, now, EXPIRE_AT_ONCE):
        state = State(*row)
        limit = codec.load_config(state.config).timeout_seconds
        move_attempt(transaction, state, "timeout", _error("Timeout", f"did not end within {limit:g} s"))
    for row in transaction.all(statements.FELL_SILENT, now, EXPIRE_AT_ONCE):
        state = State(*row)
        message = f"gave no sign of life for {state.silence:g} s"
        move_attempt(transaction, state, "unresponsive", _error("Unresponsive", message))
    nexts: list[Any] = [
        transaction.one(statement)[0] for statement in (statements.NEXT_TIMEOUT, statements.NEXT_SILENCE)
    ]
    return min((deadline for deadline in nexts if deadline is not None), default=None)


def _error(kind: str, message: str) -> dict[str, str]:
    return {"type": kind, "message": message, "traceback": ""}


def _named(statuses: frozenset[str]) -> str:
    return ", ".join(sorted(statuses)) or "nothing, it has ended"
