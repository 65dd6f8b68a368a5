"""The contract of a store, stated once. Every part meets the others here and nowhere else.

What every implementation promises:

- A write that returned survives `kill -9` of the process (unless the store lives in memory).
- The status of rollouts and attempts changes only along the tables in `rollouts.py`; anything else is a ConflictError.
- An attempt id is a fence: what a superseded attempt still writes is kept and marked (`agentlightning.superseded`),
  and changes the status of nothing.
- Timeouts, lost heartbeats and retries are enforced by a clock inside the store, not by luck of the next call.
- `wait_for_rollouts` and `dequeue_rollout(timeout=...)` are woken by events.
- Unknown ids raise NotFoundError, naming the id. Lists are returned in order of creation unless said otherwise.

How the status of a rollout follows its latest attempt:

    attempt preparing               -> rollout preparing
    attempt running                 -> rollout running     (first heartbeat, first span, or an explicit update)
    attempt succeeded               -> rollout succeeded
    attempt failed/timeout/unresponsive
        in config.retry_condition and attempts are left  -> rollout requeuing, else failed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.resources import NamedResources, ResourcesUpdate
from agentlightning.rollouts import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
)
from agentlightning.span import Span


class Unset:
    """The type of UNSET: an argument that was not given, where None means something."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Worker:
    """One place where agents run."""

    worker_id: str
    last_heartbeat_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    stats: dict[str, Any] = field(default_factory=dict[str, Any])


class LightningStoreBase(ABC):
    """The contract. `LightningStore(...)` makes an embedded one."""

    # -- life ------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def close(self) -> None:
        """Finish what is under way, release everything. Safe to call twice."""

    @abstractmethod
    async def statistics(self) -> dict[str, int]:
        """Counts: rollouts by status (`rollouts.succeeded`, ...), `attempts`, `spans`, `resources`, `workers`."""

    # -- rollouts: the queue ---------------------------------------------------------------------------------------

    @abstractmethod
    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        rollout_id: str | None = None,
    ) -> AttemptedRollout:
        """A rollout that the caller executes itself: made and claimed in one step, never in the queue."""

    @abstractmethod
    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
    ) -> Rollout:
        """Queue a rollout. With a `rollout_id` that exists already, returns the existing one unchanged."""

    @abstractmethod
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """`enqueue_rollout` for each, in one transaction."""

    @abstractmethod
    async def dequeue_rollout(
        self, worker_id: str | None = None, timeout: float | None = None
    ) -> AttemptedRollout | None:
        """Claim the oldest waiting rollout and start an attempt. Waits up to `timeout` seconds; None if there
        is none."""

    @abstractmethod
    async def dequeue_many_rollouts(
        self, limit: int = 1, worker_id: str | None = None, timeout: float | None = None
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` waiting rollouts. Waits only while there is none at all."""

    @abstractmethod
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start another attempt of a rollout, whatever its state unless it has succeeded (a ConflictError); earlier
        ones are superseded."""

    @abstractmethod
    async def requeue_rollout(self, rollout_id: str, reason: str) -> Rollout:
        """Queue a claimed, failed or cancelled rollout again; one that waits is returned unchanged. Its attempts are
        fenced off, and one still open becomes `unresponsive`, for `reason`."""

    @abstractmethod
    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel a waiting or running rollout; its attempts are fenced off, and one still open becomes
        `unresponsive`. A finished one is returned unchanged."""

    # -- rollouts: looking and changing ----------------------------------------------------------------------------

    @abstractmethod
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Rollout]:
        """Rollouts that fit every filter given. limit -1: no limit."""

    @abstractmethod
    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None: ...

    @abstractmethod
    async def update_rollout(
        self,
        rollout_id: str,
        *,
        input: Any | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Rollout:
        """Change what is given. `metadata` replaces the old. A status set by hand is also that of the open attempt,
        and is not followed by a retry; a rollout is claimed with `dequeue_rollout` or `start_attempt` only."""

    @abstractmethod
    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        """Wait until `minimum` (default: all) of the rollouts have finished, or `timeout` seconds have passed;
        returns the finished ones, in the order asked for. timeout 0 does not wait."""

    # -- attempts --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def query_attempts(self, rollout_id: str) -> list[Attempt]:
        """In order of `sequence_id`."""

    @abstractmethod
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None: ...

    @abstractmethod
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset = UNSET,
    ) -> Attempt:
        """Change what is given (attempt_id may be "latest"); metadata is merged. A superseded attempt, and a lost one
        whose rollout has finished without it, are returned as they stand, with `superseded: True` in the metadata."""

    # -- spans -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def add_span(self, span: Span) -> Span:
        """Keep a span; returns it as kept, with its sequence number. The same span_id again changes nothing."""

    @abstractmethod
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """`add_span` for each, in one transaction, in order."""

    @abstractmethod
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Reserve a sequence number: larger than every one given before for this attempt."""

    @abstractmethod
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Span]:
        """Spans of a rollout by (attempt, sequence_id). attempt_id "latest": only those of the latest attempt."""

    @abstractmethod
    def iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        """(rollout_id, spans of its latest attempt) for each id, read in few queries and bounded memory."""

    # -- resources -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish a new version; it becomes the latest. With a `resources_id` that exists, a ConflictError."""

    @abstractmethod
    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Replace the content of one version, which becomes the latest."""

    @abstractmethod
    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None: ...

    @abstractmethod
    async def get_latest_resources(self) -> ResourcesUpdate | None: ...

    @abstractmethod
    async def query_resources(self, *, limit: int = -1, offset: int = 0) -> list[ResourcesUpdate]: ...

    # -- workers ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def update_worker(self, worker_id: str, stats: dict[str, Any] | None = None) -> Worker:
        """A heartbeat of a worker; it also keeps the worker's open attempts alive."""

    @abstractmethod
    async def query_workers(self) -> list[Worker]: ...
