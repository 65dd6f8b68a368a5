"""Mutable rows of rollouts, attempts and workers as a unit of work holds them, and packs of spans to be inserted.

Each row has its columns as fields, in the order of the table. `savepoint` is the number of the savepoint in which the
row was last modified: the unit of work takes a snapshot of a row only once per savepoint.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, Final

import orjson
from msgspec import Struct, field
from sqlalchemy import Table

from agentlightning.rollouts import FINISHED, Attempt, AttemptedRollout, Rollout, RolloutConfig
from agentlightning.store.sql.spans.codec import SpanPack
from agentlightning.store.sql.tables import mapping, schema
from agentlightning.store.sql.tables.schema import columns

OPEN: Final = frozenset({"preparing", "running"})
"""The status of attempts, and of their rollouts, that have not ended."""


class MutableRow(Struct, kw_only=True, eq=False):
    """A row that a unit of work can restore."""

    mutable: ClassVar[tuple[str, ...]] = ()
    """The fields that may change: what a snapshot holds, in this order."""

    savepoint: int = 0
    stored: bool = False

    def restore(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(self.mutable, values, strict=True):
            setattr(self, name, value)


class RolloutRow(MutableRow, eq=False):
    """A rollout with all of its attempts."""

    mutable = ("status", "end_time", "attempt_count", "input", "mode", "resources_id", "config", "metadata", "stored")

    key: int
    rollout_id: str
    input: str
    mode: str | None
    resources_id: str | None
    status: str
    start_time: float
    end_time: float | None
    config: str | None
    metadata: str
    attempt_count: int
    queue: str
    priority: int
    attempts: dict[str, AttemptRow] = field(default_factory=dict)
    """By id, the latest one last."""
    memory: int = 0
    """Estimated bytes, as counted when it was loaded, attempts added later included."""
    counted: str | None = None
    """The status it is counted under in the table of counters; None before it is written."""

    @property
    def latest(self) -> AttemptRow | None:
        return next(reversed(self.attempts.values())) if self.attempts else None

    def read_config(self) -> RolloutConfig:
        try:
            return mapping.load_config(self.config)
        except mapping.UNREADABLE as error:
            raise mapping.damaged(f"rollout {self.rollout_id!r}", self.rollout_id, error) from error

    def repair(self) -> dict[str, str]:
        """Replace what cannot be read; returns it, by column."""
        readers: dict[str, tuple[Callable[[Any], Any], Any]] = {
            "input": (orjson.loads, "null"),
            "config": (mapping.load_config, None),
            "metadata": (mapping.load_dict, "{}"),
            "mode": (mapping.check_name, None),
            "resources_id": (mapping.check_name, None),
        }
        replaced: dict[str, str] = {}
        for name, (read, default) in readers.items():
            value: Any = getattr(self, name)
            try:
                read(value)
            except mapping.UNREADABLE:
                replaced[name] = value if isinstance(value, str) else repr(value)
                setattr(self, name, default)
        self.attempt_count = len(self.attempts)
        return replaced

    def to_rollout(self) -> Rollout:
        return mapping.to_rollout(rollout_columns(self))

    def to_attempted(self, attempt: AttemptRow) -> AttemptedRollout:
        return mapping.to_attempted(rollout_columns(self), attempt.to_attempt())


class AttemptRow(MutableRow, eq=False):
    """One attempt of a rollout."""

    mutable = (
        "status",
        "end_time",
        "worker_id",
        "last_heartbeat_time",
        "metadata",
        "superseded",
        "last_span",
        "spans",
        "bytes",
        "timeout_at",
        "silent_at",
        "claims",
        "stored",
    )

    rollout: RolloutRow
    key: int
    rollout_key: int
    sequence_id: int
    attempt_id: str
    status: str
    start_time: float
    end_time: float | None
    worker_id: str | None
    last_heartbeat_time: float | None
    metadata: str
    superseded: int
    last_span: int
    spans: int
    bytes: int
    timeout_at: float | None
    silence: float | None
    silent_at: float | None
    claims: int = 1

    @property
    def is_current(self) -> bool:
        """Whether the rollout follows this attempt: it is not superseded, and the rollout has not finished."""
        return not self.superseded and self.rollout.status not in FINISHED

    def read_metadata(self) -> dict[str, Any]:
        try:
            return mapping.load_dict(self.metadata)
        except mapping.UNREADABLE as error:
            owner = self.rollout.rollout_id
            raise mapping.damaged(f"attempt {self.attempt_id!r} of rollout {owner!r}", owner, error) from error

    def to_attempt(self) -> Attempt:
        return mapping.make_attempt(
            self.rollout.rollout_id,
            self.attempt_id,
            self.sequence_id,
            self.status,
            self.start_time,
            self.end_time,
            self.worker_id,
            self.last_heartbeat_time,
            self.metadata,
        )


class WorkerRow(MutableRow, eq=False):
    """A worker with its open attempts."""

    mutable = ("last_heartbeat_time", "stats", "lease_seconds", "lost_at", "lost", "last_error", "stored")

    worker_id: str
    last_heartbeat_time: float | None = None
    stats: str = "{}"
    lease_seconds: float | None = None
    lost_at: float | None = None
    lost: int = 0
    last_error: str | None = None
    open_attempts: dict[str, str] = field(default_factory=dict)
    """The rollout id by attempt id, the newest attempt last."""


class PendingPack(MutableRow, eq=False):
    """A pack of spans that waits for the flush."""

    attempt: AttemptRow
    pack: SpanPack
    body: bytes
    first_sequence: int
    superseded: int = 0
    key: int = 0

    def columns(self) -> tuple[Any, ...]:
        """The values of `span_statements.INSERT_PACKS`."""
        pack = self.pack
        return self.key, self.attempt.key, self.first_sequence, pack.count, self.superseded, pack.ids, self.body


# -- values to write -------------------------------------------------------------------------------------------------


def _all_columns(table: Table) -> Callable[[Any], tuple[Any, ...]]:
    """Reads every column of a table from a row."""
    return attrgetter(*("attempt_count" if name == "attempts" else name for name in columns(table)))


def _changed(key: str, kind: type[MutableRow]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the columns that an UPDATE writes; `stored` is not a column."""
    return attrgetter(key, *(name for name in kind.mutable if name != "stored"))


rollout_columns = _all_columns(schema.rollouts)
rollout_status_columns = attrgetter("key", "status", "end_time", "attempt_count")
changed_rollout_columns = _changed("key", RolloutRow)
attempt_columns = _all_columns(schema.attempts)
changed_attempt_columns = _changed("key", AttemptRow)
worker_columns = _changed("worker_id", WorkerRow)
rollout_snapshot = attrgetter(*RolloutRow.mutable)
attempt_snapshot = attrgetter(*AttemptRow.mutable)
worker_snapshot = attrgetter(*WorkerRow.mutable)
