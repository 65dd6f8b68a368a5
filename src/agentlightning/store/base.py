"""The contract of a store. All other parts communicate through it, and only through it.

Every implementation guarantees:

- A write that has returned survives `kill -9` of the process (unless the store is in memory).
- The status of rollouts and attempts changes only along the tables in `rollouts.py`; anything else is a ConflictError.
- An attempt id is a fencing token: what a superseded attempt still writes is stored and marked
  (`agentlightning.superseded`), and changes no status.
- Timeouts, missing heartbeats and retries are enforced by a clock in the store, without any further call.
- `wait_for_rollouts` and `dequeue_rollout(timeout=...)` are driven by events.
- An unknown id raises NotFoundError, which names it. Lists are in order of creation unless stated otherwise.

How the status of a rollout follows from its latest attempt:

    attempt preparing               -> rollout preparing
    attempt running                 -> rollout running     (first heartbeat, first span, or an explicit update)
    attempt succeeded               -> rollout succeeded
    attempt failed/timeout/unresponsive
        in config.retry_condition and attempts are left  -> rollout requeuing, else failed

Claims take rollouts by priority, higher first, then by order of creation, from the queues whose limit of open (claimed
and unfinished) rollouts is not reached. The queue of a rollout is the one named when it was enqueued, else its mode,
else "default", so a limit on "train" leaves room for "val". A queue whose name begins with an underscore is private:
only claims that name it take from it.

A call may be repeated after a lost response without taking effect twice: with a `rollout_id`, a `claim_id`, the
`span_id` of each span or the `resources_id` chosen by the caller, the repeat returns what the first call created.

Lists take `after`, the id of the last item that the caller has: with `limit` it pages at a cost that grows with the
page alone, however long the list is, and neither skips nor repeats what is added meanwhile. `sort_by` names a field to
sort by instead (None comes first), `sort_order` "desc" reverses the order; both are paged by `offset`. If
`filter_logic` is "or", one matching filter is enough. No read waits for another server of the same database.
"""

# `LightningStore(url)` opens a store, so the class is not abstract: its methods are signatures with promises.
# pyright: reportReturnType=false
from __future__ import annotations

