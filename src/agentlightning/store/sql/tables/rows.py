"""What the store holds in memory while it decides: rollouts, attempts and workers as they are, and will be written.

Each has its columns as fields, in their order, and `touched`: the number of the last call that changed it, which is how
the unit knows that it has kept what to go back to (unit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, Final

from msgspec import Struct, field

from agentlightning.rollouts import FINISHED, Attempt, AttemptedRollout, Rollout, RolloutConfig
from agentlightning.store.sql.tables import mapping

OPEN: Final = frozenset({"preparing", "running"})


class State(Struct, kw_only=True, eq=False):
    """Something the unit can put back as it was."""

    changing: ClassVar[tuple[str, ...]] = ()
    """The fields that may change."""

    touched: int = 0
    stored: bool = False

    def restore(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(self.changing, values, strict=True):
            setattr(self, name, value)


class RolloutState(State, eq=False):
    """A rollout with every attempt of it."""

    changing = ("status", "end_time", "attempts", "input", "mode", "resources_id", "config", "metadata", "stored")

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
    attempts: int
    queue: str
    priority: int
    tries: dict[str, AttemptState] = field(default_factory=dict)
    counted: str | None = None
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

    def read_config(self) -> RolloutConfig:
        try:
            return mapping.load_config(self.config)
        except mapping.UNREADABLE as error:
            raise mapping.damaged(f"rollout {self.rollout_id!r}", self.rollout_id, error) from error

    def to_rollout(self) -> Rollout:
        return mapping.to_rollout(rollout_row(self))

    def to_attempted(self, attempt: AttemptState) -> AttemptedRollout:
        return mapping.to_attempted(rollout_row(self), attempt.to_attempt())


class AttemptState(State, eq=False):
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
        "claims",
        "stored",
    )

    rollout: RolloutState
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
    def speaks(self) -> bool:
        """It is the latest attempt, was not fenced off, and its rollout has not finished."""
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


class WorkerState(State, eq=False):
    changing = ("last_heartbeat_time", "stats", "lease_seconds", "lost_at", "lost", "last_error", "stored")

    worker_id: str
    last_heartbeat_time: float | None = None
    stats: str = "{}"
    lease_seconds: float | None = None
    lost_at: float | None = None
    lost: int = 0
    last_error: str | None = None
    work: dict[str, str] = field(default_factory=dict)
    """Its open attempts: the id of the rollout by that of the attempt, the newest last."""


def _changed(key: str, kind: type[State]) -> Callable[[Any], tuple[Any, ...]]:
    """What of a state is written when it changes. `stored` is no column."""
    return attrgetter(key, *(name for name in kind.changing if name != "stored"))


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
changed_row = _changed("key", RolloutState)
attempt_row = attrgetter(
    "key",
    "rollout_key",
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
    "claims",
)
changed_attempt_row = _changed("key", AttemptState)
worker_row = _changed("worker_id", WorkerState)
keep_rollout = attrgetter(*RolloutState.changing)
keep_attempt = attrgetter(*AttemptState.changing)
keep_worker = attrgetter(*WorkerState.changing)
