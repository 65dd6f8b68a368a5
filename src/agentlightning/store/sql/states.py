"""What the store holds in memory while it decides: rollouts, attempts and workers as they are, and will be written.

Each has one slot for each of its columns, and `touched`: the number of the last call that changed it, which is how the
unit knows that it has kept what to go back to (unit.py).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar, Final

from agentlightning.rollouts import FINISHED, Attempt, AttemptedRollout, Rollout
from agentlightning.store.sql import codec

OPEN: Final = frozenset({"preparing", "running"})


class State:
    """Something the unit can put back as it was."""

    __slots__ = ("stored", "touched")

    changing: ClassVar[tuple[str, ...]] = ()
    """The slots that may change."""

    def __init__(self) -> None:
        self.touched = 0
        self.stored = False

    def restore(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(self.changing, values, strict=True):
            setattr(self, name, value)


class RolloutState(State):
    """A rollout with every attempt of it."""

    __slots__ = (
        "attempts",
        "config",
        "counted",
        "end_time",
        "input",
        "key",
        "metadata",
        "mode",
        "priority",
        "queue",
        "resources_id",
        "rollout_id",
        "start_time",
        "status",
        "tries",
    )
    changing = ("status", "end_time", "attempts", "input", "mode", "resources_id", "config", "metadata", "stored")

    def __init__(self, row: Any) -> None:
        super().__init__()
        self.key: int
        self.rollout_id: str
        self.input: str
        self.mode: str | None
        self.resources_id: str | None
        self.status: str
        self.start_time: float
        self.end_time: float | None
        self.config: str | None
        self.metadata: str
        self.attempts: int
        self.queue: str
        self.priority: int
        (
            self.key,
            self.rollout_id,
            self.input,
            self.mode,
            self.resources_id,
            self.status,
            self.start_time,
            self.end_time,
            self.config,
            self.metadata,
            self.attempts,
            self.queue,
            self.priority,
        ) = row
        self.tries: dict[str, AttemptState] = {}
        self.counted: str | None = None
        """The status it is counted with; None for one that is not written yet."""

    @property
    def latest(self) -> AttemptState | None:
        return next(reversed(self.tries.values())) if self.tries else None

    @property
    def spans(self) -> int:
        """Of all its attempts."""
        return sum([attempt.spans for attempt in self.tries.values()])

    @property
    def weight(self) -> int:
        """About how many bytes of memory it takes."""
        return 1000 + len(self.input) + len(self.metadata) + 700 * len(self.tries)

    def to_rollout(self) -> Rollout:
        return codec.to_rollout(rollout_row(self))

    def to_attempted(self, attempt: AttemptState) -> AttemptedRollout:
        return codec.to_attempted(rollout_row(self), attempt.to_attempt())


class AttemptState(State):
    __slots__ = (
        "attempt_id",
        "bytes",
        "end_time",
        "key",
        "last_heartbeat_time",
        "last_span",
        "metadata",
        "rollout",
        "sequence_id",
        "silence",
        "silent_at",
        "spans",
        "start_time",
        "status",
        "superseded",
        "timeout_at",
        "worker_id",
    )
    changing = (
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
        "stored",
    )

    def __init__(self, rollout: RolloutState, row: Any) -> None:
        super().__init__()
        self.rollout = rollout
        self.key: int
        self.sequence_id: int
        self.attempt_id: str
        self.status: str
        self.start_time: float
        self.end_time: float | None
        self.worker_id: str | None
        self.last_heartbeat_time: float | None
        self.metadata: str
        self.superseded: int
        self.last_span: int
        self.spans: int
        self.bytes: int
        self.timeout_at: float | None
        self.silence: float | None
        self.silent_at: float | None
        (
            self.key,
            _,
            self.sequence_id,
            self.attempt_id,
            self.status,
            self.start_time,
            self.end_time,
            self.worker_id,
            self.last_heartbeat_time,
            self.metadata,
            self.superseded,
            self.last_span,
            self.spans,
            self.bytes,
            self.timeout_at,
            self.silence,
            self.silent_at,
        ) = row

    @property
    def speaks(self) -> bool:
        """It is the latest attempt, was not fenced off, and its rollout has not finished."""
        return not self.superseded and self.rollout.status not in FINISHED

    def to_attempt(self) -> Attempt:
        return codec.make_attempt(
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


class WorkerState(State):
    __slots__ = ("last_error", "last_heartbeat_time", "lease_seconds", "lost", "lost_at", "stats", "work", "worker_id")
    changing = ("last_heartbeat_time", "stats", "lease_seconds", "lost_at", "lost", "last_error", "stored")

    def __init__(self, row: Any) -> None:
        super().__init__()
        self.worker_id: str
        self.last_heartbeat_time: float | None
        self.stats: str
        self.lease_seconds: float | None
        self.lost_at: float | None
        self.lost: int
        self.last_error: str | None
        (
            self.worker_id,
            self.last_heartbeat_time,
            self.stats,
            self.lease_seconds,
            self.lost_at,
            self.lost,
            self.last_error,
        ) = row
        self.work: dict[str, str] = {}
        """Its open attempts: the id of the rollout by that of the attempt, the newest last."""


rollout_row = attrgetter(
    "key",
    "rollout_id",
    "input",
    "mode",
    "resources_id",
    "status",
    "start_time",
    "end_time",
    "config",
    "metadata",
    "attempts",
    "queue",
    "priority",
)
moved_row = attrgetter("key", "status", "end_time", "attempts")
changed_row = attrgetter("key", "status", "end_time", "attempts", "input", "mode", "resources_id", "config", "metadata")
attempt_row = attrgetter(
    "key",
    "rollout.key",
    "sequence_id",
    "attempt_id",
    "status",
    "start_time",
    "end_time",
    "worker_id",
    "last_heartbeat_time",
    "metadata",
    "superseded",
    "last_span",
    "spans",
    "bytes",
    "timeout_at",
    "silence",
    "silent_at",
)
changed_attempt_row = attrgetter(
    "key",
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
)
worker_row = attrgetter("worker_id", "last_heartbeat_time", "stats", "lease_seconds", "lost_at", "lost", "last_error")
keep_rollout = attrgetter(*RolloutState.changing)
keep_attempt = attrgetter(*AttemptState.changing)
keep_worker = attrgetter(*WorkerState.changing)
