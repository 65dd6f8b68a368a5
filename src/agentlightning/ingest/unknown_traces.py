"""Stores traces of programs that name no rollout as rollouts of their own.

Each unknown trace becomes one rollout with one attempt, in the queue `traces`. Both ids follow from the trace id, so
that a repeated request, another server on the same database, and this one after a restart use the same rollout. The
status of the root span decides whether the attempt succeeded or failed; spans that arrive later still belong to it. A
trace whose root span never arrives (because it began elsewhere, say) succeeds after `idle_seconds` without spans.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from agentlightning import span as names
from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.ingest.attribution import AttemptIds
from agentlightning.rollouts import FINISHED, AttemptStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.ids import claimed_id
from agentlightning.store.types import UNSET
from agentlightning.tracing.otlp.decode import Decoded

logger = logging.getLogger(__name__)

QUEUE: Final = "traces"
SOURCE: Final = "otlp"
IDLE_SECONDS: Final = 600.0
CHECK_SECONDS: Final = 5.0
"""Time between two searches for idle traces."""
BATCH: Final = 256
"""Idle traces that are finished concurrently."""
MAX_OPEN: Final = 100_000
"""Beyond this number of open traces, those idle for longest are finished early."""
PAGE: Final = 1000


def ids_of_trace(trace_id: str) -> AttemptIds:
    """The ids of the rollout and the attempt of an unknown trace."""
    return f"ro-{trace_id}", claimed_id(_claim_id(trace_id), 0)


def _claim_id(trace_id: str) -> str:
    return f"trace-{trace_id}"


@dataclass(slots=True)
class _Trace:
    last_span: float
    """Time of arrival of its last span (monotonic seconds)."""


class UnknownTraces:
    """Creates rollouts for unknown traces and finishes them."""

    def __init__(self, store: LightningStoreBase, idle_seconds: float = IDLE_SECONDS) -> None:
        self._store = store
        self._idle = idle_seconds
        self._open: OrderedDict[str, _Trace] = OrderedDict()
        """By trace id, the one idle for longest first."""
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue with the traces that were open when the last server stopped, and start looking for idle ones."""
        after = None
        while True:
            page = await self._store.query_rollouts(
                queue_in=[QUEUE], status_in=["preparing", "running"], after=after, limit=PAGE
            )
            for rollout in page:
                trace_id = rollout.metadata.get("trace_id")
                if isinstance(trace_id, str) and rollout.metadata.get("source") == SOURCE:
                    self._open[trace_id] = _Trace(time.monotonic())
            if len(page) < PAGE:
                break
            after = page[-1].rollout_id
        self._checking = asyncio.create_task(self._check_regularly())

    async def close(self) -> None:
        """Stop looking for idle traces. Open traces stay open for the next server."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})

    async def adopt(self, spans: Sequence[Decoded]) -> list[tuple[AttemptIds, Decoded]]:
        """The spans with the ids of their attempts, which are created if they do not exist."""
        first = {span.trace_id: span for span in reversed(spans) if span.trace_id not in self._open}
        await asyncio.gather(
            *(self._begin(trace_id, span.resource.get("service.name")) for trace_id, span in first.items())
        )
        return [(ids_of_trace(span.trace_id), span) for span in spans]

    async def begin(self, trace_id: str) -> AttemptIds:
        """The attempt of a trace of which only the id is known, created if it does not exist."""
        if (trace := self._open.get(trace_id)) is not None:
            trace.last_span = time.monotonic()
            self._open.move_to_end(trace_id)
        else:
            await self._begin(trace_id, None)
        return ids_of_trace(trace_id)

    async def _begin(self, trace_id: str, service: Any) -> None:
        rollout_id, attempt_id = ids_of_trace(trace_id)
        metadata: dict[str, Any] = {"source": SOURCE, "trace_id": trace_id}
        if isinstance(service, str):
            metadata["service"] = service
        try:
            started = await self._store.start_rollout(
                None, metadata=metadata, rollout_id=rollout_id, queue=QUEUE, claim_id=_claim_id(trace_id)
            )
        except ConflictError:  # the rollout has already finished
            return
        if started.attempt.attempt_id == attempt_id and started.status not in FINISHED:
            self._open[trace_id] = _Trace(time.monotonic())

    async def record(self, spans: Iterable[Decoded]) -> None:
        """Note that these spans were stored, and finish the traces whose root span is among them."""
        roots: list[Decoded] = []
        for span in spans:
            trace = self._open.get(span.trace_id)
            if trace is not None:
                trace.last_span = time.monotonic()
                self._open.move_to_end(span.trace_id)
                if span.parent_id is None:
                    roots.append(span)
        await asyncio.gather(*(self._finish(root.trace_id, _status(root), root) for root in roots))

    async def _finish(self, trace_id: str, status: AttemptStatus, root: Decoded | None) -> None:
        rollout_id, attempt_id = ids_of_trace(trace_id)
        try:
            if root is not None and (task := _input(root)) is not None:
                await self._store.update_rollout(rollout_id, input=task)
            metadata = UNSET if root is not None else {"incomplete": "its root span has not arrived"}
            await self._store.update_attempt(rollout_id, attempt_id, status=status, metadata=metadata)
        except (ConflictError, NotFoundError) as error:
            logger.info("the trace %s has already been finished: %s", trace_id, error)
        self._open.pop(trace_id, None)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(min(CHECK_SECONDS, self._idle))
            while idle := self._idle_traces():
                try:
                    await asyncio.gather(*(self._finish(trace_id, "succeeded", None) for trace_id in idle))
                except StoreError as error:
                    logger.warning("could not finish %d idle traces, trying again: %s", len(idle), error)
                    break

    def _idle_traces(self) -> list[str]:
        """The next batch of traces that are idle for too long or exceed MAX_OPEN."""
        deadline, excess = time.monotonic() - self._idle, len(self._open) - MAX_OPEN
        first = list(islice(self._open.items(), BATCH))
        return [
            trace_id for index, (trace_id, trace) in enumerate(first) if trace.last_span < deadline or index < excess
        ]


def _status(root: Decoded) -> AttemptStatus:
    return "failed" if root.status_code == "ERROR" else "succeeded"


def _input(root: Decoded) -> Any:
    """The input of the program according to its root span."""
    values = (root.attributes.get(name) for name in (names.OPERATION_INPUT, names.INPUT_MESSAGES))
    return next((value for value in values if value is not None), None)
