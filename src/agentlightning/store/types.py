"""The values that a store takes and returns, beside rollouts, attempts, spans and resources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span

SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]
WorkerStatus = Literal["idle", "busy", "lost"]


class Unset:
    """The type of UNSET: an argument that was not given, where None means something.

    >>> isinstance(agl.UNSET, agl.Unset)
    True
    """

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Worker:
    """One place where agents run.

    >>> agl.Worker("w1").status
    'idle'
    """

    worker_id: str
    last_heartbeat_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    """The newest of its open attempts."""
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
    status: WorkerStatus = "idle"
    """busy: it has an open attempt; lost: its lease has run out."""
    lease_seconds: float | None = None
    """Silent for longer than this, the worker is lost and its open attempts become unresponsive. None: never."""
    last_error: dict[str, Any] | None = None
    """Of the last attempt of this worker that failed: rollout_id, attempt_id, type, message, time."""
    open_attempts: int = 0
    """How many attempts it is running."""


@dataclass(frozen=True, slots=True)
class Queue:
    """One of the queues that rollouts wait in. It exists once it was named.

    >>> agl.Queue("train", limit=8).waiting
    0
    """

    name: str
    limit: int | None = None
    """How many of its rollouts may be open at once; None: any number."""
    waiting: int = 0
    open: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """What `prune` keeps of the finished rollouts; None: no limit. The oldest go first.

    >>> store = agl.InMemoryLightningStore()
    >>> asyncio.run(store.prune(agl.Retention(max_age_seconds=7 * 86400))).rollouts
    0
    >>> asyncio.run(store.close())
    """

    max_age_seconds: float | None = None
    """Since they finished."""
    max_rollouts: int | None = None
    max_bytes: int | None = None
    """Of rollouts, attempts and spans, as stored."""
    spare: tuple[str, ...] = ()
    """Rollouts whose ids begin with one of these stay, whatever the limits say."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or would remove.

    >>> agl.Pruned(rollouts=1, spans=2, bytes=300).spans
    2
    """

    rollouts: int
    spans: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Everything about one rollout: what is exported and imported.

    >>> agl.RolloutRecord(agl.Rollout("ro-1", "a task", start_time=0.0)).attempts
    ()
    """

    rollout: Rollout
    attempts: tuple[Attempt, ...] = ()
    spans: tuple[Span, ...] = ()
