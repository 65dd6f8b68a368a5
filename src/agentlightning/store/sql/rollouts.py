"""Rollouts: the state machine by which they and their attempts change, the commands that queue and claim them, and the
heartbeats and deadlines of attempts and workers.

The tables of legal transitions are those of rollouts.py in the package. An attempt is *current* while it is the latest
one, is not superseded (by a cancel or a requeue) and its rollout has not finished. Only a current attempt changes its
rollout. Status changes here and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from msgspec import structs

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.rollouts import (
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    Attempt,
    AttemptedRollout,
    Rollout,
    is_private_queue,
)
from agentlightning.store import validation
from agentlightning.store.ids import claimed_id, first_of_claim, new_id
from agentlightning.store.paging import PageSizer
from agentlightning.store.sql import mapping
from agentlightning.store.sql.schema import OPEN, AttemptRow, RolloutRow, WorkerRow
from agentlightning.store.sql.tx import CACHE_BYTES, LOAD_BY_KEY, Tx
from agentlightning.store.sql.waiting import WAIT, Command, given
from agentlightning.store.types import Worker

logger = logging.getLogger(__name__)

FAILURES: Final = frozenset({"failed", "timeout", "unresponsive"})
EXPIRY_BATCH: Final = 200
"""Attempts ended in one transaction at most; the rest follow at the next tick."""

# -- attempts --------------------------------------------------------------------------------------------------------


def is_current(attempt: AttemptRow) -> bool:
    return not attempt.superseded and attempt.rollout.status not in FINISHED


def failure(kind: str, message: str) -> dict[str, str]:
    """The `error` in the metadata of an attempt that the store ended."""
    return {"type": kind, "message": message, "traceback": ""}


def set_attempt_status(tx: Tx, attempt: AttemptRow, status: str, error: dict[str, str] | None = None) -> None:
    """Change the status of a current attempt; its rollout follows."""
    old, rollout = attempt.status, attempt.rollout
    if status == old:
        return
    if status not in ATTEMPT_TRANSITIONS[old]:
        what = f"attempt {attempt.attempt_id!r} of rollout {rollout.rollout_id!r}"
        raise _illegal(what, old, status, ATTEMPT_TRANSITIONS)
    target = _rollout_status(attempt, status)
    if status == "timeout" and old == "unresponsive" and rollout.status == "requeuing":
        target = "requeuing"  # the loss of the attempt already earned a retry, and the timeout does not revoke it
    metadata = mapping.metadata_of(attempt) if old == "unresponsive" or error is not None else {}
    set_rollout_status(tx, rollout, target)
    _set_status(tx, attempt, status, keep_timeout=target not in FINISHED)
    if error is not None:
        _set_metadata(tx, attempt, {**metadata, "error": error})
    elif metadata.pop("error", None) is not None:  # a lost attempt that comes back has no error any more
        _set_metadata(tx, attempt, metadata)


def _set_status(tx: Tx, attempt: AttemptRow, status: str, keep_timeout: bool) -> None:
    """Change the status, and with it the end time and the deadlines."""
    is_open = status in OPEN
    silent_at = None
    if is_open and attempt.silence is not None:
        silent_at = tx.steady + attempt.silence
        tx.note_deadline(silent_at)
    keep_timeout = keep_timeout and (is_open or status == "unresponsive")
    timeout_at, end_time = attempt.timeout_at if keep_timeout else None, None if is_open else tx.wall
    tx.set(attempt, status=status, silent_at=silent_at, timeout_at=timeout_at, end_time=end_time)


def _rollout_status(attempt: AttemptRow, status: str) -> str:
    """The status of a rollout whose latest attempt is this one, with this status."""
    if status in ("preparing", "running", "succeeded"):
        return status
    config = mapping.config_of(attempt.rollout)
    retry = status in config.retry_condition and attempt.sequence_id < config.max_attempts
    return "requeuing" if retry else "failed"


def _set_metadata(tx: Tx, attempt: AttemptRow, metadata: Mapping[str, Any]) -> None:
    tx.set(attempt, metadata=validation.to_json(metadata, "attempt metadata"))


def close_attempts(tx: Tx, rollout: RolloutRow, reason: str) -> None:
    """Supersede every attempt of a rollout. One that is open becomes unresponsive."""
    latest = rollout.latest
    if latest is not None and latest.status in OPEN:
        error = failure("Superseded", reason)
        _set_metadata(tx, latest, {**mapping.metadata_of(latest), "error": error})
        _set_status(tx, latest, "unresponsive", keep_timeout=False)
    _fence(tx, rollout)


def _fence(tx: Tx, rollout: RolloutRow) -> None:
    """Mark the latest attempt as superseded; each claim has marked those before it."""
    latest = rollout.latest
    if latest is not None and not latest.superseded:
        tx.set(latest, superseded=1, timeout_at=None, silent_at=None)


# -- status of rollouts ----------------------------------------------------------------------------------------------


def set_rollout_status(tx: Tx, rollout: RolloutRow, status: str) -> None:
    """Change the status of a rollout along the table. A rollout that waits for a retry of a lost attempt counts as
    claimed again when that attempt comes back."""
    old = rollout.status
    if status == old:
        return
    allowed = ROLLOUT_TRANSITIONS[old]
    if old == "requeuing" and status in ("running", "succeeded"):
        allowed = ROLLOUT_TRANSITIONS["preparing"]
    if status not in allowed:
        raise _illegal(f"rollout {rollout.rollout_id!r}", old, status, ROLLOUT_TRANSITIONS)
    _apply(tx, rollout, status)


def _apply(tx: Tx, rollout: RolloutRow, status: str, **changes: Any) -> None:
    """Change the status, and note who may be waiting for that."""
    old = rollout.status
    end_time = None
    if status in FINISHED:
        end_time = tx.wall
        tx.finished.add(rollout.rollout_id)
    tx.set(rollout, status=status, end_time=end_time, **changes)
    if status in WAITING and old not in WAITING:
        tx.note_waiting(rollout)
    tx.queued |= old in OPEN and status not in OPEN


def _illegal(what: str, old: str, new: str, transitions: Mapping[Any, frozenset[Any]]) -> ConflictError:
    allowed = ", ".join(sorted(transitions[old])) or "nothing, it has ended"
    return ConflictError(f"{what} is {old!r} and cannot become {new!r}; from there it may become: {allowed}")


def requeue(tx: Tx, rollout_id: str, reason: str) -> Rollout:
    rollout = tx.rollout(rollout_id)
    if rollout.status not in WAITING:
        set_rollout_status(tx, rollout, "requeuing")
        close_attempts(tx, rollout, reason)
    return mapping.to_rollout(rollout)


def cancel(tx: Tx, rollout_id: str) -> Rollout:
    rollout = tx.rollout(rollout_id)
    if rollout.status not in FINISHED:
        _cancel(tx, rollout)
    return mapping.to_rollout(rollout)


def _cancel(tx: Tx, rollout: RolloutRow) -> None:
    set_rollout_status(tx, rollout, "cancelled")
    close_attempts(tx, rollout, "the rollout was cancelled")


def update(tx: Tx, rollout_id: str, status: str | None = None, **changes: Any) -> Rollout:
    """changes: new values of columns."""
    rollout = tx.rollout(rollout_id)
    if isinstance(changes.get("resources_id"), str):
        tx.check_resources(changes["resources_id"])
    if status is not None:
        _update_status(tx, rollout, status)
    if changes:
        tx.set(rollout, **changes)
    return mapping.to_rollout(rollout)


def _update_status(tx: Tx, rollout: RolloutRow, status: str) -> None:
    """Set the status that `update_rollout` was given."""
    old = rollout.status
    if status == old:
        return
    if status == "requeuing" and old not in WAITING:
        requeue(tx, rollout.rollout_id, "update_rollout set it to requeuing")
        return
    if status == "cancelled":
        _cancel(tx, rollout)
        return
    if status in ("preparing", "queuing"):
        raise ConflictError(
            f"rollout {rollout.rollout_id!r} cannot be set to {status!r}: use dequeue_rollout or start_attempt to "
            "claim it, requeue_rollout to queue it again"
        )
    if status not in ROLLOUT_TRANSITIONS[old]:
        raise _illegal(f"rollout {rollout.rollout_id!r}", old, status, ROLLOUT_TRANSITIONS)
    set_rollout_status(tx, rollout, status)
    latest = rollout.latest
    if latest is not None and not latest.superseded and latest.status in OPEN:  # it follows, and is not retried
        _set_status(tx, latest, status, keep_timeout=status not in FINISHED)
    elif status in FINISHED:
        _fence(tx, rollout)


# -- damaged rollouts ------------------------------------------------------------------------------------------------


def give_up(tx: Tx, rollout: RolloutRow) -> None:
    """Cancel a rollout whose row is damaged, whatever its status."""
    _fence(tx, rollout)
    _apply(tx, rollout, "cancelled")


def set_aside(tx: Tx, rollout: RolloutRow, error: StoreError) -> None:
    """Fail a rollout that cannot be read, so that it holds up no other. Its latest attempt has the reason, and what was
    replaced in its row."""
    logger.error("a rollout is set aside as failed: %s", error)
    changes, replaced = mapping.repairs(rollout)
    metadata = {"error": failure("Damaged", str(error)), "damaged": replaced}
    latest = rollout.latest
    if latest is not None and latest.status in OPEN:
        _set_metadata(tx, latest, metadata)
        _set_status(tx, latest, "failed", keep_timeout=False)
    else:
        changes["attempt_count"] += 1
        text = validation.to_json(metadata, "attempt metadata")
        number = changes["attempt_count"]
        tx.add_attempt(
            AttemptRow(
                *(0, rollout.key, number, new_id("at"), "failed", tx.wall, tx.wall),
                metadata=text,
                rollout=rollout,
                stored=False,
            )
        )
    _apply(tx, rollout, "failed", **changes)


# -- new rollouts ----------------------------------------------------------------------------------------------------

New = tuple[Rollout, RolloutRow]


def enqueue(tx: Tx, new: Sequence[New], with_id: frozenset[str]) -> list[Rollout]:
    """Queue rollouts. with_id: the ids chosen by the caller; one that exists already is returned unchanged."""
    for resources_id in {row.resources_id for _, row in new}:
        tx.check_resources(resources_id)
    results: list[Rollout] = []
    for rollout, row in new:
        existing = tx.find_rollout(row.rollout_id) if row.rollout_id in with_id else None
        if existing is None:
            add(tx, row)
        results.append(rollout if existing is None else mapping.to_rollout(existing))
    return results


def add(tx: Tx, row: RolloutRow) -> RolloutRow:
    """Add a copy of a row, as a command may run again."""
    added = structs.replace(row, attempts={})
    tx.add_rollout(added)
    tx.name_queue(added.queue)
    if added.status in WAITING:
        tx.note_waiting(added)
    return added


def start(tx: Tx, new: New, has_id: bool, worker_id: str | None, claim_id: str | None) -> AttemptedRollout:
    """Create a rollout and claim it. has_id: the caller chose its id."""
    _, row = new
    tx.check_resources(row.resources_id)
    before = claimed_before(tx, claim_id, 1)
    if not before and has_id and tx.find_rollout(row.rollout_id) is not None:
        raise ConflictError(f"rollout {row.rollout_id!r} exists already; use start_attempt")
    return mapping.to_attempted(before[0] if before else claim(tx, add(tx, row), worker_id, first_of_claim(claim_id)))


def start_attempt(
    tx: Tx, rollout_id: str, worker_id: str | None = None, claim_id: str | None = None
) -> AttemptedRollout:
    before = claimed_before(tx, claim_id, 1)
    attempt = before[0] if before else claim(tx, tx.rollout(rollout_id), worker_id, first_of_claim(claim_id))
    return mapping.to_attempted(attempt)


# -- claims ----------------------------------------------------------------------------------------------------------


def claim(tx: Tx, rollout: RolloutRow, worker_id: str | None, attempt_id: str | None = None) -> AttemptRow:
    """Start the next attempt of a rollout."""
    allowed = ROLLOUT_TRANSITIONS[rollout.status]
    if "preparing" not in allowed and "requeuing" not in allowed:
        raise ConflictError(f"rollout {rollout.rollout_id!r} has {rollout.status}; enqueue the task as a new rollout")
    worker = None if worker_id is None else tx.worker(worker_id)
    number = rollout.attempt_count + 1
    config = mapping.DEFAULT_CONFIG if rollout.config is None else mapping.config_of(rollout)
    if rollout.attempt_count:
        close_attempts(tx, rollout, f"attempt {number} was started")
    timeout, silence = config.timeout_seconds, config.unresponsive_seconds
    timeout_at = None if timeout is None else tx.steady + timeout
    silent_at = None if silence is None else tx.steady + silence
    _apply(tx, rollout, "preparing", attempt_count=number)
    attempt = tx.add_attempt(
        AttemptRow(
            *(0, rollout.key, number, attempt_id or new_id("at"), "preparing", tx.wall),
            worker_id=worker_id,
            timeout_at=timeout_at,
            silence=silence,
            silent_at=silent_at,
            rollout=rollout,
            stored=False,
        )
    )
    for deadline in (timeout_at, silent_at):
        if deadline is not None:
            tx.note_deadline(deadline)
    if worker is not None:
        beat_worker(tx, worker)
    return attempt


def beat_worker(tx: Tx, worker: WorkerRow, **changes: Any) -> None:
    """Record a heartbeat of a worker."""
    lost_at = None
    lease = changes.get("lease_seconds", worker.lease_seconds)
    if lease is not None:
        lost_at = tx.steady + lease
        tx.note_deadline(lost_at)
    tx.set(worker, last_heartbeat_time=tx.wall, lost=0, lost_at=lost_at, **changes)


def claimed_before(tx: Tx, claim_id: str | None, limit: int) -> list[AttemptRow]:
    """What an earlier command with the same claim_id claimed."""
    found: list[AttemptRow] = []
    for index in range(0 if claim_id is None else limit):
        attempt = tx.find_attempt(claimed_id(claim_id or "", index))
        if attempt is None:
            break
        found.append(attempt)
    return found


QueueNames = tuple[str, ...] | None
"""The queues that a claim takes from; None for every one that is not private."""


class ClaimRollouts(Command):
    """Claims waiting rollouts. Waits while there is none, behind the claims that already wait."""

    deadline = math.inf
    """Until when it may wait, on time.monotonic."""
    waited = False

    def __init__(
        self,
        claims: Claims,
        name: str,
        limit: int,
        worker_id: str | None,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> None:
        if limit < 0:
            raise ConfigError(f"limit={limit} is negative; use 0 or more")
        super().__init__(name, self._claim, (), given(worker_id), given(first_of_claim(claim_id)))
        self.queues: QueueNames = None if queues is None else tuple(dict.fromkeys(queues))
        self.limit, self._claims, self._worker_id, self._claim_id = limit, claims, worker_id, claim_id
        self._answer_counts: list[int] = []
        """For each attempt of the result: how often its claim had been answered by then."""

    def _claim(self, tx: Tx) -> Any:
        """The attempts, or WAIT. A claim with a claim_id that was answered before gets the same ones, and whoever made
        that no longer releases them."""
        before = claimed_before(tx, self._claim_id, self.limit)
        for attempt in before:
            if attempt.status == "preparing" and not attempt.superseded:
                tx.set(attempt, claims=attempt.claims + 1)
        self._answer_counts = [attempt.claims for attempt in before]
        if before:
            return [mapping.to_attempted(attempt) for attempt in before]
        if self.waited and self._worker_id is not None and tx.worker(self._worker_id).lost:
            return []  # its lease ran out while it waited: it would claim what that has just given back
        claimed: list[AttemptedRollout] = []
        for row in self._claims.waiting(self.queues):
            name = None if self._claim_id is None else claimed_id(self._claim_id, len(claimed))
            try:
                rollout = mapping.to_rollout(row)
            except StoreError as error:
                set_aside(tx, row, error)
                continue
            claimed.append(mapping.with_attempt(rollout, claim(tx, row, self._worker_id, name)))
            if len(claimed) == self.limit:
                break
        self._answer_counts = [1] * len(claimed)
        return claimed or WAIT

    def undo(self, tx: Tx, result: Sequence[AttemptedRollout]) -> None:
        """Revert a committed result whose caller is gone, unless the claim was answered again meanwhile, to a caller
        that repeated it: otherwise nobody has seen these attempts."""
        for each, claims in zip(result, self._answer_counts, strict=True):
            rollout = tx.find_rollout(each.rollout_id)
            latest = None if rollout is None else rollout.latest
            if rollout is None or latest is None or latest.attempt_id != each.attempt.attempt_id:
                continue
            if latest.status == "preparing" and not latest.superseded and latest.claims == claims:
                tx.remove_attempt(latest)
                number = rollout.attempt_count - 1
                _apply(tx, rollout, "requeuing" if number else "queuing", attempt_count=number)


READ_AHEAD: Final = 64
"""Waiting rollouts of a queue that are read at once, where they stay in memory; fewer where they are large."""
READ_AHEAD_BYTES: Final = CACHE_BYTES // 8


class Claims:
    """The rollouts that can be claimed: by priority, then by order of creation, among the queues below their limit.

    In memory is the head of each queue: its first waiting rollouts, or all of them. What is no longer waiting is left
    out when it comes first. Where other servers write, heads are read in each transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self._generation = -1
        self._wanted = 0
        self._limits: dict[str, float] = {}
        self._open: Counter[str] = Counter()
        """By queue that has a limit: its rollouts that are claimed and unfinished."""
        self._heads: defaultdict[str, list[RolloutRow]] = defaultdict(list)
        self._complete: set[str] = set()
        """Queues of which all is in memory that waits."""
        self._ahead = PageSizer(READ_AHEAD_BYTES, READ_AHEAD)

    def begin(self, wanted: int) -> None:
        """wanted: how many rollouts the claims of this transaction take at most. On a shared database, lock the queues
        that have a limit."""
        tx = self._tx
        self._wanted = wanted
        self._open.clear()
        if self._generation != tx.generation:
            self._generation = tx.generation
            self._heads.clear()
            self._complete.clear()
            queues = dict(tx.all("SELECT name, max_open FROM queues"))
            self._limits = dict.fromkeys(queues, math.inf)
            if any(limit is not None for limit in queues.values()):
                self._limits |= dict(tx.all(_LIMITED))

    def waiting(self, names: QueueNames) -> Iterator[RolloutRow]:
        """The rollouts of the queues, the next one first. The status of each is changed before the next is asked
        for."""
        tx = self._tx
        new, tx.waiting = tx.waiting, []
        for row in new:
            self._limits.setdefault(row.queue, math.inf)
            head = self._heads[row.queue]
            if row.queue in self._complete or (head and _claiming_order(row) < _claiming_order(head[-1])):
                insort(head, row, key=_claiming_order)
        if names is None:
            queues = [name for name in self._limits if not is_private_queue(name)]
        else:
            queues = [name for name in names if name in self._limits]
        limited = [name for name in queues if self._limits[name] < math.inf and name not in self._open]
        if limited:
            self._open.update({**dict.fromkeys(limited, 0), **dict(tx.all(_COUNT_OPEN, limited))})
        while ready := self._first(queues):
            row = min(ready, key=_claiming_order)
            self._open[row.queue] += 1
            yield row
            if row.status not in OPEN:
                self._open[row.queue] -= 1

    def _first(self, queues: list[str]) -> list[RolloutRow]:
        """The first waiting rollout of each queue that is below its limit."""
        for name in queues:
            head = self._heads[name]
            while head and head[0].status not in WAITING:
                del head[0]
        self._read([name for name in queues if not self._heads[name] and name not in self._complete])
        return [self._heads[name][0] for name in queues if self._heads[name] and self._open[name] < self._limits[name]]

    def _read(self, names: list[str]) -> None:
        if not names:
            return
        tx = self._tx
        size = max(self._wanted, 1 if tx.database.shared else self._ahead.items // len(names))
        found = tx.all(tx.database.next_waiting, size, names)
        rows = tx.load_rows(LOAD_BY_KEY, [key for _, key in found]) if found else []
        if rows:
            self._ahead.record(len(rows), sum([len(row.input) + len(row.metadata) for row in rows]))
        for row in sorted(rows, key=_claiming_order):
            if isinstance(row.rollout_id, str):  # else it is damaged
                self._heads[row.queue].append(row)
        counts = Counter(name for name, _ in found)
        self._complete.update(name for name in names if counts[name] < size)


def _claiming_order(row: RolloutRow) -> tuple[int, int]:
    return -row.priority, row.key


_LIMITED: Final = "SELECT name, max_open FROM queues WHERE max_open IS NOT NULL ORDER BY name FOR UPDATE"
_COUNT_OPEN: Final = (
    "SELECT queue, count(*) FROM rollouts WHERE queue = ANY (?) AND status IN ('preparing', 'running') GROUP BY queue"
)
NEXT_WAITING: Final = (
    "(SELECT {} FROM rollouts w WHERE w.queue = q.name AND w.status IN ('queuing', 'requeuing') "
    "ORDER BY w.priority DESC, w.key LIMIT ?{})"
)
"""The next rollouts of the queue `q`."""


# -- heartbeats and updates of attempts ------------------------------------------------------------------------------


def beat(tx: Tx, attempt: AttemptRow, time: float, **changes: Any) -> None:
    """Record a heartbeat, with other changes. A current attempt that was preparing or unresponsive is running."""
    if attempt.status in ("preparing", "unresponsive") and is_current(attempt):
        set_attempt_status(tx, attempt, "running")
    if attempt.silence is not None and attempt.status in OPEN:
        changes["silent_at"] = tx.steady + attempt.silence
    tx.set(attempt, last_heartbeat_time=time, **changes)


def update_attempt(
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
    if last_heartbeat_time is not None:
        beat(tx, row, last_heartbeat_time)
    if status is not None:
        set_attempt_status(tx, row, status)
    if metadata is not None:
        merged = metadata if row.metadata == "{}" else {**mapping.metadata_of(row), **metadata}
        tx.set(row, metadata=validation.to_json(merged, "metadata"))
    if worker_id is not None:
        tx.set(row, worker_id=worker_id)
        beat_worker(tx, tx.worker(worker_id))
    if failed:
        record_failure(tx, row)
    return mapping.to_attempt(row, rollout_id)


def record_failure(tx: Tx, attempt: AttemptRow) -> None:
    """Set the last error of its worker to that of an attempt."""
    if attempt.worker_id is None:
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
    tx.set(tx.worker(attempt.worker_id), last_error=validation.to_json(last_error, "last_error"))


def update_worker(tx: Tx, worker_id: str, **changes: Any) -> Worker:
    """The heartbeat of a worker, which keeps its open attempts alive. changes: new values of columns."""
    worker = tx.worker(worker_id)
    beat_worker(tx, worker, **changes)
    attempts = _open_attempts(tx, worker)
    for attempt in attempts:
        silent_at = attempt.silent_at if attempt.silence is None else tx.steady + attempt.silence
        tx.set(attempt, last_heartbeat_time=tx.wall, silent_at=silent_at)
    current = (attempts[-1].rollout.rollout_id, attempts[-1].attempt_id) if attempts else None
    return mapping.to_worker(worker, current, len(attempts))


def _open_attempts(tx: Tx, worker: WorkerRow) -> list[AttemptRow]:
    """Those of a worker that are open still, the newest last."""
    tx.load_open_attempts([worker.worker_id])
    ids = tx.open_attempts[worker.worker_id]
    tx.load(rollout_id for rollout_id, _ in ids)
    rollouts = [(attempt_id, tx.rollouts[rollout_id]) for rollout_id, attempt_id in ids]
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
    tx.load_open_attempts(names)
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
    try:
        set_attempt_status(tx, attempt, status, error)
        record_failure(tx, attempt)
    except StoreError as refusal:  # before anything was changed
        tx.set(attempt, timeout_at=None, silent_at=None)
        if is_current(attempt):
            set_aside(tx, attempt.rollout, refusal)
