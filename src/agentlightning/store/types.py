"""The values that a store takes and returns, beside rollouts, attempts, spans and resources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass

SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]
WorkerStatus = Literal["idle", "busy", "lost"]


class Unset:
    """The type of UNSET: the default of an argument for which None is a value.

    >>> from agentlightning.store.types import UNSET, Unset
    >>> isinstance(UNSET, Unset)
    True
    """

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Worker:
    """A place where agents run.

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
    """busy: it has an open attempt; lost: its lease has expired."""
    lease_seconds: float | None = None
    """After this time without a heartbeat it is lost, and its open attempts become unresponsive. None: never."""
    last_error: dict[str, Any] | None = None
    """Of its last failed attempt: rollout_id, attempt_id, type, message, time."""
    open_attempts: int = 0
    """How many attempts it is running."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue of rollouts. It exists once a rollout or a limit has named it.

    >>> from agentlightning.store.types import Queue
    >>> Queue("train", limit=8).waiting
    0
    """

    name: str
    limit: int | None = None
    """How many of its rollouts may be open (claimed and unfinished) at once; None: any number."""
    waiting: int = 0
    open: int = 0


@as_dataclass
class Retention(FrozenStruct, frozen=True, forbid_unknown_fields=True):
    """Limits on the finished rollouts, which `prune` enforces; None: no limit. The oldest are removed first.

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
    """Rollouts whose ids begin with one of these prefixes are never removed."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or would remove in a dry run.

    >>> from agentlightning.store.types import Pruned
    >>> Pruned(rollouts=1, spans=2, bytes=300).spans
    2
    """

    rollouts: int
    spans: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A rollout with its attempts and spans, as exported and imported.

    >>> from agentlightning.store.types import RolloutRecord
    >>> RolloutRecord(agl.Rollout("ro-1", "a task", start_time=0.0)).attempts
    ()
    """

    rollout: Rollout
    attempts: tuple[Attempt, ...] = ()
    spans: tuple[Span, ...] = ()
