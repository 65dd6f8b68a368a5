"""What is known of the places where agents run: their heartbeats, and the attempts they have in hand."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.store import codec, statements
from agentlightning.store.base import Worker
from agentlightning.store.codec import Row
from agentlightning.store.engine import Transaction


def find_worker(transaction: Transaction, worker_id: str) -> Worker:
    """A worker that is known."""
    row = transaction.one(statements.FIND_WORKER, worker_id)
    return _to_worker(row, transaction.one(statements.WORK_OF, worker_id))


def all_workers(transaction: Transaction) -> list[Worker]:
    in_hand = {worker_id: ids for worker_id, *ids in transaction.all(statements.WORK_IN_HAND)}
    return [_to_worker(row, in_hand.get(row[0])) for row in transaction.all(statements.WORKERS)]


def _to_worker(row: Row, in_hand: Sequence[str] | None) -> Worker:
    worker_id, heartbeat, stats = row
    rollout_id, attempt_id = in_hand or (None, None)
    return Worker(worker_id, heartbeat, rollout_id, attempt_id, codec.load_dict(stats))
