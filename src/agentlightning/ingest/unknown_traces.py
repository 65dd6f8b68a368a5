"""Traces of programs nobody has told about rollouts, kept as rollouts of their own, so that one can learn from them.

Each unknown trace becomes one rollout with one attempt, in the queue `traces`. Both ids follow from the trace id, so
that a repeated request, another server on the same database, or this one after a restart find the same rollout. It has
succeeded, or failed, as its root span says, once that has arrived; spans that come later still join it. A trace whose
root never comes (it began elsewhere, say) has succeeded once it was silent for `idle_seconds`.
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
from agentlightning.rollouts import FINISHED, AttemptStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.ids import claimed_id
from agentlightning.store.types import UNSET
from agentlightning.tracing.otlp.decode import Decoded

logger = logging.getLogger(__name__)

QUEUE: Final = "traces"
SOURCE: Final = "otlp"
IDLE_SECONDS: Final = 600.0
LOOK_SECONDS: Final = 5.0
"""How often silent traces are looked for."""
AT_ONCE: Final = 256
"""Silent traces that are finished together."""
MAX_OPEN: Final = 100_000
"""Beyond so many open traces those that were silent for longest are finished early."""
PAGE: Final = 1000

Ids = tuple[str, str]


def ids_of_trace(trace_id: str) -> Ids:
    """(rollout_id, attempt_id) of an adopted trace."""
    return f"ro-{trace_id}", claimed_id(_claim(trace_id), 0)


def _claim(trace_id: str) -> str:
    return f"trace-{trace_id}"


@dataclass(slots=True)
class _Trace:
    heard: float
    """When it last said something (monotonic seconds)."""


class Adopter:
    """Makes rollouts of unknown traces and finishes them."""

    def __init__(self, store: LightningStoreBase, idle_seconds: float = IDLE_SECONDS) -> None:
        self._store = store
        self._idle = idle_seconds
        self._open: OrderedDict[str, _Trace] = OrderedDict()
        """By trace id; the one that was silent for longest first."""
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take up the traces that were open when the last server ended, and look for silent ones from now on."""
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
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop looking. What is open stays open: the next server takes it up."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def adopt(self, spans: Sequence[Decoded]) -> list[tuple[Ids, Decoded]]:
        """The spans with their owners, which exist from now on."""
        first = {span.trace_id: span for span in reversed(spans) if span.trace_id not in self._open}
        await asyncio.gather(
            *(self._begin(trace_id, span.resource.get("service.name")) for trace_id, span in first.items())
        )
        return [(ids_of_trace(span.trace_id), span) for span in spans]

    async def begin(self, trace_id: str) -> Ids:
        """The owner of a trace of which nothing but its id is known yet, which exists from now on."""
        if (trace := self._open.get(trace_id)) is not None:
            trace.heard = time.monotonic()
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
                None, metadata=metadata, rollout_id=rollout_id, queue=QUEUE, claim_id=_claim(trace_id)
            )
        except ConflictError:  # it was begun and has ended
            return
        if started.attempt.attempt_id == attempt_id and started.status not in FINISHED:
            self._open[trace_id] = _Trace(time.monotonic())

    async def heard(self, spans: Iterable[Decoded]) -> None:
        """These spans are kept now: note that their traces live, and finish those whose root is among them."""
        roots: list[Decoded] = []
        for span in spans:
            trace = self._open.get(span.trace_id)
            if trace is not None:
                trace.heard = time.monotonic()
                self._open.move_to_end(span.trace_id)
                if span.parent_id is None:
                    roots.append(span)
        await asyncio.gather(*(self._finish(root.trace_id, _status(root), root) for root in roots))

    async def _finish(self, trace_id: str, status: AttemptStatus, root: Decoded | None) -> None:
        rollout_id, attempt_id = ids_of_trace(trace_id)
        try:
            if root is not None and (given := _input(root)) is not None:
                await self._store.update_rollout(rollout_id, input=given)
            metadata = UNSET if root is not None else {"incomplete": "its root span has not arrived"}
            await self._store.update_attempt(rollout_id, attempt_id, status=status, metadata=metadata)
        except (ConflictError, NotFoundError) as error:
            logger.info("the trace %s was ended by somebody else: %s", trace_id, error)
        self._open.pop(trace_id, None)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, self._idle))
            while silent := self._silent():
                try:
                    await asyncio.gather(*(self._finish(trace_id, "succeeded", None) for trace_id in silent))
                except StoreError as error:
                    logger.warning("could not finish %d silent traces, trying again: %s", len(silent), error)
                    break

    def _silent(self) -> list[str]:
        """Some of those that were silent for too long, or are too many."""
        before, spare = time.monotonic() - self._idle, len(self._open) - MAX_OPEN
        first = list(islice(self._open.items(), AT_ONCE))
        return [trace_id for place, (trace_id, trace) in enumerate(first) if trace.heard < before or place < spare]


def _status(root: Decoded) -> AttemptStatus:
    return "failed" if root.status_code == "ERROR" else "succeeded"


def _input(root: Decoded) -> Any:
    """What the program was asked, as its root span has it."""
    found = (root.attributes.get(name) for name in (names.OPERATION_INPUT, names.INPUT_MESSAGES))
    return next((value for value in found if value is not None), None)
