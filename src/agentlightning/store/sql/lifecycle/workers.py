"""What is known of the places where agents run: their heartbeats and leases, and the attempts they have in hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.store.base import Worker
from agentlightning.store.sql.execution.unit_of_work import Unit
from agentlightning.store.sql.lifecycle import transitions
from agentlightning.store.sql.sort_order import Order
from agentlightning.store.sql.tables import mapping, statements
from agentlightning.store.sql.tables.backend import Connection
from agentlightning.store.sql.tables.mapping import Row
from agentlightning.store.sql.tables.rows import OPEN, WorkerState, worker_row


def heartbeat(unit: Unit, worker_id: str, stats: str | None, lease_seconds: float | None) -> Worker:
    """`update_worker`. stats is JSON."""
    worker = unit.worker(worker_id)
    unit.load(set(worker.work.values()))
    unit.touch_worker(worker)
    if stats is not None:
        worker.stats = stats
    if lease_seconds is not None:
        worker.lease_seconds = lease_seconds
    transitions.hear_worker(unit, worker)
    for attempt_id, rollout_id in worker.work.items():
        state = unit.rollout(rollout_id).tries[attempt_id]
        if state.status in OPEN:
            unit.touch_attempt(state)
            state.last_heartbeat_time = unit.wall
            if state.silence is not None:
                state.silent_at = unit.steady + state.silence
    return _of_state(worker)


def _of_state(worker: WorkerState) -> Worker:
    latest = next(reversed(worker.work), None)
    in_hand = None if latest is None else (worker.work[latest], latest)
    return _to_worker(worker_row(worker), in_hand, len(worker.work))


def find(connection: Connection, worker_id: str) -> Worker | None:
    found = _with_work(connection, connection.all(statements.FIND_WORKER, worker_id))
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class WorkerFilters:
    """What `query_workers` filters by. Raises ConfigError for what no filter can be."""

    status_in: Sequence[str] | None = None
    worker_id_contains: str | None = None
    any_of: bool = False
    """One of them is enough."""

    def __post_init__(self) -> None:
        mapping.check_texts(self.status_in, "status_in")
        if self.worker_id_contains is not None:
            mapping.check_text(self.worker_id_contains, "worker_id_contains")

    @property
    def given(self) -> bool:
        return self.status_in is not None or self.worker_id_contains is not None

    def fits(self, worker: Worker) -> bool:
        tests: list[bool] = []
        if self.status_in is not None:
            tests.append(worker.status in self.status_in)
        if self.worker_id_contains is not None:
            tests.append(self.worker_id_contains in worker.worker_id)
        return not tests or (any(tests) if self.any_of else all(tests))


def page(
    connection: Connection, filters: WorkerFilters, order: Order, after: str | None, limit: int, offset: int
) -> list[Worker]:
    """In order of first appearance, or sorted. A status follows from several tables, so filters are applied here."""
    key = -1
    if after is not None:
        rows = connection.all(statements.WORKER_KEY, after)
        if not rows:
            raise NotFoundError(f"no worker {after!r} in this store to go on after")
        key = rows[0][0]
    if order.natural and not filters.given and not offset:
        many = mapping.NO_LIMIT if limit < 0 else limit
        return _with_work(connection, connection.all(statements.QUERY_WORKERS, key, many))
    everyone = _with_work(connection, connection.all(statements.QUERY_WORKERS, key, mapping.NO_LIMIT))
    return order.page([worker for worker in everyone if filters.fits(worker)], limit, offset)


def _with_work(connection: Connection, rows: list[Row]) -> list[Worker]:
    work = connection.all(statements.WORK_IN_HAND, [row[0] for row in rows]) if rows else []
    in_hand = {worker_id: (rollout_id, attempt_id) for worker_id, rollout_id, attempt_id in work}
    many = Counter(worker_id for worker_id, _, _ in work)
    return [_to_worker(row, in_hand.get(row[0]), many[row[0]]) for row in rows]


def _to_worker(row: Row, in_hand: tuple[str, str] | None, open_attempts: int) -> Worker:
    worker_id, heartbeat_time, stats, lease_seconds, _, lost, last_error = row
    rollout_id, attempt_id = in_hand or (None, None)
    error: dict[str, Any] | None = None if last_error is None else mapping.load(last_error)
    return Worker(
        worker_id,
        heartbeat_time,
        rollout_id,
        attempt_id,
        mapping.load_dict(stats),
        "lost" if lost else "busy" if in_hand else "idle",
        lease_seconds,
        error,
        open_attempts,
    )
