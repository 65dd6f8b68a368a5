"""The contract of base.py over HTTP: `LightningStoreClient("http://host:4747")`.

Every call may arrive twice without harm: ids are made here, a claim is repeated by its `claim_id`, and a call that is
not harmless by nature carries a key under which the store remembers its answer (idempotency.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.errors import StoreError
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
from agentlightning.store.base import (
    UNSET,
    FilterLogic,
    SortOrder,
    Unset,
)
from agentlightning.store.http.client_operations import CallingStore, Page
from agentlightning.store.http.encoding import as_kept, span_fields
from agentlightning.store.http.transport import Remote, Settings
from agentlightning.store.ids import claimed_id, new_hex, new_id

SLICE_SECONDS: Final = 25.0
"""A call that waits asks again this often, so that nothing between it and the server thinks the connection dead."""
CHUNK: Final = 32
"""Rollouts whose spans `iter_spans` reads at once."""


class LightningStoreClient(CallingStore):
    """A store in another process or on another machine. Any number of tasks, event loops and threads may use one
    object at the same time; it can be pickled.

    url: of the server, as `agl serve` prints it. token: its access token; AGL_TOKEN where not given. timeout: seconds
    a request may take. patience: seconds a call is tried again where no server answers: one that restarts is survived.

    Raises ConfigError for a url or token that cannot be one. Calls raise what the store raises, StoreServerError where
    nobody answers or the server is another version, and StoreAuthError where it wants another token.

        >>> store = agl.LightningStoreClient("http://127.0.0.1:4747")
        >>> isinstance(store, agl.LightningStore)
        True
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 60.0, patience: float = 60.0) -> None:
        token = (os.environ.get("AGL_TOKEN") or None) if token is None else token
        self._remote = Remote(Settings.checked(url, token, timeout, patience))

    @property
    def token(self) -> str | None:
        """The access token that calls are made with."""
        return self._remote.settings.token

    @property
    def url(self) -> str:
        return self._remote.settings.url

    def __repr__(self) -> str:
        return f"LightningStoreClient({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._remote.settings
        return _open, (settings.url, settings.token, settings.timeout, settings.patience)

    # -- life ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        await self._remote.close()

    async def statistics(self) -> dict[str, int]:
        return await self._call("statistics")

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
        return await self._call(
            "start_rollout",
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=metadata,
            worker_id=worker_id,
            rollout_id=new_id("ro") if rollout_id is None else rollout_id,
            queue=queue,
            claim_id=new_id("cl") if claim_id is None else claim_id,
        )

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
        return await self._call(
            "enqueue_rollout",
            input=input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=metadata,
            rollout_id=new_id("ro") if rollout_id is None else rollout_id,
            queue=queue,
            priority=priority,
        )

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        named = [
            replace(request, rollout_id=new_id("ro")) if request.rollout_id is None else request for request in rollouts
        ]
        return await self._call("enqueue_many_rollouts", rollouts=named)

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(1, worker_id, timeout, queues=queues, claim_id=claim_id)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        claim_id = new_id("cl") if claim_id is None else claim_id
        arguments = {"limit": limit, "worker_id": worker_id, "queues": queues, "claim_id": claim_id}
        line, clock = self._remote.line(), asyncio.get_running_loop().time
        until = clock() + (timeout or 0.0)
        claiming = asyncio.ensure_future(self._call("dequeue_many_rollouts", **arguments))
        try:
            claimed = await asyncio.shield(claiming)  # what is there at once is claimed together with other calls
            while not claimed and (left := until - clock()) > 0:
                claimed = await self._call_and_wait("dequeue_many_rollouts", min(left, SLICE_SECONDS), **arguments)
        except asyncio.CancelledError:
            line.start(self._give_back(claiming, claim_id, limit))
            raise
        return claimed

    async def _give_back(self, claiming: asyncio.Future[Any], claim_id: str, limit: int) -> None:
        """Queue again what was claimed for a caller that no longer waits for it."""
        try:
            await claiming
            for index in range(limit):
                attempt = await self.get_attempt(claimed_id(claim_id, index))
                if attempt is None:
                    return
                if attempt.status == "preparing":
                    await self.requeue_rollout(attempt.rollout_id, "its claim was cancelled")
        except StoreError:
            return  # its own timeouts, or those of its worker, bring it back

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        claim_id = new_id("cl") if claim_id is None else claim_id
        return await self._call("start_attempt", rollout_id=rollout_id, worker_id=worker_id, claim_id=claim_id)

    async def requeue_rollout(self, rollout_id: str, reason: str) -> Rollout:
        return await self._call("requeue_rollout", rollout_id=rollout_id, reason=reason)

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        return await self._call("cancel_rollout", rollout_id=rollout_id)

    # -- rollouts: looking and changing ----------------------------------------------------------------------------

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
        return await self._pages(
            Page("rollout_id", after, limit, offset, sort_by, sort_order),
            "query_rollouts",
            filter_logic=filter_logic,
            status_in=status_in,
            rollout_id_in=rollout_id_in,
            rollout_id_contains=rollout_id_contains,
            queue_in=queue_in,
            mode_in=mode_in,
            newest_first=newest_first,
        )

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
        return await self._call(
            "count_rollouts",
            filter_logic=filter_logic,
            status_in=status_in,
            rollout_id_in=rollout_id_in,
            rollout_id_contains=rollout_id_contains,
            queue_in=queue_in,
            mode_in=mode_in,
        )

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        return await self._call("get_rollout_by_id", rollout_id=rollout_id)

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
        return await self._call(
            "update_rollout",
            rollout_id=rollout_id,
            input=input,
            mode=mode,
            resources_id=resources_id,
            status=status,
            config=config,
            metadata=metadata,
        )

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        ids = list(dict.fromkeys(rollout_ids))
        arguments = {"rollout_ids": ids, "minimum": minimum}
        clock = asyncio.get_running_loop().time
        until = None if timeout is None else clock() + timeout
        finished: list[Rollout] = await self._call("wait_for_rollouts", timeout=0.0, **arguments)
        while len(finished) < (len(ids) if minimum is None else minimum):
            left = SLICE_SECONDS if until is None else min(until - clock(), SLICE_SECONDS)
            if left <= 0:
                break
            finished = await self._call_and_wait("wait_for_rollouts", left, **arguments)
        return finished

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
        page = Page(None, None, limit, offset, sort_by, sort_order)
        return await self._pages(page, "query_attempts", rollout_id=rollout_id)

    async def get_attempt(self, attempt_id: str) -> Attempt | None:
        return await self._call("get_attempt", attempt_id=attempt_id)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        return await self._call("get_latest_attempt", rollout_id=rollout_id)

    async def get_latest_attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return await self._call("get_latest_attempts", rollout_ids=rollout_ids)

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
        return await self._call(
            "update_attempt",
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            status=status,
            worker_id=worker_id,
            last_heartbeat_time=last_heartbeat_time,
            metadata=metadata,
        )

    # -- spans -----------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        span_id = span.span_id or new_hex()
        return as_kept(span, span_id, await self._send("add_span", {"span": span_fields(span, span_id)}))

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        ids = [span.span_id or new_hex() for span in spans]
        fields = [span_fields(span, span_id) for span, span_id in zip(spans, ids, strict=True)]
        kept: list[int | Span] = await self._send("add_many_spans", {"spans": fields})
        return [as_kept(span, span_id, told) for span, span_id, told in zip(spans, ids, kept, strict=True)]

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return await self._call("get_next_span_sequence_id", rollout_id=rollout_id, attempt_id=attempt_id)

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        return await self._call("get_many_span_sequence_ids", rollout_attempt_ids=rollout_attempt_ids)

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
    ) -> list[Span]:
        return await self._pages(
            Page("span_id", after, limit, offset, sort_by, sort_order),
            "query_spans",
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            name=name,
            name_contains=name_contains,
            trace_id=trace_id,
            trace_id_contains=trace_id_contains,
            span_id=span_id,
            span_id_contains=span_id_contains,
            parent_id=parent_id,
            parent_id_contains=parent_id_contains,
            filter_logic=filter_logic,
        )

    async def iter_spans(self, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[str, list[Span]]]:
        for start in range(0, len(rollout_ids), CHUNK):
            chunk = rollout_ids[start : start + CHUNK]
            read = await asyncio.gather(*(self.query_spans(rollout_id, "latest") for rollout_id in chunk))
            for rollout_id, spans in zip(chunk, read, strict=True):
                yield rollout_id, spans


def _open(url: str, token: str | None, timeout: float, patience: float) -> LightningStoreClient:
    return LightningStoreClient(url, token, timeout=timeout, patience=patience)
