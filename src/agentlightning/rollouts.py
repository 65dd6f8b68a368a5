"""Rollouts and attempts: their fields, their states and the legal transitions between them.

A *rollout* is one execution of an agent on one task; an *attempt* is one try of it. Only the store changes their
status, following the transitions defined here.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from pydantic import PositiveFloat

from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass
from agentlightning.util.settings import AtLeastOne, Section

RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]
RolloutMode = Literal["train", "val", "test"]

WAITING = frozenset({"queuing", "requeuing"})
"""States in which a runner may claim a rollout."""
FINISHED = frozenset({"succeeded", "failed", "cancelled"})
BRANCH: Final = "branch"
"""In the metadata of a rollout that branches off another: its `rollout_id`, and the `span_ids` of the calls whose
recorded answers are given again."""
PRIVATE_QUEUE: Final = "_"
"""Prefix of private queues: only claims that name such a queue get rollouts from it."""


def is_private_queue(name: str) -> bool:
    """Whether claims that name no queue skip this one."""
    return name.startswith(PRIVATE_QUEUE)


ROLLOUT_TRANSITIONS: dict[str, frozenset[str]] = {
    "queuing": frozenset({"preparing", "cancelled", "failed"}),
    "requeuing": frozenset({"preparing", "cancelled", "failed"}),
    "preparing": frozenset({"running", "succeeded", "failed", "cancelled", "requeuing"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "requeuing"}),
    "succeeded": frozenset(),
    "failed": frozenset({"requeuing"}),
    "cancelled": frozenset({"requeuing"}),
}
"""Legal next states. A finished rollout changes only when it is explicitly requeued."""

ATTEMPT_TRANSITIONS: dict[str, frozenset[str]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "timeout", "unresponsive"}),
    "running": frozenset({"succeeded", "failed", "timeout", "unresponsive"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
"""Legal next states. An unresponsive attempt may resume while it is the latest one."""


class RolloutConfig(Section):
    """Time limits and retry policy of one rollout; the store enforces them.

    >>> agl.RolloutConfig(timeout_seconds=60, max_attempts=2).retry_condition
    ('failed', 'timeout', 'unresponsive')
    """

    timeout_seconds: PositiveFloat | None = None
    """An attempt older than this becomes `timeout`."""
    unresponsive_seconds: PositiveFloat | None = None
    """An attempt with no heartbeat or span for this long becomes `unresponsive`."""
    max_attempts: AtLeastOne = 1
    """Maximum number of attempts of the rollout."""
    retry_condition: tuple[AttemptStatus, ...] = ("failed", "timeout", "unresponsive")
    """Attempt states after which the rollout is requeued, while attempts are left."""


@as_dataclass
class Attempt(FrozenStruct, frozen=True, gc=False):
    """One try of a rollout.

    >>> agl.Attempt("ro-1", "at-1", 1, start_time=0.0).status
    'preparing'
    """

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first attempt of the rollout."""
    start_time: float
    status: AttemptStatus = "preparing"
    end_time: float | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """`error` contains type, message and traceback of a failure."""


@as_dataclass
class Rollout(FrozenStruct, frozen=True, gc=False):
    """One execution of an agent on one task.

    >>> agl.Rollout("ro-1", {"question": "6 x 7"}, start_time=0.0).finished
    False
    """

    rollout_id: str
    input: Any
    """The task: any JSON value."""
    start_time: float
    status: RolloutStatus = "queuing"
    mode: RolloutMode | None = None
    resources_id: str | None = None
    """The version of the resources to use; None: the latest when it is claimed."""
    end_time: float | None = None
    config: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    queue: str = "default"
    """The queue it waits in: the one given when it was enqueued, else its mode, else "default"."""
    priority: int = 0
    """Higher priorities are claimed first."""

    @property
    def finished(self) -> bool:
        return self.status in FINISHED


@as_dataclass
class AttemptedRollout(Rollout, frozen=True, kw_only=True, gc=False):
    """A rollout with the attempt that was just started for it.

    >>> attempt = agl.Attempt("ro-1", "at-1", 1, start_time=0.0)
    >>> agl.AttemptedRollout("ro-1", {"question": "6 x 7"}, start_time=0.0, attempt=attempt).attempt.attempt_id
    'at-1'
    """

    attempt: Attempt

    @property
    def ids(self) -> tuple[str, str]:
        """Those of the rollout and of the attempt."""
        return self.rollout_id, self.attempt.attempt_id


@as_dataclass
class EnqueueRolloutRequest(FrozenStruct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One rollout for `enqueue_many_rollouts`.

    >>> requests = [agl.EnqueueRolloutRequest({"number": number}, mode="train") for number in range(3)]
    >>> store = agl.InMemoryLightningStore()
    >>> len(asyncio.run(store.enqueue_many_rollouts(requests)))
    3
    >>> asyncio.run(store.close())
    """

    input: Any
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    """Set by the caller to make the request idempotent; otherwise the store generates one."""
    queue: str | None = None
    """None: the mode, or "default" without one."""
    priority: int = 0
    """Higher priorities are claimed first."""