import abc
import asyncio
import functools
import inspect
import os
import pkgutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

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
from agentlightning.store import validation
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.store.types import (
    UNSET,
    FilterLogic,
    Pruned,
    Queue,
    Retention,
    RolloutRecord,
    SortOrder,
    Unset,
    Worker,
    WorkerStatus,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


DEFAULT_STORE: Final = ".agentlightning/store.db"
"""What `LightningStore()` opens where the environment names no store."""
STORE_VARIABLE: Final = "AGL_STORE"
"""Environment variable that names the store of `LightningStore()`."""
REMOTE_STORE: Final = "agentlightning.store.http.client:LightningStoreClient"
EMBEDDED_STORE: Final = "agentlightning.store.sql.store:SqlStore"
"""What `LightningStore(url)` opens. Loaded by name, as it implements the contract of this module."""


pending_writers: Final[list[Callable[[], object]]] = []
"""Write what this process has recorded and not yet written."""


def write_pending() -> None:
    """Write it, as far as that is possible in a few seconds: opening a store does, so that it is found there."""
    for write in pending_writers:
        write()


ROLLOUTS_PER_READ: Final = 32
"""Rollouts whose spans `iter_spans` reads at once."""


def store_url(url: str | Path | None) -> str | Path:
    """The URL itself, or that of the store that is opened without one."""
    return os.environ.get(STORE_VARIABLE) or DEFAULT_STORE if url is None else url


class _OpeningSignature:
    """The signature of `LightningStore(`. Subclasses have signatures of their own."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if owner is not LightningStore:
            raise AttributeError("__signature__")
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        url = inspect.Parameter("url", kind, default=None, annotation="str | Path | None")
        return inspect.Signature([url], return_annotation="LightningStore")


class LightningStore(abc.ABC):  # noqa: B024  methods of a subclass may be abstract
    """A store of rollouts, attempts, spans and resources. The base class of every kind of store.

    `LightningStore(url)` opens a durable store embedded in this process. url: a path, `sqlite:///PATH`,
    `postgresql://...`, or `:memory:` for a store that ends with the process; `http://...` for the store of a server.
    Without one, that of the environment variable `AGL_STORE`, else `.agentlightning/store.db` in the current directory.
    Directories are created as needed. Raises ConfigError for any other url, StoreError if the database cannot be
    opened.

        >>> store = agl.LightningStore("hub.db")
        >>> asyncio.run(store.enqueue_rollout({"question": "6 x 7"}, mode="train")).queue
        'train'
        >>> asyncio.run(store.close())
    """

    __signature__ = _OpeningSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is not LightningStore:
            if missing := [name for name in sorted(IMPLEMENTED) if getattr(cls, name) is getattr(LightningStore, name)]:
                raise TypeError(f"{cls.__name__} is not a whole store: it has no {', '.join(missing)}")
            return super().__new__(cls)
        write_pending()
        named = store_url(args[0] if args else kwargs.get("url"))
        remote = str(named).startswith(("http://", "https://"))
        return super().__new__(pkgutil.resolve_name(REMOTE_STORE if remote else EMBEDDED_STORE))

    def __init__(self, url: str | Path | None = None) -> None:
        """See the class."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish running calls and release all resources. Idempotent."""

    async def check_health(self) -> None:
        """Raises StoreError if the store can neither be read nor written."""
        await self.get_worker("health")

    async def statistics(self) -> dict[str, int]:
        """Counts: rollouts by status (`rollouts.succeeded`, ...), `attempts`, `spans`, `resources`, `workers`, and
        `bytes`, the size of the database."""

    # -- rollouts: the queue ---------------------------------------------------------------------------------------

    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        rollout_id: str | None = None,
        *,
        queue: str | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout:
        """Create a rollout and claim it at once. It counts as open in its queue, whose limit does not apply."""

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
        *,
        queue: str | None = None,
        priority: int = 0,
    ) -> Rollout:
        """Queue a rollout. If the `rollout_id` exists already, the existing rollout is returned unchanged."""

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """`enqueue_rollout` for each, in one transaction."""

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout | None:
        """Claim the next waiting rollout (from `queues`; default: every queue that is not private) and start an
        attempt. Waits up to `timeout` seconds; returns None if there is none."""

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` waiting rollouts. Waits only while there is none at all. With the `claim_id` of an
        earlier call that claimed something, returns what that call claimed; the attempt ids derive from it."""

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        """Start another attempt of a rollout that has not succeeded (ConflictError); earlier ones are superseded."""

    async def requeue_rollout(self, rollout_id: str, reason: str) -> Rollout:
        """Queue a claimed, failed or cancelled rollout again; one that waits is returned unchanged. Its attempts are
        superseded, and an open one becomes `unresponsive` with `reason` as its error."""

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        """Cancel a rollout unless it has finished; its attempts are superseded, an open one becomes `unresponsive`."""

    # -- rollouts: queries and changes -----------------------------------------------------------------------------

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        filter_logic: FilterLogic = "and",
        newest_first: bool = False,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Rollout]:
        """Rollouts that match every filter. limit -1: all. `after` is a rollout_id. `newest_first`: reversed."""

    async def count_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        queue_in: Sequence[str] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        filter_logic: FilterLogic = "and",
    ) -> int:
        """How many rollouts `query_rollouts` would return without a limit."""

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """None for an unknown id."""

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
        """Change the given fields. `metadata` is replaced. A status set here also becomes that of the open attempt,
        and is not retried; only `dequeue_rollout` and `start_attempt` claim a rollout."""

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        """Wait until `minimum` (default: all) of the rollouts have finished, or `timeout` seconds have passed; returns
        the finished ones, in the order of `rollout_ids`. timeout 0 does not wait."""

    # -- attempts --------------------------------------------------------------------------------------------------

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> list[Attempt]:
        """In order of `sequence_id`."""

    async def get_attempt(self, attempt_id: str) -> Attempt | None:
        """Find an attempt by its id alone; its `rollout_id` is that of its rollout."""

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """None if the rollout has none yet."""

    async def get_latest_attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """The latest attempt of each of these rollouts that has one, in no particular order."""

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
        """Change the given fields (attempt_id may be "latest"); metadata is merged. A superseded attempt, and an
        unresponsive one of a finished rollout, are returned unchanged, with `superseded: True` in the metadata."""

    # -- spans -----------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        """Store a span; returns it as stored, with its sequence number. A known span_id changes nothing."""

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """`add_span` for each, in one transaction, in order."""

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Reserve a sequence number, larger than every one assigned before in this attempt."""

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """`get_next_span_sequence_id` for each pair of ids, in one transaction, in order."""

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span:
        """`add_span` for a span of the OpenTelemetry SDK."""
        from agentlightning.tracing.tracer import to_span

        span = to_span(readable_span, rollout_id, attempt_id)
        return await self.add_span(span if sequence_id is None else replace(span, sequence_id=sequence_id))

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | None = None,
        *,
        name: str | None = None,
        name_contains: str | None = None,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
        tokens: bool = True,
    ) -> list[Span]:
        """Spans of a rollout that match every filter, by (attempt, sequence_id). attempt_id "latest": only those of
        the latest attempt. `after` is a span_id. Without `tokens`, calls have only their numbers (`gen_ai.usage.*`)."""

    async def count_spans(self, rollout_id: str, attempt_id: str) -> int:
        """How many spans an attempt has ("latest": the latest), at a cost that does not grow with them; 0 if none."""

    async def newest_spans(self, limit: int = 100) -> list[Span]:
        """The spans of any rollouts that were stored last, the newest first. The cost grows with `limit` alone."""

    async def iter_spans(
        self, rollout_ids: Sequence[str], tokens: bool = True
    ) -> AsyncIterator[tuple[str, list[Span]]]:
        """(rollout_id, spans of its latest attempt) for each id, read together with bounded memory."""
        validation.check_texts(rollout_ids, "rollout_ids")
        for start in range(0, len(rollout_ids), ROLLOUTS_PER_READ):
            ids = rollout_ids[start : start + ROLLOUTS_PER_READ]
            lists = await asyncio.gather(*(self.query_spans(each, "latest", tokens=tokens) for each in ids))
            for rollout_id, spans in zip(ids, lists, strict=True):
                yield rollout_id, spans

    def get_successful_trajectories(
        self,
        *,
        threshold: float = 0.5,
        best_of: int | None = None,
        deduplicate: bool = True,
        pass_rate: tuple[float, float] | None = None,
        self_verified: bool = False,
        reward_weights: Mapping[str, float] | None = None,
    ) -> TrajectoryQuery:
        """The rollouts to imitate, as the dataset of an algorithm, which reads them when it learns. The arguments are
        the fields of `TrajectoryQuery`. Neither waits nor needs an event loop. Raises ConfigError for bounds that
        cannot be met.

        >>> agl.LightningStore(":memory:").get_successful_trajectories(threshold=0.9).threshold
        0.9
        """
        return TrajectoryQuery(self, threshold, best_of, deduplicate, pass_rate, self_verified, reward_weights)

    # -- resources -------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish a new version, which becomes the latest. A `resources_id` that exists is a ConflictError, unless the
        content is the same: then the existing version is returned."""

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Replace the content of one version, which becomes the latest and keeps its creation time, or publish it."""

    async def delete_resources(self, resources_id: str) -> int:
        """Remove one version, readable or not; returns how many were removed. Rollouts that refer to it find none."""

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """None for an unknown id."""

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The version that was published last; None if there is none."""

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[ResourcesUpdate]:
        """Versions of the resources that match every filter. `after` is a resources_id."""

    # -- workers ---------------------------------------------------------------------------------------------------

    async def update_worker(
        self, worker_id: str, stats: dict[str, Any] | None = None, *, lease_seconds: float | None = None
    ) -> Worker:
        """Record a heartbeat of a worker, which also counts for its open attempts. Without `lease_seconds`, the lease
        stays as it was. A lost worker is back with its next heartbeat."""

    async def get_worker(self, worker_id: str) -> Worker | None:
        """None for an unknown id."""

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """`get_worker`, as 0.x calls it."""
        return await self.get_worker(worker_id)

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        after: str | None = None,
        limit: int = -1,
        offset: int = 0,
    ) -> list[Worker]:
        """Workers that match every filter, in order of their first heartbeat or claim. `after` is a worker_id."""

    # -- queues ----------------------------------------------------------------------------------------------------

    async def update_queue(self, name: str, limit: int | None) -> Queue:
        """Set how many rollouts of a queue may be open at once (at least 0: paused); None lifts the limit."""

    async def query_queues(self) -> list[Queue]:
        """Every queue that was ever used or given a limit, by name."""

    # -- retention, export and import ------------------------------------------------------------------------------

    async def delete_rollouts(self, rollout_ids: Sequence[str]) -> int:
        """Remove finished rollouts with their attempts and spans; returns how many. Unknown ids are skipped, an
        unfinished one is a ConflictError and nothing is removed."""

    async def prune(self, retention: Retention, dry_run: bool = False) -> Pruned:
        """Remove finished rollouts until what is left fits `retention`, in small transactions."""

    async def vacuum(self) -> None:
        """Free space on disk (PostgreSQL: reuse it), while others read and write."""

    async def read_records(self, rollout_ids: Sequence[str]) -> list[RolloutRecord]:
        """These rollouts with their attempts and spans, in the order of `rollout_ids`."""

    async def add_records(self, records: Sequence[RolloutRecord]) -> int:
        """Add rollouts as another store recorded them, in one transaction; returns how many are new. A known id is
        skipped. An unfinished rollout waits again: its attempts are superseded, an open one becomes `unresponsive`."""


METHODS: Final = tuple(name for name, value in vars(LightningStore).items() if inspect.iscoroutinefunction(value))
"""The awaited methods of the contract."""
IMPLEMENTED: Final = frozenset(METHODS) - {"check_health", "add_otel_span", "get_worker_by_id"}
"""Those that each kind of store has of its own; the others build on them."""


def implement(store: type[LightningStore], methods: Mapping[str, Callable[..., Any]]) -> None:
    """Give a class of stores these methods of the contract, by name. Type checkers and editors see the signatures of
    the contract."""
    for name, method in methods.items():
        setattr(store, name, functools.update_wrapper(method, getattr(LightningStore, name)))


def parameters_of(method: str) -> dict[str, inspect.Parameter]:
    """The parameters of a method of the contract, without `self`."""
    parameters = dict(inspect.signature(getattr(LightningStore, method)).parameters)
    del parameters["self"]
    return parameters


def binder(method: str) -> Callable[..., dict[str, Any]]:
    """Gives the arguments of calls of a method of the contract their names. It raises TypeError for what the method
    does not take."""
    parameters = parameters_of(method)
    positional = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    required = {name for name, each in parameters.items() if each.default is each.empty}

    def bind(*arguments: Any, **options: Any) -> dict[str, Any]:
        count = len(arguments) + len(options)
        options.update(zip(positional, arguments, strict=False))
        if len(options) < count or not required <= options.keys() <= parameters.keys():
            raise TypeError(f"{method} takes {', '.join(parameters)}; it got {count}: {', '.join(options)}")
        return options

    return bind


LightningStoreBase = LightningStore
"""An alias, which implementations subclass."""
